//! The worker thread of a channel of the processor engine: takes descriptors from the ring and
//! executes them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_sys::sync::spin_hint;

use crate::contract::{
    ChannelOptions, Descriptor, DescriptorScope, ExecutionError, OpenError, Sequence,
};
use crate::runtime::group::{GROUP, Group};
use crate::runtime::ring::ClaimedRun;
use crate::runtime::threaded::{ChannelShared, ThreadedChannel};
use crate::runtime::wake_chain::ChainedParker;
use crate::runtime::window::WindowKernel;

/// Opens a channel.
pub(super) fn open(
    options: &ChannelOptions,
    default_capacity: usize,
    default_spin_ns: u64,
    window: Option<WindowKernel>,
    idle: ChainedParker,
) -> Result<ThreadedChannel, OpenError> {
    let spin = Duration::from_nanos(options.spin_ns.unwrap_or(default_spin_ns));
    ThreadedChannel::open("cpu", options, default_capacity, window, true, idle, move |shared| {
        let worker = CpuWorker { shared, spin };
        Ok(move || worker.run())
    })
}

/// The length in bytes from which a descriptor takes so long that the waiters for an earlier one
/// are notified before it starts.
pub const LONG_BYTES: u64 = 64 << 10;
/// The bytes that a channel is taken to move in a nanosecond, when the time that it was busy is derived
/// from them.
pub const BUSY_BYTES_PER_NS: u64 = 10;
/// A channel that was busy for long polls for up to so many times the usual time.
pub const MAX_SPINS: u32 = 6;
/// The polls of an idle channel between two readings of the clock.
pub const POLLS_PER_CLOCK: u32 = 64;

/// The time in nanoseconds of polling after which an idle channel lets other threads have its core.
pub const YIELD_NS: u64 = 10_000;

/// The worker thread of a channel.
struct CpuWorker {
    shared: Arc<ChannelShared>,
    spin: Duration,
}

impl CpuWorker {
    fn run(&self) {
        let mut moved_before = 0;
        loop {
            while let Some(run) = self.shared.ring.claim() {
                self.execute_run(run);
            }
            // A channel that was busy for long is likely to get more work after a similar time. The
            // time is derived from the bytes: reading the clock would delay the next descriptor.
            let moved = self.shared.moved_bytes();
            let busy = Duration::from_nanos((moved - moved_before) / BUSY_BYTES_PER_NS);
            moved_before = moved;
            if !self.wait_for_work(busy) {
                return;
            }
        }
    }

    #[inline]
    fn execute_run(&self, mut run: ClaimedRun) {
        // SAFETY: this thread has claimed the run, and takes each value once.
        while let Some(group) = unsafe { self.shared.workers_group(run) } {
            self.execute_group(&group);
            run = run.without_first(GROUP);
        }
        if run.count > 0 {
            self.execute_each(run);
        }
    }

    /// Executes a group of small copies that this thread has claimed.
    fn execute_group(&self, group: &Group<'_>) {
        let shared = &self.shared;
        let [(first, _), ..] = group.copies();
        // SAFETY: this thread has claimed its copies, and takes each once, here.
        let execute = || unsafe {
            shared.timed(first..first + GROUP, || {
                group.execute(|descriptor, sequence| shared.for_worker(descriptor, sequence));
            });
        };
        if group.bytes() >= LONG_BYTES {
            shared.run_long(execute);
        } else {
            execute();
        }
        for (sequence, bytes) in group.copies() {
            shared.count_moved(bytes);
            // SAFETY: this thread is the channel's worker, and the descriptor is finished and
            // dropped.
            unsafe { shared.finish(sequence, bytes) };
        }
    }

    #[inline]
    fn execute_each(&self, run: ClaimedRun) {
        let ring = &self.shared.ring;
        // SAFETY: this thread has claimed the sequences, and takes each once.
        let take = |sequence| unsafe { ring.take_claimed(sequence) };
        let mut next = Some(take(run.first));
        for sequence in run.sequences() {
            let Some(descriptor) = next.take() else { break };
            if sequence + 1 < run.sequences().end {
                next = Some(take(sequence + 1));
            }
            // A descriptor that was queued together with others may have been cancelled since. One
            // that was taken at once cannot, and the check would cost a cache line.
            let was_queued = run.count > 1 || ring.has_next(sequence);
            let bytes = descriptor.length();
            // A descriptor with a completion may take long too: its end runs wakers and drops
            // values.
            let is_long = bytes >= LONG_BYTES || descriptor.has_completion();
            let descriptor = self.shared.for_worker(descriptor, sequence);
            let execute = || self.execute(descriptor, sequence, was_queued, next.as_ref());
            if is_long {
                self.shared.run_long(execute);
            } else {
                execute();
            }
            // SAFETY: this thread is the channel's worker, and the descriptor is finished and
            // dropped.
            unsafe { self.shared.finish(sequence, bytes) };
        }
    }

    fn execute(
        &self,
        descriptor: Descriptor,
        sequence: Sequence,
        was_queued: bool,
        next: Option<&Descriptor>,
    ) {
        if !descriptor.is_host_only() {
            let reason = "a processor cannot access device memory";
            self.fail(descriptor, sequence, ExecutionError::Engine { done_bytes: 0, reason });
        } else if was_queued
            && descriptor.scope() != DescriptorScope::WorkOffer
            && descriptor.is_cancelled()
        {
            self.fail(descriptor, sequence, ExecutionError::Cancelled { done_bytes: 0 });
        } else {
            let moved = self.shared.timed(sequence..sequence + 1, || descriptor.run_before(next));
            self.shared.count_moved(moved);
        }
    }

    fn fail(&self, descriptor: Descriptor, sequence: Sequence, error: ExecutionError) {
        self.shared.count_failure(sequence, error.clone());
        descriptor.finish(Err(error));
    }

    /// Spins, then sleeps, until there is work (`true`) or the channel is closed and empty. The
    /// spin time is the time it was busy, between one and six times `self.spin`.
    fn wait_for_work(&self, busy: Duration) -> bool {
        let spin = busy.clamp(self.spin, MAX_SPINS * self.spin);
        let ring = &self.shared.ring;
        let is_drained = || ring.is_closed() && ring.submitted() == ring.completed();
        loop {
            if self.spin_for_work(spin) {
                return true;
            }
            if is_drained() {
                return false;
            }
            self.shared
                .sleep(None, || ring.has_unclaimed() || ring.has_publishable() || is_drained());
            self.shared.publish_helped();
            if ring.has_unclaimed() {
                return true;
            }
        }
    }

    fn spin_for_work(&self, spin: Duration) -> bool {
        let ring = &self.shared.ring;
        let start = Instant::now();
        let mut is_notified = false;
        let mut yields_at = Duration::from_nanos(YIELD_NS);
        loop {
            for _ in 0..POLLS_PER_CLOCK {
                if ring.has_unclaimed() {
                    return true;
                }
                // This look at the progress has a second use: it keeps the line near. A channel that
                // does not read it writes it later, and a round trip takes an eighth more.
                if ring.has_unpublished() && self.shared.publish_helped() {
                    is_notified = false;
                }
                spin_hint();
            }
            // Only after the first polls: while work arrives at once, waiters are notified without
            // a fence. Once more after each sequence that is published here.
            if !is_notified {
                self.shared.notify_waiters(ring.completed());
                is_notified = true;
            }
            let polled = start.elapsed();
            if polled >= spin || ring.is_closed() {
                return false;
            }
            // If other programs use the other cores, the submitter may be waiting for this one.
            if polled >= yields_at {
                std::thread::yield_now();
                yields_at = polled + Duration::from_nanos(YIELD_NS);
            }
        }
    }
}
