//! A channel with manual progress, as the ferry uses it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use memferry_engine::runtime::as_engine_thread;
use memferry_engine::{
    Channel, ChannelStatistics, CostLine, Descriptor, ExecutionError, InterruptSleep, Sequence,
    SubmitError, Submitted,
};
use memferry_sys::fork::OwnerProcess;
use memferry_sys::sync::atomic::{AtomicU64, Ordering};
use memferry_sys::sync::{spin_hint, store_max};
use memferry_sys::user_wait::UserWait;

use super::PollDoorbell;
use super::guarded::GuardedChannel;

/// Wrapper of a channel that the poll thread polls. In a forked child, which has no poll thread,
/// the channel is closed, and its descriptors stay untouched because they belong to the parent.
/// After a panic in the engine's code the channel is closed too, and all its descriptors have
/// failed.
#[derive(Debug)]
pub(crate) struct ThreadPolledChannel {
    inner: GuardedChannel,
    doorbell: Arc<PollDoorbell>,
    owner: OwnerProcess,
    /// The cost of copies, for estimates.
    cost: CostLine,
    /// The sequence of the last accepted descriptor.
    submitted: AtomicU64,
    /// The completed sequence, as the last poll found it.
    completed: AtomicU64,
    /// The completed sequence at the time of the panic.
    failed_at: AtomicU64,
    /// Polls by other threads than the poll thread; a poll that is not counted does no harm.
    polls_by_others: AtomicU64,
}

impl ThreadPolledChannel {
    pub(crate) fn new(inner: Arc<dyn Channel>, bell: Arc<PollDoorbell>) -> Self {
        Self {
            inner: GuardedChannel::new(inner),
            doorbell: bell,
            owner: OwnerProcess::current(),
            cost: CostLine { startup_ns: 0.0, ns_per_byte: 0.0 },
            submitted: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            failed_at: AtomicU64::new(0),
            polls_by_others: AtomicU64::new(0),
        }
    }

    /// Sets the cost of copies.
    pub(crate) fn with_cost(mut self, cost: CostLine) -> Self {
        self.cost = cost;
        self
    }

    fn is_forked(&self) -> bool {
        !self.owner.is_current()
    }

    /// Calls the inner channel. Returns `None` if it is inaccessible: after a fork, or after a
    /// panic, including one in this call.
    #[inline]
    fn call<R>(&self, call: impl FnOnce(&dyn Channel) -> R) -> Option<R> {
        // This check comes first: a forked child must not count calls that never end.
        if self.is_forked() {
            return None;
        }
        let inner = self.begin_call()?;
        let outcome = match catch_unwind(AssertUnwindSafe(|| call(inner))) {
            Ok(result) => Some(result),
            Err(panic) => {
                self.fail_inside(inner, text_of(&*panic));
                std::mem::forget(panic);
                None
            }
        };
        self.end_call();
        outcome
    }

    #[inline]
    fn begin_call(&self) -> Option<&dyn Channel> {
        self.inner.begin(|| self.all_ended())
    }

    #[inline]
    fn end_call(&self) {
        if self.inner.end() {
            self.all_ended();
        }
    }

    /// All descriptors have ended with the channel, which was dropped.
    #[cold]
    fn all_ended(&self) {
        store_max(&self.completed, self.submitted.load(Ordering::Acquire));
    }

    /// Drops the inner channel after a panic, which ends its descriptors.
    pub(super) fn fail(&self, reason: &str) {
        if self.is_forked() {
            return;
        }
        let Some(inner) = self.begin_call() else { return };
        self.fail_inside(inner, reason);
        self.end_call();
    }

    /// Fails the channel, inside a call.
    fn fail_inside(&self, inner: &dyn Channel, reason: &str) {
        let reached = catch_unwind(AssertUnwindSafe(|| inner.completed()));
        if !self.inner.fail(|| self.failed_at.store(reached.unwrap_or(0), Ordering::Release)) {
            return;
        }
        // A subscriber that panics must not keep this call from ending.
        let log = || {
            tracing::error!(
                reason,
                "a channel of a device broke down: its pending transfers fail, and the processor does \
                 what is asked of it from now on"
            );
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(log)) {
            std::mem::forget(panic);
        }
    }

    /// Whether descriptors are in flight.
    pub(super) fn is_busy(&self) -> bool {
        let completed = self.completed.load(Ordering::Acquire);
        completed < self.submitted.load(Ordering::Acquire)
    }

    /// Whether the channel itself has accepted descriptors that are not finished. A submit that is
    /// under way counts from the moment at which a close comes too late for it.
    pub(super) fn has_accepted(&self) -> bool {
        let statistics = self.call(|inner| inner.statistics());
        statistics.is_some_and(|statistics| statistics.completed < statistics.submitted)
    }

    /// The number of polls by threads other than the poll thread.
    pub(super) fn polls_by_others(&self) -> u64 {
        self.polls_by_others.load(Ordering::Relaxed)
    }

    /// Counts a poll by another thread than the poll thread.
    #[inline]
    fn count_poll(&self) {
        let polls = self.polls_by_others.load(Ordering::Relaxed);
        self.polls_by_others.store(polls.wrapping_add(1), Ordering::Relaxed);
    }

    /// Polls on the poll thread.
    pub(super) fn poll_by_thread(&self) -> bool {
        self.poll_by(|inner| inner.poll())
    }

    fn poll_by(&self, poll: impl FnOnce(&dyn Channel) -> bool) -> bool {
        let poll = |inner: &dyn Channel| {
            let has_moved = poll(inner);
            let completed = inner.completed();
            if completed > self.completed.load(Ordering::Relaxed) {
                store_max(&self.completed, completed);
            }
            has_moved
        };
        // The polling thread runs completion callbacks, which may drop the last ferry. The poll
        // thread waits for this poll, so the calling thread must not join the poll thread.
        as_engine_thread(|| self.call(poll)).unwrap_or(false)
    }
}

/// Returns the message of a panic.
fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message")
}

// SAFETY: sequences and descriptors are those of the inner channel, passed through unchanged. A
// channel that rejects submissions and does not advance, as in a forked child, gives no guarantee
// that it could violate. After a panic the inner channel is dropped, which by the contract of
// `Channel` ends all its descriptors; only then does the completed sequence reach the last accepted
// one.
unsafe impl Channel for ThreadPolledChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
        if self.doorbell.stopping.load(Ordering::Acquire) {
            return Err(SubmitError::Closed);
        }
        let is_urgent = batch.iter().flatten().any(Descriptor::is_awaited);
        let submit = |inner: &dyn Channel| {
            let accepted = inner.submit(batch)?;
            if accepted.count > 0 {
                store_max(&self.submitted, accepted.last());
            }
            Ok(accepted)
        };
        let accepted = self.call(submit).unwrap_or(Err(SubmitError::Closed))?;
        if accepted.count > 0 {
            self.doorbell.ring(is_urgent);
        }
        Ok(accepted)
    }

    #[inline]
    fn completed(&self) -> Sequence {
        self.completed.load(Ordering::Acquire)
    }

    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError> {
        match self.call(|inner| inner.error_of(sequence)) {
            Some(error) => error,
            None if self.is_forked() || sequence <= self.failed_at.load(Ordering::Acquire) => None,
            None => Some(ExecutionError::Engine { done_bytes: 0, reason: "the channel panicked" }),
        }
    }

    fn poll(&self) -> bool {
        self.count_poll();
        self.poll_by_thread()
    }

    fn poll_briefly(&self) -> bool {
        self.count_poll();
        self.poll_by(|inner| inner.poll_briefly())
    }

    #[inline]
    fn pause(&self) {
        match UserWait::of_processor() {
            UserWait::Pause => spin_hint(),
            wait => self.call(|inner| inner.pause()).unwrap_or_else(|| wait.pause()),
        }
    }

    fn sleep_until_interrupt(
        &self,
        timeout: Duration,
        is_done: &dyn Fn() -> bool,
    ) -> InterruptSleep {
        let mut slept = InterruptSleep::Unavailable;
        self.poll_by(|inner| {
            slept = inner.sleep_until_interrupt(timeout, is_done);
            slept == InterruptSleep::Woken
        });
        slept
    }

    fn has_poll_thread(&self) -> bool {
        true
    }

    fn estimate_ns(&self) -> u64 {
        let outstanding = self.outstanding_bytes();
        if outstanding == 0 { 0 } else { self.cost.estimate_ns(outstanding) as u64 }
    }

    fn is_asleep(&self) -> bool {
        self.call(|inner| inner.is_asleep()).unwrap_or(false)
    }

    /// Makes the poll thread poll, for somebody who does not.
    fn wake(&self) {
        self.call(|inner| inner.wake());
        if !self.is_forked() {
            self.doorbell.ring(true);
        }
    }

    fn close(&self) {
        self.call(|inner| inner.close());
    }

    fn outstanding_bytes(&self) -> u64 {
        self.call(|inner| inner.outstanding_bytes()).unwrap_or(0)
    }

    fn statistics(&self) -> ChannelStatistics {
        match self.call(|inner| inner.statistics()) {
            Some(statistics) => statistics,
            None if self.is_forked() => ChannelStatistics::default(),
            None => {
                let submitted = self.submitted.load(Ordering::Acquire);
                let failed = submitted - self.failed_at.load(Ordering::Acquire).min(submitted);
                let completed = self.completed();
                ChannelStatistics { submitted, completed, failed, ..ChannelStatistics::default() }
            }
        }
    }
}

impl Drop for ThreadPolledChannel {
    fn drop(&mut self) {
        // In a forked child the inner channel belongs to the parent: it is left alone.
        if !self.is_forked() {
            self.inner.drop_channel();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use memferry_engine::testing::polled::PolledEngine;
    use memferry_engine::{ChannelOptions, Completion, Engine, Opcode};

    use super::super::PollThread;
    use super::*;

    /// Timeout that only a hang reaches, however busy the machine is.
    const TIMEOUT: Duration = Duration::from_secs(60);

    /// Runs `work` and panics if it does not end.
    fn ends(what: &str, work: impl FnOnce() + Send + 'static) {
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            work();
            let _ = tell.send(());
        });
        told.recv_timeout(TIMEOUT).unwrap_or_else(|_| panic!("{what} does not end"));
    }

    fn nothing(completion: &Arc<Completion>) -> Option<Descriptor> {
        // SAFETY: the descriptor fills one byte of memory that is never freed; the completion
        // belongs to no other descriptor.
        let copy = unsafe {
            let target = std::ptr::from_mut(Box::leak(Box::new(0u8))) as u64;
            Descriptor::new(Opcode::Fill, 0, target, 1).completes(completion.clone())
        };
        Some(copy)
    }

    #[test]
    fn a_poll_whose_completion_drops_the_driver_returns() {
        ends("the poll", || {
            let inner = PolledEngine::new().open_channel(&ChannelOptions::default()).unwrap();
            let bell = PollDoorbell::new();
            let driven = Arc::new(ThreadPolledChannel::new(inner.clone(), bell.clone()));
            let driver = PollThread::start(vec![driven.clone()], bell).unwrap();
            let (first, second) = (Arc::new(Completion::whole()), Arc::new(Completion::whole()));
            first.keep_alive(driver).expect("it is not over yet");
            // The test submits to the inner channel without ringing the doorbell, so that the poll
            // thread sleeps until it is stopped.
            inner.submit(&mut [nothing(&first), nothing(&second)]).unwrap();
            while !first.is_done() {
                driven.poll();
            }
            // The poll thread, which continues, completes the second descriptor before it exits.
            assert!(second.wait(0, std::time::Instant::now().checked_add(TIMEOUT)));
        });
    }
}
