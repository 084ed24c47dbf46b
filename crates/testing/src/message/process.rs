//! Other processes of a test: the test program itself, started again in a role.
//!
//! A test file with roles has a test [`ENTRY`] that only calls [`role`] and, in another process,
//! runs the role. A process starts in the entry of the file that calls [`command`]. Processes exit
//! with the test that started them.

use std::os::unix::process::CommandExt;
use std::panic::Location;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

/// The test in which the other processes start.
pub const ENTRY: &str = "other_processes_begin_here";
const ROLE: &str = "MEMFERRY_TEST_ROLE";
const PARENT: &str = "MEMFERRY_TEST_PARENT";

/// A command that starts another process in a role.
#[track_caller]
pub fn command(role: &str) -> Command {
    command_of(&std::env::current_exe().unwrap(), role, Location::caller())
}

/// The same, with a copy of the test program in another folder: another user may not access this
/// one.
#[track_caller]
pub fn command_in(folder: &Path, role: &str) -> Command {
    let copy = folder.join("test-program");
    if !copy.exists() {
        crate::copy_program(&std::env::current_exe().unwrap(), &copy);
    }
    command_of(&copy, role, Location::caller())
}

fn command_of(program: &Path, role: &str, caller: &Location) -> Command {
    let mut command = Command::new(program);
    command
        .args(["--exact", &entry_beside(caller.file()), "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env(PARENT, std::process::id().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

/// The name of the entry in a test file. In other programs than `it`, it is the one in `main.rs`.
fn entry_beside(file: &str) -> String {
    let module = file.split_once("tests/it/").and_then(|(_, file)| file.strip_suffix(".rs"));
    match module {
        Some(module) => format!("{}::{ENTRY}", module.trim_end_matches("/mod").replace('/', "::")),
        None => ENTRY.into(),
    }
}

/// The role of this process; `None` in the test itself.
pub fn role() -> Option<String> {
    let role = std::env::var(ROLE).ok()?;
    // SAFETY: sets an attribute of this process.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    // SAFETY: reads a pid. 0: the parent is in another pid namespace.
    let parent = unsafe { libc::getppid() };
    if parent != 0 && Some(parent.to_string()) != std::env::var(PARENT).ok() {
        // The parent exited before the line above.
        std::process::exit(0);
    }
    Some(role)
}

/// A setting of this process, from the process that started it.
pub fn setting(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} must be set by the starter of this role"))
}

/// Another process, killed when dropped.
pub struct Child(std::process::Child);

impl Child {
    /// Starts a process.
    pub fn spawn(command: &mut Command) -> Self {
        Self(command.spawn().expect("the test program can be started again"))
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// Kills it, if it has not exited; returns its status.
    pub fn kill(&mut self) -> ExitStatus {
        let _ = self.0.kill();
        self.0.wait().unwrap()
    }

    /// Its status, if it has exited by itself.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().unwrap()
    }

    /// Waits until it has exited by itself, and returns its status.
    pub fn end(&mut self) -> ExitStatus {
        self.0.wait().unwrap()
    }

    /// Waits until it has exited by itself, with success.
    pub fn finish(mut self) {
        let status = self.0.wait().unwrap();
        assert!(status.success(), "another process of the test failed: {status}");
    }

    /// Its standard input, if it is piped: dropping it is a signal.
    pub fn take_input(&mut self) -> std::process::ChildStdin {
        self.0.stdin.take().expect("a piped input")
    }

    /// Its standard error, if it is piped: the output of a role to the test.
    pub fn take_errors(&mut self) -> std::process::ChildStderr {
        self.0.stderr.take().expect("a piped standard error")
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Calls `prepare` in the new process before it executes the test program.
pub fn prepare(
    command: &mut Command,
    prepare: impl FnMut() -> std::io::Result<()> + Send + Sync + 'static,
) {
    // SAFETY: tests make only plain system calls here, which are allowed between fork and exec.
    unsafe { command.pre_exec(prepare) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_starts_in_the_entry_of_the_file_that_starts_it() {
        assert_eq!(entry_beside("crates/copy/tests/it/a.rs"), format!("a::{ENTRY}"));
        assert_eq!(entry_beside("tests/it/a/mod.rs"), format!("a::{ENTRY}"));
        assert_eq!(entry_beside("tests/it/a/b.rs"), format!("a::b::{ENTRY}"));
        assert_eq!(entry_beside("crates/copy/tests/faults/deaths.rs"), ENTRY);
    }
}
