//! The steps of issuing a copy: registrations, copies with an event after them, expected times, and
//! copies without the device.

use memferry_memory::pinning::{Access, PageRange, PinError};
use memferry_memory::registration::{RegistrationError, RegistrationRef};
use memferry_sys::cuda::{CudaDriver, CudaEvent, CudaStream, DriverError, MemcpyKind, code};
use memferry_sys::sync::spin_hint;
use memferry_sys::{clock, residency};

use super::channel::{CudaWorker, IssueResult, MAX_COPY_BYTES, failed};
use super::in_flight::{CopyRoute, InFlightCopy};
use crate::Kernel;
use crate::contract::{CopyDirection, ExecutionError};
use crate::runtime::execute::{self, Operands};

impl CudaWorker {
    /// Executes on the processor what it can, in this call.
    pub(super) fn run_inline(&mut self, max_bytes: u64) -> IssueResult {
        let length = self.remaining_bytes().min(max_bytes);
        let (source, target) = self.addresses();
        let Some(active) = self.active.back() else { return IssueResult::Exhausted };
        let (operation, value) = (active.descriptor.operation(), active.descriptor.fill_value());
        // SAFETY: the creator guarantees the memory until the descriptor is reported, and it is
        // host memory.
        let difference = unsafe {
            execute::run(operation, Kernel::Cached, Operands::new(source, target), length, value)
        };
        self.complete_unissued(length, Ok(difference))
    }

    /// Copies unregistered memory by the driver's synchronous call, if there are no staging
    /// buffers.
    pub(super) fn copy_sync(&mut self, kind: MemcpyKind) -> IssueResult {
        let ((source, target), length) = (self.addresses(), self.remaining_bytes());
        let stream = match kind {
            MemcpyKind::DeviceToHost => self.from_device,
            _ => self.to_device,
        };
        // SAFETY: the creator guarantees the memory until the descriptor is reported.
        let copied =
            unsafe { copy_in_parts(&*self.device.driver, kind, (source, target), length, stream) };
        let result = copied.map(|()| None).map_err(|error| self.failure(error));
        self.complete_unissued(length, result)
    }

    /// Fails the rest of the claimed bytes: the memory is not mapped.
    pub(super) fn fail_unmapped(&mut self, address: u64) -> IssueResult {
        self.complete_unissued(u64::MAX, Err(ExecutionError::BadMemory { address, done_bytes: 0 }))
    }

    /// Retries without registrations after the driver rejected registered memory.
    pub(super) fn retry_unregistered(&mut self) -> IssueResult {
        match self.active.back_mut() {
            Some(active) if !active.ignores_registrations => {
                active.ignores_registrations = true;
                self.issue_copy()
            }
            _ => self.complete_unissued(u64::MAX, Err(failed("the driver rejects the addresses"))),
        }
    }

    /// The addresses at which the next copy starts.
    pub(super) fn addresses(&self) -> (u64, u64) {
        self.active.back().map_or((0, 0), |active| {
            let (descriptor, at) = (&active.descriptor, active.window.start);
            (descriptor.source().wrapping_add(at), descriptor.target().wrapping_add(at))
        })
    }

    /// The claimed bytes that are not issued.
    pub(super) fn remaining_bytes(&self) -> u64 {
        self.active.back().map_or(0, |active| active.window.end - active.window.start)
    }

    /// Finds the registration of one side of the next copy, or registers it if that is allowed;
    /// returns it with the length of the copy.
    pub(super) fn acquire_registration(
        &mut self,
        side: usize,
        address: u64,
        max_bytes: u64,
        access: Access,
    ) -> Result<(RegistrationRef, u64), RegistrationError> {
        let left = self.remaining_bytes().min(max_bytes).min(MAX_COPY_BYTES);
        let Some(active) = self.active.back_mut().filter(|active| !active.ignores_registrations)
        else {
            return Err(registration_error(address, left));
        };
        let registrations = &self.device.registrations;
        let registration = match registrations.find(address, access) {
            Some(registration) => registration,
            None if active.descriptor.is_transient() => {
                return Err(registration_error(address, left));
            }
            None if registrations.may_acquire(address, left) => {
                let length = left.min(active.growth[side]);
                active.growth[side] = (2 * active.growth[side]).min(MAX_COPY_BYTES);
                let acquired = registrations.acquire(address, length, access);
                RegistrationRef::Lease(acquired.map_err(|error| match error {
                    PinError::BadMemory { range } => {
                        RegistrationError::Unmapped { address: address.max(range.start() as u64) }
                    }
                    _ => registration_error(address, left),
                })?)
            }
            // If the range spans several registrations, the driver rejects the copy, and it is
            // retried without.
            None if registrations.is_registered_by_others(address, left) => {
                return Ok((RegistrationRef::Foreign, left));
            }
            None => return Err(registration_error(address, left)),
        };
        let end = match &registration {
            RegistrationRef::Region(region) => region.end() as u64,
            RegistrationRef::Lease(lease) => {
                let registered = lease.range().end() as u64;
                self.device.pinner.registration_end(address).unwrap_or(address).min(registered)
            }
            RegistrationRef::Foreign => address + left,
        };
        if end <= address {
            Err(registration_error(address, left))
        } else {
            Ok((registration, left.min(end - address)))
        }
    }

    /// Enqueues a copy and an event after it.
    ///
    /// # Safety
    /// As for [`CudaDriver::copy`](memferry_sys::cuda::CudaDriver::copy).
    pub(super) unsafe fn copy(
        &mut self,
        kind: MemcpyKind,
        source: u64,
        target: u64,
        length: u64,
        stream: CudaStream,
    ) -> Result<CudaEvent, DriverError> {
        // SAFETY: the caller's guarantee.
        unsafe { self.device.driver.copy(kind, source, target, length as usize, stream) }?;
        self.record_event(stream)
    }

    /// Enqueues an event. Without an event the end of the stream's work would be unknown: after a
    /// failure this call drains the stream and returns the error.
    pub(super) fn record_event(&mut self, stream: CudaStream) -> Result<CudaEvent, DriverError> {
        let driver = &self.device.driver;
        let event = match self.events.pop().map_or_else(|| driver.create_event(), Ok) {
            Ok(event) => event,
            Err(error) => {
                driver.synchronize(stream);
                return Err(error);
            }
        };
        match driver.record_event(event, stream) {
            Ok(()) => Ok(event),
            Err(error) => {
                driver.synchronize(stream);
                self.events.push(event);
                Err(error)
            }
        }
    }

    /// Spins until the device has reached an event.
    pub(super) fn wait_for(&self, event: CudaEvent) -> Result<(), DriverError> {
        while !self.device.driver.is_complete(event)? {
            spin_hint();
        }
        Ok(())
    }

    /// The time at which a stream should have finished `length` more bytes.
    pub(super) fn expected_completion_ns(
        &mut self,
        stream: usize,
        direction: CopyDirection,
        length: u64,
    ) -> u64 {
        let (profile, line) = (&self.device.profile, self.device.profile.cost(direction));
        let busy = &mut self.busy_until_ns[stream];
        let start = (*busy).max(clock::now_ns() + profile.startup_ns as u64);
        *busy = start + (line.ns_per_byte * length as f64) as u64;
        *busy
    }

    /// Records a copy that was enqueued, or its error.
    pub(super) fn record_issue(
        &mut self,
        length: u64,
        route: Result<CopyRoute, DriverError>,
        expected_ns: u64,
        registrations: [Option<RegistrationRef>; 2],
    ) -> IssueResult {
        let route = route.unwrap_or_else(|error| CopyRoute::Done(Err(self.failure(error))));
        let Some(active) = self.active.back_mut() else { return IssueResult::Exhausted };
        let (sequence, chunk) = (active.sequence, active.issue(length));
        self.in_flight.push_back(InFlightCopy {
            sequence,
            chunk,
            route,
            expected_ns,
            registrations,
        });
        IssueResult::Issued
    }

    /// Records at most `max_bytes` as complete without the device.
    pub(super) fn complete_unissued(
        &mut self,
        max_bytes: u64,
        result: Result<Option<u64>, ExecutionError>,
    ) -> IssueResult {
        let length = self.remaining_bytes().min(max_bytes);
        let Some(active) = self.active.back_mut() else { return IssueResult::Exhausted };
        let (sequence, chunk) = (active.sequence, active.issue(length));
        let (route, registrations) = (CopyRoute::Done(result), [None, None]);
        self.in_flight.push_back(InFlightCopy {
            sequence,
            chunk,
            route,
            expected_ns: 0,
            registrations,
        });
        IssueResult::Issued
    }

    /// Records an error of the driver, and converts it into the error of a copy.
    pub(super) fn failure(&self, error: DriverError) -> ExecutionError {
        self.device.record_error(error);
        failed(error.description())
    }
}

/// Copies synchronously, in halves if the driver rejects the whole range because it crosses the
/// edge of a registration. A range that is rejected down to one byte is not mapped.
///
/// # Safety
/// As for [`CudaDriver::copy_sync`].
unsafe fn copy_in_parts(
    driver: &dyn CudaDriver,
    kind: MemcpyKind,
    (source, target): (u64, u64),
    length: u64,
    stream: CudaStream,
) -> Result<(), DriverError> {
    // SAFETY: the caller's guarantee.
    match unsafe { driver.copy_sync(kind, source, target, length as usize, stream) } {
        Err(error) if error.code == code::INVALID_VALUE && length > 1 => {
            let half = length / 2;
            // SAFETY: the caller's guarantee, for both parts.
            unsafe {
                copy_in_parts(driver, kind, (source, target), half, stream)?;
                let rest = (source + half, target + half);
                copy_in_parts(driver, kind, rest, length - half, stream)
            }
        }
        copied => copied,
    }
}

/// The reason why memory is not registered, if the pinner reported none. The worker copies the
/// memory next: an unmapped range must become an error, not a crash.
fn registration_error(address: u64, length: u64) -> RegistrationError {
    let is_mapped = PageRange::covering(address as usize, length as usize)
        .is_ok_and(|range| residency::is_mapped(range.start(), range.bytes()));
    if is_mapped { RegistrationError::Refused } else { RegistrationError::Unmapped { address } }
}
