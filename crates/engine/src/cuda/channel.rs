//! The worker thread of a channel: cuts descriptors into copies, keeps the device busy with them,
//! and reports completed descriptors in order.

use std::collections::VecDeque;
use std::sync::Arc;

use memferry_sys::clock;
use memferry_sys::cuda::{CudaEvent, CudaStream, DriverError};

use super::CudaContext;
use super::device_staging::DeviceStagingRing;
use super::host_staging::HostStagingPool;
use super::in_flight::{ActiveDescriptor, CopyRoute, InFlightCopy};
use crate::contract::{
    ChannelOptions, DescriptorScope, ExecutionError, Opcode, OpenError, Sequence,
};
use crate::runtime::execute::{self, Operands};
use crate::runtime::threaded::{ChannelShared, ThreadedChannel};
use crate::runtime::wake_chain::ChainedParker;

/// The maximum number of copies in flight: enough that the device does not run out of work while
/// the worker sleeps.
pub(super) const MAX_IN_FLIGHT: usize = 16;
/// The maximum length of a copy in bytes.
pub(super) const MAX_COPY_BYTES: u64 = 32 << 20;
/// The size of the staging ring on the device, for copies between host memory.
const DEVICE_STAGING_BYTES: u64 = 4 * MAX_COPY_BYTES;
/// The size of a host staging buffer: each copy costs the device a few microseconds, and small
/// buffers stay in the cache.
pub(super) const STAGING_BUFFER_BYTES: u64 = 2 << 20;
const STAGING_BUFFERS: usize = 3;

/// Opens a channel.
pub(super) fn open(
    device: &Arc<CudaContext>,
    options: &ChannelOptions,
    default_capacity: usize,
) -> Result<ThreadedChannel, OpenError> {
    let device = device.clone();
    let idle = ChainedParker::alone();
    ThreadedChannel::open("cuda", options, default_capacity, None, false, idle, move |shared| {
        let open_error = |error: DriverError| {
            let reason = format!("no stream could be opened: {error}");
            OpenError::System { engine: "cuda".into(), reason }
        };
        clock::minimize_timer_slack();
        let worker = CudaWorker::new(shared, device).map_err(open_error)?;
        Ok(move || worker.run())
    })
}

/// The worker thread of a channel.
pub(super) struct CudaWorker {
    pub(super) shared: Arc<ChannelShared>,
    pub(super) device: Arc<CudaContext>,
    /// The stream for copies to the device and inside it.
    pub(super) to_device: CudaStream,
    /// The stream for copies from the device.
    pub(super) from_device: CudaStream,
    pub(super) events: Vec<CudaEvent>,
    pub(super) device_staging: DeviceStagingRing,
    pub(super) host_staging: HostStagingPool,
    /// Descriptors that were taken and are not complete, in order.
    pub(super) active: VecDeque<ActiveDescriptor>,
    /// Copies that were issued and are not complete, in order.
    pub(super) in_flight: VecDeque<InFlightCopy>,
    pub(super) taken: Sequence,
    /// The time at which each stream should have finished its copies.
    pub(super) busy_until_ns: [u64; 2],
    /// The recent delay of the device against the expected times, in nanoseconds.
    pub(super) lag_ns: u64,
    /// The device exceeded even that delay, and was polled again.
    pub(super) was_late: bool,
}

/// The result of issuing a copy.
pub(super) enum IssueResult {
    /// The copy is in flight.
    Issued,
    /// Nothing is left of the descriptor.
    Exhausted,
    /// No staging buffer is free.
    NoBuffer,
}

impl CudaWorker {
    fn new(shared: Arc<ChannelShared>, device: Arc<CudaContext>) -> Result<Self, DriverError> {
        let driver = &device.driver;
        driver.make_current()?;
        let to_device = driver.create_stream()?;
        let from_device =
            driver.create_stream().inspect_err(|_| driver.destroy_stream(to_device))?;
        let device_staging = DeviceStagingRing::new(driver.clone(), DEVICE_STAGING_BYTES);
        let mut host_staging =
            HostStagingPool::new(driver.clone(), STAGING_BUFFER_BYTES as usize, STAGING_BUFFERS);
        host_staging.prepare();
        Ok(Self {
            shared,
            to_device,
            from_device,
            events: Vec::new(),
            device_staging,
            host_staging,
            device,
            active: VecDeque::new(),
            in_flight: VecDeque::new(),
            taken: 0,
            busy_until_ns: [0; 2],
            lag_ns: 0,
            was_late: false,
        })
    }

    fn run(mut self) {
        loop {
            let mut has_space = true;
            let mut moved = false;
            while has_space {
                has_space = match self.issue_next() {
                    IssueResult::Issued => true,
                    IssueResult::Exhausted | IssueResult::NoBuffer => false,
                };
                moved |= has_space;
                moved |= self.report();
            }
            if moved {
                continue;
            }
            self.shared.notify_waiters(self.shared.ring.completed());
            if !self.in_flight.is_empty() {
                self.wait_for_device();
            } else if !self.wait_for_work() {
                return;
            }
        }
    }

    /// Issues the next copy of the newest descriptor, or of the next one in the ring.
    fn issue_next(&mut self) -> IssueResult {
        if self.in_flight.len() >= MAX_IN_FLIGHT {
            return IssueResult::NoBuffer;
        }
        loop {
            if self.active.back().is_none_or(|active| active.is_exhausted) && !self.take() {
                return IssueResult::Exhausted;
            }
            match self.issue_copy() {
                IssueResult::Exhausted => self.report(),
                other => return other,
            };
        }
    }

    /// Takes the next descriptor from the ring, if there is one.
    fn take(&mut self) -> bool {
        // SAFETY: this thread is the only consumer, and counts what it takes.
        let Some(descriptor) = (unsafe { self.shared.ring.take(self.taken) }) else {
            return false;
        };
        self.taken += 1;
        let is_cancelled =
            descriptor.scope() != DescriptorScope::WorkOffer && descriptor.is_cancelled();
        let mut active = ActiveDescriptor::new(descriptor, self.taken);
        if is_cancelled {
            active.failure = Some(ExecutionError::Cancelled { done_bytes: 0 });
            (active.window, active.is_exhausted) = (0..0, true);
        }
        self.active.push_back(active);
        true
    }

    /// Reports everything that is complete, in order; returns whether anything was.
    fn report(&mut self) -> bool {
        let mut moved = false;
        while let Some(copy) = self.in_flight.front() {
            if self.is_too_early(copy) {
                break;
            }
            let result = match &copy.route {
                CopyRoute::Done(result) => result.clone(),
                CopyRoute::Direct { end }
                | CopyRoute::ThroughDevice { end, .. }
                | CopyRoute::StagedIn { end, .. }
                | CopyRoute::StagedOut { end, .. } => match self.device.driver.is_complete(*end) {
                    Ok(false) => break,
                    Ok(true) => Ok(None),
                    Err(error) => {
                        // The device must not write to the memory any more when its owner is
                        // notified.
                        self.device.driver.synchronize(self.to_device);
                        self.device.driver.synchronize(self.from_device);
                        Err(self.failure(error))
                    }
                },
            };
            if let Some(copy) = self.in_flight.pop_front() {
                self.update_lag(&copy);
                self.finish(copy, result);
                moved = true;
            }
        }
        moved | self.complete()
    }

    /// Finishes a copy.
    fn finish(&mut self, copy: InFlightCopy, result: Result<Option<u64>, ExecutionError>) {
        let InFlightCopy { sequence, chunk, route, registrations, .. } = copy;
        let first = self.active.front().map_or(sequence, |active| active.sequence);
        let Some(active) = self.active.get_mut((sequence - first) as usize) else { return };
        match route {
            CopyRoute::Done(_) => {}
            CopyRoute::Direct { end } => self.events.push(end),
            CopyRoute::ThroughDevice { slot, middle, end } => {
                self.device_staging.free(slot);
                self.events.push(end);
                if middle != end {
                    self.events.push(middle);
                }
            }
            CopyRoute::StagedIn { slot, end } => {
                self.host_staging.free(slot);
                self.events.push(end);
            }
            CopyRoute::StagedOut { slot, end } => {
                if result.is_ok() {
                    let target = active.descriptor.target().wrapping_add(chunk.offset);
                    let kernel = active.descriptor.processor_kernel();
                    // SAFETY: the creator guarantees the target until the descriptor is reported,
                    // and the device has written the staging buffer.
                    unsafe {
                        execute::run(
                            Opcode::Copy,
                            kernel,
                            Operands::new(slot, target),
                            chunk.length,
                            0,
                        )
                    };
                }
                self.host_staging.free(slot);
                self.events.push(end);
            }
        }
        // Released before the report: the owner may unmap the memory at once after it.
        drop(registrations);
        if result.is_ok() {
            self.shared.count_moved(chunk.length);
        }
        active.complete(chunk, result);
    }

    /// Reports complete descriptors; returns whether there were any.
    fn complete(&mut self) -> bool {
        let mut moved = false;
        while self.active.front().is_some_and(ActiveDescriptor::is_done)
            && let Some(descriptor_state) = self.active.pop_front()
        {
            let (sequence, bytes) =
                (descriptor_state.sequence, descriptor_state.descriptor.length());
            let outcome = descriptor_state.outcome();
            if let Err(error) = &outcome {
                self.shared.count_failure(sequence, error.clone());
            }
            descriptor_state.descriptor.finish(outcome);
            // SAFETY: this thread is the channel's worker, everything before it is complete, and
            // the descriptor is dropped.
            unsafe { self.shared.complete(sequence, bytes) };
            moved = true;
        }
        moved
    }
}

impl Drop for CudaWorker {
    fn drop(&mut self) {
        let driver = &self.device.driver;
        self.events.iter().for_each(|event| driver.destroy_event(*event));
        driver.destroy_stream(self.to_device);
        driver.destroy_stream(self.from_device);
    }
}

pub(super) fn failed(reason: &'static str) -> ExecutionError {
    ExecutionError::Engine { done_bytes: 0, reason }
}
