//! A channel that the poll thread polls.

use std::any::Any;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use memferry_engine::runtime::as_engine_thread;
use memferry_engine::{
    Channel, ChannelStatistics, Descriptor, ExecutionError, Sequence, SubmitError, Submitted,
};
use memferry_sys::fork::OwnerProcess;
use memferry_sys::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use memferry_sys::sync::{Mutex, lock, store_max};

use super::PollDoorbell;

/// Wrapper of a channel that the poll thread polls. In a forked child, which has no poll thread,
/// the channel is closed, and its descriptors stay untouched because they belong to the parent.
/// After a panic in the engine's code the channel is closed too, and all its descriptors have
/// failed.
#[derive(Debug)]
pub(crate) struct ThreadPolledChannel {
    /// `None` after a panic. Each call clones the reference, so that the last running call drops
    /// the channel.
    inner: Mutex<Option<Arc<GuardedChannel>>>,
    doorbell: Arc<PollDoorbell>,
    owner: OwnerProcess,
    /// The sequence of the last accepted descriptor.
    submitted: AtomicU64,
    /// The completed sequence at the time of the panic.
    failed_at: AtomicU64,
    /// Whether the inner channel is dropped, and with it all its descriptors.
    is_dropped: Arc<AtomicBool>,
}

/// The inner channel. Its drop runs the engine's code and contains a panic of it.
#[derive(Debug)]
struct GuardedChannel {
    channel: ManuallyDrop<Arc<dyn Channel>>,
    is_dropped: Arc<AtomicBool>,
}

impl Drop for GuardedChannel {
    fn drop(&mut self) {
        let drop_channel = || {
            // SAFETY: the channel is dropped once, here, and not used afterwards.
            as_engine_thread(|| unsafe { ManuallyDrop::drop(&mut self.channel) });
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(drop_channel)) {
            std::mem::forget(panic);
        }
        self.is_dropped.store(true, Ordering::Release);
    }
}

impl ThreadPolledChannel {
    pub(crate) fn new(inner: Arc<dyn Channel>, bell: Arc<PollDoorbell>) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let channel = ManuallyDrop::new(inner);
        let guarded = Arc::new(GuardedChannel { channel, is_dropped: is_over.clone() });
        Self {
            inner: Mutex::new(Some(guarded)),
            doorbell: bell,
            owner: OwnerProcess::current(),
            submitted: AtomicU64::new(0),
            failed_at: AtomicU64::new(0),
            is_dropped: is_over,
        }
    }

    fn is_forked(&self) -> bool {
        !self.owner.is_current()
    }

    /// Calls the inner channel. Returns `None` if it is inaccessible: after a fork, or after a
    /// panic, including one in this call.
    fn call<R>(&self, call: impl FnOnce(&dyn Channel) -> R) -> Option<R> {
        // This check comes first: in a forked child the lock may be locked for ever.
        if self.is_forked() {
            return None;
        }
        let inner = lock(&self.inner).clone()?;
        match catch_unwind(AssertUnwindSafe(|| call(&**inner.channel))) {
            Ok(result) => Some(result),
            Err(panic) => {
                self.fail(text_of(&*panic));
                std::mem::forget(panic);
                None
            }
        }
    }

    /// Drops the inner channel after a panic, which ends its descriptors.
    pub(super) fn fail(&self, reason: &str) {
        if self.is_forked() {
            return;
        }
        let Some(inner) = lock(&self.inner).take() else { return };
        let reached = catch_unwind(AssertUnwindSafe(|| inner.channel.completed()));
        self.failed_at.store(reached.unwrap_or(0), Ordering::Release);
        tracing::error!(
            reason,
            "a channel of a device broke down: its pending transfers fail, and the processor does \
             what is asked of it from now on"
        );
    }

    /// Returns the completed sequence of a channel that panicked.
    fn final_sequence(&self) -> Sequence {
        if self.is_dropped.load(Ordering::Acquire) {
            self.submitted.load(Ordering::Acquire)
        } else {
            self.failed_at.load(Ordering::Acquire)
        }
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
        let taken = self.call(|inner| inner.submit(batch)).unwrap_or(Err(SubmitError::Closed))?;
        if taken.count > 0 {
            store_max(&self.submitted, taken.last());
            self.doorbell.ring();
        }
        Ok(taken)
    }

    fn completed(&self) -> Sequence {
        match self.call(|inner| inner.completed()) {
            Some(completed) => completed,
            None if self.is_forked() => 0,
            None => self.final_sequence(),
        }
    }

    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError> {
        match self.call(|inner| inner.error_of(sequence)) {
            Some(error) => error,
            None if self.is_forked() || sequence <= self.failed_at.load(Ordering::Acquire) => None,
            None => Some(ExecutionError::Engine { done_bytes: 0, reason: "the channel panicked" }),
        }
    }

    fn poll(&self) -> bool {
        // The polling thread runs completion callbacks, which may drop the last ferry. The poll
        // thread waits for this poll, so the calling thread must not join the poll thread.
        as_engine_thread(|| self.call(|inner| inner.poll())).unwrap_or(false)
    }

    fn park(&self, sequence: Sequence, timeout: Duration) -> bool {
        let reached = as_engine_thread(|| self.call(|inner| inner.park(sequence, timeout)));
        reached.unwrap_or_else(|| !self.is_forked() && self.final_sequence() >= sequence)
    }

    fn is_asleep(&self) -> bool {
        self.call(|inner| inner.is_asleep()).unwrap_or(false)
    }

    fn wake(&self) {
        self.call(|inner| inner.wake());
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
                let completed = self.final_sequence();
                ChannelStatistics { submitted, completed, failed, ..ChannelStatistics::default() }
            }
        }
    }
}

impl Drop for ThreadPolledChannel {
    fn drop(&mut self) {
        if self.is_forked() {
            let inner = self.inner.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
            std::mem::forget(inner.take());
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::mpsc;

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
