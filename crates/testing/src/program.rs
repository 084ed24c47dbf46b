//! Programs that a test creates and then runs.
//!
//! A test must not write the file of a program itself. Meanwhile another test of the same process
//! may fork: the child inherits the descriptor for writing until it calls `exec`, and in that time
//! the kernel refuses to run the file (`ETXTBSY`, "Text file busy"). Therefore a separate process
//! writes the file: that process does not fork, and after its exit no process has the file open for
//! writing.

use std::ffi::OsStr;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Copies a program to a path from which it can be run.
///
/// # Panics
///
/// If it cannot be copied.
pub fn copy_program(from: &Path, to: &Path) {
    let status = Command::new("cp").arg("--").args([from, to]).status().expect("there is a `cp`");
    assert!(status.success(), "{} cannot be copied to {}", from.display(), to.display());
}

/// Writes an executable program or script.
///
/// # Panics
///
/// If it cannot be written.
pub fn write_program(path: &Path, contents: impl AsRef<[u8]>) {
    let words = ["-c", "cat >\"$1\" && chmod 755 \"$1\"", "sh"].map(OsStr::new);
    let mut shell = Command::new("sh")
        .args(words)
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .expect("there is a shell");
    let mut input = shell.stdin.take().expect("the input is a pipe");
    input.write_all(contents.as_ref()).expect("the shell reads it");
    drop(input);
    let status = shell.wait().expect("the shell ends");
    assert!(status.success(), "{} cannot be written", path.display());
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    /// Repeatedly calls `make` and runs the program that it made, while another thread starts
    /// processes.
    fn beside_forks(make: impl Fn(&Path)) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let forks = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let _ = Command::new("true").status();
                }
            });
            let ran: Vec<_> = (0..100)
                .map(|round| {
                    let program = folder.path().join(round.to_string());
                    make(&program);
                    Command::new(program).stdout(Stdio::null()).status()
                })
                .collect();
            is_over.store(true, Ordering::Relaxed);
            forks.join().expect("processes can be started");
            for status in ran {
                assert!(status.expect("the program can be run").success());
            }
        });
    }

    #[test]
    fn a_copied_program_can_be_run_while_other_threads_fork() {
        let own = Path::new("/bin/true").canonicalize().expect("there is a program `true`");
        beside_forks(|path| copy_program(&own, path));
    }

    #[test]
    fn a_written_script_can_be_run_while_other_threads_fork() {
        beside_forks(|path| write_program(path, "#!/bin/sh\nexit 0\n"));
    }
}
