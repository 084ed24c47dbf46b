//! Descriptors of a validated request: one for the whole request, or parts within the limits of an
//! engine.

use std::ops::Range;
use std::sync::Arc;

use memferry_engine::completion::Completion;
use memferry_engine::contract::DescriptorLeases;
use memferry_engine::{Capabilities, Descriptor, Opcode};

use crate::plan::CopyPlan;
use crate::request::Request;

/// Returns the whole request as one descriptor.
///
/// # Safety
/// As for [`Ferry::start_raw`](crate::Ferry::start_raw).
pub(crate) unsafe fn single_descriptor(request: &Request<'_>, plan: &CopyPlan) -> Descriptor {
    // SAFETY: the caller of `start_raw` guarantees the validity of the memory; `validate` has
    // turned overlapping copies into moves.
    let whole = unsafe {
        let Request { operation, source, target, second, length, .. } = *request;
        let whole = Descriptor::new(operation, source, target, length);
        match operation {
            Opcode::Dualcast => whole.with_second_target(second),
            _ => whole,
        }
    };
    whole
        .value(request.value)
        .kernel(plan.kernel)
        .transient(plan.transient)
        .memory(request.source_memory, request.target_memory)
}

/// Whether a request is one part within the limits of an engine.
pub(crate) fn is_one(request: &Request<'_>, capabilities: &Capabilities) -> bool {
    max_part(request, capabilities, 0, request.length) == request.length
}

/// Returns the length of the longest part at an offset, of `length` bytes at most.
fn max_part(request: &Request<'_>, capabilities: &Capabilities, offset: u64, length: u64) -> u64 {
    let source = request.source.wrapping_add(offset);
    let target = request.target.wrapping_add(offset);
    let length = capabilities.max_part(source, target, length);
    match request.operation {
        Opcode::Dualcast => {
            capabilities.max_part(source, request.second.wrapping_add(offset), length)
        }
        _ => length,
    }
}

/// Splits a request into parts that report to one completion.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PartBuilder<'a> {
    pub(crate) request: &'a Request<'a>,
    pub(crate) plan: &'a CopyPlan,
    pub(crate) capabilities: &'a Capabilities,
    pub(crate) completion: &'a Arc<Completion>,
}

impl PartBuilder<'_> {
    /// Claims all chunks and returns the request as parts within the limits of the engine; no part
    /// crosses a chunk boundary.
    ///
    /// # Safety
    /// As for [`Ferry::start_raw`](crate::Ferry::start_raw).
    pub(crate) unsafe fn all(&self) -> Vec<Descriptor> {
        let work = self.completion.work().expect("parts belong to chunked work");
        let mut parts = Vec::new();
        while let Some(chunk) = work.claim_front() {
            // SAFETY: the caller upholds the contract; the chunk is claimed.
            unsafe { self.extend(&mut parts, chunk.offset..chunk.offset + chunk.length, None) };
        }
        parts
    }

    /// Appends the parts of a range that lies inside a claimed chunk.
    ///
    /// # Safety
    /// As for [`Ferry::start_raw`](crate::Ferry::start_raw); the caller must have claimed the
    /// chunk, and requests no byte of it twice.
    pub(crate) unsafe fn extend(
        &self,
        parts: &mut Vec<Descriptor>,
        range: Range<u64>,
        pins: Option<&Arc<DescriptorLeases>>,
    ) {
        let mut offset = range.start;
        while offset < range.end {
            let length = max_part(self.request, self.capabilities, offset, range.end - offset);
            // SAFETY: the caller upholds the contract.
            let part = unsafe { self.part(offset, length) };
            parts.push(match pins {
                Some(pins) => part.pinned_by(pins.clone()),
                None => part,
            });
            offset += length;
        }
    }

    /// Returns one part of the given length.
    ///
    /// # Safety
    /// As for [`PartBuilder::extend`].
    pub(crate) unsafe fn part(&self, offset: u64, length: u64) -> Descriptor {
        let Request { operation, source, target, value, source_memory, target_memory, .. } =
            self.request;
        let (source, target) = (source.wrapping_add(offset), target.wrapping_add(offset));
        // SAFETY: the range is a part of the memory whose validity the caller of `start_raw`
        // guarantees; its chunk is claimed for this part, and no byte is in two parts.
        unsafe {
            Descriptor::new(*operation, source, target, length)
                .value(*value)
                .kernel(self.plan.kernel)
                .memory(*source_memory, *target_memory)
                .part_of(self.completion.clone(), offset)
        }
    }
}
