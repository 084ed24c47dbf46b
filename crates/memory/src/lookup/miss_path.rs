//! Handling of a request that missed: it waits, handles misses inline, or is to be retried.

use std::sync::Arc;

use memferry_sys::clock::now_ns;

use super::backend::TranslationBackend;
use super::config::{DataPath, MissPolicy};
use super::counters::MissKind;
use super::error::LookupError;
use super::line::LineKey;
use super::service::MissService;
use super::shared::{LockedState, LookupStore, MissThread, PagePosition};
use super::translation::Translation;

impl<S: TranslationBackend> MissService<S> {
    /// A lookup without waiting that missed the cache.
    #[cold]
    pub(crate) fn find_slow(
        &self,
        position: PagePosition,
        route: DataPath,
    ) -> Result<Option<Translation<'_>>, LookupError> {
        let mut state = self.shared.lock();
        let found = self.recheck(&mut state, position, route)?;
        // Dropping a translation may need the lock.
        drop(state);
        found.ok().map(Translation::checked).transpose()
    }

    /// A request that missed the cache.
    #[cold]
    pub(crate) fn handle_miss(
        self: &Arc<Self>,
        position: PagePosition,
        route: DataPath,
        policy: MissPolicy,
    ) -> Result<Translation<'_>, LookupError> {
        if self.shared.store.cache().is_none() {
            let found = self.find_slow(position, route)?;
            return found.ok_or(LookupError::NotPreloaded(position.line.address));
        }
        match policy {
            MissPolicy::Wait => self.wait_for_line(position, route),
            MissPolicy::Retry => self.post_and_retry(position, route),
        }
    }

    /// A prefetch.
    pub(crate) fn handle_prefetch(self: &Arc<Self>, position: PagePosition, route: DataPath) {
        let Some(cache) = self.shared.store.cache() else { return };
        let mut state = self.shared.lock();
        let is_stale = state.table.processes.check(position.line.process).is_err();
        let is_cached = state.table.line(position.line).is_some_and(|line| line.slot.is_some());
        if !is_stale && !is_cached {
            *state.counters.prefetches.of(route) += 1;
            let kind = state.table.classify(cache, position.line);
            self.post(state, position.line, kind, false);
        }
    }

    /// Searches again, under the lock, and counts the hit or miss. The inner error is the kind of
    /// the miss.
    fn recheck<'a>(
        &'a self,
        state: &mut LockedState<'_>,
        position: PagePosition,
        route: DataPath,
    ) -> Result<Result<Translation<'a>, MissKind>, LookupError> {
        state.table.processes.check(position.line.process)?;
        if let Some(translation) = self.shared.find_locked(state, position) {
            self.shared.hits.count(route);
            return Ok(Ok(translation));
        }
        if let Some(error) = state.queue.take_error(position.line) {
            return Err(error.into());
        }
        let (kind, is_counted) = self.classify_miss(state, position);
        if is_counted {
            state.counters.retries += 1;
        } else {
            state.counters.misses.of(route).count(kind);
        }
        Ok(Err(kind))
    }

    /// The kind of a miss, and whether the pending event of its line has been counted already.
    fn classify_miss(
        &self,
        state: &mut LockedState<'_>,
        position: PagePosition,
    ) -> (MissKind, bool) {
        let state = &mut **state;
        match (state.queue.pending(position.line), &self.shared.store) {
            (Some(event), _) => (event.kind, std::mem::replace(&mut event.is_counted, true)),
            (None, LookupStore::Cached(cache)) => {
                (state.table.classify(cache, position.line), false)
            }
            #[cfg(feature = "comparison")]
            (None, LookupStore::Flat(_)) => (MissKind::Cold, false),
        }
    }

    fn post_and_retry(
        self: &Arc<Self>,
        position: PagePosition,
        route: DataPath,
    ) -> Result<Translation<'_>, LookupError> {
        let mut state = self.shared.lock();
        if let Some(entries) = state.table.use_uncached(position.line) {
            // An earlier request has attached the line, but the cache had no space for it.
            state.counters.retries += 1;
            drop(state);
            return Translation::of_table(&self.shared, entries, position).checked();
        }
        match self.recheck(&mut state, position, route)? {
            Ok(translation) => {
                drop(state);
                translation.checked()
            }
            Err(kind) => {
                self.post(state, position.line, kind, true);
                Err(LookupError::NotCached)
            }
        }
    }

    /// Posts an event for the miss thread, unless the line has one. If the queue is full, it is
    /// dropped.
    fn post(
        self: &Arc<Self>,
        mut state: LockedState<'_>,
        name: LineKey,
        kind: MissKind,
        counted: bool,
    ) {
        if state.queue.pending(name).is_some() {
            return;
        }
        if state.queue.is_full() {
            state.counters.dropped += 1;
            return;
        }
        state.queue.post(name, kind, counted, now_ns());
        if !self.wake_miss_thread(&mut state) {
            drop(self.handle_next(state));
        }
    }

    /// Waits until a line is attached, and handles queued misses meanwhile if that is configured.
    fn wait_for_line(
        self: &Arc<Self>,
        position: PagePosition,
        route: DataPath,
    ) -> Result<Translation<'_>, LookupError> {
        let mut state = self.shared.lock();
        let mut counted = None;
        let result = loop {
            state.table.processes.check(position.line.process)?;
            if let Some(translation) = self.shared.find_locked(&state, position) {
                if counted.is_none() {
                    self.shared.hits.count(route);
                }
                drop(state);
                return translation.checked();
            }
            let kind = counted.unwrap_or_else(|| {
                let (kind, _) = self.classify_miss(&mut state, position);
                state.counters.misses.of(route).count(kind);
                kind
            });
            counted = Some(kind);
            if state.queue.pending(position.line).is_none() && !state.queue.is_full() {
                state.queue.post(position.line, kind, true, now_ns());
            }
            if let Some(result) = state.queue.join(position.line) {
                break result;
            }
            state = self.wait_or_handle_inline(state);
        };
        let entries = loop {
            if let Some(outcome) = result.get() {
                break outcome.clone()?;
            }
            state = self.wait_or_handle_inline(state);
        };
        // The result includes a use of the line in the table. A use of its slot is cheaper to
        // release.
        let translation = match self.shared.find_locked(&state, position) {
            Some(translation) => {
                self.shared.end_use(&mut state, position.line);
                translation
            }
            None => Translation::of_table(&self.shared, entries, position),
        };
        drop(state);
        translation.checked()
    }

    fn wait_or_handle_inline<'a>(
        self: &'a Arc<Self>,
        mut state: LockedState<'a>,
    ) -> LockedState<'a> {
        if state.queue.is_empty() {
            // Other threads are handling all events.
            return self.shared.wait(state);
        }
        let handles_inline =
            self.shared.config.inline_misses || matches!(state.thread, MissThread::Denied);
        if handles_inline || !self.wake_miss_thread(&mut state) {
            state.counters.inline_misses += 1;
            return self.handle_next(state);
        }
        self.shared.wait(state)
    }
}
