//! Carrying out an operation on the calling processor: used by the engines that are processors,
//! and by everybody who finishes what another engine left.

use memferry_sys::copy;

use crate::contract::{Kernel, Operation};

/// Does the whole range; for a compare returns the offset of the first difference.
///
/// # Safety
/// The source must be valid for reads and the target for writes (for a compare: reads) of `length`
/// bytes, in memory of this process that nobody else writes meanwhile; source and target of a
/// [`Operation::Copy`] must not overlap; a streaming kernel must be supported by the processor.
pub(crate) unsafe fn run(
    operation: Operation,
    kernel: Kernel,
    source: u64,
    target: u64,
    length: u64,
    value: u8,
) -> Option<u64> {
    let source = source as *const u8;
    let target = target as *mut u8;
    let length = length as usize;
    // SAFETY: passed on from the caller, operation by operation.
    unsafe {
        match (operation, kernel) {
            (Operation::Copy, Kernel::Cached) => copy::cached(target, source, length),
            (Operation::Copy, Kernel::Stream(variant)) => variant.copy(target, source, length),
            (Operation::Move, _) => copy::overlapping(target, source, length),
            (Operation::Fill, Kernel::Cached) => copy::fill(target, value, length),
            (Operation::Fill, Kernel::Stream(variant)) => variant.fill(target, value, length),
            (Operation::Compare, _) => {
                return copy::first_difference(source, target, length).map(|at| at as u64);
            }
        }
    }
    None
}
