//! Gives memory of Python objects back, on a thread that holds the interpreter.
//!
//! A transfer whose handle was dropped keeps its buffers until it is complete, and then drops them
//! on a thread of an engine. Such a thread must not wait for the interpreter: it could be held by a
//! thread that waits for a copy, or be gone. So the drop only queues what is to be given back, and
//! asks the interpreter to call [`drain`] on its main thread soon. Calls of this package drain too.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use crate::memory::Owner;

static QUEUE: Mutex<Vec<Owner>> = Mutex::new(Vec::new());
/// There is something in the queue: one load for calls that find nothing.
static IS_FILLED: AtomicBool = AtomicBool::new(false);

/// Queues what keeps memory alive. Called on any thread.
pub(crate) fn queue(owner: Owner) {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner).push(owner);
    if !IS_FILLED.swap(true, Ordering::AcqRel) {
        // SAFETY: it may be called from any thread, with or without the interpreter; the function
        // it names is never unloaded. A full list of pending calls is no harm: the next call of
        // this package drains.
        unsafe { pyo3::ffi::Py_AddPendingCall(Some(drain_pending), std::ptr::null_mut()) };
    }
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
    IS_FILLED.store(false, Ordering::Release);
    let owners = std::mem::take(&mut *QUEUE.lock().unwrap_or_else(PoisonError::into_inner));
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
