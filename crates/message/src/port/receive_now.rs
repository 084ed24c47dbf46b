//! The shortest way of a small message: a thread that waits for it anyway takes it straight out of
//! the ring, and no operation is made for it. One that waits in the sender's memory is copied without the
//! lock, while its announcement stays in the ring; it counts if that is still there afterwards.

use super::wait::Entered;
use super::{Assembling, Received, State};
use crate::connection::View;
use crate::error::Error;
use crate::matching::Want;
use crate::path;
use crate::pieces::{Piece, scatter};
use crate::plan::Plan;
use crate::ring::cells::Words;
use crate::ring::layout::Memory;
use crate::wire::{Note, Number, inline_message};

/// Looks at the ring before the usual way is taken: a few microseconds, without the pause between
/// looks that would take longer than a look.
const LOOKS: u32 = 400;
/// Longer ones are copied step by step, so that others get their turn.
const LONGEST_NOW: u64 = 64 << 10;
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
    ) -> Option<Now> {
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
    ) -> Option<Now> {
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
            match unsafe { self.take_longer(peer, want, &words, pieces, capacity) }? {
                Longer::Taken(tag, length) => (tag, length),
                Longer::Fetch(fetch) => return Some(Now::Fetch(fetch)),
            }
        };
        let wire = self.wire(peer);
        wire.pass();
        wire.announce();
        Some(Now::Over(if length > capacity {
            Err(Error::Truncated { message_bytes: length, buffer_bytes: capacity })
        } else {
            Ok(self.received(peer, tag, length))
        }))
    }

    /// The same for messages that do not fit a cell.
    unsafe fn take_longer(
        &mut self,
        peer: usize,
        want: &Want,
        words: &Words,
        pieces: &[Piece],
        capacity: u64,
    ) -> Option<Longer> {
        let connection = self.peers[peer].connection.as_mut()?;
        match Note::decode(words).ok()? {
            Note::Eager { envelope, length, first }
                if want.fits(peer, &envelope)
                    && u64::from(first.length) == length
                    && connection.assembling == Assembling::Nothing =>
            {
                let fits = length.min(capacity) as usize;
                let wire = &mut connection.wire;
                // SAFETY: no more is written than the pieces hold; the span was checked to lie
                // inside the space.
                unsafe { scatter(pieces, 0, wire.incoming(first), fits) };
                wire.used(first);
                Some(Longer::Taken(envelope.tag, length))
            }
            Note::Request { envelope, length, sender, source, core, absent: false, .. }
                if want.fits(peer, &envelope)
                    && length <= LONGEST_NOW.min(capacity)
                    && connection.wire.has_room().unwrap_or(false) =>
            {
                let (view, plan) = self.plan_now(peer, source, length, core, pieces)?;
                let tag = envelope.tag;
                if let View::Near { .. } = view {
                    // SAFETY: passed on, for no more than the pieces hold.
                    unsafe { path::copy_at_once(&view, pieces, length, &plan) }.ok()?;
                    self.finish_now(peer, sender)?;
                    return Some(Longer::Taken(tag, length));
                }
                let (memory, words) = (self.wire(peer).memory.clone(), *words);
                let fetch = FetchNow { peer, memory, words, view, plan, sender, tag, length };
                Some(Longer::Fetch(fetch))
            }
            _ => None,
        }
    }

    /// Tells the sender that a message is copied, unless the sender has ended: what it left behind is
    /// nobody's any more.
    fn finish_now(&mut self, peer: usize, sender: Number) -> Option<()> {
        let wire = self.wire(peer);
        if !wire.is_self() && wire.memory.has_other_ended() {
            return None;
        }
        wire.write(&Note::Finish { sender, error: 0 }.encode());
        Some(())
    }

    /// Takes a message out of the ring that was copied without the lock, if nobody else has taken it and
    /// nobody has an older claim to it.
    fn take_fetched(&mut self, fetch: &FetchNow) -> Option<Received> {
        let FetchNow { peer, sender, tag, length, .. } = *fetch;
        if self.matching.has_posted() || self.matching.kept_count() > 0 {
            return None;
        }
        let wire = &mut self.peers[peer].connection.as_mut()?.wire;
        let is_there = wire.memory.is_same(&fetch.memory)
            && wire.consumer.peek() == Some(fetch.words)
            && wire.has_room().unwrap_or(false)
            && wire.is_surely_alive();
        if !is_there {
            return None;
        }
        self.finish_now(peer, sender)?;
        let wire = self.wire(peer);
        wire.pass();
        wire.announce();
        Some(self.received(peer, tag, length))
    }
}

/// What a look for a message found.
pub(super) enum Now {
    Over(Result<Received, Error>),
    Fetch(FetchNow),
}

/// A message that does not fit a cell.
#[expect(clippy::large_enum_variant, reason = "it lives for one call, and a box would cost more")]
enum Longer {
    /// It was taken: tag and length.
    Taken(u64, u64),
    Fetch(FetchNow),
}

/// A message to be copied without the lock.
pub(super) struct FetchNow {
    peer: usize,
    /// Of the connection: in its place may be another one by the time the message is copied.
    memory: Memory,
    /// The announcement.
    words: Words,
    view: View,
    plan: Plan,
    sender: Number,
    tag: u64,
    length: u64,
}

impl Entered<'_> {
    /// Copies a message without the lock and takes it. `None`: receive it the usual way. Nothing has
    /// happened then but that some bytes of the target may be there already.
    ///
    /// # Safety
    /// The pieces must be valid for writes of as many bytes as the message has.
    pub(super) unsafe fn fetch_now(
        &mut self,
        fetch: &FetchNow,
        pieces: &[Piece],
    ) -> Option<Received> {
        let mut copied = false;
        self.copy_unlocked(|| {
            // SAFETY: passed on.
            let outcome =
                unsafe { path::copy_at_once(&fetch.view, pieces, fetch.length, &fetch.plan) };
            copied = outcome.is_ok();
        });
        if copied { self.take_fetched(fetch) } else { None }
    }
}
