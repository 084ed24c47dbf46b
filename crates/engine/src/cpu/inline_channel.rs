//! A channel without a thread, for processes that may not start threads: the submitting thread
//! executes.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_sys::fork::OwnerProcess;
use memferry_sys::stats::kinds::ChannelCounters;
use memferry_sys::stats::{self, Block};
use memferry_sys::sync::lock;

use crate::contract::{
    Channel, ChannelStatistics, Descriptor, ExecutionError, Sequence, SubmitError, Submitted,
};
use crate::runtime::{FailureLog, as_engine_thread};

/// The channel. While one thread executes in it, it accepts nothing: another submitter executes its
/// own descriptor, and no thread executes another's.
#[derive(Debug)]
pub(super) struct InlineChannel {
    state: Mutex<InlineChannelState>,
    /// Outside the lock, which may stay locked forever in a forked child.
    completed: AtomicU64,
    /// What `memferry top` shows. Written with the lock held.
    shown: Block<ChannelCounters>,
    owner: OwnerProcess,
}

#[derive(Debug, Default)]
struct InlineChannelState {
    /// A thread executes a descriptor.
    is_busy: bool,
    outstanding_bytes: u64,
    failures: FailureLog,
    is_closed: bool,
    statistics: ChannelStatistics,
}

/// A descriptor in execution. Its sequence is completed when this is dropped, also if code that
/// runs at its end panics.
struct RunningDescriptor<'a> {
    channel: &'a InlineChannel,
    bytes: u64,
    moved: u64,
    error: Option<ExecutionError>,
}

impl Drop for RunningDescriptor<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.channel.state);
        state.outstanding_bytes -= self.bytes;
        state.statistics.completed += 1;
        state.statistics.bytes += self.moved;
        let sequence = state.statistics.completed;
        if let Some(error) = self.error.take() {
            state.statistics.failed += 1;
            state.failures.push(sequence, error);
        }
        self.channel.completed.store(sequence, Ordering::Release);
        state.statistics.show(&self.channel.shown);
    }
}

/// Marks the channel as free again when the executing thread leaves.
struct BusyGuard<'a>(&'a InlineChannel);

impl Drop for BusyGuard<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).is_busy = false;
    }
}

impl InlineChannel {
    pub(super) fn new() -> Self {
        let (state, completed) = (Mutex::default(), AtomicU64::new(0));
        let shown = stats::kinds::open_channel("cpu", Some("inline"));
        Self { state, completed, shown, owner: OwnerProcess::current() }
    }

    fn is_forked(&self) -> bool {
        !self.owner.is_current()
    }

    /// Executes a descriptor. Not under the lock: the end of a transfer may submit a dependent
    /// transfer to this channel.
    fn execute(&self, descriptor: Descriptor) {
        let mut running =
            RunningDescriptor { channel: self, bytes: descriptor.length(), moved: 0, error: None };
        if descriptor.is_host_only() {
            running.moved = descriptor.run();
            return;
        }
        let reason = "a processor cannot access device memory";
        let error = ExecutionError::Engine { done_bytes: 0, reason };
        running.error = Some(error.clone());
        descriptor.finish(Err(error));
    }
}

// SAFETY: one descriptor at a time is executed and reported before its number is counted, in the
// order of their numbers.
unsafe impl Channel for InlineChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
        if self.is_forked() {
            return Err(SubmitError::Closed);
        }
        let mut state = lock(&self.state);
        if state.is_closed {
            return Err(SubmitError::Closed);
        }
        if state.is_busy {
            state.statistics.full += 1;
            return Ok(Submitted::NONE);
        }
        state.is_busy = true;
        let first = state.statistics.submitted + 1;
        drop(state);
        let _busy = BusyGuard(self);
        let mut count = 0;
        for descriptor in batch.iter_mut().filter_map(Option::take) {
            let mut state = lock(&self.state);
            state.statistics.submitted += 1;
            state.outstanding_bytes += descriptor.length();
            drop(state);
            // A dependent transfer that is dispatched at its end must not wait for space in this
            // channel.
            as_engine_thread(|| self.execute(descriptor));
            count += 1;
        }
        Ok(Submitted { first, count })
    }

    fn completed(&self) -> Sequence {
        self.completed.load(Ordering::Acquire)
    }

    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError> {
        if self.is_forked() {
            return None;
        }
        lock(&self.state).failures.find(sequence)
    }

    fn close(&self) {
        if !self.is_forked() {
            lock(&self.state).is_closed = true;
        }
    }

    fn outstanding_bytes(&self) -> u64 {
        if self.is_forked() { 0 } else { lock(&self.state).outstanding_bytes }
    }

    fn statistics(&self) -> ChannelStatistics {
        if self.is_forked() {
            return ChannelStatistics::default();
        }
        lock(&self.state).statistics
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::completion::Completion;
    use crate::contract::Opcode;
    use std::sync::Arc;
    use std::task::{Wake, Waker};

    fn fill(target: &mut u8) -> Descriptor {
        // SAFETY: one byte, which outlives the descriptor in these tests.
        unsafe { Descriptor::new(Opcode::Fill, 0, std::ptr::from_mut(target) as u64, 1).value(7) }
    }

    #[test]
    fn what_comes_while_a_thread_is_at_work_is_left_to_whoever_submits_it() {
        /// Submits again when it is woken, as another thread might at that time.
        struct SubmitsAgain(InlineChannel, Mutex<Option<Submitted>>);
        impl Wake for SubmitsAgain {
            fn wake(self: Arc<Self>) {
                let mut late = 0;
                let mut batch = [Some(fill(&mut late))];
                *lock(&self.1) = self.0.submit(&mut batch).ok();
                assert!(batch[0].is_some() && late == 0);
                drop(batch);
            }
        }
        let submitter = Arc::new(SubmitsAgain(InlineChannel::new(), Mutex::default()));
        let completion = Arc::new(Completion::whole());
        assert!(completion.wake_on_completion(None, &Waker::from(submitter.clone())).is_some());
        let mut target = 0;
        // SAFETY: the completion has no other descriptor.
        let descriptor = unsafe { fill(&mut target).completes(completion.clone()) };
        let accepted = submitter.0.submit(&mut [Some(descriptor)]);
        assert_eq!(accepted, Ok(Submitted { first: 1, count: 1 }));
        assert_eq!(*lock(&submitter.1), Some(Submitted::NONE));
        assert!(target == 7 && completion.is_done());
        let mut again = 0;
        let accepted = submitter.0.submit(&mut [Some(fill(&mut again))]);
        assert_eq!((accepted, again), (Ok(Submitted { first: 2, count: 1 }), 7));
        assert_eq!((submitter.0.completed(), submitter.0.outstanding_bytes()), (2, 0));
    }
}
