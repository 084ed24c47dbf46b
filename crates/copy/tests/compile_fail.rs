//! The safe calls leave no way to touch a buffer in flight, nor to have it given back too early:
//! programs that try do not compile. Each
//! program in `tests/ui` says in its first line which error it must give, or that it must compile,
//! which shows that the others fail for the reason they name.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder in which cargo put this test and the libraries it was linked with.
fn deps() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

/// A library, as cargo built it last.
fn library(crate_name: &str) -> PathBuf {
    let prefix = format!("lib{crate_name}-");
    let found = std::fs::read_dir(deps()).unwrap().filter_map(|entry| {
        let path = entry.ok()?.path();
        let name = path.file_name()?.to_str()?;
        let is_library = name.starts_with(&prefix) && name.ends_with(".rlib");
        is_library.then_some((path.metadata().ok()?.modified().ok()?, path))
    });
    found.max().expect("cargo builds the library before its tests").1
}

fn compile(program: &Path) -> (bool, String) {
    let folder = std::env::temp_dir().join(format!("memferry-ui-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let libraries = ["memferry_copy", "memferry_engine", "memferry_sys"];
    let externs = libraries.map(|name| format!("--extern={name}={}", library(name).display()));
    let output = Command::new(option_env!("RUSTC").unwrap_or("rustc"))
        .args(["--edition", "2024", "--emit", "metadata", "--out-dir"])
        .arg(&folder)
        .args(externs)
        .arg("-L")
        .arg(format!("dependency={}", deps().display()))
        .arg(program)
        .output()
        .expect("the compiler that built this test is there");
    std::fs::remove_dir_all(&folder).unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_buffer_in_flight_cannot_be_touched() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ui");
    let mut programs = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let program = entry.unwrap().path();
        let text = std::fs::read_to_string(&program).unwrap();
        let (compiled, errors) = compile(&program);
        let name = program.display();
        match text.lines().next().unwrap_or_default().strip_prefix("// error: ") {
            Some(code) => {
                assert!(!compiled, "{name} compiles, and must not");
                assert!(errors.contains(code), "{name} fails without {code}:\n{errors}");
            }
            None => assert!(compiled, "{name} must compile:\n{errors}"),
        }
        programs += 1;
    }
    assert!(programs >= 16, "found only {programs} programs");
}
