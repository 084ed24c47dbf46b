//! A message that both sides copy together: who has claimed which chunk of it.
//!
//! The receiver claims from the front, the sender from the back, until they meet; a side that is
//! busy elsewhere claims nothing. All claims are one word: the generation of the record, the
//! chunks claimed at the front, the chunks claimed at the back. The sender counts what it has
//! finished in a second word. A record belongs to the receiving side, which opens it for a message
//! and, by the next generation, closes it for whoever still holds its number.

use memferry_sys::fault::step;
use memferry_sys::sync::atomic::{AtomicU64, Ordering};

use super::cells::Nonsense;

/// The shared part of a record, two cache lines.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Record {
    claims: AtomicU64,
    padding: [u64; 7],
    finished: AtomicU64,
    padding_2: [u64; 7],
}

/// The most chunks of one message.
pub const MOST_CHUNKS: u64 = (1 << 24) - 1;

const FIELD: u64 = (1 << 24) - 1;

fn pack(generation: u16, front: u64, back: u64) -> u64 {
    u64::from(generation) << 48 | front << 24 | back
}

fn unpack(word: u64) -> (u16, u64, u64) {
    ((word >> 48) as u16, word >> 24 & FIELD, word & FIELD)
}

/// What the sender has done of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished {
    /// Chunks that it has finished.
    pub chunks: u64,
    /// The chunk that it claimed and could not copy, after which it claims no more.
    pub returned: Option<u64>,
}

impl Finished {
    /// What a sender tells that had finished so many chunks, and has copied one more or could not.
    pub fn after(done: u64, chunk: u64, is_copied: bool) -> Self {
        Self { chunks: done + u64::from(is_copied), returned: (!is_copied).then_some(chunk) }
    }

    /// Claimed chunks that the sender does not touch any more.
    pub fn given_up(&self) -> u64 {
        self.chunks + u64::from(self.returned.is_some())
    }
}

impl Record {
    /// Lets both sides claim the chunks of a message.
    pub fn open(&self, generation: u16) {
        self.finished.store(u64::from(generation) << 48, Ordering::Relaxed);
        step();
        // Release: a sender that finds the generation finds the empty count beside it.
        self.claims.store(pack(generation, 0, 0), Ordering::Release);
    }

    /// Takes the unclaimed chunks out of reach: the sender cannot claim any more. Returns how many
    /// the sender has claimed.
    pub fn close(&self, generation: u16, chunks: u64) -> Result<u64, Nonsense> {
        step();
        let word = self.claims.swap(pack(generation.wrapping_add(1), 0, 0), Ordering::AcqRel);
        Ok(check(word, generation, chunks)?.1)
    }

    /// Claims a chunk at the front, for the receiver.
    pub fn claim_front(&self, generation: u16, chunks: u64) -> Result<Option<u64>, Nonsense> {
        Ok(self.claim(generation, chunks, 1 << 24)?.map(|(front, _)| front))
    }

    /// Claims a chunk at the back, for the sender. `None` too when the message is over.
    pub fn claim_back(&self, generation: u16, chunks: u64) -> Result<Option<u64>, Nonsense> {
        let (found, ..) = unpack(self.claims.load(Ordering::Relaxed));
        if found != generation {
            return Ok(None);
        }
        match self.claim(generation, chunks, 1) {
            Ok(claim) => Ok(claim.map(|(_, back)| chunks - 1 - back)),
            // Closed between the look and the claim.
            Err(_) if unpack(self.claims.load(Ordering::Relaxed)).0 != generation => Ok(None),
            Err(nonsense) => Err(nonsense),
        }
    }

    /// Whether any chunk is unclaimed.
    pub fn has_unclaimed(&self, generation: u16, chunks: u64) -> bool {
        check(self.claims.load(Ordering::Relaxed), generation, chunks)
            .is_ok_and(|(front, back)| front + back < chunks)
    }

    fn claim(
        &self,
        generation: u16,
        chunks: u64,
        add: u64,
    ) -> Result<Option<(u64, u64)>, Nonsense> {
        step();
        // Acquire: the sender's claim comes after the receiver opened the record.
        let mut word = self.claims.load(Ordering::Acquire);
        // Every failed exchange means that the other side claimed, so there are at most `chunks`
        // of them, unless the other side writes nonsense for ever.
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
        Err(Nonsense("claims that never come to rest"))
    }

    /// How many chunks are claimed at the back, by the sender.
    pub fn claimed_back(&self, generation: u16, chunks: u64) -> Result<u64, Nonsense> {
        Ok(check(self.claims.load(Ordering::Acquire), generation, chunks)?.1)
    }

    /// The sender tells what it has done.
    pub fn tell(&self, generation: u16, finished: Finished) {
        step();
        let returned = finished.returned.map_or(0, |chunk| chunk + 1);
        // Release: whoever sees the count sees the data.
        let word = u64::from(generation) << 48 | returned << 24 | finished.chunks;
        self.finished.store(word, Ordering::Release);
    }

    /// What the sender has done.
    pub fn told(&self, generation: u16, chunks: u64) -> Result<Finished, Nonsense> {
        let (found, returned, finished) = unpack(self.finished.load(Ordering::Acquire));
        if found != generation || returned > chunks || finished > chunks {
            return Err(Nonsense("a count of finished chunks that cannot be"));
        }
        Ok(Finished { chunks: finished, returned: returned.checked_sub(1) })
    }
}

fn check(word: u64, generation: u16, chunks: u64) -> Result<(u64, u64), Nonsense> {
    let (found, front, back) = unpack(word);
    if found != generation || front + back > chunks {
        return Err(Nonsense("claims on chunks that do not exist"));
    }
    Ok((front, back))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn both_sides_together_claim_every_chunk_once() {
        let record = Record::default();
        record.open(7);
        let mut seen = [0; 10];
        for turn in 0.. {
            let claim = if turn % 3 == 0 {
                record.claim_back(7, 10).unwrap()
            } else {
                record.claim_front(7, 10).unwrap()
            };
            let Some(chunk) = claim else { break };
            seen[chunk as usize] += 1;
        }
        assert_eq!(seen, [1; 10]);
        assert!(!record.has_unclaimed(7, 10));
    }

    #[test]
    fn a_closed_record_gives_the_sender_nothing() {
        let record = Record::default();
        record.open(1);
        assert_eq!(record.claim_back(1, 4), Ok(Some(3)));
        assert_eq!(record.close(1, 4), Ok(1));
        assert_eq!(record.claim_back(1, 4), Ok(None));
    }

    #[test]
    fn nonsense_in_the_words_is_noticed() {
        let record = Record::default();
        record.open(1);
        record.claims.store(pack(1, 3, 3), Ordering::Relaxed);
        assert!(record.claim_front(1, 4).is_err());
        assert!(record.claim_back(1, 4).is_err());
        record.claims.store(pack(9, 0, 0), Ordering::Relaxed);
        assert!(record.claim_front(1, 4).is_err());
        record.finished.store(u64::MAX, Ordering::Relaxed);
        assert!(record.told(1, 4).is_err());
    }

    #[test]
    fn a_returned_chunk_is_told_with_the_count() {
        let record = Record::default();
        record.open(3);
        let finished = Finished { chunks: 2, returned: Some(0) };
        record.tell(3, finished);
        assert_eq!(record.told(3, 4), Ok(finished));
    }
}
