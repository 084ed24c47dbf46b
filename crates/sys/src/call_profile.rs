//! The file in which preloaded programs count their calls of `memcpy` and its relatives: its layout,
//! and how it is read. `memferry run --profile` creates it; every process of the program maps it.
//!
//! A thread counts into a block of its own with plain stores. What is sampled is rare, and goes into
//! tables that all threads share, with atomic additions.
//!
//! A tiny call is one subtraction: from the number of calls of its size that are left until the next
//! sample. What a sample puts there is added to the count of the size class at the same time, so that
//! the calls that were made are the count less what is left.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU32, AtomicU64, Ordering};

use crate::shared_memory::{Mapping, Protection, SealedMemory};

/// The counted functions. `mempcpy` and `bcopy` count as the function that they call.
pub const OPERATIONS: [&str; 4] = ["memcpy", "memmove", "memset", "memcmp"];
/// Size classes: class `n` has calls of 2ⁿ to 2ⁿ⁺¹−1 bytes. Class 0 has those of 0 bytes too.
pub const CLASSES: usize = 64;
/// Calls of fewer bytes are tiny: each of these sizes has a number of its own. A power of two, so that it
/// is the end of a class.
pub const TINY_SIZES: usize = 256;
/// Blocks of threads. Block 0 is for threads that found no other, which may overwrite each other's
/// counts.
pub const BLOCKS: usize = 1024;
/// Places in the table of callers. Callers beyond it are not listed.
pub const CALLERS: usize = 8192;
/// Places in the table of modules.
pub const MODULES: usize = 256;
/// The longest path of a module.
pub const PATH_BYTES: usize = 480;

/// The variable with the path of the file.
pub const VARIABLE: &str = "MEMFERRY_CALL_PROFILE";

/// The size class of a length.
pub fn class_of(bytes: usize) -> usize {
    (bytes | 1).ilog2() as usize
}

/// Calls and bytes of one function in one size class.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Count {
    /// The calls.
    pub calls: AtomicU64,
    /// Their bytes.
    pub bytes: AtomicU64,
}

impl Count {
    const fn new() -> Self {
        Self { calls: AtomicU64::new(0), bytes: AtomicU64::new(0) }
    }
}

/// The counters of one thread. Only the thread writes them.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Block {
    /// Tiny calls that are left until the next sample, by function and size. They are in the counts already. The
    /// call that makes it negative is sampled.
    pub tiny_left: [[AtomicI32; TINY_SIZES]; OPERATIONS.len()],
    /// The counts, by function and class.
    pub counts: [[Count; CLASSES]; OPERATIONS.len()],
    /// Weight of other calls until the next sample. The call that makes it negative is sampled.
    pub countdown: AtomicI64,
    /// The state of the random numbers; 0 if the block was never used.
    pub random: AtomicU64,
    /// The process of the thread; 0 if the block is free.
    pub owner: AtomicU64,
}

impl Block {
    /// A block that was never used.
    pub const fn new() -> Self {
        Self {
            tiny_left: [const { [const { AtomicI32::new(0) }; TINY_SIZES] }; OPERATIONS.len()],
            counts: [const { [const { Count::new() }; CLASSES] }; OPERATIONS.len()],
            countdown: AtomicI64::new(0),
            random: AtomicU64::new(0),
            owner: AtomicU64::new(0),
        }
    }

    /// Calls and bytes of a function in a class. A thread that is taking a sample may be between two stores: then
    /// they are not exact.
    fn total(&self, operation: usize, class: usize) -> (u64, u64) {
        let count = &self.counts[operation][class];
        let (calls, bytes) =
            (count.calls.load(Ordering::Relaxed), count.bytes.load(Ordering::Relaxed));
        let sizes = if class == 0 { 0..2 } else { 1 << class..2 << class };
        if sizes.end > TINY_SIZES {
            return (calls, bytes);
        }
        let made = sizes.fold((calls as i64, bytes as i64), |(calls, bytes), size| {
            let left = i64::from(self.tiny_left[operation][size].load(Ordering::Relaxed));
            (calls.wrapping_sub(left), bytes.wrapping_sub(left * size as i64))
        });
        (made.0.max(0) as u64, made.1.max(0) as u64)
    }
}

impl Default for Block {
    fn default() -> Self {
        Self::new()
    }
}

/// Sampled times of one function in one size class.
#[derive(Debug)]
#[repr(C)]
pub struct SampledTime {
    /// Sampled calls.
    pub calls: AtomicU64,
    /// Their bytes.
    pub bytes: AtomicU64,
    /// Ticks of the time-stamp counter that they took.
    pub ticks: AtomicU64,
}

/// One place that calls.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Caller {
    /// The place: 0 if unused. See [`Caller::key`].
    pub key: AtomicU64,
    /// The number of samples.
    pub samples: AtomicU64,
    /// The estimated number of calls.
    pub calls: AtomicU64,
    /// The estimated number of bytes.
    pub bytes: AtomicU64,
    /// The estimated ticks.
    pub ticks: AtomicU64,
}

impl Caller {
    /// The key of a place: the module's number plus one, the function, and the offset in the module.
    pub fn key(module: usize, operation: usize, offset: usize) -> u64 {
        let offset = offset as u64 & ((1 << 48) - 1);
        ((module as u64 + 1) << 50) | ((operation as u64) << 48) | offset
    }

    /// The module, the function and the offset of a key.
    pub fn parts(key: u64) -> (usize, usize, u64) {
        let module = (key >> 50) as usize;
        (module.wrapping_sub(1), (key >> 48) as usize & 3, key & ((1 << 48) - 1))
    }
}

/// A module: the program or a shared library.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Module {
    /// 0: unused, 1: being written, 2: valid.
    pub state: AtomicU32,
    /// A checksum of the path, by which writers compare.
    pub hash: AtomicU32,
    /// The path, which ends with a zero.
    pub path: [std::sync::atomic::AtomicU8; PATH_BYTES],
}

/// The whole file.
#[derive(Debug)]
#[repr(C)]
pub struct CallProfile {
    /// The version of the layout.
    pub version: AtomicU64,
    /// Processes that have mapped the file.
    pub processes: AtomicU64,
    /// Ticks that reading the time-stamp counter twice takes.
    pub timer_ticks: AtomicU64,
    /// Blocks that were ever used are among the first ones, as many as this.
    pub used_blocks: AtomicU64,
    /// Times of sampled calls.
    pub times: [[SampledTime; CLASSES]; OPERATIONS.len()],
    /// The callers, by a hash of their keys.
    pub callers: [Caller; CALLERS],
    /// The modules of the callers.
    pub modules: [Module; MODULES],
    /// The counters of the threads.
    pub blocks: [Block; BLOCKS],
}

/// The version of this layout.
pub const VERSION: u64 = 2;

/// The file, as its creator has it.
#[derive(Debug)]
pub struct CallProfileFile {
    memory: SealedMemory,
    mapping: Mapping,
}

impl CallProfileFile {
    /// Creates the file. It has no name; processes open it by the descriptor of this process.
    pub fn create() -> io::Result<Self> {
        let memory = SealedMemory::new("memferry-call-profile", size_of::<CallProfile>())?;
        let mapping = memory.map(Protection::ReadWrite)?;
        let file = Self { memory, mapping };
        file.contents().version.store(VERSION, Ordering::Release);
        Ok(file)
    }

    /// What has been counted so far.
    pub fn contents(&self) -> &CallProfile {
        // SAFETY: the mapping is as long as the structure and page-aligned. All fields are atomics,
        // for which every bit pattern is valid, so that other processes may write at any time.
        unsafe { &*self.mapping.as_ptr().cast::<CallProfile>() }
    }
}

impl AsFd for CallProfileFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

impl CallProfile {
    /// Calls and bytes of a function in a class, by all threads.
    pub fn total(&self, operation: usize, class: usize) -> (u64, u64) {
        // The pages of other blocks are never touched: a load would allocate them.
        let used = (self.used_blocks.load(Ordering::Acquire) as usize).min(BLOCKS);
        self.blocks[..used].iter().fold((0, 0), |(calls, bytes), block| {
            let more = block.total(operation, class);
            (calls + more.0, bytes + more.1)
        })
    }

    /// The path of a module.
    pub fn module_path(&self, module: usize) -> Option<String> {
        let module = self.modules.get(module)?;
        if module.state.load(Ordering::Acquire) != 2 {
            return None;
        }
        let bytes: Vec<u8> = module.path.iter().map(|byte| byte.load(Ordering::Relaxed)).collect();
        let path = CStr::from_bytes_until_nul(&bytes).ok()?;
        Some(path.to_string_lossy().into_owned())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_key_names_module_function_and_offset() {
        let key = Caller::key(255, 3, 0x1234_5678_9ABC);
        assert_eq!(Caller::parts(key), (255, 3, 0x1234_5678_9ABC));
        assert_ne!(Caller::key(0, 0, 0), 0);
    }

    #[test]
    fn classes_are_powers_of_two() {
        let classes = [0, 1, 2, 3, 4, 4095, 4096, usize::MAX].map(class_of);
        assert_eq!(classes, [0, 0, 1, 1, 2, 11, 12, 63]);
    }

    #[test]
    fn counts_of_all_threads_are_added_up() {
        let file = CallProfileFile::create().unwrap();
        let contents = file.contents();
        contents.used_blocks.store(BLOCKS as u64, Ordering::Relaxed);
        for block in [0, 7, BLOCKS - 1] {
            contents.blocks[block].counts[2][9].calls.store(2, Ordering::Relaxed);
            contents.blocks[block].counts[2][9].bytes.store(1080, Ordering::Relaxed);
        }
        assert_eq!(contents.total(2, 9), (6, 3240));
        assert_eq!(contents.total(2, 8), (0, 0));
        assert_eq!(contents.module_path(0), None);
        contents.used_blocks.store(8, Ordering::Relaxed);
        assert_eq!(contents.total(2, 9), (4, 2160));
    }

    #[test]
    fn tiny_calls_are_what_was_counted_ahead_without_what_is_left() {
        let block = Block::new();
        // 100 calls of 5 bytes and 50 of 7 were counted ahead.
        block.counts[1][2].calls.store(150, Ordering::Relaxed);
        block.counts[1][2].bytes.store(850, Ordering::Relaxed);
        block.tiny_left[1][5].store(90, Ordering::Relaxed);
        block.tiny_left[1][7].store(50, Ordering::Relaxed);
        assert_eq!(block.total(1, 2), (10, 50));
        // A call of the next sample that is not counted ahead yet.
        block.tiny_left[1][6].store(-1, Ordering::Relaxed);
        assert_eq!(block.total(1, 2), (11, 56));
        // Never less than nothing, whatever another process writes.
        block.tiny_left[1][7].store(i32::MAX, Ordering::Relaxed);
        assert_eq!(block.total(1, 2), (0, 0));
        // The first class has calls of no byte and of one.
        block.tiny_left[0][0].store(-3, Ordering::Relaxed);
        block.tiny_left[0][1].store(-4, Ordering::Relaxed);
        assert_eq!(block.total(0, 0), (7, 4));
    }
}
