//! State that callers, translations and the miss thread share, without the backend.
//!
//! The cache and the flat table are read without a lock. Everything else is under one lock, which
//! no thread holds while it calls the backend or sleeps.

use std::sync::atomic::AtomicU64;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use memferry_sys::pages::page_bytes;
use memferry_sys::sync::lock;

use super::cache::{FillToken, LineCache, LineMiss};
use super::config::{LookupConfig, TableKind};
use super::counters::LookupCounters;
use super::error::LookupError;
#[cfg(feature = "comparison")]
use super::flat::{FLAT_LINE_ENTRIES, FlatTable};
use super::line::LineKey;
use super::miss::MissQueue;
use super::sharded_counter::ShardedHitCounter;
use super::slot::{AcquireResult, LineSlot};
use super::table::AttachmentTable;
use super::translation::Translation;
use crate::handle::ProcessAddress;

/// The parts of a lookup that do not depend on its backend.
#[derive(Debug)]
pub(crate) struct LookupShared {
    pub(crate) config: LookupConfig,
    pub(crate) store: LookupStore,
    pub(crate) page_shift: u32,
    pub(crate) line_entries: usize,
    pub(crate) hits: ShardedHitCounter,
    state: Mutex<LookupState>,
    /// Signalled when state that threads wait for has changed under the lock.
    changed: Condvar,
    /// Signalled when the miss thread has work.
    work: Condvar,
}

// There is one for each lookup, and a hit should not follow another pointer.
#[cfg_attr(feature = "comparison", expect(clippy::large_enum_variant))]
#[derive(Debug)]
pub(crate) enum LookupStore {
    Cached(LineCache),
    #[cfg(feature = "comparison")]
    Flat(FlatTable),
}

impl LookupStore {
    /// The cache; `None` for a flat table.
    #[inline(always)]
    pub(crate) fn cache(&self) -> Option<&LineCache> {
        match self {
            Self::Cached(cache) => Some(cache),
            #[cfg(feature = "comparison")]
            Self::Flat(_) => None,
        }
    }
}

/// The state under the lock.
#[derive(Debug)]
pub(crate) struct LookupState {
    pub(crate) table: AttachmentTable,
    /// Only with a cache.
    pub(crate) fill_token: Option<FillToken>,
    pub(crate) queue: MissQueue,
    /// All counters except hits.
    pub(crate) counters: LookupCounters,
    pub(crate) fills_at_last_sweep: u64,
    /// Whether the last check found more lines than the high-water mark.
    pub(crate) above_high_water: bool,
    pub(crate) sweeping: bool,
    pub(crate) stopping: bool,
    pub(crate) thread: MissThread,
}

#[derive(Debug)]
pub(crate) enum MissThread {
    NotStarted,
    Running(JoinHandle<()>),
    /// The thread could not be started: callers handle misses.
    Denied,
}

pub(crate) type LockedState<'a> = MutexGuard<'a, LookupState>;

/// The line of an address, and the page in it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PagePosition {
    pub(crate) line: LineKey,
    pub(crate) page: usize,
}

/// Number of address bits of user space; addresses above are invalid.
const ADDRESS_BITS: u32 = 57;

impl LookupShared {
    pub(crate) fn new(config: LookupConfig) -> Self {
        let (store, fill_token, line_entries) = match config.kind {
            TableKind::Cached(geometry) => {
                let (cache, fill_token) = LineCache::new(geometry);
                (LookupStore::Cached(cache), Some(fill_token), geometry.line_entries())
            }
            #[cfg(feature = "comparison")]
            TableKind::Flat => (LookupStore::Flat(FlatTable::new()), None, FLAT_LINE_ENTRIES),
        };
        let state = LookupState {
            table: AttachmentTable::new(store.cache()),
            fill_token,
            queue: MissQueue::new(config.queue_length),
            counters: LookupCounters::default(),
            fills_at_last_sweep: 0,
            above_high_water: false,
            sweeping: false,
            stopping: false,
            thread: MissThread::NotStarted,
        };
        Self {
            config,
            store,
            page_shift: page_bytes().trailing_zeros(),
            line_entries,
            hits: ShardedHitCounter::new(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            work: Condvar::new(),
        }
    }

    /// The line and page of an address.
    #[inline(always)]
    pub(crate) fn position(&self, handle: ProcessAddress) -> Result<PagePosition, LookupError> {
        if handle.address >> ADDRESS_BITS != 0 {
            return Err(LookupError::OutOfRange(handle.address));
        }
        let page_number = handle.address >> self.page_shift;
        let page = page_number as usize & (self.line_entries - 1);
        let address = (page_number - page as u64) << self.page_shift;
        Ok(PagePosition { line: LineKey { process: handle.process, address }, page })
    }

    /// The memory that a line covers, in bytes.
    pub(crate) fn line_bytes(&self) -> u64 {
        (self.line_entries as u64) << self.page_shift
    }

    /// The range of whole lines that overlap a range.
    pub(crate) fn lines_of(&self, address: u64, length: u64) -> std::ops::Range<u64> {
        let end = address.saturating_add(length).min(1 << ADDRESS_BITS);
        let start = address & !(self.line_bytes() - 1);
        if length == 0 || start >= end {
            return 0..0;
        }
        start..end.next_multiple_of(self.line_bytes())
    }

    /// Finds a line in the cache or the flat table, without the lock. The caller creates a
    /// translation of the acquired slot, whose drop releases it.
    #[inline(always)]
    pub(crate) fn find(&self, name: LineKey) -> Option<(&LineSlot, &[AtomicU64])> {
        let found = match &self.store {
            LookupStore::Cached(cache) => match cache.find(name) {
                Ok(slot) => return Some((cache.slot(slot), cache.entries(slot))),
                Err(miss) => miss,
            },
            #[cfg(feature = "comparison")]
            LookupStore::Flat(flat) => match flat.find(name) {
                Ok(found) => return Some(found),
                Err(miss) => miss,
            },
        };
        if let LineMiss { wake: true } = found {
            self.wake_waiters();
        }
        None
    }

    /// Creates a translation of a line that the table knows to be in the cache. The caller holds
    /// the lock.
    pub(crate) fn find_locked(
        &self,
        state: &LookupState,
        position: PagePosition,
    ) -> Option<Translation<'_>> {
        let cache = self.store.cache()?;
        let slot = state.table.line(position.line)?.slot?;
        match cache.slot(slot).acquire() {
            AcquireResult::Acquired => {
                let acquired = (cache.slot(slot), cache.entries(slot));
                Some(Translation::of_slot(self, acquired, position))
            }
            AcquireResult::Mismatch => None,
            AcquireResult::MismatchAndWake => {
                self.changed.notify_all();
                None
            }
        }
    }

    pub(crate) fn lock(&self) -> LockedState<'_> {
        lock(&self.state)
    }

    /// Sleeps until the state has changed.
    pub(crate) fn wait<'a>(&self, state: LockedState<'a>) -> LockedState<'a> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until the miss thread has work.
    pub(crate) fn wait_for_work<'a>(&self, state: LockedState<'a>) -> LockedState<'a> {
        self.work.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all waiting threads. The caller has changed the state under the lock.
    pub(crate) fn notify_waiters(&self) {
        self.changed.notify_all();
    }

    pub(crate) fn notify_miss_thread(&self) {
        self.work.notify_one();
    }

    /// Wakes the threads that wait for draining slots.
    #[cold]
    pub(crate) fn wake_waiters(&self) {
        match &self.store {
            LookupStore::Cached(_) => {
                // After this lock, every thread that checked the slot before its release is waiting
                // on the condition variable.
                drop(self.lock());
                self.changed.notify_all();
            }
            #[cfg(feature = "comparison")]
            LookupStore::Flat(flat) => flat.wake(),
        }
    }

    /// As [`LookupShared::end_use`], for callers without the lock.
    #[cold]
    pub(crate) fn release_line(&self, name: LineKey) {
        self.end_use(&mut self.lock(), name);
    }

    /// Releases a use of a line outside of the cache.
    pub(crate) fn end_use(&self, state: &mut LookupState, name: LineKey) {
        let Some(line) = state.table.line_mut(name) else { return };
        line.uses -= 1;
        if line.uses == 0 && line.draining {
            self.changed.notify_all();
        }
    }
}
