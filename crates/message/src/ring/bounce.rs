//! The bounce ring: payload memory that is allocated in order and freed in order, with the cells
//! that refer to it.

use std::collections::VecDeque;

use super::cells::ProtocolError;

/// A range of the bounce ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BounceSpan {
    /// Offset of the first byte in the bounce ring.
    pub offset: u32,
    /// Length in bytes.
    pub length: u32,
}

impl BounceSpan {
    /// Checks a span that the peer sent: it must lie inside a bounce ring of `capacity` bytes.
    pub fn checked(offset: u64, length: u64, capacity: usize) -> Result<Self, ProtocolError> {
        match offset.checked_add(length) {
            Some(end) if end <= capacity as u64 => {
                Ok(Self { offset: offset as u32, length: length as u32 })
            }
            _ => Err(ProtocolError("payload outside the bounce ring")),
        }
    }
}

/// The producer's allocator of the bounce ring. Only the producer knows which bytes are in use.
#[derive(Debug)]
pub struct BounceRing {
    capacity: u64,
    /// Bytes allocated since the start, including those skipped at the end of the ring.
    head: u64,
    /// Bytes freed since the start.
    tail: u64,
    /// The position of each cell with a payload, and the head after that payload.
    in_use: VecDeque<(u64, u64)>,
    /// The head at which the producer checks again whether all bytes are free.
    reclaim_from: u64,
    /// Bytes after which the producer starts again at the front.
    reuse_after: u64,
    /// The bytes after which it does so grow only when the consumer is behind.
    keeps_small: bool,
}

/// The producer starts again at offset 0 after this many bytes if all of them are free: those lines
/// are in the cache, and with few messages in flight the rest of the ring is never touched.
const REUSE_FRONT_BYTES: u64 = 64 << 10;
/// The same in a ring that has carried little: one page. It doubles with each time.
const FIRST_REUSE_BYTES: u64 = 4 << 10;

/// Alignment of spans: one cache line.
const ALIGNMENT: u64 = 64;

impl BounceRing {
    /// Creates an allocator with no byte in use.
    pub fn new(capacity: usize) -> Self {
        assert!((capacity as u64).is_multiple_of(ALIGNMENT));
        Self {
            capacity: capacity as u64,
            head: 0,
            tail: 0,
            in_use: VecDeque::new(),
            reclaim_from: FIRST_REUSE_BYTES,
            reuse_after: FIRST_REUSE_BYTES,
            keeps_small: false,
        }
    }

    /// Touches more of the ring only if messages in flight need it: the ring is one of many.
    pub fn keep_small(&mut self) {
        self.keeps_small = true;
    }

    /// The maximum length of a span: a quarter of the ring. A consumer that has read everything has
    /// at most a quarter of the ring unpublished, so a span of this length always fits.
    pub fn max_span(&self) -> usize {
        (self.capacity / 4) as usize
    }

    /// The offset at which the next span most likely begins.
    #[inline]
    pub fn next_offset(&self) -> u32 {
        (self.head % self.capacity) as u32
    }

    /// Frees the spans of all cells before position `consumed`.
    pub fn reclaim(&mut self, consumed: u64) {
        while let Some(&(position, end)) = self.in_use.front() {
            if position >= consumed {
                break;
            }
            self.tail = end;
            self.in_use.pop_front();
        }
        if self.should_reclaim() && !(self.keeps_small && self.in_use.is_empty()) {
            self.reuse_after = (2 * self.reuse_after).min(REUSE_FRONT_BYTES);
        }
        if self.in_use.is_empty() {
            (self.head, self.tail, self.reclaim_from) = (0, 0, self.reuse_after);
        } else {
            self.reclaim_from = self.head + self.reuse_after / 2;
        }
    }

    /// Returns whether the producer should read the consumer's position, even if there is space
    /// without it.
    #[inline]
    pub fn should_reclaim(&self) -> bool {
        self.head >= self.reclaim_from
    }

    /// Allocates a span for the payload of the cell at `position`, if one is free.
    ///
    /// # Panics
    /// When `length` is more than [`BounceRing::max_span`].
    pub fn allocate(&mut self, position: u64, length: usize) -> Option<BounceSpan> {
        assert!(length <= self.max_span());
        let size = (length as u64).next_multiple_of(ALIGNMENT);
        let offset = self.head % self.capacity;
        let skip = if offset + size > self.capacity { self.capacity - offset } else { 0 };
        if self.head + skip + size - self.tail > self.capacity {
            return None;
        }
        self.head += skip;
        let offset = (self.head % self.capacity) as u32;
        self.head += size;
        self.in_use.push_back((position, self.head));
        Some(BounceSpan { offset, length: length as u32 })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn spans_in_use_never_overlap_and_stay_inside() {
        let mut ring = BounceRing::new(1024);
        let mut live: VecDeque<(u64, BounceSpan)> = VecDeque::new();
        let mut seed = 1u64;
        for position in 0..5000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let length = (seed >> 33) as usize % 257;
            let span = loop {
                if let Some(span) = ring.allocate(position, length) {
                    break span;
                }
                let (oldest, _) =
                    live.pop_front().expect("a span of a quarter fits once all are freed");
                ring.reclaim(oldest + 1);
            };
            assert!(span.offset + span.length <= 1024);
            for (_, other) in &live {
                let apart = span.offset + span.length <= other.offset
                    || other.offset + other.length <= span.offset;
                assert!(apart || span.length == 0 || other.length == 0);
            }
            live.push_back((position, span));
        }
    }

    #[test]
    fn the_front_is_used_again_once_everything_came_back() {
        let mut ring = BounceRing::new(512 << 10);
        let mut reached = 0;
        for position in 0..10_000 {
            if ring.should_reclaim() {
                ring.reclaim(position);
            }
            reached = reached.max(ring.allocate(position, 1000).unwrap().offset);
        }
        assert_eq!(reached, REUSE_FRONT_BYTES as u32 - 1024);
    }

    #[test]
    fn one_ring_of_many_touches_one_page_unless_its_consumer_is_behind() {
        for behind in [0, 2, 20] {
            let mut ring = BounceRing::new(512 << 10);
            ring.keep_small();
            let mut reached = 0;
            for position in 0..10_000u64 {
                if ring.should_reclaim() {
                    ring.reclaim(position.saturating_sub(behind));
                }
                reached = reached.max(ring.allocate(position, 1000).unwrap().offset);
            }
            assert_eq!(reached < FIRST_REUSE_BYTES as u32, behind == 0, "{behind} behind");
        }
    }

    #[test]
    fn a_span_outside_the_space_is_refused() {
        assert!(BounceSpan::checked(1000, 24, 1024).is_ok());
        assert!(BounceSpan::checked(1000, 25, 1024).is_err());
        assert!(BounceSpan::checked(u64::MAX, 2, 1024).is_err());
    }
}
