//! Posted buffers: receives of one segment that end in a completion entry, and are no operations yet.
//!
//! Most messages of programs with a completion queue fit into one cell, or are one piece of the bounce ring. A poll
//! copies such a message from the ring to the buffer and passes it to its caller; nothing is allocated, inserted or
//! queued in between. A message of any other kind turns the buffer that it matches into an operation.

use super::Peer;
use super::PortState;
use super::peer_table::Reassembly;
use super::posted::MAX_EMPTY_POLLS;
use super::protocol::Protocol;
use super::submit::check_segments;
use crate::completion::{CompletionEntry, CompletionKind, CompletionOptions};
use crate::control::{ControlMessage, OperationId, inline_message};
use crate::envelope::{Envelope, MatchSpec};
use crate::error::{Error, ValidationError};
use crate::plan::PathKind;
use crate::ring::cells::CellWords;
use crate::segments::{Segment, scatter};

/// A posted receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PostedReceive {
    Operation(OperationId),
    Buffer(PostedBuffer),
}

/// The memory of a posted receive, and the value for its completion entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PostedBuffer {
    segment: Segment,
    context: u64,
}

/// A message that was received into a posted buffer.
#[derive(Debug, Clone, Copy)]
pub struct BufferReceived {
    /// The value given when the buffer was posted.
    pub context: u64,
    /// The sender.
    pub peer: Peer,
    /// The envelope of the message.
    pub envelope: Envelope,
    /// The length of the message in bytes.
    pub length: usize,
    /// The address of its first byte.
    pub address: *mut u8,
}

/// Result of a poll for posted buffers.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BufferPoll {
    /// Messages have been received.
    Received,
    /// Messages have been received, and something else has arrived or is in flight.
    ReceivedSome,
    /// Nothing has arrived.
    Quiet,
    /// Something has arrived or is in flight that needs a pass over everything.
    Incomplete,
}

impl PortState {
    /// Posts a receive of one segment without an operation. Returns `false` if it needs one: a message waits for it,
    /// or the source is not connected.
    ///
    /// # Safety
    /// As for [`PortState::receive`].
    #[inline]
    pub(super) unsafe fn post_buffer(
        &mut self,
        wanted: &MatchSpec,
        segments: &[Segment],
        context: u64,
    ) -> Result<bool, Error> {
        let [segment] = *segments else { return Ok(false) };
        let protocol = &mut self.protocol;
        let want = protocol.peers.match_key(wanted)?;
        check_segments(segments)?;
        let is_connected = want.source.is_none_or(|peer| protocol.peers[peer].connection.is_some());
        if !is_connected || protocol.matches.unexpected_len() > 0 {
            return Ok(false);
        }
        if !protocol.operations.has_capacity() {
            return Err(ValidationError::TooManyOperations(protocol.operations.count()).into());
        }
        protocol.operations.buffers += 1;
        let buffer = PostedReceive::Buffer(PostedBuffer { segment, context });
        protocol.matches.post(want, buffer, false);
        Ok(true)
    }

    /// Polls the rings, and receives messages of one cell into posted buffers, up to `limit` messages. `take` is
    /// called with each of them, with the port locked.
    #[inline]
    pub(super) fn poll_buffers(
        &mut self,
        limit: usize,
        mut take: impl FnMut(BufferReceived),
    ) -> BufferPoll {
        if !self.needs_only_rings() {
            return BufferPoll::Incomplete;
        }
        let (count, last) =
            (self.protocol.peers.polled.len(), self.protocol.planner.last_fast_peer);
        // Round robin: one peer may write faster than this side reads.
        let first = match count {
            0 | 1 => 0,
            _ => self.protocol.peers.polled.partition_point(|peer| *peer <= last),
        };
        for _ in 0..MAX_EMPTY_POLLS.div_ceil(count.max(1)) {
            let (mut left, mut is_incomplete) = (limit, false);
            for at in (first..count).chain(0..first) {
                let peer = self.protocol.peers.polled[at];
                while left > 0 && self.protocol.is_ring_ready(peer) {
                    let Some(received) = self.protocol.receive_into_buffer(peer) else {
                        is_incomplete = true;
                        break;
                    };
                    take(received);
                    left -= 1;
                    self.protocol.planner.last_fast_peer = peer;
                }
                is_incomplete |= self.protocol.has_queued_work(peer);
            }
            if left < limit {
                self.wakeup.progress_count += 1;
                return if is_incomplete { BufferPoll::ReceivedSome } else { BufferPoll::Received };
            }
            if is_incomplete {
                return BufferPoll::Incomplete;
            }
        }
        // Peers on other hosts are polled by passes over everything alone.
        let has_remote = self.protocol.peers.remote.has_slots();
        if has_remote { BufferPoll::Incomplete } else { BufferPoll::Quiet }
    }

    /// Whether a poll has to look only at the rings.
    #[inline]
    fn needs_only_rings(&mut self) -> bool {
        let Protocol { peers, operations, .. } = &mut self.protocol;
        operations.buffers > 0
            && !peers.is_oversubscribed
            && operations.completions.is_empty()
            && operations.quiescing.is_empty()
            && peers.connects_in_flight == 0
            && !peers.remote.is_due()
            && !self.windows.has_unannounced_releases()
            && !self.wakeup.is_hint_set()
    }
}

impl Protocol {
    #[inline]
    fn is_ring_ready(&self, peer: usize) -> bool {
        let connection = &self.peers[peer].connection;
        connection.as_ref().is_some_and(|connection| connection.wire.consumer.is_ready())
    }

    #[inline]
    fn has_queued_work(&self, peer: usize) -> bool {
        let connection = &self.peers[peer].connection;
        connection.as_ref().is_some_and(|connection| connection.has_queued_work())
    }

    /// Receives the message in the next cell of a peer, if all of it is there and a posted buffer matches it and holds
    /// it.
    #[inline]
    fn receive_into_buffer(&mut self, peer: usize) -> Option<BufferReceived> {
        let connection = self.peers[peer].connection.as_mut()?;
        let words = connection.wire.consumer.peek()?;
        if connection.disconnect_pending {
            return None;
        }
        let Some((envelope, length, payload)) = inline_message(&words) else {
            return self.receive_eager_into_buffer(peer, &words);
        };
        let (slot, segment, context) = self.find_buffer(peer, &envelope, length)?;
        // SAFETY: the buffer is posted, so its owner guarantees the memory, and the message fits; the payload is a
        // local copy.
        unsafe { scatter(&[segment], 0, payload.as_ptr().cast(), length) };
        self.matches.remove_posted(slot);
        Some(self.buffer_received(peer, PathKind::Inline, envelope, (segment, length), context))
    }

    /// The same for an eager message that lies in the bounce ring as one piece.
    fn receive_eager_into_buffer(
        &mut self,
        peer: usize,
        words: &CellWords,
    ) -> Option<BufferReceived> {
        let Ok(ControlMessage::Eager { envelope, length, first }) = ControlMessage::decode(words)
        else {
            return None;
        };
        let connection = self.peers[peer].connection.as_ref()?;
        if u64::from(first.length) != length || connection.reassembly != Reassembly::None {
            return None;
        }
        let length = first.length as usize;
        let (slot, segment, context) = self.find_buffer(peer, &envelope, length)?;
        let wire = self.peers.wire(peer);
        // SAFETY: the buffer is posted, so its owner guarantees the memory, and the message fits; the span was checked
        // to lie inside the bounce ring.
        unsafe { scatter(&[segment], 0, wire.incoming(first), length) };
        wire.release_bounce(first);
        self.matches.remove_posted(slot);
        Some(self.buffer_received(peer, PathKind::Eager, envelope, (segment, length), context))
    }

    /// The place of the posted buffer that a message matches, its memory and its context. `None` if the first receive
    /// that matches is no buffer, or too small.
    #[inline]
    fn find_buffer(
        &mut self,
        peer: usize,
        envelope: &Envelope,
        length: usize,
    ) -> Option<(u32, Segment, u64)> {
        let (slot, posted) = self.matches.find_posted(peer, envelope)?;
        let PostedReceive::Buffer(PostedBuffer { segment, context }) = posted else { return None };
        (length <= segment.length).then_some((slot, segment, context))
    }

    /// Counts a message that was copied to a buffer, and takes it out of the ring.
    #[inline]
    fn buffer_received(
        &mut self,
        peer: usize,
        path: PathKind,
        envelope: Envelope,
        (segment, length): (Segment, usize),
        context: u64,
    ) -> BufferReceived {
        self.operations.buffers -= 1;
        if let Some(connection) = &mut self.peers[peer].connection {
            connection.quiet_polls = 0;
            connection.wire.counters.count_received(path as usize, length as u64);
            connection.wire.advance();
            connection.wire.ring_doorbell();
        }
        let (peer, address) = (self.peers.peer(peer), segment.address);
        BufferReceived { context, peer, envelope, length, address }
    }

    /// The operation of a posted receive. A buffer becomes one.
    #[inline]
    pub(super) fn operation_of(&mut self, posted: PostedReceive) -> OperationId {
        match posted {
            PostedReceive::Operation(number) => number,
            PostedReceive::Buffer(PostedBuffer { segment, context }) => {
                self.operations.buffers -= 1;
                let ending = CompletionOptions { context, ..CompletionOptions::default() };
                self.insert_receive(&[segment], segment.length as u64, Some(ending), None)
            }
        }
    }

    /// Completes a receive that was unposted.
    pub(super) fn fail_posted(&mut self, posted: PostedReceive, error: Error) {
        match posted {
            PostedReceive::Operation(number) => self.operations.finish(number, Err(error)),
            PostedReceive::Buffer(PostedBuffer { segment, context }) => {
                self.operations.buffers -= 1;
                self.operations.count_completion();
                self.operations.completions.push(CompletionEntry {
                    address: segment.address,
                    ..CompletionEntry::new(CompletionKind::Receive, context, Err(error))
                });
            }
        }
    }

    /// Cancels the buffer that was posted with a context. Returns whether there is one.
    pub(super) fn cancel_buffer(&mut self, context: u64) -> bool {
        let is_it = |posted: &PostedReceive| matches!(posted, PostedReceive::Buffer(buffer) if buffer.context == context);
        let found = self.operations.buffers > 0;
        let Some(posted) = found.then(|| self.matches.unpost_if(is_it)).flatten() else {
            return false;
        };
        let name = format!("buffer with context {context:#x}");
        self.fail_posted(posted, Error::Cancelled(name.as_str().into()));
        true
    }

    /// Completes all posted buffers: the port is closed.
    pub(super) fn close_buffers(&mut self) {
        let is_buffer = |posted: &PostedReceive| matches!(posted, PostedReceive::Buffer(_));
        for posted in self.matches.unpost_all(is_buffer) {
            self.fail_posted(posted, Error::Closed);
        }
    }
}
