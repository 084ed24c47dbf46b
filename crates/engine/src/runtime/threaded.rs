//! A channel that consists of a ring and a worker thread: everything but the work itself.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use memferry_sys::fork::OwnerProcess;
use memferry_sys::stats::kinds::ChannelCounters;
use memferry_sys::stats::{self, Block};
use memferry_sys::sync::lock;
use memferry_sys::{affinity, probes};

use super::group::{GROUP, Group};
use super::measured_kernel::MeasuredKernel;
use super::park::WaitQueue;
use super::ring::{ClaimedRun, SubmissionRing};
use super::wake_chain::ChainedParker;
use super::window::WindowKernel;
use crate::completion::{Completion, Waiters};
use crate::contract::{
    Channel, ChannelOptions, ChannelStatistics, Descriptor, ExecutionError, GroupKernels, Kernel,
    OpenError, Sequence, SubmitError, Submitted,
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
    idle: ChainedParker,
    /// The threads that sleep until a sequence is reached.
    sleepers: WaitQueue,
    /// The completions that wait for a sequence.
    waiters: Waiters,
    /// Written by submitters.
    submit_counters: CachePadded<SubmitCounters>,
    /// Written by the worker thread alone, so plain adds need no locked instruction.
    worker_counters: CachePadded<WorkerCounters>,
    /// What `memferry top` shows. Written by the worker thread alone.
    shown: Block<ChannelCounters>,
    failures: Mutex<FailureLog>,
    window: Option<WindowKernel>,
    /// The kernel of groups of small copies: of the worker thread, and of threads that help. Each has
    /// other data in its caches.
    worker_kernel: CachePadded<MeasuredKernel>,
    helper_kernel: CachePadded<MeasuredKernel>,
    /// Other threads may execute descriptors: the worker thread claims those that it executes.
    has_helpers: bool,
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
    /// The core on which the worker thread woke up last.
    core: AtomicUsize,
}

impl ThreadedChannel {
    /// Opens a channel. `prepare` runs on the worker thread and returns the function that the
    /// thread runs until the ring is closed and drained; if it fails, so does the open.
    pub(crate) fn open<R: FnOnce()>(
        engine: &'static str,
        options: &ChannelOptions,
        default_capacity: usize,
        window: Option<WindowKernel>,
        has_helpers: bool,
        idle: ChainedParker,
        prepare: impl FnOnce(Arc<ChannelShared>) -> Result<R, OpenError> + Send + 'static,
    ) -> Result<Self, OpenError> {
        let open_error = move |reason: String| OpenError::System { engine: engine.into(), reason };
        let capacity = options.capacity.unwrap_or(default_capacity);
        let ring = SubmissionRing::try_new(capacity).map_err(|error| {
            open_error(format!(
                "no memory for its ring ({error}): request fewer channels (MEMFERRY_CHANNELS) \
                 or a smaller capacity, or raise the limit of memory (ulimit -v)"
            ))
        })?;
        let gb_per_s = window.map_or(0.0, |window| window.gb_per_s);
        let shared = Arc::new(ChannelShared {
            ring,
            idle,
            sleepers: WaitQueue::new(),
            waiters: Waiters::new(),
            submit_counters: CachePadded::default(),
            worker_counters: CachePadded::default(),
            shown: stats::kinds::open_channel(engine, options.label.as_deref()),
            failures: Mutex::default(),
            window,
            worker_kernel: MeasuredKernel::new(gb_per_s).into(),
            helper_kernel: MeasuredKernel::new(gb_per_s).into(),
            has_helpers,
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
                    closing.note_core();
                    run_or_abort(run);
                    closing.show();
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
        self.shown.sizes[stats::class_of(bytes)].add(1);
    }

    /// Runs descriptors together, and times them if the turn of one has come: their mean counts as
    /// its time. Called by the worker thread alone.
    #[inline]
    pub(crate) fn timed<R>(&self, sequences: Range<Sequence>, run: impl FnOnce() -> R) -> R {
        let count = sequences.end - sequences.start;
        // The first one too: a channel may have few.
        if { sequences }.all(|sequence| sequence % stats::TIMED_INTERVAL != 1) {
            return run();
        }
        let start = Instant::now();
        let result = run();
        let time = start.elapsed().as_nanos() as u64 / count.max(1);
        self.shown.service_time[stats::class_of(time)].add(1);
        self.show();
        result
    }

    /// Stores the statistics for `memferry top`. Called by the worker thread alone: after every 64th descriptor, and
    /// before it sleeps.
    fn show(&self) {
        let statistics = self.statistics();
        statistics.show(&self.shown);
        self.shown.outstanding_bytes.set(self.outstanding_bytes());
    }

    fn outstanding_bytes(&self) -> u64 {
        let finished = self.ring.finished_weight();
        self.submit_counters.bytes.load(Ordering::Relaxed).saturating_sub(finished)
    }

    fn statistics(&self) -> ChannelStatistics {
        let Self { ring, submit_counters, worker_counters, .. } = self;
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

    /// Finishes a descriptor of the worker thread and publishes every sequence that is complete.
    ///
    /// # Safety
    /// As for [`SubmissionRing::finish`]; the descriptor must be finished and dropped.
    #[inline]
    pub(crate) unsafe fn finish(&self, sequence: Sequence, bytes: u64) {
        // SAFETY: the caller's guarantee.
        unsafe {
            self.ring.finish(sequence, bytes);
            if self.ring.has_publishable() {
                self.ring.publish_finished();
            }
        }
        self.sleepers.unpark();
        self.waiters.notify(self.ring.completed());
    }

    /// Runs a step that may take long, or runs code of the user, with everything before it published and
    /// its waiters notified. Threads that help publish meanwhile. Called by the worker thread alone.
    pub(crate) fn run_long(&self, step: impl FnOnce()) {
        self.publish_helped();
        self.notify_waiters(self.ring.completed());
        self.ring.lend_publishing();
        self.publish_lent();
        step();
        self.ring.end_loan();
    }

    /// Publishes what this thread has finished, if the worker has lent that.
    fn publish_lent(&self) {
        if self.ring.publish_lent() {
            self.sleepers.unpark();
            self.waiters.notify_fenced(self.ring.completed());
        }
    }

    /// Publishes what threads that help have finished; returns whether there was anything. Called by
    /// the worker thread alone.
    pub(crate) fn publish_helped(&self) -> bool {
        // SAFETY: this is the worker thread.
        let has_published = unsafe { self.ring.publish_finished() };
        if has_published {
            self.sleepers.unpark();
            self.waiters.notify(self.ring.completed());
        }
        has_published
    }

    /// The descriptor with the kernel for the window that it is part of.
    #[inline]
    fn in_window(&self, descriptor: Descriptor, sequence: Sequence) -> Descriptor {
        match self.window {
            Some(window) => window.in_window(&self.ring, descriptor, sequence),
            None => descriptor,
        }
    }

    /// The descriptor with its kernel for the worker thread.
    #[inline]
    pub(crate) fn for_worker(&self, descriptor: Descriptor, sequence: Sequence) -> Descriptor {
        let descriptor = self.in_window(descriptor, sequence);
        match self.window {
            Some(window) => window.of_submitter(descriptor),
            None => descriptor,
        }
    }

    /// The group of small copies at the front of a run of the worker thread.
    ///
    /// # Safety
    /// As for [`Group::at_front`].
    #[inline]
    pub(crate) unsafe fn workers_group(&self, run: ClaimedRun) -> Option<Group<'_>> {
        // SAFETY: the caller's guarantee.
        unsafe { Group::at_front(&self.ring, run, self.window?.kernel, &self.worker_kernel) }
    }

    /// Executes queued descriptors on the calling thread, if any thread may; returns how many.
    fn help(&self) -> u64 {
        let Some(mut run) = self.ring.claim_shared() else { return 0 };
        let claimed = run.count;
        let streaming = self.window.map_or(Kernel::Cached, |window| window.kernel);
        // SAFETY: this thread has claimed the run, and takes each value once.
        let group_at =
            |run| unsafe { Group::at_front(&self.ring, run, streaming, &self.helper_kernel) };
        while let Some(group) = group_at(run) {
            // SAFETY: as above, and each is finished when the group is.
            unsafe {
                group.execute(|descriptor, sequence| self.in_window(descriptor, sequence));
                for (sequence, bytes) in group.copies() {
                    self.ring.finish_claimed(sequence, bytes);
                }
            }
            run = run.without_first(GROUP);
        }
        self.help_with(run);
        self.publish_lent();
        // Otherwise the worker publishes it.
        self.idle.call();
        claimed
    }

    /// Executes the rest of a run that a thread that helps has claimed.
    fn help_with(&self, run: ClaimedRun) {
        if run.count == 0 {
            return;
        }
        // SAFETY: this thread has claimed the sequences, and takes each once.
        let take = |sequence| unsafe { self.ring.take_claimed(sequence) };
        let mut next = Some(take(run.first));
        for sequence in run.sequences() {
            let Some(descriptor) = next.take() else { break };
            if sequence + 1 < run.sequences().end {
                next = Some(take(sequence + 1));
            }
            let bytes = descriptor.length();
            self.in_window(descriptor, sequence).run_before(next.as_ref());
            // SAFETY: this thread has claimed the sequence, and its descriptor is finished.
            unsafe { self.ring.finish_claimed(sequence, bytes) };
        }
    }

    /// Notifies the waiters for sequences up to `published`, the last published one, also those
    /// that were added while it was published. The worker thread calls it before any long step.
    pub(crate) fn notify_waiters(&self, published: Sequence) {
        self.waiters.notify_fenced(published);
    }

    /// Records the core on which the worker thread runs.
    fn note_core(&self) {
        self.worker_counters.core.store(affinity::current_core(), Ordering::Relaxed);
    }

    /// Sleeps until a descriptor is submitted, the ring is closed or the timeout expires, unless
    /// `ready` returns that there is work. May return early. Called by the worker thread alone.
    pub(crate) fn sleep(&self, timeout: Option<Duration>, ready: impl Fn() -> bool) {
        self.show();
        if self.idle.park(timeout, ready) {
            add(&self.worker_counters.sleeps, 1);
            self.note_core();
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
        let any_threads =
            self.shared.has_helpers && batch.iter().flatten().all(Descriptor::is_any_threads);
        let accepted = if any_threads { ring.push_shared(batch) } else { ring.push(batch) };
        let accepted = accepted.inspect_err(|_| {
            submit_counters.bytes.fetch_sub(bytes, Ordering::Relaxed);
        })?;
        if accepted.count < batch.len() && batch.iter().any(Option::is_some) {
            submit_counters.full.fetch_add(1, Ordering::Relaxed);
            submit_counters.bytes.fetch_sub(bytes_of(batch), Ordering::Relaxed);
        }
        if accepted.count > 0 && idle.call() {
            probes::wake(accepted.last());
            submit_counters.wakes.fetch_add(1, Ordering::Relaxed);
        }
        Ok(accepted)
    }

    fn submit_into(
        &self,
        descriptor: Descriptor,
        sequence: &mut Sequence,
    ) -> Result<(), Descriptor> {
        if self.is_forked() {
            return Err(descriptor);
        }
        let ChannelShared { ring, idle, submit_counters, .. } = &*self.shared;
        ring.prefetch_slot();
        // Counted before the push, as above.
        let bytes = descriptor.length();
        submit_counters.bytes.fetch_add(bytes, Ordering::Relaxed);
        let shared = self.shared.has_helpers && descriptor.is_any_threads();
        match ring.push_one(descriptor, shared, sequence) {
            Ok(()) => {
                if idle.call() {
                    probes::wake(*sequence);
                    submit_counters.wakes.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
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
            let is_complete = self.is_complete(sequence);
            return Some(Arc::new(if is_complete { Completion::done() } else { forked() }));
        }
        Some(self.shared.waiters.completion_of(sequence, completed))
    }

    fn completed(&self) -> Sequence {
        self.shared.ring.completed()
    }

    fn is_complete(&self, sequence: Sequence) -> bool {
        self.shared.ring.is_finished(sequence)
    }

    fn help(&self, sequence: Sequence) -> u64 {
        let ring = &self.shared.ring;
        // Lines of the worker are read only if others are queued too: a thread that waits for the
        // only descriptor does not slow it down.
        let is_alone = ring.submitted() <= sequence && ring.completed() + 1 >= sequence;
        if is_alone || self.is_forked() { 0 } else { self.shared.help() }
    }

    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError> {
        if self.is_forked() {
            return None;
        }
        lock(&self.shared.failures).find(sequence)
    }

    fn park(&self, sequence: Sequence, timeout: Duration) -> bool {
        let deadline = Instant::now().checked_add(timeout);
        let reached = || self.is_complete(sequence);
        while !reached() {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) || self.is_forked() {
                return reached();
            }
            // This thread does not rely on another one to run.
            self.shared.idle.wake_called();
            self.shared.sleepers.park(left, reached);
        }
        true
    }

    fn is_asleep(&self) -> bool {
        self.shared.idle.is_asleep()
    }

    fn core(&self) -> Option<usize> {
        Some(self.shared.worker_counters.core.load(Ordering::Relaxed))
    }

    fn wake(&self) {
        self.shared.idle.unpark();
    }

    fn close(&self) {
        self.shared.ring.close();
        self.shared.idle.unpark();
    }

    fn outstanding_bytes(&self) -> u64 {
        self.shared.outstanding_bytes()
    }

    fn group_kernels(&self) -> Option<GroupKernels> {
        let (worker, helper) = (&self.shared.worker_kernel, &self.shared.helper_kernel);
        let kernels = GroupKernels { worker: worker.learned(), helper: helper.learned() };
        self.shared.window.map(|_| kernels)
    }

    fn statistics(&self) -> ChannelStatistics {
        self.shared.statistics()
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
