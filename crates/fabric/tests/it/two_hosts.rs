//! An MPI job on two hosts, which are two network namespaces of this machine.
//!
//! The tests need root, Open MPI with libfabric and its compiler; for windows, an MPICH that MEMFERRY_MPICH
//! names (a folder that contains bin/mpicc and bin/mpirun). Without them a test prints that, and checks
//! nothing.

use std::path::{Path, PathBuf};
use std::process::Command;

use memferry_testing::mpi::SharedFiles;
use memferry_testing::{Requirement, skip};

/// A folder that contains the provider alone.
fn provider(folder: &Path) -> PathBuf {
    let program = std::env::current_exe().expect("this program has a file");
    // Cargo puts the library beside the tests that depend on it.
    let built = program.parent().expect("it lies in a folder of cargo's");
    let only = folder.join("provider");
    std::fs::create_dir(&only).expect("a folder can be made");
    let file = "libmemferry_fi.so";
    std::fs::copy(built.join(file), only.join(file)).expect("the provider was built");
    only
}

/// Runs a program on two hosts with a launcher, and returns its output. Returns `None` if it was skipped.
fn run(folder: &Path, launcher: &Path, program: &Path, words: &[&str]) -> Option<String> {
    run_with(folder, launcher, program, words, &[])
}

fn run_with(
    folder: &Path,
    launcher: &Path,
    program: &Path,
    words: &[&str],
    settings: &[(&str, &str)],
) -> Option<String> {
    let _files = SharedFiles::guard();
    let ran = Command::new(tests().join("two_hosts.sh"))
        .env("MPIRUN", launcher)
        .envs(settings.iter().copied())
        .arg(provider(folder))
        .arg(program)
        .args(words)
        .output()
        .expect("the script can be run");
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    let complained = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{said}{complained}");
    if said.starts_with("skipped") {
        skip(Requirement::Namespaces, said.trim());
        return None;
    }
    Some(said)
}

fn tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

/// Compiles a program with Open MPI, if it is installed.
fn compile(folder: &Path, source: &str) -> Option<PathBuf> {
    let program = folder.join("program");
    let compiled = Command::new("mpicc")
        .args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-o"])
        .args([&program, &tests().join(source)])
        .output();
    let Ok(compiled) = compiled else {
        let why = "mpicc is not installed: apt install openmpi-bin libopenmpi-dev";
        skip(Requirement::OpenMpi, why);
        return None;
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    Some(program)
}

#[test]
fn a_receive_from_a_host_that_vanishes_ends() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let Some(program) = compile(folder.path(), "two_hosts_vanish.c") else { return };
    let settings = [("RANKS_EACH", "1"), ("VANISHES", "1")];
    let mpirun = Path::new("mpirun");
    if let Some(said) = run_with(folder.path(), mpirun, &program, &[], &settings) {
        assert!(said.contains("the receive failed"), "{said}");
    }
}

#[test]
fn an_mpi_job_spans_two_hosts() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let Some(program) = compile(folder.path(), "two_hosts.c") else { return };
    if let Some(said) = run(folder.path(), Path::new("mpirun"), &program, &[]) {
        assert!(said.contains("all bytes of 4 ranks arrived"), "{said}");
    }
}

#[test]
fn windows_of_mpi_span_two_hosts() {
    let Some(mpich) = std::env::var_os("MEMFERRY_MPICH").map(PathBuf::from) else {
        return skip(Requirement::Mpich, "MEMFERRY_MPICH names no environment with its wheel");
    };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let compiled = Command::new(tests().join("mpi/build"))
        .args([&mpich.join("bin/mpicc"), folder.path()])
        .output()
        .expect("the shell is there");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let (launcher, program) = (mpich.join("bin/mpirun"), folder.path().join("mpi-check"));
    let words = ["one-sided-fence", "one-sided-lock", "one-sided-post"];
    if let Some(said) = run(folder.path(), &launcher, &program, &words) {
        assert!(said.contains("checks passed") && !said.contains("left out"), "{said}");
    }
}
