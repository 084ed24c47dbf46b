//! Pinning of a long range in chunks, so that the first bytes are copied while later pages are
//! being pinned.
//!
//! Each [`PinnedChunk`] owns its pin. The caller submits the copy of the chunk to an asynchronous
//! engine, keeps the chunk until the copy is complete, and requests the next one. Neither an error
//! in a later chunk nor dropping the iterator can unpin pages under a copy.

use std::sync::Arc;

use super::{Access, ChunkRanges, ChunkSchedule, PageRange, PinError, PinnedRange, Pinner};

/// Pins a range on demand. Each call of `next` pins the next chunk; after an error the iterator
/// ends.
#[derive(Debug)]
pub struct PinPipeline {
    pinner: Arc<dyn Pinner>,
    access: Access,
    address: usize,
    end: usize,
    chunks: Option<ChunkRanges>,
}

/// A pinned chunk, unpinned on drop: keep it until the copy of its bytes is complete.
#[derive(Debug)]
pub struct PinnedChunk {
    /// The pin of the pages that contain the bytes.
    pub pinned: PinnedRange,
    /// The first requested byte in these pages.
    pub address: usize,
    /// The number of requested bytes in these pages.
    pub length: usize,
}

impl PinPipeline {
    /// Prepares to pin `length` bytes at `address`; pins nothing yet.
    pub fn new(
        pinner: Arc<dyn Pinner>,
        address: usize,
        length: usize,
        access: Access,
        schedule: ChunkSchedule,
    ) -> Result<Self, PinError> {
        let chunks = Some(schedule.chunks(PageRange::covering(address, length)?));
        Ok(Self { pinner, access, address, end: address + length, chunks })
    }
}

impl Iterator for PinPipeline {
    type Item = Result<PinnedChunk, PinError>;

    fn next(&mut self) -> Option<Self::Item> {
        let range = self.chunks.as_mut()?.next()?;
        let pinned = match PinnedRange::new(&self.pinner, range, self.access) {
            Ok(pinned) => pinned,
            Err(error) => {
                self.chunks = None;
                return Some(Err(error));
            }
        };
        let address = range.start().max(self.address);
        let length = range.end().min(self.end) - address;
        Some(Ok(PinnedChunk { pinned, address, length }))
    }
}

impl std::iter::FusedIterator for PinPipeline {}
