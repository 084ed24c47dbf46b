//! Which entries of a page are in use, and where their blocks are. A process without memory finds no
//! place, and goes on.

use super::kinds;
use super::layout::MAX_BLOCKS;

/// Blocks of two threads never share a line, nor the pair that processors fetch together.
const ALIGNMENT: usize = 128;
/// The least number of threads that open a block between two searches for those that have ended.
const MIN_OPENED_THREADS: usize = 16;

/// The entries of a page.
#[derive(Debug)]
pub(super) struct Slots {
    /// The entries that have ever been used.
    slots: Vec<Slot>,
    /// How many of them are free.
    free: usize,
    /// Where the next block can begin, and the end of the page.
    next_at: usize,
    end: usize,
    /// The blocks with the sums of those that are gone, by kind from 1.
    ended: [Option<usize>; kinds::ALL.len()],
    /// Threads with a block, and the number of them at which those that have ended are searched for.
    threads: usize,
    due_threads: usize,
}

/// An entry, with the place that it keeps when it is free.
#[derive(Debug, Clone, Copy)]
struct Slot {
    at: usize,
    bytes: usize,
    state: SlotState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SlotState {
    Free,
    /// Whoever opened the block frees it.
    Used,
    /// The block of a thread, which nobody frees when the thread ends.
    Thread,
}

impl Slots {
    /// All space from `start` to `end` is free.
    pub(super) fn new(start: usize, end: usize) -> Self {
        Self {
            slots: Vec::new(),
            free: 0,
            next_at: start,
            end,
            ended: [None; kinds::ALL.len()],
            threads: 0,
            due_threads: MIN_OPENED_THREADS,
        }
    }

    /// Takes an entry with space for `bytes`: a free one of this size, else a new one, else the smallest free one
    /// that is larger.
    pub(super) fn take(&mut self, bytes: usize) -> Option<usize> {
        let free = self.find_free(bytes);
        let number = match free {
            Some(number) if self.slots[number].bytes == bytes => number,
            _ => self.add(bytes).or(free)?,
        };
        self.slots[number].state = SlotState::Used;
        self.free -= 1;
        Some(number)
    }

    fn find_free(&self, bytes: usize) -> Option<usize> {
        if self.free == 0 {
            return None;
        }
        let is_free = |number: &usize| {
            let slot = &self.slots[*number];
            slot.state == SlotState::Free && slot.bytes >= bytes
        };
        (0..self.used()).filter(is_free).min_by_key(|number| self.slots[*number].bytes)
    }

    /// Adds a free entry behind the last one.
    fn add(&mut self, bytes: usize) -> Option<usize> {
        if self.used() == MAX_BLOCKS || bytes > self.end.saturating_sub(self.next_at) {
            return None;
        }
        self.slots.try_reserve(1).ok()?;
        self.slots.push(Slot { at: self.next_at, bytes, state: SlotState::Free });
        self.next_at = (self.next_at + bytes).next_multiple_of(ALIGNMENT);
        self.free += 1;
        Some(self.used() - 1)
    }

    /// Frees an entry.
    pub(super) fn free(&mut self, number: usize) {
        self.leave_thread(number);
        self.slots[number].state = SlotState::Free;
        self.free += 1;
    }

    /// Where the block of an entry begins.
    pub(super) fn at(&self, number: usize) -> usize {
        self.slots[number].at
    }

    /// The number of entries that have ever been used.
    pub(super) fn used(&self) -> usize {
        self.slots.len()
    }

    /// The entry with the sums of blocks of a kind that are gone.
    pub(super) fn ended(&self, kind: usize) -> Option<usize> {
        self.ended[kind - 1]
    }

    /// Makes an entry that is in use the one with the sums of its kind.
    pub(super) fn set_ended(&mut self, kind: usize, number: usize) {
        self.leave_thread(number);
        self.slots[number].state = SlotState::Used;
        self.ended[kind - 1] = Some(number);
    }

    /// Makes an entry the one of a thread.
    pub(super) fn set_thread(&mut self, number: usize) {
        self.slots[number].state = SlotState::Thread;
        self.threads += 1;
    }

    fn leave_thread(&mut self, number: usize) {
        self.threads -= usize::from(self.is_thread(number));
    }

    /// Whether an entry is that of a thread.
    pub(super) fn is_thread(&self, number: usize) -> bool {
        self.slots[number].state == SlotState::Thread
    }

    /// Whether so many threads have opened a block that those that have ended should be searched for. The search takes
    /// a system call for each thread, so at least as many open one between two searches as have one after the first.
    pub(super) fn are_threads_due(&self) -> bool {
        self.threads >= self.due_threads
    }

    /// Called after a search.
    pub(super) fn end_sweep(&mut self) {
        self.due_threads = self.threads + self.threads.max(MIN_OPENED_THREADS);
    }
}
