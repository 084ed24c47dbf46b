//! Making pages present, and no more than that.

use std::io;

use memferry_sys::residency;

use super::{Access, PageRange, PinError, Pinner, Token};

/// Brings pages in so that the copy meets no page fault. The kernel may take them out again when
/// memory is short, or make them read-only at a fork: then the copy faults, and is right all the
/// same. Costs nothing to undo and is bounded by no limit.
#[derive(Debug, Clone, Copy, Default)]
pub struct Populate;

/// How often an interrupted call is made again.
const MOST_TRIES: usize = 64;

impl Pinner for Populate {
    fn name(&self) -> &'static str {
        "populate"
    }

    fn pin(&self, range: PageRange, access: Access) -> Result<Token, PinError> {
        let mut outcome = Ok(());
        for _ in 0..MOST_TRIES {
            outcome = match access {
                Access::Watch => Ok(()),
                Access::Read => residency::populate_for_reading(range.start(), range.bytes()),
                Access::Write => residency::populate_for_writing(range.start(), range.bytes()),
            };
            match &outcome {
                Err(error) if is_passing(error) => {}
                _ => break,
            }
        }
        outcome.map(|()| Token(0)).map_err(|error| cause(range, &error))
    }

    fn unpin(&self, _range: PageRange, _token: Token) {}

    fn follows_mapping(&self) -> bool {
        true
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

fn cause(range: PageRange, error: &io::Error) -> PinError {
    match error.kind() {
        io::ErrorKind::InvalidInput if !residency::can_populate() => PinError::Unsupported {
            what: "populating memory",
            cure: "it needs Linux 5.14 or later; copies work without it, with page faults",
        },
        io::ErrorKind::OutOfMemory if residency::is_mapped(range.start(), range.bytes()) => {
            PinError::OutOfMemory
        }
        _ => PinError::BadMemory { range },
    }
}
