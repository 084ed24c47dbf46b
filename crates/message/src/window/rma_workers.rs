//! The worker threads of windows, and the queues that have work for them.
//!
//! One thread, the active worker, serves all queues. It blocks in a queue for as long as the memory
//! of that peer does not become resident. So while another queue has work, a second thread is on
//! standby: when the active worker has been in one queue for [`LATE_AFTER`], the standby thread
//! becomes the active worker. The late worker keeps its queue, and exits when it leaves it. There
//! is never more than one thread for each queue that has work, and one on standby.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use memferry_sys::clock;

use super::peer_memory::PeerMemory;
use crate::port::Peer;

/// After this time in one queue, an active worker is late and is replaced if another queue has
/// work.
pub(super) const LATE_AFTER: Duration = Duration::from_millis(10);

/// A peer, and its memory with the queue.
pub(super) type PeerQueue = (Peer, Arc<PeerMemory>);

/// The role of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerRole {
    /// Serves all queues that no late worker is in.
    Active,
    /// Waits until the active worker is late.
    Standby,
    /// Was active, and is still in a queue.
    Late,
}

#[derive(Debug)]
pub(super) struct RmaWorker {
    id: u64,
    role: WorkerRole,
    pub(super) thread: JoinHandle<()>,
    /// The queue that the worker is in, and the time by the coarse clock when it entered.
    current: Option<Arc<PeerMemory>>,
    since_ns: u64,
}

impl RmaWorker {
    /// Returns whether the worker may be blocked on a peer's memory.
    pub(super) fn may_be_blocked(&self) -> bool {
        self.current.as_ref().is_some_and(|peer| peer.queue.is_running())
    }
}

/// All workers, and the queues that have work.
#[derive(Debug, Default)]
pub(super) struct RmaWorkers {
    pub(super) all: Vec<RmaWorker>,
    pub(super) queues: VecDeque<PeerQueue>,
    last_id: u64,
    /// The standby worker has set a timer for the active one.
    pub(super) timer_armed: bool,
    /// The port closes: workers exit.
    pub(super) closing: bool,
}

impl RmaWorkers {
    /// Adds a thread, which `start` starts with its number. The caller holds the lock, so the
    /// thread finds its entry.
    pub(super) fn add(
        &mut self,
        role: WorkerRole,
        start: impl FnOnce(u64) -> std::io::Result<JoinHandle<()>>,
    ) -> std::io::Result<()> {
        self.last_id += 1;
        let id = self.last_id;
        let thread = start(id)?;
        self.all.push(RmaWorker { id, role, thread, current: None, since_ns: 0 });
        Ok(())
    }

    pub(super) fn has(&self, role: WorkerRole) -> bool {
        self.all.iter().any(|worker| worker.role == role)
    }

    /// The role of a worker; `None` if it must exit.
    pub(super) fn role(&self, id: u64) -> Option<WorkerRole> {
        let role = self.all.iter().find(|worker| worker.id == id).map(|worker| worker.role);
        role.filter(|_| !self.closing)
    }

    fn get(&mut self, id: u64) -> Option<&mut RmaWorker> {
        self.all.iter_mut().find(|worker| worker.id == id)
    }

    /// Adds a queue that has work.
    pub(super) fn push(&mut self, peer_id: Peer, peer: &Arc<PeerMemory>) {
        if !self.queues.iter().any(|(_, known)| Arc::ptr_eq(known, peer)) {
            self.queues.push_back((peer_id, peer.clone()));
        }
    }

    /// Removes queues without work, and moves the first one to the back.
    pub(super) fn rotate(&mut self) {
        self.queues.retain(|(_, peer)| !peer.queue.is_idle());
        let next = usize::from(!self.queues.is_empty());
        self.queues.rotate_left(next);
    }

    /// The queues that no late worker is in.
    pub(super) fn available(&self) -> impl Iterator<Item = &PeerQueue> {
        let is_late_in = |worker: &RmaWorker, peer| {
            worker.role == WorkerRole::Late
                && worker.current.as_ref().is_some_and(|current| Arc::ptr_eq(current, peer))
        };
        self.queues.iter().filter(move |(_, peer)| !self.all.iter().any(|w| is_late_in(w, peer)))
    }

    /// Returns whether a queue may have to wait while the active worker is in another one.
    pub(super) fn needs_standby(&self) -> bool {
        self.queues.len() > 1 && self.available().nth(1).is_some()
    }

    /// Records that the active worker enters a queue. Returns `false` if it is no longer the active
    /// worker.
    pub(super) fn enter(&mut self, id: u64, peer: &Arc<PeerMemory>) -> bool {
        let Some(worker) = self.get(id).filter(|worker| worker.role == WorkerRole::Active) else {
            return false;
        };
        worker.current = Some(peer.clone());
        worker.since_ns = clock::coarse_ns();
        true
    }

    /// Records that a worker leaves a queue. Returns its next role; `None` if it exits. A late
    /// worker goes on standby if one is needed.
    pub(super) fn leave(&mut self, id: u64) -> Option<WorkerRole> {
        let goes_on_standby = self.needs_standby() && !self.has(WorkerRole::Standby);
        let closing = self.closing;
        let worker = self.get(id)?;
        worker.current = None;
        match worker.role {
            // The closing thread joins it.
            _ if closing => None,
            WorkerRole::Late if goes_on_standby => {
                worker.role = WorkerRole::Standby;
                Some(WorkerRole::Standby)
            }
            WorkerRole::Late => {
                self.remove(id);
                None
            }
            role => Some(role),
        }
    }

    /// The time until the active worker is late, if another queue has work.
    pub(super) fn time_left(&self) -> Option<Duration> {
        let active = self.all.iter().find(|worker| worker.role == WorkerRole::Active);
        let current = active.and_then(|worker| worker.current.as_ref());
        let is_other = |peer| !current.is_some_and(|current| Arc::ptr_eq(current, peer));
        self.available().find(|(_, peer)| is_other(peer) && peer.queue.has_pending())?;
        let since_ns =
            active.filter(|worker| worker.current.is_some()).map(|worker| worker.since_ns);
        let now = clock::coarse_ns();
        let spent = now.saturating_sub(since_ns.unwrap_or(now));
        Some(LATE_AFTER.saturating_sub(Duration::from_nanos(spent)))
    }

    /// Makes the standby worker the active one.
    pub(super) fn take_over(&mut self, id: u64) {
        for worker in &mut self.all {
            match worker.role {
                _ if worker.id == id => worker.role = WorkerRole::Active,
                WorkerRole::Active => worker.role = WorkerRole::Late,
                _ => {}
            }
        }
    }

    /// Removes a worker that exits.
    pub(super) fn remove(&mut self, id: u64) {
        self.all.retain(|worker| worker.id != id);
    }
}
