//! Claims on the chunks of a message that both sides copy.
//!
//! The receiver claims chunks from the front, the sender from the back, until all are claimed; a
//! side that is busy claims none. One word holds all claims: the generation of the slot, the number
//! of chunks claimed at the front, the number claimed at the back. The sender publishes what it has
//! finished in a second word. A slot belongs to the receiving side. The receiver opens it for a
//! message, and closes it by moving to the next generation: then a sender that still has the old
//! generation can claim nothing.

use memferry_sys::fault::step;
use memferry_sys::sync::atomic::{AtomicU64, Ordering};

use super::cells::ProtocolError;

/// The shared words of a claim slot, in two cache lines.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct ChunkClaims {
    claims: AtomicU64,
    padding: [u64; 7],
    finished: AtomicU64,
    padding_2: [u64; 7],
}

/// The maximum number of chunks of one message.
pub const MAX_CHUNKS: u64 = (1 << 24) - 1;

const FIELD_MASK: u64 = (1 << 24) - 1;

fn pack(generation: u16, front: u64, back: u64) -> u64 {
    u64::from(generation) << 48 | front << 24 | back
}

fn unpack(word: u64) -> (u16, u64, u64) {
    ((word >> 48) as u16, word >> 24 & FIELD_MASK, word & FIELD_MASK)
}

/// The sender's progress on a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SenderProgress {
    /// Chunks that the sender has finished.
    pub chunks: u64,
    /// The chunk that the sender claimed and could not copy. After it, the sender claims no more.
    pub returned: Option<u64>,
}

impl SenderProgress {
    /// The progress of a sender that had finished `done` chunks and has tried one more.
    pub fn after(done: u64, chunk: u64, is_copied: bool) -> Self {
        Self { chunks: done + u64::from(is_copied), returned: (!is_copied).then_some(chunk) }
    }

    /// The number of claimed chunks that the sender no longer accesses.
    pub fn released(&self) -> u64 {
        self.chunks + u64::from(self.returned.is_some())
    }
}

impl ChunkClaims {
    /// Lets both sides claim the chunks of a message.
    pub fn open(&self, generation: u16) {
        self.finished.store(u64::from(generation) << 48, Ordering::Relaxed);
        step();
        // Release: a sender that reads the generation also reads the zeroed count.
        self.claims.store(pack(generation, 0, 0), Ordering::Release);
    }

    /// Closes the slot, so that the sender can claim no more chunks. Returns the number of chunks
    /// that the sender has claimed.
    pub fn close(&self, generation: u16, chunks: u64) -> Result<u64, ProtocolError> {
        step();
        let word = self.claims.swap(pack(generation.wrapping_add(1), 0, 0), Ordering::AcqRel);
        Ok(check(word, generation, chunks)?.1)
    }

    /// Claims a chunk at the front, for the receiver.
    pub fn claim_front(&self, generation: u16, chunks: u64) -> Result<Option<u64>, ProtocolError> {
        Ok(self.claim(generation, chunks, 1 << 24)?.map(|(front, _)| front))
    }

    /// Claims a chunk at the back, for the sender. Returns `None` if no chunk is left or the slot
    /// is closed.
    pub fn claim_back(&self, generation: u16, chunks: u64) -> Result<Option<u64>, ProtocolError> {
        let (found, ..) = unpack(self.claims.load(Ordering::Relaxed));
        if found != generation {
            return Ok(None);
        }
        match self.claim(generation, chunks, 1) {
            Ok(claim) => Ok(claim.map(|(_, back)| chunks - 1 - back)),
            // The receiver closed the slot between the load and the claim.
            Err(_) if unpack(self.claims.load(Ordering::Relaxed)).0 != generation => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns whether any chunk is unclaimed.
    pub fn has_unclaimed(&self, generation: u16, chunks: u64) -> bool {
        check(self.claims.load(Ordering::Relaxed), generation, chunks)
            .is_ok_and(|(front, back)| front + back < chunks)
    }

    fn claim(
        &self,
        generation: u16,
        chunks: u64,
        add: u64,
    ) -> Result<Option<(u64, u64)>, ProtocolError> {
        step();
        // Acquire: the sender's claim comes after the receiver has opened the slot.
        let mut word = self.claims.load(Ordering::Acquire);
        // A failed exchange means that the peer claimed a chunk, so a correct peer causes at most
        // `chunks` of them.
        for _ in 0..=chunks {
            let (front, back) = check(word, generation, chunks)?;
            if front + back == chunks {
                return Ok(None);
            }
            let next = word + add;
            match self.claims.compare_exchange(word, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Ok(Some((front, back))),
                Err(now) => word = now,
            }
        }
        Err(ProtocolError("claims never settle"))
    }

    /// The number of chunks that the sender has claimed.
    pub fn claimed_back(&self, generation: u16, chunks: u64) -> Result<u64, ProtocolError> {
        Ok(check(self.claims.load(Ordering::Acquire), generation, chunks)?.1)
    }

    /// Publishes the sender's progress.
    pub fn publish(&self, generation: u16, finished: SenderProgress) {
        step();
        let returned = finished.returned.map_or(0, |chunk| chunk + 1);
        // Release: a receiver that reads the count also reads the data of the chunks.
        let word = u64::from(generation) << 48 | returned << 24 | finished.chunks;
        self.finished.store(word, Ordering::Release);
    }

    /// Loads the sender's progress.
    pub fn load(&self, generation: u16, chunks: u64) -> Result<SenderProgress, ProtocolError> {
        let (found, returned, finished) = unpack(self.finished.load(Ordering::Acquire));
        if found != generation || returned > chunks || finished > chunks {
            return Err(ProtocolError("impossible count of finished chunks"));
        }
        Ok(SenderProgress { chunks: finished, returned: returned.checked_sub(1) })
    }
}

fn check(word: u64, generation: u16, chunks: u64) -> Result<(u64, u64), ProtocolError> {
    let (found, front, back) = unpack(word);
    if found != generation || front + back > chunks {
        return Err(ProtocolError("claims on chunks that do not exist"));
    }
    Ok((front, back))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn both_sides_together_claim_every_chunk_once() {
        let claims = ChunkClaims::default();
        claims.open(7);
        let mut seen = [0; 10];
        for round in 0.. {
            let claim = if round % 3 == 0 {
                claims.claim_back(7, 10).unwrap()
            } else {
                claims.claim_front(7, 10).unwrap()
            };
            let Some(chunk) = claim else { break };
            seen[chunk as usize] += 1;
        }
        assert_eq!(seen, [1; 10]);
        assert!(!claims.has_unclaimed(7, 10));
    }

    #[test]
    fn a_closed_record_gives_the_sender_nothing() {
        let claims = ChunkClaims::default();
        claims.open(1);
        assert_eq!(claims.claim_back(1, 4), Ok(Some(3)));
        assert_eq!(claims.close(1, 4), Ok(1));
        assert_eq!(claims.claim_back(1, 4), Ok(None));
    }

    #[test]
    fn nonsense_in_the_words_is_noticed() {
        let slot = ChunkClaims::default();
        slot.open(1);
        slot.claims.store(pack(1, 3, 3), Ordering::Relaxed);
        assert!(slot.claim_front(1, 4).is_err());
        assert!(slot.claim_back(1, 4).is_err());
        slot.claims.store(pack(9, 0, 0), Ordering::Relaxed);
        assert!(slot.claim_front(1, 4).is_err());
        slot.finished.store(u64::MAX, Ordering::Relaxed);
        assert!(slot.load(1, 4).is_err());
    }

    #[test]
    fn a_returned_chunk_is_told_with_the_count() {
        let claims = ChunkClaims::default();
        claims.open(3);
        let finished = SenderProgress { chunks: 2, returned: Some(0) };
        claims.publish(3, finished);
        assert_eq!(claims.load(3, 4), Ok(finished));
    }
}
