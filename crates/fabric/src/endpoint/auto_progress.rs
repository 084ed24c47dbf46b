//! The thread of an endpoint with automatic progress that peers may send requests to: it executes
//! them while the program calls nothing, and queues all completions.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use memferry_sys::EventFd;
use memferry_sys::fork::OwnerProcess;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::EndpointCore;
use crate::guard::{FiError, Result};

/// Maximum sleep while something in flight wakes no thread.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Maximum sleep in any case: hosts that vanish ring no doorbell.
const MAX_SLEEP: Duration = Duration::from_millis(500);

/// The thread. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct AutoProgress {
    stop: Arc<StopSignal>,
    thread: Option<JoinHandle<()>>,
    owner: OwnerProcess,
}

#[derive(Debug)]
struct StopSignal {
    is_set: AtomicBool,
    event: EventFd,
}

impl AutoProgress {
    pub(super) fn start(core: &Arc<EndpointCore>) -> Result<Self> {
        let stop = StopSignal { is_set: AtomicBool::new(false), event: EventFd::new()? };
        let stop = Arc::new(stop);
        let (core, seen) = (Arc::downgrade(core), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("memferry-fabric".into())
            .spawn(move || run(&core, &seen))
            .map_err(FiError::from)?;
        Ok(Self { stop, thread: Some(thread), owner: OwnerProcess::current() })
    }
}

impl Drop for AutoProgress {
    fn drop(&mut self) {
        if !self.owner.is_current() {
            // A forked child has no such thread, and shares the descriptor with its parent. The
            // handle names memory that may be freed.
            std::mem::forget(self.thread.take());
            return;
        }
        self.stop.is_set.store(true, Ordering::Release);
        self.stop.event.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(core: &Weak<EndpointCore>, stop: &StopSignal) {
    let Some(ready) = core.upgrade().and_then(|core| core.ready_fd().ok()) else { return };
    while !stop.is_set.load(Ordering::Acquire) {
        let Some(core) = core.upgrade() else { return };
        core.progress();
        let sleep = if core.can_block() { MAX_SLEEP } else { POLL_INTERVAL };
        drop(core);
        let (ready, event) = (ready.as_fd(), stop.event.as_fd());
        let mut descriptors =
            [PollFd::new(&ready, PollFlags::IN), PollFd::new(&event, PollFlags::IN)];
        let sleep = Timespec { tv_sec: 0, tv_nsec: i64::from(sleep.subsec_nanos()) };
        // An interrupted sleep only ends early.
        let _ = poll(&mut descriptors, Some(&sleep));
    }
}
