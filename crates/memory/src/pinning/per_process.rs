//! State that belongs to one process: a forked child gets its own instead of a copy.
//!
//! A child's copy of a lock may be held by a thread that the child does not have, and a child's copy
//! of a table describes memory that is the parent's. So the child leaves both alone and starts
//! afresh.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use memferry_sys::fork;

/// A `T` for each process that uses this value; made when first used there.
///
/// What a child inherits is leaked in the child, never touched and never dropped.
#[derive(Debug)]
pub struct PerProcess<T> {
    current: AtomicPtr<Made<T>>,
    make: fn() -> T,
}

#[derive(Debug)]
struct Made<T> {
    generation: u64,
    value: T,
}

// SAFETY: the pointer owns a `T` that threads share by reference only and that any of them may drop.
unsafe impl<T: Send + Sync> Send for PerProcess<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for PerProcess<T> {}

impl<T> PerProcess<T> {
    /// Makes a value in each process by `make`, when it is first asked for.
    pub fn new(make: fn() -> T) -> Self {
        fork::watch();
        Self { current: AtomicPtr::new(ptr::null_mut()), make }
    }

    /// This process's value.
    pub fn get(&self) -> &T {
        let generation = fork::generation();
        let found = self.current.load(Ordering::Acquire);
        // SAFETY: a pointer that is not null came from `Box::into_raw` below and is freed only by
        // `drop`, which has `self` for itself.
        if let Some(made) = unsafe { found.as_ref() }
            && made.generation == generation
        {
            return &made.value;
        }
        let fresh = Box::into_raw(Box::new(Made { generation, value: (self.make)() }));
        let order = (Ordering::AcqRel, Ordering::Acquire);
        let made = match self.current.compare_exchange(found, fresh, order.0, order.1) {
            Ok(_) => fresh,
            Err(theirs) => {
                // SAFETY: nobody has seen the fresh one.
                drop(unsafe { Box::from_raw(fresh) });
                theirs
            }
        };
        // SAFETY: either the fresh one or that of another thread of this process, which was quicker;
        // both live until `drop`. The only other value was replaced: it is the parent's, leaked.
        unsafe { &(*made).value }
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        let made = *self.current.get_mut();
        // SAFETY: see `get`; `&mut self` says that no reference is left.
        if !made.is_null() && unsafe { (*made).generation } == fork::generation() {
            // SAFETY: as above, and the pointer is not used again.
            drop(unsafe { Box::from_raw(made) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn all_threads_get_the_same_value() {
        let state = PerProcess::new(|| Mutex::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| *state.get().lock().unwrap() += 1);
            }
        });
        assert_eq!(*state.get().lock().unwrap(), 8);
    }
}
