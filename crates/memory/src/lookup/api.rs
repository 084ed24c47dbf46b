//! The calls of a lookup.

use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;

use memferry_sys::fork::OwnerProcess;

use super::backend::TranslationBackend;
use super::config::{DataPath, LookupConfig, MissPolicy};
use super::counters::{ByDataPath, LookupCounters};
use super::error::{LookupError, TooManyProcesses};
use super::footprint::LookupFootprint;
use super::line::LineKey;
use super::service::MissService;
use super::shared::{LookupStore, PagePosition};
use super::trace::Recorder;
use super::translation::Translation;
use crate::handle::{ProcessAddress, ProcessHandle};

/// A cache of translations. Threads share it by reference.
pub struct Lookup<S: TranslationBackend> {
    service: Arc<MissService<S>>,
    recorder: Option<Recorder>,
    /// The process that created it.
    owner: OwnerProcess,
}

impl<S: TranslationBackend> Lookup<S> {
    /// Creates a lookup over a backend. Its miss thread starts with the first miss that needs it
    /// and ends when the lookup is dropped, which also detaches all lines.
    pub fn new(config: LookupConfig, backend: S) -> io::Result<Self> {
        if config.queue_length == 0 || config.sweep_every == 0 {
            let message = "queue_length and sweep_every must be at least 1";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let service = Arc::new(MissService::new(config, backend));
        Ok(Self { service, recorder: None, owner: OwnerProcess::current() })
    }

    /// Records every access from now on to `writer`, for [`replay`](super::trace::replay).
    pub fn start_recording(&mut self, writer: Box<dyn Write + Send>) -> io::Result<()> {
        self.recorder = Some(Recorder::new(writer)?);
        Ok(())
    }

    /// Ends the recording. Returns the number of records, or the first error of the recording.
    pub fn end_recording(&mut self) -> io::Result<u64> {
        self.recorder.take().map_or(Ok(0), Recorder::finish)
    }

    /// The configuration.
    pub fn config(&self) -> LookupConfig {
        self.service.shared.config
    }

    /// The backend.
    pub fn backend(&self) -> &S {
        &self.service.backend
    }

    /// Adds a process. Numbers are reused, handles are not.
    pub fn add_process(&self) -> Result<ProcessHandle, TooManyProcesses> {
        self.service.shared.lock().table.processes.add()
    }

    /// Detaches all memory of a process and makes its handle stale. Waits until none of it is in
    /// use, so the caller must not hold a translation of it.
    pub fn remove_process(&self, process: ProcessHandle) {
        if let Some(recorder) = &self.recorder {
            recorder.process_removed(process);
        }
        self.service.remove_process(process);
    }

    /// Detaches all lines that overlap a range, because its mapping is about to change. Waits until
    /// none of them is in use, so the caller must not hold a translation of it. Concurrent lookups
    /// fail with [`LookupError::Invalidated`]; later ones attach the memory again.
    pub fn invalidate(&self, process: ProcessHandle, address: u64, length: u64) {
        let shared = &self.service.shared;
        let range = shared.lines_of(address, length);
        if let Some(recorder) = &self.recorder {
            recorder.invalidated(
                process,
                range.start >> shared.page_shift..range.end >> shared.page_shift,
            );
        }
        match &shared.store {
            LookupStore::Cached(cache) => {
                drop(self.service.invalidate(shared.lock(), cache, process, range));
            }
            #[cfg(feature = "comparison")]
            LookupStore::Flat(flat) => {
                let detach = |name, entries: &[u64]| self.service.call_detach_pages(name, entries);
                let detached = flat.invalidate(&shared.readers, process, range, detach);
                shared.lock().counters.detached += detached;
            }
        }
    }

    /// Attaches all lines that overlap a range, in advance. The flat table finds only preloaded
    /// lines; with a cache, the first uses need not wait for the backend. After an error the flat
    /// table is unchanged, and the tables behind a cache keep the lines before the failed one.
    pub fn preload(
        &self,
        process: ProcessHandle,
        address: u64,
        length: u64,
    ) -> Result<(), LookupError> {
        let (service, shared) = (&*self.service, &self.service.shared);
        let range = shared.lines_of(address, length);
        match &shared.store {
            LookupStore::Cached(_) => {
                let mut state = shared.lock();
                for address in range.step_by(shared.line_bytes() as usize) {
                    let outcome;
                    (state, outcome) = service.attach(state, LineKey { process, address });
                    outcome?;
                }
            }
            #[cfg(feature = "comparison")]
            LookupStore::Flat(flat) => {
                let check = || shared.lock().table.processes.check(process);
                let attach = |name, entries: &mut [u64]| service.call_attach_pages(name, entries);
                let detach = |name, entries: &[u64]| service.call_detach_pages(name, entries);
                let attached = flat.preload(process, range, check, attach, detach)?;
                shared.lock().counters.attached += attached;
            }
        }
        Ok(())
    }

    /// Finds a translation that is cached already.
    // Inlined: moving a translation through memory would cost more than finding it.
    #[inline(always)]
    pub fn find(
        &self,
        handle: ProcessAddress,
        route: DataPath,
    ) -> Result<Option<Translation<'_>>, LookupError> {
        let position = self.locate(handle, route)?;
        match self.service.shared.find(position, route) {
            Some(found) => Ok(Some(found)),
            None => self.service.find_slow(position.owner, position.address, route),
        }
    }

    /// Finds a translation that is needed after another one, in the cache or, if callers handle
    /// misses, in the tables. Otherwise the line is prefetched, which counts as a miss only when it
    /// is needed.
    pub fn find_or_prefetch(
        &self,
        handle: ProcessAddress,
        route: DataPath,
    ) -> Option<Translation<'_>> {
        let shared = &self.service.shared;
        let position = shared.position(handle).ok()?;
        let found = match shared.find(position, route) {
            Some(found) => found,
            None => self.service.find_attached_or_prefetch(position, route)?,
        };
        self.record(handle, route);
        found.checked().ok()
    }

    /// Prefetches a translation that will be needed later: the line is attached, and fills the cache
    /// when it is needed. Never waits; has no effect if the queue is full.
    pub fn prefetch(&self, handle: ProcessAddress, route: DataPath) {
        if let Ok(position) = self.service.shared.position(handle) {
            self.service.handle_prefetch(position, route);
        }
    }

    /// Finds a translation. Depending on the policy, a miss waits for the line, or fails with
    /// [`LookupError::NotCached`] and is to be retried later.
    // Inlined, as `find`.
    #[inline(always)]
    pub fn translate(
        &self,
        handle: ProcessAddress,
        route: DataPath,
    ) -> Result<Translation<'_>, LookupError> {
        self.translate_with(handle, route, self.service.shared.config.policy)
    }

    /// As [`Lookup::translate`] with [`MissPolicy::Retry`], for a caller that has other work.
    pub fn try_translate(
        &self,
        handle: ProcessAddress,
        route: DataPath,
    ) -> Result<Translation<'_>, LookupError> {
        self.translate_with(handle, route, MissPolicy::Retry)
    }

    #[inline(always)]
    fn translate_with(
        &self,
        handle: ProcessAddress,
        route: DataPath,
        policy: MissPolicy,
    ) -> Result<Translation<'_>, LookupError> {
        let position = self.locate(handle, route)?;
        match self.service.shared.find(position, route) {
            Some(found) => Ok(found),
            None => self.service.handle_miss(position.owner, position.address, route, policy),
        }
    }

    /// The counters so far.
    pub fn counters(&self) -> LookupCounters {
        let shared = &self.service.shared;
        let state = shared.lock();
        let ByDataPath { send, receive } = &state.misses;
        LookupCounters {
            hits: shared.readers.hits(),
            misses: ByDataPath { send: send.counts(), receive: receive.counts() },
            ..state.counters
        }
    }

    /// The memory of the lookup, by component.
    pub fn footprint(&self) -> LookupFootprint {
        let shared = &self.service.shared;
        let near = match &shared.store {
            LookupStore::Cached(cache) => cache.geometry().footprint(),
            #[cfg(feature = "comparison")]
            LookupStore::Flat(flat) => flat.footprint(),
        };
        let state = shared.lock();
        LookupFootprint {
            entries: near.entries,
            tags: near.tags,
            order: near.order,
            table: state.table.memory_bytes(),
            process_table: state.table.processes.memory_bytes(),
            queue: state.queue.memory_bytes(),
            counters: shared.readers.memory_bytes(),
        }
    }

    /// Whether only [preloaded](Lookup::preload) lines are found, as with a flat table.
    pub fn finds_preloaded_only(&self) -> bool {
        self.service.shared.store.cache().is_none()
    }

    /// The lines that are currently in the cache, in no particular order; none for a flat table.
    pub fn cached_lines(&self) -> Vec<LineKey> {
        let Some(cache) = self.service.shared.store.cache() else { return Vec::new() };
        let _exact = self.service.shared.lock();
        cache.keys().collect()
    }

    #[inline(always)]
    fn locate(&self, handle: ProcessAddress, route: DataPath) -> Result<PagePosition, LookupError> {
        let position = self.service.shared.position(handle)?;
        self.record(handle, route);
        Ok(position)
    }

    #[inline(always)]
    fn record(&self, handle: ProcessAddress, route: DataPath) {
        if let Some(recorder) = &self.recorder {
            let page = handle.address >> self.service.shared.page_shift;
            recorder.access(handle.process, page, route);
        }
    }
}

impl<S: TranslationBackend> Drop for Lookup<S> {
    fn drop(&mut self) {
        if !self.owner.is_current() {
            // In a forked child the miss thread does not exist, a thread of the parent may hold the
            // lock forever, and only the parent may write the recording: all of it is leaked.
            std::mem::forget(Arc::clone(&self.service));
            std::mem::forget(self.recorder.take());
            return;
        }
        self.service.shut_down();
    }
}

impl<S: TranslationBackend> fmt::Debug for Lookup<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lookup").field("settings", &self.config()).finish_non_exhaustive()
    }
}
