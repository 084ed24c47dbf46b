//! A channel that a driver polls.

use std::any::Any;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use memferry_engine::contract::as_engine_thread;
use memferry_engine::{
    Channel, ChannelStatistics, Descriptor, ExecutionError, Sequence, SubmitError, Taken,
};
use memferry_sys::fork;
use memferry_sys::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use memferry_sys::sync::{Mutex, lock};

use super::Bell;

/// A channel that a driver polls. In a forked child, where there is no driver, it is closed, and
/// what it holds is left alone: it belongs to the parent. After a panic in its code it is closed too,
/// and everything that it held has failed.
#[derive(Debug)]
pub(crate) struct Driven {
    /// Gone after a panic. Cloned for each call, so that the last call that is under way drops it.
    inner: Mutex<Option<Arc<Guarded>>>,
    bell: Arc<Bell>,
    fork_generation: u64,
    /// The number of the last descriptor that was taken.
    submitted: AtomicU64,
    /// The number that the channel had come to when it broke down.
    reached: AtomicU64,
    /// The inner channel is gone, and with it everything that it held.
    is_over: Arc<AtomicBool>,
}

/// The inner channel. Its drop runs the engine's code, and panics no further.
#[derive(Debug)]
struct Guarded {
    channel: ManuallyDrop<Arc<dyn Channel>>,
    is_over: Arc<AtomicBool>,
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let drop_channel = || {
            // SAFETY: dropped once, here, and not used afterwards.
            as_engine_thread(|| unsafe { ManuallyDrop::drop(&mut self.channel) });
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(drop_channel)) {
            std::mem::forget(panic);
        }
        self.is_over.store(true, Ordering::Release);
    }
}

impl Driven {
    pub(crate) fn new(inner: Arc<dyn Channel>, bell: Arc<Bell>) -> Self {
        fork::watch();
        let is_over = Arc::new(AtomicBool::new(false));
        let channel = ManuallyDrop::new(inner);
        let guarded = Arc::new(Guarded { channel, is_over: is_over.clone() });
        Self {
            inner: Mutex::new(Some(guarded)),
            bell,
            fork_generation: fork::generation(),
            submitted: AtomicU64::new(0),
            reached: AtomicU64::new(0),
            is_over,
        }
    }

    fn is_forked(&self) -> bool {
        fork::generation() != self.fork_generation
    }

    /// Calls the channel. `None` if it is out of reach: after a fork, or after a panic, also one in
    /// this call.
    fn call<R>(&self, call: impl FnOnce(&dyn Channel) -> R) -> Option<R> {
        // First of all: in a child the lock may be held for ever.
        if self.is_forked() {
            return None;
        }
        let inner = lock(&self.inner).clone()?;
        match catch_unwind(AssertUnwindSafe(|| call(&**inner.channel))) {
            Ok(result) => Some(result),
            Err(panic) => {
                self.break_down(text_of(&*panic));
                std::mem::forget(panic);
                None
            }
        }
    }

    /// Drops the channel after a panic. Its drop ends what it holds.
    pub(super) fn break_down(&self, reason: &str) {
        if self.is_forked() {
            return;
        }
        let Some(inner) = lock(&self.inner).take() else { return };
        let reached = catch_unwind(AssertUnwindSafe(|| inner.channel.completed()));
        self.reached.store(reached.unwrap_or(0), Ordering::Release);
        tracing::error!(
            reason,
            "a channel of a device broke down: its pending transfers fail, and the processor does \
             what is asked of it from now on"
        );
    }

    /// How far a channel is that broke down.
    fn end(&self) -> Sequence {
        if self.is_over.load(Ordering::Acquire) {
            self.submitted.load(Ordering::Acquire)
        } else {
            self.reached.load(Ordering::Acquire)
        }
    }
}

/// What a panic says.
fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message")
}

// SAFETY: numbers and descriptors are the inner channel's, passed through unchanged. A channel that
// refuses and stands still, as in a forked child, makes no promise it could break. After a panic the
// inner channel is dropped, which by its own promise ends everything that it holds; only then do the
// numbers reach the last one taken.
unsafe impl Channel for Driven {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Taken, SubmitError> {
        if self.bell.stopping.load(Ordering::Acquire) {
            return Err(SubmitError::Closed);
        }
        let taken = self.call(|inner| inner.submit(batch)).unwrap_or(Err(SubmitError::Closed))?;
        if taken.count > 0 {
            self.submitted.fetch_max(taken.last(), Ordering::AcqRel);
            self.bell.ring();
        }
        Ok(taken)
    }

    fn completed(&self) -> Sequence {
        match self.call(|inner| inner.completed()) {
            Some(completed) => completed,
            None if self.is_forked() => 0,
            None => self.end(),
        }
    }

    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError> {
        match self.call(|inner| inner.error_of(sequence)) {
            Some(error) => error,
            None if self.is_forked() || sequence <= self.reached.load(Ordering::Acquire) => None,
            None => Some(ExecutionError::Engine { done_bytes: 0, reason: "the channel panicked" }),
        }
    }

    fn poll(&self) -> bool {
        // Whoever polls runs the code of those who wait, which may drop the last ferry. Its driver
        // waits for this poll, so this thread must not wait for the driver.
        as_engine_thread(|| self.call(|inner| inner.poll())).unwrap_or(false)
    }

    fn park(&self, sequence: Sequence, timeout: Duration) -> bool {
        let reached = as_engine_thread(|| self.call(|inner| inner.park(sequence, timeout)));
        reached.unwrap_or_else(|| !self.is_forked() && self.end() >= sequence)
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
                let failed = submitted - self.reached.load(Ordering::Acquire).min(submitted);
                let completed = self.end();
                ChannelStatistics { submitted, completed, failed, ..ChannelStatistics::default() }
            }
        }
    }
}

impl Drop for Driven {
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

    use memferry_engine::polled::PolledEngine;
    use memferry_engine::{ChannelOptions, Completion, Engine, Operation};

    use super::super::Driver;
    use super::*;

    /// Longer than anything here takes, however busy the machine is.
    const LIMIT: Duration = Duration::from_secs(60);

    /// Runs what must end.
    fn ends(what: &str, work: impl FnOnce() + Send + 'static) {
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            work();
            let _ = tell.send(());
        });
        told.recv_timeout(LIMIT).unwrap_or_else(|_| panic!("{what} does not end"));
    }

    fn nothing(completion: &Arc<Completion>) -> Option<Descriptor> {
        // SAFETY: one byte from and to memory that is never freed; its completion has no other.
        let copy = unsafe {
            let target = std::ptr::from_mut(Box::leak(Box::new(0u8))) as u64;
            Descriptor::new(Operation::Fill, 0, target, 1).completes(completion.clone())
        };
        Some(copy)
    }

    #[test]
    fn a_poll_whose_completion_drops_the_driver_returns() {
        ends("the poll", || {
            let inner = PolledEngine::new().open_channel(&ChannelOptions::default()).unwrap();
            let bell = Bell::new();
            let driven = Arc::new(Driven::new(inner.clone(), bell.clone()));
            let driver = Driver::start(vec![driven.clone()], bell).unwrap();
            let (first, second) = (Arc::new(Completion::whole()), Arc::new(Completion::whole()));
            first.keep_until_end(driver).expect("it is not over yet");
            // Behind the driver's back, so that it sleeps until it is told to end.
            inner.submit(&mut [nothing(&first), nothing(&second)]).unwrap();
            while !first.is_done() {
                driven.poll();
            }
            // The driver, which goes on by itself, does the rest before it ends.
            assert!(second.wait(0, std::time::Instant::now().checked_add(LIMIT)));
        });
    }
}
