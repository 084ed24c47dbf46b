//! Small messages of threads that wait: the shortest way into a ring and out of it.
//!
//! Such a message is one cell. These functions handle the common case, and leave every other one, errors
//! too, to the general functions. So they return next to nothing, and the compiler keeps everything in registers.

use memferry_sys::probes;

use super::protocol::Protocol;
use super::{MessageStatus, Peer, PortState};
use crate::control::{inline_limit, inline_message};
use crate::envelope::Envelope;
use crate::matching::MatchKey;
use crate::path;
use crate::plan::PathKind;
use crate::segments::{Segment, scatter};

impl Protocol {
    /// Sends a message of one segment at once, if it fits into a cell and nothing is in its way. Returns whether it was
    /// sent.
    ///
    /// # Safety
    /// The segment must be valid for reads.
    #[inline]
    pub(super) unsafe fn send_small(
        &mut self,
        to: Peer,
        envelope: &Envelope,
        segment: Segment,
    ) -> bool {
        let Ok(peer) = self.peers.index_of(to) else { return false };
        let Some(connection) = &mut self.peers[peer].connection else { return false };
        if segment.length > inline_limit(envelope)
            || segment.address.is_null()
            || !connection.send_queue.is_empty()
            || !connection.accepts_eager()
            || !connection.wire.may_send()
        {
            return false;
        }
        probes::message_begin(0, segment.length as u64);
        let wire = &mut connection.wire;
        // SAFETY: the caller guarantees it.
        let sent = unsafe { path::write_inline(wire, envelope, &[segment], segment.length) };
        // A peer that violates the protocol is found out by the general function.
        let sent = sent.unwrap_or(false);
        if sent {
            wire.counters.count_sent(PathKind::Inline as usize, segment.length as u64);
            wire.ring_doorbell();
        }
        sent
    }

    /// Takes the message in the next cell of a peer, if all of it is there, and it matches and fits.
    ///
    /// # Safety
    /// The segment must be valid for writes.
    #[inline]
    pub(super) unsafe fn take_small(
        &mut self,
        peer: usize,
        want: &MatchKey,
        segment: Segment,
    ) -> Option<MessageStatus> {
        let wire = &mut self.peers[peer].connection.as_mut()?.wire;
        let words = wire.consumer.peek()?;
        let (envelope, length, payload) = inline_message(&words)?;
        if !want.matches(peer, &envelope) || length > segment.length {
            return None;
        }
        // SAFETY: no more is written than the segment holds; the payload is a local copy.
        unsafe { scatter(&[segment], 0, payload.as_ptr().cast(), length) };
        wire.counters.count_received(PathKind::Inline as usize, length as u64);
        wire.advance();
        wire.ring_doorbell();
        Some(self.peers.message_status(peer, envelope.tag, length as u64))
    }
}

impl PortState {
    /// The peer whose message a receive takes directly out of its ring, if one arrives within a few microseconds
    /// and nothing that was posted or buffered matches first.
    #[inline]
    pub(super) fn find_fast_peer(&mut self, want: &MatchKey) -> Option<usize> {
        if self.protocol.has_queued_matches() {
            return None;
        }
        // Everything else is polled once in `MAX_FAST_IN_ROW` receives: a peer that sends without a pause
        // must not prevent that.
        if !self.protocol.planner.allows_fast_receive() {
            self.check_peers(false);
            return None;
        }
        self.protocol.find_ready_peer(want)
    }
}
