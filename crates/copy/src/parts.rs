//! From a validated request to descriptors: whole, or cut as an engine demands.

use std::ops::Range;
use std::sync::Arc;

use memferry_engine::completion::Completion;
use memferry_engine::contract::Pins;
use memferry_engine::{Capabilities, Descriptor};

use crate::plan::Plan;
use crate::request::Request;

/// The whole request as one descriptor.
///
/// # Safety
/// As for [`Ferry::start`](crate::Ferry::start).
pub(crate) unsafe fn whole(request: &Request<'_>, plan: &Plan) -> Descriptor {
    // SAFETY: the caller of `start` vouches for the memory; overlapping copies were turned into
    // moves by the validation.
    unsafe {
        Descriptor::new(request.operation, request.source, request.target, request.length)
            .value(request.value)
            .kernel(plan.kernel)
            .passing(plan.passing)
            .memory(request.source_memory, request.target_memory)
    }
}

/// A request that is cut into parts, and what they report to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cut<'a> {
    pub(crate) request: &'a Request<'a>,
    pub(crate) plan: &'a Plan,
    pub(crate) capabilities: &'a Capabilities,
    pub(crate) completion: &'a Arc<Completion>,
}

impl Cut<'_> {
    /// The request cut as the engine demands, never across a chunk, every chunk claimed.
    ///
    /// # Safety
    /// As for [`Ferry::start`](crate::Ferry::start).
    pub(crate) unsafe fn all(&self) -> Vec<Descriptor> {
        let work = self.completion.work().expect("parts belong to chunked work");
        let mut parts = Vec::new();
        while let Some(chunk) = work.claim_front() {
            // SAFETY: passed on; the chunk was claimed.
            unsafe { self.extend(&mut parts, chunk.offset..chunk.offset + chunk.length, None) };
        }
        parts
    }

    /// Adds the parts of a range that lies inside a claimed chunk.
    ///
    /// # Safety
    /// As for [`Ferry::start`](crate::Ferry::start); the caller must have claimed the chunk, and
    /// asks for no byte of it twice.
    pub(crate) unsafe fn extend(
        &self,
        parts: &mut Vec<Descriptor>,
        range: Range<u64>,
        pins: Option<&Arc<Pins>>,
    ) {
        let mut offset = range.start;
        while offset < range.end {
            let source = self.request.source.wrapping_add(offset);
            let target = self.request.target.wrapping_add(offset);
            let length = self.capabilities.longest_piece(source, target, range.end - offset);
            // SAFETY: passed on.
            let part = unsafe { self.part(offset, length) };
            parts.push(match pins {
                Some(pins) => part.pinned_by(pins.clone()),
                None => part,
            });
            offset += length;
        }
    }

    /// One part, as long as it may be.
    ///
    /// # Safety
    /// As for [`Cut::extend`].
    pub(crate) unsafe fn part(&self, offset: u64, length: u64) -> Descriptor {
        let Request { operation, source, target, value, source_memory, target_memory, .. } =
            self.request;
        let (source, target) = (source.wrapping_add(offset), target.wrapping_add(offset));
        // SAFETY: a part of the memory that the caller of `start` vouches for; its chunk was claimed
        // for this, and no byte is cut twice.
        unsafe {
            Descriptor::new(*operation, source, target, length)
                .value(*value)
                .kernel(self.plan.kernel)
                .memory(*source_memory, *target_memory)
                .part_of(self.completion.clone(), offset)
        }
    }
}
