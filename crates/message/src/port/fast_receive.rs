//! Fast receive: a thread that waits for a small message takes it directly out of the ring, without an
//! operation. A message in the sender's memory is copied without the lock, while its announcement stays in
//! the ring; the copy is valid if the announcement is still there afterwards.

use super::peer_table::Reassembly;
use super::protocol::Protocol;
use super::wait::PortGuard;
use super::{MessageStatus, Started};
use crate::connection::PeerBuffer;
use crate::control::{ControlMessage, OperationId, inline_message};
use crate::envelope::MatchSpec;
use crate::error::{Error, ValidationError};
use crate::matching::MatchKey;
use crate::path;
use crate::plan::{MessagePlan, PathKind};
use crate::ring::cells::CellWords;
use crate::ring::layout::ConnectionMemory;
use crate::segments::{Segment, scatter};

/// Polls of the ring before an operation is created: a few microseconds in total. There is no pause
/// instruction between polls, because it would take longer than a poll.
const FAST_RECEIVE_POLLS: u32 = 400;
/// Maximum size in bytes of a message that is copied in one step. A longer one is copied in several steps,
/// between which other peers are polled.
const MAX_FAST_BYTES: u64 = 64 << 10;

impl Protocol {
    /// The peer with a message in its ring; polls for it up to [`FAST_RECEIVE_POLLS`] times. Returns `None` if
    /// the caller must post a receive.
    #[inline]
    pub(super) fn find_ready_peer(&mut self, want: &MatchKey) -> Option<usize> {
        for _ in 0..self.fast_polls(want) {
            let (count, last) = (self.peers.polled.len(), self.planner.last_fast_peer);
            // Round robin: one peer may write faster than this side reads.
            let first = match count {
                0 | 1 => 0,
                _ => self.peers.polled.partition_point(|peer| *peer <= last),
            };
            for at in (first..count).chain(0..first) {
                let peer = self.peers.polled[at];
                let Some(connection) = &self.peers[peer].connection else { continue };
                if connection.wire.consumer.is_ready() {
                    self.planner.last_fast_peer = peer;
                    return Some(peer);
                }
                if !connection.active.is_empty() || !connection.send_queue.is_empty() {
                    return None;
                }
            }
        }
        None
    }

    /// Number of polls for a message. The ring of a peer that is named is polled from now on; hints of the
    /// others are left to the caller.
    #[inline]
    fn fast_polls(&mut self, want: &MatchKey) -> u32 {
        if self.peers.polled.len() < self.peers.connected {
            match want.source {
                Some(source) => self.peers.activate(source),
                None => return 1,
            }
        }
        if self.peers.is_oversubscribed { 1 } else { FAST_RECEIVE_POLLS }
    }

    /// Takes the message in the next cell of a peer, if it matches and is complete.
    #[inline]
    unsafe fn take_next_cell(
        &mut self,
        peer: usize,
        want: &MatchKey,
        pieces: &[Segment],
        capacity: u64,
    ) -> Option<FastReceive> {
        let connection = self.peers[peer].connection.as_mut()?;
        let wire = &mut connection.wire;
        let words = wire.consumer.peek()?;
        let (tag, length) = if let Some((envelope, length, payload)) = inline_message(&words) {
            if !want.matches(peer, &envelope) {
                return None;
            }
            let fits = (length as u64).min(capacity) as usize;
            // SAFETY: no more is written than the segments hold; the payload is a local copy.
            unsafe { scatter(pieces, 0, payload.as_ptr().cast(), fits) };
            wire.counters.count_received(PathKind::Inline as usize, length as u64);
            (envelope.tag, length as u64)
        } else {
            // SAFETY: the caller guarantees it.
            match unsafe { self.take_multi_cell(peer, want, &words, pieces, capacity) }? {
                MultiCellReceive::Taken(tag, length) => (tag, length),
                MultiCellReceive::Fetch(fetch) => return Some(FastReceive::Fetch(fetch)),
            }
        };
        let wire = self.peers.wire(peer);
        wire.advance();
        wire.ring_doorbell();
        Some(FastReceive::Completed(if length > capacity {
            Err(Error::Truncated { message_bytes: length, buffer_bytes: capacity })
        } else {
            Ok(self.peers.message_status(peer, tag, length))
        }))
    }

    /// Takes a message that does not fit into a cell.
    unsafe fn take_multi_cell(
        &mut self,
        peer: usize,
        want: &MatchKey,
        words: &CellWords,
        pieces: &[Segment],
        capacity: u64,
    ) -> Option<MultiCellReceive> {
        let connection = self.peers[peer].connection.as_mut()?;
        match ControlMessage::decode(words).ok()? {
            ControlMessage::Eager { envelope, length, first }
                if want.matches(peer, &envelope)
                    && u64::from(first.length) == length
                    && connection.reassembly == Reassembly::None =>
            {
                let fits = length.min(capacity) as usize;
                let wire = &mut connection.wire;
                // SAFETY: no more is written than the segments hold; the span was checked to lie inside the
                // bounce ring.
                unsafe { scatter(pieces, 0, wire.incoming(first), fits) };
                wire.release_bounce(first);
                wire.counters.count_received(PathKind::Eager as usize, length);
                Some(MultiCellReceive::Taken(envelope.tag, length))
            }
            ControlMessage::Rts {
                envelope,
                length,
                sender,
                source,
                core,
                nonresident: false,
                ..
            } if want.matches(peer, &envelope)
                && length <= MAX_FAST_BYTES.min(capacity)
                && connection.wire.has_credit().unwrap_or(false) =>
            {
                let (view, plan) = self.plan_fast_receive(peer, source, length, core, pieces)?;
                let tag = envelope.tag;
                if let PeerBuffer::Mapped { .. } = view {
                    // SAFETY: the caller guarantees it; no more is written than the segments hold.
                    unsafe { path::copy_now(&view, pieces, length, &plan) }.ok()?;
                    self.send_fast_fin(peer, sender)?;
                    let counters = &self.peers.wire(peer).counters;
                    counters.count_received(PathKind::Single as usize, length);
                    return Some(MultiCellReceive::Taken(tag, length));
                }
                let (memory, words) = (self.peers.wire(peer).memory.clone(), *words);
                let fetch = FastFetch { peer, memory, words, view, plan, sender, tag, length };
                Some(MultiCellReceive::Fetch(fetch))
            }
            _ => None,
        }
    }

    /// Sends the FIN of a message that is copied, unless the sender is disconnected: its memory may have been
    /// freed during the copy.
    fn send_fast_fin(&mut self, peer: usize, sender: OperationId) -> Option<()> {
        let wire = self.peers.wire(peer);
        if !wire.is_self() && wire.memory.is_peer_closed() {
            return None;
        }
        wire.write(&ControlMessage::Fin { sender, error: 0 }.encode());
        Some(())
    }

    /// Takes a message that was copied without the lock out of the ring, if no other thread has taken it and
    /// no receive was posted meanwhile.
    fn take_fetched(&mut self, fetch: &FastFetch) -> Option<MessageStatus> {
        let FastFetch { peer, sender, tag, length, .. } = *fetch;
        if self.has_queued_matches() {
            return None;
        }
        let wire = &mut self.peers[peer].connection.as_mut()?.wire;
        let is_there = wire.memory.is_same(&fetch.memory)
            && wire.consumer.peek() == Some(fetch.words)
            && wire.has_credit().unwrap_or(false)
            && wire.is_recently_alive();
        if !is_there {
            return None;
        }
        self.send_fast_fin(peer, sender)?;
        let wire = self.peers.wire(peer);
        wire.counters.count_received(PathKind::Single as usize, length);
        wire.advance();
        wire.ring_doorbell();
        Some(self.peers.message_status(peer, tag, length))
    }
}

/// Result of a fast receive.
enum FastReceive {
    Completed(Result<MessageStatus, Error>),
    Fetch(FastFetch),
}

/// Result of a fast receive of a message that does not fit into a cell.
#[expect(clippy::large_enum_variant, reason = "it lives for one call, and a box would cost more")]
enum MultiCellReceive {
    /// The message was received: tag and length.
    Taken(u64, u64),
    Fetch(FastFetch),
}

/// A message to be copied without the lock.
struct FastFetch {
    peer: usize,
    /// Memory of the connection. The slot may have another connection after the copy.
    memory: ConnectionMemory,
    /// The cell with the announcement.
    words: CellWords,
    view: PeerBuffer,
    plan: MessagePlan,
    sender: OperationId,
    tag: u64,
    length: u64,
}

impl PortGuard<'_> {
    /// Posts a receive before the ring is read. If there is no capacity for it, the ring is read: its message
    /// may be there, and operations may end.
    ///
    /// # Safety
    /// As for [`PortState::receive`].
    pub(super) unsafe fn post_receive(
        &mut self,
        wanted: &MatchSpec,
        pieces: &[Segment],
    ) -> Result<Started, Error> {
        // SAFETY: the caller guarantees it, for both calls; the first has started nothing if it fails.
        unsafe {
            match self.receive(wanted, pieces, None) {
                Err(Error::Validation(ValidationError::TooManyOperations(_))) => {
                    self.progress_control();
                    self.receive(wanted, pieces, None)
                }
                begun => begun,
            }
        }
    }

    /// Receives the next message of a peer without an operation. Returns `None` if the caller must post a
    /// receive.
    ///
    /// # Safety
    /// `pieces` must be valid for writes of `capacity` bytes.
    #[inline(never)]
    pub(super) unsafe fn fast_receive(
        &mut self,
        peer: usize,
        want: &MatchKey,
        pieces: &[Segment],
        capacity: u64,
    ) -> Option<Result<MessageStatus, Error>> {
        // SAFETY: the caller guarantees it, for both calls.
        unsafe {
            match self.protocol.take_next_cell(peer, want, pieces, capacity)? {
                FastReceive::Completed(outcome) => Some(outcome),
                FastReceive::Fetch(fetch) => self.run_fast_fetch(&fetch, pieces).map(Ok),
            }
        }
    }

    /// Copies a message without the lock, and takes it out of the ring. Returns `None` if the caller must
    /// post a receive; some bytes of the target may have been written then.
    ///
    /// # Safety
    /// `pieces` must be valid for writes of the whole message.
    unsafe fn run_fast_fetch(
        &mut self,
        fetch: &FastFetch,
        pieces: &[Segment],
    ) -> Option<MessageStatus> {
        let mut copied = false;
        self.copy_unlocked(|| {
            // SAFETY: the caller guarantees it.
            let outcome = unsafe { path::copy_now(&fetch.view, pieces, fetch.length, &fetch.plan) };
            copied = outcome.is_ok();
        });
        if copied { self.protocol.take_fetched(fetch) } else { None }
    }
}
