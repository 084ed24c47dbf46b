//! The thread of a channel of the processor engine: takes descriptors and carries them out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_sys::sync::spin_hint;

use crate::contract::{ChannelOptions, Descriptor, ExecutionError, OpenError, Scope, Sequence};
use crate::threaded::{Inside, ThreadedChannel};

/// Opens a channel.
pub(super) fn open(
    options: &ChannelOptions,
    default_capacity: usize,
    default_spin_ns: u64,
) -> Result<ThreadedChannel, OpenError> {
    let spin = Duration::from_nanos(options.spin_ns.unwrap_or(default_spin_ns));
    ThreadedChannel::open("cpu", options, default_capacity, move |shared| {
        let worker = Worker { shared, spin };
        Ok(move || worker.run())
    })
}

/// A descriptor from this length on takes so long that whoever waits for one before it is not to wait
/// for it as well.
const LONG_BYTES: u64 = 64 << 10;

/// The thread of a channel.
struct Worker {
    shared: Arc<Inside>,
    spin: Duration,
}

impl Worker {
    fn run(&self) {
        let ring = &self.shared.ring;
        let mut finished = 0;
        let mut moved_before = 0;
        loop {
            // SAFETY: this thread is the only consumer, and completes each number it has taken.
            while let Some(descriptor) = unsafe { ring.take(finished) } {
                // A descriptor that had company in the queue may have been cancelled meanwhile.
                // One that was taken at once cannot, and looking would cost a cache line.
                let waited = ring.has_next(finished + 1);
                finished += 1;
                let bytes = descriptor.length();
                // So may one with a completion: its end runs wakers and drops what was kept for it.
                if bytes >= LONG_BYTES || descriptor.has_completion() {
                    self.shared.tell_waiters(finished - 1);
                }
                self.carry_out(descriptor, finished, waited);
                // SAFETY: this thread is the channel, and the descriptor is over and gone.
                unsafe { self.shared.complete(finished, bytes) };
            }
            // A channel that has just worked long is likely to be needed again after as long. How
            // long is told from the bytes: a look at the clock would delay the next descriptor.
            const BYTES_PER_NS: u64 = 10;
            let moved = self.shared.moved_bytes();
            let busy = Duration::from_nanos((moved - moved_before) / BYTES_PER_NS);
            moved_before = moved;
            if !self.wait_for_work(finished, busy) {
                return;
            }
        }
    }

    fn carry_out(&self, descriptor: Descriptor, sequence: Sequence, waited: bool) {
        if !descriptor.is_host_only() {
            let reason = "a processor cannot reach device memory";
            self.fail(descriptor, sequence, ExecutionError::Engine { done_bytes: 0, reason });
        } else if waited && descriptor.scope() != Scope::Chunks && descriptor.is_cancelled() {
            self.fail(descriptor, sequence, ExecutionError::Cancelled { done_bytes: 0 });
        } else {
            let moved = descriptor.run();
            self.shared.count_moved(moved);
        }
    }

    fn fail(&self, descriptor: Descriptor, sequence: Sequence, error: ExecutionError) {
        self.shared.count_failure(sequence, error.clone());
        descriptor.finish(Err(error));
    }

    /// Spins, then sleeps, until there is work (`true`) or the channel is closed and empty. Spins
    /// for its usual time, or for as long as it was busy up to a few times that.
    fn wait_for_work(&self, finished: Sequence, busy: Duration) -> bool {
        const LONGEST: u32 = 6;
        let spin = busy.clamp(self.spin, LONGEST * self.spin);
        let ring = &self.shared.ring;
        let over = || ring.is_closed() && ring.submitted() == finished;
        loop {
            if self.spin_for_work(finished, spin) {
                return true;
            }
            if over() {
                return false;
            }
            self.shared.sleep(None, || ring.has_next(finished) || over());
            if ring.has_next(finished) {
                return true;
            }
        }
    }

    fn spin_for_work(&self, finished: Sequence, spin: Duration) -> bool {
        const LOOKS_PER_CLOCK: u32 = 64;
        let start = Instant::now();
        let mut is_told = false;
        loop {
            for _ in 0..LOOKS_PER_CLOCK {
                if self.shared.ring.has_next(finished) {
                    return true;
                }
                spin_hint();
            }
            // Not before: while work comes at once, each number is told without a fence.
            if !is_told {
                self.shared.tell_waiters(finished);
                is_told = true;
            }
            if start.elapsed() >= spin || self.shared.ring.is_closed() {
                return false;
            }
        }
    }
}
