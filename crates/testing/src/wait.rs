//! Waiting for a state instead of a fixed time.

use std::io::Write;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// The timeout of [`until`]. Only a hang takes this long, even on a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(200);

/// Polls until `is_so` returns true.
///
/// # Panics
///
/// If that takes longer than [`TIMEOUT`].
#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    let mut polls = 0u32;
    while !is_so() {
        assert!(Instant::now() < deadline, "timeout: waited until {what}");
        // The thread that changes the state may need this core.
        polls = polls.saturating_add(1);
        match polls {
            0..1000 => thread::yield_now(),
            _ => thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// A guard that ends the whole test process if it is not dropped in time, for calls that would
/// block forever if the tested code is wrong. A failed assertion is not sufficient there, because
/// it waits for the threads of its scope.
#[derive(Debug)]
pub struct HangGuard {
    _over: mpsc::Sender<()>,
}

/// The timeout of a [`HangGuard`].
const HANG_TIMEOUT: Duration = Duration::from_secs(300);

impl HangGuard {
    /// Starts the timeout. The error message names `what`.
    #[must_use]
    pub fn new(what: &str) -> Self {
        Self::with_timeout(what, HANG_TIMEOUT)
    }

    fn with_timeout(what: &str, timeout: Duration) -> Self {
        let (over, is_over) = mpsc::channel::<()>();
        let line = format!("hangs for {timeout:?}: {what}\n");
        thread::spawn(move || {
            if is_over.recv_timeout(timeout) == Err(mpsc::RecvTimeoutError::Timeout) {
                let _ = std::io::stderr().write_all(line.as_bytes());
                std::process::abort();
            }
        });
        Self { _over: over }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Not a test of its own: another test runs it in a separate process.
    #[test]
    #[ignore = "part of another test"]
    fn a_test_that_hangs() {
        let _guard = HangGuard::with_timeout("a park", Duration::from_millis(10));
        loop {
            thread::park();
        }
    }

    #[test]
    fn a_test_that_hangs_is_ended_and_told() {
        drop(HangGuard::with_timeout("nothing", Duration::from_secs(3600)));
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "wait::tests::a_test_that_hangs", "--ignored"]);
        let output = command.output().unwrap();
        assert!(!output.status.success());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("hangs for 10ms: a park"), "{said}");
    }
}
