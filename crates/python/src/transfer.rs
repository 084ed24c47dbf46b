//! The handle of a copy in flight.

use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use memferry::{FailedTransfer, Ferry, OwnedTransfer};
use pyo3::prelude::*;

use crate::error::{copy_error, timeout_error};
use crate::memory::Held;
use crate::release;

/// How long a wait goes on before signals are handled.
pub(crate) const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

type InFlight = OwnedTransfer<Held, Held>;
type Ended = Result<(), memferry::Error>;
/// What a wait with a timeout returns: the handle if it is not complete.
type Waited = Result<Result<(Held, Held), FailedTransfer<Held, Held>>, InFlight>;

/// A copy in flight holds its buffers; they are given back when it is complete, whatever happens to
/// this handle.
#[pyclass(module = "memferry", frozen, weakref)]
pub(crate) struct Transfer {
    state: Mutex<TransferState>,
    bytes: u64,
}

enum TransferState {
    InFlight(InFlight),
    /// A thread waits for it, and has the handle.
    Waited {
        wakers: Vec<Waker>,
        is_cancelled: bool,
    },
    Ended(Ended),
}

impl Transfer {
    /// Starts a copy. The buffers of one that cannot be started are given back.
    pub(crate) fn start(
        py: Python<'_>,
        ferry: &Ferry,
        source: Held,
        target: Held,
    ) -> PyResult<Self> {
        let started = py.detach(|| ferry.icopy(source, target).map_err(Box::new));
        let transfer = started.map_err(|failed| copy_error(&failed.error))?;
        let bytes = transfer.transfer().len();
        Ok(Self { state: Mutex::new(TransferState::InFlight(transfer)), bytes })
    }

    fn lock(&self) -> MutexGuard<'_, TransferState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a while, without the interpreter. Returns the outcome if there is one.
    fn wait_for(&self, timeout: Duration) -> Option<Ended> {
        let mut state = self.lock();
        let placeholder = TransferState::Waited { wakers: Vec::new(), is_cancelled: false };
        let taken = std::mem::replace(&mut *state, placeholder);
        match taken {
            TransferState::InFlight(transfer) => {
                drop(state);
                let outcome = transfer.wait_timeout(timeout);
                self.put_back(outcome)
            }
            TransferState::Ended(outcome) => {
                *state = TransferState::Ended(outcome.clone());
                Some(outcome)
            }
            waited @ TransferState::Waited { .. } => {
                *state = waited;
                drop(state);
                // Another thread has the handle, and leaves the outcome here.
                std::thread::sleep(timeout.min(Duration::from_millis(1)));
                None
            }
        }
    }

    /// Leaves the handle, or the outcome, for others after a wait.
    fn put_back(&self, outcome: Waited) -> Option<Ended> {
        let (next, ended) = match outcome {
            Err(transfer) => (TransferState::InFlight(transfer), None),
            Ok(ended) => {
                let ended = ended.map(|_| ()).map_err(|failed| failed.error.clone());
                (TransferState::Ended(ended.clone()), Some(ended))
            }
        };
        let mut state = self.lock();
        let left = std::mem::replace(&mut *state, next);
        if let TransferState::Waited { wakers, is_cancelled } = left {
            if is_cancelled && let TransferState::InFlight(transfer) = &*state {
                transfer.cancel();
            }
            drop(state);
            // Whoever asked meanwhile to be woken asks the handle itself now.
            for waker in wakers {
                if self.poll(&waker) {
                    waker.wake();
                }
            }
        }
        ended
    }

    /// Lets the waker be called when the copy is complete; returns whether it is already.
    pub(crate) fn poll(&self, waker: &Waker) -> bool {
        let mut state = self.lock();
        match &mut *state {
            TransferState::Ended(_) => true,
            TransferState::Waited { wakers, .. } => {
                wakers.push(waker.clone());
                false
            }
            TransferState::InFlight(transfer) => {
                match Pin::new(transfer).poll(&mut Context::from_waker(waker)) {
                    Poll::Pending => false,
                    Poll::Ready(outcome) => {
                        let ended = outcome.map(|_| ()).map_err(|failed| failed.error.clone());
                        *state = TransferState::Ended(ended);
                        true
                    }
                }
            }
        }
    }
}

#[pymethods]
impl Transfer {
    /// Waits until the copy is complete. Raises `TimeoutError` after `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let outcome = wait_with_signals(py, timeout, |step| self.wait_for(step))?;
        release::drain(py);
        match outcome {
            Some(ended) => ended.map_err(|error| copy_error(&error)),
            None => Err(timeout_error("copy")),
        }
    }

    /// The same as `wait`, in the words of `concurrent.futures`.
    #[pyo3(signature = (timeout=None))]
    fn result(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.wait(py, timeout)
    }

    /// Whether the copy is complete, well or not.
    #[getter]
    fn done(&self, py: Python<'_>) -> bool {
        release::drain(py);
        match &*self.lock() {
            TransferState::Ended(_) => true,
            TransferState::Waited { .. } => false,
            TransferState::InFlight(transfer) => transfer.is_done(),
        }
    }

    /// How many bytes from the start have arrived.
    #[getter]
    fn ready(&self) -> u64 {
        match &*self.lock() {
            TransferState::Ended(Ok(())) => self.bytes,
            TransferState::Ended(Err(_)) | TransferState::Waited { .. } => 0,
            TransferState::InFlight(transfer) => transfer.transfer().ready_bytes(),
        }
    }

    /// The length of the copy in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    /// Asks for the end of the copy; what has begun is completed.
    fn cancel(&self) {
        match &mut *self.lock() {
            TransferState::InFlight(transfer) => transfer.cancel(),
            TransferState::Waited { is_cancelled, .. } => *is_cancelled = true,
            TransferState::Ended(_) => {}
        }
    }

    /// Calls `function(transfer)` when the copy is complete, on a thread of Python's.
    fn add_done_callback(slf: Bound<'_, Self>, function: Bound<'_, PyAny>) -> PyResult<()> {
        let module = slf.py().import("memferry._completion")?;
        module.call_method1("add_done_callback", (slf, function)).map(|_| ())
    }

    fn __await__<'py>(slf: Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("memferry._completion")?.call_method1("await_handle", (slf,))
    }

    fn __repr__(&self) -> String {
        let state = match &*self.lock() {
            TransferState::Ended(Ok(())) => "complete".into(),
            TransferState::Ended(Err(error)) => format!("failed: {error}"),
            _ => "in flight".to_owned(),
        };
        format!("<memferry.Transfer of {} bytes, {state}>", self.bytes)
    }
}

/// Waits in steps, without the interpreter, and handles signals in between: a program can be
/// interrupted while it waits.
pub(crate) fn wait_with_signals<T: Send>(
    py: Python<'_>,
    timeout: Option<f64>,
    step: impl Fn(Duration) -> Option<T> + Sync,
) -> PyResult<Option<T>> {
    let length = timeout.map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)));
    let deadline = length.and_then(|length| Instant::now().checked_add(length.ok()?));
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let time = left.map_or(SIGNAL_INTERVAL, |left| left.min(SIGNAL_INTERVAL));
        if let Some(outcome) = py.detach(|| step(time)) {
            return Ok(Some(outcome));
        }
        py.check_signals()?;
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(None);
        }
    }
}
