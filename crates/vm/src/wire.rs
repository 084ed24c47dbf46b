//! What the guest tells the host, a line each, on a serial port that the kernel does not write to. The
//! first character says what the line is, so nothing a program writes can pass for anything else.

use crate::outcome::End;

/// One line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Note {
    /// The machine is ready; programs follow.
    Ready,
    /// The machine cannot be made ready, or its first process is at its end.
    Trouble(String),
    /// The program of this number starts.
    Begin(usize),
    /// A program wrote this, and will write more of the same line.
    Part(Vec<u8>),
    /// A program wrote this line, or the rest of it.
    Line(Vec<u8>),
    /// The program of this number ended.
    End(usize, End),
}

impl Note {
    /// The line, with its end.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let text = |text: String| text.replace('\n', " ").into_bytes();
        let mut line = match self {
            Self::Ready => text("@ready".into()),
            Self::Trouble(reason) => text(format!("@trouble {reason}")),
            Self::Begin(number) => text(format!("@begin {number}")),
            Self::Part(bytes) => [b"+", bytes.as_slice()].concat(),
            Self::Line(bytes) => [b"|", bytes.as_slice()].concat(),
            Self::End(number, end) => {
                let end = match end {
                    End::Exited(status) => format!("exited {status}"),
                    End::Signalled(signal) => format!("signalled {signal}"),
                    End::NotStarted(reason) => format!("unstarted {reason}"),
                    End::TimedOut | End::Lost | End::NotReached => {
                        unreachable!("only the host sees this end")
                    }
                };
                text(format!("@end {number} {end}"))
            }
        };
        line.push(b'\n');
        line
    }

    /// What a line says, unless it is none of these.
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
            "trouble" => Some(Self::Trouble(rest.into())),
            "begin" => Some(Self::Begin(rest.parse().ok()?)),
            "end" => {
                let (number, end) = rest.split_once(' ')?;
                let (how, what) = end.split_once(' ')?;
                let end = match how {
                    "exited" => End::Exited(what.parse().ok()?),
                    "signalled" => End::Signalled(what.parse().ok()?),
                    "unstarted" => End::NotStarted(what.into()),
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
            Note::Ready,
            Note::Trouble("no card".into()),
            Note::Begin(3),
            Note::Part(b"test a ... ".to_vec()),
            Note::Line(b"ok".to_vec()),
            Note::Line(Vec::new()),
            Note::Line(b"\xff\r".to_vec()),
            Note::End(0, End::Exited(101)),
            Note::End(1, End::Signalled(11)),
            Note::End(2, End::NotStarted("No such file".into())),
        ];
        for note in notes {
            let line = note.encode();
            assert_eq!(line.iter().filter(|&&byte| byte == b'\n').count(), 1);
            assert_eq!(Note::decode(&line), Some(note));
        }
    }

    #[test]
    fn a_program_cannot_write_a_note() {
        let forged = Note::Line(b"@end 0 exited 0".to_vec());
        assert_eq!(Note::decode(&forged.encode()), Some(forged));
    }

    #[test]
    fn other_lines_are_no_notes() {
        for line in ["", "\n", "SeaBIOS", "@", "@end", "@end 0", "@end x exited 0", "@end 0 won 1"]
        {
            assert_eq!(Note::decode(line.as_bytes()), None, "{line}");
        }
    }
}
