//! The segments of a work: many ranges, copied or filled by one transfer.
//!
//! A chunk is a range of the bytes of all segments in their order, as if they were contiguous. So
//! claims, progress and failures are those of a work over one range, and a large segment is cut
//! like any other range. The list is fixed before the work is shared.

use super::work::Chunk;
use crate::contract::{Kernel, Opcode};
use crate::runtime::execute::{self, NextRange, Operands};

/// One range to copy or fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkSegment {
    /// The operation: copy, move or fill.
    pub operation: Opcode,
    /// The byte that a fill writes.
    pub value: u8,
    /// The source address; unused by a fill.
    pub source: u64,
    /// The target address.
    pub target: u64,
    /// The length in bytes.
    pub length: u64,
}

/// Executes segments on the calling processor, in their order.
///
/// # Safety
/// As for [`Descriptor::new`](crate::Descriptor::new), for every segment, until the call returns.
pub unsafe fn execute_segments(kernel: Kernel, segments: impl Iterator<Item = WorkSegment>) {
    let kernel = kernel.or_cached();
    let mut segments = segments.filter(|segment| segment.length > 0).peekable();
    while let Some(segment) = segments.next() {
        let next = segments.peek().map(|next| NextRange {
            operation: next.operation,
            source: next.source,
            target: next.target,
            length: next.length,
        });
        let WorkSegment { operation, value, source, target, length } = segment;
        let operands = Operands::new(source, target);
        // SAFETY: the caller upholds the contract.
        unsafe { execute::run_before(operation, kernel, operands, length, value, next) };
    }
}

/// A segment in a list: two fill a cache line, and the end makes the position of each known.
#[derive(Debug, Clone, Copy)]
struct ListedSegment {
    source: u64,
    target: u64,
    /// The end of the segment in the bytes of all segments.
    end: u64,
    operation: Opcode,
    value: u8,
}

/// The segments, and where each chunk starts.
#[derive(Debug)]
pub(super) struct SegmentList {
    segments: Box<[ListedSegment]>,
    /// The index of the segment with the first byte of each chunk.
    starts: Box<[u32]>,
}

impl SegmentList {
    /// Lists the segments that have bytes, for chunks of `chunk_bytes`.
    pub(super) fn new(segments: impl Iterator<Item = WorkSegment>, chunk_bytes: u64) -> Self {
        let (mut listed, mut starts) = (Vec::with_capacity(segments.size_hint().0), Vec::new());
        let (mut end, mut next_chunk) = (0, 0);
        for segment in segments.filter(|segment| segment.length > 0) {
            let WorkSegment { operation, value, source, target, length } = segment;
            end += length;
            while next_chunk < end {
                starts.push(listed.len() as u32);
                next_chunk += chunk_bytes;
            }
            listed.push(ListedSegment { source, target, end, operation, value });
        }
        Self { segments: listed.into(), starts: starts.into() }
    }

    /// Executes the part of every segment that lies in a chunk, with `chunk_bytes` as in
    /// [`SegmentList::new`].
    ///
    /// # Safety
    /// As for [`execute::run`], for every segment.
    pub(super) unsafe fn execute(&self, kernel: Kernel, chunk_bytes: u64, chunk: Chunk) {
        let (mut offset, end) = (chunk.offset, chunk.offset + chunk.length);
        let mut index = self.starts[(chunk.offset / chunk_bytes) as usize] as usize;
        let mut start = index.checked_sub(1).map_or(0, |before| self.segments[before].end);
        while offset < end {
            let segment = &self.segments[index];
            index += 1;
            let next = self.segments.get(index).filter(|_| segment.end < end);
            let next = next.map(|next| NextRange {
                operation: next.operation,
                source: next.source,
                target: next.target,
                length: next.end.min(end) - segment.end,
            });
            let (skipped, stop) = (offset - start, segment.end.min(end));
            // SAFETY: the range lies inside the segment; the caller upholds the rest.
            unsafe {
                execute::run_before(
                    segment.operation,
                    kernel,
                    Operands::new(segment.source, segment.target).moved_by(skipped),
                    stop - offset,
                    segment.value,
                    next,
                );
            }
            (offset, start) = (stop, segment.end);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn execute_in_chunks(segments: &[WorkSegment], chunk_bytes: u64) {
        // Twice with the same result: without and with requests of what follows.
        let ahead = Kernel::Stream(memferry_sys::copy::stream::Streaming::Prefetch).or_cached();
        for kernel in [Kernel::Cached, ahead] {
            execute_with(kernel, segments, chunk_bytes);
        }
    }

    fn execute_with(kernel: Kernel, segments: &[WorkSegment], chunk_bytes: u64) {
        let total = segments.iter().map(|segment| segment.length).sum::<u64>();
        let list = SegmentList::new(segments.iter().copied(), chunk_bytes);
        for offset in (0..total).step_by(chunk_bytes as usize) {
            let chunk = Chunk { offset, length: chunk_bytes.min(total - offset) };
            // SAFETY: the tests list ranges of live buffers that do not overlap.
            unsafe { list.execute(kernel, chunk_bytes, chunk) };
        }
    }

    #[test]
    fn segments_are_executed_whole_wherever_chunks_cut_them() {
        let source: Vec<u8> = (0..=250).collect();
        let lengths = [3, 0, 1, 100, 7, 0, 0, 64, 75];
        for chunk_bytes in [1, 5, 64, 100, 249, 250, 1000] {
            let mut target = [0u8; 250];
            let to = target.as_mut_ptr() as u64;
            let mut offset = 0;
            let segments = lengths.map(|length| {
                // From the end to the start, so that neither side is contiguous.
                let (from, at) = (250 - offset - length, offset);
                offset += length;
                let source = source.as_ptr() as u64 + from;
                WorkSegment { operation: Opcode::Copy, value: 0, source, target: to + at, length }
            });
            execute_in_chunks(&segments, chunk_bytes);
            for segment in segments {
                let at = (segment.target - to) as usize;
                let from = (segment.source - source.as_ptr() as u64) as usize;
                let length = segment.length as usize;
                assert_eq!(target[at..at + length], source[from..from + length], "{chunk_bytes}");
            }
        }
    }

    #[test]
    fn copies_and_fills_share_a_list() {
        let (source, mut target) = ([7u8; 10], [0u8; 30]);
        let to = target.as_mut_ptr() as u64;
        let segment = |operation, value, at, length| {
            let source = source.as_ptr() as u64;
            WorkSegment { operation, value, source, target: to + at, length }
        };
        let segments = [segment(Opcode::Copy, 0, 20, 10), segment(Opcode::Fill, 9, 0, 15)];
        execute_in_chunks(&segments, 12);
        assert_eq!(target, *[[9; 15].as_slice(), &[0; 5], &[7; 10]].concat());
    }
}
