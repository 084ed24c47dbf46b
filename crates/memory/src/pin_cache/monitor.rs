//! The two threads of a monitored pin cache.
//!
//! The *reader* only drains the userfaultfd. Every thread that unmaps monitored memory blocks until
//! its event is read, possibly while it holds the cache's lock or the allocator's; the reader
//! therefore never allocates, frees, handles signals or takes a lock that is held for long. The
//! *reaper* unpins stale memory if no request does so first. If pins are of page frames, the reader
//! makes the reaper unpin unmapped memory before it reads: a device must not know addresses that
//! their owner may get from the kernel again. That wait has a timeout.
//!
//! A reader that panics closes the descriptor, which releases all threads that wait for it, and the
//! cache keeps nothing from then on. A reaper that panics, in the code of a pinner, continues with
//! the next task.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use memferry_sys::sync::thread::{self, JoinHandle};
use memferry_sys::userfault::{StopSignal, Userfault, WaitOutcome, block_all_signals};

use super::PinCacheError;
use super::events::{MappingEventQueue, ReaperTask};
use super::shared::{MappingMonitor, PinCacheShared};

/// Time after which the reaper is woken for queued events, in nanoseconds (10 ms).
const REAP_DELAY_NS: u32 = 10_000_000;

/// Maximum number of polls for pending changes before a request bypasses the cache.
const MAX_QUIESCE_POLLS: usize = if cfg!(loom) { 2 } else { 64 };

/// The threads, and the state that they share with requests.
#[derive(Debug)]
pub(super) struct MonitorThreads {
    monitor: MappingMonitor,
    stop: Arc<StopSignal>,
    reader: JoinHandle<()>,
    reaper: JoinHandle<()>,
}

impl MonitorThreads {
    /// Starts both threads; the reader runs when this returns.
    pub(super) fn start(shared: &Arc<PinCacheShared>) -> Result<Self, PinCacheError> {
        let userfault = Arc::new(Userfault::open().map_err(PinCacheError::NoEvents)?);
        let monitor = MappingMonitor { userfault, events: Arc::new(MappingEventQueue::new()) };
        let stop = Arc::new(StopSignal::new().map_err(PinCacheError::NoThread)?);
        let reader = {
            let (monitor, stop) = (monitor.clone(), Arc::clone(&stop));
            let sweeps = !shared.pinner.tracks_mapping();
            spawn("memferry-pin-events", move || run_reader(monitor, &stop, sweeps))?
        };
        monitor.events.wait_for_start();
        let reaper = {
            let (monitor, shared) = (monitor.clone(), Arc::clone(shared));
            spawn("memferry-pin-reaper", move || {
                while let Some(task) = monitor.events.wait_for_task() {
                    let reap = || {
                        shared.with(Some(&monitor), |index, cleared| {
                            if let ReaperTask::Sweep(_) = task {
                                index.invalidate_unmapped(cleared);
                            }
                        });
                    };
                    if catch_unwind(AssertUnwindSafe(reap)).is_err() {
                        tracing::error!("memory stays pinned: the pinner panicked in unpin");
                    }
                    if let ReaperTask::Sweep(number) = task {
                        monitor.events.finish_sweep(number);
                    }
                }
            })
        };
        match reaper {
            Ok(reaper) => Ok(Self { monitor, stop, reader, reaper }),
            Err(error) => {
                stop.signal();
                drop(monitor);
                let _ = reader.join();
                Err(error)
            }
        }
    }

    /// The state that requests need.
    pub(super) fn monitor(&self) -> &MappingMonitor {
        &self.monitor
    }

    /// Polls until no change of monitored memory is pending, at most [`MAX_QUIESCE_POLLS`] times.
    /// If it returns true, the events of all earlier changes have been read.
    pub(super) fn quiesce(&self) -> bool {
        for _ in 0..MAX_QUIESCE_POLLS {
            if !self.monitor.userfault.has_pending_changes() {
                return true;
            }
            thread::yield_now();
        }
        false
    }

    /// Stops both threads. No range may be registered any more.
    pub(super) fn shut_down(self) {
        self.monitor.events.stop_reaper();
        let _ = self.reaper.join();
        // The reader holds the last reference and closes the descriptor at its end. If it were
        // closed earlier, joining could free a monitored stack without a reader.
        drop(self.monitor);
        self.stop.signal();
        let _ = self.reader.join();
    }

    /// Leaks the threads: they do not exist in a forked child, and even detaching them would access
    /// memory that is not valid there.
    pub(super) fn leak_after_fork(self) {
        std::mem::forget(self);
    }
}

fn spawn(
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, PinCacheError> {
    let thread = memferry_sys::thread::spawn(name, work);
    thread.map_err(|error: io::Error| PinCacheError::NoThread(error))
}

/// Runs the reader. With `sweeps`, memory is unpinned before the thread that unmapped it continues:
/// that thread waits until its event is read.
fn run_reader(monitor: MappingMonitor, stop: &StopSignal, sweeps: bool) {
    block_all_signals();
    monitor.events.mark_started();
    if catch_unwind(AssertUnwindSafe(|| read_until_stopped(&monitor, stop, sweeps))).is_err() {
        // In this order, every change is either read or known to be lost.
        monitor.events.set_reader_failed();
        monitor.userfault.retire(stop);
        monitor.events.request_reap();
        tracing::error!("the userfaultfd reader panicked: the pin cache is disabled");
    }
    // Closing stops all monitoring and wakes all waiting threads; only then may this thread free
    // memory.
    drop(monitor.userfault);
}

fn read_until_stopped(monitor: &MappingMonitor, stop: &StopSignal, sweeps: bool) {
    let MappingMonitor { userfault, events } = monitor;
    loop {
        let timeout_ns = events.has_events().then_some(REAP_DELAY_NS);
        match userfault.wait(stop, timeout_ns) {
            WaitOutcome::Events => {
                #[cfg(test)]
                if events.panics.load(std::sync::atomic::Ordering::SeqCst) {
                    std::panic::resume_unwind(Box::new("injected panic of the reader"));
                }
                if sweeps {
                    events.sweep();
                }
                events.read_from(userfault);
            }
            WaitOutcome::TimedOut => events.request_reap(),
            WaitOutcome::Stopped => return,
        }
    }
}
