//! A channel that consists of a ring and a worker thread: everything but the work itself.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use memferry_sys::affinity;
use memferry_sys::fork::OwnerProcess;
use memferry_sys::sync::lock;

use super::park::{Parker, WaitQueue};
use super::ring::SubmissionRing;
use crate::completion::{Completion, Waiters};
use crate::contract::{
    Channel, ChannelOptions, ChannelStatistics, Descriptor, ExecutionError, OpenError, Sequence,
    SubmitError, Submitted,
};
use crate::runtime::{FailureLog, enter_engine_thread, is_engine_thread};

/// The handle that submitters share. Dropping the last one finishes the work and joins the thread.
#[derive(Debug)]
pub(crate) struct ThreadedChannel {
    shared: Arc<ChannelShared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The thread exists only in the process that started it.
    owner: OwnerProcess,
}

/// The state that submitters and the worker thread share.
#[derive(Debug)]
pub(crate) struct ChannelShared {
    /// The submitted descriptors.
    pub(crate) ring: SubmissionRing<Descriptor>,
    /// The parker that the worker thread sleeps on when idle.
    idle: Parker,
    /// The threads that sleep until a sequence is reached.
    sleepers: WaitQueue,
    /// The completions that wait for a sequence.
    waiters: Waiters,
    /// Written by submitters.
    submit_counters: CachePadded<SubmitCounters>,
    /// Written by the worker thread alone, so plain adds need no locked instruction.
    worker_counters: CachePadded<WorkerCounters>,
    failures: Mutex<FailureLog>,
}

#[derive(Debug, Default)]
struct SubmitCounters {
    bytes: AtomicU64,
    wakes: AtomicU64,
    full: AtomicU64,
}

#[derive(Debug, Default)]
struct WorkerCounters {
    /// Bytes that this channel moved itself.
    moved_bytes: AtomicU64,
    failed: AtomicU64,
    sleeps: AtomicU64,
}

impl ThreadedChannel {
    /// Opens a channel. `prepare` runs on the worker thread and returns the function that the
    /// thread runs until the ring is closed and drained; if it fails, so does the open.
    pub(crate) fn open<R: FnOnce()>(
        engine: &'static str,
        options: &ChannelOptions,
        default_capacity: usize,
        prepare: impl FnOnce(Arc<ChannelShared>) -> Result<R, OpenError> + Send + 'static,
    ) -> Result<Self, OpenError> {
        let open_error = move |reason: String| OpenError::System { engine: engine.into(), reason };
        let shared = Arc::new(ChannelShared {
            ring: SubmissionRing::new(options.capacity.unwrap_or(default_capacity)),
            idle: Parker::new(),
            sleepers: WaitQueue::new(),
            waiters: Waiters::new(),
            submit_counters: CachePadded::default(),
            worker_counters: CachePadded::default(),
            failures: Mutex::default(),
        });
        let (worker_shared, closing) = (shared.clone(), shared.clone());
        let (core, (started_tx, started_rx)) = (options.core, std::sync::mpsc::channel());
        let label = options.label.clone().unwrap_or_else(|| "memferry".into());
        let work = move || {
            let bound = core.map_or(Ok(()), |core| {
                affinity::bind_to_core(core).map_err(|error| {
                    open_error(format!(
                        "cannot bind its thread to core {core} ({error}): \
                         name a core that this process may run on"
                    ))
                })
            });
            match bound.and_then(|()| prepare(worker_shared)) {
                Err(error) => drop(started_tx.send(Err(error))),
                Ok(run) => {
                    let _ = started_tx.send(Ok(()));
                    enter_engine_thread();
                    run_or_abort(run);
                    closing.waiters.close(closing.ring.completed());
                }
            }
        };
        let thread = memferry_sys::thread::spawn(label, work).map_err(|error| {
            open_error(format!(
                "no thread could be started ({error}): raise the limit of processes \
                 (ulimit -u), request fewer channels (MEMFERRY_CHANNELS), or check for a filter \
                 that denies clone3 (seccomp)"
            ))
        })?;
        let exited = || Err(open_error("its thread exited before it started".into()));
        started_rx.recv().unwrap_or_else(|_| exited())?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)), owner: OwnerProcess::current() })
    }

    fn is_forked(&self) -> bool {
        !self.owner.is_current()
    }
}

/// Runs the worker and aborts the process if it panics: queued descriptors would never end, and
/// their memory would never be released.
fn run_or_abort(run: impl FnOnce()) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err() {
        std::process::abort();
    }
}

impl ChannelShared {
    /// The number of bytes that the worker thread has moved.
    pub(crate) fn moved_bytes(&self) -> u64 {
        self.worker_counters.moved_bytes.load(Ordering::Relaxed)
    }

    /// Counts bytes that the channel moved itself. Called by the worker thread alone.
    pub(crate) fn count_moved(&self, bytes: u64) {
        add(&self.worker_counters.moved_bytes, bytes);
    }

    /// Counts and records the failure of a descriptor. Called by the worker thread alone.
    pub(crate) fn count_failure(&self, sequence: Sequence, error: ExecutionError) {
        add(&self.worker_counters.failed, 1);
        lock(&self.failures).push(sequence, error);
    }

    /// Publishes that every descriptor up to `sequence` is complete; `bytes` is the length of the
    /// last one.
    ///
    /// # Safety
    /// As for [`SubmissionRing::complete`]; the descriptors must be finished and dropped.
    #[inline]
    pub(crate) unsafe fn complete(&self, sequence: Sequence, bytes: u64) {
        // SAFETY: the caller's guarantee.
        unsafe { self.ring.complete(sequence, bytes) };
        self.sleepers.unpark();
        self.waiters.notify(sequence);
    }

    /// Notifies the waiters for sequences up to `published`, the last published one, also those
    /// that were added while it was published. The worker thread calls it before any long step.
    pub(crate) fn notify_waiters(&self, published: Sequence) {
        self.waiters.notify_fenced(published);
    }

    /// Sleeps until a descriptor is submitted, the ring is closed or the timeout expires, unless
    /// `ready` returns that there is work. May return early. Called by the worker thread alone.
    pub(crate) fn sleep(&self, timeout: Option<Duration>, ready: impl Fn() -> bool) {
        if self.idle.park(timeout, ready) {
            add(&self.worker_counters.sleeps, 1);
        }
    }
}

// SAFETY: the ring numbers descriptors in order, and the worker thread completes a number after it
// has finished and dropped its descriptor.
unsafe impl Channel for ThreadedChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
        if self.is_forked() {
            return Err(SubmitError::Closed);
        }
        let ChannelShared { ring, idle, submit_counters, .. } = &*self.shared;
        // Counted before the push: a locked instruction after it would wait until the cache line of
        // the slot arrives from the worker's core.
        let bytes = bytes_of(batch);
        submit_counters.bytes.fetch_add(bytes, Ordering::Relaxed);
        let accepted = ring.push(batch).inspect_err(|_| {
            submit_counters.bytes.fetch_sub(bytes, Ordering::Relaxed);
        })?;
        if accepted.count < batch.len() && batch.iter().any(Option::is_some) {
            submit_counters.full.fetch_add(1, Ordering::Relaxed);
            submit_counters.bytes.fetch_sub(bytes_of(batch), Ordering::Relaxed);
        }
        if accepted.count > 0 && idle.unpark() {
            submit_counters.wakes.fetch_add(1, Ordering::Relaxed);
        }
        Ok(accepted)
    }

    fn submit_one(&self, descriptor: Descriptor) -> Result<Sequence, Descriptor> {
        if self.is_forked() {
            return Err(descriptor);
        }
        let ChannelShared { ring, idle, submit_counters, .. } = &*self.shared;
        // Counted before the push, as above.
        let bytes = descriptor.length();
        submit_counters.bytes.fetch_add(bytes, Ordering::Relaxed);
        match ring.push_one(descriptor) {
            Ok(sequence) => {
                if idle.unpark() {
                    submit_counters.wakes.fetch_add(1, Ordering::Relaxed);
                }
                Ok(sequence)
            }
            Err(descriptor) => {
                submit_counters.bytes.fetch_sub(bytes, Ordering::Relaxed);
                submit_counters.full.fetch_add(u64::from(!ring.is_closed()), Ordering::Relaxed);
                Err(descriptor)
            }
        }
    }

    fn completion_of(&self, sequence: Sequence) -> Option<Arc<Completion>> {
        let completed = || self.completed();
        if self.is_forked() {
            // The lock of the list may stay locked forever, and no thread of this process reaches
            // the sequence.
            let forked = || Completion::failed(ExecutionError::Forked);
            let is_complete = completed() >= sequence;
            return Some(Arc::new(if is_complete { Completion::done() } else { forked() }));
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
        self.shared.submit_counters.bytes.load(Ordering::Relaxed).saturating_sub(finished)
    }

    fn statistics(&self) -> ChannelStatistics {
        let ChannelShared { ring, submit_counters, worker_counters, .. } = &*self.shared;
        ChannelStatistics {
            completed: ring.completed(),
            submitted: ring.submitted(),
            failed: worker_counters.failed.load(Ordering::Relaxed),
            bytes: worker_counters.moved_bytes.load(Ordering::Relaxed),
            sleeps: worker_counters.sleeps.load(Ordering::Relaxed),
            wakes: submit_counters.wakes.load(Ordering::Relaxed),
            full: submit_counters.full.load(Ordering::Relaxed),
        }
    }
}

impl Drop for ThreadedChannel {
    fn drop(&mut self) {
        self.close();
        // A forked child has no such thread. An engine thread must not join: the last handle may be
        // dropped by the channel's own thread, or by another channel's that dispatched a dependent
        // batch. The worker thread then exits after the ring is drained.
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
