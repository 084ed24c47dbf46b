//! Where translations come from.

use std::io;
use std::sync::Arc;

use thiserror::Error;

use super::line::LineName;

/// Makes memory ready for copies, and tells where it is: pins pages, attaches regions of peers.
///
/// Calls come from the miss thread and from callers that help it, at the same time for different
/// lines, but never at the same time for one line. Every line that was attached is detached once,
/// at the latest when the lookup is dropped. A source must not call the lookup it serves. A call
/// that panics counts as refused, or as done.
pub trait Source: Send + Sync + 'static {
    /// Writes the entry of every page of the line; 0 (which they hold at first) where a page has
    /// none. Pages that get memory later are asked for again only after the line was
    /// [forgotten](super::Lookup::forget).
    fn attach(&self, line: LineName, entries: &mut [u64]) -> Result<(), Refused>;

    /// Takes back what [`Source::attach`] made. Nobody uses the line any more.
    fn detach(&self, line: LineName, entries: &[u64]);
}

/// A source that others keep hold of.
impl<S: Source + ?Sized> Source for Arc<S> {
    fn attach(&self, line: LineName, entries: &mut [u64]) -> Result<(), Refused> {
        (**self).attach(line, entries)
    }

    fn detach(&self, line: LineName, entries: &[u64]) {
        (**self).detach(line, entries);
    }
}

/// The source does not attach a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the memory was refused: {kind}{}", Code(*code))]
pub struct Refused {
    /// What kind of error it was.
    pub kind: io::ErrorKind,
    /// The number the kernel gave it, if it came from there.
    pub code: Option<i32>,
}

impl From<io::ErrorKind> for Refused {
    fn from(kind: io::ErrorKind) -> Self {
        Self { kind, code: None }
    }
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Self {
        Self { kind: error.kind(), code: error.raw_os_error() }
    }
}

/// The number of a kernel error as an addition to a sentence.
struct Code(Option<i32>);

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.map_or(Ok(()), |code| write!(f, " (error {code})"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_keeps_what_the_kernel_said() {
        let refused = Refused::from(io::Error::from_raw_os_error(libc::EPERM));
        assert_eq!(refused.kind, io::ErrorKind::PermissionDenied);
        assert_eq!(refused.to_string(), "the memory was refused: permission denied (error 1)");
        let plain = Refused::from(io::ErrorKind::OutOfMemory);
        assert_eq!(plain.to_string(), "the memory was refused: out of memory");
    }
}
