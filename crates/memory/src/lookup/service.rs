//! The work of a miss: attaching lines, filling the cache, sweeping, invalidating.
//!
//! The miss thread does it, and callers that would otherwise only wait. The backend is always
//! called without the lock; the state of the line in the table says that a call is in progress.

use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use memferry_sys::clock::now_ns;

use super::backend::{AttachError, TranslationBackend};
use super::cache::LineCache;
use super::config::LookupConfig;
use super::entries::LineEntries;
use super::error::LookupError;
use super::line::LineKey;
use super::miss::PendingMiss;
use super::process_table::RemovalStatus;
use super::shared::{LockedState, LookupShared, LookupStore, MissThread};
use super::table::{BATCH_LINES, DetachBatch, LineState};
use crate::handle::ProcessHandle;

/// A lookup with its backend, shared with the miss thread.
#[derive(Debug)]
pub(crate) struct MissService<S> {
    pub(crate) shared: LookupShared,
    pub(crate) backend: S,
}

/// All addresses.
const ALL_ADDRESSES: Range<u64> = 0..u64::MAX;

impl<S: TranslationBackend> MissService<S> {
    pub(crate) fn new(config: LookupConfig, backend: S) -> Self {
        Self { shared: LookupShared::new(config), backend }
    }

    /// Wakes the miss thread, or starts it. Returns false if it cannot be started.
    pub(crate) fn wake_miss_thread(self: &Arc<Self>, state: &mut LockedState<'_>) -> bool {
        if let MissThread::NotStarted = state.thread {
            let service = self.clone();
            let serve = move || service.run_miss_thread();
            state.thread = match memferry_sys::thread::spawn("memferry-miss", serve) {
                Ok(thread) => MissThread::Running(thread),
                Err(error) => {
                    tracing::warn!(%error, "cannot start the miss thread: callers handle misses inline");
                    MissThread::Denied
                }
            };
        }
        self.shared.notify_miss_thread(state);
        !matches!(state.thread, MissThread::Denied)
    }

    /// The loop of the miss thread.
    fn run_miss_thread(&self) {
        let mut state = self.shared.lock();
        while !state.stopping {
            state = if state.queue.is_empty() {
                self.shared.wait_for_work(state)
            } else {
                self.handle_next(state)
            };
        }
    }

    /// Handles the first event of the queue, if there is one.
    pub(crate) fn handle_next<'a>(&'a self, mut state: LockedState<'a>) -> LockedState<'a> {
        let Some((name, posted_ns)) = state.queue.begin() else { return state };
        let start_ns = now_ns();
        state.counters.delay_ns.record(start_ns.saturating_sub(posted_ns));
        let (mut state, attached) = self.attach(state, name);
        // A prefetched line fills the cache when it is needed: then its miss is counted, and a
        // replay, in which nothing is prefetched, has the same misses.
        let is_needed = |event: &mut PendingMiss| event.is_counted || event.waiters > 0;
        if attached.is_ok() && state.queue.pending(name).is_some_and(is_needed) {
            self.fill(&mut state, name);
        }
        state.counters.processing_ns.record(now_ns().saturating_sub(start_ns));
        self.complete(&mut state, name, attached);
        self.sweep_if_due(state)
    }

    fn complete(
        &self,
        state: &mut LockedState<'_>,
        name: LineKey,
        attached: Result<(), LookupError>,
    ) {
        let Some(event) = state.queue.end(name) else { return };
        match (&attached, state.table.line_mut(name)) {
            // Each waiter owns a use of the line when it wakes.
            (Ok(()), Some(line)) => line.uses += event.waiters,
            (Err(LookupError::Attach(error)), _) if event.waiters == 0 => {
                state.queue.store_error(name, *error);
            }
            _ => {}
        }
        // The cell is empty: only this code sets it, once for each event.
        let _ = event.result.set(attached);
        self.shared.notify_waiters(state);
    }

    /// Fills an attached line into the cache, unless it is there.
    #[inline]
    pub(crate) fn fill(&self, state: &mut LockedState<'_>, name: LineKey) {
        let Some(cache) = self.shared.store.cache() else { return };
        let state = &mut **state;
        let Some(fill_token) = state.fill_token.as_mut() else { return };
        if cache.line_of(name).is_some() {
            return;
        }
        if let Some(evicted) = state.table.fill(cache, fill_token, name) {
            state.counters.fills += 1;
            state.counters.evictions += u64::from(evicted);
        }
    }

    /// Finds a line in the table, or makes the backend attach it.
    pub(crate) fn attach<'a>(
        &'a self,
        mut state: LockedState<'a>,
        name: LineKey,
    ) -> (LockedState<'a>, Result<(), LookupError>) {
        loop {
            if let Err(stale) = state.table.processes.check(name.process) {
                return (state, Err(stale));
            }
            match state.table.line(name) {
                None => return self.attach_new(state, name),
                // The users of the line may wait for this result, so the caller must not wait for
                // them.
                Some(line) if line.draining && line.state == LineState::Attached => {
                    return (state, Err(LookupError::Invalidated));
                }
                Some(line) if line.state == LineState::Attached => return (state, Ok(())),
                // Another thread is calling the backend for this line.
                Some(_) => state = self.shared.wait(state),
            }
        }
    }

    fn attach_new<'a>(
        &'a self,
        mut state: LockedState<'a>,
        name: LineKey,
    ) -> (LockedState<'a>, Result<(), LookupError>) {
        if let Err(stale) = state.table.begin_attach(name) {
            return (state, Err(stale));
        }
        drop(state);
        let outcome = self.call_attach(name);
        let mut state = self.shared.lock();
        let attached = match outcome {
            Ok(entries) => {
                state.counters.attached += 1;
                state.table.end_attach(name, entries)
            }
            Err(error) => {
                state.counters.attach_errors += 1;
                state.table.remove(name);
                Err(error.into())
            }
        };
        self.shared.notify_waiters(&mut state);
        (state, attached)
    }

    /// Calls the backend. A panic counts as an error.
    fn call_attach(&self, name: LineKey) -> Result<LineEntries, AttachError> {
        let pages = self.shared.line_entries;
        let call = AssertUnwindSafe(|| {
            if let Some(run) = self.backend.attach_run(name, pages)? {
                return Ok(LineEntries::Run(run));
            }
            let mut entries = vec![0; pages].into_boxed_slice();
            self.backend.attach(name, &mut entries)?;
            Ok(LineEntries::Pages(entries))
        });
        catch_unwind(call).unwrap_or_else(|_| {
            tracing::error!(?name, "the translation backend panicked in attach");
            Err(io::ErrorKind::Other.into())
        })
    }

    /// As [`MissService::call_attach`], for a table that has a word for each page.
    #[cfg(feature = "comparison")]
    pub(crate) fn call_attach_pages(
        &self,
        name: LineKey,
        entries: &mut [u64],
    ) -> Result<(), AttachError> {
        let call = AssertUnwindSafe(|| self.backend.attach(name, entries));
        catch_unwind(call).unwrap_or_else(|_| {
            tracing::error!(?name, "the translation backend panicked in attach");
            Err(io::ErrorKind::Other.into())
        })
    }

    /// Calls the backend. A panic counts as success.
    fn call_detach(&self, name: LineKey, entries: &LineEntries) {
        match entries {
            LineEntries::Pages(entries) => self.call_detach_pages(name, entries),
            LineEntries::Run(run) => {
                let call = AssertUnwindSafe(|| self.backend.detach_run(name, run));
                if catch_unwind(call).is_err() {
                    tracing::error!(?name, "the translation backend panicked in detach");
                }
            }
        }
    }

    /// As [`MissService::call_detach`], of a line with a word for each page.
    pub(crate) fn call_detach_pages(&self, name: LineKey, entries: &[u64]) {
        let call = AssertUnwindSafe(|| self.backend.detach(name, entries));
        if catch_unwind(call).is_err() {
            tracing::error!(?name, "the translation backend panicked in detach");
        }
    }

    fn detach<'a>(&'a self, state: LockedState<'a>, batch: DetachBatch) -> LockedState<'a> {
        drop(state);
        for (name, line) in &batch {
            self.call_detach(*name, &line.entries);
        }
        let mut state = self.shared.lock();
        for (name, _) in &batch {
            state.table.remove(*name);
        }
        state.counters.detached += batch.len() as u64;
        self.shared.notify_waiters(&mut state);
        state
    }

    /// Detaches idle lines, the least recently used first, if there are too many lines and a sweep
    /// is due: when the high-water mark is passed, and periodically while the count is above it.
    #[inline]
    pub(crate) fn sweep_if_due<'a>(&'a self, mut state: LockedState<'a>) -> LockedState<'a> {
        let LookupConfig { high_water_lines, sweep_every, .. } = self.shared.config;
        let count = state.table.count();
        let since = state.counters.fills - state.fills_at_last_sweep;
        let passed = count > high_water_lines && !state.above_high_water;
        state.above_high_water = count > high_water_lines;
        if !state.above_high_water || state.sweeping || !(passed || since >= sweep_every) {
            return state;
        }
        self.sweep(state, high_water_lines - high_water_lines / 4)
    }

    #[cold]
    fn sweep<'a>(&'a self, mut state: LockedState<'a>, target: usize) -> LockedState<'a> {
        let Some(cache) = self.shared.store.cache() else { return state };
        state.sweeping = true;
        state.fills_at_last_sweep = state.counters.fills;
        let readers = &self.shared.readers;
        let excess = state.table.count().saturating_sub(target);
        for names in state.table.oldest_idle(cache, excess).chunks(BATCH_LINES) {
            // Lines outside of the cache get no users without the lock, except by readers that
            // found them there before.
            readers.drains.begin(readers.fence);
            let in_use = readers.lines_in_use();
            readers.drains.end();
            let batch = state.table.take_idle(cache, names, &in_use);
            state = self.detach(state, batch);
        }
        state.sweeping = false;
        state.above_high_water = state.table.count() > self.shared.config.high_water_lines;
        state
    }

    /// Detaches all lines of a range, and waits for those in use.
    pub(crate) fn invalidate<'a>(
        &'a self,
        mut state: LockedState<'a>,
        cache: &LineCache,
        process: ProcessHandle,
        range: Range<u64>,
    ) -> LockedState<'a> {
        let locked = &mut *state;
        let Some(fill_token) = locked.fill_token.as_mut() else { return state };
        let mut names = locked.table.begin_drain(cache, fill_token, process, range);
        if names.is_empty() {
            return state;
        }
        let readers = &self.shared.readers;
        // The lines are out of the cache: readers find them no more, or are found below.
        readers.drains.begin(readers.fence);
        loop {
            let batch = state.table.take_drained(&mut names, &readers.lines_in_use());
            if names.is_empty() {
                break;
            }
            state = match batch.is_empty() {
                true => self.shared.wait(state),
                false => self.detach(state, batch),
            };
        }
        readers.drains.end();
        state
    }

    /// Removes a process with all its lines, and waits for those in use.
    pub(crate) fn remove_process(&self, process: ProcessHandle) {
        let mut state = self.shared.lock();
        match state.table.processes.begin_removal(process) {
            RemovalStatus::NotFound => return,
            RemovalStatus::InProgress => {
                while state.table.processes.lines(process).is_some() {
                    state = self.shared.wait(state);
                }
                return;
            }
            RemovalStatus::Started => {}
        }
        state = match &self.shared.store {
            LookupStore::Cached(cache) => self.invalidate(state, cache, process, ALL_ADDRESSES),
            #[cfg(feature = "comparison")]
            LookupStore::Flat(flat) => {
                drop(state);
                let readers = &self.shared.readers;
                let detached = flat.invalidate(readers, process, ALL_ADDRESSES, |name, entries| {
                    self.call_detach_pages(name, entries);
                });
                let mut state = self.shared.lock();
                state.counters.detached += detached;
                state
            }
        };
        state.table.processes.end_removal(process);
        self.shared.notify_waiters(&mut state);
    }

    /// Stops the miss thread and detaches all lines. No translation exists any more, except leaked
    /// ones.
    pub(crate) fn shut_down(&self) {
        let mut state = self.shared.lock();
        state.stopping = true;
        self.shared.notify_miss_thread(&mut state);
        let thread = std::mem::replace(&mut state.thread, MissThread::Denied);
        drop(state);
        if let MissThread::Running(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the miss thread panicked");
        }
        let batch = self.shared.lock().table.take_all();
        for (name, line) in &batch {
            self.call_detach(*name, &line.entries);
        }
        #[cfg(feature = "comparison")]
        if let LookupStore::Flat(flat) = &self.shared.store {
            flat.take_all(|name, entries| self.call_detach_pages(name, entries));
        }
    }
}
