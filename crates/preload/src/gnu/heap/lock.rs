//! A lock that allocates nothing and can be reset in a child.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::gnu::system;

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and threads sleep.
const CONTENDED: u32 = 2;

/// A value that one thread at a time has.
#[derive(Debug)]
pub(super) struct Lock<T> {
    state: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: only the holder of the lock reaches the value. The value may hold pointers, which are not
// bound to a thread.
unsafe impl<T> Sync for Lock<T> {}

/// The right to use the value, until it is dropped.
#[derive(Debug)]
pub(super) struct LockGuard<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Lock<T> {
    pub(super) const fn new(value: T) -> Self {
        Self { state: AtomicU32::new(FREE), value: UnsafeCell::new(value) }
    }

    /// Waits for the lock.
    pub(super) fn lock(&self) -> LockGuard<'_, T> {
        if self.state.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            while self.state.swap(CONTENDED, Ordering::Acquire) != FREE {
                system::wait(&self.state, CONTENDED, None);
            }
        }
        LockGuard { lock: self }
    }

    /// Ends the hold of a guard that was forgotten.
    pub(super) fn unlock(&self) {
        if self.state.swap(FREE, Ordering::Release) == CONTENDED {
            system::wake(&self.state, 1);
        }
    }
}

impl<T> Deref for LockGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the guard exists only while the lock is held.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for LockGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for LockGuard<'_, T> {
    fn drop(&mut self) {
        self.lock.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_addition_of_many_threads_is_lost() {
        static SUM: Lock<u64> = Lock::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..20_000).for_each(|_| *SUM.lock() += 1));
            }
        });
        assert_eq!(*SUM.lock(), 80_000);
    }
}
