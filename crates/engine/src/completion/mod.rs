//! The completion: the state of one transfer that engines report to and users ask.
//!
//! A cookie, a future, an eventfd and a notification variable are all views of this one event. It
//! is data: an engine marks it, and whoever sleeps on it, polls it or is ordered after it finds
//! out from there. The state word has this life:
//!
//! ```text
//!  0 ──► SLEEPER / WATCHER / CANCELLED may be added by users at any time
//!  └──► DONE (with FAILED if it did not end well), once, by the engine that finishes last
//! ```
//!
//! Who may touch what: `state` anybody, by atomic operations; `failure`, `difference` written by
//! engines before DONE and read by users after it; `watchers` under its lock; everything else is
//! fixed before the completion is shared.

mod launch;
mod notify;
mod waiters;
mod work;

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use memferry_sys::sync::atomic::{AtomicU64, Ordering};
use memferry_sys::sync::{Mutex, lock, spin_hint};
use memferry_sys::{EventFd, WaitWord, fork};

pub use launch::{Launch, Order};
pub use notify::{Notification, Notify};
pub use waiters::Waiters;
pub use work::{Chunk, Work};

use crate::contract::ExecutionError;

const DONE: u32 = 1;
const FAILED: u32 = 2;
const SLEEPER: u32 = 4;
const WATCHER: u32 = 8;
const CANCELLED: u32 = 16;
/// The engine has set the notification variable itself.
const NOTIFIED: u32 = 32;

/// No difference found.
const EQUAL: u64 = u64::MAX;

/// How a transfer ended, when it ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finish {
    /// For a compare: the offset of the first byte that differs, if any.
    pub difference: Option<u64>,
}

/// The shared state of one transfer.
pub struct Completion {
    state: WaitWord,
    difference: AtomicU64,
    notify: Option<Notify>,
    work: Option<Work>,
    failure: Mutex<Option<ExecutionError>>,
    /// Boxed: most transfers have none, and a completion should be few cache lines.
    watchers: Mutex<Option<Box<Watchers>>>,
    span: tracing::Span,
    /// In a forked child the locks of a completion of the parent may be held for ever.
    fork_generation: u64,
}

/// Short: a request that is ordered after others shows theirs.
impl std::fmt::Debug for Completion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Completion").field("is_done", &self.is_done()).finish_non_exhaustive()
    }
}

/// Everybody who wants to be told, apart from sleepers on the state word.
#[derive(Debug, Default)]
struct Watchers {
    wakers: Vec<Waker>,
    events: Vec<Arc<EventFd>>,
    followers: Vec<Arc<Launch>>,
    kept: Vec<Box<dyn Kept>>,
}

/// Something that must live until a transfer is over.
pub trait Kept: Send + std::fmt::Debug {}
impl<T: Send + std::fmt::Debug> Kept for T {}

impl Completion {
    /// The completion of a transfer that one descriptor carries out.
    pub fn whole() -> Self {
        Self {
            state: WaitWord::new(0),
            difference: AtomicU64::new(EQUAL),
            notify: None,
            work: None,
            failure: Mutex::new(None),
            watchers: Mutex::new(None),
            span: tracing::Span::none(),
            fork_generation: fork::generation(),
        }
    }

    /// Made by the parent of this forked child: nobody here ends it, and its locks are not taken.
    fn is_forked(&self) -> bool {
        fork::generation() != self.fork_generation
    }

    /// The completion of a transfer that has ended well already.
    pub fn over() -> Self {
        Self { state: WaitWord::new(DONE), ..Self::whole() }
    }

    /// The completion of a transfer that was refused before anything of it was begun.
    pub fn refused(error: ExecutionError) -> Self {
        let state = WaitWord::new(DONE | FAILED);
        Self { state, failure: Mutex::new(Some(error)), ..Self::whole() }
    }

    /// The completion of a transfer that is cut into chunks, for engines to claim or to be given.
    pub fn chunked(work: Work) -> Self {
        Self { work: Some(work), ..Self::whole() }
    }

    /// Sets a variable after all data is visible and before the completion says it is done.
    pub fn notifying(mut self, notify: Option<Notify>) -> Self {
        self.notify = notify;
        self
    }

    /// Records the transfer's life in a tracing span.
    pub fn traced(mut self, span: tracing::Span) -> Self {
        self.span = span;
        self
    }

    /// The chunks, if it was cut.
    pub fn work(&self) -> Option<&Work> {
        self.work.as_ref()
    }

    /// The span of the transfer.
    pub fn span(&self) -> &tracing::Span {
        &self.span
    }

    /// Whether the transfer is over, well or not. When it is, all data is visible to the caller.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.state.word().load(Ordering::Acquire) & DONE != 0
    }

    /// How it ended, or `None` while it goes on. In a forked child, a failure of the parent's is told
    /// as [`ExecutionError::Forked`].
    pub fn outcome(&self) -> Option<Result<Finish, ExecutionError>> {
        let state = self.state.word().load(Ordering::Acquire);
        if state & DONE == 0 {
            return None;
        }
        Some(if state & FAILED != 0 && self.is_forked() {
            Err(ExecutionError::Forked)
        } else if state & FAILED != 0 {
            let failure = lock(&self.failure).clone();
            Err(failure.expect("a failure is recorded before it is announced"))
        } else {
            let difference = self.difference.load(Ordering::Relaxed);
            Ok(Finish { difference: (difference != EQUAL).then_some(difference) })
        })
    }

    /// How many bytes from the start are done: everything before that offset may be used while
    /// the rest still moves. `length` is the transfer's.
    pub fn ready_bytes(&self, length: u64) -> u64 {
        if self.is_done() {
            return match self.outcome() {
                Some(Ok(_)) => length,
                _ => self.work().map_or(0, Work::ready_bytes),
            };
        }
        self.work().map_or(0, Work::ready_bytes)
    }

    /// Whether a range of the transfer is done.
    pub fn is_range_ready(&self, from: u64, to: u64) -> bool {
        match (self.outcome(), self.work()) {
            (Some(Ok(_)), _) => true,
            (_, Some(work)) => work.is_range_done(from, to),
            (_, None) => false,
        }
    }

    /// Asks for the end: what nobody has begun is not begun any more. The transfer then ends with
    /// [`ExecutionError::Cancelled`], unless everything was begun already.
    pub fn cancel(&self) {
        self.state.word().fetch_or(CANCELLED, Ordering::AcqRel);
        let reason = || self.record(ExecutionError::Cancelled { done_bytes: 0 });
        if self.work().is_some_and(|work| work.drop_unclaimed(reason)) {
            self.settle();
        }
    }

    /// Whether [`Completion::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        self.state.word().load(Ordering::Relaxed) & CANCELLED != 0
    }

    /// The work, if a processor can do it.
    fn work_for_processors(&self) -> Option<&Work> {
        self.work().filter(|work| work.is_host_only())
    }

    /// Claims one chunk from the back and carries it out on the calling processor. Returns `false`
    /// when there was none left, or none that a processor reaches.
    pub fn help_from_back(&self) -> bool {
        let work = self.work_for_processors();
        let Some((work, chunk)) = work.and_then(|w| Some((w, w.claim_back()?))) else {
            return false;
        };
        self.run_chunk(work, chunk);
        true
    }

    /// Claims one chunk from the front and carries it out on the calling processor. Returns
    /// `false` when there was none left, or none that a processor reaches.
    pub fn help_from_front(&self) -> bool {
        let work = self.work_for_processors();
        let Some((work, chunk)) = work.and_then(|w| Some((w, w.claim_front()?))) else {
            return false;
        };
        self.run_chunk(work, chunk);
        true
    }

    /// Claims chunks from the front and carries them out until none is left; returns the bytes.
    pub fn run_from_front(&self) -> u64 {
        let Some(work) = self.work_for_processors() else { return 0 };
        let mut bytes = 0;
        while let Some(chunk) = work.claim_front() {
            bytes += chunk.length;
            self.run_chunk(work, chunk);
        }
        bytes
    }

    fn run_chunk(&self, work: &Work, chunk: Chunk) {
        // SAFETY: whoever made the work vouched for its memory until the completion is done, and
        // the claim makes this thread the only one to touch the chunk.
        let difference = unsafe { work.execute(chunk) };
        self.finish_part(chunk.offset, chunk.length, Ok(difference));
    }

    /// Carries out a run that an engine claimed and could not do.
    pub(crate) fn run_claimed(&self, run: Chunk) {
        let Some(work) = self.work_for_processors() else { return };
        work.chunks_of(run).for_each(|chunk| self.run_chunk(work, chunk));
    }

    /// A run that an engine claimed has ended.
    pub(crate) fn finish_claimed(&self, run: Chunk, result: &Result<Option<u64>, ExecutionError>) {
        let Some(work) = self.work() else { return };
        for chunk in work.chunks_of(run) {
            // The difference is reported with the chunk that it is in.
            let inside = |at: u64| {
                (run.offset + at).checked_sub(chunk.offset).filter(|&at| at < chunk.length)
            };
            let result = result.clone().map(|difference| difference.and_then(inside));
            self.finish_part(chunk.offset, chunk.length, result);
        }
    }

    /// The variable that is set at the end, if there is one.
    pub(crate) fn notify(&self) -> Option<Notify> {
        self.notify
    }

    /// The engine that ends the transfer has set its notification variable.
    pub(crate) fn mark_notified(&self) {
        self.state.word().fetch_or(NOTIFIED, Ordering::Relaxed);
    }

    /// Whether the end has to be told to nobody but those who look at the state word. An engine
    /// that knows this beforehand need not read the completion to finish it, which spares the
    /// transfer of a cache line.
    pub(crate) fn is_quiet(&self) -> bool {
        self.notify.is_none() && self.span.is_disabled()
    }

    /// The one descriptor of a quiet transfer has ended well.
    pub(crate) fn finish_quietly(&self) {
        self.announce(false);
    }

    /// The one descriptor of the transfer has ended.
    pub(crate) fn finish_whole(&self, result: Result<Option<u64>, ExecutionError>) {
        match result {
            Ok(None) => {}
            Ok(Some(difference)) => self.difference.store(difference, Ordering::Relaxed),
            Err(error) => self.record(error),
        }
        self.settle();
    }

    /// A part of the transfer has ended. The last one to end settles it.
    pub(crate) fn finish_part(
        &self,
        offset: u64,
        length: u64,
        result: Result<Option<u64>, ExecutionError>,
    ) {
        let work = self.work().expect("only chunked transfers have parts");
        let done = match result {
            Ok(difference) => {
                if let Some(at) = difference {
                    self.difference.fetch_min(offset + at, Ordering::Relaxed);
                }
                true
            }
            Err(error) => {
                self.record(error);
                false
            }
        };
        if work.finish(offset, length, done) {
            self.settle();
        }
    }

    /// Ends a transfer of which no part is in flight.
    pub(crate) fn refuse(&self, error: ExecutionError) {
        self.record(error);
        if self.work().is_none_or(|work| work.drop_unclaimed(|| ())) {
            self.settle();
        }
    }

    /// Remembers the first failure.
    fn record(&self, error: ExecutionError) {
        lock(&self.failure).get_or_insert(error);
    }

    /// Announces the end to everybody. Called exactly once, by whoever ended the last part.
    fn settle(&self) {
        let failed = self.take_stock();
        if !failed && let Some(notify) = &self.notify {
            match self.state.word().load(Ordering::Relaxed) & NOTIFIED {
                0 => notify.deliver(),
                _ => notify.wake(),
            }
        }
        self.announce(failed);
        if !self.span.is_disabled() {
            shielded(|| tracing::trace!(parent: &self.span, failed, "completed"));
        }
    }

    fn announce(&self, failed: bool) {
        let mark = if failed { DONE | FAILED } else { DONE };
        let previous = self.state.word().fetch_or(mark, Ordering::AcqRel);
        debug_assert!(previous & DONE == 0, "a transfer ends once");
        if previous & SLEEPER != 0 {
            self.state.wake_all();
        }
        if previous & WATCHER != 0 {
            self.tell_watchers(failed);
        }
    }

    /// Whether the transfer failed; if so, completes the record with what was done all the same.
    fn take_stock(&self) -> bool {
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
        failure.is_some()
    }

    fn tell_watchers(&self, failed: bool) {
        let Some(watchers) = lock(&self.watchers).take() else {
            return;
        };
        let Watchers { wakers, events, followers, kept } = *watchers;
        events.iter().for_each(|event| event.signal());
        wakers.into_iter().for_each(|waker| shielded(|| waker.wake()));
        Launch::predecessor_ended(followers, failed);
        kept.into_iter().for_each(|thing| shielded(|| drop(thing)));
    }

    /// Adds a watcher, unless the transfer is over already, or goes on in another process; returns
    /// whether it was added.
    fn watch(&self, add: impl FnOnce(&mut Watchers)) -> bool {
        if self.is_forked() {
            return false;
        }
        let mut watchers = lock(&self.watchers);
        // The flag is set under the lock: an engine that sees it waits for the lock and then
        // finds the watcher.
        let previous = self.state.word().fetch_or(WATCHER, Ordering::AcqRel);
        if previous & DONE != 0 {
            return false;
        }
        add(watchers.get_or_insert_default());
        true
    }

    /// Wakes a task at the end, each task once. `false`: over already.
    pub fn wake_at_end(&self, waker: &Waker) -> bool {
        // Cloned outside the lock: a waker's code is the user's.
        let mut new = Some(waker.clone());
        self.watch(|watchers| {
            if !watchers.wakers.iter().any(|known| known.will_wake(waker)) {
                watchers.wakers.extend(new.take());
            }
        })
    }

    /// Signals a descriptor at the end, or now if the transfer is over already.
    pub fn signal_at_end(&self, event: &Arc<EventFd>) {
        if !self.watch(|watchers| watchers.events.push(event.clone())) {
            event.signal();
        }
    }

    /// Keeps something alive until the end. `Err` gives it back: over already.
    pub fn keep_until_end<T: Send + std::fmt::Debug + 'static>(&self, thing: T) -> Result<(), T> {
        let mut thing = Some(thing);
        self.watch(|watchers| watchers.kept.push(Box::new(thing.take())));
        thing.map_or(Ok(()), Err)
    }

    /// Registers a launch as waiting for this transfer; `None` when it is over already, with how
    /// it ended.
    pub(crate) fn follow(&self, launch: &Arc<Launch>) -> Option<bool> {
        let added = self.watch(|watchers| watchers.followers.push(launch.clone()));
        (!added).then(|| matches!(self.outcome(), Some(Ok(_))))
    }

    /// Spins at most `spin_ns`, then sleeps until the end or the deadline. Returns whether the
    /// transfer is over.
    pub fn wait(&self, spin_ns: u64, deadline: Option<Instant>) -> bool {
        if self.spin(spin_ns) {
            return true;
        }
        loop {
            let state = self.state.word().fetch_or(SLEEPER, Ordering::AcqRel) | SLEEPER;
            if state & DONE != 0 {
                return true;
            }
            let timeout = match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return false,
                timeout => timeout,
            };
            self.state.wait(state, timeout);
            if self.is_done() {
                return true;
            }
        }
    }

    fn spin(&self, spin_ns: u64) -> bool {
        const LOOKS_PER_CLOCK: u32 = 32;
        if self.is_done() {
            return true;
        }
        if spin_ns == 0 {
            return false;
        }
        let start = Instant::now();
        loop {
            for _ in 0..LOOKS_PER_CLOCK {
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

/// Runs what belongs to the user. A panic in there goes no further: the thread of an engine must
/// not die of it, nor leave behind a descriptor that is neither finished nor failed.
fn shielded(theirs: impl FnOnce()) {
    if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(theirs)) {
        // Its drop is the user's code too, and may panic again.
        std::mem::forget(panic);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_child_waits_for_no_lock_of_a_completion_of_its_parent() {
        fork::watch();
        let completion = Completion::whole();
        let failed = Completion::refused(ExecutionError::Cancelled { done_bytes: 0 });
        let event = Arc::new(EventFd::new().unwrap());
        // The thread that forks stands for another that held the locks: in the child they are held
        // too, and nobody gives them back.
        let (watchers, failure) = (lock(&completion.watchers), lock(&failed.failure));
        // SAFETY: the child uses what is here and the heap, and leaves by `_exit`; the alarm ends it if
        // a lock keeps it.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe { libc::alarm(30) };
            completion.signal_at_end(&event);
            let fine = event.drain() == 1
                && completion.keep_until_end(7) == Err(7)
                && completion.outcome().is_none()
                && failed.outcome() == Some(Err(ExecutionError::Forked));
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!fine)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child just made.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        drop((watchers, failure));
        assert_eq!(completion.keep_until_end(7), Ok(()));
    }
}
