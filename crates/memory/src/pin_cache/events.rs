//! The queue of events from the reader thread to the cache: bounded, and filled without allocation.
//!
//! The reader holds the queue's lock from before it reads until the events are in the queue, and
//! sets `has_events` before it reads. A thread that knows that an event was read therefore sees
//! `has_events`, and finds the event once it has the lock. No thread allocates, frees or waits
//! while it holds the lock.

use std::time::Duration;

use memferry_sys::sync::atomic::{AtomicBool, Ordering};
use memferry_sys::sync::{Condvar, Mutex, lock, wait_while, wait_while_for};
use memferry_sys::userfault::{MappingEvent, Userfault};

/// Maximum number of queued events. On overflow the cache invalidates all entries.
pub(super) const MAX_EVENTS: usize = 256;

/// Events that were read and not applied yet.
#[derive(Debug)]
pub(super) struct MappingEventQueue {
    /// Whether the queue may have events. Written under the lock.
    has_events: AtomicBool,
    /// The reader has failed: no further events arrive. Written under the lock.
    reader_failed: AtomicBool,
    state: Mutex<MappingEventState>,
    /// Signalled when `command` or `sweeps_done` changes.
    command_changed: Condvar,
    /// Makes the reader panic at the next event.
    #[cfg(test)]
    pub(super) panics: AtomicBool,
}

#[derive(Debug)]
struct MappingEventState {
    events: Vec<MappingEvent>,
    lost: bool,
    command: ReaperCommand,
    /// The number of sweeps requested, and the last one that is complete.
    sweeps_requested: u64,
    sweeps_done: u64,
}

impl MappingEventState {
    fn push(&mut self, event: MappingEvent) {
        if self.events.len() < MAX_EVENTS {
            self.events.push(event);
        } else {
            self.lost = true;
        }
    }
}

/// The state of the communication between reader and reaper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReaperCommand {
    /// The reader has not started.
    NotStarted,
    /// Nothing to do.
    Idle,
    /// Events have been queued for 10 ms.
    Reap,
    /// A thread that unmaps memory waits until it is unpinned.
    Sweep,
    /// The cache is being dropped.
    Stop,
}

/// A task of the reaper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReaperTask {
    /// Apply the queued events.
    Reap,
    /// Unpin memory that is not mapped any more and whose event has not been read, and report the
    /// sweep of this number as done.
    Sweep(u64),
}

impl MappingEventQueue {
    /// Creates an empty queue.
    pub(super) fn new() -> Self {
        let events = empty_event_list();
        let state = MappingEventState {
            events,
            lost: false,
            command: ReaperCommand::NotStarted,
            sweeps_requested: 0,
            sweeps_done: 0,
        };
        Self {
            has_events: AtomicBool::new(false),
            reader_failed: AtomicBool::new(false),
            state: Mutex::new(state),
            command_changed: Condvar::new(),
            #[cfg(test)]
            panics: AtomicBool::new(false),
        }
    }

    /// Reads events into the queue. Called only by the reader.
    pub(super) fn read_from(&self, userfault: &Userfault) {
        let mut state = lock(&self.state);
        self.has_events.store(true, Ordering::SeqCst);
        userfault.read(|event| state.push(event));
        if state.events.is_empty() && !state.lost {
            self.has_events.store(false, Ordering::SeqCst);
        }
    }

    /// Queues an event for a test.
    #[cfg(test)]
    pub(super) fn push(&self, event: MappingEvent) {
        lock(&self.state).push(event);
        self.has_events.store(true, Ordering::SeqCst);
    }

    /// Whether there may be events to apply.
    pub(super) fn has_events(&self) -> bool {
        self.has_events.load(Ordering::SeqCst)
    }

    /// Swaps the list of events with an empty one of capacity [`MAX_EVENTS`]. Returns whether
    /// events were, or may have been, lost.
    pub(super) fn take(&self, empty: &mut Vec<MappingEvent>) -> bool {
        let mut state = lock(&self.state);
        std::mem::swap(&mut state.events, empty);
        let has_failed = self.has_reader_failed();
        self.has_events.store(has_failed, Ordering::SeqCst);
        std::mem::take(&mut state.lost) || has_failed
    }

    /// Marks the reader as failed: later changes are lost. Called before the events stop, so that
    /// every change is either queued or known to be lost.
    pub(super) fn set_reader_failed(&self) {
        let state = lock(&self.state);
        self.reader_failed.store(true, Ordering::SeqCst);
        self.has_events.store(true, Ordering::SeqCst);
        drop(state);
    }

    /// Whether the reader has failed.
    pub(super) fn has_reader_failed(&self) -> bool {
        self.reader_failed.load(Ordering::SeqCst)
    }

    /// Reports that the reader has started.
    pub(super) fn mark_started(&self) {
        self.send(ReaperCommand::Idle);
    }

    /// Waits until the reader has started.
    pub(super) fn wait_for_start(&self) {
        self.wait_while(ReaperCommand::NotStarted);
    }

    /// Requests the reaper to apply the queued events.
    pub(super) fn request_reap(&self) {
        self.send(ReaperCommand::Reap);
    }

    /// Requests the reaper to unpin unmapped memory, and waits until that is done, for at most 50
    /// ms: the thread that unmaps the memory may hold a lock that the reaper needs.
    pub(super) fn sweep(&self) {
        const SWEEP_TIMEOUT: Duration = Duration::from_millis(50);
        let number = {
            let mut state = lock(&self.state);
            state.sweeps_requested += 1;
            state.sweeps_requested
        };
        self.send(ReaperCommand::Sweep);
        let waits = |state: &mut MappingEventState| {
            state.sweeps_done < number && state.command != ReaperCommand::Stop
        };
        drop(wait_while_for(&self.command_changed, lock(&self.state), SWEEP_TIMEOUT, waits));
    }

    /// Reports a sweep, and all earlier ones, as done.
    pub(super) fn finish_sweep(&self, number: u64) {
        let mut state = lock(&self.state);
        state.sweeps_done = state.sweeps_done.max(number);
        self.command_changed.notify_all();
    }

    /// Stops the reaper.
    pub(super) fn stop_reaper(&self) {
        self.send(ReaperCommand::Stop);
    }

    /// Waits for a task; `None` if the reaper is to stop.
    pub(super) fn wait_for_task(&self) -> Option<ReaperTask> {
        match self.wait_while(ReaperCommand::Idle) {
            ReaperCommand::Stop => None,
            ReaperCommand::Sweep => Some(ReaperTask::Sweep(lock(&self.state).sweeps_requested)),
            _ => Some(ReaperTask::Reap),
        }
    }

    fn send(&self, command: ReaperCommand) {
        let mut state = lock(&self.state);
        // A sweep includes a reap.
        if state.command != ReaperCommand::Stop
            && (state.command, command) != (ReaperCommand::Sweep, ReaperCommand::Reap)
        {
            state.command = command;
        }
        self.command_changed.notify_all();
    }

    fn wait_while(&self, command: ReaperCommand) -> ReaperCommand {
        let waits = |state: &mut MappingEventState| state.command == command;
        let mut state = wait_while(&self.command_changed, lock(&self.state), waits);
        let next = state.command;
        if matches!(next, ReaperCommand::Reap | ReaperCommand::Sweep) {
            state.command = ReaperCommand::Idle;
        }
        next
    }
}

/// An empty list with capacity [`MAX_EVENTS`].
pub(super) fn empty_event_list() -> Vec<MappingEvent> {
    Vec::with_capacity(MAX_EVENTS)
}
