//! The worker threads of windows, and the lanes that have work for them.
//!
//! One thread, the active worker, serves all lanes. It blocks inside a lane for as long as the memory of
//! that peer does not come. So while another lane waits, a second thread stands by: when the active
//! worker has been inside one lane for [`LATE`], the second thread becomes the active worker. The first
//! one keeps its lane, and ends when it comes out. There is never more than one thread for each lane that
//! has work, and one that stands by.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use memferry_sys::clock;

use super::peer_memory::PeerMemory;
use crate::port::Peer;

/// An active worker that has been inside one lane for this long keeps no other lane waiting.
pub(super) const LATE: Duration = Duration::from_millis(10);

/// A peer, and its lane.
pub(super) type Seat = (Peer, Arc<PeerMemory>);

/// What a worker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Serves all lanes that no late worker is in.
    Active,
    /// Waits until the active worker is late.
    Standby,
    /// Was active, and is still inside a lane.
    Late,
}

#[derive(Debug)]
pub(super) struct Worker {
    id: u64,
    role: Role,
    pub(super) thread: JoinHandle<()>,
    /// The lane that it is inside, and since when by the coarse clock.
    inside: Option<Arc<PeerMemory>>,
    since_ns: u64,
}

impl Worker {
    /// Whether it may be blocked by memory that does not come.
    pub(super) fn may_be_blocked(&self) -> bool {
        self.inside.as_ref().is_some_and(|peer| peer.lane.is_running())
    }
}

/// All workers, and the lanes that have work.
#[derive(Debug, Default)]
pub(super) struct Workers {
    pub(super) all: Vec<Worker>,
    pub(super) lanes: VecDeque<Seat>,
    last_id: u64,
    /// The worker that stands by has set a timer for the active one.
    pub(super) is_watching: bool,
    /// The port closes: workers end.
    pub(super) closes: bool,
}

impl Workers {
    /// Keeps a thread that `start` starts with its number. The caller holds the lock, so the thread finds
    /// itself here.
    pub(super) fn add(
        &mut self,
        role: Role,
        start: impl FnOnce(u64) -> std::io::Result<JoinHandle<()>>,
    ) -> std::io::Result<()> {
        self.last_id += 1;
        let id = self.last_id;
        let thread = start(id)?;
        self.all.push(Worker { id, role, thread, inside: None, since_ns: 0 });
        Ok(())
    }

    pub(super) fn has(&self, role: Role) -> bool {
        self.all.iter().any(|worker| worker.role == role)
    }

    /// What a worker does; `None` if it is to end.
    pub(super) fn role(&self, id: u64) -> Option<Role> {
        let role = self.all.iter().find(|worker| worker.id == id).map(|worker| worker.role);
        role.filter(|_| !self.closes)
    }

    fn get(&mut self, id: u64) -> Option<&mut Worker> {
        self.all.iter_mut().find(|worker| worker.id == id)
    }

    /// Notes that a lane has work.
    pub(super) fn put(&mut self, who: Peer, peer: &Arc<PeerMemory>) {
        if !self.lanes.iter().any(|(_, known)| Arc::ptr_eq(known, peer)) {
            self.lanes.push_back((who, peer.clone()));
        }
    }

    /// Forgets lanes without work, and puts the first one behind the others.
    pub(super) fn tidy(&mut self) {
        self.lanes.retain(|(_, peer)| !peer.lane.is_idle());
        let next = usize::from(!self.lanes.is_empty());
        self.lanes.rotate_left(next);
    }

    /// The lanes that no late worker is in.
    pub(super) fn open(&self) -> impl Iterator<Item = &Seat> {
        let is_late_in = |worker: &Worker, peer| {
            worker.role == Role::Late
                && worker.inside.as_ref().is_some_and(|inside| Arc::ptr_eq(inside, peer))
        };
        self.lanes.iter().filter(move |(_, peer)| !self.all.iter().any(|w| is_late_in(w, peer)))
    }

    /// Whether a lane may have to wait while the active worker is inside another one.
    pub(super) fn needs_standby(&self) -> bool {
        self.lanes.len() > 1 && self.open().nth(1).is_some()
    }

    /// The active worker is about to serve a lane. `false` if it is the active one no more.
    pub(super) fn enter(&mut self, id: u64, peer: &Arc<PeerMemory>) -> bool {
        let Some(worker) = self.get(id).filter(|worker| worker.role == Role::Active) else {
            return false;
        };
        worker.inside = Some(peer.clone());
        worker.since_ns = clock::coarse_ns();
        true
    }

    /// A worker has come out of a lane. Returns what it does from now on; `None` if it ends. One that was
    /// late stands by where nobody does.
    pub(super) fn come_out(&mut self, id: u64) -> Option<Role> {
        let stands_by = self.needs_standby() && !self.has(Role::Standby);
        let closes = self.closes;
        let worker = self.get(id)?;
        worker.inside = None;
        match worker.role {
            // Whoever closes waits for it.
            _ if closes => None,
            Role::Late if stands_by => {
                worker.role = Role::Standby;
                Some(Role::Standby)
            }
            Role::Late => {
                self.remove(id);
                None
            }
            role => Some(role),
        }
    }

    /// How long the active worker may still be inside its lane, if another lane waits for it.
    pub(super) fn time_left(&self) -> Option<Duration> {
        let active = self.all.iter().find(|worker| worker.role == Role::Active);
        let inside = active.and_then(|worker| worker.inside.as_ref());
        let is_other = |peer| !inside.is_some_and(|inside| Arc::ptr_eq(inside, peer));
        self.open().find(|(_, peer)| is_other(peer) && peer.lane.is_waiting())?;
        let since_ns =
            active.filter(|worker| worker.inside.is_some()).map(|worker| worker.since_ns);
        let now = clock::coarse_ns();
        let spent = now.saturating_sub(since_ns.unwrap_or(now));
        Some(LATE.saturating_sub(Duration::from_nanos(spent)))
    }

    /// The worker that stands by becomes the active one.
    pub(super) fn take_over(&mut self, id: u64) {
        for worker in &mut self.all {
            match worker.role {
                _ if worker.id == id => worker.role = Role::Active,
                Role::Active => worker.role = Role::Late,
                _ => {}
            }
        }
    }

    /// A worker ends by itself.
    pub(super) fn remove(&mut self, id: u64) {
        self.all.retain(|worker| worker.id != id);
    }
}
