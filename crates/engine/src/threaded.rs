//! A channel that is a ring and a thread which works through it: everything but the work itself.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use memferry_sys::sync::lock;
use memferry_sys::{affinity, fork};

use crate::completion::{Completion, Waiters};
use crate::contract::{
    Channel, ChannelOptions, ChannelStatistics, Descriptor, ExecutionError, FailureLog, OpenError,
    Sequence, SubmitError, Taken, enter_engine_thread, is_engine_thread,
};
use crate::cpu::park::{Crowd, Parker};
use crate::cpu::ring::Ring;

/// The handle that submitters share. Dropping the last one finishes the work and ends the thread.
#[derive(Debug)]
pub(crate) struct ThreadedChannel {
    shared: Arc<Inside>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The thread exists only in the process that started it.
    fork_generation: u64,
}

/// What submitters and the thread share.
#[derive(Debug)]
pub(crate) struct Inside {
    /// What is to be done.
    pub(crate) ring: Ring<Descriptor>,
    /// Where the thread sleeps when idle.
    idle: Parker,
    /// Where others sleep for a sequence number.
    sleepers: Crowd,
    /// Who else wants to be told of a sequence number.
    waiters: Waiters,
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
    /// Bytes that this channel moved itself.
    moved_bytes: AtomicU64,
    failed: AtomicU64,
    sleeps: AtomicU64,
}

impl ThreadedChannel {
    /// Opens a channel. On its thread, `prepare` makes what the thread runs until the ring is
    /// closed and everything in it is over; if it cannot, there is no channel.
    pub(crate) fn open<R: FnOnce()>(
        engine: &'static str,
        options: &ChannelOptions,
        default_capacity: usize,
        prepare: impl FnOnce(Arc<Inside>) -> Result<R, OpenError> + Send + 'static,
    ) -> Result<Self, OpenError> {
        let refused = move |reason: String| OpenError::System { engine: engine.into(), reason };
        fork::watch();
        let shared = Arc::new(Inside {
            ring: Ring::new(options.capacity.unwrap_or(default_capacity)),
            idle: Parker::new(),
            sleepers: Crowd::new(),
            waiters: Waiters::new(),
            incoming: CachePadded::default(),
            outgoing: CachePadded::default(),
            failures: Mutex::default(),
        });
        let (inside, ended) = (shared.clone(), shared.clone());
        let (core, (tell, told)) = (options.core, std::sync::mpsc::channel());
        let label = options.label.clone().unwrap_or_else(|| "memferry".into());
        let work = move || {
            let bound = core.map_or(Ok(()), |core| {
                affinity::bind_to_core(core).map_err(|error| {
                    refused(format!(
                        "its thread could not be bound to core {core} ({error}): \
                         name a core that this process may run on"
                    ))
                })
            });
            match bound.and_then(|()| prepare(inside)) {
                Err(error) => drop(tell.send(Err(error))),
                Ok(run) => {
                    let _ = tell.send(Ok(()));
                    enter_engine_thread();
                    run_or_abort(run);
                    ended.waiters.close(ended.ring.completed());
                }
            }
        };
        let thread = memferry_sys::thread::spawn(label, work).map_err(|error| {
            refused(format!(
                "no thread could be started ({error}): raise the limit of processes \
                 (ulimit -u), ask for fewer channels (MEMFERRY_CHANNELS), or look for a filter \
                 that refuses clone3 (seccomp)"
            ))
        })?;
        let died = || Err(refused("its thread ended before it began".into()));
        told.recv().unwrap_or_else(|_| died())?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)), fork_generation: fork::generation() })
    }

    fn is_forked(&self) -> bool {
        fork::generation() != self.fork_generation
    }
}

/// What is queued would never end if this thread died, and its memory would never be free.
fn run_or_abort(run: impl FnOnce()) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err() {
        std::process::abort();
    }
}

impl Inside {
    /// Bytes that the thread has counted as moved.
    pub(crate) fn moved_bytes(&self) -> u64 {
        self.outgoing.moved_bytes.load(Ordering::Relaxed)
    }

    /// Counts bytes that the channel moved itself. For the thread alone.
    pub(crate) fn count_moved(&self, bytes: u64) {
        add(&self.outgoing.moved_bytes, bytes);
    }

    /// Counts and remembers the failure of a descriptor. For the thread alone.
    pub(crate) fn count_failure(&self, sequence: Sequence, error: ExecutionError) {
        add(&self.outgoing.failed, 1);
        lock(&self.failures).push(sequence, error);
    }

    /// Publishes that everything up to a number is over, the last of it of so many bytes.
    ///
    /// # Safety
    /// As for [`Ring::complete`]; the descriptors must be finished and gone.
    #[inline]
    pub(crate) unsafe fn complete(&self, sequence: Sequence, bytes: u64) {
        // SAFETY: passed on.
        unsafe { self.ring.complete(sequence, bytes) };
        self.sleepers.unpark();
        self.waiters.tell(sequence);
    }

    /// Tells those who wait for numbers up to this one, which is the last that was published, also such
    /// as came while it was. For the thread, before anything that takes long.
    pub(crate) fn tell_waiters(&self, published: Sequence) {
        self.waiters.tell_surely(published);
    }

    /// Sleeps until something is submitted, the ring is closed or the time is over, unless `ready`
    /// says that there is something to do. May return early. For the thread alone.
    pub(crate) fn sleep(&self, timeout: Option<Duration>, ready: impl Fn() -> bool) {
        if self.idle.park(timeout, ready) {
            add(&self.outgoing.sleeps, 1);
        }
    }
}

// SAFETY: the ring numbers descriptors in order, and the thread completes a number after it has
// finished and dropped its descriptor.
unsafe impl Channel for ThreadedChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Taken, SubmitError> {
        if self.is_forked() {
            return Err(SubmitError::Closed);
        }
        let Inside { ring, idle, incoming, .. } = &*self.shared;
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

    fn submit_one(&self, descriptor: Descriptor) -> Result<Sequence, Descriptor> {
        if self.is_forked() {
            return Err(descriptor);
        }
        let Inside { ring, idle, incoming, .. } = &*self.shared;
        // Before the push, as above.
        let bytes = descriptor.length();
        incoming.bytes.fetch_add(bytes, Ordering::Relaxed);
        match ring.push_one(descriptor) {
            Ok(sequence) => {
                if idle.unpark() {
                    incoming.wakes.fetch_add(1, Ordering::Relaxed);
                }
                Ok(sequence)
            }
            Err(descriptor) => {
                incoming.bytes.fetch_sub(bytes, Ordering::Relaxed);
                incoming.full.fetch_add(u64::from(!ring.is_closed()), Ordering::Relaxed);
                Err(descriptor)
            }
        }
    }

    fn completion_of(&self, sequence: Sequence) -> Option<Arc<Completion>> {
        let completed = || self.completed();
        if self.is_forked() {
            // The lock of the list may be held for ever, and nobody here comes to the number.
            let forked = || Completion::refused(ExecutionError::Forked);
            let is_over = completed() >= sequence;
            return Some(Arc::new(if is_over { Completion::over() } else { forked() }));
        }
        Some(self.shared.waiters.completion_of(sequence, completed))
    }

    fn completed(&self) -> Sequence {
        self.shared.ring.completed()
    }

    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError> {
        if self.is_forked() {
            return None;
        }
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
            self.shared.sleepers.park(left, reached);
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
        let Inside { ring, incoming, outgoing, .. } = &*self.shared;
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

impl Drop for ThreadedChannel {
    fn drop(&mut self) {
        self.close();
        // A forked child has no such thread. And the last handle may be dropped by the channel's
        // own thread, or by another channel's, which an order that it launched had left it with:
        // the thread then ends by itself.
        if self.is_forked() || is_engine_thread() {
            return;
        }
        if let Some(thread) = lock(&self.thread).take() {
            let _ = thread.join();
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
