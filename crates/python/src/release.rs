//! Gives memory of Python objects back, on a thread that holds the interpreter.
//!
//! A transfer whose handle was dropped keeps its buffers until it is complete, and then drops them
//! on a thread of an engine. Such a thread must not wait for the interpreter: it could be held by a
//! thread that waits for a copy, or be gone. So the drop only queues what is to be given back, and
//! asks the interpreter to call [`drain`] on its main thread soon. Calls of this package drain too.
//! A call that holds the interpreter gives back what it does not need any more before it returns.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use pyo3::prelude::*;

use crate::memory::Owner;

static QUEUE: Mutex<Vec<Owner>> = Mutex::new(Vec::new());
/// The interpreter ends: nothing is given back any more, and it must not be called.
static IS_OVER: AtomicBool = AtomicBool::new(false);
/// There is something in the queue: one load for calls that find nothing.
static IS_FILLED: AtomicBool = AtomicBool::new(false);
/// The interpreter was asked to drain.
static IS_ASKED: AtomicBool = AtomicBool::new(false);

/// Queues what keeps memory alive. Called on any thread.
pub(crate) fn queue(owner: Owner) {
    let Some(mut queue) = try_lock() else {
        // A forked child, whose parent held the lock just then.
        return std::mem::forget(owner);
    };
    if IS_OVER.load(Ordering::Acquire) {
        return std::mem::forget(owner);
    }
    queue.push(owner);
    IS_FILLED.store(true, Ordering::Release);
    if !IS_ASKED.swap(true, Ordering::AcqRel) {
        // SAFETY: it may be called from any thread, with or without the interpreter; the function
        // it names is never unloaded. The interpreter has not ended: its exit takes the same lock
        // first (`stop`).
        let code =
            unsafe { pyo3::ffi::Py_AddPendingCall(Some(drain_pending), std::ptr::null_mut()) };
        if code != 0 {
            // The list of pending calls is full: the next buffer asks again, and calls of this
            // package drain.
            IS_ASKED.store(false, Ordering::Release);
        }
    }
}

/// Takes the lock, which is held for moments. A forked child may find it held for ever: it belongs
/// to a thread of the parent.
fn try_lock() -> Option<MutexGuard<'static, Vec<Owner>>> {
    const TRIES: u32 = 1000;
    for _ in 0..TRIES {
        match QUEUE.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(50)),
        }
    }
    None
}

/// Drops something that may block, without the interpreter where it is held.
pub(crate) fn drop_detached<T: Send>(value: T) {
    let mut value = Some(value);
    Python::try_attach(|py| {
        let value = value.take();
        py.detach(|| drop(value));
    });
}

/// Drops something, and gives back at once what it queued.
pub(crate) fn drop_now<T>(py: Python<'_>, value: T) {
    drop(value);
    drain(py);
}

/// The last field of an object of Python: gives back at once what the fields before it queued when they were dropped.
pub(crate) struct DrainOnDrop;

impl Drop for DrainOnDrop {
    fn drop(&mut self) {
        if let Some(()) = Python::try_attach(drain) {}
    }
}

/// Called when the interpreter exits: buffers that are still in use are not given back.
#[pyfunction]
pub(crate) fn stop(py: Python<'_>) {
    drain(py);
    let _queue = try_lock();
    IS_OVER.store(true, Ordering::Release);
}

extern "C" fn drain_pending(_: *mut c_void) -> c_int {
    if let Some(()) = Python::try_attach(drain) {}
    0
}

/// Gives back what is queued.
pub(crate) fn drain(py: Python<'_>) {
    if !IS_FILLED.load(Ordering::Acquire) {
        return;
    }
    let Some(mut queue) = try_lock() else { return };
    IS_ASKED.store(false, Ordering::Release);
    IS_FILLED.store(false, Ordering::Release);
    let owners = std::mem::take(&mut *queue);
    drop(queue);
    // Giving back may run code of the owners, which may call this package: no lock is held.
    for owner in owners {
        owner.release(py);
    }
}

/// Gives back the memory of transfers that have ended after their handle was dropped.
#[pyfunction]
pub(crate) fn release_buffers(py: Python<'_>) {
    drain(py);
}
