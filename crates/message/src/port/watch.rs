//! Being watched: a descriptor for event loops, readable while there is something to do or to take.
//!
//! What comes from outside makes a set of sockets and processes readable ([`super::wait`]), on which
//! threads of this port sleep too. What has come already and waits to be taken shows in an event
//! beside it: threads that sleep for something else must not be woken by it again and again.

use std::os::fd::AsFd;
use std::sync::Arc;

use memferry_sys::EventFd;
use memferry_sys::readiness::Readiness;

use super::{Port, State};
use crate::error::{ConnectError, Error, Gone};
use crate::ring::attention::AWAY;

/// Looks at the end of a call before what still comes is left to the next one.
const MOST_ROUNDS: u32 = 100;

/// What event loops watch.
#[derive(Debug)]
pub(super) struct Watched {
    set: Arc<Readiness>,
    event: EventFd,
    is_signalled: bool,
}

impl Port {
    /// A descriptor that is readable whenever there is something to do or to take.
    pub(crate) fn watch(&self) -> Result<Arc<Readiness>, Error> {
        let mut state = self.enter();
        let set = state
            .watched_set()
            .map_err(ConnectError::system("making a descriptor for event loops"))?;
        state.resting |= AWAY;
        state.rest();
        Ok(set)
    }

    /// The descriptor of [`Port::watch`] is never readable again.
    pub(crate) fn unwatch(&self) {
        let state = self.enter();
        if let Some(watched) = &state.watched {
            watched.set.remove(watched.event.as_fd());
            state.readiness.iter().for_each(|readiness| watched.set.remove(readiness.as_fd()));
        }
    }
}

impl State {
    fn watched_set(&mut self) -> std::io::Result<Arc<Readiness>> {
        if let Some(watched) = &self.watched {
            return Ok(watched.set.clone());
        }
        let (set, event) = (Arc::new(Readiness::new()?), EventFd::new()?);
        set.add(self.readiness()?.as_fd(), false)?;
        set.add(event.as_fd(), false)?;
        self.watched = Some(Watched { set: set.clone(), event, is_signalled: false });
        Ok(set)
    }

    /// At the end of every call: takes wake-ups out of the sockets and asks for new ones.
    #[cold]
    pub(super) fn ask_again(&mut self) {
        // A sleeper takes its event back itself.
        if self.is_behind && !self.has_sleeper {
            self.catch_up();
        }
        for _ in 0..MOST_ROUNDS {
            for peer in 0..self.peers.len() {
                let flags = self.resting;
                let Some(connection) = &mut self.peers[peer].connection else { continue };
                let wire = &mut connection.wire;
                if wire.is_resting(flags) && !wire.has_stale_packets() {
                    continue;
                }
                // In this order: a packet for what comes after `rest` must stay in the socket.
                wire.awake();
                let drained = wire.drop_stale_packets();
                wire.rest(flags);
                // What was told without a note before that must be looked at again.
                connection.is_stepping |= !connection.active.is_empty();
                if let Err(nonsense) = drained {
                    self.lose(peer, Gone::Misbehaved(nonsense.0));
                }
            }
            if !self.is_anything_ready() || !self.step_all() {
                return;
            }
        }
        // Whoever writes faster than this side reads does not keep the call from returning.
        self.is_behind = true;
        if let Some(event) = &self.event {
            event.signal();
        }
    }

    /// Somebody looks again at what was left in the rings.
    pub(super) fn catch_up(&mut self) {
        self.is_behind = false;
        if let Some(event) = &self.event {
            event.drain();
        }
    }

    /// At the end of every call: makes the descriptor readable exactly while something waits.
    pub(super) fn show_what_waits(&mut self) {
        if self.watched.is_none() {
            return;
        }
        let waits = self.has_something_to_take();
        if let Some(watched) = &mut self.watched
            && waits != watched.is_signalled
        {
            watched.is_signalled = waits;
            if waits {
                watched.event.signal();
            } else {
                watched.event.drain();
            }
        }
    }

    /// Whether there is a reason to call although nothing comes from outside: outcomes, messages,
    /// copies with steps left, or that nothing will ever come again.
    fn has_something_to_take(&mut self) -> bool {
        self.operations.has_untaken()
            || self.matching.kept_count() > 0
            || self.closed
            || self.is_abandoned()
            || self.is_stepping()
            // Engines do not ring.
            || self.is_offloading()
    }

    /// Whether this is a link and its other side is gone.
    fn is_abandoned(&self) -> bool {
        self.listener.is_none()
            && !self.peers.is_empty()
            && self.peers.iter().all(|slot| slot.connection.is_none())
    }

    /// Whether a thread that leaves the lock to make a copy leaves other messages with steps to make.
    pub(super) fn has_steps_for_others(&self) -> bool {
        let connections = self.peers.iter().filter_map(|slot| slot.connection.as_ref());
        let (mut stepping, mut active) = (false, 0);
        connections.for_each(|connection| {
            stepping |= connection.is_stepping;
            active += connection.active.len();
        });
        stepping && active > 1
    }

    /// Whether messages under way can be moved on: some are new, or the last look at them has moved
    /// them, and not all to the end.
    pub(super) fn is_stepping(&self) -> bool {
        let mut connections = self.peers.iter().filter_map(|slot| slot.connection.as_ref());
        connections.any(|connection| connection.is_stepping)
    }
}
