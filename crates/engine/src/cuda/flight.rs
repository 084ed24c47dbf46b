//! What a channel has under way: descriptors that were taken and are not over, and the pieces of
//! them that are with the device.

use std::ops::Range;

use memferry_sys::cuda::Event;

use super::channel::{PIECE_BYTES, RING_SLOT_BYTES};
use crate::Descriptor;
use crate::completion::Chunk;
use crate::contract::{ExecutionError, Holding, Scope, Sequence};

/// A descriptor that was taken and is not over.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) descriptor: Descriptor,
    pub(super) sequence: Sequence,
    /// What is this channel's to do and was not begun.
    pub(super) window: Range<u64>,
    /// How much was begun.
    begun_bytes: u64,
    /// Nothing is left to begin, or to claim.
    pub(super) is_begun: bool,
    /// Pieces that were begun and are not over.
    pub(super) in_flight: usize,
    /// Bytes that are done, counted until the first failure.
    pub(super) done_bytes: u64,
    pub(super) failure: Option<ExecutionError>,
    pub(super) difference: Option<u64>,
    /// How much of each side is registered next.
    pub(super) growth: [u64; 2],
    /// The driver would not copy what is registered: leave registrations alone.
    pub(super) distrusts_registrations: bool,
}

impl Open {
    /// The first piece to be registered; each is twice as long as the one before.
    const FIRST_REGISTERED: u64 = 1 << 20;

    pub(super) fn new(descriptor: Descriptor, sequence: Sequence) -> Self {
        let is_invitation = descriptor.scope() == Scope::Chunks;
        let window = if is_invitation { 0..0 } else { 0..descriptor.length() };
        Self {
            is_begun: !is_invitation && descriptor.length() == 0,
            descriptor,
            sequence,
            window,
            begun_bytes: 0,
            in_flight: 0,
            done_bytes: 0,
            failure: None,
            difference: None,
            growth: [Self::FIRST_REGISTERED; 2],
            distrusts_registrations: false,
        }
    }

    /// Sees to it that there is something to begin, if anything is left: claims at most `most` bytes
    /// of an invitation. `false`: nothing is left.
    pub(super) fn has_more(&mut self, most: u64) -> bool {
        if self.window.is_empty()
            && self.descriptor.scope() == Scope::Chunks
            && let Some(chunk) = self.descriptor.claim(most)
        {
            self.window = chunk.offset..chunk.offset + chunk.length;
        }
        self.is_begun = self.window.is_empty();
        !self.is_begun
    }

    /// How long the next piece is at most: pieces are many enough to keep both directions busy, and
    /// large enough that handing them over costs little. The first are short, so that the second half
    /// of the way is busy soon.
    pub(super) fn next_piece_bytes(&self) -> u64 {
        const SMALLEST: u64 = 512 << 10;
        const PIECES: u64 = 8;
        const FIRST: u64 = 8;
        const SHARED_PIECES: u64 = 32;
        const LARGEST_SHARED: u64 = 8 << 20;
        const SMALLEST_STAGED: u64 = 256 << 10;
        const STAGED_PIECES: u64 = 32;
        /// About twice as many as channels work on it.
        const LAST_PIECES: u64 = 16;
        if self.descriptor.is_shared() {
            let pieces = self.descriptor.length() / SHARED_PIECES;
            return pieces.clamp(SMALLEST, LARGEST_SHARED);
        }
        if self.descriptor.is_passing() {
            // Several channels share it, and shall be done at the same time: pieces become short
            // towards the end. They begin short, since the device waits for the first copy of a channel
            // into its ring.
            let usual = self.descriptor.length() / STAGED_PIECES;
            let usual = usual.clamp(SMALLEST_STAGED, RING_SLOT_BYTES);
            let left = self.descriptor.unclaimed_bytes() + (self.window.end - self.window.start);
            let fair = (left / LAST_PIECES).max(SMALLEST_STAGED);
            return self.begun_bytes.clamp(SMALLEST_STAGED, usual).min(fair);
        }
        let usual = self.descriptor.length().div_ceil(PIECES).next_multiple_of(64 << 10);
        let usual = usual.clamp(SMALLEST, PIECE_BYTES);
        (usual / FIRST).max(SMALLEST).max(self.begun_bytes).min(usual)
    }

    /// Whether it has enough under way: what others could do is not claimed long before its turn.
    pub(super) fn is_busy(&self) -> bool {
        const ENOUGH: usize = 5;
        self.descriptor.is_shared() && self.in_flight >= ENOUGH
    }

    /// Takes a piece from the front of what was not begun.
    pub(super) fn begin(&mut self, length: u64) -> Chunk {
        let piece = Chunk { offset: self.window.start, length };
        self.window.start += length;
        self.begun_bytes += length;
        self.in_flight += 1;
        if self.window.is_empty() && self.descriptor.scope() != Scope::Chunks {
            self.is_begun = true;
        }
        piece
    }

    /// Takes note of the end of a piece.
    /// For a compare, the result is where in the piece the first difference is.
    pub(super) fn end(&mut self, piece: Chunk, result: Result<Option<u64>, ExecutionError>) {
        self.in_flight -= 1;
        // SAFETY: the piece was claimed for this descriptor and ends once, when the device is through
        // with it.
        unsafe { self.descriptor.finish_claimed(piece, result.clone()) };
        match result {
            Ok(difference) => {
                self.difference = self.difference.or(difference.map(|at| piece.offset + at));
                self.done_bytes += if self.failure.is_none() { piece.length } else { 0 };
            }
            Err(error) => {
                self.failure.get_or_insert(error);
            }
        }
    }

    /// Whether everything is over.
    pub(super) fn is_over(&self) -> bool {
        self.is_begun && self.in_flight == 0
    }

    /// How it ended, with the bytes that are done.
    pub(super) fn outcome(&self) -> Result<Option<u64>, ExecutionError> {
        match self.failure.clone() {
            None => Ok(self.difference),
            Some(ExecutionError::Engine { reason, .. }) => {
                Err(ExecutionError::Engine { done_bytes: self.done_bytes, reason })
            }
            Some(ExecutionError::BadMemory { address, .. }) => {
                Err(ExecutionError::BadMemory { address, done_bytes: self.done_bytes })
            }
            Some(other) => Err(other),
        }
    }
}

/// A piece that is with the device, or waits for its turn to be reported.
#[derive(Debug)]
pub(super) struct Flight {
    /// The number of its descriptor.
    pub(super) sequence: Sequence,
    pub(super) piece: Chunk,
    pub(super) step: Step,
    /// When the device should be through with it.
    pub(super) expected_ns: u64,
    /// What keeps its memory registered.
    pub(super) holdings: [Option<Holding>; 2],
}

impl Flight {
    /// Whether the channel itself copies it into or out of the ring.
    pub(super) fn is_staged(&self) -> bool {
        matches!(self.step, Step::StagedIn { .. } | Step::StagedOut { .. })
    }
}

/// How a piece is carried out.
#[derive(Debug)]
pub(super) enum Step {
    /// By a copy, straight from or to memory that is registered, or the device's.
    Direct { end: Event },
    /// Through a slot of the device.
    Through { slot: u64, middle: Event, end: Event },
    /// From the ring, where this channel has put it.
    StagedIn { slot: u64, end: Event },
    /// Into the ring, from where this channel copies it when it is there.
    StagedOut { slot: u64, end: Event },
    /// It is over.
    Over(Result<Option<u64>, ExecutionError>),
}
