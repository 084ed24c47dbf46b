//! Additional objects and libraries that the programs of a sanitizer are linked with.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

/// The functions of the standard library that `thread_runtime.rs` wraps: the name there, and the
/// end of the mangled symbol. The beginning of a symbol differs between compilers.
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

/// The functions of the sanitizer's runtime for atomic reads of each width.
const IN_RUNTIME: [(&str, &str); 7] = [
    ("load", "load"),
    ("swap", "exchange"),
    ("add", "fetch_add"),
    ("sub", "fetch_sub"),
    ("and", "fetch_and"),
    ("or", "fetch_or"),
    ("exchange", "compare_exchange_val"),
];

/// Compiles `thread_runtime.rs`, and returns the linker argument that substitutes its functions.
pub(super) fn build_thread_runtime(folder: &Path) -> anyhow::Result<String> {
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

/// Fails if the sanitizer runtimes of the compiler are not installed.
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

/// Writes a wrapper script for the C compiler. The script instruments code for the sanitizer and
/// links Rust's sanitizer runtime instead of that of the C compiler, because a program can have
/// only one.
pub(super) fn c_compiler(
    folder: &Path,
    option: &str,
    runtime: &str,
    arguments: &[String],
) -> anyhow::Result<PathBuf> {
    let runtime = libraries()?.join(format!("librustc-stable_rt.{runtime}.a"));
    let (script, runtime) = (folder.join("cc"), runtime.display());
    let arguments = arguments.join(" ");
    // `-nodefaultlibs` also removes the C compiler's own runtime. A shared library finds the
    // runtime in the program, and gets the arguments when it is linked itself. Debug information is
    // kept, because reports need names.
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

/// The symbol that ends in `tail`, in the zero-terminated names of an object file.
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
