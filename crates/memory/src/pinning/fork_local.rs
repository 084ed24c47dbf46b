//! Fork-local state: a forked child creates its own value instead of using a copy.
//!
//! A thread that the child does not have may hold the child's copy of a lock, and the child's copy
//! of a table describes memory of the parent. So the child uses neither.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use memferry_sys::fork::OwnerProcess;

/// One `T` for each process that uses this value, created on first use.
///
/// A child leaks the inherited value: it neither accesses nor drops it.
#[derive(Debug)]
pub struct ForkLocal<T> {
    current: AtomicPtr<ForkLocalValue<T>>,
    make: fn() -> T,
}

#[derive(Debug)]
struct ForkLocalValue<T> {
    owner: OwnerProcess,
    value: T,
}

// SAFETY: the pointer owns a `T` that threads share only by reference and that any of them may
// drop.
unsafe impl<T: Send + Sync> Send for ForkLocal<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for ForkLocal<T> {}

impl<T> ForkLocal<T> {
    /// Creates the fork-local value; `make` runs in each process on first use.
    pub fn new(make: fn() -> T) -> Self {
        Self { current: AtomicPtr::new(ptr::null_mut()), make }
    }

    /// The value of this process.
    pub fn get(&self) -> &T {
        let found = self.current.load(Ordering::Acquire);
        // SAFETY: a non-null pointer comes from `Box::into_raw` below and is freed only by `drop`,
        // which has exclusive access to `self`.
        if let Some(value) = unsafe { found.as_ref() }
            && value.owner.is_current()
        {
            return &value.value;
        }
        let owner = OwnerProcess::current();
        let fresh = Box::into_raw(Box::new(ForkLocalValue { owner, value: (self.make)() }));
        let order = (Ordering::AcqRel, Ordering::Acquire);
        let value = match self.current.compare_exchange(found, fresh, order.0, order.1) {
            Ok(_) => fresh,
            Err(existing) => {
                // SAFETY: no other thread has seen this pointer.
                drop(unsafe { Box::from_raw(fresh) });
                existing
            }
        };
        // SAFETY: the pointer is the one created above or one that another thread of this process
        // stored first; both live until `drop`. The only other possible value was replaced: it
        // belongs to the parent and is leaked.
        unsafe { &(*value).value }
    }
}

impl<T> Drop for ForkLocal<T> {
    fn drop(&mut self) {
        let value = *self.current.get_mut();
        // SAFETY: see `get`; `&mut self` guarantees that no reference exists.
        if !value.is_null() && unsafe { (*value).owner }.is_current() {
            // SAFETY: as above, and the pointer is not used again.
            drop(unsafe { Box::from_raw(value) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn all_threads_get_the_same_value() {
        let state = ForkLocal::new(|| Mutex::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| *state.get().lock().unwrap() += 1);
            }
        });
        assert_eq!(*state.get().lock().unwrap(), 8);
    }
}
