//! The futex: a 32-bit word that threads sleep on, with a model for the model checker.

use std::time::Duration;

use crate::fault::{Call, call};
use crate::sync::atomic::AtomicU32;

/// A futex. `wait` returns at once if the word does not hold the expected value, so no wakeup is
/// lost if the waker changes the word before it wakes.
#[derive(Debug)]
#[cfg_attr(not(loom), repr(transparent))]
pub struct Futex {
    word: AtomicU32,
    #[cfg(loom)]
    queue: (loom::sync::Mutex<()>, loom::sync::Condvar),
}

impl Futex {
    /// Creates a futex with an initial value.
    pub fn new(value: u32) -> Self {
        Self {
            word: AtomicU32::new(value),
            #[cfg(loom)]
            queue: (loom::sync::Mutex::new(()), loom::sync::Condvar::new()),
        }
    }

    /// The word, for loads and stores.
    #[inline]
    pub fn word(&self) -> &AtomicU32 {
        &self.word
    }

    /// Sleeps while the word holds `expected`, for at most `timeout`. Spurious returns are
    /// possible: callers check the word again.
    #[cfg(not(loom))]
    pub fn wait(&self, expected: u32, timeout: Option<Duration>) {
        futex_wait(&self.word, expected, timeout);
    }

    /// Wakes all sleeping threads.
    #[cfg(not(loom))]
    pub fn wake_all(&self) {
        futex_wake_all(&self.word);
    }

    /// The model of [`Futex::wait`]: compare and sleep are one atomic step, as in the kernel.
    #[cfg(loom)]
    pub fn wait(&self, expected: u32, _timeout: Option<Duration>) {
        let guard = self.queue.0.lock().unwrap();
        if self.word.load(crate::sync::atomic::Ordering::SeqCst) == expected {
            drop(self.queue.1.wait(guard).unwrap());
        }
    }

    /// The model of [`Futex::wake_all`].
    #[cfg(loom)]
    pub fn wake_all(&self) {
        let _guard = self.queue.0.lock().unwrap();
        self.queue.1.notify_all();
    }
}

/// Sleeps while `word` holds `expected`, for at most `timeout`. Errors (interrupted, value changed,
/// timed out) are not reported, because callers check the word again in each case.
pub fn futex_wait(word: &std::sync::atomic::AtomicU32, expected: u32, timeout: Option<Duration>) {
    use rustix::thread::futex;
    let timeout = timeout.map(|t| futex::Timespec {
        tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    let wait = || futex::wait(word, futex::Flags::PRIVATE, expected, timeout.as_ref());
    let _ = call(Call::FutexWait, wait);
}

/// Wakes all threads of this process that sleep on `word`.
pub fn futex_wake_all(word: &std::sync::atomic::AtomicU32) {
    use rustix::thread::futex;
    let _ = futex::wake(word, futex::Flags::PRIVATE, i32::MAX as u32);
}

/// As [`futex_wait`], on up to [`MAX_WAITV`] words in memory that other processes may share.
pub fn futex_wait_shared(words: &[(&std::sync::atomic::AtomicU32, u32)], timeout: Duration) {
    use rustix::thread::futex;
    let timespec = |t: Duration| futex::Timespec {
        tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: t.subsec_nanos().into(),
    };
    if let [(word, expected)] = words {
        let timeout = timespec(timeout);
        let wait = || futex::wait(word, futex::Flags::empty(), *expected, Some(&timeout));
        let _ = call(Call::FutexWait, wait);
        return;
    }
    let mut waiters = [futex::Wait::new(); MAX_WAITV];
    for (waiter, (word, expected)) in waiters.iter_mut().zip(words) {
        waiter.val = u64::from(*expected);
        waiter.uaddr = futex::WaitPtr::new(word.as_ptr().cast());
        waiter.flags = futex::WaitFlags::SIZE_U32;
    }
    // `futex_waitv` takes an absolute time.
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let now = Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32);
    let deadline = timespec(now.saturating_add(timeout));
    let waiters = &waiters[..words.len().min(MAX_WAITV)];
    let clock = futex::ClockId::Monotonic;
    let wait = || futex::waitv(waiters, futex::WaitvFlags::empty(), Some(&deadline), clock);
    let outcome = call(Call::FutexWaitv, wait);
    if matches!(outcome, Err(rustix::io::Errno::NOSYS | rustix::io::Errno::PERM)) {
        // The kernel has no `futex_waitv`, or a filter hides it: the caller polls all words every
        // 100 us.
        const FALLBACK_SLEEP: Duration = Duration::from_micros(100);
        std::thread::sleep(FALLBACK_SLEEP.min(timeout));
    }
}

/// Checks whether the kernel supports `futex_waitv`, by a wait on words that already differ from
/// the expected values.
pub fn probe_waitv() -> std::io::Result<()> {
    use rustix::thread::futex;
    let words = [0, 0].map(std::sync::atomic::AtomicU32::new);
    let waiters = words.each_ref().map(|word| {
        let mut waiter = futex::Wait::new();
        waiter.val = 1;
        waiter.uaddr = futex::WaitPtr::new(word.as_ptr().cast());
        waiter.flags = futex::WaitFlags::SIZE_U32;
        waiter
    });
    let clock = futex::ClockId::Monotonic;
    let wait = || futex::waitv(&waiters, futex::WaitvFlags::empty(), None, clock);
    match call(Call::FutexWaitv, wait) {
        Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Maximum number of words of one [`futex_wait_shared`].
pub const MAX_WAITV: usize = 128;

/// Wakes all threads of all processes that sleep on `word`. Returns whether there was any.
pub fn futex_wake_shared(word: &std::sync::atomic::AtomicU32) -> bool {
    use rustix::thread::futex;
    futex::wake(word, futex::Flags::empty(), i32::MAX as u32).is_ok_and(|woken| woken > 0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn a_wait_on_a_changed_word_returns_at_once() {
        Futex::new(1).wait(0, None);
    }

    #[test]
    fn a_sleeper_is_woken_after_the_word_changed() {
        let word = Futex::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while word.word().load(Ordering::Acquire) == 0 {
                    word.wait(0, None);
                }
            });
            word.word().store(1, Ordering::Release);
            word.wake_all();
        });
    }

    #[test]
    fn trying_to_wait_on_several_words_returns_at_once() {
        // Kernels before 5.16 return an error.
        let _ = probe_waitv();
    }
}
