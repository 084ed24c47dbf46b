//! The work of a channel in flight: descriptors that were taken and are not complete, and their
//! copies on the device.

use std::ops::Range;

use memferry_memory::registration::RegistrationRef;
use memferry_sys::cuda::CudaEvent;

use super::channel::{MAX_COPY_BYTES, STAGING_BUFFER_BYTES};
use crate::Descriptor;
use crate::completion::Chunk;
use crate::contract::{DescriptorScope, ExecutionError, Sequence};

/// A descriptor that was taken and is not complete.
#[derive(Debug)]
pub(super) struct ActiveDescriptor {
    pub(super) descriptor: Descriptor,
    pub(super) sequence: Sequence,
    /// The bytes that this channel has claimed and not issued.
    pub(super) window: Range<u64>,
    /// The number of issued bytes.
    issued_bytes: u64,
    /// Nothing is left to issue or to claim.
    pub(super) is_exhausted: bool,
    /// The number of copies that were issued and are not complete.
    pub(super) in_flight: usize,
    /// The number of finished bytes, counted until the first failure.
    pub(super) done_bytes: u64,
    pub(super) failure: Option<ExecutionError>,
    pub(super) difference: Option<u64>,
    /// The next length to register on each side, in bytes.
    pub(super) growth: [u64; 2],
    /// The driver rejected registered memory: copy without registrations.
    pub(super) ignores_registrations: bool,
}

impl ActiveDescriptor {
    /// The length of the first registration in bytes; each is twice as long as the one before.
    const FIRST_REGISTERED_BYTES: u64 = 1 << 20;

    pub(super) fn new(descriptor: Descriptor, sequence: Sequence) -> Self {
        let is_work_offer = descriptor.scope() == DescriptorScope::WorkOffer;
        let window = if is_work_offer { 0..0 } else { 0..descriptor.length() };
        Self {
            is_exhausted: !is_work_offer && descriptor.length() == 0,
            descriptor,
            sequence,
            window,
            issued_bytes: 0,
            in_flight: 0,
            done_bytes: 0,
            failure: None,
            difference: None,
            growth: [Self::FIRST_REGISTERED_BYTES; 2],
            ignores_registrations: false,
        }
    }

    /// Makes sure that there is something to issue, if anything is left: claims at most `max_bytes`
    /// of a work offer. `false` if nothing is left.
    pub(super) fn has_more(&mut self, max_bytes: u64) -> bool {
        if self.window.is_empty()
            && self.descriptor.scope() == DescriptorScope::WorkOffer
            && let Some(chunk) = self.descriptor.claim(max_bytes)
        {
            self.window = chunk.offset..chunk.offset + chunk.length;
        }
        self.is_exhausted = self.window.is_empty();
        !self.is_exhausted
    }

    /// The maximum length of the next copy: copies are enough to keep both directions busy, and
    /// long enough that issuing them costs little. The first ones are short, so that the second
    /// direction starts soon.
    pub(super) fn next_copy_bytes(&self) -> u64 {
        const MIN_BYTES: u64 = 512 << 10;
        const COPIES: u64 = 8;
        const FIRST: u64 = 8;
        const SHARED_COPIES: u64 = 32;
        const MAX_SHARED_BYTES: u64 = 8 << 20;
        const MIN_STAGED_BYTES: u64 = 256 << 10;
        const STAGED_COPIES: u64 = 32;
        /// About twice the number of channels that share it.
        const LAST_COPIES: u64 = 16;
        if self.descriptor.is_shared() {
            let shared_bytes = self.descriptor.length() / SHARED_COPIES;
            return shared_bytes.clamp(MIN_BYTES, MAX_SHARED_BYTES);
        }
        if self.descriptor.is_transient() {
            // Several channels share the transfer and should finish at the same time: copies become
            // short towards the end. They also start short, because the device waits for the first
            // copy of a channel into its staging buffers.
            let usual = self.descriptor.length() / STAGED_COPIES;
            let usual = usual.clamp(MIN_STAGED_BYTES, STAGING_BUFFER_BYTES);
            let left = self.descriptor.unclaimed_bytes() + (self.window.end - self.window.start);
            let fair = (left / LAST_COPIES).max(MIN_STAGED_BYTES);
            return self.issued_bytes.clamp(MIN_STAGED_BYTES, usual).min(fair);
        }
        let usual = self.descriptor.length().div_ceil(COPIES).next_multiple_of(64 << 10);
        let usual = usual.clamp(MIN_BYTES, MAX_COPY_BYTES);
        (usual / FIRST).max(MIN_BYTES).max(self.issued_bytes).min(usual)
    }

    /// Whether enough copies are in flight: chunks that other engines could copy are not claimed
    /// early.
    pub(super) fn is_busy(&self) -> bool {
        const ENOUGH: usize = 5;
        self.descriptor.is_shared() && self.in_flight >= ENOUGH
    }

    /// Removes a copy from the front of the bytes that are not issued.
    pub(super) fn issue(&mut self, length: u64) -> Chunk {
        let chunk = Chunk { offset: self.window.start, length };
        self.window.start += length;
        self.issued_bytes += length;
        self.in_flight += 1;
        if self.window.is_empty() && self.descriptor.scope() != DescriptorScope::WorkOffer {
            self.is_exhausted = true;
        }
        chunk
    }

    /// Records the end of a copy. For a compare, the result is the offset in the copy of the first
    /// difference.
    pub(super) fn complete(&mut self, chunk: Chunk, result: Result<Option<u64>, ExecutionError>) {
        self.in_flight -= 1;
        // SAFETY: the chunk was claimed for this descriptor and ends once, when the device has
        // finished it.
        unsafe { self.descriptor.finish_claimed(chunk, result.clone()) };
        match result {
            Ok(difference) => {
                self.difference = self.difference.or(difference.map(|at| chunk.offset + at));
                self.done_bytes += if self.failure.is_none() { chunk.length } else { 0 };
            }
            Err(error) => {
                self.failure.get_or_insert(error);
            }
        }
    }

    /// Whether everything is complete.
    pub(super) fn is_done(&self) -> bool {
        self.is_exhausted && self.in_flight == 0
    }

    /// The result, with the number of finished bytes.
    pub(super) fn outcome(&self) -> Result<Option<u64>, ExecutionError> {
        match self.failure.clone() {
            None => Ok(self.difference),
            Some(ExecutionError::Engine { reason, .. }) => {
                Err(ExecutionError::Engine { done_bytes: self.done_bytes, reason })
            }
            Some(ExecutionError::BadMemory { address, .. }) => {
                Err(ExecutionError::BadMemory { address, done_bytes: self.done_bytes })
            }
            Some(other) => Err(other),
        }
    }
}

/// A copy that is in flight, or waits to be reported in order.
#[derive(Debug)]
pub(super) struct InFlightCopy {
    /// The sequence of its descriptor.
    pub(super) sequence: Sequence,
    pub(super) chunk: Chunk,
    pub(super) route: CopyRoute,
    /// The time at which the device should have finished it.
    pub(super) expected_ns: u64,
    /// The registrations of its source and target.
    pub(super) registrations: [Option<RegistrationRef>; 2],
}

impl InFlightCopy {
    /// Whether the worker copies it into or out of a staging buffer.
    pub(super) fn is_staged(&self) -> bool {
        matches!(self.route, CopyRoute::StagedIn { .. } | CopyRoute::StagedOut { .. })
    }
}

/// The route of a copy.
#[derive(Debug)]
pub(super) enum CopyRoute {
    /// One copy from or to registered memory, or inside the device.
    Direct { end: CudaEvent },
    /// Through a staging buffer of the device.
    ThroughDevice { slot: u64, middle: CudaEvent, end: CudaEvent },
    /// From a host staging buffer that the worker has filled.
    StagedIn { slot: u64, end: CudaEvent },
    /// Into a host staging buffer that the worker copies out.
    StagedOut { slot: u64, end: CudaEvent },
    /// Complete.
    Done(Result<Option<u64>, ExecutionError>),
}
