//! The completion: the state of one transfer, which engines report to and users query.
//!
//! A cookie, a future, an eventfd and a notification variable are views of this one event. The
//! completion is data: an engine marks it, and threads that sleep on it or poll it, and transfers
//! ordered after it, read it there. The transitions of the state word:
//!
//! ```text
//!  0 ──► SLEEPER / LISTENER / CANCELLED may be added by users at any time
//!  └──► DONE (with FAILED after a failure), once, by the engine that finishes last
//! ```
//!
//! Everything that belongs to the transfer comes before DONE: its data, its result, and the end of its
//! span. A thread that has waited finds all of it, even if a channel still holds the completion.
//!
//! Access rules: any thread changes `state`, by atomic operations; engines write `failure` and
//! `output` before DONE, users read them after it; `listeners` is accessed under its lock;
//! everything else is fixed before the completion is shared.

mod dispatch;
mod help;
mod listeners;
mod notify;
mod output;
pub(crate) mod polling;
mod segments;
mod spread;
mod waiters;
mod work;

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use memferry_sys::Futex;
use memferry_sys::fork::OwnerProcess;
use memferry_sys::sync::atomic::Ordering;
use memferry_sys::sync::{Mutex, lock, spin_hint};
use memferry_sys::{probes, stats};

pub use dispatch::{ChannelBatch, Dispatch};
pub use listeners::{KeepAlive, WakerKey};
pub use notify::{Notification, PendingNotification};
pub(crate) use output::PartOutput;
pub use output::{CrcVariable, TransferOutput};
pub use segments::{WorkSegment, execute_segments};
pub use waiters::Waiters;
pub use work::{Chunk, ChunkedWork};

use crate::contract::{Channel, ExecutionError, Opcode};
use listeners::CompletionListeners;
use output::OutputCell;

const DONE: u32 = 1;
const FAILED: u32 = 2;
const SLEEPER: u32 = 4;
const LISTENER: u32 = 8;
const CANCELLED: u32 = 16;
/// The engine has written the notification variable itself.
const NOTIFIED: u32 = 32;
/// There is a span, from the start on.
const TRACED: u32 = 64;

/// The shared state of one transfer.
pub struct Completion {
    state: Futex,
    output: OutputCell,
    crc_variable: Option<CrcVariable>,
    notification: Option<PendingNotification>,
    work: Option<ChunkedWork>,
    /// What its ordered descriptors wait for in their channel.
    predecessors: Box<[Arc<Self>]>,
    failure: Mutex<Option<ExecutionError>>,
    /// Boxed: few transfers have listeners, and a completion should fill few cache lines.
    listeners: Mutex<Option<Box<CompletionListeners>>>,
    /// The channels that get a work offer from other channels; see [`spread`].
    spread: Mutex<Vec<Weak<dyn Channel>>>,
    caller_core: help::CallerCore,
    /// The channel without a thread that executes the transfer; see [`polling`].
    polled: OnceLock<Weak<dyn Channel>>,
    /// Taken, and so ended, by the call that completes the transfer. Boxed: few transfers are traced.
    span: Mutex<Option<Box<tracing::Span>>>,
    /// In a forked child, the locks of a parent's completion may stay locked forever.
    owner: OwnerProcess,
}

/// Prints little, because a request that is ordered after other transfers prints their completions.
impl std::fmt::Debug for Completion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Completion").field("is_done", &self.is_done()).finish_non_exhaustive()
    }
}

impl Completion {
    /// The completion of a transfer that consists of one descriptor.
    pub fn whole() -> Self {
        Self {
            state: Futex::new(0),
            output: OutputCell::new(None),
            crc_variable: None,
            notification: None,
            work: None,
            predecessors: Box::default(),
            failure: Mutex::new(None),
            listeners: Mutex::new(None),
            spread: Mutex::new(Vec::new()),
            caller_core: help::CallerCore::default(),
            polled: OnceLock::new(),
            span: Mutex::new(None),
            owner: OwnerProcess::current(),
        }
    }

    /// Whether the parent of this forked child created the completion: no thread here completes it,
    /// and its locks must not be taken.
    fn is_forked(&self) -> bool {
        !self.owner.is_current()
    }

    /// The completion of a transfer that has already succeeded.
    pub fn done() -> Self {
        Self { state: Futex::new(DONE), ..Self::whole() }
    }

    /// The completion of a transfer that was rejected before it started.
    pub fn failed(error: ExecutionError) -> Self {
        let state = Futex::new(DONE | FAILED);
        Self { state, failure: Mutex::new(Some(error)), ..Self::whole() }
    }

    /// The completion of a transfer in chunks, which engines claim or receive as parts.
    pub fn chunked(work: ChunkedWork) -> Self {
        let output = OutputCell::new(Some(work.operation));
        Self { work: Some(work), output, ..Self::whole() }
    }

    /// Sets the operation of a transfer that consists of one descriptor, or of none: the CRC of
    /// nothing is a result too.
    pub fn of_operation(mut self, operation: Opcode) -> Self {
        self.output = OutputCell::new(Some(operation));
        self
    }

    /// Adds a variable that is written after all data is visible and before the completion is done.
    pub fn notifying(mut self, notify: Option<PendingNotification>) -> Self {
        self.notification = notify;
        self
    }

    /// Adds a variable that gets the CRC of a successful transfer before the completion is done.
    ///
    /// # Safety
    /// The variable must stay valid until the completion is done, and nothing else may access it.
    pub unsafe fn storing_crc(mut self, variable: Option<CrcVariable>) -> Self {
        self.crc_variable = variable;
        self
    }

    /// Orders the transfer after others, whose descriptors come before its own in the same channel,
    /// where its own are [ordered](crate::Descriptor::ordered): if one of them fails, none of its
    /// descriptors starts that has not, and the transfer ends with [`ExecutionError::Predecessor`]. The
    /// completion keeps those of the others, so a chain of them must be bounded.
    pub fn ordered_after(mut self, predecessors: impl IntoIterator<Item = Arc<Self>>) -> Self {
        self.predecessors = predecessors.into_iter().collect();
        self
    }

    /// The transfers that it is ordered after in its channel.
    pub(crate) fn predecessors(&self) -> &[Arc<Self>] {
        &self.predecessors
    }

    /// Whether one of these has failed.
    pub(crate) fn has_failed_predecessor(&self) -> bool {
        let failed = |one: &Arc<Self>| one.state.word().load(Ordering::Acquire) & FAILED != 0;
        self.predecessors.iter().any(failed)
    }

    /// Records the transfer in a tracing span, which ends when the transfer is complete.
    pub fn traced(mut self, span: tracing::Span) -> Self {
        if !span.is_disabled() {
            self.state.word().fetch_or(TRACED, Ordering::Relaxed);
            self.span = Mutex::new(Some(Box::new(span)));
        }
        self
    }

    /// The chunks of a chunked transfer.
    pub fn work(&self) -> Option<&ChunkedWork> {
        self.work.as_ref()
    }

    /// Whether the transfer is complete, failed ones included. If so, all data is visible to the
    /// caller.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.state.word().load(Ordering::Acquire) & DONE != 0
    }

    /// The result, or `None` while the transfer is in flight. In a forked child a failure of the
    /// parent's transfer is reported as [`ExecutionError::Forked`].
    pub fn outcome(&self) -> Option<Result<TransferOutput, ExecutionError>> {
        let state = self.state.word().load(Ordering::Acquire);
        if state & DONE == 0 {
            return None;
        }
        Some(if state & FAILED != 0 && self.is_forked() {
            Err(ExecutionError::Forked)
        } else if state & FAILED != 0 {
            let failure = lock(&self.failure).clone();
            Err(failure.expect("a failure is recorded before it is published"))
        } else {
            Ok(self.output.load())
        })
    }

    /// The length of the finished prefix in bytes: everything before that offset may be used while
    /// the rest is in flight. `length` is the length of the transfer.
    pub fn ready_bytes(&self, length: u64) -> u64 {
        if self.is_done() {
            return match self.outcome() {
                Some(Ok(_)) => length,
                _ => self.work().map_or(0, ChunkedWork::ready_bytes),
            };
        }
        self.work().map_or(0, ChunkedWork::ready_bytes)
    }

    /// Whether a range of the transfer is done.
    pub fn is_range_ready(&self, from: u64, to: u64) -> bool {
        match (self.outcome(), self.work()) {
            (Some(Ok(_)), _) => true,
            (_, Some(work)) => work.is_range_done(from, to),
            (_, None) => false,
        }
    }

    /// Cancels the transfer: parts that have not started do not start. The transfer then ends with
    /// [`ExecutionError::Cancelled`], unless every part had started.
    pub fn cancel(&self) {
        self.state.word().fetch_or(CANCELLED, Ordering::AcqRel);
        let reason = || self.record(ExecutionError::Cancelled { done_bytes: 0 });
        if self.work().is_some_and(|work| work.drop_unclaimed(reason)) {
            self.complete();
        }
    }

    /// Whether [`Completion::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        self.state.word().load(Ordering::Relaxed) & CANCELLED != 0
    }

    /// The variable that is written at the end, if there is one.
    pub(crate) fn notification(&self) -> Option<PendingNotification> {
        self.notification
    }

    /// Records that the engine has written the notification variable.
    pub(crate) fn mark_notified(&self) {
        self.state.word().fetch_or(NOTIFIED, Ordering::Relaxed);
    }

    /// Whether the end is visible in the state word alone. An engine that knows this in advance
    /// does not read the completion to finish it, which saves the transfer of a cache line.
    pub(crate) fn has_no_listeners(&self) -> bool {
        let is_traced = self.state.word().load(Ordering::Relaxed) & TRACED != 0;
        self.notification.is_none() && !is_traced
    }

    /// Reports the success of the one descriptor of a transfer without listeners.
    pub(crate) fn finish_unlistened(&self) {
        self.publish(false);
    }

    /// Reports the end of the one descriptor of the transfer.
    pub(crate) fn finish_whole(&self, result: Result<PartOutput, ExecutionError>) {
        match result {
            Ok(output) => self.output.set(output),
            Err(error) => self.record(error),
        }
        self.complete();
    }

    /// Reports the end of a part. The call that ends the last part completes the transfer.
    pub(crate) fn finish_part(
        &self,
        offset: u64,
        length: u64,
        result: Result<PartOutput, ExecutionError>,
    ) {
        let work = self.work().expect("only chunked transfers have parts");
        let done = match result {
            Ok(output) => {
                self.output.add(output, offset, work.length() - (offset + length));
                true
            }
            Err(error) => {
                self.record(error);
                false
            }
        };
        if work.finish(offset, length, done) {
            self.complete();
        }
    }

    /// Fails a transfer of which no part is in flight.
    pub(crate) fn fail_unstarted(&self, error: ExecutionError) {
        self.record(error);
        if self.work().is_none_or(|work| work.drop_unclaimed(|| ())) {
            self.complete();
        }
    }

    /// Records the first failure; later ones are dropped.
    fn record(&self, error: ExecutionError) {
        lock(&self.failure).get_or_insert(error);
    }

    /// Publishes the end and notifies all listeners. Called exactly once, by the thread that ended
    /// the last part.
    fn complete(&self) {
        let failed = self.finalize_error();
        if self.state.word().load(Ordering::Relaxed) & TRACED != 0 {
            self.end_span(failed);
        }
        if !failed && self.crc_variable.is_some() {
            // SAFETY: guaranteed to `storing_crc`; the completion is not done before `publish`.
            unsafe { CrcVariable::store(self.crc_variable, self.output.load().crc) };
        }
        if !failed && let Some(notify) = &self.notification {
            match self.state.word().load(Ordering::Relaxed) & NOTIFIED {
                0 => notify.deliver(),
                _ => notify.wake(),
            }
        }
        probes::complete(failed.into());
        self.publish(failed);
    }

    /// Ends the span. Before anything shows the end to the user: who has waited may then write down
    /// all spans.
    #[cold]
    fn end_span(&self, failed: bool) {
        let Some(span) = lock(&self.span).take() else { return };
        catch_user_panic(|| tracing::trace!(parent: &*span, failed, "completed"));
        catch_user_panic(|| drop(span));
    }

    fn publish(&self, failed: bool) {
        let mark = if failed { DONE | FAILED } else { DONE };
        let previous = self.state.word().fetch_or(mark, Ordering::AcqRel);
        debug_assert!(previous & DONE == 0, "a transfer ends once");
        if previous & SLEEPER != 0 {
            self.state.wake_all();
        }
        if previous & LISTENER != 0 {
            self.notify_listeners(failed);
        }
    }

    /// Whether the transfer failed; if so, adds the number of finished bytes to the recorded error.
    fn finalize_error(&self) -> bool {
        let mut failure = lock(&self.failure);
        if let (Some(error), Some(work)) = (failure.as_mut(), self.work()) {
            let total = work.done_bytes();
            match error {
                ExecutionError::Engine { done_bytes, .. }
                | ExecutionError::BadMemory { done_bytes, .. }
                | ExecutionError::Cancelled { done_bytes } => *done_bytes = total,
                ExecutionError::Predecessor | ExecutionError::Forked => {}
            }
        }
        if let Some(error) = &*failure {
            probes::fault(error.done_bytes());
            stats::thread(|counters| counters.faults.add(1));
        }
        failure.is_some()
    }

    /// Spins for at most `spin_ns`, then sleeps until completion or the deadline. Returns whether
    /// the transfer is complete. If a channel without a thread executes the transfer, the caller polls
    /// that channel instead (see `polling.rs`).
    pub fn wait(&self, spin_ns: u64, deadline: Option<Instant>) -> bool {
        if let Some(channel) = self.polled_channel() {
            return self.wait_polling(&*channel, spin_ns, deadline);
        }
        if self.spin(spin_ns) {
            return true;
        }
        loop {
            let timeout = match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return self.is_done(),
                timeout => timeout,
            };
            if self.sleep(timeout) {
                return true;
            }
        }
    }

    /// Sleeps until completion or for at most `timeout`, perhaps less. Returns whether the transfer is
    /// complete.
    fn sleep(&self, timeout: Option<Duration>) -> bool {
        let state = self.state.word().fetch_or(SLEEPER, Ordering::AcqRel) | SLEEPER;
        if state & DONE == 0 {
            self.state.wait(state, timeout);
        }
        self.is_done()
    }

    fn spin(&self, spin_ns: u64) -> bool {
        const POLLS_PER_CLOCK: u32 = 32;
        if self.is_done() {
            return true;
        }
        if spin_ns == 0 {
            return false;
        }
        let start = Instant::now();
        loop {
            for _ in 0..POLLS_PER_CLOCK {
                if self.is_done() {
                    return true;
                }
                spin_hint();
            }
            if start.elapsed().as_nanos() >= u128::from(spin_ns) {
                return false;
            }
        }
    }
}

/// Runs user code and catches its panic, so that an engine thread neither dies nor leaves a
/// descriptor that is neither finished nor failed.
pub(crate) fn catch_user_panic(user_code: impl FnOnce()) {
    if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(user_code)) {
        // The payload's drop is user code too, and may panic again.
        std::mem::forget(panic);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use memferry_sys::EventFd;
    use tracing::span::{Attributes, Id, Record};

    use super::*;

    /// Records what happens to spans, and whether the transfer was complete by then.
    #[derive(Default)]
    struct SpanLog {
        completion: OnceLock<Arc<Completion>>,
        lines: Mutex<Vec<(&'static str, bool)>>,
    }

    impl SpanLog {
        fn add(&self, what: &'static str) {
            let is_done = self.completion.get().is_some_and(|completion| completion.is_done());
            lock(&self.lines).push((what, is_done));
        }
    }

    struct Subscriber(Arc<SpanLog>);

    impl tracing::Subscriber for Subscriber {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, _: &tracing::Event<'_>) {
            self.0.add("event");
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}

        fn try_close(&self, _: Id) -> bool {
            self.0.add("end");
            true
        }
    }

    #[test]
    fn a_span_ends_before_its_transfer_is_complete() {
        let log = Arc::new(SpanLog::default());
        tracing::subscriber::with_default(Subscriber(log.clone()), || {
            let completion = Arc::new(Completion::whole().traced(tracing::trace_span!("transfer")));
            assert!(log.completion.set(completion.clone()).is_ok());
            assert!(!completion.has_no_listeners());
            completion.finish_whole(Ok(PartOutput::None));
            assert!(completion.is_done());
            // The log owns the completion, as a channel may after a wait.
            assert_eq!(*lock(&log.lines), [("event", false), ("end", false)]);
        });
    }

    #[test]
    fn a_child_waits_for_no_lock_of_a_completion_of_its_parent() {
        let completion = Completion::whole();
        let failed = Completion::failed(ExecutionError::Cancelled { done_bytes: 0 });
        let event = Arc::new(EventFd::new().unwrap());
        // The forking thread stands for another thread that holds the locks: in the child they stay
        // locked.
        let (listeners, failure) = (lock(&completion.listeners), lock(&failed.failure));
        // SAFETY: the child uses only this stack and the heap, and exits by `_exit`; the alarm ends
        // it if it blocks on a lock.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe { libc::alarm(30) };
            completion.signal_on_completion(&event);
            let passed = event.drain() == 1
                && completion.keep_alive(7) == Err(7)
                && completion.outcome().is_none()
                && failed.outcome() == Some(Err(ExecutionError::Forked));
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!passed)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child created above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        drop((listeners, failure));
        assert_eq!(completion.keep_alive(7), Ok(()));
    }
}
