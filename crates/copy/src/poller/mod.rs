//! The poll thread of a ferry. It polls the channels that have manual progress while they have
//! work.
//!
//! The poll thread makes every completion arrive without a call of the application: futures,
//! eventfds and notification variables work the same with every engine. A polled channel rings the
//! doorbell on every submit, from any thread.
//!
//! A channel whose code panics, on any thread, is dropped at once. By the contract of `Channel`
//! this ends its descriptors, so every pending transfer fails, and the callers execute later ones
//! inline.

mod channel;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use memferry_engine::runtime::{enter_engine_thread, is_engine_thread};
use memferry_engine::{Channel, OpenError};
use memferry_sys::Futex;
use memferry_sys::fork::OwnerProcess;
use memferry_sys::sync::atomic::{AtomicBool, Ordering};
use memferry_sys::sync::sleep;
use memferry_sys::sync::thread::JoinHandle;

pub(crate) use channel::ThreadPolledChannel;

/// The poll thread of a ferry.
#[derive(Debug)]
pub(crate) struct PollThread {
    shared: Arc<PollThreadShared>,
    thread: Option<JoinHandle<()>>,
    owner: OwnerProcess,
}

#[derive(Debug)]
struct PollThreadShared {
    channels: Vec<Arc<ThreadPolledChannel>>,
    doorbell: Arc<PollDoorbell>,
}

/// The doorbell that the polled channels share with their poll thread.
#[derive(Debug)]
pub(crate) struct PollDoorbell {
    /// Incremented by every submit, so that a poll thread about to sleep observes it.
    epoch: Futex,
    /// Set when the poll thread must drain the channels and exit; submits are rejected from then
    /// on.
    stopping: AtomicBool,
}

impl PollDoorbell {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { epoch: Futex::new(0), stopping: AtomicBool::new(false) })
    }

    fn ring(&self) {
        self.epoch.word().fetch_add(1, Ordering::Release);
        self.epoch.wake_all();
    }
}

impl PollThread {
    /// Starts a poll thread for these channels, which ring the doorbell. Returns `None` without any
    /// channel.
    pub(crate) fn start(
        channels: Vec<Arc<ThreadPolledChannel>>,
        bell: Arc<PollDoorbell>,
    ) -> Result<Option<Self>, OpenError> {
        if channels.is_empty() {
            return Ok(None);
        }
        let shared = Arc::new(PollThreadShared { channels, doorbell: bell });
        let worker = shared.clone();
        let run = move || {
            enter_engine_thread();
            if catch_unwind(AssertUnwindSafe(|| worker.run())).is_err() {
                worker.fail_channels();
            }
        };
        let thread = memferry_sys::thread::spawn("memferry-driver", run).map_err(|error| {
            OpenError::System {
                engine: "driver".into(),
                reason: format!(
                    "no thread could be started ({error}): raise the limit of processes \
                     (ulimit -u), or look for a filter that refuses clone3 (seccomp)"
                ),
            }
        })?;
        Ok(Some(Self { shared, thread: Some(thread), owner: OwnerProcess::current() }))
    }
}

impl PollThreadShared {
    fn run(&self) {
        loop {
            let seen = self.doorbell.epoch.word().load(Ordering::Acquire);
            let stopping = self.doorbell.stopping.load(Ordering::Acquire);
            if stopping {
                // A submitting thread may have read `stopping` before it was set. A channel accepts
                // its descriptor before it is closed, and then the loop below completes it, or
                // rejects it.
                self.channels.iter().for_each(|channel| channel.close());
            }
            while self.poll_channels() {}
            if stopping {
                return;
            }
            self.doorbell.epoch.wait(seen, None);
        }
    }

    /// Fails all descriptors of the channels and rejects new ones, because no thread polls them any
    /// more.
    fn fail_channels(&self) {
        self.doorbell.stopping.store(true, Ordering::Release);
        self.channels.iter().for_each(|channel| channel.fail("the driver panicked"));
    }

    /// Polls every channel once; returns `false` when no channel has work left. If no channel makes
    /// progress but some wait for a device or a delay, the poll thread sleeps 20 µs.
    fn poll_channels(&self) -> bool {
        let moved = self.channels.iter().filter(|channel| channel.poll()).count();
        if moved > 0 {
            return true;
        }
        let waiting = self.channels.iter().any(|channel| channel.outstanding_bytes() > 0);
        if waiting {
            sleep(Duration::from_micros(20));
        }
        waiting
    }
}

impl Drop for PollThread {
    fn drop(&mut self) {
        self.shared.doorbell.stopping.store(true, Ordering::Release);
        self.shared.doorbell.ring();
        if !self.owner.is_current() || is_engine_thread() {
            return;
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
