//! Windows: memory that peers put to and get from.

use std::sync::{Arc, Mutex, PoisonError};

use memferry::message::{self, PutNotification};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::endpoint::host;
use crate::error::{Error, message_error};
use crate::memory::{Held, Memory};
use crate::operation::Operation;
use crate::release::{self, DrainOnDrop};
use crate::transfer::wait_with_signals;

/// Memory of this process that peers put to and get from.
#[pyclass(module = "memferry", frozen, weakref)]
pub(crate) struct Window {
    inner: Mutex<Option<Arc<message::Window<Held>>>>,
    /// The memory may not be written by this process.
    is_read_only: bool,
    handle: [u8; message::WindowHandle::BYTES],
    length: usize,
    _drain: DrainOnDrop,
}

impl Window {
    pub(crate) fn of(window: message::Window<Held>, is_read_only: bool) -> Self {
        let (handle, length) = (window.handle().to_bytes(), window.len());
        let inner = Mutex::new(Some(Arc::new(window)));
        Self { inner, is_read_only, handle, length, _drain: DrainOnDrop }
    }

    /// Runs something with the window, if it is open and the variable lies in it.
    fn with_word<T>(
        &self,
        offset: usize,
        run: impl FnOnce(&message::Window<Held>) -> T,
    ) -> PyResult<T> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let window = inner.ok_or_else(|| Error::new_err("the window was closed"))?;
        let is_inside = offset.checked_add(8).is_some_and(|end| end <= self.length);
        if !is_inside || !(window.as_ptr() as usize + offset).is_multiple_of(8) {
            return Err(PyValueError::new_err(format!(
                "a variable has 8 bytes, inside the {} of the window and aligned: not at {offset}",
                self.length
            )));
        }
        Ok(run(&window))
    }
}

#[pymethods]
impl Window {
    /// The handle by which peers attach the window: send it to them.
    #[getter]
    fn handle<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.handle)
    }

    /// The length in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.length
    }

    /// The variable of 8 bytes at an offset.
    fn load(&self, offset: usize) -> PyResult<u64> {
        self.with_word(offset, |window| window.load(offset))
    }

    /// Sets the variable of 8 bytes at an offset.
    fn store(&self, offset: usize, value: u64) -> PyResult<()> {
        if self.is_read_only {
            return Err(PyValueError::new_err("the memory of the window is read-only"));
        }
        self.with_word(offset, |window| window.store(offset, value))
    }

    /// Waits until the variable at an offset is at least `value`, and returns it. Raises
    /// `TimeoutError` after `timeout` seconds.
    #[pyo3(signature = (offset, value, timeout=None))]
    fn wait(
        &self,
        py: Python<'_>,
        offset: usize,
        value: u64,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        let found = wait_with_signals(py, timeout, |step| {
            self.with_word(offset, |window| window.wait(offset, Some(step), |seen| seen >= value))
                .map(|waited| waited.map_err(|error| message_error(&error)))
                .and_then(std::convert::identity)
                .transpose()
        })?;
        found.unwrap_or_else(|| {
            let what = format_args!("notification at offset {offset} by the value {value}");
            Err(crate::error::timeout_error(what, timeout))
        })
    }

    /// Withdraws the window: no peer accesses the memory after this.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let taken = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(window) = taken else { return Ok(()) };
        let window = match Arc::try_unwrap(window) {
            Ok(window) => window,
            Err(shared) => {
                *self.inner.lock().unwrap_or_else(PoisonError::into_inner) = Some(shared);
                return Err(Error::new_err("another thread waits for a variable of the window"));
            }
        };
        match py.detach(|| window.withdraw()) {
            Ok(held) => {
                held.release(py);
                Ok(())
            }
            Err(busy) => {
                let text = busy.to_string();
                *self.inner.lock().unwrap_or_else(PoisonError::into_inner) =
                    Some(Arc::new(busy.window));
                Err(Error::new_err(text))
            }
        }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }
}

/// A window of a peer.
#[pyclass(module = "memferry", frozen, weakref)]
pub(crate) struct RemoteWindow {
    inner: message::RemoteWindow,
}

impl RemoteWindow {
    pub(crate) fn of(inner: message::RemoteWindow) -> Self {
        Self { inner }
    }
}

/// The variable that a put sets: `(offset, value)`.
type Notify = Option<(u64, u64)>;

#[pymethods]
impl RemoteWindow {
    /// The length in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.len()
    }

    /// Starts a put of the bytes of `data`; with `notify=(offset, value)`, a variable of the window
    /// is set after them.
    #[pyo3(signature = (offset, data, *, notify=None))]
    fn iput(
        &self,
        py: Python<'_>,
        offset: u64,
        data: &Bound<'_, PyAny>,
        notify: Notify,
    ) -> PyResult<Operation> {
        release::drain(py);
        let data = host(Memory::source(data, "data")?)?.hold();
        let started = py.detach(|| match notify {
            None => self.inner.iput(offset, data),
            Some((variable, value)) => {
                let notify = PutNotification { offset: variable, value };
                self.inner.iput_notify(offset, data, notify)
            }
        });
        Operation::start(py, started)
    }

    /// Starts a get into `buffer`.
    fn iget(&self, py: Python<'_>, offset: u64, buffer: &Bound<'_, PyAny>) -> PyResult<Operation> {
        release::drain(py);
        let buffer = host(Memory::target(buffer, "buffer")?)?.hold();
        Operation::start(py, py.detach(|| self.inner.iget(offset, buffer)))
    }

    /// Puts the bytes of `data`, and returns when they have arrived.
    #[pyo3(signature = (offset, data, *, notify=None))]
    fn put(
        &self,
        py: Python<'_>,
        offset: u64,
        data: &Bound<'_, PyAny>,
        notify: Notify,
    ) -> PyResult<()> {
        self.iput(py, offset, data, notify)?.wait_until(py, None).map(|_| ())
    }

    /// Gets bytes into `buffer`.
    fn get(&self, py: Python<'_>, offset: u64, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        self.iget(py, offset, buffer)?.wait_until(py, None).map(|_| ())
    }

    /// Waits until all accesses so far are complete.
    fn fence(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.inner.fence()).map_err(|error| message_error(&error))
    }
}
