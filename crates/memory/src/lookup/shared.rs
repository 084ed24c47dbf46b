//! State that callers, translations and the miss thread share, without the backend.
//!
//! The cache and the flat table are read without a lock. Everything else is under one lock, which
//! no thread holds while it calls the backend or sleeps.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use memferry_sys::affinity::allowed_cores;
use memferry_sys::clock::now_ns;
use memferry_sys::pages::page_bytes;
use memferry_sys::sync::{lock, spin_hint};

use super::cache::{FillToken, LineCache, LineMiss};
use super::config::{DataPath, LookupConfig, TableKind};
use super::counters::{ByDataPath, LookupCounters, MissTally};
use super::entries::SharedLine;
use super::error::LookupError;
#[cfg(feature = "comparison")]
use super::flat::{FLAT_LINE_ENTRIES, FlatTable};
use super::hazard::HazardCell;
use super::line::LineKey;
use super::miss::MissQueue;
use super::readers::{ReaderShard, Readers};
use super::table::{AttachmentTable, word_of};
use super::translation::{EntrySource, Translation};
use crate::handle::{ProcessAddress, ProcessHandle};

/// The parts of a lookup that do not depend on its backend.
#[derive(Debug)]
pub(crate) struct LookupShared {
    pub(crate) config: LookupConfig,
    pub(crate) store: LookupStore,
    pub(crate) page_shift: u32,
    pub(crate) line_entries: usize,
    line_shift: u32,
    pub(crate) readers: Readers,
    /// Whether threads that wait for each other spin first: there are several cores.
    spins: bool,
    /// Changes with each event that is posted, for the miss thread that spins.
    posted: AtomicU64,
    state: Mutex<LookupState>,
    /// Signalled when state that threads wait for has changed under the lock.
    changed: Condvar,
    /// Signalled when the miss thread has work.
    work: Condvar,
}

// There is one for each lookup, and a hit should not follow another pointer.
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
    /// All counters except hits and misses.
    pub(crate) counters: LookupCounters,
    pub(crate) misses: ByDataPath<MissTally>,
    /// The number of threads that sleep until the state changes.
    sleepers: usize,
    /// The number of changes that waiting threads are told of.
    pub(crate) changes: u64,
    /// The miss thread sleeps until there is work.
    is_thread_asleep: bool,
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

/// An address of a process, whose handle is one word: a hit takes it from register to register.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PagePosition {
    pub(crate) owner: u64,
    pub(crate) address: u64,
}

/// Number of address bits of user space; addresses above are invalid.
const ADDRESS_BITS: u32 = 57;

/// How long a thread spins before it sleeps: several times what a wake-up costs.
const SPIN_NS: u64 = 30_000;

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
        let line_bytes = (line_entries * page_bytes()) as u64;
        let state = LookupState {
            table: AttachmentTable::new(store.cache(), line_bytes),
            fill_token,
            queue: MissQueue::new(config.queue_length),
            counters: LookupCounters::default(),
            misses: ByDataPath::default(),
            sleepers: 0,
            changes: 0,
            is_thread_asleep: false,
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
            line_shift: line_bytes.trailing_zeros(),
            readers: Readers::new(),
            spins: allowed_cores().len() > 1,
            posted: AtomicU64::new(0),
            state: Mutex::new(state),
            changed: Condvar::new(),
            work: Condvar::new(),
        }
    }

    /// The position of an address.
    #[inline(always)]
    pub(crate) fn position(&self, handle: ProcessAddress) -> Result<PagePosition, LookupError> {
        if handle.address >> ADDRESS_BITS != 0 {
            return Err(LookupError::OutOfRange(handle.address));
        }
        Ok(PagePosition { owner: handle.process.to_word(), address: handle.address })
    }

    /// The address of the line of a position.
    #[inline(always)]
    fn line_address(&self, position: PagePosition) -> u64 {
        position.address & !((1 << self.line_shift) - 1)
    }

    /// The page of a position in its line.
    #[inline(always)]
    pub(crate) fn page_in_line(&self, position: PagePosition) -> usize {
        (position.address >> self.page_shift) as usize & (self.line_entries - 1)
    }

    /// The line of a position.
    pub(crate) fn line_of(&self, position: PagePosition) -> LineKey {
        let process = ProcessHandle::from_word(position.owner);
        let process = process.expect("a position is made of a handle");
        LineKey { process, address: self.line_address(position) }
    }

    /// The memory that a line covers, in bytes.
    pub(crate) fn line_bytes(&self) -> u64 {
        1 << self.line_shift
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

    /// Finds a line in the cache or the flat table, without the lock, and counts the hit. Finds
    /// nothing for a thread without an empty cell, and for a page without an entry.
    #[inline(always)]
    pub(crate) fn find(&self, position: PagePosition, route: DataPath) -> Option<Translation<'_>> {
        let shard = self.readers.own()?;
        let cell = shard.empty_cell()?;
        let (tag, fence) = ((self.line_address(position), position.owner), self.readers.fence);
        let found = match &self.store {
            LookupStore::Cached(cache) => cache.find(tag, cell, fence).map(|word| {
                // SAFETY: words are addresses of lines, and the cell keeps this one attached.
                let line = unsafe { line_of(word) };
                // SAFETY: as above.
                unsafe { line.as_ref() }.record_use(cache.tick());
                EntrySource::Line(line)
            }),
            #[cfg(feature = "comparison")]
            LookupStore::Flat(flat) => flat.find(tag, cell, fence).map(EntrySource::Flat),
        };
        let source = match found {
            Ok(source) => source,
            Err(LineMiss { released }) => {
                if released {
                    self.wake_drains();
                }
                return None;
            }
        };
        // SAFETY: the cell keeps the line attached.
        let entry = unsafe { source.entry(self.page_in_line(position)) };
        if entry == 0 {
            self.release_cell(cell);
            return None;
        }
        shard.count(route);
        // SAFETY: as above, until the cell is cleared.
        Some(unsafe { Translation::new(self, (entry, source), Some(cell), position) })
    }

    /// Creates a translation of an attached line that accepts users. The caller holds the lock.
    pub(crate) fn hold(
        &self,
        state: &mut LookupState,
        position: PagePosition,
    ) -> Option<Translation<'_>> {
        let line = state.table.line_mut(self.line_of(position))?;
        let shared = line.usable()?;
        let source = EntrySource::Line(NonNull::from(&**shared));
        let entry = shared.entries.entry(self.page_in_line(position));
        let cell = self.readers.own().and_then(ReaderShard::empty_cell);
        match cell {
            Some(cell) => cell.publish_locked(word_of(shared)),
            None => line.uses += 1,
        }
        // SAFETY: the line is attached until the cell is cleared, or the use is not counted any
        // more.
        Some(unsafe { Translation::new(self, (entry, source), cell, position) })
    }

    /// Creates a translation of a line of which the caller has a counted use, and owns the use. The
    /// caller holds the lock.
    pub(crate) fn adopt(
        &self,
        state: &LookupState,
        position: PagePosition,
    ) -> Option<Translation<'_>> {
        let line = state.table.line(self.line_of(position))?.shared()?;
        let source = EntrySource::Line(NonNull::from(&**line));
        let entry = line.entries.entry(self.page_in_line(position));
        // SAFETY: the caller has a counted use.
        Some(unsafe { Translation::new(self, (entry, source), None, position) })
    }

    /// Creates a translation of a line that is in the cache. The caller holds the lock: its thread
    /// has no empty cell, another thread has just filled the line, or the page has no entry.
    pub(crate) fn find_locked(
        &self,
        state: &mut LookupState,
        position: PagePosition,
    ) -> Option<Translation<'_>> {
        let (cache, name) = (self.store.cache()?, self.line_of(position));
        cache.line_of(name)?;
        cache.touch(name);
        let translation = self.hold(state, position)?;
        if let Some(line) = state.table.line(name).and_then(|line| line.usable()) {
            line.record_use(cache.tick());
        }
        Some(translation)
    }

    pub(crate) fn lock(&self) -> LockedState<'_> {
        lock(&self.state)
    }

    /// Sleeps until the state has changed.
    pub(crate) fn wait<'a>(&self, mut state: LockedState<'a>) -> LockedState<'a> {
        state.sleepers += 1;
        let mut state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        state.sleepers -= 1;
        state
    }

    /// Spins, without the lock, until the condition is true; not for long.
    pub(crate) fn spin_until(&self, is_true: impl Fn() -> bool) {
        /// Reading the clock takes as long as some spins.
        const SPINS_PER_CLOCK: u32 = 16;
        if !self.spins {
            return;
        }
        let deadline_ns = now_ns() + SPIN_NS;
        loop {
            for _ in 0..SPINS_PER_CLOCK {
                if is_true() {
                    return;
                }
                spin_hint();
            }
            if now_ns() > deadline_ns {
                return;
            }
        }
    }

    /// Waits until the miss thread may have work: spins, then sleeps.
    pub(crate) fn wait_for_work<'a>(&'a self, state: LockedState<'a>) -> LockedState<'a> {
        let posted = self.posted.load(Ordering::Relaxed);
        drop(state);
        self.spin_until(|| self.posted.load(Ordering::Relaxed) != posted);
        let mut state = self.lock();
        if state.queue.is_empty() && !state.stopping {
            state.is_thread_asleep = true;
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.is_thread_asleep = false;
        }
        state
    }

    /// Wakes all waiting threads. The caller has changed the state under the lock.
    pub(crate) fn notify_waiters(&self, state: &mut LookupState) {
        state.changes += 1;
        if state.sleepers > 0 {
            self.changed.notify_all();
        }
    }

    /// Tells the miss thread of work.
    pub(crate) fn notify_miss_thread(&self, state: &mut LookupState) {
        self.posted.store(self.posted.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        if std::mem::take(&mut state.is_thread_asleep) {
            self.work.notify_one();
        }
    }

    /// Ends a use that a cell names.
    #[inline(always)]
    pub(crate) fn release_cell(&self, cell: &HazardCell) {
        cell.clear(self.readers.fence);
        if self.readers.drains.is_awaited() {
            self.wake_drains();
        }
    }

    /// Wakes the threads that wait until lines are unused.
    #[cold]
    pub(crate) fn wake_drains(&self) {
        match &self.store {
            // With the lock: a thread that saw the use is waiting on the condition variable.
            LookupStore::Cached(_) => self.notify_waiters(&mut self.lock()),
            #[cfg(feature = "comparison")]
            LookupStore::Flat(flat) => flat.wake(),
        }
    }

    /// Ends a use that is counted.
    // By words, so that a hit keeps none of them in memory for this call.
    #[cold]
    pub(crate) fn release_counted(&self, owner: u64, address: u64) {
        let name = self.line_of(PagePosition { owner, address });
        match &self.store {
            LookupStore::Cached(_) => self.end_use(&mut self.lock(), name),
            #[cfg(feature = "comparison")]
            LookupStore::Flat(flat) => flat.end_use(name),
        }
    }

    /// Ends a use that is counted, for the holder of the lock.
    pub(crate) fn end_use(&self, state: &mut LookupState, name: LineKey) {
        let Some(line) = state.table.line_mut(name) else { return };
        line.uses -= 1;
        if line.uses == 0 && line.draining {
            self.notify_waiters(state);
        }
    }
}

/// The line that a word of a slot or a cell names.
///
/// # Safety
/// The word must name a line that is attached.
#[inline(always)]
unsafe fn line_of(word: u64) -> NonNull<SharedLine> {
    let line = std::ptr::with_exposed_provenance_mut::<SharedLine>(word as usize);
    // SAFETY: the address of a line is not null.
    unsafe { NonNull::new_unchecked(line) }
}
