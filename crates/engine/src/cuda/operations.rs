//! Fills, moves and compares that involve the device or its memory.

use memferry_memory::pinning::Access;
use memferry_memory::registration::RegistrationError;
use memferry_sys::cuda::{DriverError, MemcpyKind};

use super::channel::{CudaWorker, IssueResult, MAX_COPY_BYTES, STAGING_BUFFER_BYTES, failed};
use super::host_staging::StagingAlloc;
use super::in_flight::CopyRoute;
use crate::Kernel;
use crate::contract::{CopyDirection, MemoryKind, Opcode};
use crate::runtime::execute::{self, Operands};

impl CudaWorker {
    /// Fills device memory.
    pub(super) fn issue_fill(&mut self) -> IssueResult {
        let ((_, target), length) = (self.addresses(), self.remaining_bytes());
        let Some(value) = self.active.back().map(|active| active.descriptor.fill_value()) else {
            return IssueResult::Exhausted;
        };
        let direction = CopyDirection::DEVICE_TO_DEVICE;
        let (stream, expected_ns) =
            (self.to_device, self.expected_completion_ns(0, direction, length));
        // SAFETY: the creator guarantees the memory until the descriptor is reported, after the
        // event.
        let filled = unsafe { self.device.driver.fill(target, value, length as usize, stream) }
            .and_then(|()| self.record_event(stream));
        let route = filled.map(|end| CopyRoute::Direct { end });
        self.record_issue(length, route, expected_ns, [None, None])
    }

    /// Fills host memory, from a staging buffer that the device has filled.
    pub(super) fn issue_fill_from_device(&mut self, max_bytes: u64) -> IssueResult {
        let (_, target) = self.addresses();
        let Some(value) = self.active.back().map(|active| active.descriptor.fill_value()) else {
            return IssueResult::Exhausted;
        };
        let (lease, length) = match self.acquire_registration(1, target, max_bytes, Access::Write) {
            Ok(registered) => registered,
            Err(RegistrationError::Unmapped { address }) => return self.fail_unmapped(address),
            Err(RegistrationError::Refused) => return self.run_inline(STAGING_BUFFER_BYTES),
        };
        let slot = match self.device_staging.allocate(length) {
            StagingAlloc::Buffer(slot) => slot,
            StagingAlloc::Busy => return IssueResult::NoBuffer,
            StagingAlloc::Unavailable => return self.run_inline(STAGING_BUFFER_BYTES),
        };
        let expected_ns = self.expected_completion_ns(1, CopyDirection::DEVICE_TO_HOST, length);
        let stream = self.from_device;
        // SAFETY: the staging buffer is allocated until the event, and large enough; the target as
        // above.
        let filled = unsafe {
            let set = self.device.driver.fill(slot, value, length as usize, stream);
            set.and_then(|()| self.copy(MemcpyKind::DeviceToHost, slot, target, length, stream))
        };
        match filled {
            Ok(end) => {
                let middle = end;
                let route = Ok(CopyRoute::ThroughDevice { slot, middle, end });
                self.record_issue(length, route, expected_ns, [None, Some(lease)])
            }
            Err(error) => {
                // The fill of the staging buffer may be in flight, and the other stream may write
                // the buffer next.
                self.device.driver.synchronize(stream);
                self.device_staging.free(slot);
                self.record_issue(length, Err(error), expected_ns, [None, Some(lease)])
            }
        }
    }

    /// Moves between overlapping ranges of the device: in several copies through one staging
    /// buffer, in one stream, starting at the end where no unread source is overwritten.
    pub(super) fn issue_move(&mut self) -> IssueResult {
        let ((source, target), length) = (self.addresses(), self.remaining_bytes());
        let slot = match self.device_staging.allocate(length.min(MAX_COPY_BYTES)) {
            StagingAlloc::Buffer(slot) => slot,
            StagingAlloc::Busy => return IssueResult::NoBuffer,
            StagingAlloc::Unavailable => {
                return self.complete_unissued(
                    u64::MAX,
                    Err(failed("no device memory for the staging ring")),
                );
            }
        };
        let direction = CopyDirection::DEVICE_TO_DEVICE;
        let (stream, expected_ns) =
            (self.to_device, self.expected_completion_ns(0, direction, 2 * length));
        let count = length.div_ceil(MAX_COPY_BYTES);
        let moved = (0..count).try_for_each(|step| {
            let index = if target < source { step } else { count - 1 - step };
            let at = index * MAX_COPY_BYTES;
            let bytes = (length - at).min(MAX_COPY_BYTES) as usize;
            let driver = &self.device.driver;
            // SAFETY: the creator guarantees the memory, and the staging buffer is allocated, until
            // the event; the stream keeps the order.
            unsafe {
                driver.copy(MemcpyKind::DeviceToDevice, source + at, slot, bytes, stream)?;
                driver.copy(MemcpyKind::DeviceToDevice, slot, target + at, bytes, stream)
            }
        });
        match moved.and_then(|()| self.record_event(stream)) {
            Ok(end) => {
                let route = Ok(CopyRoute::ThroughDevice { slot, middle: end, end });
                self.record_issue(length, route, expected_ns, [None, None])
            }
            Err(error) => {
                // A part may be in flight.
                self.device.driver.synchronize(stream);
                self.device_staging.free(slot);
                self.record_issue(length, Err(error), expected_ns, [None, None])
            }
        }
    }

    /// Compares memory of which at least one side is device memory: copies it into staging buffers,
    /// part by part, and compares on the processor. Returns when the compare is complete.
    pub(super) fn compare(&mut self) -> IssueResult {
        let ((left, right), length) = (self.addresses(), self.remaining_bytes());
        let kinds = self.active.back().map(|active| active.descriptor.memory_kinds());
        let Some((left_kind, right_kind)) = kinds else { return IssueResult::Exhausted };
        let slots = [self.host_staging.allocate(), self.host_staging.allocate()];
        let [StagingAlloc::Buffer(first), StagingAlloc::Buffer(second)] = slots else {
            slots.into_iter().for_each(|slot_alloc| {
                if let StagingAlloc::Buffer(slot) = slot_alloc {
                    self.host_staging.free(slot);
                }
            });
            if slots.contains(&StagingAlloc::Busy) && !slots.contains(&StagingAlloc::Unavailable) {
                return IssueResult::NoBuffer;
            }
            return self
                .complete_unissued(u64::MAX, Err(failed("no pinned memory for staging buffers")));
        };
        let (mut at, mut outcome) = (0, Ok(None));
        while at < length && outcome == Ok(None) {
            let bytes = (length - at).min(STAGING_BUFFER_BYTES);
            let sides =
                self.stage_for_compare(left + at, left_kind, first, bytes).and_then(|left| {
                    Ok((left, self.stage_for_compare(right + at, right_kind, second, bytes)?))
                });
            outcome = sides.map(|(left, right)| {
                // SAFETY: both are host memory of this length: a staging buffer, or guaranteed by
                // the creator.
                let found = unsafe {
                    execute::run(
                        Opcode::Compare,
                        Kernel::Cached,
                        Operands::new(left, right),
                        bytes,
                        0,
                    )
                };
                found.map(|difference| at + difference)
            });
            at += bytes;
        }
        self.host_staging.free(first);
        self.host_staging.free(second);
        let result = outcome.map_err(|error| self.failure(error));
        self.complete_unissued(u64::MAX, result)
    }

    /// The host address of the bytes: their own, or that of a staging buffer that they are copied
    /// to.
    pub(super) fn stage_for_compare(
        &mut self,
        address: u64,
        kind: MemoryKind,
        slot: u64,
        bytes: u64,
    ) -> Result<u64, DriverError> {
        if kind == MemoryKind::Host {
            return Ok(address);
        }
        let stream = self.from_device;
        // SAFETY: the creator guarantees the memory, the staging buffer is allocated, and this
        // thread waits for the event.
        let end = unsafe { self.copy(MemcpyKind::DeviceToHost, address, slot, bytes, stream) }?;
        let reached = self.wait_for(end).inspect_err(|_| self.device.driver.synchronize(stream));
        self.events.push(end);
        reached.map(|()| slot)
    }
}
