//! A thread that polls the channels which do not move on by themselves, while they have work.
//!
//! With it, every completion of every engine arrives without the application calling anything:
//! futures, eventfds and notification variables need not know what kind of engine is behind them.
//! A driven channel tells the driver of every submit, whoever makes it.
//!
//! A channel whose code panics, on whatever thread, is dropped at once: by the contract that ends what
//! it holds, so every pending transfer fails, and later ones are left to their callers.

mod driven;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use memferry_engine::contract::{enter_engine_thread, is_engine_thread};
use memferry_engine::{Channel, OpenError};
use memferry_sys::sync::atomic::{AtomicBool, Ordering};
use memferry_sys::sync::nap;
use memferry_sys::sync::thread::JoinHandle;
use memferry_sys::{WaitWord, fork};

pub(crate) use driven::Driven;

/// The thread of a ferry that polls.
#[derive(Debug)]
pub(crate) struct Driver {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    fork_generation: u64,
}

#[derive(Debug)]
struct Shared {
    channels: Vec<Arc<Driven>>,
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
        channels: Vec<Arc<Driven>>,
        bell: Arc<Bell>,
    ) -> Result<Option<Self>, OpenError> {
        if channels.is_empty() {
            return Ok(None);
        }
        fork::watch();
        let shared = Arc::new(Shared { channels, bell });
        let worker = shared.clone();
        let run = move || {
            enter_engine_thread();
            if catch_unwind(AssertUnwindSafe(|| worker.run())).is_err() {
                worker.give_up();
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
        Ok(Some(Self { shared, thread: Some(thread), fork_generation: fork::generation() }))
    }
}

impl Shared {
    fn run(&self) {
        loop {
            let seen = self.bell.rings.word().load(Ordering::Acquire);
            let stopping = self.bell.stopping.load(Ordering::Acquire);
            if stopping {
                // Whoever submits at this moment may have asked the bell too early. A channel takes
                // something before it is closed, and then it is done here, or not at all.
                self.channels.iter().for_each(|channel| channel.close());
            }
            while self.drive() {}
            if stopping {
                return;
            }
            self.bell.rings.wait(seen, None);
        }
    }

    /// Nobody polls any more: ends what the channels hold, and takes nothing new.
    fn give_up(&self) {
        self.bell.stopping.store(true, Ordering::Release);
        self.channels.iter().for_each(|channel| channel.break_down("the driver panicked"));
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
            nap(Duration::from_micros(20));
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
