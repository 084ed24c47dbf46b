//! The streams of the model: threads that execute their commands in order.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use memferry_sys::sync::lock;

use super::CudaModelShared;

#[derive(Debug)]
pub(super) struct StreamThread {
    pub(super) queue: Arc<StreamQueue>,
    pub(super) thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
pub(super) struct StreamQueue {
    pub(super) state: Mutex<StreamQueueState>,
    pub(super) doorbell: Condvar,
    /// Notified when the queue is empty and no command runs.
    pub(super) idle: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct StreamQueueState {
    pub(super) commands: VecDeque<StreamCommand>,
    pub(super) is_busy: bool,
    pub(super) is_closed: bool,
}

/// A command of a stream. Addresses are those of the contents.
#[derive(Debug)]
pub(super) enum StreamCommand {
    Copy {
        source: u64,
        target: u64,
        bytes: usize,
        host: Option<(usize, usize)>,
        inside: [Option<(u64, u64)>; 2],
    },
    Fill {
        target: u64,
        value: u8,
        bytes: usize,
    },
    Record {
        event: u64,
        generation: u64,
    },
    WaitEvent {
        event: u64,
        generation: u64,
    },
}

impl CudaModelShared {
    /// Runs the thread of a stream.
    pub(super) fn run(&self, queue: &StreamQueue) {
        loop {
            let mut state = lock(&queue.state);
            state.is_busy = false;
            let command = loop {
                if let Some(command) = state.commands.pop_front() {
                    break command;
                }
                queue.idle.notify_all();
                if state.is_closed {
                    return;
                }
                state = queue.doorbell.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            state.is_busy = true;
            drop(state);
            self.execute(command);
        }
    }

    /// Marks the device as lost, and wakes all waiting threads.
    pub(super) fn lose(&self) {
        self.is_lost.store(true, Ordering::SeqCst);
        // A thread that has just read `is_lost` as false holds the lock until it sleeps.
        drop(lock(&self.state));
        self.event_reached.notify_all();
    }

    /// Waits until one more copy may start.
    fn wait_for_permit(&self) {
        let mut state = lock(&self.state);
        let is_lost = || self.is_lost.load(Ordering::SeqCst);
        while !is_lost() && state.max_copies.is_some_and(|max| state.copies_started >= max) {
            state = self.event_reached.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.copies_started += 1;
    }

    fn execute(&self, command: StreamCommand) {
        let is_lost = || self.is_lost.load(Ordering::SeqCst);
        match command {
            StreamCommand::Copy { source, target, bytes, host, inside } => {
                std::thread::sleep(self.faults.delay);
                self.wait_for_permit();
                let number = self.copies.fetch_add(1, Ordering::SeqCst) + 1;
                if self.faults.lost_at_copy == Some(number) {
                    self.lose();
                }
                if !is_lost() {
                    // SAFETY: the thread that enqueued the copy guarantees its memory until the
                    // stream has passed it, and `copy` checked device memory.
                    unsafe { std::ptr::copy(source as *const u8, target as *mut u8, bytes) };
                }
                let mut state = lock(&self.state);
                state.stats.copies += 1;
                if let Some(range) = host
                    && let Some(at) = state.in_flight.iter().position(|each| *each == range)
                {
                    state.in_flight.swap_remove(at);
                }
                for range in inside.into_iter().flatten() {
                    let at = state.in_flight_inside.iter().position(|each| *each == range);
                    at.into_iter().for_each(|at| _ = state.in_flight_inside.swap_remove(at));
                }
            }
            StreamCommand::Fill { target, value, bytes } => {
                if !is_lost() {
                    // SAFETY: as above.
                    unsafe { std::ptr::write_bytes(target as *mut u8, value, bytes) };
                }
            }
            // No event after a lost copy is reached: a thread that polled just before the loss
            // would take the copy for complete.
            StreamCommand::Record { .. } if is_lost() => self.event_reached.notify_all(),
            StreamCommand::Record { event, generation } => {
                if let Some((_, reached)) = lock(&self.state).events.get_mut(&event) {
                    *reached = generation.max(*reached);
                }
                self.event_reached.notify_all();
            }
            StreamCommand::WaitEvent { event, generation } => {
                let mut state = lock(&self.state);
                while !is_lost() && state.events.get(&event).is_some_and(|(_, at)| *at < generation)
                {
                    state = self.event_reached.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}

impl Drop for StreamThread {
    fn drop(&mut self) {
        lock(&self.queue.state).is_closed = true;
        self.queue.doorbell.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
