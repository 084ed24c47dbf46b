//! Messages to peers: short ones in one packet while there is credit; others are announced, and
//! sent directly from their memory when the peer requests them.

use memferry_message::{DisconnectReason, Envelope, Error, MatchSpace, RemoteEvent, Segment};

use super::in_flight::InFlightOp;
use super::inner::PostError;
use super::packet::{MAX_EAGER, PacketBody};
use super::peers::{CREDIT_LIMIT, MAX_PENDING_RTS, QueuedOutput, RemotePeer, cost};
use super::{FabricTransport, iov};

/// An announced message of this side.
#[derive(Debug)]
pub(super) struct RtsSend {
    pub(super) number: u64,
    segments: Vec<Segment>,
    length: u64,
    delivered: bool,
    state: RtsSendState,
    /// The peer has confirmed the bytes.
    fin_received: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RtsSendState {
    /// The peer has not requested the message.
    RtsSent,
    /// The bytes are posted to the inner endpoint, or will be.
    CtsReceived { is_in_flight: bool },
    /// The memory is free.
    DataSent,
}

/// A message that cannot be announced yet.
#[derive(Debug)]
pub(super) struct QueuedSend {
    number: u64,
    envelope: Envelope,
    segments: Vec<Segment>,
    delivered: bool,
}

/// Returns whether a message is a request to the receiver's provider. Requests take no credit, and
/// wait for no message: they match no receive.
fn is_request(envelope: &Envelope) -> bool {
    envelope.space == MatchSpace::Service
}

/// Returns whether a message is sent in one packet.
fn is_eager(remote: &RemotePeer, length: u64, delivered: bool) -> bool {
    length <= MAX_EAGER as u64 && !delivered && remote.credits_used + cost(length) <= CREDIT_LIMIT
}

/// Returns whether a message can be sent or announced now.
fn can_send(remote: &RemotePeer, length: u64, delivered: bool) -> bool {
    is_eager(remote, length, delivered) || remote.sends.len() < MAX_PENDING_RTS - 1
}

impl RtsSend {
    /// Returns whether the inner endpoint may read the memory.
    pub(super) fn is_in_flight(&self) -> bool {
        self.state == RtsSendState::CtsReceived { is_in_flight: true }
    }

    fn is_complete(&self) -> bool {
        self.state == RtsSendState::DataSent && (self.fin_received || !self.delivered)
    }
}

impl FabricTransport {
    /// Accepts a message for a peer.
    pub(super) fn start_send(
        &mut self,
        peer: usize,
        number: u64,
        envelope: &Envelope,
        segments: &[Segment],
        delivered: bool,
    ) {
        if let Some(reason) = self.peers[peer].disconnect_reason() {
            return self.report_sent(number, Err(Error::PeerDisconnected(reason.into())));
        }
        let (envelope, remote) = (*envelope, &mut self.peers[peer]);
        let must_wait =
            !remote.queued_sends.is_empty() || !can_send(remote, iov::total(segments), delivered);
        if must_wait && !is_request(&envelope) {
            let segments = segments.to_vec();
            return remote.queued_sends.push_back(QueuedSend {
                number,
                envelope,
                segments,
                delivered,
            });
        }
        self.dispatch(peer, number, envelope, segments, delivered);
    }

    /// Sends queued messages, as far as possible.
    fn dispatch_queued_sends(&mut self, peer: usize) {
        while let Some(first) = self.peers[peer].queued_sends.front()
            && can_send(&self.peers[peer], iov::total(&first.segments), first.delivered)
            && let Some(first) = self.peers[peer].queued_sends.pop_front()
        {
            let QueuedSend { number, envelope, segments, delivered } = first;
            self.dispatch(peer, number, envelope, &segments, delivered);
        }
    }

    /// Sends or announces a message.
    fn dispatch(
        &mut self,
        peer: usize,
        number: u64,
        envelope: Envelope,
        segments: &[Segment],
        delivered: bool,
    ) {
        let length = iov::total(segments);
        let is_request = is_request(&envelope);
        if is_request || is_eager(&self.peers[peer], length, delivered) {
            let mut bytes = self.packet(peer, &PacketBody::Eager { envelope }, length as usize);
            // SAFETY: the message is in flight, so its owner guarantees the segments.
            unsafe { iov::gather(segments, length, &mut bytes) };
            self.peers[peer].credits_used += if is_request { 0 } else { cost(length) };
            self.report_sent(number, Ok(()));
            return self.enqueue(peer, QueuedOutput::Packet(bytes));
        }
        self.tickets += 1;
        let ticket = self.tickets;
        let state = RtsSendState::RtsSent;
        let sending = RtsSend {
            number,
            segments: segments.to_vec(),
            length,
            delivered,
            state,
            fin_received: false,
        };
        self.peers[peer].sends.insert(ticket, sending);
        let body = PacketBody::Rts { envelope, length, ticket, acknowledged: delivered };
        self.push_control(peer, &body);
    }

    /// Handles a peer's request for the first bytes of an announced message.
    pub(super) fn on_cts(
        &mut self,
        peer: usize,
        ticket: u64,
        label: u64,
        length: u64,
    ) -> Result<(), DisconnectReason> {
        let sending = self.peers[peer].sends.get_mut(&ticket);
        let sending =
            sending.ok_or(DisconnectReason::ProtocolViolation("CTS without matching RTS"))?;
        if sending.state != RtsSendState::RtsSent || length > sending.length {
            return Err(DisconnectReason::ProtocolViolation("CTS for more bytes than announced"));
        }
        if length == 0 {
            (sending.state, sending.fin_received) = (RtsSendState::DataSent, true);
            self.finish_if_complete(peer, ticket);
        } else {
            sending.state = RtsSendState::CtsReceived { is_in_flight: false };
            self.enqueue(peer, QueuedOutput::Data { ticket, label, length });
        }
        Ok(())
    }

    /// Posts the bytes of a message to the inner endpoint.
    pub(super) fn post_data_send(
        &mut self,
        peer: usize,
        ticket: u64,
        label: u64,
        length: u64,
    ) -> Result<(), PostError> {
        let to = self.inner_number(peer)?;
        let context = self.in_flight.next_context();
        let remote = &mut self.peers[peer];
        // A disconnect has removed the peer's messages.
        let Some(sending) = remote.sends.get_mut(&ticket) else { return Ok(()) };
        let mut gathered = None;
        let vectors = iov::vectors(&sending.segments, length, self.inner.max_iov());
        let vectors = vectors.unwrap_or_else(|| {
            let bytes = gathered.insert(Vec::with_capacity(length as usize));
            // SAFETY: the message is in flight, so its owner guarantees the segments.
            unsafe { iov::gather(&sending.segments, length, bytes) };
            iov::bounce_vector(bytes)
        });
        // SAFETY: the segments stay valid until the `Sent` event, and the gathered bytes are kept.
        unsafe { self.inner.send_labelled(&vectors, to, label, context)? };
        sending.state = RtsSendState::CtsReceived { is_in_flight: true };
        remote.data_in_flight += 1;
        self.in_flight.insert(InFlightOp::DataSend { peer, ticket, _bounce: gathered });
        Ok(())
    }

    /// Handles the completion of a data send.
    pub(super) fn on_data_sent(
        &mut self,
        peer: usize,
        ticket: u64,
        outcome: Result<(), DisconnectReason>,
    ) {
        self.peers[peer].data_in_flight -= 1;
        match outcome {
            Ok(()) => {
                if let Some(sending) = self.peers[peer].sends.get_mut(&ticket) {
                    sending.state = RtsSendState::DataSent;
                }
                self.finish_if_complete(peer, ticket);
                // A disconnected peer will not acknowledge it.
                self.drop_sends(peer);
            }
            Err(reason) => {
                if let Some(sending) = self.peers[peer].sends.remove(&ticket) {
                    self.report_sent(
                        sending.number,
                        Err(Error::PeerDisconnected(reason.clone().into())),
                    );
                }
                self.disconnect(peer, reason);
            }
        }
        self.finish_disconnect(peer);
    }

    /// Handles a peer's confirmation of the bytes.
    pub(super) fn on_fin(&mut self, peer: usize, ticket: u64) -> Result<(), DisconnectReason> {
        let sending = self.peers[peer].sends.get_mut(&ticket);
        match sending.filter(|sending| sending.delivered && sending.state != RtsSendState::RtsSent)
        {
            // It may arrive before this side has polled its own completion.
            Some(sending) => sending.fin_received = true,
            None => return Err(DisconnectReason::ProtocolViolation("FIN without matching data")),
        }
        self.finish_if_complete(peer, ticket);
        Ok(())
    }

    /// Handles returned credit.
    pub(super) fn on_credit(&mut self, peer: usize, cost: u64) -> Result<(), DisconnectReason> {
        let used = &mut self.peers[peer].credits_used;
        *used = used
            .checked_sub(cost)
            .ok_or(DisconnectReason::ProtocolViolation("more credit returned than used"))?;
        self.dispatch_queued_sends(peer);
        Ok(())
    }

    fn finish_if_complete(&mut self, peer: usize, ticket: u64) {
        let sends = &mut self.peers[peer].sends;
        if sends.get(&ticket).is_some_and(RtsSend::is_complete)
            && let Some(sending) = sends.remove(&ticket)
        {
            self.report_sent(sending.number, Ok(()));
            if self.peers[peer].disconnect_reason().is_none() {
                self.dispatch_queued_sends(peer);
            }
        }
    }

    /// Fails the messages to a disconnected peer, except those whose memory is still in use.
    pub(super) fn drop_sends(&mut self, peer: usize) {
        let Some(reason) = self.peers[peer].disconnect_reason() else { return };
        let queued = std::mem::take(&mut self.peers[peer].queued_sends);
        let mut ended: Vec<_> = queued.into_iter().map(|message| message.number).collect();
        self.peers[peer].sends.retain(|_, sending| {
            if !sending.is_in_flight() {
                ended.push(sending.number);
            }
            sending.is_in_flight()
        });
        for number in ended {
            self.report_sent(number, Err(Error::PeerDisconnected(reason.clone().into())));
        }
    }

    fn report_sent(&mut self, number: u64, outcome: Result<(), Error>) {
        self.events.push(RemoteEvent::Sent { number, outcome });
    }
}
