//! The backend that creates translations.

use std::io;
use std::sync::Arc;

use thiserror::Error;

use super::entries::LineRun;
use super::line::LineKey;

/// Creates the translations of lines: pins pages, or attaches memory of peers.
///
/// Calls come from the miss thread and from callers that handle misses inline, concurrently for
/// different lines, but never concurrently for one line. Every attached line is detached once, at
/// the latest when the lookup is dropped. A backend must not call the lookup that it serves. A
/// panic in `attach` counts as an error, one in `detach` as success.
pub trait TranslationBackend: Send + Sync + 'static {
    /// Attaches a line of `pages` pages whose entries follow from one another, without a look at
    /// each page. Returns `None`, and attaches nothing, if they do not: then
    /// [`TranslationBackend::attach`] is called.
    fn attach_run(&self, _line: LineKey, _pages: usize) -> Result<Option<LineRun>, AttachError> {
        Ok(None)
    }

    /// Undoes [`TranslationBackend::attach_run`]. The line is not in use any more.
    fn detach_run(&self, _line: LineKey, _run: &LineRun) {}

    /// Writes the entry of every page of the line; 0, the initial value, if a page has no memory.
    /// Pages that get memory later are attached only after the line was
    /// [invalidated](super::Lookup::invalidate).
    fn attach(&self, line: LineKey, entries: &mut [u64]) -> Result<(), AttachError>;

    /// Undoes [`TranslationBackend::attach`]. The line is not in use any more.
    fn detach(&self, line: LineKey, entries: &[u64]);
}

/// A shared backend.
impl<S: TranslationBackend + ?Sized> TranslationBackend for Arc<S> {
    fn attach_run(&self, line: LineKey, pages: usize) -> Result<Option<LineRun>, AttachError> {
        (**self).attach_run(line, pages)
    }

    fn detach_run(&self, line: LineKey, run: &LineRun) {
        (**self).detach_run(line, run);
    }

    fn attach(&self, line: LineKey, entries: &mut [u64]) -> Result<(), AttachError> {
        (**self).attach(line, entries)
    }

    fn detach(&self, line: LineKey, entries: &[u64]) {
        (**self).detach(line, entries);
    }
}

/// The backend failed to attach a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the memory cannot be attached: {kind}{}", Code(*code))]
pub struct AttachError {
    /// The kind of the error.
    pub kind: io::ErrorKind,
    /// The kernel's error number, if there is one.
    pub code: Option<i32>,
}

impl From<io::ErrorKind> for AttachError {
    fn from(kind: io::ErrorKind) -> Self {
        Self { kind, code: None }
    }
}

impl From<io::Error> for AttachError {
    fn from(error: io::Error) -> Self {
        Self { kind: error.kind(), code: error.raw_os_error() }
    }
}

/// Formats a kernel error number as a suffix.
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
        let error = AttachError::from(io::Error::from_raw_os_error(libc::EPERM));
        assert_eq!(error.kind, io::ErrorKind::PermissionDenied);
        assert_eq!(error.to_string(), "the memory cannot be attached: permission denied (error 1)");
        let plain = AttachError::from(io::ErrorKind::OutOfMemory);
        assert_eq!(plain.to_string(), "the memory cannot be attached: out of memory");
    }
}
