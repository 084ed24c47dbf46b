//! Counters of this process in memory that `memferry top` reads.
//!
//! A process has one page of counters for each copy of this library in it: a sealed memfd with the name
//! [`PAGE_NAME`], which other processes of the same user find and open through `/proc/PID/fd`. It has no
//! name in the file system, and it is gone with the process. `MEMFERRY_STATS=off` leaves it out: the
//! counters then lie in ordinary memory.
//!
//! The page consists of blocks ([`Block`]), one for each thread, channel, endpoint, peer and cache. A block has
//! a single writer, a thread or whoever holds a lock, so an addition is a load and a store without a locked
//! instruction. Blocks describe themselves ([`layout`]): an older reader shows what it knows of a newer page.

mod block;
pub mod kinds;
pub mod layout;
mod page;
pub mod reader;
mod slots;
mod thread;

pub use block::Block;
pub use layout::{Counter, Counters};
pub use thread::thread;

pub(crate) use page::after_fork;

/// The name of the memfd.
pub const PAGE_NAME: &str = "memferry-stats";

/// The variable that switches the page off.
pub const VARIABLE: &str = "MEMFERRY_STATS";

/// The number of size classes and of classes of a latency histogram.
pub const CLASSES: usize = 32;

/// The class of a size in bytes, or of a time in nanoseconds: class `n` has the values from 2 to the power of `n` on,
/// below the next power. 0 is in the first class, and what is too large is in the last one.
#[inline(always)]
pub fn class_of(value: u64) -> usize {
    ((value | 1).ilog2() as usize).min(CLASSES - 1)
}

/// Of how many events one is timed, where timing needs the clock.
pub const TIMED_INTERVAL: u64 = 64;

#[cfg(all(test, not(loom)))]
mod tests;
