//! A pinner that pins nothing and records everything, for an engine that audits its pins.
//!
//! It rejects what a device driver rejects: memory that is not mapped, more than a limit, and
//! optionally every n-th call. Its tokens rise, so that an ended pin is never mistaken for another.

use std::collections::HashMap;
use std::sync::Mutex;

use memferry_memory::pinning::{Access, PageRange, PinError, PinToken, Pinner};
use memferry_sys::residency;
use memferry_sys::sync::lock;

use crate::contract::{Descriptor, Opcode, PinnedLocation};

/// The kernel's number for "busy".
const EBUSY: i32 = 16;

/// The recorded pins and their access.
#[derive(Debug)]
pub struct AuditingPinner {
    state: Mutex<PinAuditState>,
    max_bytes: usize,
    fails_every: Option<u64>,
}

#[derive(Debug, Default)]
struct PinAuditState {
    pinned: HashMap<u64, (PageRange, Access)>,
    pinned_bytes: usize,
    requests: u64,
    counts: PinAuditCounts,
}

/// The counters of the pinner.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PinAuditCounts {
    /// Pins.
    pub pins: u64,
    /// Ended pins.
    pub unpins: u64,
    /// Rejected pins.
    pub refused: u64,
    /// Descriptors with memory that was not pinned when they started.
    pub unpinned_descriptors: u64,
    /// Descriptors with memory that was unpinned during their execution. On a device this would
    /// corrupt memory.
    pub unpinned_in_flight: u64,
    /// Unpins of unknown tokens, or with another range.
    pub invalid_unpins: u64,
}

impl AuditingPinner {
    /// Creates a pinner without pins.
    pub fn new() -> Self {
        Self { state: Mutex::default(), max_bytes: usize::MAX, fails_every: None }
    }

    /// Limits the bytes that are pinned at a time. Overlapping pins count twice.
    pub fn limit(mut self, max_bytes: usize) -> Self {
        self.max_bytes = max_bytes;
        self
    }

    /// Rejects every n-th pin.
    pub fn failing_every(mut self, calls: u64) -> Self {
        self.fails_every = Some(calls);
        self
    }

    /// The counters.
    pub fn counts(&self) -> PinAuditCounts {
        lock(&self.state).counts
    }

    /// The number of bytes that are pinned now.
    pub fn pinned_bytes(&self) -> usize {
        lock(&self.state).pinned_bytes
    }

    /// The reason to reject a descriptor, if some of its memory is not pinned.
    pub(super) fn reject_reason(&self, descriptor: &Descriptor) -> Option<&'static str> {
        let mut state = lock(&self.state);
        let reason = state.reject_reason(descriptor);
        state.counts.unpinned_descriptors += u64::from(reason.is_some());
        reason
    }

    /// Checks the pins again after the bytes were moved.
    pub(super) fn audit_after_copy(&self, descriptor: &Descriptor) {
        let mut state = lock(&self.state);
        let is_unpinned = state.reject_reason(descriptor).is_some();
        state.counts.unpinned_in_flight += u64::from(is_unpinned);
    }
}

impl Default for AuditingPinner {
    fn default() -> Self {
        Self::new()
    }
}

impl PinAuditState {
    fn reject_reason(&self, descriptor: &Descriptor) -> Option<&'static str> {
        let holds = |location: Option<PinnedLocation<'_>>, needed: Access| {
            location.is_some_and(|location| {
                let pin = self.pinned.get(&location.token.number());
                pin.is_some_and(|(range, access)| *range == location.range && *access >= needed)
            })
        };
        // Independent of `Opcode::source_access` and `target_access`, so that an error there is
        // found here.
        let (reads_source, written) = match descriptor.operation() {
            Opcode::Copy | Opcode::Move | Opcode::CopyCrc | Opcode::Dualcast => {
                (true, Some(Access::Write))
            }
            Opcode::Fill => (false, Some(Access::Write)),
            Opcode::Compare => (true, Some(Access::Read)),
            Opcode::Crc => (true, None),
        };
        if descriptor.length() == 0 {
            return None;
        }
        if reads_source && !holds(descriptor.pinned_source(), Access::Read) {
            return Some("the source is not pinned");
        }
        if written.is_some_and(|access| !holds(descriptor.pinned_target(), access)) {
            return Some("the target is not pinned");
        }
        let has_second = descriptor.operation() == Opcode::Dualcast;
        (has_second && !holds(descriptor.pinned_second(), Access::Write))
            .then_some("the second target is not pinned")
    }
}

impl Pinner for AuditingPinner {
    fn name(&self) -> &'static str {
        "ledger"
    }

    fn pin(&self, range: PageRange, access: Access) -> Result<PinToken, PinError> {
        let mut state = lock(&self.state);
        state.requests += 1;
        let failing = self.fails_every.is_some_and(|every| state.requests.is_multiple_of(every));
        let outcome = if failing {
            Err(PinError::Refused { what: "an injected fault in pinning", code: EBUSY })
        } else if !residency::is_mapped(range.start(), range.bytes())
            || access == Access::Write && !residency::permits(range.start(), true)
        {
            Err(PinError::BadMemory { range })
        } else if state.pinned_bytes + range.bytes() > self.max_bytes {
            Err(PinError::MemlockLimit {
                limit_bytes: self.max_bytes as u64,
                locked_bytes: state.pinned_bytes as u64,
                requested_bytes: range.bytes() as u64,
            })
        } else {
            Ok(())
        };
        if let Err(error) = outcome {
            state.counts.refused += 1;
            return Err(error);
        }
        state.counts.pins += 1;
        state.pinned_bytes += range.bytes();
        let token = state.counts.pins;
        state.pinned.insert(token, (range, access));
        Ok(PinToken::new(token))
    }

    fn unpin(&self, range: PageRange, token: &PinToken) {
        let mut state = lock(&self.state);
        state.counts.unpins += 1;
        match state.pinned.remove(&token.number()) {
            Some((pinned, _)) if pinned == range => state.pinned_bytes -= range.bytes(),
            _ => state.counts.invalid_unpins += 1,
        }
    }

    fn tracks_mapping(&self) -> bool {
        false
    }
}
