//! The calls of a lookup.

use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;

use memferry_sys::fork;

use super::counters::Counters;
use super::error::{LookupError, TooManyProcesses};
use super::line::LineName;
use super::memory::MemoryUse;
use super::service::Service;
use super::settings::{Policy, Route, Settings};
use super::shared::{Place, Store};
use super::source::Source;
use super::trace::Recorder;
use super::translation::Translation;
use crate::handle::{ProcessHandle, VirtualMemoryHandle};

/// Finds where the memory of handles is. Shared by reference between threads.
pub struct Lookup<S: Source> {
    service: Arc<Service<S>>,
    recorder: Option<Recorder>,
    /// The process that made it.
    fork_generation: u64,
}

impl<S: Source> Lookup<S> {
    /// A lookup over a source. Its miss thread starts with the first miss that needs it and ends
    /// when the lookup is dropped, which also detaches everything.
    pub fn new(settings: Settings, source: S) -> io::Result<Self> {
        if settings.queue_length == 0 || settings.sweep_every == 0 {
            let message = "a queue of no length, or sweeps at no distance";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        fork::watch();
        let service = Arc::new(Service::new(settings, source));
        Ok(Self { service, recorder: None, fork_generation: fork::generation() })
    }

    /// Writes every access from now on to `writer`, for [`replay`](super::trace::replay).
    pub fn record_to(&mut self, writer: Box<dyn Write + Send>) -> io::Result<()> {
        self.recorder = Some(Recorder::new(writer)?);
        Ok(())
    }

    /// Ends the recording and says how many records were written, or what went wrong meanwhile.
    pub fn end_recording(&mut self) -> io::Result<u64> {
        self.recorder.take().map_or(Ok(0), Recorder::finish)
    }

    /// The settings it was made with.
    pub fn settings(&self) -> Settings {
        self.service.shared.settings
    }

    /// The source it was made with.
    pub fn source(&self) -> &S {
        &self.service.source
    }

    /// Lets memory of one more process be looked up. Numbers are used again, handles are not.
    pub fn add_process(&self) -> Result<ProcessHandle, TooManyProcesses> {
        self.service.shared.lock().table.processes.add()
    }

    /// Detaches all memory of a process and makes its handle stale. Waits until none of it is in
    /// use, so the caller must not hold a translation of it.
    pub fn remove_process(&self, process: ProcessHandle) {
        if let Some(recorder) = &self.recorder {
            recorder.process_ended(process);
        }
        self.service.remove_process(process);
    }

    /// Detaches all lines that a range touches, because its memory is about to change. Waits until
    /// none of them is in use, so the caller must not hold a translation of it. Lookups that come
    /// meanwhile fail with [`LookupError::Forgotten`]; later ones attach the memory anew.
    pub fn forget(&self, process: ProcessHandle, address: u64, length: u64) {
        let shared = &self.service.shared;
        let range = shared.lines_of(address, length);
        if let Some(recorder) = &self.recorder {
            recorder.forgotten(
                process,
                range.start >> shared.page_shift..range.end >> shared.page_shift,
            );
        }
        match &shared.store {
            Store::Dynamic(cache) => {
                drop(self.service.forget(shared.lock(), cache, process, range));
            }
            Store::Full(full) => {
                let detach = |name, entries: &[u64]| self.service.ask_to_detach(name, entries);
                let detached = full.forget(process, range, detach);
                shared.lock().counters.detached += detached;
            }
        }
    }

    /// Attaches all lines that a range touches, in advance. The full table finds only what was
    /// prepared; with a cache, the first uses need not wait for the source. A refusal leaves the
    /// full table as it was, and the tables behind a cache with what came before it.
    pub fn prepare(
        &self,
        process: ProcessHandle,
        address: u64,
        length: u64,
    ) -> Result<(), LookupError> {
        let (service, shared) = (&*self.service, &self.service.shared);
        let range = shared.lines_of(address, length);
        match &shared.store {
            Store::Dynamic(_) => {
                let mut tables = shared.lock();
                for address in range.step_by(shared.line_bytes() as usize) {
                    let outcome;
                    (tables, outcome) = service.attach(tables, LineName { process, address });
                    outcome?;
                }
            }
            Store::Full(full) => {
                let check = || shared.lock().table.processes.check(process);
                let attach = |name, entries: &mut [u64]| service.ask_to_attach(name, entries);
                let detach = |name, entries: &[u64]| service.ask_to_detach(name, entries);
                let attached = full.prepare(process, range, check, attach, detach)?;
                shared.lock().counters.attached += attached;
            }
        }
        Ok(())
    }

    /// Looks for a translation that is there already.
    // Moved through memory, a translation would cost more than it takes to find.
    #[inline(always)]
    pub fn find(
        &self,
        handle: VirtualMemoryHandle,
        route: Route,
    ) -> Result<Option<Translation<'_>>, LookupError> {
        let place = self.begin(handle, route)?;
        let shared = &self.service.shared;
        match shared.find(place.name) {
            Some(held) => {
                shared.hits.count(route);
                Ok(Some(Translation::of_hit(shared, held, place)?))
            }
            None => self.service.not_found(place, route),
        }
    }

    /// Looks for a translation that is needed after one that was found. What is not there is asked
    /// for, and counts as a miss only when it is needed.
    pub fn find_ahead(&self, handle: VirtualMemoryHandle, route: Route) -> Option<Translation<'_>> {
        let shared = &self.service.shared;
        let place = shared.place(handle).ok()?;
        let Some(held) = shared.find(place.name) else {
            self.service.requested(place, route);
            return None;
        };
        self.record(handle, route);
        shared.hits.count(route);
        Translation::of_hit(shared, held, place).ok()
    }

    /// Asks for a translation that will be needed later. Never waits; with a full queue nothing
    /// happens.
    pub fn request(&self, handle: VirtualMemoryHandle, route: Route) {
        if let Ok(place) = self.service.shared.place(handle) {
            self.service.requested(place, route);
        }
    }

    /// Finds a translation, there or not. By the policy, a miss waits until it is there, or fails
    /// with [`LookupError::Missed`] and is to be tried again later.
    // As above.
    #[inline(always)]
    pub fn translate(
        &self,
        handle: VirtualMemoryHandle,
        route: Route,
    ) -> Result<Translation<'_>, LookupError> {
        self.translate_by(handle, route, self.service.shared.settings.policy)
    }

    /// The same for a caller that has other things to do: whatever the policy says, a miss is to be
    /// tried again later.
    pub fn try_translate(
        &self,
        handle: VirtualMemoryHandle,
        route: Route,
    ) -> Result<Translation<'_>, LookupError> {
        self.translate_by(handle, route, Policy::Retry)
    }

    #[inline(always)]
    fn translate_by(
        &self,
        handle: VirtualMemoryHandle,
        route: Route,
        policy: Policy,
    ) -> Result<Translation<'_>, LookupError> {
        let place = self.begin(handle, route)?;
        let shared = &self.service.shared;
        match shared.find(place.name) {
            Some(held) => {
                shared.hits.count(route);
                Translation::of_hit(shared, held, place)
            }
            None => self.service.missed(place, route, policy),
        }
    }

    /// What was counted so far.
    pub fn counters(&self) -> Counters {
        let shared = &self.service.shared;
        Counters { hits: shared.hits.sum(), ..shared.lock().counters }
    }

    /// What the lookup takes, by component.
    pub fn memory(&self) -> MemoryUse {
        let shared = &self.service.shared;
        let near = match &shared.store {
            Store::Dynamic(cache) => cache.geometry().memory_bytes(),
            Store::Full(full) => full.memory(),
        };
        let tables = shared.lock();
        MemoryUse {
            entries: near.entries,
            tags: near.tags,
            order: near.order,
            table: tables.table.memory_bytes(shared.line_entries),
            process_table: tables.table.processes.memory_bytes(),
            queue: tables.queue.memory_bytes(),
            counters: shared.hits.memory_bytes(),
        }
    }

    /// The lines that are in the cache at the moment, in no particular order; none for a full table.
    pub fn cached_lines(&self) -> Vec<LineName> {
        match &self.service.shared.store {
            Store::Dynamic(cache) => {
                let _exact = self.service.shared.lock();
                cache.lines().collect()
            }
            Store::Full(_) => Vec::new(),
        }
    }

    #[inline(always)]
    fn begin(&self, handle: VirtualMemoryHandle, route: Route) -> Result<Place, LookupError> {
        let place = self.service.shared.place(handle)?;
        self.record(handle, route);
        Ok(place)
    }

    #[inline(always)]
    fn record(&self, handle: VirtualMemoryHandle, route: Route) {
        if let Some(recorder) = &self.recorder {
            let page = handle.address >> self.service.shared.page_shift;
            recorder.access(handle.process, page, route);
        }
    }
}

impl<S: Source> Drop for Lookup<S> {
    fn drop(&mut self) {
        if fork::generation() != self.fork_generation {
            // In a forked child the miss thread does not exist, its lock may be held for ever, and
            // what is recorded is the parent's to write: all of it is left as it is.
            std::mem::forget(Arc::clone(&self.service));
            std::mem::forget(self.recorder.take());
            return;
        }
        self.service.shut_down();
    }
}

impl<S: Source> fmt::Debug for Lookup<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lookup").field("settings", &self.settings()).finish_non_exhaustive()
    }
}
