//! Reductions of much data: every rank reduces one part of the elements of all ranks, into its staging, and then the
//! results are collected from there.

use std::ops::Range;

use crate::broadcast::Exposed;
use crate::element::Combine;
use crate::error::Error;
use crate::team::Team;
use crate::waiting::Progress;

/// The memory of a reduction.
#[derive(Clone, Copy)]
pub(crate) struct Reducing {
    pub(crate) send: *const u8,
    pub(crate) recv: *mut u8,
    pub(crate) bytes: usize,
    /// The rank that gets the result; all ranks if there is none.
    pub(crate) root: Option<usize>,
    /// A number for type and operation.
    pub(crate) kind: u64,
}

/// What is reduced at a time, so that the result stays in the first cache.
const BLOCK_BYTES: usize = 8 << 10;
/// The same, if each block of another rank takes a system call.
const CROSS_BLOCK_BYTES: usize = 32 << 10;
/// Parts begin at multiples of this, if the elements permit it.
const PART_ALIGNMENT: usize = 64;

/// Where the elements of other ranks are.
enum Sources {
    /// In their staging.
    Staged,
    /// In their memory, at these addresses.
    Cross(Vec<u64>),
}

/// A part of the data that fits into the staging.
#[derive(Clone, Copy)]
struct Piece {
    /// The first byte in the data.
    start: usize,
    bytes: usize,
    half: usize,
    /// Bytes of a part of one rank; the last parts may be shorter.
    part: usize,
}

impl Piece {
    /// The part of a rank, in bytes of the piece.
    fn part(&self, rank: usize) -> Range<usize> {
        let start = rank.saturating_mul(self.part).min(self.bytes);
        start..start.saturating_add(self.part).min(self.bytes)
    }
}

impl Sources {
    /// Where a rank puts the result of its part, in its staging. In place of its own elements, if they are there.
    fn result(&self, piece: &Piece, rank: usize) -> usize {
        match self {
            Self::Staged => piece.part(rank).start,
            Self::Cross(_) => 0,
        }
    }
}

impl Team {
    /// # Safety
    /// As [`Team::allreduce_raw`].
    pub(crate) unsafe fn reduce_large(
        &mut self,
        reducing: Reducing,
        combine: &mut Combine<'_>,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let (element, size) = (combine.element_bytes, self.size());
        let sources = self.find_sources(&reducing, progress)?;
        let staging = self.tuning.staging_bytes / element * element;
        let unit = element * (PART_ALIGNMENT / element).max(1);
        let longest = match &sources {
            Sources::Staged => staging,
            // Rounding up must not make a part longer than the staging.
            Sources::Cross(_) => (staging / unit * unit).max(element).saturating_mul(size),
        };
        let mut start = 0;
        while start < reducing.bytes {
            let bytes = longest.min(reducing.bytes - start);
            let part = bytes.div_ceil(size).next_multiple_of(unit);
            let half = self.take_half(progress)?;
            let piece = Piece { start, bytes, half, part };
            if let Sources::Staged = sources {
                // SAFETY: the caller guarantees `send`, and the piece is not longer than the staging.
                unsafe { self.stage_parts(&reducing, &piece) };
                let mark = reducing.mark(3);
                let phase = self.publish(mark, &[], progress)?;
                self.meet_all(phase, mark, progress)?;
            }
            // SAFETY: the caller guarantees `send`, and all ranks have published their data.
            unsafe { self.reduce_part(&reducing, &piece, &sources, combine)? };
            let mark = reducing.mark(4);
            let phase = self.publish(mark, &[], progress)?;
            let is_last = start + bytes == reducing.bytes;
            if reducing.root.is_none_or(|root| root == self.rank()) {
                self.meet_all(phase, mark, progress)?;
                // SAFETY: the caller guarantees `recv`, and all ranks have published their results.
                unsafe { self.collect(&reducing, &piece, &sources) };
            } else if is_last && matches!(sources, Sources::Cross(_)) {
                // The others read `send` until then.
                self.meet_all(phase, mark, progress)?;
            }
            self.release_half(half);
            start += bytes;
        }
        Ok(())
    }

    /// Finds out where the elements of other ranks are to be read.
    fn find_sources(
        &mut self,
        reducing: &Reducing,
        progress: &mut dyn Progress,
    ) -> Result<Sources, Error> {
        if self.peers.is_none() || reducing.bytes < self.tuning.reduce_cross_bytes {
            return Ok(Sources::Staged);
        }
        let mark = reducing.mark(2);
        let exposed = Exposed::new(reducing.send, reducing.bytes);
        let phase = self.publish(mark, &exposed.encode(), progress)?;
        self.meet_all(phase, mark, progress)?;
        let all: Vec<_> = (0..self.size()).map(|rank| self.exposed(rank, phase)).collect();
        Ok(match all.iter().all(|exposed| exposed.is_reachable) {
            true => Sources::Cross(all.iter().map(|exposed| exposed.address).collect()),
            false => Sources::Staged,
        })
    }

    /// Copies the parts that others reduce into the staging of this rank.
    ///
    /// # Safety
    /// `send` must be valid for reads of the piece, which must fit into the staging.
    unsafe fn stage_parts(&self, reducing: &Reducing, piece: &Piece) {
        let staging = self.shared.staging(self.rank(), piece.half);
        let own = piece.part(self.rank());
        for range in [0..own.start, own.end..piece.bytes] {
            // SAFETY: the range is in the piece; nobody reads the staging before it is published.
            unsafe {
                let from = reducing.send.add(piece.start + range.start);
                std::ptr::copy_nonoverlapping(from, staging.add(range.start), range.len());
            }
        }
    }

    /// Reduces the part of this rank into its staging.
    ///
    /// # Safety
    /// `send` must be valid for reads of the piece.
    unsafe fn reduce_part(
        &mut self,
        reducing: &Reducing,
        piece: &Piece,
        sources: &Sources,
        combine: &mut Combine<'_>,
    ) -> Result<(), Error> {
        let (rank, half) = (self.rank(), piece.half);
        let part = piece.part(rank);
        // SAFETY: the result of a part is in the staging: see `Sources::result` and the length of a piece.
        let target = unsafe { self.shared.staging(rank, half).add(sources.result(piece, rank)) };
        // SAFETY: the part is in the piece.
        let own = unsafe { reducing.send.add(piece.start + part.start) };
        match sources {
            Sources::Staged => {
                let source = |team: &Self, other: usize| {
                    if other == rank {
                        return own;
                    }
                    let staging = team.shared.staging(other, half).cast_const();
                    // SAFETY: the part is in the piece, which fits into the staging.
                    unsafe { staging.add(part.start) }
                };
                // SAFETY: all sources have the part; the target is the staging of this rank, whose part nobody else
                // accesses, and it is none of the sources.
                unsafe { self.combine_blocks(target, part.len(), combine, source) }
            }
            Sources::Cross(addresses) => {
                let offset = (piece.start + part.start) as u64;
                // SAFETY: `own` has the part, and the staging of this rank is at least as long as a part.
                unsafe { self.combine_cross(target, own, part.len(), combine, addresses, offset) }
            }
        }
    }

    /// Copies the results of all parts into `recv`.
    ///
    /// # Safety
    /// `recv` must be valid for writes of the piece.
    unsafe fn collect(&self, reducing: &Reducing, piece: &Piece, sources: &Sources) {
        let size = self.size();
        // Every rank begins at another place.
        for rank in (0..size).map(|step| (self.rank() + step) % size) {
            let part = piece.part(rank);
            // SAFETY: the part is in the piece, and the result in the staging of its rank.
            unsafe {
                let from = self.shared.staging(rank, piece.half).add(sources.result(piece, rank));
                let into = reducing.recv.add(piece.start + part.start);
                std::ptr::copy_nonoverlapping(from, into, part.len());
            }
        }
    }

    /// Private memory for two blocks.
    fn scratch(&mut self, block: usize) -> [*mut u8; 2] {
        let words = block.div_ceil(8);
        if self.scratch.len() < 2 * words {
            self.scratch.resize(2 * words, 0);
        }
        let start = self.scratch.as_mut_ptr();
        // SAFETY: there are at least twice as many words.
        [start.cast(), unsafe { start.add(words) }.cast()]
    }

    /// Combines `bytes` from a source for each rank into `target`, in the order of the ranks.
    ///
    /// # Safety
    /// Every source must be valid for reads and the target for writes of `bytes`, and none may overlap the target.
    /// Other processes may write the sources, and the target if it is shared memory; then the result is whatever they
    /// make it.
    pub(crate) unsafe fn combine_blocks(
        &mut self,
        target: *mut u8,
        bytes: usize,
        combine: &mut Combine<'_>,
        source: impl Fn(&Self, usize) -> *const u8,
    ) -> Result<(), Error> {
        let element = combine.element_bytes;
        let block = element * (BLOCK_BYTES / element).max(1);
        // A function of the caller gets private memory only.
        let [result, operand] = match combine.is_function() {
            true => self.scratch(block),
            false => [std::ptr::null_mut(); 2],
        };
        for at in (0..bytes).step_by(block) {
            let length = block.min(bytes - at);
            // SAFETY: at + length <= bytes, and the scratch is as long as a block.
            unsafe {
                let into = if combine.is_function() { result } else { target.add(at) };
                std::ptr::copy_nonoverlapping(source(self, 0).add(at), into, length);
                for rank in 1..self.size() {
                    let mut from = source(self, rank).add(at);
                    if combine.is_function() {
                        std::ptr::copy_nonoverlapping(from, operand, length);
                        from = operand;
                    }
                    self.shared.combine(combine, into, from, length / element)?;
                }
                if combine.is_function() {
                    std::ptr::copy_nonoverlapping(result, target.add(at), length);
                }
            }
        }
        Ok(())
    }

    /// As [`Team::combine_blocks`], from the memory of other ranks.
    ///
    /// # Safety
    /// `own` must be valid for reads and `target` for writes of `bytes`.
    unsafe fn combine_cross(
        &mut self,
        target: *mut u8,
        own: *const u8,
        bytes: usize,
        combine: &mut Combine<'_>,
        addresses: &[u64],
        offset: u64,
    ) -> Result<(), Error> {
        let element = combine.element_bytes;
        let block = element * (CROSS_BLOCK_BYTES / element).max(1);
        let [result, operand] = self.scratch(block);
        let peers = self.peers.as_ref().ok_or(Error::Corrupt)?;
        for at in (0..bytes).step_by(block) {
            let length = block.min(bytes - at);
            // SAFETY: at + length <= bytes.
            let into = unsafe { if combine.is_function() { result } else { target.add(at) } };
            for (rank, address) in addresses.iter().enumerate() {
                let address = address.wrapping_add(offset + at as u64);
                // SAFETY: as above; the scratch is as long as a block, and only this thread accesses it. Nobody reads
                // the staging before it is published.
                unsafe {
                    let from = match rank == self.shared.rank {
                        true => own.add(at),
                        false => {
                            let into = if rank == 0 { into } else { operand };
                            let read = peers.read(rank, address, into, length);
                            read.map_err(|error| self.shared.break_with(error))?;
                            into.cast_const()
                        }
                    };
                    match rank {
                        0 if from == into.cast_const() => {}
                        0 => std::ptr::copy_nonoverlapping(from, into, length),
                        _ => self.shared.combine(combine, into, from, length / element)?,
                    }
                }
            }
            if combine.is_function() {
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(result, target.add(at), length) };
            }
        }
        self.check_read()
    }
}
