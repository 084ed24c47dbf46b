//! Notification variables: a 64-bit word that is set to a value once a transfer's data is visible.
//!
//! The word may be any aligned `u64`, also one of a C program. Threads can poll it or sleep on it.
//! A sleeper counts itself in a small table that is hashed by the word's address, so a delivery to
//! a word without sleepers costs no system call.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memferry_sys::fence::AsymmetricFence;
use memferry_sys::futex::{futex_wait, futex_wake_all};

/// A notification variable. Any number of transfers may set it in sequence.
///
/// ```
/// use std::sync::Arc;
///
/// use memferry::{Ferry, Notification, Options};
///
/// let ferry = Ferry::new()?;
/// let arrived = Arc::new(Notification::new(0));
/// let options = Options::new().notify_shared(&arrived, 1);
/// let transfer = ferry.icopy_with(vec![7u8; 1 << 20], vec![0u8; 1 << 20], options)?;
/// assert!(arrived.wait(1, None)); // any thread may wait
/// let (_, target) = transfer.wait()?;
/// assert_eq!(target[0], 7);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Notification(AtomicU64);

impl Notification {
    /// Creates a variable with an initial value.
    pub const fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }

    /// Views a word of another language as a notification variable.
    ///
    /// # Safety
    /// `word` must be aligned to 8 bytes, stay valid for `'a`, and be accessed by all others only
    /// with atomic loads and stores (in C: `volatile` or `_Atomic` 64-bit ones).
    pub unsafe fn from_ptr<'a>(word: *mut u64) -> &'a Self {
        // SAFETY: `Notification` is a transparent `AtomicU64`; the caller guarantees the rest.
        unsafe { &*word.cast::<Self>() }
    }

    /// The current value. If it is the value of a transfer, that transfer's data is visible.
    pub fn load(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Sets the variable from the application's side, for example back to its initial value.
    pub fn store(&self, value: u64) {
        self.set(value);
    }

    /// Sleeps until the variable has `value` or the timeout expires; returns whether it has the
    /// value. Without a timeout the call may block forever: a transfer that fails does not set the
    /// variable.
    pub fn wait(&self, value: u64, timeout: Option<Duration>) -> bool {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if self.load() == value {
            return true;
        }
        if timeout.is_some_and(|timeout| timeout.is_zero()) {
            return false;
        }
        let counted = SleeperGuard::at(self.sleepers());
        loop {
            let now = self.load();
            if now == value {
                return true;
            }
            let left = match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return false,
                left => left,
            };
            // The futex compares 32 bits, so it does not detect another value with the same low
            // half. The wake after every change does; the sleep is bounded in any case.
            let sleep = left.map_or(counted.max_sleep, |left| left.min(counted.max_sleep));
            futex_wait(self.low_half(), now as u32, Some(sleep));
        }
    }

    fn set(&self, value: u64) {
        self.0.store(value, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        // Pairs with the heavy end in `SleeperGuard::at`: either the sleeper sees the value, or
        // this thread sees the sleeper.
        AsymmetricFence::new().light();
        if self.sleepers().load(Ordering::Relaxed) != 0 {
            futex_wake_all(self.low_half());
        }
    }

    fn low_half(&self) -> &AtomicU32 {
        let low = if cfg!(target_endian = "big") { 1 } else { 0 };
        // SAFETY: both halves of the word are aligned 32-bit words inside it. Only the kernel
        // compares this half; no Rust code accesses it.
        unsafe { &*std::ptr::from_ref(&self.0).cast::<AtomicU32>().add(low) }
    }

    fn sleepers(&self) -> &'static AtomicU32 {
        const BUCKETS: usize = 64;
        static SLEEPERS: [AtomicU32; BUCKETS] = [const { AtomicU32::new(0) }; BUCKETS];
        &SLEEPERS[(std::ptr::from_ref(self) as usize >> 3) % BUCKETS]
    }
}

/// A counted sleeper; uncounted on drop.
struct SleeperGuard {
    sleepers: &'static AtomicU32,
    /// The maximum duration of one sleep.
    max_sleep: Duration,
}

impl SleeperGuard {
    fn at(sleepers: &'static AtomicU32) -> Self {
        /// A wake-up may be missed where the kernel refuses the barrier.
        const UNORDERED_SLEEP: Duration = Duration::from_millis(1);
        const MAX_SLEEP: Duration = Duration::from_millis(100);
        sleepers.fetch_add(1, Ordering::SeqCst);
        let is_ordered = AsymmetricFence::new().heavy();
        Self { sleepers, max_sleep: if is_ordered { MAX_SLEEP } else { UNORDERED_SLEEP } }
    }
}

impl Drop for SleeperGuard {
    fn drop(&mut self) {
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A value to be delivered to a notification variable.
#[derive(Debug, Clone, Copy)]
pub struct PendingNotification {
    variable: *const Notification,
    value: u64,
}

// SAFETY: the variable is atomic, and the caller of `PendingNotification::new` guarantees that it
// outlives the transfer.
unsafe impl Send for PendingNotification {}
// SAFETY: as above.
unsafe impl Sync for PendingNotification {}

impl PendingNotification {
    /// Creates the delivery of `value` to `variable`.
    ///
    /// # Safety
    /// The variable must stay valid until the transfer that delivers to it is complete.
    pub unsafe fn new(variable: *const Notification, value: u64) -> Self {
        Self { variable, value }
    }

    /// Sets the variable. The data of the transfer must be written.
    pub fn deliver(&self) {
        // SAFETY: guaranteed to `PendingNotification::new`; the transfer is not complete before
        // this returns.
        unsafe { &*self.variable }.set(self.value);
    }

    /// Wakes the sleepers of a variable that the engine has written.
    pub(crate) fn wake(&self) {
        // SAFETY: as above.
        unsafe { &*self.variable }.wake();
    }

    /// The address of the variable.
    pub fn address(&self) -> u64 {
        self.variable as u64
    }

    /// The value to write.
    pub fn value(&self) -> u64 {
        self.value
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_sleeper_wakes_when_the_value_arrives() {
        let variable = Notification::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(variable.wait(7, None)));
            // SAFETY: the variable outlives the delivery.
            unsafe { PendingNotification::new(&variable, 7) }.deliver();
        });
    }

    #[test]
    fn a_value_that_differs_only_in_the_high_half_is_seen() {
        let variable = Notification::new(1);
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(variable.wait(1 | 1 << 40, None)));
            variable.store(1 | 1 << 40);
        });
    }

    #[test]
    fn a_wait_with_a_timeout_gives_up() {
        assert!(!Notification::new(0).wait(1, Some(Duration::from_millis(1))));
    }
}
