//! Output for people at a terminal: aligned tables on standard output, progress on standard error.
//! Nothing here decides anything; it turns outcomes into text.

pub(crate) mod paint;
pub(crate) mod progress;
pub(crate) mod table;

pub(crate) use paint::Paint;
pub(crate) use progress::Progress;

use std::io::{self, Write};

/// Writes a whole text to standard output. A reader that went away, such as `head`, is no failure.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}

/// Writes one line to standard error. There is nowhere left to report a failure of that.
pub(crate) fn complain(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Writes one JSON object to standard output, and nothing else.
pub(crate) fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    Ok(print(&text)?)
}
