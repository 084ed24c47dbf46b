//! The kernel's side of userfaultfd, for the model checker: the monitored ranges, the pending
//! changes, and the threads that wait until their event is read. There is one userfaultfd, and no
//! time.

use std::collections::VecDeque;
use std::io;

use loom::sync::{Condvar, Mutex};

use super::{EVENTS_PER_READ, MappingEvent, RegisterRangeError, UserfaultDenied, WaitOutcome};
use crate::sync::{lock, wait_while};

loom::lazy_static! {
    static ref KERNEL: ModelKernel = ModelKernel::default();
}

#[derive(Debug, Default)]
struct ModelKernel {
    state: Mutex<ModelState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ModelState {
    /// Monitored ranges: start and exclusive end.
    registered: Vec<(usize, usize)>,
    /// The number of threads between a change and the return from the call that made it.
    changing: usize,
    events: VecDeque<MappingEvent>,
    /// The number of events sent, and of those read.
    sent: usize,
    read: usize,
    is_stopped: bool,
    is_retired: bool,
    panics: bool,
    time_passes: bool,
}

/// Changes that applications make to their memory.
pub mod changing {
    use super::{KERNEL, MappingEvent, lock, wait_while};

    /// Maps other memory over a range. `happens` is the change: it runs at once, before the event
    /// is sent. Returns when the event has been read.
    pub fn replace(start: usize, end: usize, happens: impl FnOnce()) {
        let mut state = lock(&KERNEL.state);
        let is_registered = state.is_registered(start, end);
        state.registered.retain(|&(from, to)| to <= start || end <= from);
        state.changing += usize::from(is_registered);
        happens();
        drop(state);
        if is_registered {
            send(MappingEvent::Unmap { start, end });
        }
    }

    /// Discards the contents of a range. `happens` is the change: it runs after the event has been
    /// read.
    pub fn discard(start: usize, end: usize, happens: impl FnOnce()) {
        let mut state = lock(&KERNEL.state);
        let is_registered = state.is_registered(start, end);
        state.changing += usize::from(is_registered);
        drop(state);
        if is_registered {
            send(MappingEvent::Remove { start, end });
        }
        let _state = lock(&KERNEL.state);
        happens();
    }

    /// Makes the reader panic when an event is available.
    pub fn let_reader_panic() {
        lock(&KERNEL.state).panics = true;
    }

    /// Makes waits of the reader with a timeout expire if no event is available. By default they
    /// never expire.
    pub fn let_time_pass() {
        lock(&KERNEL.state).time_passes = true;
    }

    /// Queues an event and waits until it is read.
    fn send(event: MappingEvent) {
        let mut state = lock(&KERNEL.state);
        if !state.is_retired {
            state.events.push_back(event);
            state.sent += 1;
            let number = state.sent;
            KERNEL.changed.notify_all();
            state = wait_while(&KERNEL.changed, state, |state| {
                state.read < number && !state.is_retired
            });
        }
        state.changing -= 1;
    }
}

impl ModelState {
    fn is_registered(&self, start: usize, end: usize) -> bool {
        !self.is_retired && self.registered.iter().any(|&(from, to)| from < end && start < to)
    }
}

/// The signal that ends the wait of a reader.
#[derive(Debug)]
pub struct StopSignal(());

impl StopSignal {
    /// Creates a signal that is not set.
    pub fn new() -> io::Result<Self> {
        Ok(Self(()))
    }

    /// Sets the signal: the current wait and all later ones return.
    pub fn signal(&self) {
        lock(&KERNEL.state).is_stopped = true;
        KERNEL.changed.notify_all();
    }
}

/// The model of a userfaultfd.
#[derive(Debug)]
pub struct Userfault(());

impl Userfault {
    /// Opens the only userfaultfd.
    pub fn open() -> Result<Self, UserfaultDenied> {
        Ok(Self(()))
    }

    /// Starts monitoring a range of whole pages.
    pub fn register(&self, start: usize, length: usize) -> Result<(), RegisterRangeError> {
        let mut state = lock(&KERNEL.state);
        if state.is_retired {
            return Err(RegisterRangeError::UnsupportedMapping);
        }
        state.registered.push((start, start + length));
        Ok(())
    }

    /// Stops monitoring a range.
    pub fn unregister(&self, start: usize, length: usize) {
        let end = start + length;
        lock(&KERNEL.state).registered.retain(|&(from, to)| to <= start || end <= from);
    }

    /// Stops all monitoring permanently: threads that wait until an event is read continue.
    pub fn retire(&self, _stop: &StopSignal) {
        lock(&KERNEL.state).is_retired = true;
        KERNEL.changed.notify_all();
    }

    /// Whether a thread has changed the mapping of monitored memory and its event has not been
    /// read.
    pub fn has_pending_changes(&self) -> bool {
        let state = lock(&KERNEL.state);
        state.changing > 0 && !state.is_retired
    }

    /// Sleeps until an event is available or `stop` is signalled, and returns which.
    pub fn wait(&self, _stop: &StopSignal, timeout_ns: Option<u32>) -> WaitOutcome {
        let state = lock(&KERNEL.state);
        if timeout_ns.is_some() && state.time_passes && state.events.is_empty() {
            if state.is_stopped {
                return WaitOutcome::Stopped;
            }
            drop(state);
            loom::thread::yield_now();
            return WaitOutcome::TimedOut;
        }
        let state = wait_while(&KERNEL.changed, state, |state| {
            state.events.is_empty() && !state.is_stopped
        });
        if state.is_stopped {
            return WaitOutcome::Stopped;
        }
        if state.panics {
            // The lock is released first: the model checker cannot take a lock while it unwinds.
            drop(state);
            std::panic::resume_unwind(Box::new("injected panic of the reader"));
        }
        WaitOutcome::Events
    }

    /// Reads events without waiting, passes each to `each`, and returns how many there were.
    /// Threads that wait for an event continue before `each` is called.
    pub fn read(&self, each: impl FnMut(MappingEvent)) -> usize {
        let mut state = lock(&KERNEL.state);
        let count = state.events.len().min(EVENTS_PER_READ);
        let events: Vec<_> = state.events.drain(..count).collect();
        state.read += count;
        drop(state);
        KERNEL.changed.notify_all();
        events.into_iter().for_each(each);
        count
    }
}

/// Closing the userfaultfd stops all monitoring.
impl Drop for Userfault {
    fn drop(&mut self) {
        self.retire(&StopSignal(()));
    }
}

/// Does nothing: a model has no signals.
pub fn block_all_signals() {}
