//! Running one program, and passing on what it writes, line by line.

use std::io::{self, PipeReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::port::Port;
use crate::outcome::End;
use crate::plan::Command;
use crate::wire::Note;

/// How long the rest of a line may take before the beginning is passed on without it.
const PATIENCE: Duration = Duration::from_millis(100);

/// How long the output may stay open after the program and all its children are ended.
const GRACE: Duration = Duration::from_secs(1);

/// More of a line than this is passed on without its end.
const MOST_BYTES: usize = 8 << 10;

/// What happens while a program runs.
enum Event {
    Wrote(Vec<u8>),
    Closed,
    Ended(io::Result<ExitStatus>),
}

/// Runs a program to its end. An error is the port's.
pub(super) fn run(
    command: &Command,
    environment: &[(String, String)],
    port: &mut Port,
) -> Result<End, String> {
    let (child, output) = match start(command, environment) {
        Ok(started) => started,
        Err(error) => return Ok(End::NotStarted(error.to_string())),
    };
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let (sender, events) = channel();
    listen(output, sender.clone());
    wait(child, sender);
    relay(&events, port, || {
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::KILL);
        }
    })
}

fn start(command: &Command, environment: &[(String, String)]) -> io::Result<(Child, PipeReader)> {
    let (reader, writer) = io::pipe()?;
    let child = std::process::Command::new(&command.path)
        .args(&command.arguments)
        .env_clear()
        .envs([("HOME", "/tmp"), ("PATH", "/bin"), ("TMPDIR", "/tmp")])
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .current_dir("/tmp")
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer)
        .process_group(0)
        .spawn()?;
    Ok((child, reader))
}

fn listen(mut output: PipeReader, events: Sender<Event>) {
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = output.read(&mut buffer) {
            if events.send(Event::Wrote(buffer[..length].to_vec())).is_err() {
                return;
            }
        }
        let _ = events.send(Event::Closed);
    });
}

fn wait(mut child: Child, events: Sender<Event>) {
    thread::spawn(move || {
        let _ = events.send(Event::Ended(child.wait()));
    });
}

/// Passes on what is written until the program has ended and its output is closed.
fn relay(
    events: &Receiver<Event>,
    port: &mut Port,
    end_children: impl Fn(),
) -> Result<End, String> {
    let mut lines = Lines::default();
    let mut ended: Option<(End, Instant)> = None;
    let mut is_open = true;
    loop {
        if let Some((end, _)) = ended.take_if(|(_, at)| !is_open || at.elapsed() > GRACE) {
            lines.end().map_or(Ok(()), |rest| port.tell(&rest))?;
            return Ok(end);
        }
        match events.recv_timeout(PATIENCE) {
            Ok(Event::Wrote(bytes)) => {
                for line in lines.add(&bytes) {
                    port.tell(&line)?;
                }
            }
            Ok(Event::Closed) => is_open = false,
            Ok(Event::Ended(status)) => {
                end_children();
                ended = Some((end_of(status), Instant::now()));
            }
            Err(RecvTimeoutError::Timeout) => {
                lines.part().map_or(Ok(()), |part| port.tell(&part))?;
            }
            Err(RecvTimeoutError::Disconnected) => is_open = false,
        }
    }
}

fn end_of(status: io::Result<ExitStatus>) -> End {
    match status {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => End::Exited(code),
            (None, signal) => End::Signalled(signal.unwrap_or(0)),
        },
        Err(error) => End::NotStarted(error.to_string()),
    }
}

/// Cuts what a program writes into lines.
#[derive(Default)]
struct Lines {
    rest: Vec<u8>,
    /// Whether a part of the line was passed on.
    is_begun: bool,
}

impl Lines {
    fn add(&mut self, bytes: &[u8]) -> Vec<Note> {
        self.rest.extend_from_slice(bytes);
        let mut notes = Vec::new();
        while let Some(end) = self.rest.iter().position(|&byte| byte == b'\n') {
            let mut line: Vec<u8> = self.rest.drain(..=end).collect();
            line.pop();
            self.is_begun = false;
            notes.push(Note::Line(line));
        }
        if self.rest.len() > MOST_BYTES {
            notes.extend(self.part());
        }
        notes
    }

    /// What there is of the last line.
    fn part(&mut self) -> Option<Note> {
        if self.rest.is_empty() {
            return None;
        }
        self.is_begun = true;
        Some(Note::Part(std::mem::take(&mut self.rest)))
    }

    /// The last line, if it lacks its end.
    fn end(&mut self) -> Option<Note> {
        let is_open = self.is_begun || !self.rest.is_empty();
        is_open.then(|| Note::Line(std::mem::take(&mut self.rest)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Note {
        Note::Line(text.into())
    }

    #[test]
    fn lines_are_cut_at_their_ends_however_they_arrive() {
        let mut lines = Lines::default();
        assert_eq!(lines.add(b"one\ntw"), [line("one")]);
        assert_eq!(lines.add(b"o\n\nthr"), [line("two"), line("")]);
        assert_eq!(lines.part(), Some(Note::Part(b"thr".to_vec())));
        assert_eq!(lines.part(), None);
        assert_eq!(lines.add(b"ee\n"), [line("ee")]);
        assert_eq!(lines.end(), None);
    }

    #[test]
    fn a_last_line_without_an_end_is_ended() {
        let mut lines = Lines::default();
        lines.add(b"no end");
        assert_eq!(lines.end(), Some(line("no end")));
        let mut lines = Lines::default();
        lines.add(b"begun");
        lines.part();
        assert_eq!(lines.end(), Some(line("")));
    }

    #[test]
    fn an_endless_line_is_passed_on_in_parts() {
        let mut lines = Lines::default();
        assert_eq!(lines.add(&[b'x'; MOST_BYTES]), []);
        assert_eq!(lines.add(b"x"), [Note::Part(vec![b'x'; MOST_BYTES + 1])]);
    }
}
