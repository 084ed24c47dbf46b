//! Prefaulting of pages, without a pin.

use std::io;

use memferry_sys::residency;

use super::{Access, PageRange, PinError, PinToken, Pinner};

/// Prefaults pages so that the copy causes no page fault. The kernel may evict them when memory is
/// short, or write-protect them at a fork: then the copy faults and is still correct. Needs no
/// unpinning and has no limit.
#[derive(Debug, Clone, Copy, Default)]
pub struct PopulatePinner;

/// Maximum number of attempts of an interrupted call.
const MAX_TRIES: usize = 64;

impl Pinner for PopulatePinner {
    fn name(&self) -> &'static str {
        "populate"
    }

    fn pin(&self, range: PageRange, access: Access) -> Result<PinToken, PinError> {
        let mut outcome = Ok(());
        for _ in 0..MAX_TRIES {
            outcome = match access {
                Access::MonitorOnly => Ok(()),
                Access::Read => residency::populate_read(range.start(), range.bytes()),
                Access::Write => residency::populate_write(range.start(), range.bytes()),
            };
            match &outcome {
                Err(error) if is_transient(error) => {}
                _ => break,
            }
        }
        outcome.map(|()| PinToken::new(0)).map_err(|error| cause(range, &error))
    }

    fn unpin(&self, _range: PageRange, _token: &PinToken) {}

    fn tracks_mapping(&self) -> bool {
        true
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

fn cause(range: PageRange, error: &io::Error) -> PinError {
    match error.kind() {
        io::ErrorKind::InvalidInput if !residency::can_populate() => PinError::Unsupported {
            what: "populating memory",
            fix: "it needs Linux 5.14 or later; copies work without it, with page faults",
        },
        io::ErrorKind::OutOfMemory if residency::is_mapped(range.start(), range.bytes()) => {
            PinError::OutOfMemory
        }
        _ => PinError::BadMemory { range },
    }
}
