//! Pinning as a device's driver does it: the page frames are looked up and held.

use std::io;
use std::sync::{Mutex, PoisonError};

use memferry_sys::registered_buffers::{BufferTable, NO_EMPTY_SLOT};
use memferry_sys::residency;

use super::{Access, PageRange, PerProcess, PinError, Pinner, Token};

/// Holds page frames by registering them with the kernel, as long-term pins of devices are held. A
/// stand-in for such devices: what it costs is what they cost, and its pins go stale as theirs do.
/// Each process has a table of its own, with room for [`Registered::MOST_PINS`].
#[derive(Debug)]
pub struct Registered {
    table: PerProcess<Mutex<Table>>,
}

/// What is done to buffers, for errors.
const WHAT: &str = "registering a buffer";

#[derive(Debug)]
struct Table {
    /// `None` where a forked child could not make its own.
    buffers: Option<BufferTable>,
    free: Vec<u32>,
}

impl Table {
    fn new() -> Self {
        let buffers = BufferTable::new(Registered::MOST_PINS).ok();
        Self { buffers, free: (0..Registered::MOST_PINS).rev().collect() }
    }
}

impl Registered {
    /// How many pins there can be at a time.
    pub const MOST_PINS: u32 = 4096;

    /// A pinner with nothing pinned, where the kernel permits it.
    pub fn new() -> Result<Self, PinError> {
        let pinner = Self { table: PerProcess::new(|| Mutex::new(Table::new())) };
        match BufferTable::new(1) {
            Ok(_) => Ok(pinner),
            Err(error) => Err(unsupported(&error)),
        }
    }
}

impl Pinner for Registered {
    fn name(&self) -> &'static str {
        "registered"
    }

    fn pin(&self, range: PageRange, _access: Access) -> Result<Token, PinError> {
        let mut table = self.table.get().lock().unwrap_or_else(PoisonError::into_inner);
        let Table { buffers: Some(buffers), free } = &mut *table else {
            return Err(unsupported(&io::ErrorKind::Unsupported.into()));
        };
        let Some(slot) = free.pop() else {
            return Err(PinError::Refused { what: WHAT, code: NO_EMPTY_SLOT });
        };
        match buffers.set(slot, range.start(), range.bytes()) {
            Ok(()) => Ok(Token(slot.into())),
            Err(error) => {
                free.push(slot);
                Err(cause(range, &error))
            }
        }
    }

    fn unpin(&self, _range: PageRange, token: Token) {
        let mut table = self.table.get().lock().unwrap_or_else(PoisonError::into_inner);
        let Table { buffers: Some(buffers), free } = &mut *table else { return };
        // A slot that cannot be emptied is not used again.
        if buffers.clear(token.0 as u32).is_ok() {
            free.push(token.0 as u32);
        }
    }

    fn follows_mapping(&self) -> bool {
        false
    }
}

fn unsupported(error: &io::Error) -> PinError {
    match error.kind() {
        io::ErrorKind::PermissionDenied => PinError::Unsupported {
            what: WHAT,
            cure: "io_uring is not permitted: see `sysctl kernel.io_uring_disabled`, or the \
                   container's filter of system calls",
        },
        _ => PinError::Unsupported { what: WHAT, cure: "it needs io_uring of Linux 5.19 or later" },
    }
}

fn cause(range: PageRange, error: &io::Error) -> PinError {
    if !residency::is_mapped(range.start(), range.bytes()) {
        return PinError::BadMemory { range };
    }
    match (error.kind(), residency::lock_limit_bytes()) {
        (io::ErrorKind::OutOfMemory, Some(limit_bytes)) => PinError::MemlockLimit {
            limit_bytes,
            // What is registered is not locked, and counts against the same limit.
            locked_bytes: residency::pinned_bytes(),
            asked_bytes: range.bytes() as u64,
        },
        (io::ErrorKind::OutOfMemory, None) => PinError::OutOfMemory,
        _ => PinError::Refused { what: WHAT, code: error.raw_os_error().unwrap_or(0) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memferry_sys::Pages;
    use memferry_sys::pages::page_bytes;
    use std::sync::Arc;

    use crate::pinning::Pinned;

    /// Containers may forbid it.
    fn pinner() -> Option<Registered> {
        let skip = |error| memferry_testing::skip(memferry_testing::Requirement::IoUring, error);
        Registered::new().map_err(skip).ok()
    }

    #[test]
    fn pins_overlap_and_slots_are_used_again() {
        let Some(pinner) = pinner() else { return };
        let pinner: Arc<dyn Pinner> = Arc::new(pinner);
        let pages = Pages::new(32 * page_bytes()).unwrap();
        let range = |page: usize, count: usize| {
            let start = pages.as_ptr() as usize + page * page_bytes();
            PageRange::covering(start, count * page_bytes()).unwrap()
        };
        let small = Pinned::new(&pinner, range(3, 2), Access::Write).unwrap();
        for _ in 0..2 * Registered::MOST_PINS {
            let large = Pinned::new(&pinner, range(0, 32), Access::Write).unwrap();
            assert_ne!(large.token(), small.token());
        }
        let at = pages.as_ptr() as usize;
        assert_eq!(residency::resident_pages(at, pages.len()).unwrap(), 32);
    }

    #[test]
    fn missing_memory_is_refused_and_a_full_table_says_so() {
        let Some(pinner) = pinner() else { return };
        let missing = PageRange::covering(page_bytes(), page_bytes()).unwrap();
        assert_eq!(pinner.pin(missing, Access::Write), Err(PinError::BadMemory { range: missing }));
        let page = Pages::new(page_bytes()).unwrap();
        let range = PageRange::covering(page.as_ptr() as usize, page_bytes()).unwrap();
        let pins: Vec<_> =
            (0..Registered::MOST_PINS).map(|_| pinner.pin(range, Access::Write).unwrap()).collect();
        assert_eq!(
            pinner.pin(range, Access::Write),
            Err(PinError::Refused { what: WHAT, code: NO_EMPTY_SLOT })
        );
        for token in pins {
            pinner.unpin(range, token);
        }
        assert!(pinner.pin(range, Access::Write).is_ok());
    }
}
