//! The threads of processes that hang.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// A process and all of its descendants, parents first.
pub(super) fn family(ancestor: u32) -> Vec<u32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let parents: Vec<(u32, u32)> =
        processes.filter_map(|process| Some((process, parent_of(process)?))).collect();
    let mut family = vec![ancestor];
    let mut next = 0;
    while let Some(&process) = family.get(next) {
        family.extend(
            parents.iter().filter(|(_, parent)| *parent == process).map(|(child, _)| child),
        );
        next += 1;
    }
    family
}

fn parent_of(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of the program is in brackets and may contain anything.
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// The backtraces of all threads of these processes: by gdb, or what the kernel shows without it.
pub(super) fn of(processes: &[u32]) -> String {
    let mut text = String::new();
    for &process in processes {
        let command = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        let _ = writeln!(text, "== process {process}: {command}");
        text += &by_debugger(process).unwrap_or_else(|| by_kernel(process));
    }
    text
}

fn by_debugger(process: u32) -> Option<String> {
    let process = process.to_string();
    let output = Command::new("timeout")
        .args(["60", "gdb", "--batch", "-nx", "-p", &process])
        .args(["-ex", "set pagination off", "-ex", "thread apply all backtrace 40"])
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.contains("Thread ")
        .then(|| text.lines().fold(String::new(), |all, line| all + line + "\n"))
}

fn by_kernel(process: u32) -> String {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let mut text = String::from("(install gdb for backtraces)\n");
    for thread in threads {
        let read = |name: &str| {
            fs::read_to_string(Path::new(&thread.path()).join(name)).unwrap_or_default()
        };
        let (name, place, call) = (read("comm"), read("wchan"), read("syscall"));
        let thread = thread.file_name();
        let _ = writeln!(
            text,
            "thread {} {}: waits in {place}, system call {}",
            thread.display(),
            name.trim(),
            call.trim()
        );
    }
    text
}

/// Kills these processes.
pub(super) fn kill(processes: &[u32]) {
    for process in processes.iter().rev() {
        let process = i32::try_from(*process).ok().and_then(Pid::from_raw);
        // A process that has exited in the meantime needs nothing.
        let _ = process.map(|process| kill_process(process, Signal::KILL));
    }
}

#[cfg(test)]
mod tests {
    use memferry_testing::until;

    use super::*;

    #[test]
    fn children_of_children_belong_to_the_family_and_are_killed_with_it() {
        let mut child =
            Command::new("sh").args(["-c", "sh -c 'sleep 1000; true'; true"]).spawn().unwrap();
        until("the last child sleeps", || of(&family(child.id())[1..]).contains("sleep 1000"));
        let processes = family(child.id());
        kill(&processes);
        child.wait().unwrap();
        let sleeps = |process: &u32| {
            fs::read(format!("/proc/{process}/cmdline"))
                .is_ok_and(|words| words.starts_with(b"sleep"))
        };
        until("no child is left", || !processes.iter().any(sleeps));
    }
}
