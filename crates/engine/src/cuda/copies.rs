//! Issuing a copy: the choice of its route, and the routes.

use memferry_memory::pinning::Access;
use memferry_memory::registration::RegistrationError;
use memferry_sys::cuda::{CudaEvent, DriverError, MemcpyKind, code};

use super::channel::{CudaWorker, IssueResult, STAGING_BUFFER_BYTES, failed};
use super::host_staging::StagingAlloc;
use super::in_flight::CopyRoute;
use crate::Kernel;
use crate::contract::{CopyDirection, MemoryKind, Opcode};
use crate::runtime::execute::{self, Operands};

impl CudaWorker {
    /// Issues a copy of the newest descriptor.
    pub(super) fn issue_copy(&mut self) -> IssueResult {
        let Some(active) = self.active.back_mut() else { return IssueResult::Exhausted };
        let descriptor = &active.descriptor;
        let (operation, kinds) = (descriptor.operation(), descriptor.memory_kinds());
        let max_bytes = active.next_copy_bytes();
        if !active.is_exhausted && active.is_busy() {
            return IssueResult::NoBuffer;
        }
        if active.is_exhausted || !active.has_more(max_bytes) {
            return IssueResult::Exhausted;
        }
        if self.device.is_lost() {
            return self.complete_unissued(u64::MAX, Err(failed("the GPU is lost")));
        }
        use MemoryKind::{Device, Host};
        match (operation, kinds) {
            (Opcode::Copy, (Host, Device)) => self.issue_to_device(max_bytes),
            (Opcode::Copy, (Device, Host)) => self.issue_from_device(max_bytes),
            (Opcode::Copy, (Device, Device)) => self.issue_within_device(),
            (Opcode::Copy, (Host, Host)) => self.issue_through_device(max_bytes),
            (Opcode::Fill, (_, Device)) => self.issue_fill(),
            (Opcode::Fill, (_, Host)) => self.issue_fill_from_device(max_bytes),
            (Opcode::Move, (Device, Device)) => self.issue_move(),
            (Opcode::Move | Opcode::Compare, (Host, Host)) => self.run_inline(u64::MAX),
            // Memory of two kinds never overlaps.
            (Opcode::Move, _) => self.complete_unissued(
                u64::MAX,
                Err(failed("a move needs source and target in one kind of memory")),
            ),
            (Opcode::Compare, _) => self.compare(),
            // Not among the capabilities: the processor executes them where it can.
            (Opcode::Crc | Opcode::CopyCrc | Opcode::Dualcast, _) => self.complete_unissued(
                u64::MAX,
                Err(failed("the GPU engine does not support this operation")),
            ),
        }
    }

    /// Copies from host memory to the device.
    pub(super) fn issue_to_device(&mut self, max_bytes: u64) -> IssueResult {
        let (source, target) = self.addresses();
        let (lease, length) = match self.acquire_registration(0, source, max_bytes, Access::Read) {
            Ok(registered) => registered,
            Err(RegistrationError::Unmapped { address }) => return self.fail_unmapped(address),
            Err(RegistrationError::Refused) => {
                return self.issue_staged_to_device(source, target, max_bytes);
            }
        };
        let expected_ns = self.expected_completion_ns(0, CopyDirection::HOST_TO_DEVICE, length);
        let stream = self.to_device;
        // SAFETY: the creator of the descriptor guarantees its memory until it is reported, which
        // happens after the event; the lease keeps this range registered, in one registration.
        match unsafe { self.copy(MemcpyKind::HostToDevice, source, target, length, stream) } {
            Err(error) if error.code == code::INVALID_VALUE => self.retry_unregistered(),
            copied => {
                let route = copied.map(|end| CopyRoute::Direct { end });
                self.record_issue(length, route, expected_ns, [Some(lease), None])
            }
        }
    }

    /// Copies from host memory to the device through a host staging buffer.
    pub(super) fn issue_staged_to_device(
        &mut self,
        source: u64,
        target: u64,
        max_bytes: u64,
    ) -> IssueResult {
        let length = self.remaining_bytes().min(max_bytes).min(STAGING_BUFFER_BYTES);
        let slot = match self.host_staging.allocate() {
            StagingAlloc::Buffer(slot) => slot,
            StagingAlloc::Busy => return IssueResult::NoBuffer,
            StagingAlloc::Unavailable => return self.copy_sync(MemcpyKind::HostToDevice),
        };
        // SAFETY: the creator guarantees the source, and the staging buffer is allocated and large
        // enough.
        unsafe {
            execute::run(Opcode::Copy, Kernel::Cached, Operands::new(source, slot), length, 0)
        };
        let expected_ns = self.expected_completion_ns(0, CopyDirection::HOST_TO_DEVICE, length);
        let stream = self.to_device;
        // SAFETY: the creator guarantees the target, and the staging buffer stays allocated, until
        // the event.
        let copied = unsafe { self.copy(MemcpyKind::HostToDevice, slot, target, length, stream) };
        if copied.is_err() {
            self.host_staging.free(slot);
        }
        let route = copied.map(|end| CopyRoute::StagedIn { slot, end });
        self.record_issue(length, route, expected_ns, [None, None])
    }

    /// Copies from the device to host memory.
    pub(super) fn issue_from_device(&mut self, max_bytes: u64) -> IssueResult {
        let (source, target) = self.addresses();
        let (lease, length) = match self.acquire_registration(1, target, max_bytes, Access::Write) {
            Ok(registered) => registered,
            Err(RegistrationError::Unmapped { address }) => return self.fail_unmapped(address),
            Err(RegistrationError::Refused) => {
                return self.issue_staged_from_device(source, max_bytes);
            }
        };
        let expected_ns = self.expected_completion_ns(1, CopyDirection::DEVICE_TO_HOST, length);
        let stream = self.from_device;
        // SAFETY: as in `issue_to_device`.
        match unsafe { self.copy(MemcpyKind::DeviceToHost, source, target, length, stream) } {
            Err(error) if error.code == code::INVALID_VALUE => self.retry_unregistered(),
            copied => {
                let route = copied.map(|end| CopyRoute::Direct { end });
                self.record_issue(length, route, expected_ns, [None, Some(lease)])
            }
        }
    }

    /// Copies from the device to host memory through a host staging buffer; `finish` copies it out.
    pub(super) fn issue_staged_from_device(&mut self, source: u64, max_bytes: u64) -> IssueResult {
        let length = self.remaining_bytes().min(max_bytes).min(STAGING_BUFFER_BYTES);
        let slot = match self.host_staging.allocate() {
            StagingAlloc::Buffer(slot) => slot,
            StagingAlloc::Busy => return IssueResult::NoBuffer,
            StagingAlloc::Unavailable => return self.copy_sync(MemcpyKind::DeviceToHost),
        };
        let expected_ns = self.expected_completion_ns(1, CopyDirection::DEVICE_TO_HOST, length);
        let stream = self.from_device;
        // SAFETY: the creator guarantees the source, and the staging buffer stays allocated, until
        // the event.
        let copied = unsafe { self.copy(MemcpyKind::DeviceToHost, source, slot, length, stream) };
        if copied.is_err() {
            self.host_staging.free(slot);
        }
        let route = copied.map(|end| CopyRoute::StagedOut { slot, end });
        self.record_issue(length, route, expected_ns, [None, None])
    }

    /// Copies inside the device.
    pub(super) fn issue_within_device(&mut self) -> IssueResult {
        let ((source, target), length) = (self.addresses(), self.remaining_bytes());
        let direction = CopyDirection::DEVICE_TO_DEVICE;
        let (stream, expected_ns) =
            (self.to_device, self.expected_completion_ns(0, direction, length));
        // SAFETY: the creator guarantees the memory until the descriptor is reported, after the
        // event.
        let copied =
            unsafe { self.copy(MemcpyKind::DeviceToDevice, source, target, length, stream) };
        let route = copied.map(|end| CopyRoute::Direct { end });
        self.record_issue(length, route, expected_ns, [None, None])
    }

    /// Copies from host memory to host memory: in by one stream, out by the other.
    pub(super) fn issue_through_device(&mut self, max_bytes: u64) -> IssueResult {
        let (source, target) = self.addresses();
        let sides = self.acquire_registration(0, source, max_bytes, Access::Read).and_then(
            |(from, length)| {
                let (to, length) = self.acquire_registration(1, target, length, Access::Write)?;
                Ok((from, to, length))
            },
        );
        let (from, to, length) = match sides {
            Ok(sides) => sides,
            Err(RegistrationError::Unmapped { address }) => return self.fail_unmapped(address),
            // Two copies through host staging buffers are more work than the copy itself.
            Err(RegistrationError::Refused) => return self.run_inline(STAGING_BUFFER_BYTES),
        };
        let slot = match self.device_staging.allocate(length) {
            StagingAlloc::Buffer(slot) => slot,
            StagingAlloc::Busy => return IssueResult::NoBuffer,
            StagingAlloc::Unavailable => return self.run_inline(STAGING_BUFFER_BYTES),
        };
        let in_ns = self.expected_completion_ns(0, CopyDirection::HOST_TO_DEVICE, length);
        self.busy_until_ns[1] = self.busy_until_ns[1].max(in_ns);
        let expected_ns = self.expected_completion_ns(1, CopyDirection::HOST_TO_HOST, length);
        // SAFETY: as in `issue_to_device`, for both sides; the staging buffer stays allocated until
        // the last event, and the second stream reads it after the first has written it.
        match unsafe { self.copy_through_device(source, slot, target, length) } {
            Ok((middle, end)) => {
                let route = Ok(CopyRoute::ThroughDevice { slot, middle, end });
                self.record_issue(length, route, expected_ns, [Some(from), Some(to)])
            }
            Err(error) => {
                // No copy of it is in flight any more.
                self.device_staging.free(slot);
                if error.code == code::INVALID_VALUE {
                    return self.retry_unregistered();
                }
                self.record_issue(length, Err(error), expected_ns, [Some(from), Some(to)])
            }
        }
    }

    /// # Safety
    /// As for [`CudaDriver::copy`](memferry_sys::cuda::CudaDriver::copy), for both halves.
    pub(super) unsafe fn copy_through_device(
        &mut self,
        source: u64,
        slot: u64,
        target: u64,
        length: u64,
    ) -> Result<(CudaEvent, CudaEvent), DriverError> {
        let (to_device, from_device) = (self.to_device, self.from_device);
        // SAFETY: the caller's guarantee.
        let middle =
            unsafe { self.copy(MemcpyKind::HostToDevice, source, slot, length, to_device) }?;
        let second = self.device.driver.stream_wait_event(from_device, middle).and_then(|()| {
            // SAFETY: the caller's guarantee.
            unsafe { self.copy(MemcpyKind::DeviceToHost, slot, target, length, from_device) }
        });
        match second {
            Ok(end) => Ok((middle, end)),
            Err(error) => {
                // The source must not be freed while the device reads it.
                self.device.driver.synchronize(to_device);
                self.events.push(middle);
                Err(error)
            }
        }
    }
}
