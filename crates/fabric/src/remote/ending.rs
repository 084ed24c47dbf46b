//! The end of a peer, and of the carrier: nothing touches the memory of a message once its end was
//! told.

use std::time::{Duration, Instant};

use memferry_message::{CarrierEvent, Error, Gone};

use super::RemoteCarrier;
use super::flights::Flight;
use super::gate::GATE;
use super::packet::Note;
use super::peers::{Outgoing, Standing};

/// How long a carrier that closes lets packets leave that were told as sent: until an inner connection
/// is there that a busy peer has not answered yet.
const PATIENCE: Duration = Duration::from_secs(5);

impl RemoteCarrier {
    /// A peer is gone: everything with it ends, now or when the inner endpoint has let go of it.
    pub(super) fn end(&mut self, peer: usize, gone: Gone) {
        if self.peers[peer].gone().is_some() {
            return;
        }
        if gone != Gone::Closed {
            tracing::debug!(peer, %gone, "a peer on another host is lost");
        }
        self.peers[peer].standing = Standing::Ending(gone.clone());
        self.peers[peer].offers.clear();
        let lost = &self.peers[peer].outgoing;
        let lost = lost.iter().filter(|waiting| matches!(waiting, Outgoing::Packet(_))).count();
        if lost > 0 {
            // Among them may be messages that were told as sent.
            tracing::warn!(peer, lost, "packets to a peer on another host could not be sent");
        }
        for waiting in std::mem::take(&mut self.peers[peer].outgoing) {
            if let Outgoing::Fetch(fetch) = waiting {
                self.fetched(fetch.number, Err(Error::PeerGone(gone.clone())));
            }
        }
        self.drop_sends(peer);
        self.drop_accesses(peer, &gone);
        for context in self.landings(Some(peer)) {
            self.inner.cancel(context);
        }
        self.settle(peer);
    }

    /// Says that a peer is gone as soon as none of its messages' memory is in use, and gives its number
    /// up when the inner endpoint works on nothing with it.
    pub(super) fn settle(&mut self, peer: usize) {
        let remote = &mut self.peers[peer];
        if remote.under_way == 0
            && let Standing::Ending(gone) = &remote.standing
        {
            let (peer, how) = (remote.number, gone.clone());
            remote.standing = Standing::Gone(how.clone());
            self.events.push(CarrierEvent::Gone { peer, how });
        }
        if remote.packets == 0 && matches!(remote.standing, Standing::Gone(_)) {
            self.directory.set_over(remote.number);
        }
    }

    /// A receive waits for this peer. If it is gone, that is said again.
    pub(super) fn set_awaited(&mut self, number: u64) {
        match self.peer_of(number) {
            Some(peer) => {
                self.peers[peer].is_awaited = true;
                if let Standing::Gone(how) = &self.peers[peer].standing {
                    self.events.push(CarrierEvent::Gone { peer: number, how: how.clone() });
                }
            }
            None => self.events.push(CarrierEvent::Gone { peer: number, how: Gone::Ended }),
        }
    }

    /// The contexts of fetches under way: a peer's, or all.
    fn landings(&self, of: Option<usize>) -> Vec<u64> {
        let is_it = |flight: &Flight| matches!(flight, Flight::Landing { peer, .. } if of.is_none_or(|of| of == *peer));
        self.flights.iter().filter(|(_, flight)| is_it(flight)).map(|(at, _)| at).collect()
    }

    /// Says goodbye, and lets leave what was told as sent. Bounded: a peer may not look any more.
    fn leave(&mut self) {
        if GATE.is_closed() {
            return;
        }
        for peer in 0..self.peers.len() {
            if self.peers[peer].is_met() {
                self.push_note(peer, &Note::Bye);
            }
        }
        for context in self.landings(None) {
            self.inner.cancel(context);
        }
        let deadline = Instant::now() + PATIENCE;
        while self.has_leaving() && Instant::now() < deadline {
            if !self.look() {
                std::thread::sleep(Duration::from_micros(50));
            }
            self.events.clear();
        }
    }

    fn has_leaving(&self) -> bool {
        let is_leaving = |flight: &Flight| !matches!(flight, Flight::Room { .. });
        !self.waiting.is_empty() || self.flights.iter().any(|(_, flight)| is_leaving(flight))
    }
}

impl Drop for RemoteCarrier {
    fn drop(&mut self) {
        // A child of a fork shares the sockets: what it said there would be heard as the parent's.
        if self.process != std::process::id() {
            return;
        }
        self.leave();
        // The inner endpoint first: after that nobody touches the memory of what is under way, which
        // the other fields keep.
        // SAFETY: it is dropped only here, and not used afterwards.
        unsafe { std::mem::ManuallyDrop::drop(&mut self.inner) };
    }
}
