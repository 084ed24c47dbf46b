//! The space for payloads: given out in order, given back in order with the cells that name them.

use std::collections::VecDeque;

use super::cells::Nonsense;

/// A piece of the space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Where it begins in the space.
    pub offset: u32,
    /// How many bytes it has.
    pub length: u32,
}

impl Span {
    /// A span that the other side named, if it lies inside a space of `capacity` bytes.
    pub fn checked(offset: u64, length: u64, capacity: usize) -> Result<Self, Nonsense> {
        match offset.checked_add(length) {
            Some(end) if end <= capacity as u64 => {
                Ok(Self { offset: offset as u32, length: length as u32 })
            }
            _ => Err(Nonsense("a payload outside the shared space")),
        }
    }
}

/// The producer's account of its space. Only the producer knows which bytes are in use.
#[derive(Debug)]
pub struct Space {
    capacity: u64,
    /// Bytes given out since the beginning, with those skipped at the end of the space.
    head: u64,
    /// Bytes that came back.
    tail: u64,
    /// For each cell with a payload: the cell's position and the head after it.
    in_use: VecDeque<(u64, u64)>,
    /// The head from which on it is worth a look whether everything came back.
    look_from: u64,
}

/// So much of the space is used before the front is used again, if everything came back by then:
/// those lines are warm, and where few messages are on their way the rest is never touched.
const WARM: u64 = 64 << 10;

/// Spans begin on a cache line.
const ALIGNMENT: u64 = 64;

impl Space {
    /// A space with nothing in use.
    pub fn new(capacity: usize) -> Self {
        assert!((capacity as u64).is_multiple_of(ALIGNMENT));
        Self {
            capacity: capacity as u64,
            head: 0,
            tail: 0,
            in_use: VecDeque::new(),
            look_from: WARM,
        }
    }

    /// The longest span: with less than a quarter of the space unreturned by a consumer that has
    /// read everything, one of this length always fits.
    pub fn longest(&self) -> usize {
        (self.capacity / 4) as usize
    }

    /// Where the next span will most likely begin.
    #[inline]
    pub fn next_offset(&self) -> u32 {
        (self.head % self.capacity) as u32
    }

    /// Takes back what belongs to cells before position `consumed`.
    pub fn take_back(&mut self, consumed: u64) {
        while let Some(&(position, end)) = self.in_use.front() {
            if position >= consumed {
                break;
            }
            self.tail = end;
            self.in_use.pop_front();
        }
        if self.in_use.is_empty() {
            (self.head, self.tail, self.look_from) = (0, 0, WARM);
        } else {
            self.look_from = self.head + WARM / 2;
        }
    }

    /// Whether it is worth a look what came back, although there may be room without it.
    #[inline]
    pub fn is_far_from_front(&self) -> bool {
        self.head >= self.look_from
    }

    /// Gives out a span for the payload of the cell at `position`, if one is free.
    ///
    /// # Panics
    /// When asked for more than [`Space::longest`].
    pub fn give_out(&mut self, position: u64, length: usize) -> Option<Span> {
        assert!(length <= self.longest());
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
        Some(Span { offset, length: length as u32 })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn spans_in_use_never_overlap_and_stay_inside() {
        let mut space = Space::new(1024);
        let mut live: VecDeque<(u64, Span)> = VecDeque::new();
        let mut seed = 1u64;
        for position in 0..5000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let length = (seed >> 33) as usize % 257;
            let span = loop {
                if let Some(span) = space.give_out(position, length) {
                    break span;
                }
                let (oldest, _) = live.pop_front().expect("a quarter always fits in the end");
                space.take_back(oldest + 1);
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
        let mut space = Space::new(512 << 10);
        let mut reached = 0;
        for position in 0..10_000 {
            if space.is_far_from_front() {
                space.take_back(position);
            }
            reached = reached.max(space.give_out(position, 1000).unwrap().offset);
        }
        assert_eq!(reached, WARM as u32 - 1024);
    }

    #[test]
    fn a_span_outside_the_space_is_refused() {
        assert!(Span::checked(1000, 24, 1024).is_ok());
        assert!(Span::checked(1000, 25, 1024).is_err());
        assert!(Span::checked(u64::MAX, 2, 1024).is_err());
    }
}
