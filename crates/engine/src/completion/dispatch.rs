//! Submission of descriptors to channels: at once, or when the transfers that they are ordered
//! after are complete.
//!
//! The dispatching thread executes what a full or closed channel does not accept, so a dispatch
//! never waits for another transfer and never loses one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_sys::stats::{self, kinds::Fallback};
use memferry_sys::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use memferry_sys::sync::{Mutex, lock, thread_local};

use super::polling::poll_for_caller;
use super::{Completion, PartOutput};
use crate::contract::{Channel, Descriptor, DescriptorScope, ExecutionError};
use crate::runtime::is_engine_thread;

/// Descriptors for one destination.
#[derive(Debug)]
pub struct ChannelBatch {
    destination: Destination,
    descriptors: DescriptorList,
}

/// The destination of descriptors.
#[derive(Debug)]
enum Destination {
    /// A channel. Without `auto_progress` a full channel is polled for space.
    Channel { channel: Arc<dyn Channel>, auto_progress: bool },
    /// The dispatching thread executes them.
    Inline,
    /// They failed before they started.
    Failed(ExecutionError),
}

/// A list of descriptors. Most batches are a single descriptor, for which no vector is allocated.
#[derive(Debug)]
enum DescriptorList {
    One([Option<Descriptor>; 1]),
    Many(Vec<Option<Descriptor>>),
}

impl DescriptorList {
    fn as_mut_slice(&mut self) -> &mut [Option<Descriptor>] {
        match self {
            Self::One(one) => one,
            Self::Many(many) => many,
        }
    }

    fn take_all(&mut self) -> impl Iterator<Item = Descriptor> {
        self.as_mut_slice().iter_mut().filter_map(Option::take)
    }
}

/// A transfer that waits for other transfers.
#[derive(Debug)]
pub struct Dispatch {
    completion: Arc<Completion>,
    batches: Mutex<Vec<ChannelBatch>>,
    pending_predecessors: AtomicU32,
    predecessor_failed: AtomicBool,
}

impl Dispatch {
    /// Dispatches the batches of a transfer now. A transfer without batches is complete at once.
    ///
    /// # Safety
    /// Nothing but the descriptors of these batches may report to the completion, apart from the
    /// claimants of its chunks: this call completes it if none of them starts.
    pub unsafe fn now(completion: &Completion, batches: impl IntoIterator<Item = ChannelBatch>) {
        Self::submit_or_run(completion, batches);
    }

    fn submit_or_run(completion: &Completion, batches: impl IntoIterator<Item = ChannelBatch>) {
        let mut started = false;
        for mut batch in batches {
            if let Destination::Channel { channel, auto_progress: false } = &batch.destination {
                completion.set_polled(channel);
            }
            started |= batch.submit_or_run();
        }
        if started {
            return;
        }
        match completion.work() {
            // No channel accepted a work offer, so no channel would claim the chunks: this thread
            // does.
            Some(work) if work.is_host_only() => {
                completion.run_from_front();
            }
            Some(_) => {
                let reason =
                    "the channels are full or closed, and no processor can access this memory";
                completion.fail_unstarted(ExecutionError::Engine { done_bytes: 0, reason });
            }
            None => completion.finish_whole(Ok(PartOutput::None)),
        }
    }

    /// Dispatches the batches of a transfer when all its predecessors are complete. If one of them
    /// failed, the transfer ends with [`ExecutionError::Predecessor`] instead.
    ///
    /// # Safety
    /// As for [`Dispatch::now`].
    pub unsafe fn after(
        predecessors: &[Arc<Completion>],
        completion: Arc<Completion>,
        batches: Vec<ChannelBatch>,
    ) {
        // A caller that waits for this transfer must not claim chunks before the predecessors are
        // complete.
        if let Some(work) = completion.work() {
            work.defer_claims();
        }
        let dispatch = Arc::new(Self {
            completion,
            batches: Mutex::new(batches),
            // One more than the predecessors, so that nothing starts while they are being
            // registered.
            pending_predecessors: AtomicU32::new(predecessors.len() as u32 + 1),
            predecessor_failed: AtomicBool::new(false),
        });
        for predecessor in predecessors {
            if let Some(succeeded) = predecessor.add_dependent(&dispatch) {
                dispatch.predecessor_done(!succeeded);
            }
        }
        if dispatch.predecessor_done(false) {
            dispatch.run();
        }
    }

    /// Reports the end of a predecessor to its dependents. A dependent may complete inline and have
    /// dependents in turn; the queue turns a long chain into a loop instead of a deep recursion.
    pub(crate) fn run_dependents(dependents: Vec<Arc<Self>>, failed: bool) {
        use std::cell::RefCell;
        thread_local! {
            // Not `const`: loom's version of this macro does not support it.
            #[allow(clippy::missing_const_for_thread_local)]
            static QUEUE: RefCell<Option<Vec<Arc<Dispatch>>>> = RefCell::new(None);
        }
        let ready: Vec<_> =
            dependents.into_iter().filter(|dispatch| dispatch.predecessor_done(failed)).collect();
        if ready.is_empty() {
            return;
        }
        let outermost = QUEUE.with(|queue| {
            let mut queue = queue.borrow_mut();
            let outermost = queue.is_none();
            queue.get_or_insert_default().extend(ready);
            outermost
        });
        if !outermost {
            return;
        }
        /// Clears the queue, also after a panic; otherwise this thread would never run a dependent
        /// again.
        struct QueueGuard;
        impl Drop for QueueGuard {
            fn drop(&mut self) {
                QUEUE.with(|queue| queue.replace(None));
            }
        }
        let _guard = QueueGuard;
        let next = || QUEUE.with(|queue| queue.borrow_mut().as_mut().and_then(Vec::pop));
        while let Some(dispatch) = next() {
            dispatch.run();
        }
    }

    /// Counts a predecessor as complete; `true` for the last one.
    fn predecessor_done(&self, failed: bool) -> bool {
        if failed {
            self.predecessor_failed.store(true, Ordering::Relaxed);
        }
        self.pending_predecessors.fetch_sub(1, Ordering::AcqRel) == 1
    }

    fn run(&self) {
        let batches = std::mem::take(&mut *lock(&self.batches));
        if self.predecessor_failed.load(Ordering::Relaxed) {
            self.fail_unstarted(batches, &ExecutionError::Predecessor);
        } else if self.completion.is_cancelled() {
            self.fail_unstarted(batches, &ExecutionError::Cancelled { done_bytes: 0 });
        } else {
            if let Some(work) = self.completion.work() {
                work.allow_claims();
            }
            Self::submit_or_run(&self.completion, batches);
        }
    }

    /// Fails a transfer that has not started.
    fn fail_unstarted(&self, batches: Vec<ChannelBatch>, error: &ExecutionError) {
        for mut batch in batches {
            let descriptors = batch.descriptors.take_all();
            for descriptor in
                descriptors.filter(|descriptor| descriptor.scope() != DescriptorScope::WorkOffer)
            {
                descriptor.finish(Err(error.clone()));
            }
        }
        if !self.completion.is_done() {
            self.completion.fail_unstarted(error.clone());
        }
    }
}

impl ChannelBatch {
    /// One descriptor for a channel. `auto_progress`: the channel makes progress without being
    /// polled.
    pub fn one(channel: Arc<dyn Channel>, auto_progress: bool, descriptor: Descriptor) -> Self {
        let destination = Destination::Channel { channel, auto_progress };
        Self { destination, descriptors: DescriptorList::One([Some(descriptor)]) }
    }

    /// Several descriptors for a channel, in order.
    pub fn many(
        channel: Arc<dyn Channel>,
        auto_progress: bool,
        descriptors: impl IntoIterator<Item = Descriptor>,
    ) -> Self {
        let descriptors = DescriptorList::Many(descriptors.into_iter().map(Some).collect());
        Self { destination: Destination::Channel { channel, auto_progress }, descriptors }
    }

    /// A descriptor that the dispatching thread executes.
    pub fn inline(descriptor: Descriptor) -> Self {
        Self {
            destination: Destination::Inline,
            descriptors: DescriptorList::One([Some(descriptor)]),
        }
    }

    /// A descriptor that failed before it started. The dispatching thread reports it when the
    /// transfer is dispatched, and executes it if the error is recoverable.
    pub fn failed(descriptor: Descriptor, error: ExecutionError) -> Self {
        Self {
            destination: Destination::Failed(error),
            descriptors: DescriptorList::One([Some(descriptor)]),
        }
    }

    /// Submits the descriptors and executes those that the channel did not accept, except work
    /// offers. Returns whether anything was submitted or executed.
    fn submit_or_run(&mut self) -> bool {
        let batch = self.descriptors.as_mut_slice();
        let has_offers = batch
            .iter()
            .flatten()
            .any(|descriptor| descriptor.scope() == DescriptorScope::WorkOffer);
        let submitted = self.submit();
        // A channel whose submit panicked reports that it accepted nothing, but the entries it took
        // are `None` and report when they are dropped. A work offer that was dropped was only
        // declined.
        let mut was_taken = || self.descriptors.as_mut_slice().iter().any(Option::is_none);
        let mut started = submitted > 0 || !has_offers && was_taken();
        for mut descriptor in self.descriptors.take_all() {
            if descriptor.scope() == DescriptorScope::WorkOffer {
                continue;
            }
            started = true;
            if let Destination::Failed(error) = &self.destination {
                descriptor.finish(Err(error.clone()));
            } else if let Some(completion) = descriptor.take_order() {
                run_after_predecessors(completion, descriptor);
            } else if descriptor.is_host_only() {
                if let Destination::Channel { .. } = &self.destination {
                    stats::thread(|counters| counters.fall_back(Fallback::Full));
                }
                descriptor.run();
            } else {
                let reason =
                    "the channel is full or closed, and no processor can access this memory";
                descriptor.finish(Err(ExecutionError::Engine { done_bytes: 0, reason }));
            }
        }
        started
    }

    /// Submits the batch and returns how many descriptors the channel accepted. A full channel with
    /// automatic progress is not retried if the calling thread can run the rest itself; otherwise
    /// the call blocks for space, except on an engine thread, where blocking could deadlock. A full
    /// channel with manual progress is polled for up to 50 ms, or for 1000 empty polls on an engine
    /// thread.
    fn submit(&mut self) -> usize {
        const IDLE_POLLS: u32 = 1000;
        const FULL_TIMEOUT: Duration = Duration::from_millis(50);
        const FULL_SLEEP: Duration = Duration::from_micros(50);
        const SPACE_TIMEOUT: Duration = Duration::from_millis(10);
        let Destination::Channel { channel, auto_progress } = &self.destination else {
            return 0;
        };
        let batch = self.descriptors.as_mut_slice();
        let (mut submitted, mut idle, mut since) = (0, 0, None);
        while let Ok(accepted) = channel.submit(&mut batch[submitted..]) {
            submitted += accepted.count;
            if submitted == batch.len() {
                break;
            }
            if *auto_progress {
                let must_wait = batch.iter().flatten().any(|left| !left.is_host_only());
                if !must_wait || is_engine_thread() {
                    break;
                }
                channel.park(channel.completed() + 1, SPACE_TIMEOUT);
                continue;
            }
            if accepted.count > 0 || poll_for_caller(&**channel) {
                (idle, since) = (0, None);
                continue;
            }
            idle += 1;
            if idle < IDLE_POLLS {
                continue;
            }
            if is_engine_thread() || since.get_or_insert_with(Instant::now).elapsed() > FULL_TIMEOUT
            {
                break;
            }
            std::thread::sleep(FULL_SLEEP);
        }
        submitted
    }
}

/// Executes an ordered descriptor that a channel did not accept, when what it is ordered after is
/// complete: the channel may have accepted that.
fn run_after_predecessors(completion: Arc<Completion>, descriptor: Descriptor) {
    stats::thread(|counters| counters.fall_back(Fallback::Full));
    let batches = vec![ChannelBatch::inline(descriptor)];
    // SAFETY: the descriptor reports to this completion, as its creator guarantees. The batch has it,
    // so the dispatch completes nothing by itself.
    unsafe { Dispatch::after(completion.clone().predecessors(), completion, batches) };
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::contract::{ChannelStatistics, Opcode, Sequence, SubmitError, Submitted};

    /// A channel after its submit panicked: closed, and it owns the descriptors.
    #[derive(Debug, Default)]
    struct PanickedChannel(Mutex<Vec<Descriptor>>);

    // SAFETY: it executes nothing, and completes nothing.
    unsafe impl Channel for PanickedChannel {
        fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
            lock(&self.0).extend(batch.iter_mut().filter_map(Option::take));
            Err(SubmitError::Closed)
        }

        fn completed(&self) -> Sequence {
            0
        }

        fn error_of(&self, _sequence: Sequence) -> Option<ExecutionError> {
            None
        }

        fn close(&self) {}

        fn outstanding_bytes(&self) -> u64 {
            0
        }

        fn statistics(&self) -> ChannelStatistics {
            ChannelStatistics::default()
        }
    }

    #[test]
    fn a_transfer_is_not_over_while_a_channel_whose_submit_panicked_has_its_descriptor() {
        let (channel, completion) =
            (Arc::new(PanickedChannel::default()), Arc::new(Completion::whole()));
        let mut target = [0u8; 8];
        // SAFETY: nothing else accesses the target, which outlives the descriptor.
        let fill = unsafe {
            let fill = Descriptor::new(Opcode::Fill, 0, target.as_mut_ptr() as u64, 8);
            fill.completes(completion.clone())
        };
        // SAFETY: the completion has no other descriptor.
        unsafe { Dispatch::now(&completion, [ChannelBatch::one(channel.clone(), true, fill)]) };
        assert!(!completion.is_done());
        drop(channel);
        assert!(completion.is_done());
        let error = completion.outcome().expect("it is complete").unwrap_err();
        assert!(matches!(error, ExecutionError::Engine { .. }), "{error}");
    }
}
