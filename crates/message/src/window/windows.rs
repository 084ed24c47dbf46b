//! Everything that accesses to windows of peers need in one port: the lookup that all peers share,
//! and the thread that carries out what nobody waits for.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memferry_memory::lookup::{Kind, Lookup, Settings as LookupSettings};
use memferry_sys::copy::stream::Streaming;
use memferry_sys::fork;
use memferry_sys::sync::lock;

use super::carry::{Job, Patience, Progress};
use super::peer_memory::{Parts, PeerMemory};
use super::source::PeerMemories;
use crate::error::{ConnectError, Error, Gone};
use crate::port::{Peer, Port, Received, State};
use crate::wire::Number;

/// The lookup of a port.
pub(crate) type PeerLookup = Lookup<PeerMemories>;

/// How long the thread waits before it tries accesses again that were dropped.
const RETRY: std::time::Duration = std::time::Duration::from_micros(50);

/// How long a close waits for accesses under way.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);

/// Names files to which all accesses are recorded, one for each process and endpoint.
pub(crate) const TRACE_VARIABLE: &str = "MEMFERRY_LOOKUP_TRACE";

/// The file of this process and endpoint.
fn trace_name(mut file: std::ffi::OsString) -> std::ffi::OsString {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    file.push(format!(".{}.{next}", std::process::id()));
    file
}

/// The longest window for which a full table is made.
const LONGEST_PREPARED: u64 = 128 << 30;

/// Accesses to windows of peers.
#[derive(Debug)]
pub(crate) struct Windows {
    pub(super) lookup: PeerLookup,
    pub(super) streaming: Streaming,
    pub(super) stream_bytes: u64,
    /// No process of this conversation needs all cores.
    spare_cores: AtomicBool,
    /// Accesses that were put behind others, or begun without being waited for.
    waiting: AtomicUsize,
    worker: Mutex<Worker>,
    /// There is something for the worker.
    work: Condvar,
    fork_generation: u64,
}

impl Drop for Windows {
    fn drop(&mut self) {
        let worker = self.worker.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        if fork::generation() != self.fork_generation {
            // In a forked child the thread does not exist, and cannot even be let go.
            std::mem::forget(worker.thread.take());
        }
    }
}

/// The thread, and the lanes that it is to look at.
#[derive(Debug, Default)]
struct Worker {
    thread: Option<JoinHandle<()>>,
    lanes: VecDeque<(Peer, Arc<PeerMemory>)>,
    closes: bool,
}

impl Windows {
    pub(crate) fn new(
        settings: LookupSettings,
        streaming: Streaming,
        stream_bytes: u64,
    ) -> std::io::Result<Self> {
        let mut lookup = Lookup::new(settings, PeerMemories::default())?;
        if let Some(file) = std::env::var_os(TRACE_VARIABLE) {
            let file = trace_name(file);
            let failed = |error: std::io::Error| {
                let text = format!("{TRACE_VARIABLE}: cannot write {}: {error}", file.display());
                std::io::Error::new(error.kind(), text)
            };
            let written = std::fs::File::create(&file).map_err(failed)?;
            lookup.record_to(Box::new(written)).map_err(failed)?;
        }
        Ok(Self {
            lookup,
            streaming,
            stream_bytes,
            spare_cores: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            worker: Mutex::default(),
            work: Condvar::new(),
            fork_generation: fork::generation(),
        })
    }

    pub(crate) fn counters(&self) -> memferry_memory::lookup::Counters {
        self.lookup.counters()
    }

    pub(crate) fn memory(&self) -> memferry_memory::lookup::MemoryUse {
        self.lookup.memory()
    }

    /// Whether engines may take cores: asked anew whenever a window is attached.
    pub(crate) fn set_spare_cores(&self, are_there: bool) {
        self.spare_cores.store(are_there, Ordering::Relaxed);
    }

    pub(super) fn has_spare_cores(&self) -> bool {
        self.spare_cores.load(Ordering::Relaxed)
    }

    /// A peer whose windows are attached for the first time.
    pub(crate) fn add_peer(&self, parts: Parts) -> Result<Arc<PeerMemory>, Error> {
        let process = self
            .lookup
            .add_process()
            .map_err(|_| ConnectError::TooManyPeers(usize::from(u16::MAX)))?;
        let peer = Arc::new(PeerMemory::new(process, parts));
        self.lookup.source().add(&peer);
        Ok(peer)
    }

    /// A peer has retired: nothing of it stays. Waits for accesses under way.
    pub(crate) fn remove_peer(&self, peer: &PeerMemory) {
        self.lookup.source().remove(peer.process);
        self.lookup.remove_process(peer.process);
    }

    /// A region of a peer is mapped from now on, or is gone: its pages are to be looked up anew.
    pub(crate) fn forget_region(&self, peer: &PeerMemory, region: u32) {
        for (address, length) in peer.extents_of(region) {
            self.look_up_anew(peer, address, length);
        }
    }

    /// Memory of a peer is reached otherwise than before, if it was reached at all.
    /// May wait for accesses under way. `false` if it is too much for a full table.
    pub(crate) fn look_up_anew(&self, peer: &PeerMemory, address: u64, length: u64) -> bool {
        self.lookup.forget(peer.process, address, length);
        if self.lookup.settings().kind != Kind::Full {
            return true;
        }
        // A peer that has just gone is found out by the next access.
        let fits = length <= LONGEST_PREPARED;
        if fits {
            let _ = self.lookup.prepare(peer.process, address, length);
        }
        fits
    }

    /// Carries out a new access at once, if nothing is before it and nobody minds the wait.
    /// Hands the job back otherwise.
    ///
    /// # Safety
    /// As for [`Windows::step`].
    #[inline]
    pub(crate) unsafe fn carry_now(
        &self,
        peer: &PeerMemory,
        mut job: Job,
        patience: Patience,
    ) -> Result<Result<(), Error>, Job> {
        let Some(turn) = peer.lane.take_turn() else { return Err(job) };
        loop {
            // SAFETY: passed on.
            match unsafe { self.step(peer, &mut job, patience) } {
                Ok(Progress::Done) => return Ok(Ok(())),
                Ok(Progress::More) => {}
                Ok(Progress::Missed) if patience == Patience::Waits => std::thread::yield_now(),
                Ok(Progress::Missed) => {
                    drop(turn);
                    return Err(job);
                }
                Err(error) => return Ok(Err(error)),
            }
        }
    }

    /// Puts an access behind those before it, and lets the thread know.
    pub(crate) fn enqueue(
        self: &Arc<Self>,
        port: &Arc<Port>,
        who: Peer,
        peer: &Arc<PeerMemory>,
        job: Job,
    ) -> Result<(), Error> {
        let mut worker = lock(&self.worker);
        if worker.closes {
            return Err(Error::Closed);
        }
        if worker.thread.is_none() {
            let (windows, port) = (self.clone(), Arc::downgrade(port));
            let run = move || windows.work_on(&port);
            let thread = std::thread::Builder::new().name("memferry-windows".into()).spawn(run);
            worker.thread =
                Some(thread.map_err(ConnectError::system("starting a thread for windows"))?);
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        peer.lane.push(job);
        if !worker.lanes.iter().any(|(_, known)| Arc::ptr_eq(known, peer)) {
            worker.lanes.push_back((who, peer.clone()));
        }
        drop(worker);
        self.work.notify_one();
        Ok(())
    }

    /// Carries out accesses that wait, for a thread that waits for one of them. Returns whether
    /// anything was done.
    pub(crate) fn help(&self, port: &Port, number: Number) -> bool {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return false;
        }
        // Its own lane alone: memory of another peer may never come.
        let mut lanes: Vec<_> = lock(&self.worker).lanes.iter().cloned().collect();
        lanes.retain(|(_, peer)| peer.lane.has(number));
        self.run_lanes(port, &lanes, Patience::Waits)
    }

    fn run_lanes(
        &self,
        port: &Port,
        lanes: &[(Peer, Arc<PeerMemory>)],
        patience: Patience,
    ) -> bool {
        let run = |any, (who, peer): &(Peer, Arc<PeerMemory>)| {
            self.run_lane(port, *who, peer, patience) | any
        };
        lanes.iter().fold(false, run)
    }

    /// Carries out the accesses of one lane until none is left or the first cannot go on.
    fn run_lane(&self, port: &Port, who: Peer, peer: &PeerMemory, patience: Patience) -> bool {
        let mut any = false;
        while let Some((turn, mut job)) = peer.lane.take_first() {
            let outcome = loop {
                // SAFETY: whoever began the access keeps its memory until the operation is over,
                // which it is only after this.
                match unsafe { self.step(peer, &mut job, patience) } {
                    Ok(Progress::More) => any = true,
                    Ok(Progress::Missed) => {
                        turn.put_back(job);
                        return any;
                    }
                    Ok(Progress::Done) => break Ok(()),
                    Err(error) => break Err(error),
                }
            };
            any = true;
            let length = job.local.length as u64;
            let outcome = outcome.map(|()| Received { source: who, tag: 0, length });
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            let mut state = port.enter();
            finish(&mut state, &job, outcome);
            // In this order: whoever comes next, a fence perhaps, finds this one over. And before the
            // lock is left: what is then woken or dropped may want the turn.
            drop(turn);
        }
        any
    }

    /// The thread.
    fn work_on(&self, port: &Weak<Port>) {
        loop {
            let mut worker = lock(&self.worker);
            while worker.lanes.is_empty() && !worker.closes {
                worker = self.work.wait(worker).unwrap_or_else(std::sync::PoisonError::into_inner);
            }
            if worker.closes {
                return;
            }
            let lanes: Vec<_> = worker.lanes.iter().cloned().collect();
            drop(worker);
            let Some(port) = port.upgrade() else { return };
            // A lane that waits for a translation keeps no other one waiting; only when all of
            // them do is one waited for.
            let moved = self.run_lanes(&port, &lanes, Patience::Never)
                || self.run_lanes(&port, &lanes[..1], Patience::Waits);
            drop(port);
            let mut worker = lock(&self.worker);
            worker.lanes.retain(|(_, peer)| !peer.lane.is_idle());
            let next = usize::from(!worker.lanes.is_empty());
            worker.lanes.rotate_left(next);
            // What waits now was dropped for a translation, or another thread carries it out.
            if !moved && !worker.lanes.is_empty() && !worker.closes {
                drop(self.work.wait_timeout(worker, RETRY));
            }
        }
    }

    /// The port closes: what waits ends as closed, and nobody accesses anything after this.
    pub(crate) fn close(&self, port: &Port) {
        let mut worker = lock(&self.worker);
        worker.closes = true;
        let thread = worker.thread.take();
        let lanes = std::mem::take(&mut worker.lanes);
        drop(worker);
        self.work.notify_all();
        // Accesses to peers that are gone may still wait for their end.
        let lost = lanes.into_iter().map(|(_, peer)| peer);
        let deadline = Instant::now() + CLOSE_PATIENCE;
        let mut are_quiet = true;
        for peer in self.lookup.source().all().into_iter().chain(lost) {
            peer.retire(Gone::Closed);
            let (jobs, is_quiet) = peer.lane.stop(deadline);
            are_quiet &= is_quiet;
            for job in jobs {
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                finish(&mut port.enter(), &job, Err(Error::Closed));
            }
        }
        // A thread that waits for memory of a peer ends when that comes, or when the peer ends.
        if let Some(thread) = thread
            && are_quiet
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// Ends the operation of an access.
fn finish(state: &mut State, job: &Job, outcome: Result<Received, Error>) {
    if let Some(number) = job.number {
        state.operations.finish(number, outcome);
    }
}
