//! A channel around a queue of hardware.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use memferry_sys::sync::{Mutex, lock, thread};

use super::hardware::{Ended, Hardware, Posted};
use crate::contract::{
    Channel, ChannelStatistics, Descriptor, ExecutionError, FailureLog, Notice, Sequence,
    SubmitError, Taken, park_by_polling,
};

/// The channel. Any thread may poll it; one at a time does.
#[derive(Debug)]
pub struct DeviceChannel {
    queue: Mutex<Queue>,
    capacity: usize,
}

#[derive(Debug)]
struct Queue {
    /// Gone after a panic in its code.
    hardware: Option<Box<dyn Hardware>>,
    /// What was taken and is not over, in order: first what the hardware has or had, then the rest.
    entries: VecDeque<Entry>,
    /// How many entries the hardware has, or has ended.
    posted: usize,
    /// A thread is finishing descriptors: until it is done nothing is posted.
    is_finishing: bool,
    closed: bool,
    /// Bytes of all entries, and of descriptors that are being finished.
    outstanding_bytes: u64,
    failures: FailureLog,
    statistics: ChannelStatistics,
}

#[derive(Debug)]
struct Entry {
    descriptor: Descriptor,
    /// How it ended, once it has.
    end: Option<End>,
}

/// How an entry ended.
#[derive(Debug)]
enum End {
    Hardware(Ended),
    Cancelled,
}

impl DeviceChannel {
    /// A channel that holds at most so many descriptors.
    pub fn new(hardware: Box<dyn Hardware>, capacity: usize) -> Self {
        let queue = Queue {
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

    /// Finishes what is over; `false` if nothing is, or another thread is at it.
    fn step(&self) -> bool {
        let mut queue = lock(&self.queue);
        if queue.is_finishing {
            return false;
        }
        queue.pump();
        let over = queue.take_over();
        if over.is_empty() {
            return false;
        }
        queue.is_finishing = true;
        drop(queue);
        // Not under the lock: the end of a transfer may launch a follower into this very channel,
        // and what failed is done here by the processor.
        let mut bytes = 0;
        let outcomes: Vec<_> = over
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

impl Queue {
    /// Learns what the hardware has done, and gives it more.
    fn pump(&mut self) {
        let mut ended = Vec::new();
        if self.tend(|hardware| hardware.look(&mut ended)).is_none() {
            return;
        }
        let mut waiting = self.entries.iter_mut().take(self.posted).filter(|e| e.end.is_none());
        for end in ended {
            let entry = waiting.next().expect("no more ends than were posted");
            entry.end = Some(End::Hardware(end));
        }
        self.post();
    }

    /// Posts what there is room for. Behind an entry that failed nothing is posted until it is
    /// finished: what is ordered behind it, such as a notice, must not come before it.
    fn post(&mut self) {
        if self.is_finishing || self.entries.iter().take(self.posted).any(Entry::has_failed) {
            return;
        }
        let before = self.posted;
        while self.posted < self.entries.len() {
            let notice = self.notice_of(self.posted);
            let descriptor = &self.entries[self.posted].descriptor;
            let end = if descriptor.is_cancelled() {
                Some(End::Cancelled)
            } else if descriptor.length() == 0 {
                Some(End::Hardware(Ended::Well))
            } else {
                let Some(hardware) = self.hardware.as_mut() else { return };
                let post = AssertUnwindSafe(|| hardware.post(descriptor, notice));
                match catch_unwind(post) {
                    Ok(Posted::Taken) => None,
                    Ok(Posted::Full) => break,
                    Ok(Posted::Over(end)) => Some(End::Hardware(end)),
                    Err(_) => return self.break_down(),
                }
            };
            self.entries[self.posted].end = end;
            self.posted += 1;
            if self.entries[self.posted - 1].has_failed() {
                break;
            }
        }
        if self.posted > before {
            let _ = self.tend(|hardware| hardware.ring());
        }
    }

    /// Calls the driver; `None` if it panicked, now or before.
    fn tend<R>(&mut self, call: impl FnOnce(&mut dyn Hardware) -> R) -> Option<R> {
        let hardware = self.hardware.as_mut()?;
        let result = catch_unwind(AssertUnwindSafe(|| call(&mut **hardware))).ok();
        if result.is_none() {
            self.break_down();
        }
        result
    }

    /// After a panic in the driver: stops the device, leaves what it was given to the processor, and
    /// takes nothing more.
    fn break_down(&mut self) {
        self.closed = true;
        let hardware = self.hardware.take();
        if catch_unwind(AssertUnwindSafe(|| drop(hardware))).is_err() {
            // Nobody knows whether the device writes to memory that would be given back now.
            tracing::error!("the driver of a device panicked, and again when it was to stop it");
            std::process::abort();
        }
        tracing::error!("the driver of a device panicked: the processor does what it left");
        for entry in self.entries.iter_mut().filter(|entry| entry.end.is_none()) {
            entry.end = Some(End::Hardware(Ended::Failed("the driver of the device panicked")));
        }
        self.posted = self.entries.len();
    }

    /// The notice behind an entry, if it is the channel that may give it.
    fn notice_of(&self, index: usize) -> Option<Notice> {
        let last = &self.entries[index].descriptor;
        last.notice(|| {
            let before = self.entries.iter().take(index).map(|entry| &entry.descriptor);
            before.filter(|other| other.is_of_same_transfer(last)).map(Descriptor::length).sum()
        })
    }

    /// The oldest entries, as far as they are over.
    fn take_over(&mut self) -> Vec<Entry> {
        let over = self.entries.iter().take(self.posted).take_while(|e| e.end.is_some()).count();
        self.posted -= over;
        self.entries.drain(..over).collect()
    }
}

impl Entry {
    fn has_failed(&self) -> bool {
        matches!(self.end, Some(End::Hardware(Ended::Failed(_)) | End::Cancelled))
    }

    /// Reports the end. Returns why it was not a good one.
    fn finish(self) -> Result<(), ExecutionError> {
        let error = match self.end {
            Some(End::Hardware(Ended::Well)) => {
                self.descriptor.finish(Ok(None));
                return Ok(());
            }
            Some(End::Hardware(Ended::Noticed)) => {
                self.descriptor.finish_noticed();
                return Ok(());
            }
            Some(End::Cancelled) => ExecutionError::Cancelled { done_bytes: 0 },
            Some(End::Hardware(Ended::Failed(reason))) => {
                ExecutionError::Engine { done_bytes: 0, reason }
            }
            None => unreachable!("only what is over is finished"),
        };
        self.descriptor.finish(Err(error.clone()));
        Err(error)
    }
}

// SAFETY: descriptors are finished in order before their numbers are counted, and by the promise of
// `Hardware` the device touches none of them after its end.
unsafe impl Channel for DeviceChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Taken, SubmitError> {
        let mut queue = lock(&self.queue);
        if queue.closed {
            return Err(SubmitError::Closed);
        }
        let first = queue.statistics.submitted + 1;
        let room = self.capacity.saturating_sub(queue.entries.len());
        let mut count = 0;
        for entry in batch.iter_mut().filter(|entry| entry.is_some()).take(room) {
            let descriptor = entry.take().expect("looked before");
            queue.outstanding_bytes += descriptor.length();
            queue.entries.push_back(Entry { descriptor, end: None });
            count += 1;
        }
        queue.statistics.submitted += count as u64;
        queue.statistics.full += u64::from(batch.iter().any(Option::is_some));
        queue.post();
        Ok(Taken { first, count })
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

    fn park(&self, sequence: Sequence, timeout: Duration) -> bool {
        park_by_polling(self, sequence, timeout)
    }

    fn wake(&self) {}

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
        // Nobody else is here: a step that unwound may have left this behind.
        lock(&self.queue).is_finishing = false;
        // Drivers do not wait for ever for a device that stands still, so this ends.
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
    use crate::contract::Operation;

    /// Takes everything, and panics when it is asked what became of it.
    #[derive(Debug)]
    struct Panicking {
        is_stopped: Arc<AtomicBool>,
    }

    // SAFETY: it touches no memory at all.
    unsafe impl Hardware for Panicking {
        fn post(&mut self, _: &Descriptor, _: Option<Notice>) -> Posted {
            Posted::Taken
        }

        fn ring(&mut self) {}

        fn look(&mut self, _: &mut Vec<Ended>) {
            std::panic::resume_unwind(Box::new("a driver that panics, on purpose"));
        }
    }

    impl Drop for Panicking {
        fn drop(&mut self) {
            self.is_stopped.store(true, Ordering::SeqCst);
        }
    }

    #[test]
    fn after_a_panic_of_the_driver_the_device_is_stopped_and_the_processor_does_the_rest() {
        let is_stopped = Arc::new(AtomicBool::new(false));
        let hardware = Box::new(Panicking { is_stopped: is_stopped.clone() });
        let channel = DeviceChannel::new(hardware, 4);
        let mut targets = [[0u8; 8]; 3];
        let completions = [(); 3].map(|()| Arc::new(Completion::whole()));
        let mut batch: Vec<_> = (targets.iter_mut().zip(&completions))
            .map(|(target, completion)| {
                let target = target.as_mut_ptr() as u64;
                // SAFETY: the targets outlive the channel; each completion has this descriptor alone.
                let fill = unsafe {
                    Descriptor::new(Operation::Fill, 0, target, 8).completes(completion.clone())
                };
                Some(fill.value(7))
            })
            .collect();
        assert_eq!(channel.submit(&mut batch), Ok(Taken { first: 1, count: 3 }));
        assert!(channel.poll());
        assert!(is_stopped.load(Ordering::SeqCst), "before anything is given back");
        assert!(completions.iter().all(|completion| matches!(completion.outcome(), Some(Ok(_)))));
        assert_eq!((channel.completed(), channel.statistics().failed), (3, 3));
        assert_eq!(channel.submit(&mut []), Err(SubmitError::Closed));
        assert_eq!(targets, [[7; 8]; 3]);
    }
}
