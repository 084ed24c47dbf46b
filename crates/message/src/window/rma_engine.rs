//! Accesses to windows of peers in one port: the lookup that all peers share, and the threads that
//! execute queued accesses.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use memferry_memory::lookup::{Geometry, Lookup, LookupConfig as LookupSettings};
use memferry_sys::copy::stream::Streaming;
use memferry_sys::fork::OwnerProcess;
use memferry_sys::settings;
use memferry_sys::sync::lock;

use super::peer_memory::{PeerMemory, PeerMemoryParts};
use super::rma::{RmaProgress, RmaRequest, WaitMode};
use super::rma_workers::{LATE_AFTER, PeerQueue, RmaWorkers, WorkerRole};
use super::translation_backend::PeerTranslationBackend;
use crate::control::OperationId;
use crate::error::{ConnectError, DisconnectReason, Error};
use crate::port::{MessageStatus, Peer, Port, PortState};

/// The lookup of a port.
pub(crate) type PeerLookup = Lookup<PeerTranslationBackend>;

/// Interval before the active worker retries accesses that missed a translation.
const RETRY_INTERVAL: Duration = Duration::from_micros(50);

/// Time after which an unneeded standby worker exits.
const STANDBY_TIMEOUT: Duration = Duration::from_secs(1);

/// Time that a close waits for running accesses.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The variable that names the files in which all accesses are recorded, one for each process and
/// endpoint.
pub(crate) const TRACE_VARIABLE: &str = "MEMFERRY_LOOKUP_TRACE";

/// The trace file of this process and endpoint.
fn trace_name(mut file: std::ffi::OsString) -> std::ffi::OsString {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    file.push(format!(".{}.{next}", std::process::id()));
    file
}

/// A cache of 16384 pages in lines of 64 pages, four lines in a set: the best trade-off of the paper on
/// dynamic handle lookup, and enough for 64 MiB at a time.
fn default_lookup() -> LookupSettings {
    LookupSettings::cached(Geometry::new(16 << 10, 64, 4).expect("a valid shape"))
}

/// The maximum length of a window for which a flat table is built.
const MAX_PRELOAD_BYTES: u64 = 128 << 30;

/// The accesses of a port to windows of peers.
#[derive(Debug)]
pub(crate) struct RmaEngine {
    pub(super) lookup: PeerLookup,
    /// Memory whose place can be computed is not looked up.
    pub(super) is_direct: bool,
    pub(super) streaming: Streaming,
    pub(super) stream_bytes: u64,
    /// Some cores are not needed by any connected process.
    spare_cores: AtomicBool,
    /// The number of queued accesses.
    pending: AtomicUsize,
    workers: Mutex<RmaWorkers>,
    /// Signalled when there is work for the active worker.
    work_available: Condvar,
    /// Signalled when there is work for the standby worker.
    standby_wakeup: Condvar,
    owner: OwnerProcess,
}

impl Drop for RmaEngine {
    fn drop(&mut self) {
        let workers = self.workers.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !self.owner.is_current() {
            // In a forked child the threads do not exist, and their handles must not be dropped.
            std::mem::forget(std::mem::take(&mut workers.all));
        }
    }
}

impl RmaEngine {
    /// Creates the engine. With a configuration of the lookup, or if accesses are recorded, all
    /// memory is looked up.
    pub(crate) fn new(
        config: Option<LookupSettings>,
        streaming: Streaming,
        stream_bytes: u64,
    ) -> std::io::Result<Self> {
        let mut is_direct = config.is_none();
        let config = config.unwrap_or_else(default_lookup);
        let mut lookup = Lookup::new(config, PeerTranslationBackend::default())?;
        if let Some(file) = settings::value_of(TRACE_VARIABLE) {
            let file = trace_name(file);
            let trace_error = |error: std::io::Error| {
                let text = format!("{TRACE_VARIABLE}: cannot write {}: {error}", file.display());
                std::io::Error::new(error.kind(), text)
            };
            let trace = std::fs::File::create(&file).map_err(trace_error)?;
            lookup.start_recording(Box::new(trace)).map_err(trace_error)?;
            is_direct = false;
        }
        Ok(Self {
            lookup,
            is_direct,
            streaming,
            stream_bytes,
            spare_cores: AtomicBool::new(false),
            pending: AtomicUsize::new(0),
            workers: Mutex::default(),
            work_available: Condvar::new(),
            standby_wakeup: Condvar::new(),
            owner: OwnerProcess::current(),
        })
    }

    pub(crate) fn counters(&self) -> memferry_memory::lookup::LookupCounters {
        self.lookup.counters()
    }

    pub(crate) fn footprint(&self) -> memferry_memory::lookup::LookupFootprint {
        self.lookup.footprint()
    }

    /// Sets whether engines may use cores: checked whenever a window is attached.
    pub(crate) fn set_spare_cores(&self, available: bool) {
        self.spare_cores.store(available, Ordering::Relaxed);
    }

    pub(super) fn has_spare_cores(&self) -> bool {
        self.spare_cores.load(Ordering::Relaxed)
    }

    /// Adds a peer whose windows are attached for the first time.
    pub(crate) fn add_peer(&self, parts: PeerMemoryParts) -> Result<Arc<PeerMemory>, Error> {
        let process = self
            .lookup
            .add_process()
            .map_err(|_| ConnectError::TooManyPeers(usize::from(u16::MAX)))?;
        let peer = Arc::new(PeerMemory::new(process, parts));
        self.lookup.backend().add(&peer);
        Ok(peer)
    }

    /// Removes a peer and its translations. Waits for running accesses.
    pub(crate) fn remove_peer(&self, peer: &PeerMemory) {
        self.lookup.backend().remove(peer.process);
        self.lookup.remove_process(peer.process);
        peer.queue.forget_all();
    }

    /// Invalidates the translations of a region of a peer that was mapped or freed.
    pub(crate) fn invalidate_region(&self, peer: &PeerMemory, region: u32) {
        peer.queue.forget_region(region);
        for (address, length) in peer.extents_of(region) {
            self.invalidate_translations(peer, address, length);
        }
    }

    /// Invalidates the translations of a range of a peer's memory. May wait for running accesses.
    /// Returns `false` if the range is too long for a flat table.
    pub(crate) fn invalidate_translations(
        &self,
        peer: &PeerMemory,
        address: u64,
        length: u64,
    ) -> bool {
        self.lookup.invalidate(peer.process, address, length);
        if !self.lookup.finds_preloaded_only() {
            return true;
        }
        // The next access detects a peer that has just disconnected.
        let fits = length <= MAX_PRELOAD_BYTES;
        if fits {
            let _ = self.lookup.preload(peer.process, address, length);
        }
        fits
    }

    /// Executes a new access at once, if no other is before it and it does not have to wait for a
    /// translation, unless `wait_mode` permits that. Otherwise returns the request.
    ///
    /// # Safety
    /// As for [`RmaEngine::step`].
    #[inline]
    pub(crate) unsafe fn execute_now(
        &self,
        peer: &PeerMemory,
        mut request: RmaRequest,
        wait_mode: WaitMode,
    ) -> Result<Result<(), Error>, RmaRequest> {
        let Some(mut guard) = peer.queue.try_begin() else { return Err(request) };
        loop {
            // SAFETY: the caller guarantees it.
            match unsafe { self.step(peer, guard.direct(), &mut request, wait_mode) } {
                Ok(RmaProgress::Done) => return Ok(Ok(())),
                Ok(RmaProgress::More) => {}
                Ok(RmaProgress::TranslationMiss) if wait_mode == WaitMode::Blocking => {
                    std::thread::yield_now();
                }
                Ok(RmaProgress::TranslationMiss) => {
                    drop(guard);
                    return Err(request);
                }
                Err(error) => return Ok(Err(error)),
            }
        }
    }

    /// Queues an access, and wakes the active worker.
    pub(crate) fn enqueue(
        self: &Arc<Self>,
        port: &Arc<Port>,
        peer_id: Peer,
        peer: &Arc<PeerMemory>,
        request: RmaRequest,
    ) -> Result<(), Error> {
        let mut workers = lock(&self.workers);
        if workers.closing {
            return Err(Error::Closed);
        }
        if !workers.has(WorkerRole::Active) {
            self.start_worker(&mut workers, &Arc::downgrade(port), WorkerRole::Active)
                .map_err(ConnectError::system("starting a thread for windows"))?;
        }
        self.pending.fetch_add(1, Ordering::Relaxed);
        peer.queue.push(request);
        workers.push(peer_id, peer);
        if workers.needs_standby() {
            self.arm_standby(&mut workers, &Arc::downgrade(port));
        }
        drop(workers);
        self.work_available.notify_one();
        Ok(())
    }

    fn start_worker(
        self: &Arc<Self>,
        workers: &mut RmaWorkers,
        port: &Weak<Port>,
        role: WorkerRole,
    ) -> std::io::Result<()> {
        let (engine, port) = (self.clone(), port.clone());
        workers.add(role, |id| {
            memferry_sys::thread::spawn("memferry-windows", move || engine.run_worker(&port, id))
        })
    }

    /// Makes sure that a standby worker exists and watches the active one.
    #[cold]
    fn arm_standby(self: &Arc<Self>, workers: &mut RmaWorkers, port: &Weak<Port>) {
        if workers.has(WorkerRole::Standby) {
            if !workers.timer_armed {
                self.standby_wakeup.notify_one();
            }
        } else if let Err(error) = self.start_worker(workers, port, WorkerRole::Standby) {
            // The next access tries again.
            tracing::warn!(%error, "no standby thread for windows: one peer can block accesses to others");
        }
    }

    /// Executes pending accesses, for a thread that waits for one of them. Returns whether it made
    /// progress.
    pub(crate) fn help_progress(&self, port: &Port, number: OperationId) -> bool {
        if self.pending.load(Ordering::Relaxed) == 0 {
            return false;
        }
        // Only the queue of that operation: memory of another peer may block.
        let contains = |(_, peer): &&PeerQueue| peer.queue.contains(number);
        let queue = lock(&self.workers).queues.iter().find(contains).cloned();
        queue.is_some_and(|(peer_id, peer)| {
            self.drain_queue(port, peer_id, &peer, WaitMode::Blocking)
        })
    }

    /// Executes the accesses of one queue until it is empty or the first one misses a translation.
    fn drain_queue(
        &self,
        port: &Port,
        peer_id: Peer,
        peer: &PeerMemory,
        wait_mode: WaitMode,
    ) -> bool {
        let mut progressed = false;
        while let Some((mut guard, mut request)) = peer.queue.try_pop() {
            let outcome = loop {
                // SAFETY: the caller that started the access keeps its memory valid until the
                // operation completes, which is after this.
                match unsafe { self.step(peer, guard.direct(), &mut request, wait_mode) } {
                    Ok(RmaProgress::More) => progressed = true,
                    Ok(RmaProgress::TranslationMiss) => {
                        guard.requeue(request);
                        return progressed;
                    }
                    Ok(RmaProgress::Done) => break Ok(()),
                    Err(error) => break Err(error),
                }
            };
            progressed = true;
            let length = request.local.length as u64;
            let outcome = outcome.map(|()| MessageStatus { source: peer_id, tag: 0, length });
            self.pending.fetch_sub(1, Ordering::Relaxed);
            let mut state = port.lock();
            finish(&mut state, &request, outcome);
            // Dropped after `finish`, so that the next access, perhaps a fence, finds this one
            // complete; and before the port's lock is released, because code that is then woken or
            // dropped may take the guard.
            drop(guard);
        }
        progressed
    }

    /// Runs a worker.
    fn run_worker(self: &Arc<Self>, port: &Weak<Port>, id: u64) {
        loop {
            let role = lock(&self.workers).role(id);
            let stays = match role {
                Some(WorkerRole::Active) => self.run_active(port, id),
                Some(WorkerRole::Standby) => self.run_standby(port, id),
                Some(WorkerRole::Late) | None => false,
            };
            if !stays {
                return;
            }
        }
    }

    /// Runs the active worker. Returns whether it continues, in another role.
    fn run_active(&self, port: &Weak<Port>, id: u64) -> bool {
        let mut empty_rounds = 0;
        let mut workers = lock(&self.workers);
        loop {
            while !workers.closing && workers.available().next().is_none() {
                workers = self
                    .work_available
                    .wait(workers)
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
            }
            if workers.closing {
                return false;
            }
            let queues: Vec<PeerQueue> = workers.available().cloned().collect();
            workers.enter(id, &queues[0].1);
            drop(workers);
            let Some(port) = port.upgrade() else { return false };
            let progressed = self.run_round(&port, id, &queues);
            drop(port);
            workers = lock(&self.workers);
            match workers.leave(id) {
                Some(WorkerRole::Active) => {}
                role => {
                    // The active worker may serve the queue of this one again.
                    self.work_available.notify_one();
                    return role.is_some();
                }
            }
            workers.rotate();
            empty_rounds = if progressed { 0 } else { empty_rounds + 1 };
            if !progressed && !workers.queues.is_empty() && !workers.closing {
                // An access missed a translation, or other threads execute all queues, which may
                // take long.
                let has_pending = workers.available().any(|(_, peer)| peer.queue.has_pending());
                let pause = if has_pending {
                    RETRY_INTERVAL
                } else {
                    RETRY_INTERVAL * (1 << empty_rounds.min(8))
                };
                let woken = self.work_available.wait_timeout(workers, pause);
                workers = woken.unwrap_or_else(std::sync::PoisonError::into_inner).0;
            }
        }
    }

    /// Serves queues, the first of which this worker has entered. Returns whether it made progress.
    fn run_round(&self, port: &Port, id: u64, queues: &[PeerQueue]) -> bool {
        // A queue that waits for a translation does not delay the others; only when all of them
        // wait does the worker block on one.
        let steps = queues.iter().map(|queue| (queue, WaitMode::NonBlocking));
        let steps = steps.chain([(&queues[0], WaitMode::Blocking)]).enumerate();
        let mut progressed = false;
        for (index, ((peer_id, peer), wait_mode)) in steps {
            if wait_mode == WaitMode::Blocking && progressed {
                break;
            }
            // The other queues belong to the active worker, which may be another thread by now.
            if index > 0 && !lock(&self.workers).enter(id, peer) {
                return true;
            }
            progressed |= self.drain_queue(port, *peer_id, peer, wait_mode);
        }
        progressed
    }

    /// Runs the standby worker. Returns whether it continues, as the active one.
    fn run_standby(self: &Arc<Self>, port: &Weak<Port>, id: u64) -> bool {
        let mut workers = lock(&self.workers);
        while !workers.closing {
            let time_left = workers.time_left();
            if time_left == Some(Duration::ZERO) {
                workers.take_over(id);
                workers.timer_armed = false;
                if workers.needs_standby() {
                    self.arm_standby(&mut workers, port);
                }
                return true;
            }
            workers.timer_armed = time_left.is_some();
            // The coarse clock is at most a few milliseconds late.
            let pause =
                time_left.map_or(STANDBY_TIMEOUT, |time_left| time_left.max(LATE_AFTER / 4));
            let woken = self.standby_wakeup.wait_timeout(workers, pause);
            let timeout;
            (workers, timeout) = woken.unwrap_or_else(std::sync::PoisonError::into_inner);
            workers.timer_armed = false;
            if time_left.is_none()
                && timeout.timed_out()
                && !workers.needs_standby()
                && !workers.closing
            {
                workers.remove(id);
                return false;
            }
        }
        false
    }

    /// Closes: pending accesses fail with [`Error::Closed`], and none is executed after this.
    pub(crate) fn close(&self, port: &Port) {
        let mut workers = lock(&self.workers);
        workers.closing = true;
        let queues = std::mem::take(&mut workers.queues);
        drop(workers);
        self.work_available.notify_all();
        self.standby_wakeup.notify_all();
        // Accesses to disconnected peers may still be queued.
        let disconnected = queues.into_iter().map(|(_, peer)| peer);
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        for peer in self.lookup.backend().all().into_iter().chain(disconnected) {
            peer.mark_disconnected(DisconnectReason::Closed);
            for request in peer.queue.stop(deadline) {
                self.pending.fetch_sub(1, Ordering::Relaxed);
                finish(&mut port.lock(), &request, Err(Error::Closed));
            }
        }
        let workers = std::mem::take(&mut lock(&self.workers).all);
        for worker in workers {
            // A thread that blocks on memory of a peer exits when the memory becomes resident or
            // the peer exits.
            let is_self = worker.thread.thread().id() == std::thread::current().id();
            if !is_self && !worker.may_be_blocked() {
                let _ = worker.thread.join();
            }
        }
    }
}

/// Completes the operation of an access.
fn finish(state: &mut PortState, job: &RmaRequest, outcome: Result<MessageStatus, Error>) {
    if let Some(number) = job.operation {
        state.protocol.operations.finish(number, outcome);
    }
}
