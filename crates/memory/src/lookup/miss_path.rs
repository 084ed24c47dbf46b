//! Handling of a request that missed: it waits, handles misses inline, or is to be retried.

use std::sync::Arc;

use memferry_sys::clock::now_ns;

use super::backend::TranslationBackend;
use super::config::{DataPath, MissPolicy};
use super::error::LookupError;
#[cfg(feature = "comparison")]
use super::flat::FlatTable;
use super::line::LineKey;
use super::miss::MissResult;
use super::service::MissService;
#[cfg(feature = "comparison")]
use super::shared::LookupStore;
use super::shared::{LockedState, LookupState, MissThread, PagePosition};
#[cfg(feature = "comparison")]
use super::translation::EntrySource;
use super::translation::Translation;

impl<S: TranslationBackend> MissService<S> {
    /// A lookup without waiting that missed the cache.
    // By words, so that a hit keeps none of them in memory for this call; as `handle_miss`.
    #[cold]
    pub(crate) fn find_slow(
        &self,
        owner: u64,
        address: u64,
        route: DataPath,
    ) -> Result<Option<Translation<'_>>, LookupError> {
        let position = PagePosition { owner, address };
        #[cfg(feature = "comparison")]
        if let LookupStore::Flat(flat) = &self.shared.store {
            return self.find_flat(flat, position, route);
        }
        let mut state = self.shared.lock();
        let found = self.recheck(&mut state, position, route)?;
        if found.is_none() {
            self.count_miss_or_retry(&mut state, self.shared.line_of(position), route);
        }
        // Dropping a translation may need the lock.
        drop(state);
        found.map(Translation::checked).transpose()
    }

    /// A lookup in the flat table that found nothing without its lock.
    #[cfg(feature = "comparison")]
    fn find_flat<'a>(
        &'a self,
        flat: &'a FlatTable,
        position: PagePosition,
        route: DataPath,
    ) -> Result<Option<Translation<'a>>, LookupError> {
        let name = self.shared.line_of(position);
        self.shared.lock().table.processes.check(name.process)?;
        let Some(entries) = flat.find_locked(name) else {
            self.count_miss(&mut self.shared.lock(), name, route);
            return Ok(None);
        };
        self.shared.readers.count_hit(route);
        let source = EntrySource::Flat(entries);
        // SAFETY: the use is counted.
        let entry = unsafe { source.entry(self.shared.page_in_line(position)) };
        // SAFETY: as above.
        let found = unsafe { Translation::new(&self.shared, (entry, source), None, position) };
        found.checked().map(Some)
    }

    /// A request that missed the cache.
    #[cold]
    pub(crate) fn handle_miss(
        self: &Arc<Self>,
        owner: u64,
        address: u64,
        route: DataPath,
        policy: MissPolicy,
    ) -> Result<Translation<'_>, LookupError> {
        let position = PagePosition { owner, address };
        if self.shared.store.cache().is_none() {
            let found = self.find_slow(owner, address, route)?;
            let line = self.shared.line_of(position);
            return found.ok_or(LookupError::NotPreloaded(line.address));
        }
        match policy {
            MissPolicy::Wait => self.wait_for_line(position, route),
            MissPolicy::Retry => self.post_and_retry(position, route),
        }
    }

    /// A prefetch: the line is attached, and fills the cache when it is needed.
    pub(crate) fn handle_prefetch(self: &Arc<Self>, position: PagePosition, route: DataPath) {
        if self.shared.store.cache().is_some() {
            self.prefetch(self.shared.lock(), position, route);
        }
    }

    fn prefetch(
        self: &Arc<Self>,
        mut state: LockedState<'_>,
        position: PagePosition,
        route: DataPath,
    ) {
        let name = self.shared.line_of(position);
        let is_stale = state.table.processes.check(name.process).is_err();
        if !is_stale && state.table.line(name).is_none() {
            *state.counters.prefetches.of(route) += 1;
            self.post(state, name, false);
        }
    }

    /// A line that is needed after another one and missed the cache: found in the table, or
    /// prefetched.
    #[cold]
    pub(crate) fn find_attached_or_prefetch(
        self: &Arc<Self>,
        position: PagePosition,
        route: DataPath,
    ) -> Option<Translation<'_>> {
        self.shared.store.cache()?;
        let name = self.shared.line_of(position);
        let mut state = self.shared.lock();
        state.table.processes.check(name.process).ok()?;
        if let Some(translation) = self.shared.find_locked(&mut state, position) {
            self.shared.readers.count_hit(route);
            return Some(translation);
        }
        if self.fills_inline(&state, name) {
            self.count_miss_or_retry(&mut state, name, route);
            let translation = self.fill_inline(&mut state, position);
            drop(self.sweep_if_due(state));
            return translation;
        }
        self.prefetch(state, position, route);
        None
    }

    /// Whether a caller may fill the line into the cache: it is in the table.
    #[inline]
    fn fills_inline(&self, state: &LookupState, name: LineKey) -> bool {
        self.shared.config.inline_misses
            && state.table.line(name).is_some_and(|line| line.usable().is_some())
    }

    /// Fills a line of the table into the cache and creates a translation of it. Every sixteenth
    /// time it is timed: reading the clock takes as long as the rest.
    #[inline]
    fn fill_inline(
        &self,
        state: &mut LockedState<'_>,
        position: PagePosition,
    ) -> Option<Translation<'_>> {
        const TIMED_INTERVAL: u64 = 16;
        let is_timed = state.counters.inline_misses.is_multiple_of(TIMED_INTERVAL);
        let start_ns = if is_timed { now_ns() } else { 0 };
        state.counters.inline_misses += 1;
        self.fill(state, self.shared.line_of(position));
        let translation = self.shared.hold(state, position);
        if is_timed {
            state.counters.delay_ns.record(0);
            state.counters.processing_ns.record(now_ns().saturating_sub(start_ns));
        }
        translation
    }

    /// Counts a miss by its kind.
    #[inline]
    fn count_miss(&self, state: &mut LookupState, name: LineKey, route: DataPath) {
        let LookupState { misses, table, .. } = state;
        let (tally, last_use) = (misses.of(route), table.last_use(name));
        match self.shared.store.cache().filter(|_| last_use > 0) {
            Some(cache) => tally.count_warm(|| table.classify(cache, name, last_use)),
            None => tally.count_cold(),
        }
    }

    /// As [`MissService::count_miss`]; but a request whose event was counted before is a retry.
    fn count_miss_or_retry(&self, state: &mut LookupState, name: LineKey, route: DataPath) {
        match state.queue.pending(name) {
            Some(event) if event.is_counted => {
                state.counters.retries += 1;
                return;
            }
            Some(event) => event.is_counted = true,
            None => {}
        }
        self.count_miss(state, name, route);
    }

    /// Searches again, under the lock, and returns what an earlier event left for this request.
    fn recheck<'a>(
        &'a self,
        state: &mut LockedState<'_>,
        position: PagePosition,
        route: DataPath,
    ) -> Result<Option<Translation<'a>>, LookupError> {
        let name = self.shared.line_of(position);
        state.table.processes.check(name.process)?;
        if let Some(translation) = self.shared.find_locked(state, position) {
            self.shared.readers.count_hit(route);
            return Ok(Some(translation));
        }
        match state.queue.take_error(name) {
            Some(error) => Err(error.into()),
            None => Ok(None),
        }
    }

    fn post_and_retry(
        self: &Arc<Self>,
        position: PagePosition,
        route: DataPath,
    ) -> Result<Translation<'_>, LookupError> {
        let name = self.shared.line_of(position);
        let mut state = self.shared.lock();
        let mut found = self.recheck(&mut state, position, route)?;
        if found.is_none() && self.fills_inline(&state, name) {
            self.count_miss_or_retry(&mut state, name, route);
            found = self.fill_inline(&mut state, position);
            state = self.sweep_if_due(state);
        } else if found.is_none() {
            if state.queue.pending(name).is_none() && state.queue.is_full() {
                // The miss is counted when its event finds space.
                state.counters.retries += 1;
            } else {
                self.count_miss_or_retry(&mut state, name, route);
            }
        }
        match found {
            // Dropping a translation may need the lock.
            Some(translation) => {
                drop(state);
                translation.checked()
            }
            None => {
                self.post(state, name, true);
                Err(LookupError::NotCached)
            }
        }
    }

    /// Posts an event for the miss thread, unless the line has one. If the queue is full, it is
    /// dropped.
    fn post(self: &Arc<Self>, mut state: LockedState<'_>, name: LineKey, is_counted: bool) {
        if state.queue.pending(name).is_some() {
            return;
        }
        if state.queue.is_full() {
            state.counters.dropped += 1;
            return;
        }
        state.queue.post(name, is_counted, now_ns());
        if !self.wake_miss_thread(&mut state) {
            drop(self.handle_next(state));
        }
    }

    /// Fills the line from the table, or waits until it is attached, and handles queued misses
    /// meanwhile if that is configured.
    fn wait_for_line(
        self: &Arc<Self>,
        position: PagePosition,
        route: DataPath,
    ) -> Result<Translation<'_>, LookupError> {
        let name = self.shared.line_of(position);
        let mut state = self.shared.lock();
        state.table.processes.check(name.process)?;
        if let Some(translation) = self.shared.find_locked(&mut state, position) {
            self.shared.readers.count_hit(route);
            drop(state);
            return translation.checked();
        }
        if self.fills_inline(&state, name) {
            self.count_miss_or_retry(&mut state, name, route);
            let translation = self.fill_inline(&mut state, position);
            drop(self.sweep_if_due(state));
            return translation.ok_or(LookupError::Invalidated)?.checked();
        }
        self.wait_for_event(state, position, route)
    }

    /// Waits for the event of a line, which is posted unless there is one. Of all that wait for one
    /// event, one is counted as a miss.
    #[cold]
    fn wait_for_event<'a>(
        self: &'a Arc<Self>,
        mut state: LockedState<'a>,
        position: PagePosition,
        route: DataPath,
    ) -> Result<Translation<'a>, LookupError> {
        let name = self.shared.line_of(position);
        let result = loop {
            state.table.processes.check(name.process)?;
            if let Some(translation) = self.shared.find_locked(&mut state, position) {
                self.shared.readers.count_hit(route);
                drop(state);
                return translation.checked();
            }
            if state.queue.pending(name).is_none() && !state.queue.is_full() {
                state.queue.post(name, false, now_ns());
            }
            if let Some(result) = state.queue.join(name) {
                self.count_miss_or_retry(&mut state, name, route);
                break result;
            }
            state = self.wait_or_handle_inline(state, &MissResult::default());
        };
        let outcome = loop {
            if let Some(outcome) = result.get() {
                break *outcome;
            }
            state = self.wait_or_handle_inline(state, &result);
        };
        outcome?;
        // The result includes a use of the line in the table. A use by a cell is cheaper to release.
        let translation = self.shared.hold(&mut state, position);
        let translation = match translation {
            Some(translation) => {
                self.shared.end_use(&mut state, name);
                Some(translation)
            }
            // The line is draining since, and the use makes the invalidation wait.
            None => self.shared.adopt(&state, position),
        };
        drop(state);
        translation.ok_or(LookupError::Invalidated)?.checked()
    }

    fn wait_or_handle_inline<'a>(
        self: &'a Arc<Self>,
        mut state: LockedState<'a>,
        result: &MissResult,
    ) -> LockedState<'a> {
        if state.queue.is_empty() {
            // Other threads are handling all events.
            return self.spin_or_wait(state, result);
        }
        let handles_inline =
            self.shared.config.inline_misses || matches!(state.thread, MissThread::Denied);
        if handles_inline || !self.wake_miss_thread(&mut state) {
            state.counters.inline_misses += 1;
            return self.handle_next(state);
        }
        self.spin_or_wait(state, result)
    }

    /// Waits until the state changes: spins for the result, which mostly comes within microseconds,
    /// then sleeps.
    fn spin_or_wait<'a>(&'a self, state: LockedState<'a>, result: &MissResult) -> LockedState<'a> {
        let changes = state.changes;
        drop(state);
        self.shared.spin_until(|| result.get().is_some());
        let state = self.shared.lock();
        if result.get().is_some() || state.changes != changes {
            return state;
        }
        self.shared.wait(state)
    }
}
