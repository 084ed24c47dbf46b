//! External programs: finding them, reading their version, running one with a timeout, and
//! terminating the processes that were started.

use std::io::{Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs::File};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Signal, kill_process_group, set_parent_process_death_signal};

/// The time that processes get to exit on their own, and then again after SIGTERM.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// The first file of this name in `PATH`.
pub fn find(name: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?)
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
}

/// The output of a program (stdout and stderr), if it succeeds within the timeout.
pub fn output(mut command: Command, patience: Duration) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    // A memfd instead of a pipe: it never fills, so no thread has to read it while the program
    // runs.
    let mut text =
        memfd_create("output", MemfdFlags::CLOEXEC).map(File::from).map_err(error_text)?;
    let (out, err) = (text.try_clone().map_err(error_text)?, text.try_clone().map_err(error_text)?);
    command.stdin(Stdio::null()).stdout(out).stderr(err);
    let child = die_with_parent(&mut command, 0).spawn();
    let mut child = child.map_err(|error| format!("{name} cannot be started: {error}"))?;
    let deadline = Instant::now() + patience;
    let status = loop {
        match child.try_wait().map_err(error_text)? {
            Some(status) => break Some(status),
            None if Instant::now() >= deadline => break None,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    if status.is_none() {
        terminate(std::slice::from_mut(&mut child), false);
    }
    let mut bytes = Vec::new();
    text.rewind().and_then(|()| text.read_to_end(&mut bytes)).map_err(error_text)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let last = text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("");
    match status {
        Some(status) if status.success() => Ok(text),
        Some(status) => Err(format!("{name} failed ({status}): {last}")),
        None => Err(format!("{name} did not end within {patience:?}")),
    }
}

fn error_text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The first word of a text that looks like a version: digits and points.
pub fn version_in(text: &str) -> Option<&str> {
    let is_version = |word: &&str| {
        let begins = word.starts_with(|c: char| c.is_ascii_digit());
        begins && word.contains('.') && !word.contains('/')
    };
    text.split_whitespace().map(|word| word.trim_start_matches('v')).find(is_version)
}

/// Puts a command into a process group and makes the kernel send it SIGTERM when this process
/// exits.
pub fn die_with_parent(command: &mut Command, process_group: i32) -> &mut Command {
    command.process_group(process_group);
    // SAFETY: between fork and exec only one system call is made, which allocates nothing.
    unsafe {
        // SIGTERM instead of SIGKILL: a launcher that receives SIGTERM ends its ranks too.
        command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?))
    }
}

/// Terminates the processes of one process group. If `told` is set, the processes were already
/// asked to exit and get two seconds first. Then SIGTERM and, after another timeout, SIGKILL
/// follow.
pub fn terminate(members: &mut [Child], told: bool) {
    let Some(leader) = members.first().and_then(|leader| Pid::from_raw(leader.id() as i32)) else {
        return;
    };
    for member in members.iter_mut() {
        drop(member.stdin.take());
    }
    if told && all_exited(members, EXIT_TIMEOUT) {
        return;
    }
    let _ = kill_process_group(leader, Signal::TERM);
    if !all_exited(members, EXIT_TIMEOUT) {
        let _ = kill_process_group(leader, Signal::KILL);
        for member in members {
            let _ = member.wait();
        }
    }
}

fn all_exited(members: &mut [Child], wait: Duration) -> bool {
    let deadline = Instant::now() + wait;
    loop {
        if members.iter_mut().all(|member| !matches!(member.try_wait(), Ok(None))) {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(text: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", text]);
        command
    }

    #[test]
    fn a_program_is_found_where_the_shell_finds_it() {
        assert!(find("sh").is_some());
        assert!(find("memferry-no-such-program").is_none());
    }

    #[test]
    fn the_output_of_a_program_is_handed_back_or_its_failure_said() {
        let patience = Duration::from_secs(60);
        assert_eq!(output(script("echo out; echo err >&2"), patience).unwrap(), "out\nerr\n");
        let failure = output(script("echo no such host; exit 7"), patience).unwrap_err();
        assert_eq!(failure, "sh failed (exit status: 7): no such host");
        let endless = output(script("sleep 1000"), Duration::from_millis(50)).unwrap_err();
        assert_eq!(endless, "sh did not end within 50ms");
    }

    #[test]
    fn a_version_is_found_among_other_words() {
        assert_eq!(version_in("mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs"), Some("4.1.4"));
        assert_eq!(version_in("HYDRA build details:\n    Version:      4.0.2"), Some("4.0.2"));
        assert_eq!(version_in("# Version 1.13.1"), Some("1.13.1"));
        assert_eq!(version_in("# Library version: none"), None);
    }
}
