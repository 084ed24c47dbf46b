//! A mutex for data that one thread uses nearly always: that thread takes it without a locked
//! instruction.
//!
//! The mutex is *biased* towards a thread that took it many times in a row. The owner of the bias
//! marks the mutex as held by a plain store, and reads whether it is still the owner. Another
//! thread that wants the mutex ends the bias: it clears the owner, executes a barrier on all cores
//! ([`AsymmetricFence`]), and waits while the mutex is held. After the barrier, either the owner has
//! read that it is none, or the other thread reads that the mutex is held. This takes some
//! microseconds, so a mutex that several threads use becomes biased more and more rarely.
//!
//! Each thread that ever becomes the owner has a mark of its own, for good: a thread that was
//! preempted between its first and its second look clears no mark of a later owner. There are a few
//! marks, for the first threads that use the mutex much.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crate::fence::AsymmetricFence;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Mutex, MutexGuard, UnsafeCell, lock, spin_hint};

/// Number of threads that can become the owner.
const MARKS: usize = 4;

/// No thread: addresses of thread control blocks are not 0.
const NOBODY: usize = 0;

/// How often a thread takes the mutex in a row before it is biased towards that thread. Each end of a
/// bias doubles the number.
const FIRST_STREAK: u32 = 16;
const MAX_STREAK: u32 = 1 << 20;

/// A mutex that is cheap for one thread. Panics of a holder do not poison it.
pub struct BiasedMutex<T> {
    lock: BiasedLock,
    value: UnsafeCell<T>,
}

// SAFETY: only a guard leads to the value, and there is one at a time.
unsafe impl<T: Send> Sync for BiasedMutex<T> {}

impl<T> fmt::Debug for BiasedMutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BiasedMutex").field("lock", &self.lock).finish_non_exhaustive()
    }
}

impl<T> BiasedMutex<T> {
    /// Creates a mutex without a bias.
    pub fn new(value: T) -> Self {
        Self { lock: BiasedLock::new(), value: UnsafeCell::new(value) }
    }

    /// Takes the mutex, if no thread holds it, not even this one.
    #[inline(always)]
    pub fn try_lock(&self) -> Option<BiasedGuard<'_, T>> {
        let hold = self.lock.try_lock(this_thread())?;
        Some(BiasedGuard { mutex: self, _hold: hold, thread_bound: PhantomData })
    }

    /// Takes the mutex, and waits while another thread holds it. A thread that holds it waits for ever.
    #[inline(always)]
    pub fn lock(&self) -> BiasedGuard<'_, T> {
        let hold = self.lock.lock(this_thread());
        BiasedGuard { mutex: self, _hold: hold, thread_bound: PhantomData }
    }
}

/// The value of a mutex, held by this thread.
pub struct BiasedGuard<'a, T> {
    mutex: &'a BiasedMutex<T>,
    _hold: Hold<'a>,
    /// The thread that took the mutex frees it: its mark is its own.
    thread_bound: PhantomData<*mut T>,
}

// SAFETY: a shared guard leads only to a shared reference of the value.
unsafe impl<T: Sync> Sync for BiasedGuard<'_, T> {}

impl<T> fmt::Debug for BiasedGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BiasedGuard").field("mutex", &self.mutex).finish_non_exhaustive()
    }
}

impl<T> Deref for BiasedGuard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: this guard holds the mutex, so no other reference to the value is there.
        self.mutex.value.with(|value| unsafe { &*value })
    }
}

impl<T> DerefMut for BiasedGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and this borrow of the guard is exclusive.
        self.mutex.value.with_mut(|value| unsafe { &mut *value })
    }
}

/// The thread control block, of which each living thread has one of its own.
#[cfg(all(target_arch = "x86_64", not(loom)))]
#[inline(always)]
fn this_thread() -> usize {
    let block: usize;
    // SAFETY: by the ABI of thread-local storage, the word at `fs:0` is the address of the thread
    // control block. Reading it has no effect.
    unsafe {
        std::arch::asm!(
            "mov {}, qword ptr fs:[0]",
            out(reg) block,
            options(nostack, preserves_flags, pure, readonly),
        );
    }
    block
}

/// Nobody: the mutex is never biased.
#[cfg(any(not(target_arch = "x86_64"), loom))]
fn this_thread() -> usize {
    NOBODY
}

/// The lock of a [`BiasedMutex`], with threads as numbers.
#[derive(Debug)]
pub struct BiasedLock {
    /// The thread that the lock is biased towards. Changed only with the mutex held.
    owner: AtomicUsize,
    marks: [HoldMark; MARKS],
    fence: AsymmetricFence,
    streak: Mutex<Streak>,
}

/// The mark of a thread that is or was the owner.
#[derive(Debug)]
struct HoldMark {
    /// The thread; set once, with the mutex held.
    thread: AtomicUsize,
    /// The thread holds the lock by its bias, or looks whether it has it. Written by the thread alone.
    is_set: AtomicBool,
}

/// How often a thread has taken the lock in a row.
#[derive(Debug)]
struct Streak {
    thread: usize,
    length: u32,
    /// The length at which the lock becomes biased; `None` if a bias would not be cheaper.
    needed: Option<u32>,
}

/// A lock that is held, and how. The lock is free when this is dropped.
#[derive(Debug)]
pub struct Hold<'a> {
    way: HoldWay<'a>,
}

#[derive(Debug)]
enum HoldWay<'a> {
    /// By the mark of the owner.
    Bias(&'a AtomicBool),
    Mutex(&'a BiasedLock, MutexGuard<'a, Streak>),
}

impl Drop for Hold<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        match &self.way {
            // Release: who ends the bias sees what this thread wrote.
            HoldWay::Bias(mark) => mark.store(false, Ordering::Release),
            HoldWay::Mutex(lock, streak) => lock.bias_after(streak),
        }
    }
}

impl BiasedLock {
    /// Creates a lock without a bias.
    pub fn new() -> Self {
        Self::with_streak(FIRST_STREAK)
    }

    /// Creates a lock that becomes biased when a thread takes it this often in a row.
    pub fn with_streak(needed: u32) -> Self {
        let fence = AsymmetricFence::new();
        let needed = fence.is_asymmetric().then_some(needed);
        Self {
            owner: AtomicUsize::new(NOBODY),
            marks: std::array::from_fn(|_| HoldMark {
                thread: AtomicUsize::new(NOBODY),
                is_set: AtomicBool::new(false),
            }),
            fence,
            streak: Mutex::new(Streak { thread: NOBODY, length: 0, needed }),
        }
    }

    /// Takes the lock for a thread, which is not 0 unless there is to be no bias.
    #[inline(always)]
    pub fn lock(&self, thread: usize) -> Hold<'_> {
        match self.take_by_bias(thread) {
            Some(mark) => Hold { way: HoldWay::Bias(mark) },
            None => self.lock_without_bias(thread),
        }
    }

    /// As [`BiasedLock::lock`], if no other thread holds the lock.
    #[inline(always)]
    pub fn try_lock(&self, thread: usize) -> Option<Hold<'_>> {
        match self.take_by_bias(thread) {
            Some(mark) => Some(Hold { way: HoldWay::Bias(mark) }),
            None => self.try_lock_without_bias(thread),
        }
    }

    #[inline(always)]
    fn take_by_bias(&self, thread: usize) -> Option<&AtomicBool> {
        if thread == NOBODY || self.owner.load(Ordering::Relaxed) != thread {
            return None;
        }
        let mark = self.mark_of(thread)?;
        if mark.load(Ordering::Relaxed) {
            // This thread holds the lock.
            return None;
        }
        mark.store(true, Ordering::Relaxed);
        // Pairs with the heavy end in `end_bias`.
        self.fence.light();
        if self.owner.load(Ordering::Relaxed) == thread {
            return Some(mark);
        }
        // Release: as when the lock is freed.
        mark.store(false, Ordering::Release);
        None
    }

    /// The mark of a thread, if it has one.
    #[inline(always)]
    fn mark_of(&self, thread: usize) -> Option<&AtomicBool> {
        let marks = self.marks.iter();
        let mut own = marks.filter(|mark| mark.thread.load(Ordering::Relaxed) == thread);
        own.next().map(|mark| &mark.is_set)
    }

    /// Returns whether a thread holds the lock by a bias that it had. Acquire: this thread sees what
    /// the others wrote.
    fn is_held(&self) -> bool {
        self.marks.iter().any(|mark| mark.is_set.load(Ordering::Acquire))
    }

    #[inline(never)]
    fn lock_without_bias(&self, thread: usize) -> Hold<'_> {
        let mut streak = lock(&self.streak);
        self.end_bias(&mut streak);
        let mut waits = 0;
        while self.is_held() {
            wait(&mut waits);
        }
        streak.count(thread);
        Hold { way: HoldWay::Mutex(self, streak) }
    }

    #[inline(never)]
    fn try_lock_without_bias(&self, thread: usize) -> Option<Hold<'_>> {
        let mut streak = match self.streak.try_lock() {
            Ok(streak) => streak,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) => return None,
        };
        self.end_bias(&mut streak);
        if self.is_held() {
            return None;
        }
        streak.count(thread);
        Some(Hold { way: HoldWay::Mutex(self, streak) })
    }

    /// Ends the bias. After this, no thread takes the lock by it; the last owner may hold it.
    #[inline]
    fn end_bias(&self, streak: &mut Streak) {
        if self.owner.load(Ordering::Relaxed) == NOBODY {
            return;
        }
        self.owner.store(NOBODY, Ordering::Relaxed);
        self.fence.heavy_always();
        streak.needed = streak.needed.map(|needed| needed.saturating_mul(2).min(MAX_STREAK));
        (streak.thread, streak.length) = (NOBODY, 0);
    }

    /// Biases the lock towards the thread that is about to free the mutex, if it has taken it often
    /// enough. Not earlier: the thread must not take the lock by its bias while it holds the mutex.
    #[inline]
    fn bias_after(&self, streak: &Streak) {
        if streak.needed.is_some_and(|needed| streak.length >= needed)
            && self.has_mark(streak.thread)
        {
            self.owner.store(streak.thread, Ordering::Relaxed);
        }
    }
}

impl Streak {
    /// Counts that a thread has taken the mutex.
    #[inline]
    fn count(&mut self, thread: usize) {
        if thread == NOBODY {
            return;
        }
        self.length = if self.thread == thread { self.length.saturating_add(1) } else { 1 };
        self.thread = thread;
    }
}

impl BiasedLock {
    /// Returns whether a thread has a mark. It gets one if there is any left.
    fn has_mark(&self, thread: usize) -> bool {
        let is_own = |mark: &HoldMark| mark.thread.load(Ordering::Relaxed) == thread;
        if self.marks.iter().any(is_own) {
            return true;
        }
        let free = self.marks.iter().find(|mark| mark.thread.load(Ordering::Relaxed) == NOBODY);
        free.inspect(|mark| mark.thread.store(thread, Ordering::Relaxed)).is_some()
    }
}

impl Default for BiasedLock {
    fn default() -> Self {
        Self::new()
    }
}

/// One step of a wait for the last owner, which may be preempted, or sleep with the lock held.
fn wait(waits: &mut u32) {
    *waits = waits.saturating_add(1);
    match *waits {
        ..64 => spin_hint(),
        64..256 => crate::sync::thread::yield_now(),
        later => {
            let shift = (later - 256).min(6);
            crate::sync::sleep(std::time::Duration::from_micros(50 << shift));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_takes_it_often_gets_the_bias_and_loses_it_to_the_next() {
        let mutex = BiasedMutex::new(0u64);
        for _ in 0..100 {
            *mutex.lock() += 1;
        }
        let owner = mutex.lock.owner.load(Ordering::Relaxed);
        let can_bias = cfg!(target_arch = "x86_64") && AsymmetricFence::new().is_asymmetric();
        assert_eq!(owner == this_thread() && owner != NOBODY, can_bias);
        std::thread::scope(|scope| {
            scope.spawn(|| *mutex.lock() += 1);
        });
        assert_eq!(mutex.lock.owner.load(Ordering::Relaxed), NOBODY);
        assert_eq!(*mutex.lock(), 101);
    }

    #[test]
    fn nobody_gets_it_while_its_owner_holds_it() {
        let mutex = BiasedMutex::new(0u64);
        (0..100).for_each(|_| *mutex.lock() += 1);
        let guard = mutex.lock();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| mutex.try_lock().is_none());
            assert!(other.join().unwrap());
        });
        drop(guard);
        assert!(mutex.try_lock().is_some());
    }

    #[test]
    fn threads_that_take_turns_in_long_and_short_streaks_lose_no_count() {
        const ROUNDS: u64 = 3000;
        let mutex = BiasedMutex::new([0u64; 2]);
        std::thread::scope(|scope| {
            for number in 0..3u64 {
                let mutex = &mutex;
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let streak = if (round / 100) % 3 == number { 60 } else { 1 };
                        for _ in 0..streak {
                            let mut both = mutex.lock();
                            assert_eq!(both[0], both[1], "two threads hold it");
                            both[0] += 1;
                            both[1] += 1;
                        }
                    }
                });
            }
        });
        assert_eq!(*mutex.lock(), [ROUNDS * 3 + ROUNDS * 59; 2]);
    }

    #[test]
    fn a_panic_of_its_holder_frees_it() {
        let mutex = BiasedMutex::new(0u64);
        for _ in 0..2 * FIRST_STREAK {
            let held = std::panic::AssertUnwindSafe(|| {
                let _guard = mutex.lock();
                std::panic::resume_unwind(Box::new("a test panic"));
            });
            assert!(std::panic::catch_unwind(held).is_err());
            assert!(mutex.try_lock().is_some());
        }
    }

    #[test]
    fn a_thread_that_holds_it_cannot_take_it_again() {
        let mutex = BiasedMutex::new(0u64);
        // First by the mutex, then by the bias.
        for _ in 0..3 * FIRST_STREAK {
            let guard = mutex.lock();
            assert!(mutex.try_lock().is_none());
            drop(guard);
            assert!(mutex.try_lock().is_some());
        }
    }
}
