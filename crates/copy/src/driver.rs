//! A thread that polls the channels which do not move on by themselves, while they have work.
//!
//! With it, every completion of every engine arrives without the application calling anything:
//! futures, eventfds and notification variables need not know what kind of engine is behind them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use memferry_engine::{Channel, OpenError};
use memferry_sys::WaitWord;
use memferry_sys::fork;

/// The thread, and the way to wake it.
#[derive(Debug)]
pub(crate) struct Driver {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    fork_generation: u64,
}

#[derive(Debug)]
struct Shared {
    channels: Vec<Arc<dyn Channel>>,
    /// Rises with every launch, so that a driver about to sleep sees it.
    launches: WaitWord,
    stopping: AtomicBool,
}

impl Driver {
    /// Starts a driver for these channels; none is needed if there are none.
    pub(crate) fn start(channels: Vec<Arc<dyn Channel>>) -> Result<Option<Self>, OpenError> {
        if channels.is_empty() {
            return Ok(None);
        }
        fork::watch();
        let shared = Arc::new(Shared {
            channels,
            launches: WaitWord::new(0),
            stopping: AtomicBool::new(false),
        });
        let worker = shared.clone();
        let thread = std::thread::Builder::new()
            .name("memferry-driver".into())
            .spawn(move || worker.run())
            .map_err(|error| OpenError::System {
                engine: "driver".into(),
                reason: format!("no thread could be started: {error}"),
            })?;
        Ok(Some(Self { shared, thread: Some(thread), fork_generation: fork::generation() }))
    }

    /// Tells the driver that a channel may have work.
    pub(crate) fn launched(&self) {
        self.shared.launches.word().fetch_add(1, Ordering::Release);
        self.shared.launches.wake_all();
    }
}

impl Shared {
    fn run(&self) {
        loop {
            let seen = self.launches.word().load(Ordering::Acquire);
            while self.drive() {}
            if self.stopping.load(Ordering::Acquire) {
                return;
            }
            self.launches.wait(seen, None);
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
        self.shared.stopping.store(true, Ordering::Release);
        self.launched();
        let own =
            self.thread.as_ref().is_some_and(|t| t.thread().id() == std::thread::current().id());
        if own || fork::generation() != self.fork_generation {
            return;
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
