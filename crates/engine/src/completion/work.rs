//! The work of a transfer cut into chunks, and who has claimed which of them.
//!
//! Channels claim from the front, a waiting caller from the back, until they meet: nobody waits
//! for a share that another has not begun. Claims are one word (chunks claimed at the front, chunks
//! claimed at the back), so a claim is one compare-and-swap. Beside it stands, for each chunk, the
//! number of bytes still missing, which makes the finished prefix and any finished range visible.

use memferry_sys::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::contract::{Kernel, MemoryKind, Operation};
use crate::execute;

/// The work is held back: nothing may be claimed yet.
const HELD: u64 = 1 << 63;

/// Marks a chunk that was begun and failed, or was never begun because of a cancellation.
const LOST: u32 = u32::MAX;
/// Set in the word of a chunk of which a piece has failed, or all of it is lost.
const FAILED_PIECE: u32 = 1 << 31;

/// A claimed piece of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Where it begins in the transfer.
    pub offset: u64,
    /// How long it is.
    pub length: u64,
}

/// An operation over a range, cut into chunks of equal size (the last may be shorter).
#[derive(Debug)]
pub struct Work {
    pub(crate) operation: Operation,
    pub(crate) kernel: Kernel,
    pub(crate) source: u64,
    pub(crate) target: u64,
    pub(crate) length: u64,
    pub(crate) value: u8,
    memory: (MemoryKind, MemoryKind),
    chunk_bytes: u64,
    /// Chunks claimed at the front (high half) and at the back (low half), and [`HELD`].
    claims: AtomicU64,
    /// Chunks that have not ended yet.
    unfinished: AtomicU32,
    /// Bytes missing from each chunk, or [`LOST`].
    missing: Missing,
}

/// A word for each chunk. A few are kept in place, so that middle-sized copies, of which there are
/// many, need no allocation for them.
#[derive(Debug)]
enum Missing {
    Few([AtomicU32; Self::FEW], usize),
    Many(Box<[AtomicU32]>),
}

impl Missing {
    const FEW: usize = 8;

    fn new(count: usize, word: impl Fn(usize) -> u32) -> Self {
        if count <= Self::FEW {
            let word = |index| AtomicU32::new(if index < count { word(index) } else { 0 });
            Self::Few(std::array::from_fn(word), count)
        } else {
            Self::Many((0..count).map(|index| AtomicU32::new(word(index))).collect())
        }
    }
}

impl std::ops::Deref for Missing {
    type Target = [AtomicU32];

    fn deref(&self) -> &[AtomicU32] {
        match self {
            Self::Few(words, count) => &words[..*count],
            Self::Many(words) => words,
        }
    }
}

impl Work {
    /// Cuts a range into chunks. Chunks grow where there would be more than a million of them.
    ///
    /// # Safety
    /// As for [`Descriptor::new`](crate::Descriptor::new), until the completion that the work
    /// belongs to is done.
    ///
    /// # Panics
    /// When the length is 0 or the operation is one that cannot be cut.
    pub unsafe fn new(
        operation: Operation,
        kernel: Kernel,
        source: u64,
        target: u64,
        length: u64,
        value: u8,
        chunk_bytes: u64,
    ) -> Self {
        const MOST_CHUNKS: u64 = 1 << 20;
        const LONGEST_CHUNK: u64 = 1 << 30;
        assert!(length > 0 && operation != Operation::Move, "this cannot be cut into chunks");
        let chunk_bytes = chunk_bytes.max(length.div_ceil(MOST_CHUNKS)).clamp(1, LONGEST_CHUNK);
        let count = length.div_ceil(chunk_bytes);
        let missing = Missing::new(count as usize, |index| {
            (length - index as u64 * chunk_bytes).min(chunk_bytes) as u32
        });
        Self {
            operation,
            kernel: kernel.or_cached(),
            source,
            target,
            length,
            value,
            memory: (MemoryKind::Host, MemoryKind::Host),
            chunk_bytes,
            claims: AtomicU64::new(0),
            unfinished: AtomicU32::new(count as u32),
            missing,
        }
    }

    /// Says where source and target are; ordinary memory unless said otherwise. What is not is
    /// for engines alone: no processor claims it.
    pub fn in_memory(mut self, source: MemoryKind, target: MemoryKind) -> Self {
        self.memory = (source, target);
        self
    }

    /// Where source and target are.
    pub fn memory_kinds(&self) -> (MemoryKind, MemoryKind) {
        self.memory
    }

    /// Whether a processor can carry it out.
    pub fn is_host_only(&self) -> bool {
        self.memory == (MemoryKind::Host, MemoryKind::Host)
    }

    /// How many chunks there are.
    pub fn chunk_count(&self) -> u64 {
        self.missing.len() as u64
    }

    /// The whole length.
    pub fn length(&self) -> u64 {
        self.length
    }

    fn chunk(&self, index: u64) -> Chunk {
        let offset = index * self.chunk_bytes;
        Chunk { offset, length: (self.length - offset).min(self.chunk_bytes) }
    }

    /// Claims the next chunk at the front.
    pub fn claim_front(&self) -> Option<Chunk> {
        let (front, _) = self.claim(1 << 32)?;
        Some(self.chunk(front))
    }

    /// Claims as many chunks at the front as fit into `most` bytes, at least one, and leaves as
    /// many for others where there are others: never more than half of what is left, so that all
    /// who share the work come to its end at about the same time.
    pub fn claim_run(&self, most: u64) -> Option<Chunk> {
        let mut claims = self.claims.load(Ordering::Acquire);
        loop {
            let (front, back) = (claims >> 32, claims & 0xFFFF_FFFF);
            if claims & HELD != 0 || front + back >= self.chunk_count() {
                return None;
            }
            let left = self.chunk_count() - front - back;
            let count = (most / self.chunk_bytes).min(left.div_ceil(2)).max(1);
            match self.claims.compare_exchange_weak(
                claims,
                claims + (count << 32),
                Ordering::Acquire,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    let offset = front * self.chunk_bytes;
                    let length = (self.length - offset).min(count * self.chunk_bytes);
                    return Some(Chunk { offset, length });
                }
                Err(now) => claims = now,
            }
        }
    }

    /// How many bytes nobody has claimed, about: others may be claiming them.
    pub fn unclaimed_bytes(&self) -> u64 {
        let claims = self.claims.load(Ordering::Relaxed) & !HELD;
        let claimed = (claims >> 32) + (claims & 0xFFFF_FFFF);
        self.chunk_count().saturating_sub(claimed) * self.chunk_bytes
    }

    /// A range, cut where chunks end.
    pub(crate) fn chunks_of(&self, range: Chunk) -> impl Iterator<Item = Chunk> {
        let (mut offset, end) = (range.offset, range.offset + range.length);
        std::iter::from_fn(move || {
            let length = self.chunk_end(offset).min(end).checked_sub(offset).filter(|&n| n > 0)?;
            let chunk = Chunk { offset, length };
            offset += length;
            Some(chunk)
        })
    }

    /// Claims the next chunk at the back.
    pub fn claim_back(&self) -> Option<Chunk> {
        let (_, back) = self.claim(1)?;
        Some(self.chunk(self.chunk_count() - 1 - back))
    }

    /// Adds to the claims if there is a chunk left; returns the claims before.
    fn claim(&self, add: u64) -> Option<(u64, u64)> {
        // Acquire: whoever claims work that was held back sees what it was held back for.
        let mut claims = self.claims.load(Ordering::Acquire);
        loop {
            let (front, back) = (claims >> 32, claims & 0xFFFF_FFFF);
            if claims & HELD != 0 || front + back >= self.chunk_count() {
                return None;
            }
            match self.claims.compare_exchange_weak(
                claims,
                claims + add,
                Ordering::Acquire,
                Ordering::Acquire,
            ) {
                Ok(_) => return Some((front, back)),
                Err(now) => claims = now,
            }
        }
    }

    /// Lets nobody claim anything until [`Work::release`].
    pub(crate) fn hold(&self) {
        self.claims.fetch_or(HELD, Ordering::Relaxed);
    }

    /// Lets everybody claim.
    pub(crate) fn release(&self) {
        self.claims.fetch_and(!HELD, Ordering::Release);
    }

    /// Takes all unclaimed chunks out of the work, held back or not. If there are any, `reason`
    /// is called before the first of them is marked as lost, so that whoever ends the last chunk
    /// finds the reason recorded. Returns whether with them the last unfinished one is gone.
    pub(crate) fn drop_unclaimed(&self, reason: impl FnOnce()) -> bool {
        let count = self.chunk_count();
        let before = self.claims.swap(count << 32, Ordering::AcqRel) & !HELD;
        let (front, back) = (before >> 32, before & 0xFFFF_FFFF);
        if front + back >= count {
            return false;
        }
        reason();
        (front..count - back)
            .map(|index| self.chunk(index))
            .fold(false, |_, chunk| self.finish(chunk.offset, chunk.length, false))
    }

    /// Carries out a chunk on the calling processor.
    ///
    /// # Safety
    /// The chunk must have been claimed by the caller, and the completion must not be done.
    pub(crate) unsafe fn execute(&self, chunk: Chunk) -> Option<u64> {
        // SAFETY: the chunk lies inside the range that `Work::new` was promised.
        unsafe {
            execute::run(
                self.operation,
                self.kernel,
                self.source.wrapping_add(chunk.offset),
                self.target.wrapping_add(chunk.offset),
                chunk.length,
                self.value,
            )
        }
    }

    /// Marks a range inside one chunk as ended, well or not. Returns `true` for the one call that
    /// ends the last chunk.
    pub(crate) fn finish(&self, offset: u64, length: u64, done: bool) -> bool {
        let index = (offset / self.chunk_bytes) as usize;
        debug_assert_eq!(index as u64, (offset + length - 1) / self.chunk_bytes);
        let missing = &self.missing[index];
        let whole = length == self.chunk(index as u64).length;
        if whole {
            // Release: whoever sees the chunk as done sees its data.
            missing.store(if done { 0 } else { LOST }, Ordering::Release);
            return self.chunk_ended();
        }
        self.finish_piece(missing, length as u32, done)
    }

    /// Several descriptors may share a chunk: bytes count down, and a failed piece leaves a mark
    /// in the top bit that no countdown reaches.
    fn finish_piece(&self, missing: &AtomicU32, length: u32, done: bool) -> bool {
        if !done {
            missing.fetch_or(FAILED_PIECE, Ordering::AcqRel);
        }
        let before = missing.fetch_sub(length, Ordering::AcqRel);
        let left = before - length;
        if left & !FAILED_PIECE != 0 {
            return false;
        }
        if left != 0 {
            missing.store(LOST, Ordering::Release);
        }
        self.chunk_ended()
    }

    fn chunk_ended(&self) -> bool {
        // AcqRel: the thread that ends the last chunk has seen the data of all of them.
        self.unfinished.fetch_sub(1, Ordering::AcqRel) == 1
    }

    fn is_chunk_done(&self, index: usize) -> bool {
        self.missing[index].load(Ordering::Acquire) == 0
    }

    /// Bytes done from the start without a gap.
    pub fn ready_bytes(&self) -> u64 {
        let done = (0..self.missing.len()).take_while(|&index| self.is_chunk_done(index)).count();
        (done as u64 * self.chunk_bytes).min(self.length)
    }

    /// Whether every byte of a range is done.
    pub fn is_range_done(&self, from: u64, to: u64) -> bool {
        let to = to.min(self.length);
        from >= to
            || (from / self.chunk_bytes..=(to - 1) / self.chunk_bytes)
                .all(|index| self.is_chunk_done(index as usize))
    }

    /// Bytes of all finished chunks.
    pub(crate) fn done_bytes(&self) -> u64 {
        (0..self.missing.len())
            .filter(|&index| self.is_chunk_done(index))
            .map(|index| self.chunk(index as u64).length)
            .sum()
    }

    /// Bytes that have not ended yet; `None` if some of them never will, because they are lost.
    pub(crate) fn missing_bytes(&self) -> Option<u64> {
        self.missing.iter().try_fold(0, |sum, missing| {
            let bytes = missing.load(Ordering::Acquire);
            (bytes & FAILED_PIECE == 0).then_some(sum + u64::from(bytes))
        })
    }

    /// The boundary of the chunk in which `offset` lies: fixed parts must not cross it.
    pub fn chunk_end(&self, offset: u64) -> u64 {
        ((offset / self.chunk_bytes + 1) * self.chunk_bytes).min(self.length)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn work(length: u64, chunk_bytes: u64) -> Work {
        // SAFETY: these tests claim and mark, and never execute.
        unsafe { Work::new(Operation::Copy, Kernel::Cached, 0, 0, length, 0, chunk_bytes) }
    }

    #[test]
    fn front_and_back_meet_and_cover_everything_once() {
        let work = work(1000, 64);
        let mut seen = vec![0u8; 1000];
        let mut turn = 0;
        while let Some(chunk) = if turn % 3 == 0 { work.claim_back() } else { work.claim_front() } {
            turn += 1;
            for byte in &mut seen[chunk.offset as usize..(chunk.offset + chunk.length) as usize] {
                *byte += 1;
            }
        }
        assert!(seen.iter().all(|&count| count == 1));
        assert_eq!((work.claim_back(), work.claim_front()), (None, None));
    }

    #[test]
    fn the_prefix_grows_only_without_gaps() {
        let work = work(300, 100);
        assert!(!work.finish(100, 100, true));
        assert_eq!(work.ready_bytes(), 0);
        assert!(work.is_range_done(100, 200) && !work.is_range_done(99, 200));
        assert!(!work.finish(0, 100, true));
        assert_eq!(work.ready_bytes(), 200);
        assert!(work.finish(200, 100, true));
        assert_eq!(work.ready_bytes(), 300);
    }

    #[test]
    fn pieces_of_a_chunk_add_up() {
        let work = work(150, 100);
        assert!(!work.finish(30, 70, true));
        assert!(!work.finish(100, 50, true));
        assert!(work.finish(0, 30, true));
        assert_eq!(work.done_bytes(), 150);
    }

    #[test]
    fn a_failed_piece_leaves_its_chunk_undone_for_good() {
        let work = work(200, 100);
        assert!(!work.finish(0, 40, false));
        assert!(!work.finish(40, 60, true));
        assert!(work.finish(100, 100, true));
        assert_eq!((work.ready_bytes(), work.done_bytes()), (0, 100));
    }

    #[test]
    fn dropping_the_unclaimed_ends_the_work_only_if_nothing_is_in_flight() {
        let idle = work(400, 100);
        assert!(idle.drop_unclaimed(|| ()));
        let busy = work(400, 100);
        let claimed = busy.claim_front().unwrap();
        assert!(!busy.drop_unclaimed(|| ()));
        busy.drop_unclaimed(|| panic!("nothing is left to drop"));
        assert!(busy.finish(claimed.offset, claimed.length, true));
        assert_eq!(busy.ready_bytes(), 100);
    }

    #[test]
    fn work_that_is_held_back_cannot_be_claimed_but_can_be_dropped() {
        let held = work(400, 100);
        held.hold();
        assert_eq!((held.claim_front(), held.claim_back()), (None, None));
        held.release();
        assert!(held.claim_front().is_some());
        let dropped = work(400, 100);
        dropped.hold();
        assert!(dropped.drop_unclaimed(|| ()));
        dropped.release();
        assert_eq!(dropped.claim_front(), None);
    }

    #[test]
    fn enormous_work_is_cut_into_a_bounded_number_of_chunks() {
        assert!(work(1 << 45, 4096).chunk_count() <= 1 << 20);
    }
}
