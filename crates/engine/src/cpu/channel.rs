//! A channel of the processor engine: a ring and the thread that works through it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use memferry_sys::sync::{lock, spin_hint};
use memferry_sys::{affinity, fork};

use super::park::{Crowd, Parker};
use super::ring::Ring;
use crate::contract::{
    Channel, ChannelOptions, ChannelStatistics, Descriptor, ExecutionError, FailureLog, OpenError,
    Scope, Sequence, SubmitError, Taken, enter_engine_thread, is_engine_thread,
};

/// The handle that submitters share. Dropping the last one finishes the work and ends the thread.
#[derive(Debug)]
pub(super) struct CpuChannel {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The thread exists only in the process that started it.
    fork_generation: u64,
}

/// What submitters and the thread share.
#[derive(Debug)]
struct Shared {
    ring: Ring<Descriptor>,
    /// Where the thread sleeps when idle.
    idle: Parker,
    /// Where others sleep for a sequence number.
    waiters: Crowd,
    /// Written by submitters.
    incoming: CachePadded<Incoming>,
    /// Written by the thread alone, so plain adds need no locked instruction.
    outgoing: CachePadded<Outgoing>,
    failures: Mutex<FailureLog>,
}

#[derive(Debug, Default)]
struct Incoming {
    bytes: AtomicU64,
    wakes: AtomicU64,
    full: AtomicU64,
}

#[derive(Debug, Default)]
struct Outgoing {
    /// Bytes that this thread moved itself.
    moved_bytes: AtomicU64,
    failed: AtomicU64,
    sleeps: AtomicU64,
}

impl CpuChannel {
    pub(super) fn open(
        options: &ChannelOptions,
        default_capacity: usize,
        default_spin_ns: u64,
    ) -> Result<Self, OpenError> {
        let refused = |reason: String| OpenError::System { engine: "cpu".into(), reason };
        fork::watch();
        let shared = Arc::new(Shared {
            ring: Ring::new(options.capacity.unwrap_or(default_capacity)),
            idle: Parker::new(),
            waiters: Crowd::new(),
            incoming: CachePadded::default(),
            outgoing: CachePadded::default(),
            failures: Mutex::default(),
        });
        let worker = Worker {
            shared: shared.clone(),
            spin: Duration::from_nanos(options.spin_ns.unwrap_or(default_spin_ns)),
        };
        let (core, (tell, bound)) = (options.core, std::sync::mpsc::channel());
        let thread = std::thread::Builder::new()
            .name(options.label.clone().unwrap_or_else(|| "memferry".into()))
            .spawn(move || {
                let binding = core.map_or(Ok(()), affinity::bind_to_core);
                let failed = binding.is_err();
                let _ = tell.send(binding);
                if !failed {
                    enter_engine_thread();
                    worker.run_or_abort();
                }
            })
            .map_err(|error| {
                refused(format!(
                    "no thread could be started ({error}): raise the limit of processes \
                     (ulimit -u), or ask for fewer channels (MEMFERRY_CHANNELS)"
                ))
            })?;
        if let Ok(Err(error)) = bound.recv() {
            let core = core.unwrap_or_default();
            return Err(refused(format!(
                "its thread could not be bound to core {core} ({error}): \
                 name a core that this process may run on"
            )));
        }
        Ok(Self { shared, thread: Mutex::new(Some(thread)), fork_generation: fork::generation() })
    }

    fn is_forked(&self) -> bool {
        fork::generation() != self.fork_generation
    }
}

// SAFETY: the ring numbers descriptors in order, and the worker completes a number after it has
// run and dropped its descriptor.
unsafe impl Channel for CpuChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Taken, SubmitError> {
        if self.is_forked() {
            return Err(SubmitError::Closed);
        }
        let Shared { ring, idle, incoming, .. } = &*self.shared;
        // Counted before the push: a locked instruction behind it would wait until the cache line
        // of the slot has come over from the channel's core.
        let bytes = bytes_of(batch);
        incoming.bytes.fetch_add(bytes, Ordering::Relaxed);
        let taken = ring.push(batch).inspect_err(|_| {
            incoming.bytes.fetch_sub(bytes, Ordering::Relaxed);
        })?;
        if taken.count < batch.len() && batch.iter().any(Option::is_some) {
            incoming.full.fetch_add(1, Ordering::Relaxed);
            incoming.bytes.fetch_sub(bytes_of(batch), Ordering::Relaxed);
        }
        if taken.count > 0 && idle.unpark() {
            incoming.wakes.fetch_add(1, Ordering::Relaxed);
        }
        Ok(taken)
    }

    fn completed(&self) -> Sequence {
        self.shared.ring.completed()
    }

    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError> {
        lock(&self.shared.failures).find(sequence)
    }

    fn poll(&self) -> bool {
        false
    }

    fn park(&self, sequence: Sequence, timeout: Duration) -> bool {
        let deadline = Instant::now().checked_add(timeout);
        let reached = || self.completed() >= sequence;
        while !reached() {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) || self.is_forked() {
                return reached();
            }
            self.shared.waiters.park(left, reached);
        }
        true
    }

    fn is_asleep(&self) -> bool {
        self.shared.idle.is_asleep()
    }

    fn wake(&self) {
        self.shared.idle.unpark();
    }

    fn close(&self) {
        self.shared.ring.close();
        self.shared.idle.unpark();
    }

    fn outstanding_bytes(&self) -> u64 {
        let finished = self.shared.ring.finished_weight();
        self.shared.incoming.bytes.load(Ordering::Relaxed).saturating_sub(finished)
    }

    fn statistics(&self) -> ChannelStatistics {
        let Shared { ring, incoming, outgoing, .. } = &*self.shared;
        ChannelStatistics {
            completed: ring.completed(),
            submitted: ring.submitted(),
            failed: outgoing.failed.load(Ordering::Relaxed),
            bytes: outgoing.moved_bytes.load(Ordering::Relaxed),
            sleeps: outgoing.sleeps.load(Ordering::Relaxed),
            wakes: incoming.wakes.load(Ordering::Relaxed),
            full: incoming.full.load(Ordering::Relaxed),
        }
    }
}

impl Drop for CpuChannel {
    fn drop(&mut self) {
        self.close();
        let thread = lock(&self.thread).take();
        // A forked child has no such thread. And the last handle may be dropped by the channel's
        // own thread, or by another channel's, which an order that it launched had left it with:
        // the thread then ends by itself.
        if self.is_forked() || is_engine_thread() {
            return;
        }
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

/// The thread of a channel.
struct Worker {
    shared: Arc<Shared>,
    spin: Duration,
}

impl Worker {
    /// What is queued would never end if this thread died, and its memory would never be free.
    fn run_or_abort(self) {
        let run = std::panic::AssertUnwindSafe(|| self.run());
        if std::panic::catch_unwind(run).is_err() {
            std::process::abort();
        }
    }

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
                self.carry_out(descriptor, finished, waited);
                // SAFETY: this thread is the channel, and the descriptor is over and gone.
                unsafe { ring.complete(finished, bytes) };
                self.shared.waiters.unpark();
            }
            // A channel that has just worked long is likely to be needed again after as long. How
            // long is told from the bytes: a look at the clock would delay the next descriptor.
            const BYTES_PER_NS: u64 = 10;
            let moved = self.shared.outgoing.moved_bytes.load(Ordering::Relaxed);
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
            add(&self.shared.outgoing.moved_bytes, moved);
        }
    }

    fn fail(&self, descriptor: Descriptor, sequence: Sequence, error: ExecutionError) {
        add(&self.shared.outgoing.failed, 1);
        lock(&self.shared.failures).push(sequence, error.clone());
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
            if self.shared.idle.park(None, || ring.has_next(finished) || over()) {
                add(&self.shared.outgoing.sleeps, 1);
            }
            if ring.has_next(finished) {
                return true;
            }
        }
    }

    fn spin_for_work(&self, finished: Sequence, spin: Duration) -> bool {
        const LOOKS_PER_CLOCK: u32 = 64;
        let start = Instant::now();
        loop {
            for _ in 0..LOOKS_PER_CLOCK {
                if self.shared.ring.has_next(finished) {
                    return true;
                }
                spin_hint();
            }
            if start.elapsed() >= spin || self.shared.ring.is_closed() {
                return false;
            }
        }
    }
}

fn bytes_of(batch: &[Option<Descriptor>]) -> u64 {
    match batch {
        [Some(only)] => only.length(),
        many => many.iter().flatten().map(Descriptor::length).sum(),
    }
}

/// Adds to a counter that only the calling thread writes.
fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Ordering::Relaxed) + amount, Ordering::Relaxed);
}
