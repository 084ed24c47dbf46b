//! The end of a descriptor: what an engine reports, and what the processor does after a failure.

use super::{Descriptor, DescriptorFlags, DescriptorScope};
use crate::completion::{Chunk, Completion, PartOutput};
use crate::contract::{ExecutionError, Opcode};

impl Descriptor {
    /// Reports the end of bytes that were claimed by [`Descriptor::claim`]: `Ok` with the value of
    /// these bytes, as in [`Descriptor::finish`], or an error. After a recoverable error the
    /// calling processor finishes the bytes.
    ///
    /// # Safety
    /// The bytes must have been claimed through this descriptor, each is reported once, and nothing
    /// accesses them any more: the owner frees the memory when all bytes were reported.
    pub unsafe fn finish_claimed(
        &self,
        claimed: Chunk,
        result: Result<Option<u64>, ExecutionError>,
    ) {
        let Some(completion) =
            self.completion.as_ref().filter(|_| self.scope == DescriptorScope::WorkOffer)
        else {
            return;
        };
        match self.checked(result) {
            Err(error) if error.is_recoverable() && self.is_host_only() => {
                completion.run_claimed(claimed);
            }
            result => completion.finish_claimed(claimed, &result),
        }
    }

    /// Reports the end of the descriptor: `Ok` with its value, or an error. The value of a compare is
    /// the offset of the first difference, if there is one; that of a CRC, or of a copy with one, is
    /// the CRC-32C of the source; no other operation has one. If the engine failed but the memory is
    /// valid host memory, the calling processor finishes the rest and the transfer succeeds. Without
    /// a completion the rest is not finished, and only the channel's `error_of` reports the failure.
    pub fn finish(mut self, result: Result<Option<u64>, ExecutionError>) {
        if self.completion.is_none() || self.scope == DescriptorScope::WorkOffer {
            // A work offer is declined: its unclaimed chunks stay available to the other claimants.
            return;
        }
        let result = match self.checked(result) {
            Err(error) if error.is_recoverable() && self.is_host_only() => {
                let from = self.fallback_start(error.done_bytes());
                // SAFETY: the creator guarantees the memory until the descriptor is finished, which
                // happens below.
                Ok(unsafe { self.execute_range(from, self.length) })
            }
            other => other,
        };
        if let Some(completion) = self.completion.take() {
            self.report(&completion, result);
        }
    }

    /// The result, or an error if the engine computed no CRC where there must be one. That of nothing
    /// is known.
    fn checked(
        &self,
        result: Result<Option<u64>, ExecutionError>,
    ) -> Result<Option<u64>, ExecutionError> {
        match result {
            Ok(None) if self.operation.has_crc() && self.length == 0 => Ok(Some(0)),
            Ok(None) if self.operation.has_crc() => {
                let reason = "the engine computed no CRC";
                Err(ExecutionError::Engine { done_bytes: 0, reason })
            }
            result => result,
        }
    }

    pub(super) fn report(
        &self,
        completion: &Completion,
        result: Result<Option<u64>, ExecutionError>,
    ) {
        let result = result.map(|value| PartOutput::new(self.operation, value));
        match self.scope {
            DescriptorScope::Whole
                if self.flags.has(DescriptorFlags::NO_LISTENERS)
                    && result == Ok(PartOutput::None) =>
            {
                completion.finish_unlistened();
            }
            DescriptorScope::Whole => completion.finish_whole(result),
            DescriptorScope::Part => completion.finish_part(self.position, self.length, result),
            DescriptorScope::WorkOffer => {}
        }
    }

    /// The offset from which a processor continues after a failed engine. An overlapping copy
    /// cannot be resumed half-way, because part of its source may be overwritten: engines report
    /// such a failure before the first byte. A CRC is computed anew, with its copy.
    fn fallback_start(&self, done_bytes: u64) -> u64 {
        match self.operation {
            Opcode::Copy | Opcode::Fill | Opcode::Dualcast => done_bytes.min(self.length),
            Opcode::Move | Opcode::Compare | Opcode::Crc | Opcode::CopyCrc => 0,
        }
    }
}

impl Drop for Descriptor {
    #[inline]
    fn drop(&mut self) {
        if let Some(completion) = self.completion.take() {
            let reason = "its channel closed before it was executed (did the engine panic?)";
            self.report(&completion, Err(ExecutionError::Engine { done_bytes: 0, reason }));
        }
    }
}
