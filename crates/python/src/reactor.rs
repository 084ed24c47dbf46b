//! Completions for event loops: one eventfd for any number of copies and messages.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};

use memferry::EventFd;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::error::system_error;
use crate::operation::Operation;
use crate::transfer::Transfer;

/// Collects the numbers of what has completed. Its descriptor is readable while there are any.
#[pyclass(module = "memferry", frozen)]
pub(crate) struct Reactor {
    shared: Arc<ReactorQueue>,
}

struct ReactorQueue {
    event: EventFd,
    numbers: Mutex<Vec<u64>>,
}

/// Tells a reactor that one handle should be looked at.
struct HandleWaker {
    queue: Arc<ReactorQueue>,
    number: u64,
}

impl Wake for HandleWaker {
    fn wake(self: Arc<Self>) {
        let mut numbers = self.queue.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        let was_empty = numbers.is_empty();
        numbers.push(self.number);
        drop(numbers);
        if was_empty {
            self.queue.event.signal();
        }
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
        let waker = Waker::from(Arc::new(HandleWaker { queue: self.shared.clone(), number }));
        if let Ok(transfer) = handle.cast::<Transfer>() {
            let transfer = transfer.get();
            return Ok(py.detach(|| transfer.poll(&waker)));
        }
        if let Ok(operation) = handle.cast::<Operation>() {
            let operation = operation.get();
            return Ok(py.detach(|| operation.poll(&waker)));
        }
        Err(PyTypeError::new_err("only transfers and operations can be awaited"))
    }

    /// Takes the numbers that were told.
    fn take(&self) -> Vec<u64> {
        self.shared.event.drain();
        std::mem::take(&mut *self.shared.numbers.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
