//! Terminal output: aligned tables on standard output, progress on standard error. This module only
//! formats outcomes.

pub(crate) mod columns;
pub(crate) mod paint;
#[cfg(feature = "bench")]
pub(crate) mod progress;
#[cfg(feature = "bench")]
pub(crate) mod screen;
#[cfg(feature = "bench")]
pub(crate) mod table;

pub(crate) use paint::Paint;
#[cfg(feature = "bench")]
pub(crate) use progress::TerminalProgress;

use std::io::{self, Write};

/// Writes a text to standard output. A closed pipe, as with `head`, is not an error.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}

/// Writes one line to standard error. Errors of this write are ignored, because there is no other
/// output.
pub(crate) fn print_error(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Writes one JSON object to standard output.
pub(crate) fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    Ok(print(&text)?)
}
