//! Handlers of control messages: each message is matched with its operation. Every field is validated against
//! the state of this side before it is used.

use memferry_sys::shared_memory::Protection;

use super::peer_table::Reassembly;
use super::posted_buffer::PostedReceive;
use super::protocol::{ControlEvent, Protocol};
use super::{RtsInfo, UnexpectedPayload};
use crate::control::{ControlMessage, OperationId};
use crate::envelope::{Envelope, MatchSpace};
use crate::error::Error;
use crate::matching::UnexpectedRef;
use crate::path::{self, ReceiveStage, Receiving, StepResult};
use crate::plan::{MAX_EAGER_LIMIT, PathKind};
use crate::ring::bounce::BounceSpan;
use crate::ring::cells::{CellWords, ProtocolError};
use crate::segments::scatter;

impl Protocol {
    /// Handles one control message of a peer.
    pub(super) fn deliver(
        &mut self,
        peer: usize,
        words: &CellWords,
    ) -> Result<ControlEvent, ProtocolError> {
        match ControlMessage::decode(words)? {
            ControlMessage::Inline { envelope, length, payload } => {
                self.deliver_inline(peer, envelope, length, &payload)?;
            }
            ControlMessage::Eager { envelope, length, first } => {
                if envelope.space == MatchSpace::Service {
                    self.start_service(peer, envelope, length)?;
                    self.deliver_fragment(peer, first)?;
                } else {
                    self.deliver_eager(peer, envelope, length, first)?;
                }
            }
            ControlMessage::Fragment { receiver: None, data } => {
                self.deliver_fragment(peer, data)?;
            }
            ControlMessage::Fragment { receiver: Some(number), data } => {
                self.deliver_requested_fragment(peer, number, data)?;
            }
            ControlMessage::Rts {
                envelope,
                length,
                sender,
                source,
                core,
                has_receives: expects,
                nonresident: absent,
            } => {
                if envelope.space == MatchSpace::Service {
                    return Err(ProtocolError("an announced request"));
                }
                let source = self.peers.wire(peer).decode_buffer(source, length)?;
                let request =
                    RtsInfo { sender, source, core, has_receives: expects, nonresident: absent };
                match self.match_arrival(peer, &envelope, length) {
                    Some(number) => {
                        let arrival = self.matches.next_arrival();
                        self.on_rts_matched(number, (peer, arrival), envelope, length, request)?;
                    }
                    None => drop(self.buffer_unexpected(
                        peer,
                        envelope,
                        UnexpectedPayload::AtSender { length, request },
                    )?),
                }
            }
            ControlMessage::Cts { sender, receiver, length, mode: manner } => {
                self.on_cts(peer, sender, receiver, length, &manner)?;
            }
            ControlMessage::Fin { sender, error } => self.on_fin(peer, sender, error)?,
            ControlMessage::CancelRts { sender } => self.on_cancel_rts(peer, sender),
            ControlMessage::CancelReply { sender, granted } => {
                self.on_cancel_reply(peer, sender, granted);
            }
            ControlMessage::AccessCaps { read, write } => {
                let wire = self.peers.wire(peer);
                (wire.peer_access_to_us, wire.access_caps_sent) = ((read, write), true);
                wire.had_access_to_us |= read || write;
                wire.report_refused_heap();
            }
            ControlMessage::ShareRegion { region, writable, address, length } => {
                let access = if writable { Protection::ReadWrite } else { Protection::ReadOnly };
                self.peers.wire(peer).import(region, access, address, length)?;
                return Ok(ControlEvent::RegionChanged(region));
            }
            ControlMessage::UnshareRegion { region } => {
                self.peers.wire(peer).remove_import(region);
                return Ok(ControlEvent::RegionChanged(region));
            }
            ControlMessage::ShareHints { slot } => self.peers.wire(peer).map_peer_hints(slot)?,
            ControlMessage::HintsMapped => {
                self.peers.on_hints_mapped(peer)?;
                // A sleeper sleeps on the word of the connection, and not on that of the hints.
                self.changed = true;
            }
            ControlMessage::GrowRing => self.peers.wire(peer).consumer.grow()?,
            ControlMessage::Close => return Ok(ControlEvent::PeerClosed),
        }
        Ok(ControlEvent::Handled)
    }

    /// The posted receive that matches a message that has arrived. Of a receive for several messages, a part
    /// is carved out for the message.
    #[inline]
    pub(super) fn match_arrival(
        &mut self,
        peer: usize,
        envelope: &Envelope,
        length: u64,
    ) -> Option<OperationId> {
        match self.matches.match_arrival(peer, envelope)? {
            (PostedReceive::Operation(number), true) => Some(self.carve_receive(number, length)),
            (posted, _) => Some(self.operation_of(posted)),
        }
    }

    #[inline]
    fn deliver_inline(
        &mut self,
        peer: usize,
        envelope: Envelope,
        length: u8,
        payload: &[u64; 6],
    ) -> Result<(), ProtocolError> {
        let bytes = payload.as_ptr().cast::<u8>();
        if envelope.space == MatchSpace::Service {
            // SAFETY: the payload is a local copy of 48 bytes, of which the length was checked.
            let bytes = unsafe { std::slice::from_raw_parts(bytes, length.into()) }.to_vec();
            return self.deliver_service(peer, envelope, bytes);
        }
        let counters = &self.peers.wire(peer).counters;
        counters.count_received(PathKind::Inline as usize, length.into());
        if let Some(number) = self.match_arrival(peer, &envelope, length.into()) {
            let Some(receiving) = self.operations.receiving(number) else { return Ok(()) };
            receiving.set_matched(peer, envelope, length.into());
            let fits = receiving.accepted() as usize;
            // SAFETY: the operation is in flight, so its owner guarantees the segments, and no more is
            // written than they hold; the payload is a local copy of 48 bytes, of which the length was
            // checked.
            unsafe { scatter(receiving.segments.as_slice(), 0, bytes, fits) };
            self.complete_receive(number);
            return Ok(());
        }
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(bytes, length.into()) }.to_vec();
        self.buffer_unexpected(
            peer,
            envelope,
            UnexpectedPayload::Buffered { length: bytes.len(), bytes },
        )
        .map(drop)
    }

    fn deliver_eager(
        &mut self,
        peer: usize,
        envelope: Envelope,
        length: u64,
        first: BounceSpan,
    ) -> Result<(), ProtocolError> {
        if self.peers.connection(peer).reassembly != Reassembly::None {
            return Err(ProtocolError("a message inside another"));
        }
        self.peers.wire(peer).counters.count_received(PathKind::Eager as usize, length);
        if let Some(number) = self.match_arrival(peer, &envelope, length) {
            if let Some(receiving) = self.operations.receiving(number) {
                receiving.set_matched(peer, envelope, length);
                if u64::from(first.length) == length {
                    let wire = &mut self.peers[peer].connection.as_mut().expect("it is there").wire;
                    let fits = receiving.accepted() as usize;
                    // SAFETY: the operation is in flight, so its owner guarantees the segments, and no more
                    // is written than they hold; the span lies inside the bounce ring.
                    unsafe {
                        scatter(receiving.segments.as_slice(), 0, wire.incoming(first), fits);
                    }
                    wire.release_bounce(first);
                    self.complete_receive(number);
                    return Ok(());
                }
                receiving.arrival = self.matches.next_arrival();
                receiving.stage = ReceiveStage::Arriving { arrived: 0, requested: None };
            }
            self.peers.connection(peer).reassembly = Reassembly::Receive(number);
        } else {
            if length > MAX_EAGER_LIMIT {
                return Err(ProtocolError("a message too long to be sent without being asked for"));
            }
            let length = length as usize;
            let kept = UnexpectedPayload::Buffered { bytes: Vec::with_capacity(length), length };
            let id = self.buffer_unexpected(peer, envelope, kept)?;
            self.peers.connection(peer).reassembly = Reassembly::Unexpected(id);
        }
        self.deliver_fragment(peer, first)
    }

    /// Handles the next fragment of an eager message.
    fn deliver_fragment(&mut self, peer: usize, data: BounceSpan) -> Result<(), ProtocolError> {
        match self.peers.connection(peer).reassembly {
            Reassembly::None => Err(ProtocolError("a fragment of no message")),
            Reassembly::Receive(number) => {
                if self.receive_fragment(peer, number, data)? {
                    self.peers.connection(peer).reassembly = Reassembly::None;
                }
                Ok(())
            }
            Reassembly::Unexpected(id) => self.append_unexpected(peer, id, data),
            Reassembly::Service => self.append_service(peer, data),
        }
    }

    fn append_unexpected(
        &mut self,
        peer: usize,
        id: UnexpectedRef,
        data: BounceSpan,
    ) -> Result<(), ProtocolError> {
        let connection = self.peers[peer].connection.as_mut().expect("notes come from connections");
        let (fragment, source) = (data.length as usize, connection.wire.incoming(data));
        connection.wire.release_bounce(data);
        let Some(unexpected) = self.matches.unexpected_mut(id) else {
            return Err(ProtocolError("a fragment of a message that is gone"));
        };
        let UnexpectedPayload::Buffered { bytes, length } = &mut unexpected.message else {
            return Err(ProtocolError("a fragment of a message that waits"));
        };
        let arrived = bytes.len();
        if fragment > *length - arrived {
            return Err(ProtocolError("more fragments than the message has bytes"));
        }
        bytes.reserve_exact(fragment);
        // SAFETY: the span lies inside the bounce ring; the buffer has space for the fragment after the bytes
        // that have arrived, and these are initialized then.
        unsafe {
            std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr().add(arrived), fragment);
            bytes.set_len(arrived + fragment);
        }
        if bytes.len() == *length {
            connection.reassembly = Reassembly::None;
        }
        Ok(())
    }

    /// Handles a fragment that a receive has requested.
    fn deliver_requested_fragment(
        &mut self,
        peer: usize,
        number: OperationId,
        data: BounceSpan,
    ) -> Result<(), ProtocolError> {
        let asked = self.operations.receiving(number).is_some_and(|receiving| {
            receiving.peer == peer
                && matches!(receiving.stage, ReceiveStage::Arriving { requested: Some(_), .. })
        });
        if !asked {
            return Err(ProtocolError("an unsolicited fragment"));
        }
        self.receive_fragment(peer, number, data).map(drop)
    }

    /// Copies a fragment into the memory of a receive. Returns whether the message is complete.
    fn receive_fragment(
        &mut self,
        peer: usize,
        number: OperationId,
        data: BounceSpan,
    ) -> Result<bool, ProtocolError> {
        let Self { operations, peers, .. } = self;
        let wire = &mut peers[peer].connection.as_mut().expect("it is connected").wire;
        let Some(receiving) = operations.receiving(number) else {
            return Err(ProtocolError("a fragment for no receive"));
        };
        if path::receive_fragment(receiving, data, wire)? != StepResult::Done {
            return Ok(false);
        }
        match receiving.stage {
            ReceiveStage::Arriving { requested: Some(requested), .. } => {
                wire.counters.count_received(PathKind::Pipeline as usize, receiving.length);
                if !self.send_fin(peer, number, requested.sender)? {
                    self.peers.push_active(peer, number);
                }
            }
            _ => self.complete_receive(number),
        }
        Ok(true)
    }

    /// Completes a receive that has all its bytes.
    #[inline]
    pub(super) fn complete_receive(&mut self, number: OperationId) {
        let Some(receiving) = self.operations.receiving(number) else { return };
        let (peer, tag) = (receiving.peer, receiving.envelope.tag);
        let (message_bytes, buffer_bytes) = (receiving.length, receiving.capacity);
        let outcome = if message_bytes > buffer_bytes {
            Err(Error::Truncated { message_bytes, buffer_bytes })
        } else {
            Ok(self.peers.message_status(peer, tag, message_bytes))
        };
        self.operations.finish(number, outcome);
    }

    /// Buffers a message that no posted receive matches.
    pub(super) fn buffer_unexpected(
        &mut self,
        peer: usize,
        envelope: Envelope,
        kept: UnexpectedPayload,
    ) -> Result<UnexpectedRef, ProtocolError> {
        self.peers.reserve_unexpected(peer, kept.weight(), kept.bytes())?;
        self.changed = true;
        Ok(self.matches.push_unexpected(peer, envelope, kept))
    }
}

impl Receiving {
    /// Records the message that this receive has matched.
    #[inline]
    pub(super) fn set_matched(&mut self, peer: usize, envelope: Envelope, length: u64) {
        (self.peer, self.envelope, self.length) = (peer, envelope, length);
    }
}
