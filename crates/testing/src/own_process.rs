//! Tests that need a process of their own.

use std::env;
use std::io::Write;
use std::process::{Command, Stdio};
use std::thread;

/// The variable that names the test whose process this is.
const TEST: &str = "MEMFERRY_TEST_ALONE";

/// Returns whether this process runs the calling test alone. If not, runs the test in such a
/// process first; the calling test then has nothing left to do:
///
/// ```no_run
/// # use memferry_testing::in_own_process;
/// if !in_own_process() {
///     return;
/// }
/// ```
///
/// For tests that fork, count resources of the process, change its limits, filters or environment,
/// or need an address range that no other thread maps.
///
/// # Panics
///
/// If the test fails in its process; with the output of that process.
#[must_use]
pub fn in_own_process() -> bool {
    let name = test_name();
    if env::var_os(TEST).is_some_and(|test| *test == *name) {
        return true;
    }
    let output = rerun().env(TEST, name).output().expect("the test program starts again");
    let (said, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let has_run = said.contains("test result: ok. 1 passed");
    assert!(output.status.success() && has_run, "{}\n{said}\n{errors}", output.status);
    for line in errors.lines().filter(|line| line.starts_with("SKIPPED ")) {
        let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
    }
    false
}

/// A command that runs the calling test again, in another process and with visible output.
#[must_use]
pub fn rerun() -> Command {
    let mut command = Command::new(env::current_exe().expect("the path of the test program"));
    command
        .args(["--exact", &test_name(), "--include-ignored", "--nocapture"])
        .stdin(Stdio::null());
    command
}

/// The name of the calling test, with its modules.
fn test_name() -> String {
    let thread = thread::current();
    thread.name().expect("the test harness names the thread of a test").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_in_its_own_process_has_another_process_id() {
        const STARTER: &str = "MEMFERRY_TEST_STARTER";
        let own = std::process::id().to_string();
        if env::var_os(TEST).is_none() {
            // SAFETY: no other test of this crate reads this variable.
            unsafe { env::set_var(STARTER, &own) };
        }
        if in_own_process() {
            assert_ne!(env::var(STARTER).unwrap(), own);
        }
    }

    /// Not a test of its own: another test runs it in a separate process.
    #[test]
    #[ignore = "part of another test"]
    fn a_test_that_fails_in_its_own_process() {
        assert!(!in_own_process(), "this is the process of the test");
    }

    #[test]
    fn a_failure_in_the_own_process_fails_the_test_with_its_output() {
        let name = "own_process::tests::a_test_that_fails_in_its_own_process";
        let output = Command::new(env::current_exe().unwrap())
            .args(["--exact", name, "--ignored"])
            .env_remove(TEST)
            .output()
            .unwrap();
        assert!(!output.status.success());
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains("this is the process of the test"), "{said}");
    }
}
