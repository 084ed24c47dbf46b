//! The transcript of a run, built from the output of QEMU and of the guest.

use std::time::Duration;

use crate::console;
use crate::error::VmError;
use crate::outcome::{Outcome, ProgramExit, ProgramOutcome};
use crate::wire::GuestMessage;

/// Lines that also appear in a successful run: QEMU warns that the card has no network peer, and
/// the kernel reports the reboot.
const IGNORED_LINES: [&str; 3] =
    ["has no peer", "reboot: Restarting system", "tsc: Unable to calibrate against PIT"];

/// The number of last lines that are part of an error.
const ERROR_TAIL_LINES: usize = 12;

/// Why a machine stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// The machine stopped on its own.
    Stopped,
    /// The timeout expired.
    TimedOut,
}

/// The output and the results so far.
#[derive(Debug)]
pub(crate) struct RunTranscript {
    programs: Vec<(Option<ProgramExit>, Vec<String>)>,
    /// The running program.
    current: Option<usize>,
    /// The received part of an incomplete line.
    partial_line: Vec<u8>,
    console: Vec<String>,
    guest_error: Option<String>,
    boot: Option<Duration>,
}

impl RunTranscript {
    pub(crate) fn new(programs: usize) -> Self {
        Self {
            programs: vec![(None, Vec::new()); programs],
            current: None,
            partial_line: Vec::new(),
            console: Vec::new(),
            guest_error: None,
            boot: None,
        }
    }

    /// Records a line of QEMU or of the kernel, and returns the text to show.
    pub(crate) fn record_console(&mut self, line: &[u8]) -> Option<String> {
        let line = console::plain(line);
        if line.trim().is_empty() || IGNORED_LINES.iter().any(|talk| line.contains(talk)) {
            return None;
        }
        self.console.push(line.clone());
        Some(format!("machine: {line}"))
    }

    /// Records a line of the guest that arrived `after` the start, and returns the text to show.
    pub(crate) fn record(&mut self, line: &[u8], after: Duration) -> Option<String> {
        match GuestMessage::decode(line) {
            Some(GuestMessage::Ready) => self.boot = Some(after),
            Some(GuestMessage::Failure(reason)) => {
                let shown = format!("machine: {reason}");
                self.console.push(reason.clone());
                self.guest_error = Some(reason);
                return Some(shown);
            }
            Some(GuestMessage::Begin(number)) => self.current = Some(number),
            Some(GuestMessage::Part(bytes)) => self.partial_line.extend(bytes),
            Some(GuestMessage::Line(bytes)) => {
                self.partial_line.extend(bytes);
                return self.end_line();
            }
            Some(GuestMessage::End(number, end)) => {
                self.current = None;
                if let Some((place, _)) = self.programs.get_mut(number) {
                    *place = Some(end);
                }
            }
            None => return self.record_console(line),
        }
        None
    }

    /// Records an incomplete last line, and returns the text to show.
    pub(crate) fn flush_partial_line(&mut self) -> Option<String> {
        if self.partial_line.is_empty() { None } else { self.end_line() }
    }

    fn end_line(&mut self) -> Option<String> {
        let line = std::mem::take(&mut self.partial_line);
        let line = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
        let lines = self.current.and_then(|number| self.programs.get_mut(number));
        if let Some((_, lines)) = lines {
            lines.push(line.clone());
        }
        Some(line)
    }

    pub(crate) fn finish(
        self,
        ending: StopReason,
        limit: Duration,
        total: Duration,
    ) -> Result<Outcome, VmError> {
        let Some(boot) = self.boot else {
            let last = self.console.len().saturating_sub(ERROR_TAIL_LINES);
            let console = match &self.console[last..] {
                [] => "none".into(),
                lines => lines.join("; "),
            };
            return Err(match (self.guest_error, ending) {
                (Some(reason), _) => VmError::Guest { reason },
                (None, StopReason::Stopped) => VmError::Stopped { console },
                (None, StopReason::TimedOut) => VmError::Slow { limit, console },
            });
        };
        let unfinished = match ending {
            StopReason::Stopped => ProgramExit::Lost,
            StopReason::TimedOut => ProgramExit::TimedOut,
        };
        let programs = self.programs.into_iter().enumerate().map(|(number, (end, lines))| {
            let is_cut_off = self.current == Some(number);
            let other = if is_cut_off { unfinished.clone() } else { ProgramExit::NotReached };
            ProgramOutcome { exit: end.unwrap_or(other), lines }
        });
        Ok(Outcome { programs: programs.collect(), console: self.console, boot, total })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn record_all(story: &mut RunTranscript, lines: &str) -> Vec<String> {
        let lines = lines.split_inclusive('\n');
        lines.filter_map(|line| story.record(line.as_bytes(), SECOND)).collect()
    }

    #[test]
    fn a_story_with_a_good_end_gives_each_program_its_lines() {
        let mut story = RunTranscript::new(2);
        assert_eq!(
            story.record_console(b"[    1.0] DMAR: fault\r\n").unwrap(),
            "machine: [    1.0] DMAR: fault"
        );
        assert_eq!(story.record_console(b"qemu: warning: nic e1000e.0 has no peer\n"), None);
        let shown = record_all(
            &mut story,
            "@ready\n@begin 0\n|one\n+test a ... \n|ok\r\n@end 0 exited 0\n\
             @begin 1\n|@end 1 exited 0\n@end 1 signalled 11\n",
        );
        assert_eq!(shown, ["one", "test a ... ok", "@end 1 exited 0"]);
        let outcome = story.finish(StopReason::Stopped, SECOND, SECOND).unwrap();
        assert_eq!(outcome.programs[0].exit, ProgramExit::Exited(0));
        assert_eq!(outcome.programs[0].lines, ["one", "test a ... ok"]);
        assert_eq!(outcome.programs[1].exit, ProgramExit::Signalled(11));
        assert_eq!(outcome.console, ["[    1.0] DMAR: fault"]);
        assert_eq!(outcome.boot, SECOND);
        assert!(!outcome.is_success());
    }

    #[test]
    fn a_program_that_never_ends_is_told_from_one_that_never_began() {
        for (ending, end) in [
            (StopReason::TimedOut, ProgramExit::TimedOut),
            (StopReason::Stopped, ProgramExit::Lost),
        ] {
            let mut story = RunTranscript::new(2);
            record_all(&mut story, "@ready\n@begin 0\n+test slow ... \n");
            assert_eq!(story.flush_partial_line().unwrap(), "test slow ... ");
            let outcome = story.finish(ending, SECOND, SECOND).unwrap();
            assert_eq!(outcome.programs[0].exit, end);
            assert_eq!(outcome.programs[0].lines, ["test slow ... "]);
            assert_eq!(outcome.programs[1].exit, ProgramExit::NotReached);
        }
    }

    #[test]
    fn a_machine_that_does_not_come_up_is_an_error_with_its_last_words() {
        let finish = |lines: &str, ending| {
            let mut story = RunTranscript::new(1);
            story.record_console(b"Kernel panic\n");
            record_all(&mut story, lines);
            story.finish(ending, SECOND, SECOND).unwrap_err().to_string()
        };
        assert!(finish("", StopReason::Stopped).ends_with("last words: Kernel panic"));
        assert!(finish("", StopReason::TimedOut).contains("not ready after 1 s"));
        assert!(finish("@trouble no card\n", StopReason::Stopped).ends_with("ready: no card"));
    }

    #[test]
    fn numbers_that_no_program_has_do_no_harm() {
        let mut story = RunTranscript::new(1);
        record_all(&mut story, "@ready\n@begin 7\n|text\n@end 7 exited 0\n");
        let outcome = story.finish(StopReason::Stopped, SECOND, SECOND).unwrap();
        assert_eq!(outcome.programs[0].exit, ProgramExit::NotReached);
    }
}
