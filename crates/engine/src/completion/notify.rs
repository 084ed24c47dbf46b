//! Notification variables: a 64-bit word that takes a value once a transfer's data is visible.
//!
//! The word may be any aligned `u64`, also one of a C program. It can be polled, or slept on: a
//! sleeper announces itself in a small table hashed by the word's address, so that a delivery to a
//! word on which nobody sleeps costs no system call.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use memferry_sys::wait_word::{futex_wait, futex_wake_all};

/// A notification variable. Any number of transfers may set it, one after another.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Notification(AtomicU64);

impl Notification {
    /// A variable with a first value.
    pub const fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }

    /// Views a word of another language as a notification variable.
    ///
    /// # Safety
    /// `word` must be aligned to 8 bytes, stay valid for `'a`, and be accessed by others only with
    /// atomic loads and stores (in C: `volatile` or `_Atomic` 64-bit ones).
    pub unsafe fn from_ptr<'a>(word: *mut u64) -> &'a Self {
        // SAFETY: `Notification` is a transparent `AtomicU64`; the caller vouches for the rest.
        unsafe { &*word.cast::<Self>() }
    }

    /// The current value. If it is the value of a transfer, that transfer's data is visible.
    pub fn load(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Sets the variable from the application's side, for example back to its first value.
    pub fn store(&self, value: u64) {
        self.set(value);
    }

    /// Sleeps until the variable holds `value`, or the time is over. Returns whether it does.
    /// Without a timeout this waits for as long as it takes: a transfer that fails sets nothing.
    pub fn wait(&self, value: u64, timeout: Option<Duration>) -> bool {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let _announced = Announced::at(self.sleepers());
        loop {
            let now = self.load();
            if now == value {
                return true;
            }
            let left = match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return false,
                left => left,
            };
            // A futex sees 32 bits. Another value with the same low half would be missed by the
            // comparison, though not by the wake-up that follows every change: sleeps are bounded
            // all the same.
            let nap = left.map_or(LONGEST_NAP, |left| left.min(LONGEST_NAP));
            futex_wait(self.low_half(), now as u32, Some(nap));
        }
    }

    fn set(&self, value: u64) {
        self.0.store(value, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        // Pairs with the announcement: either the sleeper sees the value or we see the sleeper.
        fence(Ordering::SeqCst);
        if self.sleepers().load(Ordering::Relaxed) != 0 {
            futex_wake_all(self.low_half());
        }
    }

    fn low_half(&self) -> &AtomicU32 {
        let low = if cfg!(target_endian = "big") { 1 } else { 0 };
        // SAFETY: both halves of the word are aligned 32-bit words inside it. The kernel only
        // compares this half; no Rust code accesses it by itself.
        unsafe { &*std::ptr::from_ref(&self.0).cast::<AtomicU32>().add(low) }
    }

    fn sleepers(&self) -> &'static AtomicU32 {
        const BUCKETS: usize = 64;
        static SLEEPERS: [AtomicU32; BUCKETS] = [const { AtomicU32::new(0) }; BUCKETS];
        &SLEEPERS[(std::ptr::from_ref(self) as usize >> 3) % BUCKETS]
    }
}

const LONGEST_NAP: Duration = Duration::from_millis(100);

/// An announced sleeper; takes itself back on drop.
struct Announced(&'static AtomicU32);

impl Announced {
    fn at(sleepers: &'static AtomicU32) -> Self {
        sleepers.fetch_add(1, Ordering::SeqCst);
        Self(sleepers)
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A value to be delivered to a notification variable.
#[derive(Debug, Clone, Copy)]
pub struct Notify {
    variable: *const Notification,
    value: u64,
}

// SAFETY: the variable is atomic, and `Notify::new` was promised that it outlives the transfer.
unsafe impl Send for Notify {}
// SAFETY: as above.
unsafe impl Sync for Notify {}

impl Notify {
    /// Delivers `value` to `variable`.
    ///
    /// # Safety
    /// The variable must stay valid until the transfer that delivers to it is over.
    pub unsafe fn new(variable: *const Notification, value: u64) -> Self {
        Self { variable, value }
    }

    pub(crate) fn deliver(&self) {
        // SAFETY: promised to `Notify::new`; the transfer is not over before this returns.
        unsafe { &*self.variable }.set(self.value);
    }

    /// Wakes who sleeps on the variable, which somebody else has set.
    pub(crate) fn wake(&self) {
        // SAFETY: as above.
        unsafe { &*self.variable }.wake();
    }

    /// Where the variable is.
    pub fn address(&self) -> u64 {
        self.variable as u64
    }

    /// What it is to be set to.
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
            unsafe { Notify::new(&variable, 7) }.deliver();
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
