//! Waiting: a thread polls for a limited time, then sleeps, and misses no wakeup.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;
use std::time::Instant;

use memferry_sys::biased_mutex::BiasedGuard;

use super::operations::DeferredAction;
use super::progress::{Drain, ProgressScope};
use super::{Port, PortState};
use crate::path::ActiveCopy;
use crate::ring::wakeup::FD_ARMED;

/// Polls in a row before other threads can take the lock.
pub(super) const SPIN_POLLS: u32 = 200;
/// Polls in a row where processes share cores: other processes must run before there is work.
const OVERSUBSCRIBED_POLLS: u32 = 5;
/// A wait that takes longer yields the core between polls: another process may be the peer.
const NO_YIELD_NS: u64 = 5_000;
/// Sleeps on the futex words without work before the sleeper changes to the epoll set.
pub(super) const MAX_FUTEX_SLEEPS: u32 = 3;

/// The lock of a port, held. The unlock notifies threads that wait for what this thread has done.
pub(crate) struct PortGuard<'a> {
    port: &'a Port,
    /// The unlock is for a sleep: this thread is the sleeper.
    pub(super) entering_sleep: bool,
    /// This thread is one of the pollers.
    pub(super) is_polling: bool,
    state: ManuallyDrop<BiasedGuard<'a, PortState>>,
}

impl Deref for PortGuard<'_> {
    type Target = PortState;

    fn deref(&self) -> &PortState {
        &self.state
    }
}

impl DerefMut for PortGuard<'_> {
    fn deref_mut(&mut self) -> &mut PortState {
        &mut self.state
    }
}

impl Drop for PortGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.state.has_pending_notifications() {
            return self.unlock_and_notify();
        }
        // SAFETY: dropped once, here, and not used any more.
        unsafe { ManuallyDrop::drop(&mut self.state) };
    }
}

impl PortGuard<'_> {
    /// Makes progress with the lock held, and makes one copy with the port unlocked. Returns whether that
    /// made progress.
    #[inline]
    pub(crate) fn progress(&mut self) -> bool {
        self.progress_draining(Drain::All)
    }

    /// As [`PortGuard::progress`], for a thread that polls again unless it has what it waits for.
    #[inline]
    fn progress_waiting(&mut self) -> bool {
        self.progress_draining(Drain::Wanted)
    }

    #[inline]
    fn progress_draining(&mut self, drain: Drain) -> bool {
        let (moved, copy) = self.state.step_and_take_copy(drain);
        if let Some((peer, copying)) = copy {
            self.run_copy(peer, &copying);
            return true;
        }
        moved
    }

    /// Makes progress, and checks liveness of peers if a check is due: a busy peer must not hide the
    /// disconnect of another. Returns whether that changed anything.
    #[inline]
    pub(crate) fn progress_and_check_peers(&mut self) -> bool {
        self.progress() | self.check_peers(false)
    }

    /// Processes control messages and queued sends, and performs no bulk copy. Used by calls that only post
    /// an operation: copying here would delay the message that the caller is about to send.
    pub(crate) fn progress_control(&mut self) -> bool {
        self.progress_control_draining(Drain::All)
    }

    /// As [`PortGuard::progress_control`], for a call that has posted a receive.
    #[inline]
    pub(super) fn progress_posted(&mut self) -> bool {
        self.progress_control_draining(Drain::Wanted)
    }

    #[inline]
    fn progress_control_draining(&mut self, drain: Drain) -> bool {
        // No thread waits for operations whose handles were dropped: every call makes progress with them.
        if self.protocol.operations.has_detached() {
            self.progress()
        } else {
            self.progress_all(ProgressScope::ControlOnly, drain)
        }
    }

    /// Posts receives for a caller that does not wait for them in the same call: the sender may have the
    /// time to copy.
    #[inline]
    pub(super) fn posting_ahead<R>(&mut self, post: impl FnOnce(&mut Self) -> R) -> R {
        self.protocol.posts_ahead = true;
        let posted = post(self);
        self.protocol.posts_ahead = false;
        posted
    }

    /// Makes the progress of a thread that may have what it waits for. Returns whether a copy is to be made.
    #[inline]
    fn progress_without_copies(&mut self) -> bool {
        self.protocol.copies.is_due = false;
        self.progress_all(ProgressScope::Steps, Drain::Wanted);
        self.protocol.copies.is_due
    }

    /// Makes a copy with the port unlocked, and then the steps that follow it.
    #[inline(never)]
    fn run_copy(&mut self, peer: usize, copying: &ActiveCopy) {
        self.protocol.copies.begin(peer);
        self.copy_unlocked(|| copying.run());
        // The operation may have ended during the copy, and wait for it.
        let mut moved =
            !self.protocol.operations.quiescing.is_empty() && self.protocol.finish_quiesced();
        moved |= self.progress_peer(peer, ProgressScope::Steps, Drain::Wanted);
        self.wakeup.progress_count += u64::from(moved);
    }

    /// Unlocks the port for a copy, which may never return: no thread may depend on this one for a
    /// notification. Wakers and buffers of the application are left to the next unlock, because their code
    /// may wait for this message.
    #[inline]
    pub(super) fn copy_unlocked(&mut self, copy: impl FnOnce()) {
        self.stop_polling_for_copy();
        // Last: the polls above may have completed operations.
        self.notify();
        self.without_lock(copy);
        if self.is_polling {
            self.state.wakeup.pollers += 1;
            self.disarm_wakeups();
        }
    }

    /// Ends the polling of a thread that unlocks the port to copy: peers must wake the sleeper and event
    /// loops.
    fn stop_polling_for_copy(&mut self) {
        let state = &mut **self.state;
        state.wakeup.pollers -= u32::from(self.is_polling);
        if state.wakeup.pollers > 0 || state.wakeup.armed == 0 {
            return;
        }
        state.rearm();
        if state.wakeup.armed & FD_ARMED != 0 {
            state.rearm_event_loop();
            state.update_ready_event();
        }
        if state.wakeup.has_sleeper
            && (state.windows.take_word_changes() || state.protocol.peers.leaves_runnable())
        {
            self.port.wake_sleeper(state);
        }
    }

    /// Runs `f` with the port unlocked.
    fn without_lock(&mut self, f: impl FnOnce()) {
        /// Aborts on an unwind through `f`, which would leave a guard that is already dropped.
        struct NoUnwinding;
        impl Drop for NoUnwinding {
            fn drop(&mut self) {
                std::process::abort();
            }
        }
        let no_unwinding = NoUnwinding;
        // It is of this thread's call.
        let posts_ahead = std::mem::take(&mut self.protocol.posts_ahead);
        // SAFETY: dropped once, and not used until the lock is taken again below, which is reached unless the
        // process ends.
        unsafe { ManuallyDrop::drop(&mut self.state) };
        f();
        self.state = ManuallyDrop::new(self.port.lock_state());
        self.protocol.posts_ahead = posts_ahead;
        std::mem::forget(no_unwinding);
    }

    fn unlock_and_notify(&mut self) {
        let state = &mut **self.state;
        if state.wakeup.is_armed_without_poller() {
            self.port.notify_before_unlock(state, self.entering_sleep);
        }
        self.notify();
        let leavings = std::mem::take(&mut self.state.protocol.operations.deferred);
        // SAFETY: dropped once, here, and not used any more; the lock is free from now on.
        unsafe { ManuallyDrop::drop(&mut self.state) };
        leavings.into_iter().for_each(run_deferred);
        crate::quarantine::sweep();
    }

    /// Notifies waiting threads of what has completed or changed.
    fn notify(&mut self) {
        let state = &mut **self.state;
        if state.protocol.operations.newly_completed > 0 {
            state.protocol.operations.newly_completed = 0;
            self.port.notify_local_waiters();
            // The sleeper may wait for this operation.
            if state.wakeup.has_sleeper
                && !self.entering_sleep
                && state.protocol.operations.has_uncollected()
            {
                self.port.wake_sleeper(state);
            }
        }
        if state.protocol.changed {
            state.protocol.changed = false;
            self.port.notify_local_waiters();
            if state.wakeup.has_sleeper && !self.entering_sleep {
                self.port.wake_sleeper(state);
            }
        }
    }
}

/// Wakes wakers and drops buffers of the application. A panic in the application's code does not end the
/// thread, which may be the progress thread.
fn run_deferred(leaving: DeferredAction) {
    let deal = || match leaving {
        DeferredAction::Wake(waker) => waker.wake(),
        DeferredAction::RemoveSocketFile(leftover) => leftover.remove(),
        DeferredAction::Invalidate(forget) => forget(),
        DeferredAction::Drop { .. } | DeferredAction::DropUserData(_) => {}
    };
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(deal)).is_err() {
        tracing::error!("a waker or a buffer panicked when a message ended");
    }
}

impl Port {
    /// Takes the lock.
    #[inline]
    pub(crate) fn lock(&self) -> PortGuard<'_> {
        let state = ManuallyDrop::new(self.lock_state());
        PortGuard { port: self, entering_sleep: false, is_polling: false, state }
    }

    #[inline(always)]
    fn lock_state(&self) -> BiasedGuard<'_, PortState> {
        match self.state.try_lock() {
            Some(state) => state,
            None => self.lock_contended(),
        }
    }

    #[cold]
    fn lock_contended(&self) -> BiasedGuard<'_, PortState> {
        self.lock_waiters.fetch_add(1, Ordering::Relaxed);
        let state = self.state.lock();
        self.lock_waiters.fetch_sub(1, Ordering::Relaxed);
        state
    }

    /// At the end of a call, wakes the sleeper for operations that the call has started, and event loops for
    /// results to collect.
    #[cold]
    fn notify_before_unlock(&self, state: &mut PortState, to_sleep: bool) {
        if state.wakeup.armed & FD_ARMED != 0 {
            // A thread that is about to sleep has polled, and must be woken by what arrives after that.
            if !to_sleep {
                state.rearm_event_loop();
            }
            state.update_ready_event();
        }
        // The word that the sleeper waits for may have changed while this thread polled and consumed the
        // wakeup.
        if !to_sleep && state.wakeup.has_sleeper && state.windows.take_word_changes() {
            self.wake_sleeper(state);
        }
        // Operations that only wait for their peers need no thread.
        if !to_sleep && state.wakeup.has_sleeper && state.protocol.peers.has_runnable() {
            self.wake_sleeper(state);
        }
    }

    /// Notifies threads of this process that an operation completed or that there is no sleeper.
    pub(super) fn notify_local_waiters(&self) {
        if self.local_waiters.load(Ordering::Relaxed) > 0 {
            self.local_futex.word().fetch_add(1, Ordering::Release);
            self.local_futex.wake_all();
        }
    }

    /// Makes progress until `look` returns a value, or until the deadline.
    pub(crate) fn block<T>(
        &self,
        spin: bool,
        deadline: Option<Instant>,
        look: impl FnMut(&mut PortState) -> Option<T>,
    ) -> Option<T> {
        self.block_locked(self.lock(), spin, deadline, look)
    }

    /// As [`Port::block`], for a caller that holds the lock.
    #[inline]
    pub(crate) fn block_locked<'a, T>(
        &'a self,
        mut state: PortGuard<'a>,
        spin: bool,
        deadline: Option<Instant>,
        mut look: impl FnMut(&mut PortState) -> Option<T>,
    ) -> Option<T> {
        // Without a copy at first: what is waited for may be complete, and the caller has other work than a
        // copy for another message, which the sender can make meanwhile.
        let has_copies = state.progress_without_copies();
        if let Some(found) = look(&mut state) {
            if has_copies && state.protocol.copies.count_postponed() {
                state.progress();
            }
            return Some(found);
        }
        state.begin_polling();
        state.is_polling = true;
        let looks =
            if state.protocol.peers.is_oversubscribed { OVERSUBSCRIBED_POLLS } else { SPIN_POLLS };
        let mut quiet = 0;
        let mut seen = state.wait_epoch();
        let found = 'wait: loop {
            let mut moved_at: Option<Instant> = None;
            loop {
                let mut moved = false;
                for turn in 0..looks {
                    if state.progress_waiting() {
                        (moved_at, quiet, moved) = (None, 0, true);
                    }
                    seen = state.wait_epoch();
                    if let Some(found) = look(&mut state) {
                        break 'wait Some(found);
                    }
                    if self.lock_waiters.load(Ordering::Relaxed) > 0 {
                        break;
                    }
                    // A pause instruction takes longer than a poll: every eighth suffices for the sibling
                    // thread.
                    if turn % 8 == 7 {
                        std::hint::spin_loop();
                    }
                }
                state.check_peers(false);
                let now = Instant::now();
                if deadline.is_some_and(|deadline| now >= deadline) {
                    // What was waited for may be behind messages that this wait has left in a ring.
                    state.progress();
                    break 'wait look(&mut state);
                }
                let spun = now.duration_since(*moved_at.get_or_insert(now)).as_nanos() as u64;
                if !moved && (!spin || spun >= state.spin_ns()) {
                    break;
                }
                let alone = !state.protocol.peers.is_oversubscribed && spun < NO_YIELD_NS;
                if !alone || self.lock_waiters.load(Ordering::Relaxed) > 0 {
                    drop(state);
                    self.yield_lock();
                    state = self.lock();
                    state.is_polling = true;
                }
            }
            state = self.sleep(state, deadline, quiet >= MAX_FUTEX_SLEEPS, seen);
            state.is_polling = true;
            quiet += 1;
            if let Some(found) = look(&mut state) {
                break Some(found);
            }
        };
        state.is_polling = false;
        state.end_polling();
        found
    }

    /// Leaves the lock to threads that wait for it. A thread that sleeps for the lock takes long to wake up,
    /// and would never find it free if this thread took it again at once.
    fn yield_lock(&self) {
        const MAX_YIELDS: u32 = 100;
        std::thread::yield_now();
        for _ in 0..MAX_YIELDS {
            if self.lock_waiters.load(Ordering::Relaxed) == 0 {
                break;
            }
            std::thread::yield_now();
        }
    }
}

impl PortState {
    /// Whether the unlock has to notify, or to run deferred actions.
    #[inline]
    fn has_pending_notifications(&self) -> bool {
        self.wakeup.is_armed_without_poller()
            || self.protocol.operations.newly_completed > 0
            || self.protocol.changed
            || !self.protocol.operations.deferred.is_empty()
    }

    /// Time of polling before a sleep.
    pub(super) fn spin_ns(&self) -> u64 {
        self.config.spin_ns(self.protocol.peers.is_oversubscribed)
    }

    /// Adds a polling thread: peers need not wake this side meanwhile.
    pub(super) fn begin_polling(&mut self) {
        self.wakeup.begin_polling(&mut self.protocol.peers);
    }

    pub(super) fn end_polling(&mut self) {
        self.wakeup.pollers -= 1;
        if self.wakeup.pollers == 0 {
            self.rearm();
        }
    }
}
