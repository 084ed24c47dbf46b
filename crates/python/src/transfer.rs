//! The handle of a copy in flight.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use memferry::{FailedTransfer, Ferry, OwnedTransfer};
use pyo3::prelude::*;

use crate::error::{copy_error, timeout_error};
use crate::memory::{Held, Memory};
use crate::reactor::{ReactorQueue, Watchers};
use crate::release::{self, DrainOnDrop};

/// How long a wait goes on before signals are handled.
pub(crate) const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// A copy in flight holds its buffers; they are given back when it is complete, whatever happens to
/// this handle.
#[pyclass(module = "memferry", frozen, weakref)]
pub(crate) struct Transfer {
    transfer: memferry::Transfer,
    /// The same as a future, which keeps the one waker of all watchers.
    future: Mutex<memferry::Transfer>,
    watchers: Arc<Watchers>,
    /// The buffers, until somebody has seen the end of the copy.
    buffers: Mutex<Option<HeldBuffers>>,
    _drain: DrainOnDrop,
}

/// Gives the buffers of a transfer that was not started back, and returns its error.
fn not_started<S, T>(py: Python<'_>, failed: Box<FailedTransfer<S, T>>) -> PyErr {
    let error = copy_error(&failed.error);
    release::drop_now(py, failed);
    error
}

fn hold_all(memory: Vec<Memory<'_>>) -> Vec<Held> {
    memory.into_iter().map(Memory::hold).collect()
}

/// The buffers of a copy in flight.
enum HeldBuffers {
    One(OwnedTransfer<Held, Held>),
    Many(OwnedTransfer<Vec<Held>, Vec<Held>>),
    Filled(OwnedTransfer<(), Vec<Held>>),
}

impl Transfer {
    fn new(transfer: memferry::Transfer, buffers: HeldBuffers) -> Self {
        Self {
            future: Mutex::new(transfer.clone()),
            transfer,
            watchers: Arc::default(),
            buffers: Mutex::new(Some(buffers)),
            _drain: DrainOnDrop,
        }
    }

    /// Starts a copy. The buffers of one that cannot be started are given back.
    pub(crate) fn start(
        py: Python<'_>,
        ferry: &Ferry,
        source: Memory<'_>,
        target: Memory<'_>,
    ) -> PyResult<Self> {
        let (source, target) = (source.hold(), target.hold());
        let started = py.detach(|| ferry.icopy(source, target).map_err(Box::new));
        let owned = started.map_err(|failed| not_started(py, failed))?;
        Ok(Self::new(owned.transfer().clone(), HeldBuffers::One(owned)))
    }

    /// Starts many copies as one transfer. The buffers of one that cannot be started are given back.
    pub(crate) fn start_many(
        py: Python<'_>,
        ferry: &Ferry,
        sources: Vec<Memory<'_>>,
        targets: Vec<Memory<'_>>,
    ) -> PyResult<Self> {
        let (sources, targets) = (hold_all(sources), hold_all(targets));
        let started = py.detach(|| ferry.icopy_many(sources, targets).map_err(Box::new));
        let owned = started.map_err(|failed| not_started(py, failed))?;
        Ok(Self::new(owned.transfer().clone(), HeldBuffers::Many(owned)))
    }

    /// Starts many fills as one transfer. The buffers of one that cannot be started are given back.
    pub(crate) fn start_fills(
        py: Python<'_>,
        ferry: &Ferry,
        targets: Vec<Memory<'_>>,
        value: u8,
    ) -> PyResult<Self> {
        let targets = hold_all(targets);
        let started = py.detach(|| ferry.ifill_many(targets, value).map_err(Box::new));
        let owned = started.map_err(|failed| not_started(py, failed))?;
        Ok(Self::new(owned.transfer().clone(), HeldBuffers::Filled(owned)))
    }

    /// Gives the buffers of a copy that is over back.
    fn give_back(&self) {
        let owned = self.buffers.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A wait returns the buffers in a forked child too, where a drop would keep them for ever.
        match owned {
            Some(HeldBuffers::One(owned)) => drop(owned.wait_timeout(Duration::ZERO)),
            Some(HeldBuffers::Many(owned)) => drop(owned.wait_timeout(Duration::ZERO)),
            Some(HeldBuffers::Filled(owned)) => drop(owned.wait_timeout(Duration::ZERO)),
            None => {}
        }
    }

    /// Returns the outcome of a copy that is over.
    fn outcome(&self) -> Option<Result<(), memferry::Error>> {
        let outcome = self.transfer.check()?.map(drop);
        self.give_back();
        Some(outcome)
    }

    /// Lets a reactor be told the number when the copy is complete; returns whether it is already.
    pub(crate) fn watch(&self, queue: &Arc<ReactorQueue>, number: u64) -> bool {
        self.watchers.add(queue, number);
        let waker = Waker::from(self.watchers.clone());
        let is_over = match self.future.try_lock() {
            Ok(mut future) => {
                Pin::new(&mut *future).poll(&mut Context::from_waker(&waker)).is_ready()
            }
            // Another thread polls it with the same waker, or did when this process was forked.
            Err(_) => self.transfer.check().is_some(),
        };
        if is_over {
            self.watchers.remove(queue, number);
            self.watchers.tell();
            self.give_back();
        }
        is_over
    }

    pub(crate) fn watchers(&self) -> &Watchers {
        &self.watchers
    }
}

#[pymethods]
impl Transfer {
    /// Waits until the copy is complete. Raises `TimeoutError` after `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let ended = wait_with_signals(py, timeout, |step| {
            drop(self.transfer.wait_timeout(step)?);
            self.outcome()
        })?;
        release::drain(py);
        match ended {
            Some(outcome) => outcome.map_err(|error| copy_error(&error)),
            None => {
                let bytes = self.transfer.len();
                Err(timeout_error(format_args!("copy of {bytes} bytes"), timeout))
            }
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
        let is_over = self.outcome().is_some();
        release::drain(py);
        is_over
    }

    /// How many bytes from the start have arrived.
    #[getter]
    fn ready(&self) -> u64 {
        match self.transfer.check() {
            Some(Err(_)) => 0,
            _ => self.transfer.ready_bytes(),
        }
    }

    /// The length of the copy in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.transfer.len()
    }

    /// Asks for the end of the copy; what has begun is completed.
    fn cancel(&self) {
        self.transfer.cancel();
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
        let state = match self.transfer.check() {
            Some(Ok(_)) => "complete".into(),
            Some(Err(error)) => format!("failed: {error}"),
            None => "in flight".to_owned(),
        };
        format!("<memferry.Transfer of {} bytes, {state}>", self.transfer.len())
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
