//! Whether a program can be run with a preloaded library. The loader is silent about programs that
//! cannot, or breaks them.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};

use super::elf::Elf;

/// How many scripts may be interpreters of each other.
const MAX_SCRIPTS: usize = 4;
/// Programs that replace the same functions.
const REPLACING: [&str; 2] = ["valgrind", "valgrind.bin"];
/// Parts of the names of libraries that replace the same functions, and what they belong to.
const SANITIZERS: [(&str, &str); 5] = [
    ("libasan", "AddressSanitizer"),
    ("libclang_rt.asan", "AddressSanitizer"),
    ("libtsan", "ThreadSanitizer"),
    ("libhwasan", "HWAddressSanitizer"),
    ("libmsan", "MemorySanitizer"),
];
/// Symbols of sanitizers that are linked into a program.
const SANITIZER_SYMBOLS: [(&str, &str); 3] = [
    ("__asan_init", "AddressSanitizer"),
    ("__tsan_init", "ThreadSanitizer"),
    ("__msan_init", "MemorySanitizer"),
];

/// Finds a command as a shell does.
pub(super) fn find(name: &OsStr) -> anyhow::Result<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Ok(name.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_program = |file: &PathBuf| {
        fs::metadata(file).is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(is_program)
        .with_context(|| format!("there is no command {} in the PATH", name.display()))
}

/// Fails, with the reason, if a library cannot be preloaded into the program.
pub(super) fn check(file: &Path) -> anyhow::Result<()> {
    let mut file = file.to_owned();
    for _ in 0..MAX_SCRIPTS {
        check_name(&file)?;
        check_rights(&file)?;
        match interpreter(&file)? {
            Some(next) => file = find(&next)?,
            None => return check_binary(&file),
        }
    }
    bail!("{} is a script of a script of a script; name the program itself", file.display())
}

fn check_name(file: &Path) -> anyhow::Result<()> {
    let name = file.file_name().unwrap_or_default();
    ensure!(
        !REPLACING.iter().any(|known| name == *known),
        "{} replaces memcpy and malloc itself, and would watch Memferry in place of the program; run it \
         without `memferry run`",
        name.display()
    );
    Ok(())
}

/// The loader ignores preloaded libraries in programs that change the user, the group or the
/// capabilities.
fn check_rights(file: &Path) -> anyhow::Result<()> {
    let found =
        fs::metadata(file).with_context(|| format!("{} cannot be found", file.display()))?;
    ensure!(found.is_file(), "{} is no program", file.display());
    let mode = found.mode();
    let is_setgid = mode & (libc::S_ISGID | libc::S_IXGRP) == libc::S_ISGID | libc::S_IXGRP;
    let changes_user =
        mode & libc::S_ISUID != 0 && found.uid() != rustix::process::geteuid().as_raw();
    let changes_group = is_setgid && found.gid() != rustix::process::getegid().as_raw();
    ensure!(
        !changes_user && !changes_group,
        "{} is a set-uid or set-gid program, into which the loader preloads nothing; run it as the user \
         whose rights it takes",
        file.display()
    );
    let mut capabilities = [0u8; 64];
    let has_capabilities =
        rustix::fs::getxattr(file, c"security.capability", &mut capabilities).is_ok();
    ensure!(
        !has_capabilities || rustix::process::geteuid().is_root(),
        "{} has capabilities of its own, so that the loader preloads nothing into it; run it as root, \
         or remove them by `setcap -r`",
        file.display()
    );
    Ok(())
}

/// The interpreter of a script; `None` for any other file.
fn interpreter(file: &Path) -> anyhow::Result<Option<OsString>> {
    let mut start = Vec::new();
    let opened =
        fs::File::open(file).with_context(|| format!("{} cannot be read", file.display()))?;
    opened.take(4096).read_to_end(&mut start)?;
    let Some(line) = start.strip_prefix(b"#!") else { return Ok(None) };
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let first = words.next().with_context(|| format!("{} names no interpreter", file.display()))?;
    // `env` looks the next word up.
    let is_env = Path::new(OsStr::from_bytes(first)).file_name() == Some(OsStr::new("env"));
    let is_word = |word: &&[u8]| !word.starts_with(b"-") && !word.contains(&b'=');
    let next = if is_env { words.find(is_word) } else { None };
    Ok(Some(OsString::from_vec(next.unwrap_or(first).to_vec())))
}

fn check_binary(file: &Path) -> anyhow::Result<()> {
    let name = file.display();
    let bytes = fs::read(file).with_context(|| format!("{name} cannot be read"))?;
    let Some(elf) = Elf::parse(&bytes) else {
        bail!("{name} is no program for 64-bit x86, which `memferry run` needs");
    };
    let Some(loader) = elf.interpreter() else {
        bail!(
            "{name} is linked statically: nothing can be preloaded into it; link it with the shared C \
             library, without -static"
        );
    };
    ensure!(
        !loader.contains("ld-musl"),
        "{name} is linked with musl ({loader}), and the library needs the C library of GNU; build it for \
         a target such as x86_64-unknown-linux-gnu"
    );
    let needed = elf.needed();
    let shared = SANITIZERS.iter().find(|(part, _)| needed.iter().any(|it| it.contains(part)));
    let is_defined = |symbol: &str| elf.symbols().iter().any(|it| it.name == symbol);
    let linked = || SANITIZER_SYMBOLS.iter().find(|(symbol, _)| is_defined(symbol));
    if let Some((_, sanitizer)) = shared.or_else(linked) {
        bail!(
            "{name} is built with {sanitizer}, which replaces memcpy and malloc itself; build it without, \
             or run it without `memferry run`"
        );
    }
    Ok(())
}
