//! Tests that cannot run on this machine.

use std::collections::HashSet;
use std::env;
use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;

use crate::requirement::{Required, Requirement};

/// The variable with the requirements that must be met: `all`, or names separated by commas.
const REQUIRE: &str = "MEMFERRY_REQUIRE";
/// The variable that names a file to which each skipped test appends a line. `cargo xtask test`
/// counts these lines.
const LOG: &str = "MEMFERRY_SKIP_LOG";

static REQUIRED: LazyLock<Result<Required, String>> =
    LazyLock::new(|| env::var(REQUIRE).unwrap_or_default().parse());

/// Whether tests with this requirement must not be skipped.
///
/// # Panics
///
/// If `MEMFERRY_REQUIRE` contains an unknown word.
pub fn is_required(requirement: Requirement) -> bool {
    match &*REQUIRED {
        Ok(required) => required.includes(requirement),
        Err(error) => panic!("{REQUIRE}: {error}"),
    }
}

/// Reports that the running test, or a part of it, is skipped because a requirement is not met. The
/// test returns after this call. `why` says what was tried and how to meet the requirement.
///
/// The line is written directly to standard error, because the test harness hides the output of
/// passed tests.
///
/// # Panics
///
/// If `MEMFERRY_REQUIRE` contains the requirement: then the test has failed.
pub fn skip(requirement: Requirement, why: impl Display) {
    let thread = thread::current();
    skip_test(thread.name().unwrap_or("a test"), requirement, why);
}

/// As [`skip`], for a test whose name is not the name of the thread.
///
/// # Panics
///
/// If `MEMFERRY_REQUIRE` contains the requirement: then the test has failed.
pub fn skip_test(test: &str, requirement: Requirement, why: impl Display) {
    static REPORTED: Mutex<Option<HashSet<(String, Requirement)>>> = Mutex::new(None);
    assert!(!is_required(requirement), "{requirement} is required ({REQUIRE}), but: {why}");
    let mut told = REPORTED.lock().unwrap_or_else(PoisonError::into_inner);
    if !told.get_or_insert_default().insert((test.into(), requirement)) {
        return;
    }
    let why = why.to_string().replace('\n', " ");
    let line = format!("SKIPPED {test}: {requirement}: {why}\n");
    // A single write keeps the line intact, because other tests write at the same time.
    let _ = std::io::stderr().write_all(line.as_bytes());
    let Some(log) = env::var_os(LOG) else { return };
    let package = env::var("CARGO_PKG_NAME").unwrap_or_default();
    let entry = format!("{requirement}\t{package}\t{test}\t{why}\n");
    let written = OpenOptions::new().create(true).append(true).open(&log);
    let written = written.and_then(|mut file| file.write_all(entry.as_bytes()));
    written.unwrap_or_else(|error| panic!("{LOG}={}: {error}", log.display()));
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Output};

    use super::*;

    /// Not a test of its own: other tests run it in a separate process.
    #[test]
    #[ignore = "part of other tests"]
    fn a_test_that_needs_a_gpu_and_libfabric() {
        skip(Requirement::Gpu, "none\nis here");
        skip(Requirement::Gpu, "none is here");
        skip(Requirement::Libfabric, "apt install libfabric-dev");
    }

    fn run(require: &str, log: &str) -> Output {
        Command::new(env::current_exe().unwrap())
            .args(["--exact", "skip::tests::a_test_that_needs_a_gpu_and_libfabric", "--ignored"])
            .env_remove(LOG)
            .envs((!log.is_empty()).then_some((LOG, log)))
            .env(REQUIRE, require)
            .output()
            .unwrap()
    }

    #[test]
    fn a_skipped_test_is_seen_although_it_passes_and_is_counted_once() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let output = run("", log.to_str().unwrap());
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        let lines: Vec<_> = said.lines().filter(|line| line.starts_with("SKIPPED ")).collect();
        assert_eq!(lines.len(), 2, "{said}");
        assert!(lines[0].ends_with("a_gpu_and_libfabric: gpu: none is here"), "{said}");
        let log = std::fs::read_to_string(log).unwrap();
        let entries: Vec<Vec<_>> = log.lines().map(|line| line.split('\t').collect()).collect();
        assert_eq!(entries.len(), 2, "{log}");
        assert_eq!((entries[0][0], entries[1][0]), ("gpu", "libfabric"));
        assert_eq!(entries[1][3], "apt install libfabric-dev");
    }

    #[test]
    fn what_is_required_may_not_be_skipped() {
        for require in ["all", "libfabric", "gpu"] {
            let output = run(require, "");
            assert!(!output.status.success(), "{require}: {output:?}");
            let said = String::from_utf8(output.stdout).unwrap();
            assert!(said.contains("is required (MEMFERRY_REQUIRE), but:"), "{said}");
        }
        assert!(run("qemu", "").status.success());
    }

    #[test]
    fn a_requirement_that_does_not_exist_fails_the_test_that_would_be_skipped() {
        assert!(!run("everything", "").status.success());
    }
}
