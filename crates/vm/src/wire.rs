//! The messages from the guest to the host, one per line, on a serial port that the kernel does not
//! write to. The first character is the type of the line, so the output of a program cannot imitate
//! another message.

use crate::outcome::ProgramExit;

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GuestMessage {
    /// The machine is ready; programs follow.
    Ready,
    /// The machine cannot be set up, or its first process failed.
    Failure(String),
    /// The program of this number starts.
    Begin(usize),
    /// A program wrote this part of a line; more of the line follows.
    Part(Vec<u8>),
    /// A program wrote this line, or the rest of it.
    Line(Vec<u8>),
    /// The program of this number ended.
    End(usize, ProgramExit),
}

impl GuestMessage {
    /// Encodes the message as a line, including its line feed.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let text = |text: String| text.replace('\n', " ").into_bytes();
        let mut line = match self {
            Self::Ready => text("@ready".into()),
            Self::Failure(reason) => text(format!("@trouble {reason}")),
            Self::Begin(number) => text(format!("@begin {number}")),
            Self::Part(bytes) => [b"+", bytes.as_slice()].concat(),
            Self::Line(bytes) => [b"|", bytes.as_slice()].concat(),
            Self::End(number, end) => {
                let end = match end {
                    ProgramExit::Exited(status) => format!("exited {status}"),
                    ProgramExit::Signalled(signal) => format!("signalled {signal}"),
                    ProgramExit::NotStarted(reason) => format!("unstarted {reason}"),
                    ProgramExit::TimedOut | ProgramExit::Lost | ProgramExit::NotReached => {
                        unreachable!("only the host sees this end")
                    }
                };
                text(format!("@end {number} {end}"))
            }
        };
        line.push(b'\n');
        line
    }

    /// Decodes a line. `None` if it is not a message.
    pub(crate) fn decode(line: &[u8]) -> Option<Self> {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        match line.split_first()? {
            (b'|', bytes) => Some(Self::Line(bytes.to_vec())),
            (b'+', bytes) => Some(Self::Part(bytes.to_vec())),
            (b'@', words) => Self::decode_words(std::str::from_utf8(words).ok()?),
            _ => None,
        }
    }

    fn decode_words(words: &str) -> Option<Self> {
        let (word, rest) = words.split_once(' ').unwrap_or((words, ""));
        match word {
            "ready" => Some(Self::Ready),
            "trouble" => Some(Self::Failure(rest.into())),
            "begin" => Some(Self::Begin(rest.parse().ok()?)),
            "end" => {
                let (number, end) = rest.split_once(' ')?;
                let (how, what) = end.split_once(' ')?;
                let end = match how {
                    "exited" => ProgramExit::Exited(what.parse().ok()?),
                    "signalled" => ProgramExit::Signalled(what.parse().ok()?),
                    "unstarted" => ProgramExit::NotStarted(what.into()),
                    _ => return None,
                };
                Some(Self::End(number.parse().ok()?, end))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_note_is_read_as_it_was_written() {
        let notes = [
            GuestMessage::Ready,
            GuestMessage::Failure("no card".into()),
            GuestMessage::Begin(3),
            GuestMessage::Part(b"test a ... ".to_vec()),
            GuestMessage::Line(b"ok".to_vec()),
            GuestMessage::Line(Vec::new()),
            GuestMessage::Line(b"\xff\r".to_vec()),
            GuestMessage::End(0, ProgramExit::Exited(101)),
            GuestMessage::End(1, ProgramExit::Signalled(11)),
            GuestMessage::End(2, ProgramExit::NotStarted("No such file".into())),
        ];
        for note in notes {
            let line = note.encode();
            assert_eq!(line.iter().filter(|&&byte| byte == b'\n').count(), 1);
            assert_eq!(GuestMessage::decode(&line), Some(note));
        }
    }

    #[test]
    fn a_program_cannot_write_a_note() {
        let forged = GuestMessage::Line(b"@end 0 exited 0".to_vec());
        assert_eq!(GuestMessage::decode(&forged.encode()), Some(forged));
    }

    #[test]
    fn other_lines_are_no_notes() {
        for line in ["", "\n", "SeaBIOS", "@", "@end", "@end 0", "@end x exited 0", "@end 0 won 1"]
        {
            assert_eq!(GuestMessage::decode(line.as_bytes()), None, "{line}");
        }
    }
}
