//! The disconnect of a peer, and the close of the transport: nothing accesses the memory of a
//! message after its completion was reported.

use std::time::{Duration, Instant};

use memferry_message::{DisconnectReason, Error, RemoteEvent};

use super::FabricTransport;
use super::gate::UNLOAD_GATE;
use super::in_flight::InFlightOp;
use super::packet::PacketBody;
use super::peers::{QueuedOutput, RemotePeerState};

/// How long a closing transport waits for packets to leave that were reported as sent: long enough
/// for an inner connection to a busy peer.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

impl FabricTransport {
    /// Disconnects a peer: all operations with it fail, now or when the inner endpoint has
    /// completed them.
    pub(super) fn disconnect(&mut self, peer: usize, reason: DisconnectReason) {
        if self.peers[peer].disconnect_reason().is_some() {
            return;
        }
        if reason != DisconnectReason::Closed {
            tracing::debug!(peer, %reason, "disconnecting a peer on another host");
        }
        self.peers[peer].state = RemotePeerState::Closing(reason.clone());
        self.peers[peer].pending_rts.clear();
        let lost = &self.peers[peer].output;
        let lost = lost.iter().filter(|output| matches!(output, QueuedOutput::Packet(_))).count();
        if lost > 0 {
            // Among them may be messages that were reported as sent.
            tracing::warn!(peer, lost, "packets to a peer on another host were not sent");
        }
        for output in std::mem::take(&mut self.peers[peer].output) {
            if let QueuedOutput::Fetch(fetch) = output {
                self.report_fetched(
                    fetch.number,
                    Err(Error::PeerDisconnected(reason.clone().into())),
                );
            }
        }
        self.drop_sends(peer);
        self.drop_rma(peer, &reason);
        for context in self.data_receives(Some(peer)) {
            self.inner.cancel(context);
        }
        self.finish_disconnect(peer);
    }

    /// Reports the disconnect as soon as no memory of the peer's messages is in use, and frees its
    /// number when the inner endpoint has no operation with it.
    pub(super) fn finish_disconnect(&mut self, peer: usize) {
        let remote = &mut self.peers[peer];
        if remote.data_in_flight == 0
            && let RemotePeerState::Closing(reason) = &remote.state
        {
            let (peer, reason) = (remote.number, reason.clone());
            remote.state = RemotePeerState::Disconnected(reason.clone());
            self.events.push(RemoteEvent::Disconnected { peer, reason });
        }
        if remote.packets_in_flight == 0 && matches!(remote.state, RemotePeerState::Disconnected(_))
        {
            self.directory.set_closed(remote.number);
        }
    }

    /// Records that a receive waits for this peer. If it is disconnected, that is reported again.
    pub(super) fn set_awaited(&mut self, number: u64) {
        match self.peer_of(number) {
            Some(peer) => {
                self.peers[peer].is_awaited = true;
                if let RemotePeerState::Disconnected(reason) = &self.peers[peer].state {
                    self.events
                        .push(RemoteEvent::Disconnected { peer: number, reason: reason.clone() });
                }
            }
            None => self
                .events
                .push(RemoteEvent::Disconnected { peer: number, reason: DisconnectReason::Exited }),
        }
    }

    /// The contexts of fetches in flight: of one peer, or all.
    fn data_receives(&self, of: Option<usize>) -> Vec<u64> {
        let is_receive = |op: &InFlightOp| matches!(op, InFlightOp::DataReceive { peer, .. } if of.is_none_or(|of| of == *peer));
        self.in_flight.iter().filter(|(_, op)| is_receive(op)).map(|(at, _)| at).collect()
    }

    /// Sends close packets, and waits for packets that were reported as sent. Bounded: a peer may
    /// no longer poll.
    fn drain_and_close(&mut self) {
        if UNLOAD_GATE.is_closed() {
            return;
        }
        for peer in 0..self.peers.len() {
            if self.peers[peer].is_connected() {
                self.push_control(peer, &PacketBody::Close);
            }
        }
        for context in self.data_receives(None) {
            self.inner.cancel(context);
        }
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        while self.has_unsent() && Instant::now() < deadline {
            if !self.poll_inner() {
                std::thread::sleep(Duration::from_micros(50));
            }
            self.events.clear();
        }
    }

    fn has_unsent(&self) -> bool {
        let is_send = |op: &InFlightOp| !matches!(op, InFlightOp::PacketBuffer { .. });
        !self.peers_with_output.is_empty() || self.in_flight.iter().any(|(_, op)| is_send(op))
    }
}

impl Drop for FabricTransport {
    fn drop(&mut self) {
        // A forked child shares the sockets: the peers would take its packets for the parent's.
        if !self.owner.is_current() {
            return;
        }
        self.drain_and_close();
        // The inner endpoint first: after that nothing accesses the memory of operations in flight,
        // which the other fields own. SAFETY: it is dropped only here, and not used afterwards.
        unsafe { std::mem::ManuallyDrop::drop(&mut self.inner) };
    }
}
