//! The interrupt of a device: a thread that waits long sleeps until the device raises it.
//!
//! A descriptor requests an interrupt if it is the end of a transfer, as far as that is known, and the
//! work since the last one takes longer than a waiter polls. So at most as much as a waiter polls for is
//! behind the last interrupt, and a stream of short copies raises few. One thread at a time sleeps in
//! the eventfd; others sleep by the estimate, and are woken by whoever finishes their transfers. The
//! interrupt is a hint: it may be lost, early or raised for something else, so the sleep has a timeout,
//! and whoever wakes up polls. A thread that finishes something while another sleeps signals the same
//! eventfd. No thread sleeps in it if the device has nothing that raises an interrupt; a thread that
//! finds it so while another sleeps signals the eventfd too.

use std::sync::Arc;
use std::time::Duration;

use memferry_sys::event::SleepEvent;
use memferry_sys::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use memferry_sys::user_wait::UserWait;

use super::effort::PollEffort;
use super::queue::PciQueue;
use super::{DeviceChannel, add};
use crate::completion::polling::MAX_POLLED_NS;
use crate::contract::{Channel, ChannelStatistics, CostLine, InterruptSleep};

/// Nobody sleeps.
const NOBODY: u32 = 0;
/// A thread sleeps, or is about to.
const SLEEPING: u32 = 1;
/// It was signalled by another thread.
const SIGNALLED: u32 = 2;

/// The interrupt of a channel.
#[derive(Debug)]
pub struct ChannelInterrupt {
    event: Arc<dyn SleepEvent>,
    /// The number of bytes that take longer than a waiter polls.
    min_bytes: u64,
    sleeper: AtomicU32,
    /// Written by the sleeper.
    sleeps: AtomicU64,
    wakes: AtomicU64,
}

impl ChannelInterrupt {
    /// An interrupt that signals `event`, of a device whose copies have this cost.
    pub fn new(event: Arc<dyn SleepEvent>, cost: CostLine) -> Self {
        let (sleeps, wakes) = (AtomicU64::new(0), AtomicU64::new(0));
        let polled_ns = (MAX_POLLED_NS as f64 - cost.startup_ns).max(0.0);
        let polled_bytes = (polled_ns / cost.ns_per_byte.max(f64::MIN_POSITIVE)) as u64;
        // The largest number means that there is no interrupt.
        let min_bytes = polled_bytes.saturating_add(1).min(u64::MAX - 1);
        Self { event, min_bytes, sleeper: AtomicU32::new(NOBODY), sleeps, wakes }
    }

    /// Whether a thread sleeps, or is about to, and was not signalled by another thread.
    #[inline]
    fn has_sleeper(&self) -> bool {
        self.sleeper.load(Ordering::Relaxed) == SLEEPING
    }

    /// Becomes the thread that sleeps, if there is none.
    fn claim(&self) -> Option<SleepClaim<'_>> {
        let claimed =
            self.sleeper.compare_exchange(NOBODY, SLEEPING, Ordering::Acquire, Ordering::Relaxed);
        // The drop of a claim ends it: none is made if there is one.
        claimed.is_ok().then(|| SleepClaim(self))
    }
}

/// The right to sleep in the eventfd.
struct SleepClaim<'a>(&'a ChannelInterrupt);

impl Drop for SleepClaim<'_> {
    fn drop(&mut self) {
        self.0.sleeper.store(NOBODY, Ordering::Release);
    }
}

impl DeviceChannel {
    /// Adds the interrupt of the device.
    pub fn with_interrupt(mut self, interrupt: Option<ChannelInterrupt>) -> Self {
        self.interrupt = interrupt;
        self
    }

    /// The number of bytes that take so long that a waiter sleeps.
    #[inline]
    pub(super) fn interrupt_bytes(&self) -> u64 {
        self.interrupt.as_ref().map_or(u64::MAX, |interrupt| interrupt.min_bytes)
    }

    /// Wakes the thread that sleeps in the interrupt after something was finished by another one. Called
    /// inside the gate.
    #[inline]
    pub(super) fn wake_interrupt_sleeper(&self, effort: PollEffort) {
        let Some(interrupt) = &self.interrupt else { return };
        if effort == PollEffort::Arming {
            return;
        }
        // This thread is inside the gate, and the sleeper goes through it before it sleeps. If the sleeper
        // was inside before, this thread sees that it sleeps; if it comes later, it sees what was
        // finished.
        if interrupt.has_sleeper() {
            let exchanged = interrupt.sleeper.compare_exchange(
                SLEEPING,
                SIGNALLED,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            if exchanged.is_ok() {
                interrupt.event.signal();
            }
        }
    }

    /// Wakes the thread that sleeps in the interrupt if none will come, after a post or a poll of another
    /// thread: the device has refused a doorbell or has stopped. Called inside the gate.
    #[inline]
    pub(super) fn wake_unarmed_sleeper(&self, queue: &mut PciQueue) {
        let Some(interrupt) = &self.interrupt else { return };
        // Ordered by the gate, as in `wake_interrupt_sleeper`.
        if interrupt.has_sleeper() && self.needs_poll(queue) {
            self.wake_interrupt_sleeper(PollEffort::Whole);
        }
    }

    /// Sleeps until the interrupt, another thread's signal, or the timeout.
    pub(super) fn sleep_in_interrupt(
        &self,
        timeout: Duration,
        is_done: &dyn Fn() -> bool,
    ) -> InterruptSleep {
        let interrupt = self.interrupt.as_ref();
        let Some(claim) = interrupt.and_then(ChannelInterrupt::claim) else {
            return InterruptSleep::Unavailable;
        };
        let SleepClaim(interrupt) = claim;
        // Old signals first, then the poll: what ends after the poll signals again. A thread that has
        // signalled before the drain signals anew for what it finishes later.
        interrupt.event.drain();
        interrupt.sleeper.store(SLEEPING, Ordering::Relaxed);
        let is_armed = self.try_step(PollEffort::Arming).is_some();
        if is_done() {
            return InterruptSleep::Woken;
        }
        // A thread that is inside meanwhile may have polled before the interrupt was drained, and a
        // device that has stopped raises none. Of what is left, so little may request none.
        if !is_armed || self.outstanding_bytes() < interrupt.min_bytes {
            return InterruptSleep::NotArmed;
        }
        add(&interrupt.sleeps, 1);
        if !interrupt.event.wait(timeout) {
            return InterruptSleep::TimedOut;
        }
        add(&interrupt.wakes, 1);
        InterruptSleep::Woken
    }

    /// Waits for the device's next report inside the gate, where its memory cannot go away. Whoever
    /// submits meanwhile leaves a request that is served half a microsecond later at most.
    #[cold]
    pub(super) fn pause_inside(&self, wait: UserWait) {
        if !self.gate.try_enter() {
            return wait.pause();
        }
        // SAFETY: inside the gate, in no other call: a driver does not call its channel.
        let is_well =
            unsafe { self.queue.with(|queue| queue.call_driver(|hardware| hardware.pause(wait))) };
        if !is_well {
            self.driver_has_failed();
        }
        self.leave();
    }

    /// How often threads slept in the interrupt, and how often it woke them.
    pub(super) fn interrupt_statistics(&self) -> ChannelStatistics {
        let Some(interrupt) = &self.interrupt else { return ChannelStatistics::default() };
        ChannelStatistics {
            sleeps: interrupt.sleeps.load(Ordering::Acquire),
            wakes: interrupt.wakes.load(Ordering::Acquire),
            ..ChannelStatistics::default()
        }
    }
}
