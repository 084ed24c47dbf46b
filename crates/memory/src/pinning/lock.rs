//! Locking pages into memory, within the limit that the process has.

use std::io;

use memferry_sys::residency;
use memferry_sys::sync::{Mutex, lock};

use super::tally::Tally;
use super::{Access, PageRange, PerProcess, PinError, Pinner, Token};

/// Keeps pages in memory by `mlock`. Pins of overlapping ranges do not disturb each other, as long
/// as they come from one `Lock`; memory that the application locks itself should not be pinned by
/// it, since the kernel does not count. A forked child has no locks until it makes its own.
#[derive(Debug)]
pub struct Lock {
    pinned: PerProcess<Mutex<Tally>>,
}

impl Lock {
    /// A pinner with nothing pinned.
    pub fn new() -> Self {
        Self { pinned: PerProcess::new(|| Mutex::new(Tally::default())) }
    }

    fn uncount(&self, range: PageRange) {
        // Unlocked before the tally is: else a pin that begins meanwhile would be undone.
        let mut tally = lock(self.pinned.get());
        for free in tally.remove(range) {
            unlock(free);
        }
    }
}

impl Default for Lock {
    fn default() -> Self {
        Self::new()
    }
}

impl Pinner for Lock {
    fn name(&self) -> &'static str {
        "lock"
    }

    fn pin(&self, range: PageRange, _access: Access) -> Result<Token, PinError> {
        // Counted first, so that nobody unlocks what is being locked. Pages that are counted already
        // are locked again: other memory may be mapped there since.
        lock(self.pinned.get()).add(range);
        let locked = residency::lock(range.start(), range.bytes());
        locked.map(|()| Token(0)).map_err(|error| {
            self.uncount(range);
            cause(range, &error)
        })
    }

    fn unpin(&self, range: PageRange, _token: Token) {
        self.uncount(range);
    }

    fn follows_mapping(&self) -> bool {
        true
    }
}

/// Unlocks what is still mapped of a range. The kernel stops at the first hole, so a range with
/// holes is halved until the holes are alone.
fn unlock(range: PageRange) {
    let mut left = vec![range];
    while let Some(range) = left.pop() {
        if residency::unlock(range.start(), range.bytes()).is_err() && range.pages() > 1 {
            let (front, back) = range.split(range.pages() / 2);
            left.push(front);
            left.extend(back);
        }
    }
}

/// Finds out which of its many reasons the kernel had: most share one error number.
fn cause(range: PageRange, error: &io::Error) -> PinError {
    let asked_bytes = range.bytes() as u64;
    if !residency::is_mapped(range.start(), range.bytes()) {
        return PinError::BadMemory { range };
    }
    let locked_bytes = residency::locked_bytes();
    if let Some(limit_bytes) = residency::lock_limit_bytes()
        && locked_bytes + asked_bytes > limit_bytes
    {
        return PinError::MemlockLimit { limit_bytes, locked_bytes, asked_bytes };
    }
    // A lock in the middle of a mapping makes three of it.
    let (maps, most_maps) = (residency::maps_now(), residency::most_maps());
    if maps + 2 > most_maps {
        return PinError::MapCount { maps, most_maps };
    }
    match error.kind() {
        io::ErrorKind::WouldBlock => PinError::OutOfMemory,
        io::ErrorKind::OutOfMemory => PinError::BadMemory { range },
        _ => PinError::Refused { what: "mlock", code: error.raw_os_error().unwrap_or(0) },
    }
}
