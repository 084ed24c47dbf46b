//! How a request gets its pin: from the cache, pinned and cached, or pinned for one use.

use std::sync::Arc;

use memferry_sys::userfault::RegisterRangeError;
use memferry_sys::{clock, residency};

use super::PinCache;
use super::entry::PinEntry;
use super::index::{DeferredRelease, PinIndex, PinReservation};
use super::lease::Lease;
use super::monitor::MonitorThreads;
use crate::pinning::{Access, PageRange, PinError, PinToken};

/// A request without a cached entry.
#[derive(Debug, Clone, Copy)]
struct PinRequest {
    range: PageRange,
    access: Access,
    /// No change of a monitored mapping is pending.
    is_quiesced: bool,
    may_merge: bool,
    /// The owner invalidates the memory before it is unmapped.
    is_unmonitored: bool,
}

/// The next step of a request.
#[derive(Debug)]
enum PinAction {
    UseCached(Arc<PinEntry>),
    PinAndCache(PinReservation),
    PinUncached,
}

impl PinCache {
    /// Pins memory, or finds it pinned, with or without monitoring.
    pub(super) fn acquire_with(
        &self,
        address: usize,
        length: usize,
        access: Access,
        is_unmonitored: bool,
    ) -> Result<Lease, PinError> {
        let requested = PageRange::covering(address, length)?;
        if !self.shared.is_owner_process() {
            return self.pin_uncached(requested, access);
        }
        let is_quiesced = self.monitor_threads.as_ref().is_none_or(MonitorThreads::quiesce);
        if !is_quiesced && self.shared.pinner.shares_pages() {
            // Pins of this pinner could share the page frames of unmapped memory.
            let what = "pinning memory while its mapping changes";
            return Err(PinError::Unsupported { what, fix: "the copy takes another path" });
        }
        let mut may_merge = true;
        loop {
            let action = self.shared.with(self.monitor(), |index, deferred| {
                let found = if is_quiesced { index.find(requested, access) } else { None };
                if may_merge {
                    index.statistics.hits += u64::from(found.is_some());
                    index.statistics.misses += u64::from(found.is_none());
                }
                let request =
                    PinRequest { range: requested, access, is_quiesced, may_merge, is_unmonitored };
                let begin = || self.begin_pin(index, request, deferred);
                found.map_or_else(begin, PinAction::UseCached)
            });
            match action {
                PinAction::UseCached(entry) => return Ok(self.lease(entry)),
                PinAction::PinUncached => return self.pin_uncached(requested, access),
                PinAction::PinAndCache(reservation) => {
                    match self.pin_reserved(&reservation, requested) {
                        // Memory that the request was merged with may be the part that cannot be
                        // pinned.
                        Err(_) if reservation.merges => may_merge = false,
                        outcome => return outcome,
                    }
                }
            }
        }
    }

    /// Decides how a request without a cached entry is pinned, and starts monitoring its memory.
    fn begin_pin(
        &self,
        index: &mut PinIndex,
        request: PinRequest,
        deferred: &mut DeferredRelease,
    ) -> PinAction {
        let PinRequest { range: requested, access, is_quiesced, may_merge, is_unmonitored } =
            request;
        let in_quarantine =
            !index.quarantine.is_empty() && index.quarantine.contains(requested, clock::now_ns());
        // Memory that was never touched is new. If it is unmapped after this use, as a buffer for
        // one message, monitoring costs more than a later hit would save.
        let is_monitored = self.monitor().is_some() && !is_unmonitored;
        let is_new = is_monitored && !residency::is_resident(requested.end() - 1);
        let may_keep = is_quiesced && !in_quarantine && !is_new;
        let attempts = if may_keep { &[may_merge, false][..] } else { &[] };
        for &may_merge in attempts {
            let Some(reservation) = index.reserve(requested, access, may_merge, deferred) else {
                break;
            };
            if is_unmonitored || self.register(reservation.range, index, deferred) {
                return PinAction::PinAndCache(reservation);
            }
            index.cancel(&reservation, deferred);
            if !reservation.merges {
                break;
            }
        }
        index.statistics.uncached += 1;
        PinAction::PinUncached
    }

    fn register(
        &self,
        range: PageRange,
        index: &mut PinIndex,
        deferred: &mut DeferredRelease,
    ) -> bool {
        let Some(monitor) = self.monitor() else { return true };
        match monitor.userfault.register(range.start(), range.bytes()) {
            Ok(()) => true,
            Err(RegisterRangeError::NoMemory) => {
                // Evicted entries are unregistered after this call, and their mappings merge.
                index.evict(range.bytes(), deferred);
                false
            }
            Err(_) => false,
        }
    }

    fn pin_reserved(
        &self,
        reservation: &PinReservation,
        requested: PageRange,
    ) -> Result<Lease, PinError> {
        let pinned = self.pin(reservation.range, reservation.access);
        self.shared.with(self.monitor(), |index, deferred| match pinned {
            Ok(token) => Ok(self.lease(index.commit(reservation, requested, token, deferred))),
            Err(error) => {
                index.cancel(reservation, deferred);
                Err(error)
            }
        })
    }

    pub(super) fn pin_uncached(
        &self,
        requested: PageRange,
        access: Access,
    ) -> Result<Lease, PinError> {
        let token = self.pin(requested, access)?;
        Ok(self.lease(Arc::new(PinEntry::new(requested, access, token, false))))
    }

    /// Pins. On a shortage, evicts the same number of bytes, then all unused entries, and retries.
    fn pin(&self, range: PageRange, access: Access) -> Result<PinToken, PinError> {
        let mut outcome = self.shared.pin(range, access);
        for bytes in [range.bytes(), usize::MAX] {
            match &outcome {
                Err(error) if error.is_shortage() && self.shared.is_owner_process() => {}
                _ => break,
            }
            if !self.shared.with(self.monitor(), |index, deferred| index.evict(bytes, deferred)) {
                break;
            }
            outcome = self.shared.pin(range, access);
        }
        outcome
    }
}
