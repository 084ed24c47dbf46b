//! What a sanitizer's programs are linked with beside their own code.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

/// The functions of the standard library whose calls `thread_runtime.rs` takes: its name for each, and how the
/// symbol ends. What stands in front differs between compilers.
const IN_STD: [(&str, &str); 8] = [
    ("mutex_lock", "3std3sys4sync5mutex5futexNtB2_5Mutex14lock_contended"),
    ("read_lock", "3std3sys4sync6rwlock5futexNtB2_6RwLock14read_contended"),
    ("write_lock", "3std3sys4sync6rwlock5futexNtB2_6RwLock15write_contended"),
    ("wait", "3std3sys4sync7condvar5futexNtB2_7Condvar4wait"),
    ("wait_timeout", "3std3sys4sync7condvar5futexNtB2_7Condvar12wait_timeout"),
    ("once", "3std3sys4sync4once5futexNtB5_4Once4call"),
    ("scope_end", "3std6thread6scopedNtB2_9ScopeData29decrement_num_running_threads"),
    ("barrier", "3std4sync7barrierNtB5_7Barrier4wait"),
];

/// The functions of the sanitizer's runtime for reads of each width.
const IN_RUNTIME: [(&str, &str); 7] = [
    ("load", "load"),
    ("swap", "exchange"),
    ("add", "fetch_add"),
    ("sub", "fetch_sub"),
    ("and", "fetch_and"),
    ("or", "fetch_or"),
    ("exchange", "compare_exchange_val"),
];

/// Compiles `thread_runtime.rs`, and returns the argument by which the linker puts its functions in place.
pub(super) fn teach_thread_sanitizer(folder: &Path) -> anyhow::Result<String> {
    let standard = find_standard_library()?;
    let standard = fs::read(&standard).with_context(|| standard.display().to_string())?;
    let mut names = vec![("fence".to_owned(), "__tsan_atomic_thread_fence".to_owned())];
    for (name, tail) in IN_STD {
        let symbol = symbol_that_ends_in(tail, &standard)
            .with_context(|| format!("this compiler's std has no {tail}: see linking.rs"))?;
        names.push((name.into(), symbol));
    }
    for bits in [8, 32, 64] {
        let function = |(name, of)| (format!("{name}{bits}"), format!("__tsan_atomic{bits}_{of}"));
        names.extend(IN_RUNTIME.map(function));
    }

    let (object, symbols) = (folder.join("thread_runtime.o"), folder.join("symbols"));
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("src/faults/sanitize/thread_runtime.rs");
    let mut compiler = Command::new("rustc");
    compiler.args(["--edition", "2024", "--crate-type", "lib", "-Copt-level=2"]);
    run(compiler.arg(source).arg(format!("--emit=obj={}", object.display())))?;
    let line = |(ours, theirs): &(String, String)| {
        format!("wrapped_{ours} __wrap_{theirs}\nreal_{ours} __real_{theirs}\n")
    };
    fs::write(&symbols, names.iter().map(line).collect::<String>())?;
    run(Command::new("objcopy")
        .arg(format!("--redefine-syms={}", symbols.display()))
        .arg(&object))?;

    let arguments = folder.join("wrap.args");
    let wrapped: String =
        names.iter().map(|(_, theirs)| format!("-Wl,--wrap={theirs}\n")).collect();
    fs::write(&arguments, format!("{wrapped}{}\n", object.display()))?;
    Ok(format!("@{}", arguments.display()))
}

/// An error if the compiler has not brought the runtimes.
pub(super) fn check_runtimes() -> anyhow::Result<()> {
    for name in ["asan", "tsan"] {
        let runtime = libraries()?.join(format!("librustc-stable_rt.{name}.a"));
        if !runtime.is_file() {
            bail!(
                "{} is not there: sanitizers need a stable toolchain of rustup",
                runtime.display()
            );
        }
    }
    Ok(())
}

/// Writes a C compiler that instruments as the Rust compiler does, and links Rust's runtime in place of its own:
/// there can be only one in a program.
pub(super) fn c_compiler(
    folder: &Path,
    option: &str,
    runtime: &str,
    arguments: &[String],
) -> anyhow::Result<PathBuf> {
    let runtime = libraries()?.join(format!("librustc-stable_rt.{runtime}.a"));
    let (script, runtime) = (folder.join("cc"), runtime.display());
    let arguments = arguments.join(" ");
    // Without the default libraries there is no runtime of its own either. A library that is linked at run time
    // finds the runtime in the program, and has the arguments from its own linking. Reports need names.
    let text = format!(
        "#!/bin/sh\n\
         for argument; do shift; [ \"$argument\" = -Wl,--strip-debug ] || set -- \"$@\" \"$argument\"; done\n\
         case \"$*\" in *.a\\ *) arguments='{arguments}' ;; *) arguments= ;; esac\n\
         exec cc -fsanitize={option} -nodefaultlibs \"$@\" $arguments -Wl,--export-dynamic \
         -Wl,--whole-archive {runtime} -Wl,--no-whole-archive \
         -lm -ldl -lrt -lpthread -lgcc -lgcc_s -lc\n"
    );
    fs::write(&script, text)?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    Ok(script)
}

/// The folder of the compiler's own libraries.
fn libraries() -> anyhow::Result<PathBuf> {
    let output = Command::new("rustc").args(["--print", "sysroot"]).output().context("rustc")?;
    let root = String::from_utf8(output.stdout).context("the compiler's folder")?;
    Ok(Path::new(root.trim_end()).join("lib/rustlib").join(super::TARGET).join("lib"))
}

fn find_standard_library() -> anyhow::Result<PathBuf> {
    let is_it = |path: &Path| {
        path.extension().is_some_and(|extension| extension == "rlib")
            && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libstd-"))
    };
    let paths = fs::read_dir(libraries()?)?.filter_map(|entry| Some(entry.ok()?.path()));
    paths.into_iter().find(|path| is_it(path)).context("the standard library is not found")
}

/// A symbol among the names of an object file, which end with a zero each.
fn symbol_that_ends_in(tail: &str, object: &[u8]) -> Option<String> {
    let ended = [tail.as_bytes(), &[0]].concat();
    let begins = object.windows(ended.len()).enumerate().filter(|(_, window)| *window == ended);
    let symbol = |(at, _)| {
        let front = object[..at].rsplit(|byte| *byte == 0).next()?;
        let front = str::from_utf8(front).ok().filter(|front| front.starts_with("_R"))?;
        let is_symbol = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        front.bytes().all(is_symbol).then(|| format!("{front}{tail}"))
    };
    begins.into_iter().find_map(symbol)
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().to_owned();
    match command.status().with_context(|| format!("{} cannot be run", name.display()))? {
        status if status.success() => Ok(()),
        status => bail!("{}: {status}", name.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_symbol_is_found_by_its_end() {
        let object = b"\0_RNotSo.ends_so\0x_RNv_ends_so\0_RNvCs1_ends_so_no\0_RNvCs1_ends_so\0";
        assert_eq!(symbol_that_ends_in("ends_so", object).as_deref(), Some("_RNvCs1_ends_so"));
        assert_eq!(symbol_that_ends_in("other", object), None);
    }
}
