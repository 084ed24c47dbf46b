//! The shared libraries of a program. The program's own loader lists them, because only the loader
//! knows all search rules. It does not execute the code of the program.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::PackError;

/// Variables that would make the loader find libraries on the host that it does not find in the
/// machine.
const LOADER_VARIABLES: [&str; 3] = ["LD_LIBRARY_PATH", "LD_PRELOAD", "LD_AUDIT"];

/// The files that a program needs, including its loader.
pub(super) fn of(program: &Path, loader: &Path) -> Result<Vec<PathBuf>, PackError> {
    let mut command = Command::new(loader);
    command.arg("--list").arg(program).stdin(Stdio::null());
    for variable in LOADER_VARIABLES {
        command.env_remove(variable);
    }
    let failed = |error| PackError::File { path: loader.to_owned(), error };
    let output = command.output().map_err(failed)?;
    let no_library =
        |said: &str| PackError::NoLibrary { path: program.to_owned(), said: said.into() };
    if !output.status.success() {
        return Err(no_library(String::from_utf8_lossy(&output.stderr).trim()));
    }
    let list = String::from_utf8_lossy(&output.stdout);
    let mut libraries = files_in(&list).map_err(no_library)?;
    if !libraries.iter().any(|library| library == loader) {
        libraries.push(loader.to_owned());
    }
    Ok(libraries)
}

/// The files in the output of `ld.so --list`, whose lines are `name => /path (address)` or `/path
/// (address)`. A line without a path names a library of the kernel (vDSO). The error is the line of
/// a library that was not found.
fn files_in(list: &str) -> Result<Vec<PathBuf>, &str> {
    let mut files = Vec::new();
    for line in list.lines() {
        if line.contains("=> not found") {
            return Err(line.trim());
        }
        let file = line.rsplit_once("=>").map_or(line, |(_, file)| file).trim();
        let file = file.rsplit_once(" (0x").map_or(file, |(file, _)| file);
        if file.starts_with('/') {
            files.push(PathBuf::from(file));
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_files_and_what_the_kernel_provides() {
        let list = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                    \tlibgcc_s.so.1 => /lib/x86_64-linux-gnu/libgcc_s.so.1 (0x00007f57)\n\
                    \tlibodd.so => /a folder (1)/libodd.so (0x00007f57)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f58)\n\
                    \tstatically linked\n";
        let files = files_in(list).unwrap();
        let expected = [
            "/lib/x86_64-linux-gnu/libgcc_s.so.1",
            "/a folder (1)/libodd.so",
            "/lib64/ld-linux-x86-64.so.2",
        ];
        assert_eq!(files, expected.map(PathBuf::from));
    }

    #[test]
    fn a_missing_library_is_named() {
        let list = "\tlibthere.so => /lib/libthere.so (0x1)\n\tlibgone.so.2 => not found\n";
        assert_eq!(files_in(list), Err("libgone.so.2 => not found"));
    }
}
