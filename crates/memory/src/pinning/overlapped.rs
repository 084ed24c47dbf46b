//! Pinning a long range piece by piece, so that the first bytes are copied while later pages are
//! still being pinned.
//!
//! Each piece comes out as a [`Chunk`] that owns its pin. The caller submits the copy of the piece
//! to an asynchronous engine, keeps the chunk with that copy, and asks for the next one. Pages can
//! therefore not be unpinned under a copy by anything that happens here: not by an error in a later
//! piece, and not by dropping the iterator.

use std::sync::Arc;

use super::{Access, ChunkSchedule, Chunks, PageRange, PinError, Pinned, Pinner};

/// Pins a range on demand. Each step pins the next piece; after an error there are no more.
#[derive(Debug)]
pub struct Overlapped {
    pinner: Arc<dyn Pinner>,
    access: Access,
    address: usize,
    end: usize,
    chunks: Option<Chunks>,
}

/// One pinned piece, unpinned when dropped: keep it until the copy of its bytes is over.
#[derive(Debug)]
pub struct Chunk {
    /// The pin of the pages that hold the bytes.
    pub pinned: Pinned,
    /// The first byte asked for that is in these pages.
    pub address: usize,
    /// How many bytes asked for are in these pages.
    pub length: usize,
}

impl Overlapped {
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

    /// Pins all that is left, for callers that want no overlap. After an error nothing of it stays
    /// pinned.
    pub fn into_pins(self) -> Result<Vec<Chunk>, PinError> {
        self.collect()
    }
}

impl Iterator for Overlapped {
    type Item = Result<Chunk, PinError>;

    fn next(&mut self) -> Option<Self::Item> {
        let range = self.chunks.as_mut()?.next()?;
        let pinned = match Pinned::new(&self.pinner, range, self.access) {
            Ok(pinned) => pinned,
            Err(error) => {
                self.chunks = None;
                return Some(Err(error));
            }
        };
        let address = range.start().max(self.address);
        let length = range.end().min(self.end) - address;
        Some(Ok(Chunk { pinned, address, length }))
    }
}

impl std::iter::FusedIterator for Overlapped {}
