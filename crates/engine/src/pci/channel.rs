//! A channel around a hardware queue.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use memferry_sys::sync::{Mutex, lock, thread};

use super::hardware::{HardwareQueue, HwStatus, PostResult};
use crate::contract::{
    Channel, ChannelStatistics, Descriptor, ExecutionError, NotificationWrite, Sequence,
    SubmitError, Submitted,
};
use crate::runtime::FailureLog;

/// The channel. Any thread may poll it; one thread at a time makes progress.
#[derive(Debug)]
pub struct DeviceChannel {
    queue: Mutex<PciQueue>,
    capacity: usize,
}

#[derive(Debug)]
struct PciQueue {
    /// `None` after a panic in the driver.
    hardware: Option<Box<dyn HardwareQueue>>,
    /// Accepted descriptors that are not finished, in order: first those that the hardware has or
    /// had, then the pending ones.
    entries: VecDeque<InFlightDescriptor>,
    /// The number of entries that the hardware has or has ended.
    posted: usize,
    /// A thread is finishing descriptors; nothing is posted until it is done.
    is_finishing: bool,
    closed: bool,
    /// The bytes of all entries and of descriptors that are being finished.
    outstanding_bytes: u64,
    failures: FailureLog,
    statistics: ChannelStatistics,
}

#[derive(Debug)]
struct InFlightDescriptor {
    descriptor: Descriptor,
    /// The final status, once it is known.
    end: Option<FinalStatus>,
}

/// The final status of an entry.
#[derive(Debug)]
enum FinalStatus {
    Hardware(HwStatus),
    Cancelled,
}

impl DeviceChannel {
    /// Creates a channel of at most `capacity` descriptors.
    pub fn new(hardware: Box<dyn HardwareQueue>, capacity: usize) -> Self {
        let queue = PciQueue {
            hardware: Some(hardware),
            entries: VecDeque::new(),
            posted: 0,
            is_finishing: false,
            closed: false,
            outstanding_bytes: 0,
            failures: FailureLog::default(),
            statistics: ChannelStatistics::default(),
        };
        Self { queue: Mutex::new(queue), capacity: capacity.max(1) }
    }

    /// Finishes completed descriptors; `false` if there are none, or another thread is finishing.
    fn step(&self) -> bool {
        let mut queue = lock(&self.queue);
        if queue.is_finishing {
            return false;
        }
        queue.progress();
        let finished = queue.drain_finished();
        if finished.is_empty() {
            return false;
        }
        queue.is_finishing = true;
        drop(queue);
        // Not under the lock: the end of a transfer may submit a dependent transfer to this
        // channel, and the processor executes failed descriptors here.
        let mut bytes = 0;
        let outcomes: Vec<_> = finished
            .into_iter()
            .map(|entry| {
                bytes += entry.descriptor.length();
                (entry.descriptor.length(), entry.finish())
            })
            .collect();
        let mut queue = lock(&self.queue);
        queue.outstanding_bytes -= bytes;
        for (bytes, outcome) in outcomes {
            queue.statistics.completed += 1;
            match outcome {
                Ok(()) => queue.statistics.bytes += bytes,
                Err(error) => {
                    queue.statistics.failed += 1;
                    let sequence = queue.statistics.completed;
                    queue.failures.push(sequence, error);
                }
            }
        }
        queue.is_finishing = false;
        queue.post();
        true
    }
}

impl PciQueue {
    /// Reads completions from the hardware, and posts more descriptors.
    fn progress(&mut self) {
        let mut ended = Vec::new();
        if self.call_driver(|hardware| hardware.poll_completions(&mut ended)).is_none() {
            return;
        }
        let mut in_flight = self.entries.iter_mut().take(self.posted).filter(|e| e.end.is_none());
        for end in ended {
            let entry = in_flight.next().expect("no more completions than were posted");
            entry.end = Some(FinalStatus::Hardware(end));
        }
        self.post();
    }

    /// Posts pending descriptors while there is space. After an entry that failed nothing is posted
    /// until it is finished: what is ordered after it, such as a notification write, must not
    /// overtake it.
    fn post(&mut self) {
        if self.is_finishing
            || self.entries.iter().take(self.posted).any(InFlightDescriptor::has_failed)
        {
            return;
        }
        let before = self.posted;
        while self.posted < self.entries.len() {
            let notification = self.notification_write_of(self.posted);
            let descriptor = &self.entries[self.posted].descriptor;
            let end = if descriptor.is_cancelled() {
                Some(FinalStatus::Cancelled)
            } else if descriptor.length() == 0 {
                Some(FinalStatus::Hardware(HwStatus::Ok))
            } else {
                let Some(hardware) = self.hardware.as_mut() else { return };
                let post = AssertUnwindSafe(|| hardware.post(descriptor, notification));
                match catch_unwind(post) {
                    Ok(PostResult::Accepted) => None,
                    Ok(PostResult::Full) => break,
                    Ok(PostResult::Completed(end)) => Some(FinalStatus::Hardware(end)),
                    Err(_) => return self.fail_hardware(),
                }
            };
            self.entries[self.posted].end = end;
            self.posted += 1;
            if self.entries[self.posted - 1].has_failed() {
                break;
            }
        }
        if self.posted > before {
            let _ = self.call_driver(|hardware| hardware.ring_doorbell());
        }
    }

    /// Calls the driver; `None` if the driver panics or has panicked before.
    fn call_driver<R>(&mut self, call: impl FnOnce(&mut dyn HardwareQueue) -> R) -> Option<R> {
        let hardware = self.hardware.as_mut()?;
        let result = catch_unwind(AssertUnwindSafe(|| call(&mut **hardware))).ok();
        if result.is_none() {
            self.fail_hardware();
        }
        result
    }

    /// After a panic in the driver: stops the device, leaves its descriptors to the processor, and
    /// closes the channel.
    fn fail_hardware(&mut self) {
        self.closed = true;
        let hardware = self.hardware.take();
        if catch_unwind(AssertUnwindSafe(|| drop(hardware))).is_err() {
            // The device may still write to memory that would be freed now.
            tracing::error!(
                "the driver of a device panicked, and panicked again while stopping the device"
            );
            std::process::abort();
        }
        tracing::error!("the driver of a device panicked: the processor finishes its descriptors");
        for entry in self.entries.iter_mut().filter(|entry| entry.end.is_none()) {
            entry.end =
                Some(FinalStatus::Hardware(HwStatus::Failed("the driver of the device panicked")));
        }
        self.posted = self.entries.len();
    }

    /// The notification write after an entry, if this channel may perform it.
    fn notification_write_of(&self, index: usize) -> Option<NotificationWrite> {
        let last = &self.entries[index].descriptor;
        last.notification_write(|| {
            let before = self.entries.iter().take(index).map(|entry| &entry.descriptor);
            before.filter(|other| other.is_of_same_transfer(last)).map(Descriptor::length).sum()
        })
    }

    /// Removes the oldest entries up to the first that is not complete.
    fn drain_finished(&mut self) -> Vec<InFlightDescriptor> {
        let finished =
            self.entries.iter().take(self.posted).take_while(|e| e.end.is_some()).count();
        self.posted -= finished;
        self.entries.drain(..finished).collect()
    }
}

impl InFlightDescriptor {
    fn has_failed(&self) -> bool {
        matches!(
            self.end,
            Some(FinalStatus::Hardware(HwStatus::Failed(_)) | FinalStatus::Cancelled)
        )
    }

    /// Reports the end; returns the error of a failed descriptor.
    fn finish(self) -> Result<(), ExecutionError> {
        let error = match self.end {
            Some(FinalStatus::Hardware(HwStatus::Ok)) => {
                self.descriptor.finish(Ok(None));
                return Ok(());
            }
            Some(FinalStatus::Hardware(HwStatus::OkNotified)) => {
                self.descriptor.finish_notified();
                return Ok(());
            }
            Some(FinalStatus::Cancelled) => ExecutionError::Cancelled { done_bytes: 0 },
            Some(FinalStatus::Hardware(HwStatus::Failed(reason))) => {
                ExecutionError::Engine { done_bytes: 0, reason }
            }
            None => unreachable!("only completed descriptors are finished"),
        };
        self.descriptor.finish(Err(error.clone()));
        Err(error)
    }
}

// SAFETY: descriptors are finished in order before their numbers are counted, and by the contract
// of `HardwareQueue` the device accesses none of them after its end.
unsafe impl Channel for DeviceChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
        let mut queue = lock(&self.queue);
        if queue.closed {
            return Err(SubmitError::Closed);
        }
        let first = queue.statistics.submitted + 1;
        let free = self.capacity.saturating_sub(queue.entries.len());
        let mut count = 0;
        for entry in batch.iter_mut().filter(|entry| entry.is_some()).take(free) {
            let descriptor = entry.take().expect("checked above");
            queue.outstanding_bytes += descriptor.length();
            queue.entries.push_back(InFlightDescriptor { descriptor, end: None });
            count += 1;
        }
        queue.statistics.submitted += count as u64;
        queue.statistics.full += u64::from(batch.iter().any(Option::is_some));
        queue.post();
        Ok(Submitted { first, count })
    }

    fn completed(&self) -> Sequence {
        lock(&self.queue).statistics.completed
    }

    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError> {
        lock(&self.queue).failures.find(sequence)
    }

    fn poll(&self) -> bool {
        self.step()
    }

    fn close(&self) {
        lock(&self.queue).closed = true;
    }

    fn outstanding_bytes(&self) -> u64 {
        lock(&self.queue).outstanding_bytes
    }

    fn statistics(&self) -> ChannelStatistics {
        lock(&self.queue).statistics
    }
}

impl Drop for DeviceChannel {
    fn drop(&mut self) {
        // No other thread is left; a step that unwound may have left this flag set.
        lock(&self.queue).is_finishing = false;
        // Drivers time out on a device that stops, so this loop ends.
        while !lock(&self.queue).entries.is_empty() {
            if !self.step() {
                thread::yield_now();
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::completion::Completion;
    use crate::contract::Opcode;

    /// Accepts everything, and panics when it is polled.
    #[derive(Debug)]
    struct PanickingHardware {
        is_stopped: Arc<AtomicBool>,
    }

    // SAFETY: it accesses no memory.
    unsafe impl HardwareQueue for PanickingHardware {
        fn post(&mut self, _: &Descriptor, _: Option<NotificationWrite>) -> PostResult {
            PostResult::Accepted
        }

        fn ring_doorbell(&mut self) {}

        fn poll_completions(&mut self, _: &mut Vec<HwStatus>) {
            std::panic::resume_unwind(Box::new("a driver that panics, on purpose"));
        }
    }

    impl Drop for PanickingHardware {
        fn drop(&mut self) {
            self.is_stopped.store(true, Ordering::SeqCst);
        }
    }

    #[test]
    fn after_a_panic_of_the_driver_the_device_is_stopped_and_the_processor_does_the_rest() {
        let is_stopped = Arc::new(AtomicBool::new(false));
        let hardware = Box::new(PanickingHardware { is_stopped: is_stopped.clone() });
        let channel = DeviceChannel::new(hardware, 4);
        let mut targets = [[0u8; 8]; 3];
        let completions = [(); 3].map(|()| Arc::new(Completion::whole()));
        let mut batch: Vec<_> = (targets.iter_mut().zip(&completions))
            .map(|(target, completion)| {
                let target = target.as_mut_ptr() as u64;
                // SAFETY: the targets outlive the channel; each completion has only this
                // descriptor.
                let fill = unsafe {
                    Descriptor::new(Opcode::Fill, 0, target, 8).completes(completion.clone())
                };
                Some(fill.value(7))
            })
            .collect();
        assert_eq!(channel.submit(&mut batch), Ok(Submitted { first: 1, count: 3 }));
        assert!(channel.poll());
        assert!(is_stopped.load(Ordering::SeqCst), "stopped before any memory is freed");
        assert!(completions.iter().all(|completion| matches!(completion.outcome(), Some(Ok(_)))));
        assert_eq!((channel.completed(), channel.statistics().failed), (3, 3));
        assert_eq!(channel.submit(&mut []), Err(SubmitError::Closed));
        assert_eq!(targets, [[7; 8]; 3]);
    }
}
