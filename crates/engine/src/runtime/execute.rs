//! Execution of an operation on the calling processor: for engines that are processors, and for the
//! fallback after another engine failed.

use memferry_sys::copy::ahead::CopyRange;
use memferry_sys::copy::stream::Streaming;
use memferry_sys::{copy, crc};

use crate::contract::{Kernel, Opcode};

/// The addresses of an operation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operands {
    pub(crate) source: u64,
    /// Unused by a CRC.
    pub(crate) target: u64,
    /// The second target of a dualcast; unused by every other operation.
    pub(crate) second: u64,
}

impl Operands {
    pub(crate) const fn new(source: u64, target: u64) -> Self {
        Self { source, target, second: 0 }
    }

    /// The addresses `bytes` further on.
    pub(crate) const fn moved_by(self, bytes: u64) -> Self {
        Self {
            source: self.source.wrapping_add(bytes),
            target: self.target.wrapping_add(bytes),
            second: self.second.wrapping_add(bytes),
        }
    }
}

/// Executes the operation over the whole range. A compare returns the offset of the first
/// difference, if there is one; an operation with a CRC returns the CRC.
///
/// # Safety
/// The source must be valid for reads and the targets for writes (for a compare: reads) of `length`
/// bytes, in memory of this process that no other thread writes during the call; source and targets
/// must not overlap, except in an [`Opcode::Move`] or [`Opcode::Compare`]; a streaming kernel must be supported by the
/// processor.
pub(crate) unsafe fn run(
    operation: Opcode,
    kernel: Kernel,
    operands: Operands,
    length: u64,
    value: u8,
) -> Option<u64> {
    let Operands { source, target, second } = operands;
    let (source, target, second) = (source as *const u8, target as *mut u8, second as *mut u8);
    let length = length as usize;
    // SAFETY: the caller's guarantees are those of each kernel.
    unsafe {
        match (operation, kernel) {
            (Opcode::Copy, _) => kernel.copy(target, source, length),
            (Opcode::Move, _) => copy::overlapping(target, source, length),
            (Opcode::Fill, Kernel::Cached) => copy::fill(target, value, length),
            (Opcode::Fill, Kernel::Stream(variant)) => variant.fill(target, value, length),
            (Opcode::Compare, _) => {
                return copy::first_difference(source, target, length).map(|at| at as u64);
            }
            (Opcode::Crc, _) => return Some(crc::append(0, source, length).into()),
            (Opcode::CopyCrc, _) => {
                let mut sum = 0;
                for (at, bytes) in blocks(kernel, length) {
                    sum = crc::append(sum, source.add(at), bytes);
                    kernel.copy(target.add(at), source.add(at), bytes);
                }
                return Some(sum.into());
            }
            (Opcode::Dualcast, _) => {
                for (at, bytes) in blocks(kernel, length) {
                    kernel.copy(target.add(at), source.add(at), bytes);
                    kernel.copy(second.add(at), source.add(at), bytes);
                }
            }
        }
    }
    None
}

/// The operation that follows in a list.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NextRange {
    pub(crate) operation: Opcode,
    pub(crate) source: u64,
    pub(crate) target: u64,
    pub(crate) length: u64,
}

/// Executes one operation of a list, of which `next` is the following one. Its first lines are
/// requested, or all its lines if the kernel is of that kind: the processor's own prefetchers
/// start anew in every range, and short ranges end before they help.
///
/// # Safety
/// As for [`run`]; any `next` is allowed.
#[inline]
pub(crate) unsafe fn run_before(
    operation: Opcode,
    kernel: Kernel,
    operands: Operands,
    length: u64,
    value: u8,
    next: Option<NextRange>,
) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        match (operation, next) {
            (Opcode::Copy, Some(next)) if kernel == Kernel::Stream(Streaming::Prefetch) => {
                let range = |source, target, length| CopyRange {
                    source: source as *const u8,
                    target: target as *mut u8,
                    length: length as usize,
                };
                let now = range(operands.source, operands.target, length);
                let next = range(next.source, next.target, next.length);
                copy::ahead::copy_before(now, next);
            }
            _ => {
                if let Some(next) = next {
                    prefetch(next.operation, next.source, next.target);
                }
                run(operation, kernel, operands, length, value);
            }
        }
    }
}

impl Kernel {
    /// Copies with this kernel.
    ///
    /// # Safety
    /// As for [`run`], for an [`Opcode::Copy`].
    #[inline]
    unsafe fn copy(self, target: *mut u8, source: *const u8, length: usize) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            match self {
                Self::Cached => copy::cached(target, source, length),
                Self::Stream(variant) => variant.copy(target, source, length),
            }
        }
    }
}

/// The blocks in which an operation reads its source twice: offset and length of each. The second
/// time, the block is in a cache: with ordinary stores in the first one, with non-temporal stores,
/// which need longer runs, in the second.
fn blocks(kernel: Kernel, length: usize) -> impl Iterator<Item = (usize, usize)> {
    let block = match kernel {
        kernel if kernel.bypasses_caches() => 64 << 10,
        _ => 8 << 10,
    };
    (0..length).step_by(block).map(move |at| (at, block.min(length - at)))
}

/// Prefetches the first lines of source and target of a range. The processor's own prefetchers
/// start anew in every range, and short ranges end before they help.
#[inline]
pub(crate) fn prefetch(operation: Opcode, source: u64, target: u64) {
    const LINES: u64 = 6;
    const LINE: u64 = 64;
    for line in 0..LINES {
        if operation != Opcode::Fill {
            copy::prefetch_for_read(source.wrapping_add(line * LINE) as *const u8);
        }
        if operation != Opcode::Crc {
            copy::prefetch_for_write(target.wrapping_add(line * LINE) as *const u8);
        }
    }
}
