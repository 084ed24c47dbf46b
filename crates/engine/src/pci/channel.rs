//! A channel around a hardware queue.
//!
//! One thread at a time is inside the gate: it brings descriptors to the hardware, and finishes what
//! the hardware has done. A submitter that finds the gate free enters it and posts its descriptors
//! itself. Nobody waits in front of the gate: a submitter that finds it occupied leaves its
//! descriptors in the inbox, and whoever is inside posts them. The counters are words that anybody
//! reads.

mod effort;
mod finished;
mod interrupt;
mod queue;

use std::collections::VecDeque;
use std::time::Duration;

use memferry_sys::stats::{self, Block, kinds};
use memferry_sys::sync::atomic::{AtomicU64, Ordering};
use memferry_sys::sync::{Mutex, UnsafeCell, lock, spin_hint, thread};
use memferry_sys::user_wait::UserWait;

use self::effort::PollEffort;
use self::finished::FinishedDescriptor;
pub use self::interrupt::ChannelInterrupt;
use self::queue::PciQueue;
use super::gate::{DriverGate, GateState};
use super::hardware::HardwareQueue;
use crate::contract::{
    Channel, ChannelStatistics, Descriptor, ExecutionError, InterruptSleep, Sequence, SubmitError,
    Submitted,
};
use crate::runtime::FailureLog;
use crate::runtime::ring::MAX_CAPACITY;

/// The channel. Any thread may poll it; one thread at a time makes progress.
#[derive(Debug)]
pub struct DeviceChannel {
    gate: DriverGate,
    queue: GatedQueue,
    /// Descriptors that are accepted and not yet in the queue. Locked for the time of a push.
    inbox: Mutex<VecDeque<Descriptor>>,
    failures: Mutex<FailureLog>,
    counters: ChannelCounters,
    /// The interrupt of the device, if it has one.
    interrupt: Option<ChannelInterrupt>,
    /// Whether a pause is inside the gate, where the driver monitors memory of the device.
    monitors_memory: bool,
    /// What `memferry top` shows. Written inside the gate.
    shown: Option<Block<kinds::ChannelCounters>>,
    capacity: usize,
}

/// The queue, which the thread inside the gate uses alone.
struct GatedQueue(UnsafeCell<PciQueue>);

// SAFETY: the queue may be sent to other threads, and one at a time accesses it: the thread inside
// the gate, whose entry and exit order the accesses.
unsafe impl Sync for GatedQueue {}

impl std::fmt::Debug for GatedQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GatedQueue").finish_non_exhaustive()
    }
}

impl GatedQueue {
    /// Runs `work` with the queue.
    ///
    /// # Safety
    /// The calling thread must be inside the gate, and not in another call of this.
    #[inline]
    unsafe fn with<R>(&self, work: impl FnOnce(&mut PciQueue) -> R) -> R {
        // SAFETY: no other thread is inside the gate, and this one has no other reference.
        self.0.with_mut(|queue| work(unsafe { &mut *queue }))
    }
}

/// The counters. Each but `full` has one writer at a time: the holder of the inbox, or the thread
/// inside the gate.
#[derive(Debug, Default)]
struct ChannelCounters {
    /// Written with the inbox locked.
    inbox_bytes: AtomicU64,
    /// Written inside the gate, by submitters that posted their descriptors themselves.
    direct_bytes: AtomicU64,
    /// Submits that a full channel did not accept completely.
    full: AtomicU64,
    /// Written inside the gate. `taken` are the descriptors that have left the queue to be finished.
    taken: AtomicU64,
    completed: AtomicU64,
    ended_bytes: AtomicU64,
    copied_bytes: AtomicU64,
    failed: AtomicU64,
}

/// Adds to a counter of one writer.
#[inline]
fn add(counter: &AtomicU64, more: u64) -> u64 {
    let sum = counter.load(Ordering::Relaxed) + more;
    counter.store(sum, Ordering::Release);
    sum
}

impl DeviceChannel {
    /// Creates a channel of at most `capacity` descriptors, and never more than [`MAX_CAPACITY`].
    pub fn new(hardware: Box<dyn HardwareQueue>, capacity: usize) -> Self {
        let capacity = capacity.clamp(1, MAX_CAPACITY);
        let monitors_memory = hardware.monitors_memory();
        Self {
            gate: DriverGate::new(),
            queue: GatedQueue(UnsafeCell::new(PciQueue::new(hardware))),
            inbox: Mutex::default(),
            failures: Mutex::default(),
            counters: ChannelCounters::default(),
            interrupt: None,
            monitors_memory,
            shown: None,
            capacity: capacity.max(1),
        }
    }

    /// Shows the channel in `memferry top`, named after its engine and a label.
    pub fn shown_as(mut self, engine: &str, label: Option<&str>) -> Self {
        self.shown = Some(kinds::open_channel(engine, label));
        self
    }

    /// Finishes completed descriptors; `false` if there are none, or another thread is inside.
    fn step(&self, effort: PollEffort) -> bool {
        self.try_step(effort).unwrap_or(false)
    }

    /// The same; `None` if another thread is inside, or if no interrupt will come although it is armed.
    fn try_step(&self, effort: PollEffort) -> Option<bool> {
        if !self.gate.try_enter() {
            return None;
        }
        // SAFETY: inside the gate, in no other call. The end of a transfer runs code of the user, which
        // finds the gate occupied if it uses this channel.
        let result = unsafe { self.queue.with(|queue| self.step_inside(queue, effort)) };
        self.leave();
        result
    }

    /// A step inside the gate. Returns as [`DeviceChannel::try_step`] does.
    fn step_inside(&self, queue: &mut PciQueue, effort: PollEffort) -> Option<bool> {
        let mut is_broken = !queue.poll(effort);
        let (mut has_finished, mut max_executed) = (false, effort.max_executed());
        // The end of a transfer may submit a dependent transfer to this channel: that goes into the
        // inbox. The processor executes failed descriptors here.
        while let Some(entry) = queue.take_finished(&self.counters.taken, &mut max_executed) {
            has_finished = true;
            self.finish(entry);
        }
        is_broken |= !queue.post(self.interrupt_bytes());
        if has_finished {
            self.show(queue.is_empty());
            self.wake_interrupt_sleeper(effort);
        }
        if is_broken {
            self.driver_has_failed();
        }
        if effort != PollEffort::Arming {
            self.wake_unarmed_sleeper(queue);
            return Some(has_finished);
        }
        (!self.needs_poll(queue)).then_some(has_finished)
    }

    /// Whether no interrupt will come before a poll, inside the gate.
    fn needs_poll(&self, queue: &mut PciQueue) -> bool {
        queue.needs_poll().unwrap_or_else(|_| {
            self.driver_has_failed();
            true
        })
    }

    /// Stores the statistics for `memferry top`, inside the gate: if something has begun or nothing is left, and else
    /// after 64 descriptors.
    fn show(&self, is_due: bool) {
        let Some(shown) = &self.shown else { return };
        let new = self.completed().wrapping_sub(shown.completed.get());
        if is_due || new >= stats::TIMED_INTERVAL {
            self.statistics().show(shown);
            shown.outstanding_bytes.set(self.outstanding_bytes());
        }
    }

    /// Leaves the gate, after the inbox is empty.
    #[inline]
    fn leave(&self) {
        self.gate.leave(|| {
            // SAFETY: inside the gate until this returns, in no other call.
            unsafe { self.queue.with(|queue| self.take_inbox(queue)) };
        });
    }

    /// Brings what is in the inbox to the hardware, inside the gate.
    #[cold]
    fn take_inbox(&self, queue: &mut PciQueue) {
        self.bring(queue, |queue| queue.extend(lock(&self.inbox).drain(..)));
    }

    /// Brings accepted descriptors to the hardware, inside the gate.
    #[inline]
    fn bring(&self, queue: &mut PciQueue, extend: impl FnOnce(&mut PciQueue)) {
        let was_idle = queue.is_empty();
        extend(queue);
        if !queue.post(self.interrupt_bytes()) {
            self.driver_has_failed();
        }
        self.wake_unarmed_sleeper(queue);
        // A device that does not answer has its depth shown.
        if was_idle {
            self.show(true);
        }
    }

    /// Closes the channel after its driver panicked, inside the gate. No interrupt will come any more.
    #[cold]
    pub(super) fn driver_has_failed(&self) {
        self.gate.close();
        self.wake_interrupt_sleeper(PollEffort::Whole);
    }

    /// How many of `wanted` descriptors the channel has space for.
    #[inline]
    fn acceptable(&self, state: GateState, wanted: u64) -> Result<u64, SubmitError> {
        if state.is_closed() {
            return Err(SubmitError::Closed);
        }
        // The gate may be older than this count; then it has changed, and accepts nothing by `state`.
        let taken = self.counters.taken.load(Ordering::Acquire);
        let in_flight = state.accepted().saturating_sub(taken);
        Ok(wanted.min((self.capacity as u64).saturating_sub(in_flight)))
    }

    /// Submits by the inbox, to the thread inside the gate, or inside if there is none.
    #[cold]
    fn submit_by_inbox(
        &self,
        batch: &mut [Option<Descriptor>],
        wanted: u64,
    ) -> Result<Submitted, SubmitError> {
        let mut inbox = lock(&self.inbox);
        let mut state = self.gate.state();
        // The request comes before the push: whoever serves it waits for the lock.
        let (count, has_entered) = loop {
            let count = self.acceptable(state, wanted)?;
            if count == 0 {
                break (0, false);
            }
            match self.gate.request_with(state, count) {
                Ok(has_entered) => break (count, has_entered),
                Err(now) => state = now,
            }
        };
        let taken = batch.iter_mut().filter_map(Option::take).take(count as usize);
        let mut bytes = 0;
        inbox.extend(taken.inspect(|descriptor| bytes += descriptor.length()));
        add(&self.counters.inbox_bytes, bytes);
        drop(inbox);
        if has_entered {
            self.leave();
        }
        Ok(self.submitted(state, count, wanted))
    }

    /// The result of a submit.
    #[inline]
    fn submitted(&self, before: GateState, count: u64, wanted: u64) -> Submitted {
        if count < wanted {
            self.counters.full.fetch_add(1, Ordering::Relaxed);
        }
        Submitted { first: before.accepted() + 1, count: count as usize }
    }

    /// Reports the end of a descriptor, and counts it.
    fn finish(&self, entry: FinishedDescriptor) {
        let (counters, bytes) = (&self.counters, entry.descriptor.length());
        match entry.finish() {
            Ok(()) => _ = add(&counters.copied_bytes, bytes),
            Err(error) => {
                add(&counters.failed, 1);
                let sequence = counters.completed.load(Ordering::Relaxed) + 1;
                lock(&self.failures).push(sequence, error);
            }
        }
        if let Some(shown) = &self.shown {
            shown.sizes[stats::class_of(bytes)].add(1);
        }
        add(&counters.ended_bytes, bytes);
        add(&counters.completed, 1);
    }
}

// SAFETY: descriptors are finished in order before their numbers are counted, and by the contract
// of `HardwareQueue` the device accesses none of them after its end.
unsafe impl Channel for DeviceChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
        let wanted = batch.iter().flatten().count() as u64;
        let state = self.gate.state();
        let count = self.acceptable(state, wanted)?;
        if count == 0 {
            return Ok(self.submitted(state, 0, wanted));
        }
        if !self.gate.try_enter_with(state, count) {
            return self.submit_by_inbox(batch, wanted);
        }
        // SAFETY: inside the gate, in no other call.
        unsafe {
            self.queue.with(|queue| {
                self.bring(queue, |queue| {
                    // Counted before the hardware can end them.
                    add(&self.counters.direct_bytes, queue.take_from(batch, count));
                });
            });
        }
        self.leave();
        Ok(self.submitted(state, count, wanted))
    }

    #[inline]
    fn completed(&self) -> Sequence {
        self.counters.completed.load(Ordering::Acquire)
    }

    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError> {
        lock(&self.failures).find(sequence)
    }

    fn poll(&self) -> bool {
        self.step(PollEffort::Whole)
    }

    fn poll_briefly(&self) -> bool {
        self.step(PollEffort::Brief)
    }

    #[inline]
    fn pause(&self) {
        match UserWait::of_processor() {
            UserWait::Pause => spin_hint(),
            wait if self.monitors_memory => self.pause_inside(wait),
            wait => wait.pause(),
        }
    }

    fn sleep_until_interrupt(
        &self,
        timeout: Duration,
        is_done: &dyn Fn() -> bool,
    ) -> InterruptSleep {
        self.sleep_in_interrupt(timeout, is_done)
    }

    fn close(&self) {
        self.gate.close();
    }

    fn outstanding_bytes(&self) -> u64 {
        // The ended ones first: they are never more than the submitted ones that are read later.
        let counters = &self.counters;
        let ended = counters.ended_bytes.load(Ordering::Acquire);
        let by_inbox = counters.inbox_bytes.load(Ordering::Acquire);
        by_inbox + counters.direct_bytes.load(Ordering::Acquire) - ended
    }

    fn statistics(&self) -> ChannelStatistics {
        let counters = &self.counters;
        let completed = counters.completed.load(Ordering::Acquire);
        let load = |counter: &AtomicU64| counter.load(Ordering::Acquire);
        ChannelStatistics {
            submitted: self.gate.state().accepted(),
            completed,
            failed: load(&counters.failed),
            bytes: load(&counters.copied_bytes),
            full: load(&counters.full),
            ..self.interrupt_statistics()
        }
    }
}

impl Drop for DeviceChannel {
    fn drop(&mut self) {
        // No other thread is left; a step that unwound may be inside still, and what others left in
        // the inbox meanwhile is posted here.
        self.gate.reset();
        if self.gate.request() {
            self.leave();
        }
        // Drivers time out on a device that stops, so this loop ends.
        // SAFETY: no other thread is left, and this one is in no other call.
        while !unsafe { self.queue.with(|queue| queue.is_empty()) } {
            if !self.step(PollEffort::Whole) {
                thread::yield_now();
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
