//! An MPI job over two hosts, which are two network namespaces of this one.
//!
//! Needs root, Open MPI with libfabric, and its compiler; without them it says so and checks nothing.

// A test that checks nothing says so.
#![allow(clippy::print_stderr)]

use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder with nothing but the provider in it.
fn provider(folder: &Path) -> PathBuf {
    let program = std::env::current_exe().expect("this program has a file");
    let built = program.parent().and_then(Path::parent).expect("it lies in a folder of cargo's");
    let only = folder.join("provider");
    std::fs::create_dir(&only).expect("a folder can be made");
    let file = "libmemferry_fi.so";
    std::fs::copy(built.join(file), only.join(file)).expect("the provider was built");
    only
}

#[test]
fn an_mpi_job_spans_two_hosts() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let program = folder.path().join("two_hosts");
    let compiled = Command::new("mpicc")
        .args(["-std=c11", "-O2", "-Wall", "-Wextra", "-o"])
        .args([&program, &tests.join("two_hosts.c")])
        .output();
    let Ok(compiled) = compiled else { return eprintln!("skipped: mpicc is not installed") };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(tests.join("two_hosts.sh"))
        .arg(provider(folder.path()))
        .arg(&program)
        .output()
        .expect("the script can be run");
    let said = String::from_utf8_lossy(&ran.stdout);
    let complained = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{said}{complained}");
    if said.starts_with("skipped") {
        return eprintln!("{}", said.trim());
    }
    assert!(said.contains("all bytes of 4 ranks arrived"), "{said}{complained}");
}
