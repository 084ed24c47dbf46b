//! The streams of the model: threads that carry out what is put into them, one after the other.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use memferry_sys::sync::lock;

use super::Shared;

#[derive(Debug)]
pub(super) struct Queue {
    pub(super) orders: Arc<Orders>,
    pub(super) thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
pub(super) struct Orders {
    pub(super) inbox: Mutex<Inbox>,
    pub(super) rung: Condvar,
    /// Rung when the queue is empty and nothing is being done.
    pub(super) idle: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) queue: VecDeque<Order>,
    pub(super) is_busy: bool,
    pub(super) is_closed: bool,
}

/// What a stream does. Addresses are those at which the bytes really are.
#[derive(Debug)]
pub(super) enum Order {
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
        turn: u64,
    },
    Await {
        event: u64,
        turn: u64,
    },
}

impl Shared {
    /// What the thread of a stream does.
    pub(super) fn run(&self, orders: &Orders) {
        loop {
            let mut inbox = lock(&orders.inbox);
            inbox.is_busy = false;
            let order = loop {
                if let Some(order) = inbox.queue.pop_front() {
                    break order;
                }
                orders.idle.notify_all();
                if inbox.is_closed {
                    return;
                }
                inbox = orders.rung.wait(inbox).unwrap_or_else(PoisonError::into_inner);
            };
            inbox.is_busy = true;
            drop(inbox);
            self.carry_out(order);
        }
    }

    /// Says that the device is lost, to those who wait for something too.
    pub(super) fn lose(&self) {
        self.is_lost.store(true, Ordering::SeqCst);
        // Whoever has just seen that it is not lost is asleep by now.
        drop(lock(&self.state));
        self.reached.notify_all();
    }

    /// Waits until one more copy may be carried out.
    fn wait_for_turn(&self) {
        let mut state = lock(&self.state);
        let is_lost = || self.is_lost.load(Ordering::SeqCst);
        while !is_lost() && state.most_copies.is_some_and(|most| state.copies_begun >= most) {
            state = self.reached.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.copies_begun += 1;
    }

    fn carry_out(&self, order: Order) {
        let is_lost = || self.is_lost.load(Ordering::SeqCst);
        match order {
            Order::Copy { source, target, bytes, host, inside } => {
                std::thread::sleep(self.faults.delay);
                self.wait_for_turn();
                let number = self.copies.fetch_add(1, Ordering::SeqCst) + 1;
                if self.faults.lost_at_copy == Some(number) {
                    self.lose();
                }
                if !is_lost() {
                    // SAFETY: whoever put the copy into the stream vouched for its memory until the
                    // stream has passed it, and `copy` checked the device's.
                    unsafe { std::ptr::copy(source as *const u8, target as *mut u8, bytes) };
                }
                let mut state = lock(&self.state);
                state.sightings.copies += 1;
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
            Order::Fill { target, value, bytes } => {
                if !is_lost() {
                    // SAFETY: as above.
                    unsafe { std::ptr::write_bytes(target as *mut u8, value, bytes) };
                }
            }
            // Nothing behind a copy that was lost is reached: whoever asked just before the loss
            // would take the copy for done.
            Order::Record { .. } if is_lost() => self.reached.notify_all(),
            Order::Record { event, turn } => {
                if let Some((_, reached)) = lock(&self.state).events.get_mut(&event) {
                    *reached = turn.max(*reached);
                }
                self.reached.notify_all();
            }
            Order::Await { event, turn } => {
                let mut state = lock(&self.state);
                while !is_lost() && state.events.get(&event).is_some_and(|(_, at)| *at < turn) {
                    state = self.reached.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        lock(&self.orders.inbox).is_closed = true;
        self.orders.rung.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
