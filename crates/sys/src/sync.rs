//! The synchronisation primitives of all concurrent algorithms: from `std`, or, in a build with
//! `--cfg loom`, from the loom model checker. Algorithms import them from here and do not depend on
//! which.

#[cfg(not(loom))]
mod imp {
    pub use std::sync::{
        Arc, Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    };
    pub use std::thread;
    pub use std::thread_local;

    /// Atomic types and fences.
    pub mod atomic {
        pub use std::sync::atomic::{
            AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
        };
    }

    /// One step of a bounded spin.
    #[inline]
    pub fn spin_hint() {
        std::hint::spin_loop();
    }

    /// As [`wait_while`](super::wait_while), for at most `time`.
    pub fn wait_while_for<'a, T>(
        condvar: &Condvar,
        guard: MutexGuard<'a, T>,
        time: std::time::Duration,
        waits: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        let waited = condvar.wait_timeout_while(guard, time, waits);
        waited.unwrap_or_else(std::sync::PoisonError::into_inner).0
    }

    /// Sleeps between two polls.
    pub fn sleep(time: std::time::Duration) {
        std::thread::sleep(time);
    }

    /// A cell whose contents are accessed by pointer only, with loom's interface.
    #[derive(Debug, Default)]
    #[repr(transparent)]
    pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        /// Wraps a value.
        pub const fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        /// Runs `f` with a pointer for reading.
        #[inline]
        pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
            f(self.0.get())
        }

        /// Runs `f` with a pointer for writing.
        #[inline]
        pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }
}

#[cfg(loom)]
mod imp {
    pub use loom::cell::UnsafeCell;
    pub use loom::sync::{
        Arc, Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    };
    pub use loom::thread;
    pub use loom::thread_local;

    /// Atomic types and fences.
    pub mod atomic {
        pub use loom::sync::atomic::{
            AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
        };
    }

    /// One step of a bounded spin: lets the model run another thread.
    pub fn spin_hint() {
        loom::thread::yield_now();
    }

    /// As [`wait_while`](super::wait_while): a model has no time.
    pub fn wait_while_for<'a, T>(
        condvar: &Condvar,
        guard: MutexGuard<'a, T>,
        _time: std::time::Duration,
        waits: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        super::wait_while(condvar, guard, waits)
    }

    /// Sleeps between two polls: lets the model run another thread.
    pub fn sleep(_time: std::time::Duration) {
        loom::thread::yield_now();
    }
}

pub use imp::*;

/// Locks a mutex and ignores poisoning: the data that it guards is consistent between any two
/// statements, so a panic of another holder carries no information.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Sets a number to the maximum of itself and `value`, in one acquire-release operation.
#[inline]
pub fn store_max(number: &atomic::AtomicU64, value: u64) {
    use atomic::Ordering::{AcqRel, Acquire};
    // ThreadSanitizer does not recognise `fetch_max`; it recognises an equivalent loop.
    if cfg!(tsan) {
        let _ = number.fetch_update(AcqRel, Acquire, |now| Some(now.max(value)));
    } else {
        number.fetch_max(value, AcqRel);
    }
}

/// Sleeps while `waits` returns true. Ignores poisoning, as [`lock`].
pub fn wait_while<'a, T>(
    condvar: &Condvar,
    mut guard: MutexGuard<'a, T>,
    mut waits: impl FnMut(&mut T) -> bool,
) -> MutexGuard<'a, T> {
    while waits(&mut guard) {
        guard = condvar.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner);
    }
    guard
}
