//! Runs a script to its end: its standard output is the result, its standard error tells the
//! progress. Both go to memory that never fills, and no end of a pipe is waited for, so a script
//! that dies and leaves children behind does not block the bench.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::host::process::{die_with_parent, terminate};

/// Interval at which the script is looked at.
const INTERVAL: Duration = Duration::from_millis(20);
/// What a line of the progress begins with.
const STEP: &str = "measuring: ";
/// More of an error than this is not shown.
const MAX_REASON_CHARS: usize = 300;

/// A command of this interpreter that imports no package from the current folder.
pub(super) fn command(interpreter: &Path) -> Command {
    let mut command = Command::new(interpreter);
    command.env("PYTHONSAFEPATH", "1").env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Returns the standard output of a script that succeeds within the time limit, and calls `step`
/// with each line of progress.
pub(super) fn run(
    mut command: Command,
    limit: Duration,
    step: &mut dyn FnMut(&str),
) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let (output, errors) = (memory_file()?, memory_file()?);
    let share = |file: &File| file.try_clone().map_err(|error| error.to_string());
    command.stdin(Stdio::null()).stdout(share(&output)?).stderr(share(&errors)?);
    let child = die_with_parent(&mut command, 0).spawn();
    let mut child = child.map_err(|error| format!("{name} cannot be started: {error}"))?;
    let mut lines = LineReader::new(errors);
    let status = wait(&mut child, limit, &mut || lines.each_new(step));
    lines.each_new(step);
    match status {
        Some(status) if status.success() => read_all(&output).map_err(|error| error.to_string()),
        Some(status) => Err(format!("{status}{}", lines.reason())),
        None => Err(format!("it did not end within {limit:?}{}", lines.reason())),
    }
}

/// Waits for the end of the script. `None` if it was ended because its time was up. Children that
/// it left behind are ended in every case.
fn wait(child: &mut Child, limit: Duration, look: &mut dyn FnMut()) -> Option<ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => {
                if let Some(group) = Pid::from_raw(child.id() as i32) {
                    let _ = kill_process_group(group, Signal::TERM);
                }
                return Some(status);
            }
            Ok(None) if Instant::now() < deadline => {
                look();
                std::thread::sleep(INTERVAL);
            }
            Ok(None) | Err(_) => {
                terminate(std::slice::from_mut(child), false);
                return None;
            }
        }
    }
}

fn memory_file() -> Result<File, String> {
    memfd_create("script", MemfdFlags::CLOEXEC)
        .map(File::from)
        .map_err(|error| format!("no memory for the output: {error}"))
}

fn read_all(file: &File) -> io::Result<String> {
    let mut bytes = vec![0; file.metadata()?.len() as usize];
    // The position of the file is that of the script, which shares it.
    file.read_exact_at(&mut bytes, 0)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Lines of a file that another process appends to.
struct LineReader {
    file: File,
    position: u64,
    rest: Vec<u8>,
    last: String,
}

impl LineReader {
    fn new(file: File) -> Self {
        Self { file, position: 0, rest: Vec::new(), last: String::new() }
    }

    /// Calls `step` with the progress in lines that were not seen before.
    fn each_new(&mut self, step: &mut dyn FnMut(&str)) {
        let mut chunk = [0; 4096];
        while let Ok(count @ 1..) = self.file.read_at(&mut chunk, self.position) {
            self.position += count as u64;
            self.rest.extend_from_slice(&chunk[..count]);
        }
        while let Some(end) = self.rest.iter().position(|&byte| byte == b'\n') {
            let line: Vec<_> = self.rest.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line).trim().to_owned();
            match line.strip_prefix(STEP) {
                Some(figure) => step(figure),
                None if line.is_empty() => {}
                None => self.last = line,
            }
        }
    }

    /// The last line that is not progress, with a colon before it; empty if there is none.
    fn reason(&self) -> String {
        let rest = String::from_utf8_lossy(&self.rest);
        let last = if rest.trim().is_empty() { self.last.as_str() } else { rest.trim() };
        let text: String = last.chars().take(MAX_REASON_CHARS).collect();
        if text.is_empty() { text } else { format!(": {text}") }
    }
}
