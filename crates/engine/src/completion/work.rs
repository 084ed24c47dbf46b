//! The work of a chunked transfer, with the claims on its chunks.
//!
//! Channels claim from the front, a waiting caller from the back, until no chunk is left: no thread
//! waits for a share that another has not started. The two counts of claims (front, back) are one
//! word, so a claim is one compare-and-swap. A second word for each chunk counts its missing bytes,
//! which makes the finished prefix and any finished range visible.

use memferry_sys::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::segments::{SegmentList, WorkSegment};
use crate::contract::{Kernel, MemoryKind, Opcode};
use crate::runtime::execute::{self, Operands};

/// Claims are deferred: no chunk may be claimed yet.
const DEFERRED: u64 = 1 << 63;

/// Marks a chunk that failed, or did not start because of a cancellation.
const LOST: u32 = u32::MAX;
/// Set in the word of a chunk of which a part has failed, or which is lost.
const FAILED_PART: u32 = 1 << 31;

/// A claimed range of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// The offset in the transfer, in bytes.
    pub offset: u64,
    /// The length in bytes.
    pub length: u64,
}

/// An operation over a range, cut into chunks of equal size (the last may be shorter).
#[derive(Debug)]
pub struct ChunkedWork {
    pub(crate) operation: Opcode,
    pub(crate) kernel: Kernel,
    pub(crate) source: u64,
    pub(crate) target: u64,
    pub(crate) length: u64,
    pub(crate) value: u8,
    /// The second target of a dualcast.
    second: u64,
    memory: (MemoryKind, MemoryKind),
    chunk_bytes: u64,
    /// The ranges of a work over many; source, target and value above are unused then.
    segments: Option<SegmentList>,
    /// Chunks claimed at the front (high half) and at the back (low half), and [`DEFERRED`].
    claims: AtomicU64,
    /// Number of chunks that have not ended.
    unfinished: AtomicU32,
    /// The missing bytes of each chunk, or [`LOST`].
    remaining: RemainingBytes,
}

/// A word for each chunk. Up to eight are stored inline, so that medium-sized copies, which are
/// frequent, need no allocation.
#[derive(Debug)]
enum RemainingBytes {
    Inline([AtomicU32; Self::INLINE_CHUNKS], usize),
    Heap(Box<[AtomicU32]>),
}

impl RemainingBytes {
    const INLINE_CHUNKS: usize = 8;

    fn new(count: usize, word: impl Fn(usize) -> u32) -> Self {
        if count <= Self::INLINE_CHUNKS {
            let word = |index| AtomicU32::new(if index < count { word(index) } else { 0 });
            Self::Inline(std::array::from_fn(word), count)
        } else {
            Self::Heap((0..count).map(|index| AtomicU32::new(word(index))).collect())
        }
    }
}

impl std::ops::Deref for RemainingBytes {
    type Target = [AtomicU32];

    fn deref(&self) -> &[AtomicU32] {
        match self {
            Self::Inline(words, count) => &words[..*count],
            Self::Heap(words) => words,
        }
    }
}

impl ChunkedWork {
    /// Cuts a range into chunks. Chunks grow if there would be more than 2^20 of them.
    ///
    /// # Safety
    /// As for [`Descriptor::new`](crate::Descriptor::new), until the completion of the work is
    /// done.
    ///
    /// # Panics
    /// If the length is 0 or the operation cannot be cut.
    pub unsafe fn new(
        operation: Opcode,
        kernel: Kernel,
        source: u64,
        target: u64,
        length: u64,
        value: u8,
        chunk_bytes: u64,
    ) -> Self {
        const MAX_CHUNKS: u64 = 1 << 20;
        const MAX_CHUNK_BYTES: u64 = 1 << 30;
        assert!(length > 0 && operation != Opcode::Move, "this cannot be cut into chunks");
        let chunk_bytes = chunk_bytes.max(length.div_ceil(MAX_CHUNKS)).clamp(1, MAX_CHUNK_BYTES);
        let count = length.div_ceil(chunk_bytes);
        let remaining = RemainingBytes::new(count as usize, |index| {
            (length - index as u64 * chunk_bytes).min(chunk_bytes) as u32
        });
        Self {
            operation,
            kernel: kernel.or_cached(),
            source,
            target,
            length,
            value,
            second: 0,
            memory: (MemoryKind::Host, MemoryKind::Host),
            chunk_bytes,
            segments: None,
            claims: AtomicU64::new(0),
            unfinished: AtomicU32::new(count as u32),
            remaining,
        }
    }

    /// Cuts the bytes of many segments into chunks, as if the segments were contiguous. Only
    /// processors execute such a work: a work offer for it is for a channel that executes
    /// descriptors by [`Descriptor::run`](crate::Descriptor::run).
    ///
    /// # Safety
    /// As for [`Descriptor::new`](crate::Descriptor::new) for every segment, until the completion of
    /// the work is done. No two segments may have a byte of a target in common, and no target a byte
    /// of another segment's source. A segment that is moved must not be cut: it must lie in one
    /// chunk.
    ///
    /// # Panics
    /// If the total length, `length`, is 0.
    pub unsafe fn of_segments(
        kernel: Kernel,
        segments: impl Iterator<Item = WorkSegment>,
        length: u64,
        chunk_bytes: u64,
    ) -> Self {
        // SAFETY: the addresses are placeholders that `execute` does not use.
        let work = unsafe { Self::new(Opcode::Copy, kernel, 0, 0, length, 0, chunk_bytes) };
        let segments = Some(SegmentList::new(segments, work.chunk_bytes));
        Self { segments, ..work }
    }

    /// Sets the kinds of memory of source and target; both are host memory by default. Only engines
    /// claim chunks of device memory.
    pub fn in_memory(mut self, source: MemoryKind, target: MemoryKind) -> Self {
        self.memory = (source, target);
        self
    }

    /// Sets the second target of a dualcast.
    ///
    /// # Safety
    /// As for the target in [`ChunkedWork::new`]. The second target must overlap neither source nor
    /// target.
    pub unsafe fn with_second_target(mut self, second: u64) -> Self {
        self.second = second;
        self
    }

    /// The second target of a dualcast.
    pub(crate) fn second_target(&self) -> u64 {
        self.second
    }

    /// The kinds of memory of source and target.
    pub fn memory_kinds(&self) -> (MemoryKind, MemoryKind) {
        self.memory
    }

    /// Whether a processor can execute the work.
    pub fn is_host_only(&self) -> bool {
        self.memory == (MemoryKind::Host, MemoryKind::Host)
    }

    /// The number of chunks.
    pub fn chunk_count(&self) -> u64 {
        self.remaining.len() as u64
    }

    /// The length of the transfer in bytes.
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

    /// Claims the chunks at the front that fit into `max_bytes`, at least one, and at most half of
    /// the unclaimed chunks, so that all claimants reach the end at about the same time. `None` for a
    /// work of segments, which only processors execute.
    pub fn claim_run(&self, max_bytes: u64) -> Option<Chunk> {
        if self.segments.is_some() {
            return None;
        }
        let mut claims = self.claims.load(Ordering::Acquire);
        loop {
            let (front, back) = (claims >> 32, claims & 0xFFFF_FFFF);
            if claims & DEFERRED != 0 || front + back >= self.chunk_count() {
                return None;
            }
            let left = self.chunk_count() - front - back;
            let count = (max_bytes / self.chunk_bytes).min(left.div_ceil(2)).max(1);
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

    /// The number of unclaimed bytes; approximate, because claims run concurrently.
    pub fn unclaimed_bytes(&self) -> u64 {
        let claims = self.claims.load(Ordering::Relaxed) & !DEFERRED;
        let claimed = (claims >> 32) + (claims & 0xFFFF_FFFF);
        self.chunk_count().saturating_sub(claimed) * self.chunk_bytes
    }

    /// The parts of a range, cut at the ends of chunks.
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

    /// Adds to the claims if a chunk is left; returns the previous claims.
    fn claim(&self, add: u64) -> Option<(u64, u64)> {
        // Acquire: a thread that claims deferred work sees the results of the transfers it was
        // deferred for.
        let mut claims = self.claims.load(Ordering::Acquire);
        loop {
            let (front, back) = (claims >> 32, claims & 0xFFFF_FFFF);
            if claims & DEFERRED != 0 || front + back >= self.chunk_count() {
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

    /// Prevents claims until [`ChunkedWork::allow_claims`].
    pub(crate) fn defer_claims(&self) {
        self.claims.fetch_or(DEFERRED, Ordering::Relaxed);
    }

    /// Allows claims again.
    pub(crate) fn allow_claims(&self) {
        self.claims.fetch_and(!DEFERRED, Ordering::Release);
    }

    /// Removes all unclaimed chunks, deferred or not. If there are any, `reason` is called before
    /// the first of them is marked as lost, so that the thread that ends the last chunk finds the
    /// reason recorded. Returns whether this ended the last unfinished chunk.
    pub(crate) fn drop_unclaimed(&self, reason: impl FnOnce()) -> bool {
        let count = self.chunk_count();
        let before = self.claims.swap(count << 32, Ordering::AcqRel) & !DEFERRED;
        let (front, back) = (before >> 32, before & 0xFFFF_FFFF);
        if front + back >= count {
            return false;
        }
        reason();
        (front..count - back)
            .map(|index| self.chunk(index))
            .fold(false, |_, chunk| self.finish(chunk.offset, chunk.length, false))
    }

    /// Executes a chunk on the calling processor; returns the value of [`execute::run`].
    ///
    /// # Safety
    /// The chunk must have been claimed by the caller, and the completion must not be done.
    pub(crate) unsafe fn execute(&self, chunk: Chunk) -> Option<u64> {
        if let Some(segments) = &self.segments {
            // SAFETY: the caller of `ChunkedWork::of_segments` guarantees every segment.
            unsafe { segments.execute(self.kernel, self.chunk_bytes, chunk) };
            return None;
        }
        let operands = Operands { source: self.source, target: self.target, second: self.second };
        // SAFETY: the chunk lies inside the ranges that the creator of the work guarantees.
        unsafe {
            execute::run(
                self.operation,
                self.kernel,
                operands.moved_by(chunk.offset),
                chunk.length,
                self.value,
            )
        }
    }

    /// Marks a range as ended: done or failed. It may begin and end inside of chunks. Returns `true`
    /// for the one call that ends the last chunk.
    pub(crate) fn finish(&self, offset: u64, length: u64, done: bool) -> bool {
        let (mut at, end) = (offset, offset + length);
        let mut ended = 0;
        while at < end {
            let part = self.chunk_end(at).min(end) - at;
            ended += u32::from(self.finish_inside(at, part, done));
            at += part;
        }
        // AcqRel: the thread that ends the last chunk has seen the data of all of them.
        ended > 0 && self.unfinished.fetch_sub(ended, Ordering::AcqRel) == ended
    }

    /// Marks a range inside one chunk as ended. Returns whether it was the last one of the chunk.
    fn finish_inside(&self, offset: u64, length: u64, done: bool) -> bool {
        let index = (offset / self.chunk_bytes) as usize;
        let remaining = &self.remaining[index];
        let whole = length == self.chunk(index as u64).length;
        if whole {
            // Release: a thread that sees the chunk as done sees its data.
            remaining.store(if done { 0 } else { LOST }, Ordering::Release);
            return true;
        }
        self.finish_part(remaining, length as u32, done)
    }

    /// Marks a part of a chunk as ended. Several descriptors may share a chunk: each subtracts its
    /// bytes, and a failed part sets the top bit, which no subtraction reaches.
    fn finish_part(&self, remaining: &AtomicU32, length: u32, done: bool) -> bool {
        if !done {
            remaining.fetch_or(FAILED_PART, Ordering::AcqRel);
        }
        let before = remaining.fetch_sub(length, Ordering::AcqRel);
        let left = before - length;
        if left & !FAILED_PART != 0 {
            return false;
        }
        if left != 0 {
            remaining.store(LOST, Ordering::Release);
        }
        true
    }

    fn is_chunk_done(&self, index: usize) -> bool {
        self.remaining[index].load(Ordering::Acquire) == 0
    }

    /// Number of bytes that are done from the start without a gap.
    pub fn ready_bytes(&self) -> u64 {
        let done = (0..self.remaining.len()).take_while(|&index| self.is_chunk_done(index)).count();
        (done as u64 * self.chunk_bytes).min(self.length)
    }

    /// Whether every byte of a range is done.
    pub fn is_range_done(&self, from: u64, to: u64) -> bool {
        let to = to.min(self.length);
        from >= to
            || (from / self.chunk_bytes..=(to - 1) / self.chunk_bytes)
                .all(|index| self.is_chunk_done(index as usize))
    }

    /// Number of bytes of all finished chunks.
    pub(crate) fn done_bytes(&self) -> u64 {
        (0..self.remaining.len())
            .filter(|&index| self.is_chunk_done(index))
            .map(|index| self.chunk(index as u64).length)
            .sum()
    }

    /// Number of bytes that have not ended; `None` if a part is lost and never ends.
    pub(crate) fn remaining_bytes(&self) -> Option<u64> {
        self.remaining.iter().try_fold(0, |sum, remaining| {
            let bytes = remaining.load(Ordering::Acquire);
            (bytes & FAILED_PART == 0).then_some(sum + u64::from(bytes))
        })
    }

    /// The end of the chunk that contains `offset`.
    pub fn chunk_end(&self, offset: u64) -> u64 {
        ((offset / self.chunk_bytes + 1) * self.chunk_bytes).min(self.length)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn work(length: u64, chunk_bytes: u64) -> ChunkedWork {
        // SAFETY: these tests only claim and mark chunks, and never execute them.
        unsafe { ChunkedWork::new(Opcode::Copy, Kernel::Cached, 0, 0, length, 0, chunk_bytes) }
    }

    #[test]
    fn front_and_back_meet_and_cover_everything_once() {
        let work = work(1000, 64);
        let mut seen = vec![0u8; 1000];
        let mut round = 0;
        while let Some(chunk) = if round % 3 == 0 { work.claim_back() } else { work.claim_front() }
        {
            round += 1;
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
    fn a_piece_may_cross_chunks_and_ends_its_bytes_in_each() {
        let work = work(300, 100);
        assert!(!work.finish(0, 150, true));
        assert_eq!((work.ready_bytes(), work.remaining_bytes()), (100, Some(150)));
        assert!(!work.finish(150, 20, true));
        assert!(work.finish(170, 130, true));
        assert_eq!((work.ready_bytes(), work.remaining_bytes()), (300, Some(0)));
        // One that fails leaves all chunks undone that it touches.
        let work = self::work(300, 100);
        assert!(!work.finish(50, 200, false));
        assert!(!work.finish(0, 50, true));
        assert!(work.finish(250, 50, true));
        assert_eq!((work.ready_bytes(), work.done_bytes(), work.remaining_bytes()), (0, 0, None));
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
        let deferred = work(400, 100);
        deferred.defer_claims();
        assert_eq!((deferred.claim_front(), deferred.claim_back()), (None, None));
        deferred.allow_claims();
        assert!(deferred.claim_front().is_some());
        let dropped = work(400, 100);
        dropped.defer_claims();
        assert!(dropped.drop_unclaimed(|| ()));
        dropped.allow_claims();
        assert_eq!(dropped.claim_front(), None);
    }

    #[test]
    fn enormous_work_is_cut_into_a_bounded_number_of_chunks() {
        assert!(work(1 << 45, 4096).chunk_count() <= 1 << 20);
    }
}
