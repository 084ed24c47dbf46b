//! Waiting: look for a while, then sleep, and never through something that came.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::Instant;

use memferry_sys::sync::lock;

use super::operations::Leaving;
use super::progress::Work;
use super::{Port, State};
use crate::path::Copying;
use crate::ring::attention::AWAY;

/// Looks in one go, before the lock is free for others for a moment.
pub(super) const LOOKS: u32 = 200;
/// The same where processes share cores: then others must run before there is anything to see.
const CROWDED_LOOKS: u32 = 5;
/// A wait that takes longer lets others have the core between looks: one of them may be the peer.
const ALONE_NS: u64 = 5_000;
/// Sleeps on the words without anything before the sleeper goes deeper.
pub(super) const SLICES: u32 = 3;

/// The lock, held. When it is let go, whoever waits for what was done is told.
pub(crate) struct Entered<'a> {
    port: &'a Port,
    /// Let go to sleep on the words: this thread is the sleeper.
    pub(super) to_sleep: bool,
    /// This thread is one of the pollers.
    pub(super) polls: bool,
    state: ManuallyDrop<MutexGuard<'a, State>>,
}

impl Deref for Entered<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Entered<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.state.must_tell_somebody() {
            return self.leave_and_tell();
        }
        // SAFETY: dropped once, here, and not used any more.
        unsafe { ManuallyDrop::drop(&mut self.state) };
    }
}

impl Entered<'_> {
    /// Does what can be done now, and makes one copy with the lock let go. Returns whether anything moved.
    #[inline]
    pub(crate) fn progress(&mut self) -> bool {
        let (moved, copy) = self.state.step_and_take_copy();
        if let Some((peer, copying)) = copy {
            self.copy(peer, &copying);
            return true;
        }
        moved
    }

    /// Does what can be done now, and looks after peers if it is time to: a busy peer must not hide the
    /// end of another. Returns whether anything moved.
    #[inline]
    pub(crate) fn look_around(&mut self) -> bool {
        self.progress() | self.check_peers(false)
    }

    /// Does what takes no time: for calls that only begin something. A call that copied what came
    /// meanwhile would keep the peer waiting for what it is about to say.
    #[inline]
    pub(crate) fn hear(&mut self) -> bool {
        // Messages whose handles were dropped are never waited for: every call has to move them.
        if self.operations.has_detached() { self.progress() } else { self.work(Work::Notes) }
    }

    /// Makes a copy without the lock, and then the steps behind it.
    #[inline(never)]
    fn copy(&mut self, peer: usize, copying: &Copying) {
        self.copy_turn = peer + 1;
        self.copy_unlocked(|| copying.run());
        // The message may have ended meanwhile, and waits for just this copy.
        let mut moved = !self.held.is_empty() && self.release_held();
        moved |= self.progress_peer(peer, Work::Steps);
        self.moves += u64::from(moved);
    }

    /// Lets go of the lock for a copy. It may never come back: nobody must wait for this thread to learn of
    /// anything. Wakers and buffers of the application's are left to whoever leaves the lock next: their
    /// code may wait for just this message.
    #[inline]
    pub(super) fn copy_unlocked(&mut self, copy: impl FnOnce()) {
        self.let_others_poll();
        // Last: what the peers wrote meanwhile may have ended something.
        self.tell();
        self.without_lock(copy);
        if self.polls {
            self.state.pollers += 1;
            self.state.awake();
        }
    }

    /// A thread that leaves the lock to copy polls no more: peers ring for whoever sleeps or watches.
    fn let_others_poll(&mut self) {
        let state = &mut **self.state;
        state.pollers -= u32::from(self.polls);
        if state.pollers > 0 || state.resting == 0 {
            return;
        }
        state.rest_again();
        if state.resting & AWAY != 0 {
            state.ask_again();
            state.show_what_waits();
        }
        if state.has_sleeper && (state.have_variables_changed() || state.has_steps_for_others()) {
            self.port.wake_sleeper(state);
        }
    }

    /// Lets go of the lock for a while.
    fn without_lock(&mut self, f: impl FnOnce()) {
        /// Whoever unwinds through here would leave a guard behind that is gone.
        struct NoUnwinding;
        impl Drop for NoUnwinding {
            fn drop(&mut self) {
                std::process::abort();
            }
        }
        let no_unwinding = NoUnwinding;
        // SAFETY: let go once; nobody looks at it until the lock is taken again below, which is reached
        // unless the process ends.
        unsafe { ManuallyDrop::drop(&mut self.state) };
        f();
        self.state = ManuallyDrop::new(self.port.lock_state());
        std::mem::forget(no_unwinding);
    }

    fn leave_and_tell(&mut self) {
        let state = &mut **self.state;
        if state.pollers == 0 && state.resting != 0 {
            self.port.leave_to_others(state, self.to_sleep);
        }
        self.tell();
        let leavings = std::mem::take(&mut self.state.operations.leavings);
        // SAFETY: dropped once, here, and not used any more: the lock is free from now on.
        unsafe { ManuallyDrop::drop(&mut self.state) };
        leavings.into_iter().for_each(deal_with);
        crate::quarantine::sweep();
    }

    /// Tells threads that wait of what has ended.
    fn tell(&mut self) {
        let state = &mut **self.state;
        if state.operations.ended > 0 {
            state.operations.ended = 0;
            self.port.tell_local();
            // It may be what the sleeper sleeps for.
            if state.has_sleeper && !self.to_sleep && state.operations.has_untaken() {
                self.port.wake_sleeper(state);
            }
        }
        if state.has_news {
            state.has_news = false;
            self.port.tell_local();
            if state.has_sleeper && !self.to_sleep {
                self.port.wake_sleeper(state);
            }
        }
    }
}

/// Wakes and drops what is the application's. Whatever that code does, the thread goes on: it may be
/// the one that moves messages for everybody.
fn deal_with(leaving: Leaving) {
    let deal = || match leaving {
        Leaving::Wake(waker) => waker.wake(),
        Leaving::CleanUp(leftover) => leftover.remove(),
        Leaving::Forget(forget) => forget(),
        Leaving::Drop { .. } | Leaving::Kept(_) => {}
    };
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(deal)).is_err() {
        tracing::error!("a waker or a buffer panicked when a message ended");
    }
}

impl Port {
    /// Takes the lock.
    #[inline]
    pub(crate) fn enter(&self) -> Entered<'_> {
        let state = ManuallyDrop::new(self.lock_state());
        Entered { port: self, to_sleep: false, polls: false, state }
    }

    #[inline]
    fn lock_state(&self) -> MutexGuard<'_, State> {
        match self.state.try_lock() {
            Ok(state) => state,
            Err(_) => self.enter_when_free(),
        }
    }

    #[cold]
    fn enter_when_free(&self) -> MutexGuard<'_, State> {
        self.contenders.fetch_add(1, Ordering::Relaxed);
        let state = lock(&self.state);
        self.contenders.fetch_sub(1, Ordering::Relaxed);
        state
    }

    /// At the end of a call, when others wait: the sleeper goes on with messages that this call
    /// has begun, and watchers are told of what waits to be taken.
    #[cold]
    fn leave_to_others(&self, state: &mut State, to_sleep: bool) {
        if state.resting & AWAY != 0 {
            // Whoever goes to sleep has looked, and must be woken by whatever comes after that.
            if !to_sleep {
                state.ask_again();
            }
            state.show_what_waits();
        }
        // What a thread waits for that sleeps may have come while this one looked, and took the
        // wake-up that was meant for it.
        if !to_sleep && state.has_sleeper && state.have_variables_changed() {
            self.wake_sleeper(state);
        }
        // Messages that only wait for their peers need nobody.
        if !to_sleep && state.has_sleeper && state.is_stepping() {
            self.wake_sleeper(state);
        }
    }

    /// Tells threads of this process that something ended or that the sleeper's place is free.
    pub(super) fn tell_local(&self) {
        if self.local_waiters.load(Ordering::Relaxed) > 0 {
            self.local.word().fetch_add(1, Ordering::Release);
            self.local.wake_all();
        }
    }

    /// Moves everything on until `look` finds what it looks for, or until the deadline.
    pub(crate) fn block<T>(
        &self,
        spin: bool,
        deadline: Option<Instant>,
        look: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        self.block_entered(self.enter(), spin, deadline, look)
    }

    /// As [`Port::block`], for a caller that holds the lock.
    #[inline]
    pub(crate) fn block_entered<'a, T>(
        &'a self,
        mut state: Entered<'a>,
        spin: bool,
        deadline: Option<Instant>,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        state.progress();
        if let Some(found) = look(&mut state) {
            return Some(found);
        }
        state.begin_polling();
        state.polls = true;
        let looks = if state.is_crowded { CROWDED_LOOKS } else { LOOKS };
        let mut quiet = 0;
        let mut seen = state.epoch();
        let found = 'wait: loop {
            let mut moved_at: Option<Instant> = None;
            loop {
                let mut moved = false;
                for turn in 0..looks {
                    if state.progress() {
                        (moved_at, quiet, moved) = (None, 0, true);
                    }
                    seen = state.epoch();
                    if let Some(found) = look(&mut state) {
                        break 'wait Some(found);
                    }
                    if self.contenders.load(Ordering::Relaxed) > 0 {
                        break;
                    }
                    // A pause takes longer than a look: now and then is enough for a core's twin.
                    if turn % 8 == 7 {
                        std::hint::spin_loop();
                    }
                }
                state.check_peers(false);
                let now = Instant::now();
                if deadline.is_some_and(|deadline| now >= deadline) {
                    break 'wait None;
                }
                let spun = now.duration_since(*moved_at.get_or_insert(now)).as_nanos() as u64;
                if !moved && (!spin || spun >= state.spin_ns()) {
                    break;
                }
                let alone = !state.is_crowded && spun < ALONE_NS;
                if !alone || self.contenders.load(Ordering::Relaxed) > 0 {
                    drop(state);
                    self.let_others_in();
                    state = self.enter();
                    state.polls = true;
                }
            }
            state = self.sleep(state, deadline, quiet >= SLICES, seen);
            state.polls = true;
            quiet += 1;
            if let Some(found) = look(&mut state) {
                break Some(found);
            }
        };
        state.polls = false;
        state.end_polling();
        found
    }

    /// Lets those in who wait for the lock. Whoever has slept for it takes a while to wake up, and
    /// would never find it free if this thread took it again at once.
    fn let_others_in(&self) {
        const PATIENCE: u32 = 100;
        std::thread::yield_now();
        for _ in 0..PATIENCE {
            if self.contenders.load(Ordering::Relaxed) == 0 {
                break;
            }
            std::thread::yield_now();
        }
    }
}

impl State {
    /// Whether others wait for what was done.
    #[inline]
    fn must_tell_somebody(&self) -> bool {
        (self.pollers == 0 && self.resting != 0)
            || self.operations.ended > 0
            || self.has_news
            || !self.operations.leavings.is_empty()
    }

    /// How long to look before sleeping.
    pub(super) fn spin_ns(&self) -> u64 {
        self.settings.spin_ns(self.is_crowded)
    }

    /// Finds out whether processes of this conversation share cores. One that is bound to a single
    /// core is taken to have it for itself: whoever bound it will have bound the others elsewhere.
    pub(super) fn count_processes(&mut self) {
        self.strangers = self.count_strangers();
        let processes = self.processes();
        let confined = self.allowed_cores > 1 && processes > self.allowed_cores;
        self.is_crowded = confined || processes > super::settings::online_cores();
    }

    /// While a thread looks by itself, peers need not ring.
    pub(super) fn begin_polling(&mut self) {
        self.pollers += 1;
        self.awake();
    }

    pub(super) fn end_polling(&mut self) {
        self.pollers -= 1;
        if self.pollers == 0 {
            self.rest_again();
        }
    }
}
