//! What each thread has of its own in a lookup: cells for the lines that it uses, and its hits.
//!
//! A thread whose number is within the blocks is the only one that takes cells of its shard and
//! counts there, so loads and stores are enough. Any thread may clear a cell: a cell is empty if it
//! contains 0. Further threads, and threads that hold more translations than there are cells, use
//! lines by the counts of the tables, which need the lock.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_sys::fence::AsymmetricFence;

use super::config::DataPath;
use super::counters::ByDataPath;
use super::hazard::{Drains, HazardCell};
use super::thread_number::thread_number;

/// Shards after the first ones are allocated in blocks, when a thread with such a number comes.
const BLOCK_READERS: usize = 64;
const BLOCKS: usize = 16;

/// Number of lines that a thread uses without the lock at the same time: those of one step of an
/// access to a window, and some more.
const CELLS: usize = 22;

/// The shards of all threads.
#[derive(Debug)]
pub(crate) struct Readers {
    pub(crate) fence: AsymmetricFence,
    pub(crate) drains: Drains,
    /// The shards of the first threads.
    first: Box<[ReaderShard; BLOCK_READERS]>,
    /// Those of later ones. The first element is empty.
    blocks: [OnceLock<Box<[ReaderShard]>>; BLOCKS],
    /// Hits of threads without a shard.
    other_hits: [AtomicU64; 2],
}

#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct ReaderShard {
    hits: [AtomicU64; 2],
    cells: [HazardCell; CELLS],
}

impl ReaderShard {
    /// An empty cell. Only for the thread of the shard.
    #[inline(always)]
    pub(crate) fn empty_cell(&self) -> Option<&HazardCell> {
        if self.cells[0].is_empty() { Some(&self.cells[0]) } else { self.later_empty_cell() }
    }

    #[inline(never)]
    fn later_empty_cell(&self) -> Option<&HazardCell> {
        self.cells[1..].iter().find(|cell| cell.is_empty())
    }

    /// Counts a hit. Only for the thread of the shard.
    #[inline(always)]
    pub(crate) fn count(&self, route: DataPath) {
        let hits = &self.hits[route as usize];
        hits.store(hits.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}

impl Readers {
    pub(crate) fn new() -> Self {
        Self {
            fence: AsymmetricFence::new(),
            drains: Drains::new(),
            first: Box::new(std::array::from_fn(|_| ReaderShard::default())),
            blocks: std::array::from_fn(|_| OnceLock::new()),
            other_hits: Default::default(),
        }
    }

    /// The shard of the calling thread; `None` if there are too many threads.
    #[inline(always)]
    pub(crate) fn own(&self) -> Option<&ReaderShard> {
        let number = thread_number();
        match self.first.get(number) {
            Some(shard) => Some(shard),
            None => self.later(number),
        }
    }

    #[cold]
    fn later(&self, number: usize) -> Option<&ReaderShard> {
        let block = self.blocks.get(number / BLOCK_READERS)?;
        let shards =
            block.get_or_init(|| (0..BLOCK_READERS).map(|_| ReaderShard::default()).collect());
        Some(&shards[number % BLOCK_READERS])
    }

    /// Counts a hit of the calling thread.
    pub(crate) fn count_hit(&self, route: DataPath) {
        match self.own() {
            Some(shard) => shard.count(route),
            None => _ = self.other_hits[route as usize].fetch_add(1, Ordering::Relaxed),
        }
    }

    pub(crate) fn hits(&self) -> ByDataPath<u64> {
        let sum = |route: DataPath| {
            let own = self.shards().map(|shard| shard.hits[route as usize].load(Ordering::Relaxed));
            own.sum::<u64>() + self.other_hits[route as usize].load(Ordering::Relaxed)
        };
        ByDataPath { send: sum(DataPath::Send), receive: sum(DataPath::Receive) }
    }

    /// The lines in all cells, sorted. After a [`Drains::begin`] of the caller: all uses of lines
    /// that were out of the cache before it.
    pub(crate) fn lines_in_use(&self) -> Vec<u64> {
        let cells = self.shards().flat_map(|shard| shard.cells.iter());
        let mut lines: Vec<u64> = cells.map(HazardCell::get).filter(|&line| line != 0).collect();
        lines.sort_unstable();
        lines
    }

    fn shards(&self) -> impl Iterator<Item = &ReaderShard> {
        let later = self.blocks.iter().filter_map(OnceLock::get).flat_map(|shards| shards.iter());
        self.first.iter().chain(later)
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.shards().map(size_of_val).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_several_blocks_count_exactly() {
        const THREADS: usize = BLOCK_READERS + 20;
        const EACH: u64 = 1000;
        let readers = Readers::new();
        let barrier = std::sync::Barrier::new(THREADS);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    readers.count_hit(DataPath::Receive);
                    // All threads exist at the same time, so that there are several blocks.
                    barrier.wait();
                    (0..EACH).for_each(|_| readers.count_hit(DataPath::Send));
                });
            }
        });
        let threads = THREADS as u64;
        assert_eq!(readers.hits(), ByDataPath { send: threads * EACH, receive: threads });
        assert!(readers.memory_bytes() >= 2 * BLOCK_READERS * size_of::<ReaderShard>());
    }

    #[test]
    fn a_cell_is_taken_until_any_thread_clears_it() {
        let readers = Readers::new();
        let shard = readers.own().unwrap();
        let cells: Vec<_> = (1..=CELLS as u64)
            .map(|line| {
                let cell = shard.empty_cell().unwrap();
                cell.publish(line, readers.fence);
                cell
            })
            .collect();
        assert!(shard.empty_cell().is_none());
        assert_eq!(readers.lines_in_use(), (1..=CELLS as u64).collect::<Vec<_>>());
        std::thread::scope(|scope| {
            scope.spawn(|| cells[7].clear(readers.fence));
        });
        assert!(std::ptr::eq(shard.empty_cell().unwrap(), cells[7]));
        assert!(!readers.lines_in_use().contains(&8));
    }
}
