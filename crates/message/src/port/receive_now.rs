//! The shortest way of a small message: a thread that waits for it anyway takes it straight out of
//! the ring, and no operation is made for it.

use super::{Assembling, Received, State};
use crate::error::Error;
use crate::matching::Want;
use crate::pieces::{Piece, scatter};
use crate::ring::cells::Words;
use crate::wire::{Note, inline_message};

/// Looks at the ring before the usual way is taken: a few microseconds, without the pause between
/// looks that would take longer than a look.
const LOOKS: u32 = 400;
/// Messages that are taken so before everything else is looked at.
const MOST_IN_A_ROW: u32 = 64;

impl State {
    /// Takes the next message out of the ring if it fits, is small, and nobody has an older claim
    /// to it; looks for it for a moment. `None`: receive it the usual way.
    ///
    /// # Safety
    /// The pieces must be valid for writes of `capacity` bytes.
    #[inline]
    pub(super) unsafe fn receive_now(
        &mut self,
        want: &Want,
        pieces: &[Piece],
        capacity: u64,
    ) -> Option<Result<Received, Error>> {
        if self.matching.has_posted() || self.matching.kept_count() > 0 {
            return None;
        }
        // Now and then the usual way, on which everything else gets its turn.
        self.taken_now = (self.taken_now + 1) % MOST_IN_A_ROW;
        if self.taken_now == 0 {
            self.check_peers(false);
            return None;
        }
        for _ in 0..if self.is_crowded { 1 } else { LOOKS } {
            // Not always the first one first: it may write faster than this side reads.
            let first = (self.last_taken_from + 1).min(self.peers.len());
            for peer in (first..self.peers.len()).chain(0..first) {
                let Some(connection) = &self.peers[peer].connection else { continue };
                if connection.wire.consumer.is_ready() {
                    self.last_taken_from = peer;
                    // SAFETY: passed on.
                    return unsafe { self.take_now(peer, want, pieces, capacity) };
                }
                if !connection.active.is_empty() || !connection.outbox.is_empty() {
                    return None;
                }
            }
        }
        None
    }

    /// Takes the message in the next cell of a peer, if it is one that fits and is whole.
    #[inline]
    unsafe fn take_now(
        &mut self,
        peer: usize,
        want: &Want,
        pieces: &[Piece],
        capacity: u64,
    ) -> Option<Result<Received, Error>> {
        let connection = self.peers[peer].connection.as_mut()?;
        let wire = &mut connection.wire;
        let words = wire.consumer.peek()?;
        let (tag, length) = if let Some((envelope, length, payload)) = inline_message(&words) {
            if !want.fits(peer, &envelope) {
                return None;
            }
            let fits = (length as u64).min(capacity) as usize;
            // SAFETY: no more is written than the pieces hold; the payload is a local copy.
            unsafe { scatter(pieces, 0, payload.as_ptr().cast(), fits) };
            (envelope.tag, length as u64)
        } else {
            // SAFETY: passed on.
            unsafe { self.take_longer(peer, want, &words, pieces, capacity) }?
        };
        let wire = self.wire(peer);
        wire.pass();
        wire.announce();
        Some(if length > capacity {
            Err(Error::Truncated { message_bytes: length, buffer_bytes: capacity })
        } else {
            Ok(self.received(peer, tag, length))
        })
    }

    /// The same for messages that do not fit a cell; returns tag and length.
    unsafe fn take_longer(
        &mut self,
        peer: usize,
        want: &Want,
        words: &Words,
        pieces: &[Piece],
        capacity: u64,
    ) -> Option<(u64, u64)> {
        let connection = self.peers[peer].connection.as_mut()?;
        let Note::Eager { envelope, length, first } = Note::decode(words).ok()? else {
            return None;
        };
        let is_whole = u64::from(first.length) == length;
        if !is_whole || !want.fits(peer, &envelope) || connection.assembling != Assembling::Nothing
        {
            return None;
        }
        let fits = length.min(capacity) as usize;
        let wire = &mut connection.wire;
        // SAFETY: no more is written than the pieces hold; the span was checked to lie inside the space.
        unsafe { scatter(pieces, 0, wire.incoming(first), fits) };
        wire.used(first);
        Some((envelope.tag, length))
    }
}
