//! The handle of a send, a receive, a put or a get in flight.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use memferry::message::{self, FailedOperation, MessageStatus, OwnedOperation};
use pyo3::prelude::*;

use crate::endpoint::Peer;
use crate::error::{message_error, timeout_error};
use crate::memory::Held;
use crate::reactor::{ReactorQueue, Watchers};
use crate::release::{self, DrainOnDrop};
use crate::transfer::wait_with_signals;

type InFlight = OwnedOperation<Held>;
type Ended = Result<MessageStatus, message::Error>;

/// What is known of a message that has arrived or was sent.
#[pyclass(module = "memferry", frozen, get_all)]
pub(crate) struct Status {
    /// The sender; for a send, the receiver.
    pub(crate) source: Py<Peer>,
    pub(crate) tag: u64,
    /// The length in bytes.
    pub(crate) nbytes: u64,
}

impl Status {
    pub(crate) fn new(py: Python<'_>, status: MessageStatus) -> PyResult<Self> {
        let source = Py::new(py, Peer(status.source))?;
        Ok(Self { source, tag: status.tag, nbytes: status.length })
    }
}

#[pymethods]
impl Status {
    fn __repr__(&self) -> String {
        format!("<memferry.Status tag={} nbytes={}>", self.tag, self.nbytes)
    }
}

/// A message or an access to a window in flight. It holds its buffer until it is complete. Dropping
/// it lets a send go on and cancels a receive.
#[pyclass(module = "memferry", frozen, weakref)]
pub(crate) struct Operation {
    state: Mutex<OperationState>,
    watchers: Arc<Watchers>,
    _drain: DrainOnDrop,
}

enum OperationState {
    InFlight(InFlight),
    /// A thread waits for it, and has the handle.
    Waited {
        is_cancelled: bool,
    },
    Ended(Ended),
}

impl Operation {
    /// From what was started. The buffer of an operation that was not is given back.
    pub(crate) fn start(
        py: Python<'_>,
        started: Result<InFlight, FailedOperation<Held>>,
    ) -> PyResult<Self> {
        let operation = started.map_err(|failed| {
            let error = message_error(&failed.error);
            release::drop_now(py, failed);
            error
        })?;
        let state = Mutex::new(OperationState::InFlight(operation));
        Ok(Self { state, watchers: Arc::default(), _drain: DrainOnDrop })
    }

    fn lock(&self) -> MutexGuard<'_, OperationState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for(&self, timeout: Duration) -> Option<Ended> {
        let mut state = self.lock();
        let placeholder = OperationState::Waited { is_cancelled: false };
        match std::mem::replace(&mut *state, placeholder) {
            OperationState::InFlight(operation) => {
                drop(state);
                let outcome = operation.wait_timeout(timeout);
                self.put_back(outcome)
            }
            OperationState::Ended(outcome) => {
                *state = OperationState::Ended(outcome.clone());
                Some(outcome)
            }
            waited @ OperationState::Waited { .. } => {
                *state = waited;
                drop(state);
                std::thread::sleep(timeout.min(Duration::from_millis(1)));
                None
            }
        }
    }

    fn put_back(
        &self,
        outcome: Result<Result<(MessageStatus, Held), FailedOperation<Held>>, InFlight>,
    ) -> Option<Ended> {
        let (next, ended) = match outcome {
            Err(operation) => (OperationState::InFlight(operation), None),
            Ok(ended) => {
                let ended = ended.map(|(status, _)| status).map_err(|failed| failed.error);
                (OperationState::Ended(ended.clone()), Some(ended))
            }
        };
        let mut state = self.lock();
        let left = std::mem::replace(&mut *state, next);
        if let (
            OperationState::Waited { is_cancelled: true },
            OperationState::InFlight(operation),
        ) = (left, &*state)
        {
            operation.cancel();
        }
        drop(state);
        // Those who came meanwhile watch it again: now there is something to watch.
        self.watchers.tell();
        ended
    }

    pub(crate) fn watchers(&self) -> &Watchers {
        &self.watchers
    }

    /// Lets a reactor be told the number when the operation is complete; returns whether it is already.
    pub(crate) fn watch(&self, queue: &Arc<ReactorQueue>, number: u64) -> bool {
        let mut state = self.lock();
        self.watchers.add(queue, number);
        let is_over = match &mut *state {
            OperationState::Ended(_) => true,
            OperationState::Waited { .. } => false,
            OperationState::InFlight(operation) => {
                let all = Waker::from(self.watchers.clone());
                match Pin::new(operation).poll(&mut Context::from_waker(&all)) {
                    Poll::Pending => false,
                    Poll::Ready(outcome) => {
                        let ended =
                            outcome.map(|(status, _)| status).map_err(|failed| failed.error);
                        *state = OperationState::Ended(ended);
                        true
                    }
                }
            }
        };
        drop(state);
        if is_over {
            self.watchers.remove(queue, number);
            self.watchers.tell();
        }
        is_over
    }

    /// Waits until it is complete, or raises `TimeoutError`.
    pub(crate) fn wait_until(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Status> {
        let outcome = wait_with_signals(py, timeout, |step| self.wait_for(step))?;
        release::drain(py);
        match outcome {
            Some(Ok(status)) => Status::new(py, status),
            Some(Err(error)) => Err(message_error(&error)),
            None => Err(match &*self.lock() {
                OperationState::InFlight(operation) => timeout_error(operation.name(), timeout),
                _ => timeout_error("operation that another thread waits for", timeout),
            }),
        }
    }
}

#[pymethods]
impl Operation {
    /// Waits until the operation is complete, and returns its status. Raises `TimeoutError` after
    /// `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Status> {
        self.wait_until(py, timeout)
    }

    /// The same as `wait`, in the words of `concurrent.futures`.
    #[pyo3(signature = (timeout=None))]
    fn result(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Status> {
        self.wait_until(py, timeout)
    }

    /// Makes progress, and tells whether the operation is complete.
    #[getter]
    fn done(&self, py: Python<'_>) -> bool {
        release::drain(py);
        py.detach(|| match &mut *self.lock() {
            OperationState::Ended(_) => true,
            OperationState::Waited { .. } => false,
            OperationState::InFlight(operation) => operation.is_done(),
        })
    }

    /// Cancels the operation, if no message has matched it yet.
    fn cancel(&self) {
        match &mut *self.lock() {
            OperationState::InFlight(operation) => operation.cancel(),
            OperationState::Waited { is_cancelled, .. } => *is_cancelled = true,
            OperationState::Ended(_) => {}
        }
    }

    /// Calls `function(operation)` when it is complete, on a thread of Python's.
    fn add_done_callback(slf: Bound<'_, Self>, function: Bound<'_, PyAny>) -> PyResult<()> {
        let module = slf.py().import("memferry._completion")?;
        module.call_method1("add_done_callback", (slf, function)).map(|_| ())
    }

    fn __await__<'py>(slf: Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("memferry._completion")?.call_method1("await_handle", (slf,))
    }

    fn __repr__(&self) -> String {
        match &*self.lock() {
            OperationState::Ended(Ok(status)) => {
                format!("<memferry.Operation, complete, {} bytes>", status.length)
            }
            OperationState::Ended(Err(error)) => format!("<memferry.Operation, failed: {error}>"),
            _ => "<memferry.Operation, in flight>".to_owned(),
        }
    }
}
