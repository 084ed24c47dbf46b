//! The safe calls permit no access to a buffer in flight, and return it no earlier than at
//! completion: programs that try otherwise do not compile. The first line of each program in
//! `tests/ui` names the error it must give, or says that it must compile, which shows that the
//! others fail for that reason alone.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of this test's program and of the libraries it was linked with.
fn deps() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

/// The libraries that the programs use. There may be several of each, of earlier builds.
const LIBRARIES: [&str; 3] = ["memferry_copy", "memferry_engine", "memferry_sys"];

/// Uses all of them; compiles if the second was built with the third, and the first with both.
const FITTING: &str = "
    pub fn device(device: std::sync::Arc<dyn memferry_sys::device::DmaDevice>) {
        // SAFETY: it is never called.
        drop(unsafe { memferry_engine::nic::NicEngine::over(device, Default::default()) });
    }
    pub fn told(told: memferry_engine::completion::Notification) -> memferry_copy::Notification { told }
    fn main() {}
";

/// All builds of a library, the last one first.
fn builds(crate_name: &str) -> Vec<PathBuf> {
    let prefix = format!("lib{crate_name}-");
    let found = std::fs::read_dir(deps()).unwrap().filter_map(|entry| {
        let path = entry.ok()?.path();
        let name = path.file_name()?.to_str()?;
        let is_library = name.starts_with(&prefix) && name.ends_with(".rlib");
        is_library.then_some((path.metadata().ok()?.modified().ok()?, path))
    });
    let mut found: Vec<_> = found.collect();
    found.sort();
    found.into_iter().rev().map(|(_, path)| path).collect()
}

/// The latest builds of all libraries that match each other.
fn libraries(folder: &Path) -> [PathBuf; 3] {
    let program = folder.join("fitting.rs");
    std::fs::write(&program, FITTING).unwrap();
    let [copies, engines, systems] = LIBRARIES.map(builds);
    let mut errors = String::from("cargo builds the libraries before their tests");
    for copy in &copies {
        for engine in &engines {
            for system in &systems {
                let chosen = [copy, engine, system].map(PathBuf::clone);
                match compile(&program, &chosen, folder) {
                    (true, _) => return chosen,
                    (false, why) => errors = why,
                }
            }
        }
    }
    panic!("no libraries fit each other: {errors}");
}

fn compile(program: &Path, libraries: &[PathBuf; 3], folder: &Path) -> (bool, String) {
    let externs = LIBRARIES.iter().zip(libraries);
    let output = Command::new(option_env!("RUSTC").unwrap_or("rustc"))
        .args(["--edition", "2024", "--emit", "metadata", "--out-dir"])
        .arg(folder)
        .args(externs.map(|(name, path)| format!("--extern={name}={}", path.display())))
        .arg("-L")
        .arg(format!("dependency={}", deps().display()))
        .arg(program)
        .output()
        .expect("the compiler that built this test is there");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_buffer_in_flight_cannot_be_touched() {
    let outputs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("compile_fail");
    std::fs::create_dir_all(&outputs).unwrap();
    let libraries = libraries(&outputs);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ui");
    let mut programs = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let program = entry.unwrap().path();
        let text = std::fs::read_to_string(&program).unwrap();
        let (compiled, errors) = compile(&program, &libraries, &outputs);
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
