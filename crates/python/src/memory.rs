//! The memory of a Python object: where it is, and what keeps it there.

use std::borrow::Cow;
use std::ffi::{CStr, c_int};

use memferry::{MemoryKind, OwnedSource, OwnedTarget};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::{array_interface, dlpack, element, release};

/// What keeps the memory alive and in place.
pub(crate) enum Owner {
    /// A view by the buffer protocol.
    Buffer(BufferView),
    /// The object itself, or the capsule that exports its memory, with the name of the type of the elements.
    Object { object: Py<PyAny>, element: String },
}

impl Owner {
    /// Gives the memory back.
    pub(crate) fn release(self, py: Python<'_>) {
        match self {
            Self::Buffer(view) => view.release(py),
            Self::Object { object, .. } => drop(object.into_bound(py)),
        }
    }
}

/// A view of an object by the buffer protocol.
pub(crate) struct BufferView {
    /// Boxed: exporters may point into it.
    view: Box<ffi::Py_buffer>,
    /// The name of the type of the elements, if the view has no format.
    element: Option<String>,
}

// SAFETY: what the view points to is only touched with the interpreter held (`of`, `element`, `release`); the
// numbers in it do not change.
unsafe impl Send for BufferView {}
// SAFETY: as above.
unsafe impl Sync for BufferView {}

impl BufferView {
    /// Asks an object for its bytes in one piece, in row-major order, of whatever type that holds no pointers.
    fn of(object: &Bound<'_, PyAny>, argument: &str) -> PyResult<Self> {
        let view = match Self::get(object, ffi::PyBUF_FORMAT) {
            Ok(view) => view,
            // NumPy has no format for some of its types, such as dates.
            Err(error) => match numpy_type(object) {
                Some((name, false)) => Self { element: Some(name), ..Self::get(object, 0)? },
                Some((name, true)) => return Err(pointers(argument, &name)),
                None => return Err(error),
            },
        };
        let format = view.format().filter(|format| element::has_pointers(format));
        match format.map(|format| pointers(argument, &format)) {
            None => Ok(view),
            Some(refused) => {
                view.release(object.py());
                Err(refused)
            }
        }
    }

    fn get(object: &Bound<'_, PyAny>, flags: c_int) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        let flags = ffi::PyBUF_C_CONTIGUOUS | flags;
        // SAFETY: the object is alive, the view is new, and the interpreter is held.
        let code = unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, flags) };
        if code == 0 {
            return Ok(Self { view, element: None });
        }
        let error = PyErr::fetch(object.py());
        let is_about_order = error.value(object.py()).to_string().contains("contiguous");
        Err(if is_about_order { not_contiguous() } else { error })
    }

    /// The format of the elements; `None` if the exporter gave none.
    fn format(&self) -> Option<Cow<'_, str>> {
        let format = self.view.format;
        // SAFETY: the exporter keeps the text while the view is held.
        (!format.is_null()).then(|| unsafe { CStr::from_ptr(format) }.to_string_lossy())
    }

    fn element(&self) -> String {
        let of_format = |format: Cow<'_, str>| {
            let bytes = usize::try_from(self.view.itemsize).unwrap_or(0);
            element::name_of_format(&format, bytes)
        };
        let element = self.element.clone().or_else(|| self.format().map(of_format));
        // What has no format has bytes.
        element.unwrap_or_else(|| "uint8".to_owned())
    }

    fn range(&self) -> Range {
        Range {
            address: self.view.buf as usize,
            length: usize::try_from(self.view.len).unwrap_or(0),
            device: None,
            is_read_only: self.view.readonly != 0,
        }
    }

    fn release(mut self, _py: Python<'_>) {
        // SAFETY: the view was filled in by `of`, is released once, and the interpreter is held.
        unsafe { ffi::PyBuffer_Release(&raw mut *self.view) };
    }
}

/// The name of an array's type, and whether its elements hold objects, if the array is of NumPy or says the same.
fn numpy_type(object: &Bound<'_, PyAny>) -> Option<(String, bool)> {
    let dtype = object.getattr("dtype").ok()?;
    let has_objects = dtype.getattr("hasobject").ok()?.extract().ok()?;
    Some((dtype.to_string(), has_objects))
}

/// The error for elements that hold references or pointers.
pub(crate) fn pointers(argument: &str, format: &str) -> PyErr {
    PyTypeError::new_err(format!(
        "{argument} has elements of the format {format:?}, which hold references or pointers: their bytes are no \
         values to copy. Pass an array of numbers"
    ))
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

impl Range {
    pub(crate) fn kind(&self) -> MemoryKind {
        if self.device.is_some() { MemoryKind::Device } else { MemoryKind::Host }
    }
}

/// The memory of a Python object during a call, which gives it back at its end, however it ends.
pub(crate) struct Memory<'py> {
    py: Python<'py>,
    range: Range,
    owner: Option<Owner>,
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        if let Some(owner) = self.owner.take() {
            owner.release(self.py);
        }
    }
}

impl<'py> Memory<'py> {
    pub(crate) fn new(py: Python<'py>, range: Range, owner: Owner) -> Self {
        Self { py, range, owner: Some(owner) }
    }

    /// The memory of an argument that is only read.
    pub(crate) fn source(object: &Bound<'py, PyAny>, argument: &str) -> PyResult<Self> {
        // SAFETY: the object is alive, and the interpreter is held.
        if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1 {
            return match BufferView::of(object, argument) {
                Ok(view) => Ok(Self::new(object.py(), view.range(), Owner::Buffer(view))),
                // The buffer protocol has no bfloat16, for example. DLPack has.
                Err(error) => dlpack::hold(object).ok().flatten().ok_or(error),
            };
        }
        if let Some(memory) = dlpack::hold(object)? {
            return Ok(memory);
        }
        if let Some(memory) = array_interface::hold(object, argument)? {
            return Ok(memory);
        }
        Err(PyTypeError::new_err(format!(
            "{argument} is {}, which has no memory that can be copied: it needs the buffer protocol, __dlpack__, \
             __cuda_array_interface__ or __array_interface__",
            object.get_type().name()?
        )))
    }

    /// The memory of an argument that is written.
    pub(crate) fn target(object: &Bound<'py, PyAny>, argument: &str) -> PyResult<Self> {
        let memory = Self::source(object, argument)?;
        if memory.range.is_read_only {
            let name = object.get_type().name()?;
            return Err(PyValueError::new_err(format!(
                "{argument} ({name}) is read-only: pass memory that can be written, a bytearray or a writable array"
            )));
        }
        Ok(memory)
    }

    pub(crate) fn range(&self) -> Range {
        self.range
    }

    pub(crate) fn len(&self) -> usize {
        self.range.length
    }

    pub(crate) fn kind(&self) -> MemoryKind {
        self.range.kind()
    }

    /// The name of the type of the elements.
    pub(crate) fn element(&self) -> String {
        match &self.owner {
            Some(Owner::Buffer(view)) => view.element(),
            Some(Owner::Object { element, .. }) => element.clone(),
            None => String::new(),
        }
    }

    /// Keeps the memory for an operation that outlives the call.
    pub(crate) fn hold(mut self) -> Held {
        Held { range: self.range, owner: self.owner.take() }
    }
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
        self.range.kind()
    }
}

// SAFETY: as above. That no other code accesses the target is the promise of the caller, as for
// every function of Python that writes into a buffer; Memferry makes no reference to it.
unsafe impl OwnedTarget for Held {
    fn target(&mut self) -> (*mut u8, usize) {
        (self.range.address as *mut u8, self.range.length)
    }

    fn target_memory(&self) -> MemoryKind {
        self.range.kind()
    }
}

impl Held {
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
pub(crate) fn check_lengths(source: &Memory<'_>, target: &Memory<'_>) -> PyResult<()> {
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
pub(crate) fn device_of(source: &Memory<'_>, target: &Memory<'_>) -> PyResult<Option<i32>> {
    match (source.range.device, target.range.device) {
        (Some(from), Some(to)) if from != to => Err(PyValueError::new_err(format!(
            "the source is on GPU {from} and the target on GPU {to}: copy through host memory, or \
             with the library that owns the arrays"
        ))),
        (from, to) => Ok(from.or(to)),
    }
}
