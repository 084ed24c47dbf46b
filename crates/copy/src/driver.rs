//! A thread that polls the channels which do not move on by themselves, while they have work.
//!
//! With it, every completion of every engine arrives without the application calling anything:
//! futures, eventfds and notification variables need not know what kind of engine is behind them.
//! A driven channel tells the driver of every submit, whoever makes it.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use memferry_engine::contract::{enter_engine_thread, is_engine_thread};
use memferry_engine::{
    Channel, ChannelStatistics, Descriptor, ExecutionError, OpenError, Sequence, SubmitError, Taken,
};
use memferry_sys::WaitWord;
use memferry_sys::fork;

/// The thread of a ferry that polls.
#[derive(Debug)]
pub(crate) struct Driver {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    fork_generation: u64,
}

#[derive(Debug)]
struct Shared {
    channels: Vec<Arc<dyn Channel>>,
    bell: Arc<Bell>,
}

/// What driven channels share with their driver.
#[derive(Debug)]
pub(crate) struct Bell {
    /// Rises with every submit, so that a driver about to sleep sees it.
    rings: WaitWord,
    /// The driver ends when there is nothing left to do; nothing more is taken.
    stopping: AtomicBool,
}

impl Bell {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { rings: WaitWord::new(0), stopping: AtomicBool::new(false) })
    }

    fn ring(&self) {
        self.rings.word().fetch_add(1, Ordering::Release);
        self.rings.wake_all();
    }
}

impl Driver {
    /// Starts a driver for these channels, which ring the bell; none is needed if there are none.
    pub(crate) fn start(
        channels: Vec<Arc<dyn Channel>>,
        bell: Arc<Bell>,
    ) -> Result<Option<Self>, OpenError> {
        if channels.is_empty() {
            return Ok(None);
        }
        fork::watch();
        let shared = Arc::new(Shared { channels, bell });
        let worker = shared.clone();
        let thread = std::thread::Builder::new()
            .name("memferry-driver".into())
            .spawn(move || {
                enter_engine_thread();
                worker.run();
            })
            .map_err(|error| OpenError::System {
                engine: "driver".into(),
                reason: format!(
                    "no thread could be started ({error}): raise the limit of processes (ulimit -u)"
                ),
            })?;
        Ok(Some(Self { shared, thread: Some(thread), fork_generation: fork::generation() }))
    }
}

impl Shared {
    fn run(&self) {
        loop {
            let seen = self.bell.rings.word().load(Ordering::Acquire);
            let stopping = self.bell.stopping.load(Ordering::Acquire);
            while self.drive() {}
            if stopping {
                return;
            }
            self.bell.rings.wait(seen, None);
        }
    }

    /// Polls every channel once; `false` when none has work left. Work that waits for something
    /// outside (a device, a delay) is looked at again a little later.
    fn drive(&self) -> bool {
        let moved = self.channels.iter().filter(|channel| channel.poll()).count();
        if moved > 0 {
            return true;
        }
        let waiting = self.channels.iter().any(|channel| channel.outstanding_bytes() > 0);
        if waiting {
            std::thread::sleep(Duration::from_micros(20));
        }
        waiting
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.shared.bell.stopping.store(true, Ordering::Release);
        self.shared.bell.ring();
        if fork::generation() != self.fork_generation || is_engine_thread() {
            return;
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A channel that a driver polls. In a forked child, where there is no driver, it is closed, and
/// what it holds is left alone: it belongs to the parent.
#[derive(Debug)]
pub(crate) struct Driven {
    inner: ManuallyDrop<Arc<dyn Channel>>,
    bell: Arc<Bell>,
    fork_generation: u64,
}

impl Driven {
    pub(crate) fn new(inner: Arc<dyn Channel>, bell: Arc<Bell>) -> Self {
        fork::watch();
        Self { inner: ManuallyDrop::new(inner), bell, fork_generation: fork::generation() }
    }

    fn is_forked(&self) -> bool {
        fork::generation() != self.fork_generation
    }
}

// SAFETY: numbers and descriptors are the inner channel's, passed through unchanged; a channel that
// refuses and stands still, as in a forked child, makes no promise it could break.
unsafe impl Channel for Driven {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Taken, SubmitError> {
        if self.is_forked() || self.bell.stopping.load(Ordering::Acquire) {
            return Err(SubmitError::Closed);
        }
        let taken = self.inner.submit(batch)?;
        if taken.count > 0 {
            self.bell.ring();
        }
        Ok(taken)
    }

    fn completed(&self) -> Sequence {
        if self.is_forked() { 0 } else { self.inner.completed() }
    }

    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError> {
        if self.is_forked() { None } else { self.inner.error_of(sequence) }
    }

    fn poll(&self) -> bool {
        !self.is_forked() && self.inner.poll()
    }

    fn park(&self, sequence: Sequence, timeout: Duration) -> bool {
        !self.is_forked() && self.inner.park(sequence, timeout)
    }

    fn is_asleep(&self) -> bool {
        !self.is_forked() && self.inner.is_asleep()
    }

    fn wake(&self) {
        if !self.is_forked() {
            self.inner.wake();
        }
    }

    fn close(&self) {
        if !self.is_forked() {
            self.inner.close();
        }
    }

    fn outstanding_bytes(&self) -> u64 {
        if self.is_forked() { 0 } else { self.inner.outstanding_bytes() }
    }

    fn statistics(&self) -> ChannelStatistics {
        if self.is_forked() { ChannelStatistics::default() } else { self.inner.statistics() }
    }
}

impl Drop for Driven {
    fn drop(&mut self) {
        if !self.is_forked() {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.inner) };
        }
    }
}
