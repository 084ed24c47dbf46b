//! Running one program, and forwarding its output line by line.

use std::io::{self, PipeReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::port::Port;
use crate::outcome::ProgramExit;
use crate::plan::GuestCommand;
use crate::wire::GuestMessage;

/// The time after which an incomplete line is forwarded without its end.
const PARTIAL_LINE_TIMEOUT: Duration = Duration::from_millis(100);

/// The time that the output may stay open after the program and all its children have ended.
const OUTPUT_CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The length from which an incomplete line is forwarded without its end.
const MAX_LINE_BYTES: usize = 8 << 10;

/// An event while a program runs.
enum ProgramEvent {
    Output(Vec<u8>),
    Closed,
    Exited(io::Result<ExitStatus>),
}

/// Runs a program to its end. The error is that of the serial port.
pub(super) fn run(
    command: &GuestCommand,
    environment: &[(String, String)],
    port: &mut Port,
) -> Result<ProgramExit, String> {
    let (child, output) = match start(command, environment) {
        Ok(started) => started,
        Err(error) => return Ok(ProgramExit::NotStarted(error.to_string())),
    };
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let (sender, events) = channel();
    read_output(output, sender.clone());
    wait_for_exit(child, sender);
    relay(&events, port, || {
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::KILL);
        }
    })
}

fn start(
    command: &GuestCommand,
    environment: &[(String, String)],
) -> io::Result<(Child, PipeReader)> {
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

fn read_output(mut output: PipeReader, events: Sender<ProgramEvent>) {
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = output.read(&mut buffer) {
            if events.send(ProgramEvent::Output(buffer[..length].to_vec())).is_err() {
                return;
            }
        }
        let _ = events.send(ProgramEvent::Closed);
    });
}

fn wait_for_exit(mut child: Child, events: Sender<ProgramEvent>) {
    thread::spawn(move || {
        let _ = events.send(ProgramEvent::Exited(child.wait()));
    });
}

/// Forwards output until the program has ended and its output is closed.
fn relay(
    events: &Receiver<ProgramEvent>,
    port: &mut Port,
    end_children: impl Fn(),
) -> Result<ProgramExit, String> {
    let mut lines = LineSplitter::default();
    let mut ended: Option<(ProgramExit, Instant)> = None;
    let mut is_open = true;
    loop {
        if let Some((end, _)) =
            ended.take_if(|(_, at)| !is_open || at.elapsed() > OUTPUT_CLOSE_TIMEOUT)
        {
            lines.end().map_or(Ok(()), |rest| port.send(&rest))?;
            return Ok(end);
        }
        match events.recv_timeout(PARTIAL_LINE_TIMEOUT) {
            Ok(ProgramEvent::Output(bytes)) => {
                for line in lines.add(&bytes) {
                    port.send(&line)?;
                }
            }
            Ok(ProgramEvent::Closed) => is_open = false,
            Ok(ProgramEvent::Exited(status)) => {
                end_children();
                ended = Some((exit_from(status), Instant::now()));
            }
            Err(RecvTimeoutError::Timeout) => {
                lines.part().map_or(Ok(()), |part| port.send(&part))?;
            }
            Err(RecvTimeoutError::Disconnected) => is_open = false,
        }
    }
}

fn exit_from(status: io::Result<ExitStatus>) -> ProgramExit {
    match status {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => ProgramExit::Exited(code),
            (None, signal) => ProgramExit::Signalled(signal.unwrap_or(0)),
        },
        Err(error) => ProgramExit::NotStarted(error.to_string()),
    }
}

/// Splits the output of a program into lines.
#[derive(Default)]
struct LineSplitter {
    buffer: Vec<u8>,
    /// Whether a part of the current line was forwarded.
    part_sent: bool,
}

impl LineSplitter {
    fn add(&mut self, bytes: &[u8]) -> Vec<GuestMessage> {
        self.buffer.extend_from_slice(bytes);
        let mut notes = Vec::new();
        while let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
            let mut line: Vec<u8> = self.buffer.drain(..=end).collect();
            line.pop();
            self.part_sent = false;
            notes.push(GuestMessage::Line(line));
        }
        if self.buffer.len() > MAX_LINE_BYTES {
            notes.extend(self.part());
        }
        notes
    }

    /// The incomplete last line, as a part.
    fn part(&mut self) -> Option<GuestMessage> {
        if self.buffer.is_empty() {
            return None;
        }
        self.part_sent = true;
        Some(GuestMessage::Part(std::mem::take(&mut self.buffer)))
    }

    /// The last line at the end of the output, if it has no line feed.
    fn end(&mut self) -> Option<GuestMessage> {
        let is_open = self.part_sent || !self.buffer.is_empty();
        is_open.then(|| GuestMessage::Line(std::mem::take(&mut self.buffer)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> GuestMessage {
        GuestMessage::Line(text.into())
    }

    #[test]
    fn lines_are_cut_at_their_ends_however_they_arrive() {
        let mut lines = LineSplitter::default();
        assert_eq!(lines.add(b"one\ntw"), [line("one")]);
        assert_eq!(lines.add(b"o\n\nthr"), [line("two"), line("")]);
        assert_eq!(lines.part(), Some(GuestMessage::Part(b"thr".to_vec())));
        assert_eq!(lines.part(), None);
        assert_eq!(lines.add(b"ee\n"), [line("ee")]);
        assert_eq!(lines.end(), None);
    }

    #[test]
    fn a_last_line_without_an_end_is_ended() {
        let mut lines = LineSplitter::default();
        lines.add(b"no end");
        assert_eq!(lines.end(), Some(line("no end")));
        let mut lines = LineSplitter::default();
        lines.add(b"begun");
        lines.part();
        assert_eq!(lines.end(), Some(line("")));
    }

    #[test]
    fn an_endless_line_is_passed_on_in_parts() {
        let mut lines = LineSplitter::default();
        assert_eq!(lines.add(&[b'x'; MAX_LINE_BYTES]), []);
        assert_eq!(lines.add(b"x"), [GuestMessage::Part(vec![b'x'; MAX_LINE_BYTES + 1])]);
    }
}
