//! From descriptors of the contract to those of the device.

use super::descriptor::{DsaOperation, flag};
use super::slot::Slot;
use super::work_queue::{QueueLimits, WorkQueue};
use crate::contract::{Descriptor, Opcode};

/// The line of the processor's caches: targets that begin in the middle of one are several times
/// slower.
const LINE_BYTES: u64 = 64;

/// The slots of a descriptor: one, or two if its target is not aligned and it has at least
/// `aligned_from` bytes; or the reason why the device cannot execute it.
pub(super) fn slots(
    descriptor: &Descriptor,
    port: &dyn WorkQueue,
    limits: &QueueLimits,
    aligned_from: u64,
) -> Result<(Slot, Option<Slot>), &'static str> {
    if !descriptor.is_host_only() {
        return Err("the accelerator cannot access device memory");
    }
    let length = descriptor.length();
    if length > limits.max_bytes {
        return Err("the descriptor exceeds the maximum of the work queue");
    }
    let operation = operation(descriptor, port)?;
    if !limits.supports(operation.opcode()) {
        return Err("the accelerator does not support this operation");
    }
    // A target that is used soon goes to the caches.
    let is_cached = limits.cache_control && !descriptor.processor_kernel().bypasses_caches();
    let cache = if is_cached { flag::CACHE_CONTROL } else { 0 };
    let flags = cache & operation.valid_flags();
    // Every part of an ordered descriptor is: the fence of one holds up no other.
    let is_ordered = descriptor.is_ordered();
    let slot =
        |operation, bytes: u64| Slot { is_ordered, ..Slot::new(operation, bytes as u32, flags) };
    let whole = slot(operation, length);
    let target = match operation {
        DsaOperation::Dualcast { source, target, second }
            if !super::descriptor::has_dualcast_offsets(target, second) =>
        {
            // One copy for each target, reported together.
            let copy = |target| slot(DsaOperation::Copy { source, target }, length);
            let first = Slot { joins_next: true, is_parallel: true, ..copy(target) };
            return Ok((first, Some(copy(second))));
        }
        DsaOperation::Copy { target, .. }
        | DsaOperation::Fill { target, .. }
        | DsaOperation::Dualcast { target, .. } => target,
        // A CRC is that of one descriptor.
        _ => return Ok((whole, None)),
    };
    let head = target.next_multiple_of(LINE_BYTES) - target;
    match operation.after(head) {
        Some(rest) if head > 0 && length >= aligned_from => {
            let first = Slot { joins_next: true, ..slot(operation, head) };
            Ok((first, Some(slot(rest, length - head))))
        }
        _ => Ok((whole, None)),
    }
}

fn operation(descriptor: &Descriptor, port: &dyn WorkQueue) -> Result<DsaOperation, &'static str> {
    const NOT_PINNED: &str = "memory is not pinned for the accelerator, or crosses its pages";
    let length = descriptor.length();
    let source = || {
        let address = port.address(descriptor.pinned_source(), descriptor.source(), length);
        address.ok_or(NOT_PINNED)
    };
    let target = || {
        let address = port.address(descriptor.pinned_target(), descriptor.target(), length);
        address.ok_or(NOT_PINNED)
    };
    Ok(match descriptor.operation() {
        Opcode::Copy => DsaOperation::Copy { source: source()?, target: target()? },
        Opcode::Fill => {
            let pattern = u64::from_ne_bytes([descriptor.fill_value(); 8]);
            DsaOperation::Fill { pattern, target: target()? }
        }
        Opcode::Compare => DsaOperation::Compare { left: source()?, right: target()? },
        // The CRC of a part is that of its own bytes: those of a transfer are combined at its end.
        Opcode::Crc => DsaOperation::Crc { source: source()?, seed: 0 },
        Opcode::CopyCrc => DsaOperation::CopyCrc { source: source()?, target: target()?, seed: 0 },
        Opcode::Dualcast => {
            let second = descriptor.second_target().ok_or(NOT_PINNED)?;
            let second = port.address(descriptor.pinned_second(), second, length);
            let second = second.ok_or(NOT_PINNED)?;
            DsaOperation::Dualcast { source: source()?, target: target()?, second }
        }
        // A move that fails half-way cannot be repeated by the processor.
        Opcode::Move => return Err("the accelerator does not copy overlapping memory"),
    })
}
