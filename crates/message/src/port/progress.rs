//! Progress: control messages that arrived, steps of operations, queued sends, and liveness of peers.

use std::sync::Arc;

use memferry_sys::clock;

use super::PortState;
use super::protocol::{ControlEvent, Protocol};
use crate::error::DisconnectReason;
use crate::path::ActiveCopy;
use crate::ring::cells::ProtocolError;
use crate::ring::layout::MAX_UNREAD_CELLS;

/// How much work a pass does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProgressScope {
    /// Processes control messages and queued sends.
    ControlOnly,
    /// Steps operations too, up to their next copy.
    Steps,
    /// Takes one copy for the caller, which makes it without the lock.
    Copy,
}

/// Which messages a pass takes out of the rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Drain {
    /// All. Those that no receive matches are buffered.
    All,
    /// Those before one that no receive can match, and that one only if it is the first. A thread that has
    /// what it waits for thus leaves later messages in the ring, where their receives take them without
    /// another copy. The first is taken because what the thread waits for may be behind it.
    Wanted,
}

/// Interval of liveness checks without progress.
const LIVENESS_CHECK_NS: u64 = 10_000_000;

/// Interval of polls of the listener while named peers are not connected. A thread of the endpoint accepts them
/// too, but has to be scheduled.
const ACCEPT_POLL_NS: u64 = 1_000_000;

impl PortState {
    /// Makes progress with the lock held. Returns whether that made progress, or whether a caller that
    /// unlocks the port could copy something.
    pub(crate) fn progress_steps(&mut self) -> bool {
        self.protocol.copies.is_due = false;
        self.progress_all(ProgressScope::Steps, Drain::All) | self.protocol.copies.is_due
    }

    /// Makes progress with the lock held, and takes one copy that the caller makes without the lock.
    #[inline]
    pub(super) fn step_and_take_copy(
        &mut self,
        drain: Drain,
    ) -> (bool, Option<(usize, Arc<ActiveCopy>)>) {
        let moved = self.progress_all(ProgressScope::Copy, drain);
        (moved, self.protocol.copies.next.take())
    }

    pub(super) fn progress_all(&mut self, work: ProgressScope, drain: Drain) -> bool {
        let mut moved = false;
        if self.windows.has_unannounced_releases() {
            self.windows.announce_released(&mut self.protocol.peers);
        }
        if !self.protocol.operations.quiescing.is_empty() {
            moved |= self.protocol.finish_quiesced();
        }
        let has_hints = self.wakeup.has_hints();
        if has_hints && self.wakeup.is_hint_set() {
            moved |= self.take_hints();
        }
        moved |= self.progress_polled(work, drain, has_hints);
        if self.protocol.peers.connects_in_flight > 0 {
            moved |= self.poll_connects();
        }
        if self.protocol.peers.remote.is_due() {
            moved |= self.poll_remote();
        }
        self.wakeup.progress_count += u64::from(moved);
        moved
    }

    /// Makes progress with the peers whose rings are polled.
    #[inline]
    fn progress_polled(&mut self, work: ProgressScope, drain: Drain, has_hints: bool) -> bool {
        let (mut moved, mut has_quiet) = (false, false);
        // Round robin: one peer may have many copies.
        let (count, next) = (self.protocol.peers.polled.len(), self.protocol.copies.next_peer);
        let first = match next {
            0 => 0,
            _ => self.protocol.peers.polled.partition_point(|peer| *peer < next),
        };
        for at in (first..count).chain(0..first) {
            // A peer that is disconnected meanwhile leaves the list.
            let Some(&peer) = self.protocol.peers.polled.get(at) else { continue };
            let slot = &mut self.protocol.peers[peer];
            if slot.has_work() {
                moved |= self.progress_peer(peer, work, drain);
                if has_hints {
                    self.protocol.peers.activate(peer);
                }
            } else if has_hints {
                has_quiet |= slot.count_quiet_poll();
            }
        }
        if has_quiet {
            self.leave_rings_after_polls();
        }
        moved
    }

    /// A number that changes with every pass that makes progress.
    pub(crate) fn progress_count(&self) -> u64 {
        self.wakeup.progress_count
    }

    /// The progress epoch. It changes with every event that a waiting thread may poll for: an operation that
    /// completed, a message that was buffered, a disconnected peer, or other progress. A thread that found
    /// nothing at one epoch may sleep only while the epoch is the same.
    pub(super) fn wait_epoch(&self) -> u64 {
        // Each of the three only grows, so the sum is the same only if all of them are.
        self.wakeup.progress_count
            + self.protocol.operations.completed_total()
            + self.protocol.matches.arrivals()
    }

    /// Records a change that no completion reports: a thread may wait for it.
    pub(super) fn mark_changed(&mut self) {
        self.wakeup.progress_count += 1;
        self.protocol.changed = true;
    }

    /// Makes progress with one peer. A peer that violates the protocol is disconnected.
    pub(super) fn progress_peer(&mut self, peer: usize, work: ProgressScope, drain: Drain) -> bool {
        if self.protocol.peers[peer].connection.is_none() {
            return false;
        }
        let progress = match self.drain_ring(peer, drain) {
            Ok((moved, false)) => self
                .protocol
                .progress_connection(peer, work)
                .map(|progressed| (moved | progressed, false)),
            drained => drained,
        };
        match progress {
            Ok((moved, closes)) => {
                if let Some(connection) = &mut self.protocol.peers[peer].connection {
                    connection.wire.ring_doorbell();
                }
                if closes {
                    self.disconnect(peer, DisconnectReason::Closed);
                } else if self.protocol.peers[peer]
                    .connection
                    .as_ref()
                    .is_some_and(|c| c.disconnect_pending)
                {
                    self.drain_and_disconnect(peer);
                }
                moved || closes
            }
            Err(ProtocolError(what)) => {
                self.disconnect(peer, DisconnectReason::ProtocolViolation(what));
                true
            }
        }
    }

    /// Processes the control messages of a peer, at most as many as a ring holds. Returns whether there were
    /// any, and whether the peer closes.
    #[inline]
    pub(super) fn drain_ring(
        &mut self,
        peer: usize,
        drain: Drain,
    ) -> Result<(bool, bool), ProtocolError> {
        let mut cells = MAX_UNREAD_CELLS;
        loop {
            match self.protocol.drain_ring(peer, drain, &mut cells)? {
                ControlEvent::Handled => return Ok((cells < MAX_UNREAD_CELLS, false)),
                ControlEvent::PeerClosed => return Ok((true, true)),
                ControlEvent::RegionChanged(region) => {
                    let Protocol { peers, operations, .. } = &mut self.protocol;
                    let invalidation = self.windows.region_changed(peers.wire(peer), region);
                    operations.deferred.extend(invalidation);
                }
            }
        }
    }

    /// Checks liveness of peers and accepts new ones, if a check is due or `now` is set. Returns whether a
    /// peer has disconnected or connected.
    pub(crate) fn check_peers(&mut self, now: bool) -> bool {
        let time = clock::now_ns();
        if !now
            && time.saturating_sub(self.protocol.peers.last_liveness_check_ns) < LIVENESS_CHECK_NS
        {
            return self.poll_listener(time);
        }
        (self.protocol.peers.last_liveness_check_ns, self.protocol.peers.last_accept_poll_ns) =
            (time, time);
        self.publish_gauges();
        self.publish_lookup();
        self.accept_pending();
        self.sweep_if_due(time);
        let mut found = self.poll_remote();
        for peer in self.wakeup.possibly_ended(&self.protocol.peers) {
            let Some(connection) = &self.protocol.peers[peer].connection else { continue };
            if connection.wire.is_alive() {
                continue;
            }
            self.drain_and_disconnect(peer);
            found = true;
        }
        self.wakeup.progress_count += u64::from(found);
        found
    }

    /// Accepts peers while named peers are not connected. Returns whether any connected.
    fn poll_listener(&mut self, time: u64) -> bool {
        if self.protocol.peers.unconnected == 0
            || time.saturating_sub(self.protocol.peers.last_accept_poll_ns) < ACCEPT_POLL_NS
        {
            return false;
        }
        self.protocol.peers.last_accept_poll_ns = time;
        self.accept_pending()
    }
}
