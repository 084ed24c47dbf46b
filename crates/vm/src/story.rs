//! What the host makes of what it hears, until the machine is gone.

use std::time::Duration;

use crate::console;
use crate::error::VmError;
use crate::outcome::{End, Outcome, ProgramOutcome};
use crate::wire::Note;

/// What is said whenever all is well: QEMU misses a cable, which our card does not need, and the kernel
/// tells of its end.
const SMALL_TALK: [&str; 3] =
    ["has no peer", "reboot: Restarting system", "tsc: Unable to calibrate against PIT"];

/// How many of the last lines explain a machine that did not come up.
const LAST_WORDS: usize = 12;

/// How a machine ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// By itself.
    Stopped,
    /// Its time was up.
    TimedOut,
}

/// Everything heard so far.
#[derive(Debug)]
pub(crate) struct Story {
    programs: Vec<(Option<End>, Vec<String>)>,
    /// The program that runs.
    current: Option<usize>,
    /// The beginning of a line.
    part: Vec<u8>,
    console: Vec<String>,
    trouble: Option<String>,
    boot: Option<Duration>,
}

impl Story {
    pub(crate) fn new(programs: usize) -> Self {
        Self {
            programs: vec![(None, Vec::new()); programs],
            current: None,
            part: Vec::new(),
            console: Vec::new(),
            trouble: None,
            boot: None,
        }
    }

    /// A line of QEMU or of the kernel. What to show of it is returned.
    pub(crate) fn console(&mut self, line: &[u8]) -> Option<String> {
        let line = console::plain(line);
        if line.trim().is_empty() || SMALL_TALK.iter().any(|talk| line.contains(talk)) {
            return None;
        }
        self.console.push(line.clone());
        Some(format!("machine: {line}"))
    }

    /// A line of the guest, so long after the start. What to show of it is returned.
    pub(crate) fn note(&mut self, line: &[u8], after: Duration) -> Option<String> {
        match Note::decode(line) {
            Some(Note::Ready) => self.boot = Some(after),
            Some(Note::Trouble(reason)) => {
                let shown = format!("machine: {reason}");
                self.console.push(reason.clone());
                self.trouble = Some(reason);
                return Some(shown);
            }
            Some(Note::Begin(number)) => self.current = Some(number),
            Some(Note::Part(bytes)) => self.part.extend(bytes),
            Some(Note::Line(bytes)) => {
                self.part.extend(bytes);
                return self.end_line();
            }
            Some(Note::End(number, end)) => {
                self.current = None;
                if let Some((place, _)) = self.programs.get_mut(number) {
                    *place = Some(end);
                }
            }
            None => return self.console(line),
        }
        None
    }

    /// The beginning of a line whose end will not come.
    pub(crate) fn cut_off(&mut self) -> Option<String> {
        if self.part.is_empty() { None } else { self.end_line() }
    }

    fn end_line(&mut self) -> Option<String> {
        let line = std::mem::take(&mut self.part);
        let line = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
        let lines = self.current.and_then(|number| self.programs.get_mut(number));
        if let Some((_, lines)) = lines {
            lines.push(line.clone());
        }
        Some(line)
    }

    pub(crate) fn finish(
        self,
        ending: Ending,
        limit: Duration,
        total: Duration,
    ) -> Result<Outcome, VmError> {
        let Some(boot) = self.boot else {
            let last = self.console.len().saturating_sub(LAST_WORDS);
            let console = match &self.console[last..] {
                [] => "none".into(),
                lines => lines.join("; "),
            };
            return Err(match (self.trouble, ending) {
                (Some(reason), _) => VmError::Guest { reason },
                (None, Ending::Stopped) => VmError::Stopped { console },
                (None, Ending::TimedOut) => VmError::Slow { limit, console },
            });
        };
        let unfinished = match ending {
            Ending::Stopped => End::Lost,
            Ending::TimedOut => End::TimedOut,
        };
        let programs = self.programs.into_iter().enumerate().map(|(number, (end, lines))| {
            let is_cut_off = self.current == Some(number);
            let other = if is_cut_off { unfinished.clone() } else { End::NotReached };
            ProgramOutcome { end: end.unwrap_or(other), lines }
        });
        Ok(Outcome { programs: programs.collect(), console: self.console, boot, total })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn hear(story: &mut Story, lines: &str) -> Vec<String> {
        let lines = lines.split_inclusive('\n');
        lines.filter_map(|line| story.note(line.as_bytes(), SECOND)).collect()
    }

    #[test]
    fn a_story_with_a_good_end_gives_each_program_its_lines() {
        let mut story = Story::new(2);
        assert_eq!(
            story.console(b"[    1.0] DMAR: fault\r\n").unwrap(),
            "machine: [    1.0] DMAR: fault"
        );
        assert_eq!(story.console(b"qemu: warning: nic e1000e.0 has no peer\n"), None);
        let shown = hear(
            &mut story,
            "@ready\n@begin 0\n|one\n+test a ... \n|ok\r\n@end 0 exited 0\n\
             @begin 1\n|@end 1 exited 0\n@end 1 signalled 11\n",
        );
        assert_eq!(shown, ["one", "test a ... ok", "@end 1 exited 0"]);
        let outcome = story.finish(Ending::Stopped, SECOND, SECOND).unwrap();
        assert_eq!(outcome.programs[0].end, End::Exited(0));
        assert_eq!(outcome.programs[0].lines, ["one", "test a ... ok"]);
        assert_eq!(outcome.programs[1].end, End::Signalled(11));
        assert_eq!(outcome.console, ["[    1.0] DMAR: fault"]);
        assert_eq!(outcome.boot, SECOND);
        assert!(!outcome.is_success());
    }

    #[test]
    fn a_program_that_never_ends_is_told_from_one_that_never_began() {
        for (ending, end) in [(Ending::TimedOut, End::TimedOut), (Ending::Stopped, End::Lost)] {
            let mut story = Story::new(2);
            hear(&mut story, "@ready\n@begin 0\n+test slow ... \n");
            assert_eq!(story.cut_off().unwrap(), "test slow ... ");
            let outcome = story.finish(ending, SECOND, SECOND).unwrap();
            assert_eq!(outcome.programs[0].end, end);
            assert_eq!(outcome.programs[0].lines, ["test slow ... "]);
            assert_eq!(outcome.programs[1].end, End::NotReached);
        }
    }

    #[test]
    fn a_machine_that_does_not_come_up_is_an_error_with_its_last_words() {
        let finish = |lines: &str, ending| {
            let mut story = Story::new(1);
            story.console(b"Kernel panic\n");
            hear(&mut story, lines);
            story.finish(ending, SECOND, SECOND).unwrap_err().to_string()
        };
        assert!(finish("", Ending::Stopped).ends_with("last words: Kernel panic"));
        assert!(finish("", Ending::TimedOut).contains("not ready after 1 s"));
        assert!(finish("@trouble no card\n", Ending::Stopped).ends_with("ready: no card"));
    }

    #[test]
    fn numbers_that_no_program_has_do_no_harm() {
        let mut story = Story::new(1);
        hear(&mut story, "@ready\n@begin 7\n|text\n@end 7 exited 0\n");
        let outcome = story.finish(Ending::Stopped, SECOND, SECOND).unwrap();
        assert_eq!(outcome.programs[0].end, End::NotReached);
    }
}
