//! Pinning of page frames by io_uring, as drivers of devices do it.

use std::io;
use std::sync::{Mutex, PoisonError};

use memferry_sys::registered_buffers::{NO_FREE_SLOT, RegisteredBuffers};
use memferry_sys::residency;

use super::{Access, ForkLocal, PageRange, PinError, PinToken, Pinner};

/// Pins page frames by registering them with io_uring; the kernel uses the same long-term pins for
/// devices. Stands in for such devices in tests and benches: its cost is similar, and its pins
/// become stale in the same cases. Each process has its own table with [`IoUringPinner::MAX_PINS`]
/// slots.
#[derive(Debug)]
pub struct IoUringPinner {
    state: ForkLocal<Mutex<IoUringPinnerState>>,
}

/// The operation in error texts.
const OPERATION: &str = "registering a buffer";

#[derive(Debug)]
struct IoUringPinnerState {
    /// `None` if a forked child could not create its own.
    buffers: Option<RegisteredBuffers>,
    free: Vec<u32>,
}

impl IoUringPinnerState {
    fn new() -> Self {
        let buffers = RegisteredBuffers::new(IoUringPinner::MAX_PINS).ok();
        Self { buffers, free: (0..IoUringPinner::MAX_PINS).rev().collect() }
    }
}

impl IoUringPinner {
    /// Maximum number of simultaneous pins.
    pub const MAX_PINS: u32 = 4096;

    /// Creates a pinner without pins, if the kernel permits it.
    pub fn new() -> Result<Self, PinError> {
        let pinner = Self { state: ForkLocal::new(|| Mutex::new(IoUringPinnerState::new())) };
        match RegisteredBuffers::new(1) {
            Ok(_) => Ok(pinner),
            Err(error) => Err(unsupported(&error)),
        }
    }
}

impl Pinner for IoUringPinner {
    fn name(&self) -> &'static str {
        "registered"
    }

    fn pin(&self, range: PageRange, _access: Access) -> Result<PinToken, PinError> {
        let mut table = self.state.get().lock().unwrap_or_else(PoisonError::into_inner);
        let IoUringPinnerState { buffers: Some(buffers), free } = &mut *table else {
            return Err(unsupported(&io::ErrorKind::Unsupported.into()));
        };
        let Some(slot) = free.pop() else {
            return Err(PinError::Refused { what: OPERATION, code: NO_FREE_SLOT });
        };
        match buffers.set(slot, range.start(), range.bytes()) {
            Ok(()) => Ok(PinToken::new(slot.into())),
            Err(error) => {
                free.push(slot);
                Err(cause(range, &error))
            }
        }
    }

    fn unpin(&self, _range: PageRange, token: &PinToken) {
        let mut table = self.state.get().lock().unwrap_or_else(PoisonError::into_inner);
        let IoUringPinnerState { buffers: Some(buffers), free } = &mut *table else { return };
        // A slot that cannot be cleared is not reused.
        if buffers.clear(token.number() as u32).is_ok() {
            free.push(token.number() as u32);
        }
    }

    fn tracks_mapping(&self) -> bool {
        false
    }
}

fn unsupported(error: &io::Error) -> PinError {
    match error.kind() {
        io::ErrorKind::PermissionDenied => PinError::Unsupported {
            what: OPERATION,
            fix: "io_uring is not permitted: see `sysctl kernel.io_uring_disabled`, or the \
                   container's seccomp filter",
        },
        _ => PinError::Unsupported {
            what: OPERATION,
            fix: "it needs io_uring of Linux 5.19 or later",
        },
    }
}

fn cause(range: PageRange, error: &io::Error) -> PinError {
    if !residency::is_mapped(range.start(), range.bytes()) {
        return PinError::BadMemory { range };
    }
    match (error.kind(), residency::lock_limit_bytes()) {
        (io::ErrorKind::OutOfMemory, Some(limit_bytes)) => PinError::MemlockLimit {
            limit_bytes,
            // Registered memory is not locked but counts against the same limit.
            locked_bytes: residency::pinned_bytes(),
            requested_bytes: range.bytes() as u64,
        },
        (io::ErrorKind::OutOfMemory, None) => PinError::OutOfMemory,
        _ => PinError::Refused { what: OPERATION, code: error.raw_os_error().unwrap_or(0) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memferry_sys::Pages;
    use memferry_sys::pages::page_bytes;
    use std::sync::Arc;

    use crate::pinning::PinnedRange;

    /// Creates a pinner, or skips the test: containers may forbid io_uring.
    fn pinner() -> Option<IoUringPinner> {
        let skip = |error| memferry_testing::skip(memferry_testing::Requirement::IoUring, error);
        IoUringPinner::new().map_err(skip).ok()
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
        let small = PinnedRange::new(&pinner, range(3, 2), Access::Write).unwrap();
        for _ in 0..2 * IoUringPinner::MAX_PINS {
            let large = PinnedRange::new(&pinner, range(0, 32), Access::Write).unwrap();
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
        let pins: Vec<_> = (0..IoUringPinner::MAX_PINS)
            .map(|_| pinner.pin(range, Access::Write).unwrap())
            .collect();
        assert_eq!(
            pinner.pin(range, Access::Write),
            Err(PinError::Refused { what: OPERATION, code: NO_FREE_SLOT })
        );
        for token in pins {
            pinner.unpin(range, &token);
        }
        assert!(pinner.pin(range, Access::Write).is_ok());
    }
}
