//! Execution of an operation on the calling processor: for engines that are processors, and for the
//! fallback after another engine failed.

use memferry_sys::copy;

use crate::contract::{Kernel, Opcode};

/// Executes the operation over the whole range; a compare returns the offset of the first
/// difference.
///
/// # Safety
/// The source must be valid for reads and the target for writes (for a compare: reads) of `length`
/// bytes, in memory of this process that no other thread writes during the call; source and target
/// of a [`Opcode::Copy`] must not overlap; a streaming kernel must be supported by the processor.
pub(crate) unsafe fn run(
    operation: Opcode,
    kernel: Kernel,
    source: u64,
    target: u64,
    length: u64,
    value: u8,
) -> Option<u64> {
    let source = source as *const u8;
    let target = target as *mut u8;
    let length = length as usize;
    // SAFETY: the caller's guarantees are those of each kernel.
    unsafe {
        match (operation, kernel) {
            (Opcode::Copy, Kernel::Cached) => copy::cached(target, source, length),
            (Opcode::Copy, Kernel::Stream(variant)) => variant.copy(target, source, length),
            (Opcode::Move, _) => copy::overlapping(target, source, length),
            (Opcode::Fill, Kernel::Cached) => copy::fill(target, value, length),
            (Opcode::Fill, Kernel::Stream(variant)) => variant.fill(target, value, length),
            (Opcode::Compare, _) => {
                return copy::first_difference(source, target, length).map(|at| at as u64);
            }
        }
    }
    None
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
        copy::prefetch_for_write(target.wrapping_add(line * LINE) as *const u8);
    }
}
