//! Completions for event loops: one eventfd for any number of copies and messages.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Wake;

use memferry::EventFd;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::error::system_error;
use crate::operation::Operation;
use crate::release;
use crate::transfer::Transfer;

/// Collects the numbers of what has completed. Its descriptor is readable while there are any.
#[pyclass(module = "memferry", frozen)]
pub(crate) struct Reactor {
    shared: Arc<ReactorQueue>,
}

pub(crate) struct ReactorQueue {
    event: EventFd,
    numbers: Mutex<Vec<u64>>,
}

impl ReactorQueue {
    fn push(&self, number: u64) {
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        let was_empty = numbers.is_empty();
        numbers.push(number);
        drop(numbers);
        if was_empty {
            self.event.signal();
        }
    }
}

/// The reactors that are to be told of one handle, and the number by which each knows it. Only these grow with the
/// number of those who await it: the handle itself has one waker.
#[derive(Default)]
pub(crate) struct Watchers(Mutex<WatchersByKey>);

type WatchersByKey = HashMap<(usize, u64), Arc<ReactorQueue>>;

impl Watchers {
    fn lock(&self) -> MutexGuard<'_, WatchersByKey> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(queue: &Arc<ReactorQueue>, number: u64) -> (usize, u64) {
        (Arc::as_ptr(queue) as usize, number)
    }

    pub(crate) fn add(&self, queue: &Arc<ReactorQueue>, number: u64) {
        self.lock().insert(Self::key(queue, number), queue.clone());
    }

    pub(crate) fn remove(&self, queue: &Arc<ReactorQueue>, number: u64) {
        self.lock().remove(&Self::key(queue, number));
    }

    /// Tells all that the handle should be looked at again. Those who still need it watch it again.
    pub(crate) fn tell(&self) {
        let told = std::mem::take(&mut *self.lock());
        told.into_iter().for_each(|((_, number), queue)| queue.push(number));
    }
}

impl Wake for Watchers {
    fn wake(self: Arc<Self>) {
        self.tell();
    }
}

#[pymethods]
impl Reactor {
    #[new]
    fn new() -> PyResult<Self> {
        let event = EventFd::new().map_err(|error| system_error("an eventfd", &error))?;
        Ok(Self { shared: Arc::new(ReactorQueue { event, numbers: Mutex::default() }) })
    }

    /// The descriptor for an event loop.
    fn fileno(&self) -> i32 {
        self.shared.event.as_fd().as_raw_fd()
    }

    /// Asks a handle to tell this reactor its number when it should be looked at again. Returns
    /// whether it is complete already; then nothing is told.
    fn watch(&self, py: Python<'_>, handle: &Bound<'_, PyAny>, number: u64) -> PyResult<bool> {
        let watched = with_handle(
            handle,
            |transfer| py.detach(|| transfer.watch(&self.shared, number)),
            |operation| py.detach(|| operation.watch(&self.shared, number)),
        );
        release::drain(py);
        watched
    }

    /// Forgets a number that `watch` was asked to tell: the await that had it is over.
    fn forget(&self, handle: &Bound<'_, PyAny>, number: u64) -> PyResult<()> {
        with_handle(
            handle,
            |transfer| transfer.watchers().remove(&self.shared, number),
            |operation| operation.watchers().remove(&self.shared, number),
        )
    }

    /// Takes the numbers that were told.
    fn take(&self) -> Vec<u64> {
        self.shared.event.drain();
        std::mem::take(&mut *self.shared.numbers.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Calls the function of the handle's type.
fn with_handle<R>(
    handle: &Bound<'_, PyAny>,
    of_transfer: impl FnOnce(&Transfer) -> R,
    of_operation: impl FnOnce(&Operation) -> R,
) -> PyResult<R> {
    if let Ok(transfer) = handle.cast::<Transfer>() {
        return Ok(of_transfer(transfer.get()));
    }
    if let Ok(operation) = handle.cast::<Operation>() {
        return Ok(of_operation(operation.get()));
    }
    Err(PyTypeError::new_err("only transfers and operations can be awaited"))
}
