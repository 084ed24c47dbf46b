//! The terminal of `memferry top`: its own screen, lines with one or more styles, and single keys. It is given back at
//! the end, and before the message of a panic.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// The other screen of the terminal, without a cursor, on which long lines are cut.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &[u8] = b"\x1b[?7h\x1b[?25h\x1b[?1049l";

/// How a text looks: the parameters of the terminal's sequence for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    Plain,
    Bold,
    Dim,
    BoldUnderlined,
    Reversed,
}

impl Style {
    fn parameters(self) -> &'static str {
        match self {
            Style::Plain => "0",
            Style::Bold => "1",
            Style::Dim => "2",
            Style::BoldUnderlined => "1;4",
            Style::Reversed => "7",
        }
    }
}

/// One line: texts that follow each other.
#[derive(Debug, Default)]
pub(super) struct Line(pub(super) Vec<(Style, String)>);

impl Line {
    pub(super) fn new(style: Style, text: impl Into<String>) -> Self {
        Self(vec![(style, text.into())])
    }

    /// Appends the line in the terminal's encoding, and first what clears the old one: behind a line of full width it
    /// would clear the last column. Names of processes may have control characters: they are left out.
    fn encode(&self, width: usize, screen: &mut String) {
        screen.push_str("\x1b[K");
        let mut left = width;
        for (style, text) in &self.0 {
            screen.extend(["\x1b[", style.parameters(), "m"]);
            let visible = text.chars().filter(|c| !c.is_control()).take(left);
            screen.extend(visible.inspect(|_| left -= 1));
            screen.push_str("\x1b[0m");
        }
    }
}

impl<T: Into<String>> From<T> for Line {
    fn from(text: T) -> Self {
        Self::new(Style::Plain, text)
    }
}

/// A key that was pressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Char(char),
    Interrupt,
    Enter,
    Escape,
    Backspace,
    Up,
    Down,
    Left,
    Right,
    PageUp,
    PageDown,
    /// A key that has no meaning here.
    Other,
}

impl Key {
    /// Takes the first key of some input, which is not empty.
    fn take(input: &mut &[u8]) -> Key {
        let (first, rest) = input.split_first().expect("some input");
        *input = rest;
        match first {
            0x1b => Self::take_sequence(input),
            0x03 => Key::Interrupt,
            b'\r' | b'\n' => Key::Enter,
            0x08 | 0x7f => Key::Backspace,
            b' '..=b'~' => Key::Char(char::from(*first)),
            _ => Key::Other,
        }
    }

    /// Takes the rest of a key whose first byte is that of Escape.
    fn take_sequence(input: &mut &[u8]) -> Key {
        let [b'[' | b'O', rest @ ..] = *input else { return Key::Escape };
        let length = rest.iter().position(|byte| (0x40..=0x7e).contains(byte));
        let (sequence, after) = rest.split_at(length.map_or(rest.len(), |last| last + 1));
        *input = after;
        match sequence {
            b"A" => Key::Up,
            b"B" => Key::Down,
            b"C" => Key::Right,
            b"D" => Key::Left,
            b"5~" => Key::PageUp,
            b"6~" => Key::PageDown,
            _ => Key::Other,
        }
    }
}

/// The terminal while it is the program's.
pub(super) struct Terminal {
    input: OwnedFd,
    before: Termios,
    /// Keys that were read and not returned yet.
    keys: VecDeque<Key>,
}

impl Terminal {
    /// Takes the terminal: of the standard input, or of the session if that is none.
    pub(super) fn open() -> io::Result<Self> {
        let stdin = io::stdin();
        let input = match stdin.is_terminal() {
            true => stdin.as_fd().try_clone_to_owned()?,
            false => File::open("/dev/tty")?.into(),
        };
        let before = tcgetattr(&input)?;
        let terminal = Self { input, before, keys: VecDeque::new() };
        terminal.restore_before_panics()?;
        let mut raw = terminal.before.clone();
        raw.make_raw();
        tcsetattr(&terminal.input, OptionalActions::Now, &raw)?;
        write(ENTER)?;
        Ok(terminal)
    }

    /// The message of a panic would be lost with the other screen.
    fn restore_before_panics(&self) -> io::Result<()> {
        let (input, before) = (self.input.try_clone()?, self.before.clone());
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore(&input, &before);
            report(panic);
        }));
        Ok(())
    }

    /// Columns and lines.
    pub(super) fn size(&self) -> (usize, usize) {
        match tcgetwinsize(io::stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
                (size.ws_col.into(), size.ws_row.into())
            }
            _ => (80, 24),
        }
    }

    /// Shows these lines, of which there are as many as the terminal has.
    pub(super) fn draw(&self, lines: &[Line], width: usize) -> io::Result<()> {
        let mut screen = String::from("\x1b[H");
        for (at, line) in lines.iter().enumerate() {
            screen.push_str(if at == 0 { "" } else { "\r\n" });
            line.encode(width, &mut screen);
        }
        write(screen.as_bytes())
    }

    /// The next key, if one comes in this time.
    pub(super) fn key(&mut self, time: Duration) -> io::Result<Option<Key>> {
        if self.keys.is_empty() && self.is_readable(time)? {
            let mut bytes = [0; 256];
            let length = rustix::io::retry_on_intr(|| rustix::io::read(&self.input, &mut bytes))?;
            if length == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the terminal is closed"));
            }
            let mut input = &bytes[..length];
            while !input.is_empty() {
                self.keys.push_back(Key::take(&mut input));
            }
        }
        Ok(self.keys.pop_front())
    }

    fn is_readable(&self, time: Duration) -> io::Result<bool> {
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&self.input, PollFlags::IN)], Some(&time)) {
            Err(Errno::INTR) => Ok(false),
            ready => Ok(ready? > 0),
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        restore(&self.input, &self.before);
    }
}

/// Gives the terminal back. There is no place to report an error.
fn restore(input: &OwnedFd, before: &Termios) {
    let _ = write(LEAVE);
    let _ = tcsetattr(input, OptionalActions::Now, before);
}

fn write(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(mut input: &[u8]) -> Vec<Key> {
        let next = || (!input.is_empty()).then(|| Key::take(&mut input));
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn keys_are_taken_one_after_the_other() {
        let typed = keys(b"j\x1b[A\x1bOB\x1b[6~ \r\x7f\x03q");
        let wanted = [
            Key::Char('j'),
            Key::Up,
            Key::Down,
            Key::PageDown,
            Key::Char(' '),
            Key::Enter,
            Key::Backspace,
            Key::Interrupt,
            Key::Char('q'),
        ];
        assert_eq!(typed, wanted);
    }

    #[test]
    fn a_lone_escape_is_a_key_and_an_unknown_sequence_is_one_too() {
        assert_eq!(keys(b"\x1b"), [Key::Escape]);
        assert_eq!(keys(b"\x1b[15;2~q"), [Key::Other, Key::Char('q')]);
        assert_eq!(keys(b"\x1b["), [Key::Other]);
        assert_eq!(keys("ä".as_bytes()), [Key::Other, Key::Other]);
    }

    #[test]
    fn a_line_is_cut_to_the_width_and_has_no_control_characters() {
        let mut screen = String::new();
        let name = "a\x1b[2Jb\n".to_owned();
        Line(vec![(Style::Bold, name), (Style::Plain, "cdef".into())]).encode(7, &mut screen);
        assert_eq!(screen, "\x1b[K\x1b[1ma[2Jb\x1b[0m\x1b[0mcd\x1b[0m");
    }
}
