//! The memory of a Python object: where it is, and what keeps it there.

use memferry::{MemoryKind, OwnedSource, OwnedTarget};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::{array_interface, dlpack, release};

/// What keeps the memory alive and in place.
pub(crate) enum Owner {
    /// A view by the buffer protocol.
    Buffer(BufferView),
    /// The object itself, or the capsule that exports its memory.
    Object(Py<PyAny>),
}

impl Owner {
    /// Gives the memory back.
    pub(crate) fn release(self, py: Python<'_>) {
        match self {
            Self::Buffer(view) => view.release(py),
            Self::Object(object) => drop(object.into_bound(py)),
        }
    }
}

/// A view of an object by the buffer protocol. The view is boxed: exporters may point into it.
pub(crate) struct BufferView(Box<ffi::Py_buffer>);

// SAFETY: what the view points to is only touched with the interpreter held (`of`, `release`); the
// numbers in it do not change.
unsafe impl Send for BufferView {}
// SAFETY: as above.
unsafe impl Sync for BufferView {}

impl BufferView {
    /// Asks an object for its bytes in one piece, in row-major order, of whatever type.
    fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: the object is alive, the view is new, and the interpreter is held.
        let code = unsafe {
            ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, ffi::PyBUF_C_CONTIGUOUS)
        };
        if code == 0 {
            return Ok(Self(view));
        }
        let error = PyErr::fetch(object.py());
        let is_about_order = error.value(object.py()).to_string().contains("contiguous");
        Err(if is_about_order { not_contiguous() } else { error })
    }

    fn range(&self) -> Range {
        Range {
            address: self.0.buf as usize,
            length: usize::try_from(self.0.len).unwrap_or(0),
            device: None,
            is_read_only: self.0.readonly != 0,
        }
    }

    fn release(mut self, _py: Python<'_>) {
        // SAFETY: the view was filled in by `of`, is released once, and the interpreter is held.
        unsafe { ffi::PyBuffer_Release(&raw mut *self.0) };
    }
}

/// The memory of an object, as one range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) address: usize,
    pub(crate) length: usize,
    /// The number of the GPU that has it; none if it is host memory.
    pub(crate) device: Option<i32>,
    pub(crate) is_read_only: bool,
}

/// Memory of a Python object that stays alive and in place until this is dropped, on any thread.
pub(crate) struct Held {
    range: Range,
    owner: Option<Owner>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(owner) = self.owner.take() {
            release::queue(owner);
        }
    }
}

// SAFETY: the exporter keeps address and size of the memory while the view or the capsule is held.
// Other code of the program may change the contents, as it may for every user of the buffer
// protocol; Memferry reads and writes them by raw pointers only.
unsafe impl OwnedSource for Held {
    fn source(&self) -> (*const u8, usize) {
        (self.range.address as *const u8, self.range.length)
    }

    fn source_memory(&self) -> MemoryKind {
        self.kind()
    }
}

// SAFETY: as above. That no other code accesses the target is the promise of the caller, as for
// every function of Python that writes into a buffer; Memferry makes no reference to it.
unsafe impl OwnedTarget for Held {
    fn target(&mut self) -> (*mut u8, usize) {
        (self.range.address as *mut u8, self.range.length)
    }

    fn target_memory(&self) -> MemoryKind {
        self.kind()
    }
}

impl Held {
    pub(crate) fn new(range: Range, owner: Owner) -> Self {
        Self { range, owner: Some(owner) }
    }

    /// The memory of an object that is only read.
    pub(crate) fn source_of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        // SAFETY: the object is alive, and the interpreter is held.
        if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1 {
            return match BufferView::of(object) {
                Ok(view) => Ok(Self::new(view.range(), Owner::Buffer(view))),
                // The buffer protocol has no bfloat16, for example. DLPack has.
                Err(error) => dlpack::hold(object).ok().flatten().ok_or(error),
            };
        }
        if let Some(held) = dlpack::hold(object)? {
            return Ok(held);
        }
        if let Some(held) = array_interface::hold(object)? {
            return Ok(held);
        }
        Err(PyTypeError::new_err(format!(
            "{} has no memory that can be copied: it needs the buffer protocol, __dlpack__, \
             __cuda_array_interface__ or __array_interface__",
            object.get_type().name()?
        )))
    }

    /// The memory of an object that is written.
    pub(crate) fn target_of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let held = Self::source_of(object)?;
        if held.range.is_read_only {
            let name = object.get_type().name()?;
            return Err(PyValueError::new_err(format!(
                "the target ({name}) is read-only: pass memory that can be written, a bytearray or \
                 a writable array"
            )));
        }
        Ok(held)
    }

    pub(crate) fn range(&self) -> Range {
        self.range
    }

    pub(crate) fn len(&self) -> usize {
        self.range.length
    }

    pub(crate) fn kind(&self) -> MemoryKind {
        if self.range.device.is_some() { MemoryKind::Device } else { MemoryKind::Host }
    }

    /// Gives the memory back now.
    pub(crate) fn release(mut self, py: Python<'_>) {
        if let Some(owner) = self.owner.take() {
            owner.release(py);
        }
    }
}

/// The error for memory with gaps or in another order.
pub(crate) fn not_contiguous() -> PyErr {
    PyBufferError::new_err(
        "the array is not C-contiguous: pass numpy.ascontiguousarray(a), or tensor.contiguous()",
    )
}

/// Checks that two ranges have the same length.
pub(crate) fn check_lengths(source: &Held, target: &Held) -> PyResult<()> {
    if source.len() == target.len() {
        return Ok(());
    }
    Err(PyValueError::new_err(format!(
        "the source has {} bytes and the target {}: pass memory of equal size",
        source.len(),
        target.len()
    )))
}

/// The GPU that a copy needs, if any.
pub(crate) fn device_of(source: &Held, target: &Held) -> PyResult<Option<i32>> {
    match (source.range.device, target.range.device) {
        (Some(from), Some(to)) if from != to => Err(PyValueError::new_err(format!(
            "the source is on GPU {from} and the target on GPU {to}: copy through host memory, or \
             with the library that owns the arrays"
        ))),
        (from, to) => Ok(from.or(to)),
    }
}
