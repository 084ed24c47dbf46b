//! Everything that accesses to windows of peers need in one port: the lookup that all peers share,
//! and the threads that carry out what nobody waits for.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use memferry_memory::lookup::{Kind, Lookup, Settings as LookupSettings};
use memferry_sys::copy::stream::Streaming;
use memferry_sys::fork;
use memferry_sys::sync::lock;

use super::carry::{Job, Patience, Progress};
use super::peer_memory::{Parts, PeerMemory};
use super::source::PeerMemories;
use super::workers::{LATE, Role, Seat, Workers};
use crate::error::{ConnectError, Error, Gone};
use crate::port::{Peer, Port, Received, State};
use crate::wire::Number;

/// The lookup of a port.
pub(crate) type PeerLookup = Lookup<PeerMemories>;

/// How long the active worker waits before it tries accesses again that were dropped.
const RETRY: Duration = Duration::from_micros(50);

/// How long a worker stands by that nobody needs.
const LINGER: Duration = Duration::from_secs(1);

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
    workers: Mutex<Workers>,
    /// There is something for the active worker.
    work: Condvar,
    /// There is something for the worker that stands by.
    watch: Condvar,
    fork_generation: u64,
}

impl Drop for Windows {
    fn drop(&mut self) {
        let workers = self.workers.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        if fork::generation() != self.fork_generation {
            // In a forked child the threads do not exist, and cannot even be let go.
            std::mem::forget(std::mem::take(&mut workers.all));
        }
    }
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
            workers: Mutex::default(),
            work: Condvar::new(),
            watch: Condvar::new(),
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

    /// Puts an access behind those before it, and lets the active worker know.
    pub(crate) fn enqueue(
        self: &Arc<Self>,
        port: &Arc<Port>,
        who: Peer,
        peer: &Arc<PeerMemory>,
        job: Job,
    ) -> Result<(), Error> {
        let mut workers = lock(&self.workers);
        if workers.closes {
            return Err(Error::Closed);
        }
        if !workers.has(Role::Active) {
            self.start_worker(&mut workers, &Arc::downgrade(port), Role::Active)
                .map_err(ConnectError::system("starting a thread for windows"))?;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        peer.lane.push(job);
        workers.put(who, peer);
        if workers.needs_standby() {
            self.watch_active(&mut workers, &Arc::downgrade(port));
        }
        drop(workers);
        self.work.notify_one();
        Ok(())
    }

    fn start_worker(
        self: &Arc<Self>,
        workers: &mut Workers,
        port: &Weak<Port>,
        role: Role,
    ) -> std::io::Result<()> {
        let (windows, port) = (self.clone(), port.clone());
        workers.add(role, |id| {
            memferry_sys::thread::spawn("memferry-windows", move || windows.serve(&port, id))
        })
    }

    /// Makes sure that a worker stands by and watches the active one.
    #[cold]
    fn watch_active(self: &Arc<Self>, workers: &mut Workers, port: &Weak<Port>) {
        if workers.has(Role::Standby) {
            if !workers.is_watching {
                self.watch.notify_one();
            }
        } else if let Err(error) = self.start_worker(workers, port, Role::Standby) {
            // The next access tries again.
            tracing::warn!(%error, "no second thread for windows: one peer can stop accesses to others");
        }
    }

    /// Carries out accesses that wait, for a thread that waits for one of them. Returns whether
    /// anything was done.
    pub(crate) fn help(&self, port: &Port, number: Number) -> bool {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return false;
        }
        // Its own lane alone: memory of another peer may never come.
        let has_it = |(_, peer): &&Seat| peer.lane.has(number);
        let lane = lock(&self.workers).lanes.iter().find(has_it).cloned();
        lane.is_some_and(|(who, peer)| self.run_lane(port, who, &peer, Patience::Waits))
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

    /// A worker.
    fn serve(self: &Arc<Self>, port: &Weak<Port>, me: u64) {
        loop {
            let role = lock(&self.workers).role(me);
            let stays = match role {
                Some(Role::Active) => self.work_off(port, me),
                Some(Role::Standby) => self.stand_by(port, me),
                Some(Role::Late) | None => false,
            };
            if !stays {
                return;
            }
        }
    }

    /// The active worker. Returns whether it stays, in another role.
    fn work_off(&self, port: &Weak<Port>, me: u64) -> bool {
        let mut rounds_in_vain = 0;
        let mut workers = lock(&self.workers);
        loop {
            while !workers.closes && workers.open().next().is_none() {
                workers =
                    self.work.wait(workers).unwrap_or_else(std::sync::PoisonError::into_inner);
            }
            if workers.closes {
                return false;
            }
            let lanes: Vec<Seat> = workers.open().cloned().collect();
            workers.enter(me, &lanes[0].1);
            drop(workers);
            let Some(port) = port.upgrade() else { return false };
            let moved = self.run_round(&port, me, &lanes);
            drop(port);
            workers = lock(&self.workers);
            match workers.come_out(me) {
                Some(Role::Active) => {}
                role => {
                    // Its lane is open to the active worker again.
                    self.work.notify_one();
                    return role.is_some();
                }
            }
            workers.tidy();
            rounds_in_vain = if moved { 0 } else { rounds_in_vain + 1 };
            if !moved && !workers.lanes.is_empty() && !workers.closes {
                // An access was dropped for a translation, or all lanes are carried out by others, who may
                // take long.
                let is_dropped = workers.open().any(|(_, peer)| peer.lane.is_waiting());
                let pause = if is_dropped { RETRY } else { RETRY * (1 << rounds_in_vain.min(8)) };
                let woken = self.work.wait_timeout(workers, pause);
                workers = woken.unwrap_or_else(std::sync::PoisonError::into_inner).0;
            }
        }
    }

    /// Serves lanes, the first of which this worker has entered. Returns whether anything was done.
    fn run_round(&self, port: &Port, me: u64, lanes: &[Seat]) -> bool {
        // A lane that waits for a translation keeps no other one waiting; only when all of them do is one
        // waited for.
        let steps = lanes.iter().map(|seat| (seat, Patience::Never));
        let steps = steps.chain([(&lanes[0], Patience::Waits)]).enumerate();
        let mut moved = false;
        for (index, ((who, peer), patience)) in steps {
            if patience == Patience::Waits && moved {
                break;
            }
            // The other lanes are the active worker's, which may be another one by now.
            if index > 0 && !lock(&self.workers).enter(me, peer) {
                return true;
            }
            moved |= self.run_lane(port, *who, peer, patience);
        }
        moved
    }

    /// The worker that stands by. Returns whether it stays, as the active one.
    fn stand_by(self: &Arc<Self>, port: &Weak<Port>, me: u64) -> bool {
        let mut workers = lock(&self.workers);
        while !workers.closes {
            let left = workers.time_left();
            if left == Some(Duration::ZERO) {
                workers.take_over(me);
                workers.is_watching = false;
                if workers.needs_standby() {
                    self.watch_active(&mut workers, port);
                }
                return true;
            }
            workers.is_watching = left.is_some();
            // The coarse clock is a few milliseconds behind at most.
            let pause = left.map_or(LINGER, |left| left.max(LATE / 4));
            let woken = self.watch.wait_timeout(workers, pause);
            let timeout;
            (workers, timeout) = woken.unwrap_or_else(std::sync::PoisonError::into_inner);
            workers.is_watching = false;
            if left.is_none() && timeout.timed_out() && !workers.needs_standby() && !workers.closes
            {
                workers.remove(me);
                return false;
            }
        }
        false
    }

    /// The port closes: what waits ends as closed, and nobody accesses anything after this.
    pub(crate) fn close(&self, port: &Port) {
        let mut workers = lock(&self.workers);
        workers.closes = true;
        let lanes = std::mem::take(&mut workers.lanes);
        drop(workers);
        self.work.notify_all();
        self.watch.notify_all();
        // Accesses to peers that are gone may still wait for their end.
        let lost = lanes.into_iter().map(|(_, peer)| peer);
        let deadline = Instant::now() + CLOSE_PATIENCE;
        for peer in self.lookup.source().all().into_iter().chain(lost) {
            peer.retire(Gone::Closed);
            for job in peer.lane.stop(deadline) {
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                finish(&mut port.enter(), &job, Err(Error::Closed));
            }
        }
        let workers = std::mem::take(&mut lock(&self.workers).all);
        for worker in workers {
            // A thread that waits for memory of a peer ends when that comes, or when the peer ends.
            let is_self = worker.thread.thread().id() == std::thread::current().id();
            if !is_self && !worker.may_be_blocked() {
                let _ = worker.thread.join();
            }
        }
    }
}

/// Ends the operation of an access.
fn finish(state: &mut State, job: &Job, outcome: Result<Received, Error>) {
    if let Some(number) = job.number {
        state.operations.finish(number, outcome);
    }
}
