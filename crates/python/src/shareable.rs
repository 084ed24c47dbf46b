//! Memory that peers can map.

use std::cell::UnsafeCell;
use std::ffi::c_int;

use memferry::message;
use pyo3::exceptions::PyMemoryError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Memory that peers can map: large messages from and to it need no system call. It has the buffer
/// protocol: `numpy.frombuffer(buffer, dtype)` is an array in it.
#[pyclass(module = "memferry", frozen, weakref)]
pub(crate) struct ShareableBuffer {
    /// Only its address is used, by views that keep this object alive.
    memory: UnsafeCell<message::ShareableBuffer>,
    address: usize,
    length: usize,
}

// SAFETY: the methods below read only the two numbers; the memory itself is reached by views of the
// buffer protocol, whose users agree about accesses among themselves.
unsafe impl Sync for ShareableBuffer {}

#[pymethods]
impl ShareableBuffer {
    #[new]
    fn new(nbytes: usize) -> PyResult<Self> {
        let mut memory = message::ShareableBuffer::new(nbytes)
            .map_err(|error| PyMemoryError::new_err(format!("{nbytes} bytes: {error}")))?;
        let address = memory.as_mut_ptr() as usize;
        Ok(Self { memory: UnsafeCell::new(memory), address, length: nbytes })
    }

    /// The length in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.length
    }

    fn __len__(&self) -> usize {
        self.length
    }

    fn __repr__(&self) -> String {
        format!("<memferry.ShareableBuffer of {} bytes>", self.length)
    }

    /// # Safety
    /// The interpreter calls it with a view to fill in.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let (address, length) = (slf.get().address, slf.get().length);
        // SAFETY: the view is the interpreter's; it gets a reference to this object, which keeps
        // the memory alive and in place until the view is released.
        let code = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                address as *mut std::ffi::c_void,
                length as ffi::Py_ssize_t,
                0,
                flags,
            )
        };
        if code == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

impl std::fmt::Debug for ShareableBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The memory is not shown.
        let _ = &self.memory;
        f.write_str(&self.__repr__())
    }
}
