//! Reads ranges of a file: from the page cache what is there, and past it what is not.
//!
//! A read with `RWF_NOWAIT` returns what the page cache has, and stops where the storage would have
//! to be asked. So each block tells by itself which way is the better one, and a file that is half
//! in the cache is read both ways. Where a file system knows neither `RWF_NOWAIT` nor `O_DIRECT`,
//! ordinary reads remain.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{Advice, OFlags};
use rustix::io::ReadWriteFlags;

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
    /// From the page cache what is there, past it (`O_DIRECT`) what is not.
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
    /// The file system refused a read with `RWF_NOWAIT`.
    cannot_ask_cache: AtomicBool,
    /// The file system refused a read past the page cache after all.
    cannot_bypass: AtomicBool,
}

/// How many bytes were read which way. Threads add to it.
#[derive(Debug, Default)]
pub(crate) struct ReadCounters {
    /// Found in the page cache.
    pub(crate) cached: AtomicU64,
    /// Read past the page cache.
    pub(crate) direct: AtomicU64,
    /// Read through the page cache, without knowing whether it had them.
    pub(crate) buffered: AtomicU64,
}

impl FileSource {
    /// Opens a file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        let path = path.as_ref().to_owned();
        let failed = |source| LoadError::Open { path: path.clone(), source };
        let cached = File::open(&path).map_err(failed)?;
        let metadata = cached.metadata().map_err(failed)?;
        if !metadata.is_file() {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
            return Err(failed(source));
        }
        let direct_flag = OFlags::DIRECT.bits() as i32;
        let direct = OpenOptions::new().read(true).custom_flags(direct_flag).open(&path).ok();
        Ok(Self {
            path,
            cached,
            direct,
            length: metadata.len(),
            cannot_ask_cache: AtomicBool::new(false),
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
        let known = self.read_from_cache(offset, target)?;
        counters.cached.fetch_add(known as u64, Ordering::Relaxed);
        let rest = &mut target[known..];
        if !rest.is_empty() {
            let position = offset + known as u64;
            // One request to the storage for all of it, not one for each step of the readahead.
            let length = std::num::NonZeroU64::new(rest.len() as u64);
            let _ = rustix::fs::fadvise(&self.cached, position, length, Advice::WillNeed);
            self.read_exact(position, rest)?;
            counters.buffered.fetch_add(rest.len() as u64, Ordering::Relaxed);
        }
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
        let mut start = wanted.start;
        if mode != ReadMode::Direct {
            let range = &mut buffer[wanted.clone()];
            let known = self.read_from_cache(block_offset + start as u64, range)?;
            counters.cached.fetch_add(known as u64, Ordering::Relaxed);
            start += known;
        }
        if start < wanted.end && mode != ReadMode::Cached {
            let end = self.read_past_cache(block_offset, start..wanted.end, buffer)?;
            counters.direct.fetch_add((end - start) as u64, Ordering::Relaxed);
            start = end;
        }
        if start < wanted.end {
            let rest = &mut buffer[start..wanted.end];
            self.read_into(block_offset + start as u64, rest, counters)?;
        }
        Ok(())
    }

    /// Reads what the page cache has of a range, from its start. Returns how many bytes.
    fn read_from_cache(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, LoadError> {
        let mut done = 0;
        while done < buffer.len() && !self.cannot_ask_cache.load(Ordering::Relaxed) {
            let mut rest = [IoSliceMut::new(&mut buffer[done..])];
            let position = offset + done as u64;
            let flags = ReadWriteFlags::NOWAIT;
            match rustix::io::preadv2(&self.cached, &mut rest, position, flags) {
                Ok(0) => return Err(self.truncated(position, offset + buffer.len() as u64)),
                Ok(count) => done += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => break,
                Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
                    self.cannot_ask_cache.store(true, Ordering::Relaxed);
                }
                Err(error) => return Err(self.failed(position, error.into())),
            }
        }
        Ok(done)
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
