//! Standard output of the hidden commands `worker` and `device-guest`: lines for the bench that
//! started them.

use std::io::{self, Write};

/// Writes one line. A closed pipe is not an error: then nobody waits for the line.
pub(crate) fn write_line(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}
