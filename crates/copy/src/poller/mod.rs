//! The poll thread of a ferry. It polls the channels that have manual progress while they have
//! work.
//!
//! The poll thread makes every completion arrive without a call of the application: futures,
//! eventfds and notification variables work the same with every engine. Threads that wait for a
//! transfer poll its channel themselves, so the poll thread is for those that do not: it polls at once
//! if a transfer is awaited in such a way, leaves the channels alone while other threads poll them, and
//! otherwise only looks from time to time at what nobody asks about.
//!
//! A channel whose code panics, on any thread, is dropped at once. By the contract of `Channel`
//! this ends its descriptors, so every pending transfer fails, and the callers execute later ones
//! inline.

mod channel;
mod doorbell;
mod guarded;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use memferry_engine::runtime::{enter_engine_thread, is_engine_thread};
use memferry_engine::{Channel, OpenError};
use memferry_sys::fork::OwnerProcess;
use memferry_sys::sync::atomic::Ordering;
use memferry_sys::sync::spin_hint;
use memferry_sys::sync::thread::JoinHandle;

pub(crate) use channel::ThreadPolledChannel;
pub(crate) use doorbell::PollDoorbell;

/// The number of polls without progress after which the poll thread sleeps between two polls, for a
/// time that doubles up to `MAX_NAP`.
const IDLE_POLLS: u32 = 128;
const FIRST_NAP: Duration = Duration::from_micros(20);
const MAX_NAP: Duration = Duration::from_micros(200);
/// The time between two looks at transfers that nobody awaits, or that other threads poll for.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// The number of looks at empty channels before the poll thread sleeps until it is woken.
const IDLE_LOOKS: u32 = if cfg!(loom) { 0 } else { 10 };

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
        memferry_sys::clock::minimize_timer_slack();
        let mut pace = Pace::default();
        loop {
            let seen = self.doorbell.seen();
            if self.doorbell.stopping.load(Ordering::Acquire) {
                return self.drain();
            }
            let moved = self.channels.iter().filter(|channel| channel.poll_by_thread()).count();
            let is_busy = self.channels.iter().any(|channel| channel.is_busy());
            if moved > 0 {
                pace = Pace::default();
            } else if is_busy {
                self.pause(&mut pace);
            } else {
                // A transfer that was submitted meanwhile is not missed: if its submitter has set the
                // flag, this thread reads that, and sees that the channel is busy.
                let was_urgent = self.doorbell.is_urgent.swap(false, Ordering::AcqRel);
                if was_urgent && self.channels.iter().any(|channel| channel.is_busy()) {
                    self.doorbell.is_urgent.store(true, Ordering::Release);
                } else if pace.looks < IDLE_LOOKS {
                    pace.looks += 1;
                    self.doorbell.doze(LOOK_INTERVAL);
                } else {
                    self.doorbell.sleep(seen);
                    pace = Pace::default();
                }
            }
        }
    }

    /// Pauses after a poll without progress, while a channel is busy.
    fn pause(&self, pace: &mut Pace) {
        pace.looks = 0;
        let others = self.channels.iter().map(|channel| channel.polls_by_others()).sum();
        let before = pace.others.replace(others);
        if !self.doorbell.is_urgent.load(Ordering::Acquire) {
            self.doorbell.doze(LOOK_INTERVAL);
        } else if before.is_some_and(|before| before != others) {
            self.doorbell.nap(MAX_NAP);
        } else if pace.polls < IDLE_POLLS {
            pace.polls += 1;
            spin_hint();
        } else {
            self.doorbell.nap(pace.nap);
            pace.nap = (2 * pace.nap).min(MAX_NAP);
        }
    }

    /// Finishes everything, and accepts nothing new.
    fn drain(&self) {
        // A submitting thread may have read `stopping` before it was set. A channel accepts its
        // descriptor before it is closed, and then the loop below completes it, or rejects it.
        self.channels.iter().for_each(|channel| channel.close());
        let mut pace = Pace::default();
        loop {
            let moved = self.channels.iter().filter(|channel| channel.poll_by_thread()).count();
            if moved > 0 {
                pace = Pace::default();
            } else if !self.channels.iter().any(|channel| channel.has_accepted()) {
                return;
            } else if pace.polls < IDLE_POLLS {
                pace.polls += 1;
                spin_hint();
            } else {
                memferry_sys::sync::sleep(FIRST_NAP);
            }
        }
    }

    /// Fails all descriptors of the channels and rejects new ones, because no thread polls them any
    /// more.
    fn fail_channels(&self) {
        self.doorbell.stopping.store(true, Ordering::Release);
        self.channels.iter().for_each(|channel| channel.fail("the driver panicked"));
    }
}

/// How often the poll thread polls.
#[derive(Debug)]
struct Pace {
    /// Polls without progress.
    polls: u32,
    /// The next sleep between two polls.
    nap: Duration,
    /// Looks at empty channels.
    looks: u32,
    /// The number of polls by other threads at the last look.
    others: Option<u64>,
}

impl Default for Pace {
    fn default() -> Self {
        Self { polls: 0, nap: FIRST_NAP, looks: 0, others: None }
    }
}

impl Drop for PollThread {
    fn drop(&mut self) {
        self.shared.doorbell.stopping.store(true, Ordering::Release);
        self.shared.doorbell.ring(true);
        if !self.owner.is_current() || is_engine_thread() {
            return;
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
