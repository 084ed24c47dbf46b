//! Reads ranges of a file: from the page cache what is there, and past it what is not.
//!
//! The kernel tells for each block whether the page cache has it (`mincore` of a mapping that is
//! never touched). A read that only asks for what is cached (`RWF_NOWAIT`) would tell too, but it
//! starts a readahead of what is missing, and the storage would be read twice. Blocks that are
//! missing are read past the cache (`O_DIRECT`) or through it, whichever was faster for the first
//! of them.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use memferry_sys::pages::{MappedFile, page_bytes};
use memferry_sys::residency;
use rustix::fs::{Advice, OFlags};

use crate::error::LoadError;

/// What a read past the page cache must be aligned to: offset, length and address.
pub(crate) const DIRECT_ALIGNMENT: usize = 4096;

/// How files are read.
///
/// ```
/// use memferry::Ferry;
/// use memferry::load::{Loader, ReadMode};
///
/// let loader = Loader::builder().read_mode(ReadMode::Cached).build(Ferry::new()?)?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ReadMode {
    /// From the page cache what is there; what is not, past it (`O_DIRECT`) or through it,
    /// whichever is faster.
    #[default]
    Auto,
    /// Through the page cache, which then has the file for the next load.
    Cached,
    /// Past the page cache, where the file system can do that.
    Direct,
}

/// An open file to load from.
///
/// ```
/// use memferry::load::FileSource;
///
/// let file = FileSource::open("Cargo.toml")?;
/// assert!(file.len() > 0);
/// # Ok::<_, memferry::load::LoadError>(())
/// ```
#[derive(Debug)]
pub struct FileSource {
    path: PathBuf,
    cached: File,
    /// The same file opened for reads past the page cache, where that is possible.
    direct: Option<File>,
    length: u64,
    /// Never touched: it only names the file's pages to the kernel.
    mapping: Option<MappedFile>,
    /// The file system refused a read past the page cache after all.
    cannot_bypass: AtomicBool,
}

/// How many bytes were read which way, and how fast. Threads add to it.
#[derive(Debug, Default)]
pub(crate) struct ReadCounters {
    /// Found in the page cache.
    pub(crate) cached: AtomicU64,
    /// Read past the page cache.
    pub(crate) direct: ReadSpeed,
    /// Read through the page cache, which did not have them.
    pub(crate) buffered: ReadSpeed,
}

/// The reads of one way.
#[derive(Debug, Default)]
pub(crate) struct ReadSpeed {
    pub(crate) bytes: AtomicU64,
    blocks: AtomicU64,
    nanoseconds: AtomicU64,
}

impl ReadSpeed {
    fn add(&self, bytes: usize, started: Instant) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.blocks.fetch_add(1, Ordering::Relaxed);
        let nanoseconds = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    fn nanoseconds_per_byte(&self) -> f64 {
        let (time, bytes) = (&self.nanoseconds, &self.bytes);
        time.load(Ordering::Relaxed) as f64 / bytes.load(Ordering::Relaxed).max(1) as f64
    }
}

impl ReadCounters {
    /// Whether the next missing block is read past the cache. Both ways are tried on the first
    /// blocks, by turns; then the faster one is used.
    fn prefers_direct(&self) -> bool {
        const TRIALS: u64 = 8;
        let [direct, buffered] =
            [&self.direct, &self.buffered].map(|way| way.blocks.load(Ordering::Relaxed));
        if direct.min(buffered) < TRIALS {
            return direct <= buffered;
        }
        self.direct.nanoseconds_per_byte() <= self.buffered.nanoseconds_per_byte()
    }
}

impl FileSource {
    /// Opens a file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        let path = path.as_ref().to_owned();
        let failed = |source| LoadError::Open { path: path.clone(), source };
        // What is no regular file may wait for a writer when it is opened. Regular files ignore the flag.
        let flags = OFlags::NONBLOCK.bits() as i32;
        let cached =
            OpenOptions::new().read(true).custom_flags(flags).open(&path).map_err(failed)?;
        let metadata = cached.metadata().map_err(failed)?;
        if !metadata.is_file() {
            let reason = "it is not a regular file: copy what it has into one";
            let source = io::Error::new(io::ErrorKind::InvalidInput, reason);
            return Err(failed(source));
        }
        // The same file, also if another has its name by now.
        let same = format!("/proc/self/fd/{}", cached.as_raw_fd());
        let direct_flag = OFlags::DIRECT.bits() as i32;
        let direct = OpenOptions::new().read(true).custom_flags(direct_flag).open(same).ok();
        // SAFETY: no byte of the mapping is ever read or written: it may change or shrink.
        let mapping = unsafe { MappedFile::map(&cached) }.ok();
        Ok(Self {
            path,
            cached,
            direct,
            length: metadata.len(),
            mapping,
            cannot_bypass: AtomicBool::new(false),
        })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The length of the file when it was opened.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Whether the file was empty when it was opened.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Reads exactly `buffer.len()` bytes through the page cache.
    pub(crate) fn read_exact(&self, offset: u64, buffer: &mut [u8]) -> Result<(), LoadError> {
        let mut done = 0;
        while done < buffer.len() {
            let position = offset + done as u64;
            match self.cached.read_at(&mut buffer[done..], position) {
                Ok(0) => return Err(self.truncated(position, offset + buffer.len() as u64)),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(position, error)),
            }
        }
        Ok(())
    }

    /// Reads a range straight into its target, through the page cache.
    pub(crate) fn read_into(
        &self,
        offset: u64,
        target: &mut [u8],
        counters: &ReadCounters,
    ) -> Result<(), LoadError> {
        if self.is_cached(offset, target.len()) {
            counters.cached.fetch_add(target.len() as u64, Ordering::Relaxed);
            return self.read_exact(offset, target);
        }
        let started = Instant::now();
        // One request to the storage for all of it, not one for each step of the readahead.
        let length = std::num::NonZeroU64::new(target.len() as u64);
        let _ = rustix::fs::fadvise(&self.cached, offset, length, Advice::WillNeed);
        self.read_exact(offset, target)?;
        counters.buffered.add(target.len(), started);
        Ok(())
    }

    /// Reads the bytes `wanted` of the block at `block_offset` into the same places of `buffer`,
    /// which is the whole block. Bytes around the wanted ones may be read too.
    pub(crate) fn read_block(
        &self,
        block_offset: u64,
        wanted: std::ops::Range<usize>,
        buffer: &mut [u8],
        mode: ReadMode,
        counters: &ReadCounters,
    ) -> Result<(), LoadError> {
        let offset = block_offset + wanted.start as u64;
        let is_direct = match mode {
            ReadMode::Cached => false,
            ReadMode::Direct => true,
            ReadMode::Auto => !self.is_cached(offset, wanted.len()) && counters.prefers_direct(),
        };
        let mut start = wanted.start;
        if is_direct {
            let started = Instant::now();
            start = self.read_past_cache(block_offset, wanted.clone(), buffer)?;
            if start > wanted.start {
                counters.direct.add(start - wanted.start, started);
            }
        }
        if start < wanted.end {
            let rest = &mut buffer[start..wanted.end];
            self.read_into(block_offset + start as u64, rest, counters)?;
        }
        Ok(())
    }

    /// Whether the page cache has most of a range. A kernel that does not tell says yes.
    fn is_cached(&self, offset: u64, length: usize) -> bool {
        let Some(mapping) = &self.mapping else { return true };
        let start = offset as usize - offset as usize % page_bytes();
        let end = (offset as usize + length).min(mapping.as_slice().len());
        let (address, bytes) =
            (mapping.as_slice().as_ptr() as usize + start, end.saturating_sub(start));
        let resident = residency::resident_pages(address, bytes);
        resident.map_or(true, |pages| 2 * pages >= bytes.div_ceil(page_bytes()))
    }

    /// Reads a range of a block past the page cache. Returns where it stopped: before the end if
    /// the file system refuses such reads.
    fn read_past_cache(
        &self,
        block_offset: u64,
        range: std::ops::Range<usize>,
        buffer: &mut [u8],
    ) -> Result<usize, LoadError> {
        let Some(direct) = &self.direct else { return Ok(range.start) };
        let mut start = range.start;
        while start < range.end && !self.cannot_bypass.load(Ordering::Relaxed) {
            let from = start - start % DIRECT_ALIGNMENT;
            let to = range.end.next_multiple_of(DIRECT_ALIGNMENT).min(buffer.len());
            let position = block_offset + from as u64;
            match direct.read_at(&mut buffer[from..to], position) {
                Ok(count) if from + count > start => start = (from + count).min(range.end),
                Ok(count) => {
                    let end = block_offset + range.end as u64;
                    return Err(self.truncated(position + count as u64, end));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The file system has other ideas of alignment, or none of direct reads.
                Err(error)
                    if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) =>
                {
                    self.cannot_bypass.store(true, Ordering::Relaxed);
                }
                Err(error) => return Err(self.failed(position, error)),
            }
        }
        Ok(start)
    }

    fn failed(&self, offset: u64, source: io::Error) -> LoadError {
        LoadError::Read { path: self.path.clone(), offset, source }
    }

    fn truncated(&self, end: u64, expected: u64) -> LoadError {
        LoadError::Truncated { path: self.path.clone(), end, expected }
    }
}
