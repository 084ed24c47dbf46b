//! The collective operations of a job: what is reduced and how, from objects of Python.

use std::cell::RefCell;

use memferry::message::{self, ElementType, Job, ReduceOp, Reduction, Stop};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};

use crate::error::message_error;
use crate::memory::Memory;

thread_local! {
    /// The exception that ended an operation of this thread on all ranks: of a signal handler, or of a function that
    /// combines.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Whether a handler of a signal has raised an exception. A waiting operation asks from time to time.
fn is_interrupted() -> bool {
    Python::attach(|py| match py.check_signals() {
        Ok(()) => false,
        Err(error) => {
            RAISED.set(Some(error));
            true
        }
    })
}

/// Runs an operation while other threads of Python run.
pub(crate) fn run(
    py: Python<'_>,
    job: &Job,
    call: impl FnOnce(&Job) -> Result<(), message::Error> + Send,
) -> PyResult<()> {
    job.set_interrupt(is_interrupted);
    RAISED.set(None);
    let outcome = py.detach(|| call(job));
    match (RAISED.take(), outcome) {
        (Some(error), _) => Err(error),
        (None, Ok(())) => Ok(()),
        (None, Err(error)) => Err(message_error(&error)),
    }
}

/// Memory of the host, as an address that other threads may have.
#[derive(Clone, Copy)]
pub(crate) struct HostMemory {
    address: usize,
    pub(crate) bytes: usize,
}

impl HostMemory {
    pub(crate) fn of(memory: &Memory<'_>) -> PyResult<Self> {
        let range = memory.range();
        match range.device {
            None => Ok(Self { address: range.address, bytes: range.length }),
            Some(_) => Err(PyValueError::new_err(
                "collective operations take memory of the host: copy the array there first",
            )),
        }
    }

    pub(crate) fn pointer(self) -> *mut u8 {
        self.address as *mut u8
    }

    /// Checks that it has as many bytes as the operation needs.
    pub(crate) fn expect(self, bytes: usize, what: &str) -> PyResult<()> {
        if self.bytes == bytes {
            return Ok(());
        }
        let found = self.bytes;
        Err(PyValueError::new_err(format!("{what} has {found} bytes, and must have {bytes}")))
    }
}

/// The memory for the result of an operation, of the same type as the data.
pub(crate) fn out<'py>(out: &Bound<'py, PyAny>, data: &Memory<'_>) -> PyResult<Memory<'py>> {
    let target = Memory::target(out, "out")?;
    let (from, into) = (data.element(), target.element());
    if from == into {
        return Ok(target);
    }
    Err(PyTypeError::new_err(format!(
        "data has elements of the type {from} and out of {into}: pass arrays of one type, or a view of out as {from}"
    )))
}

/// The memory for the result of an operation that may be in place.
pub(crate) fn out_or<'py>(
    other: Option<&Bound<'py, PyAny>>,
    data: &Bound<'py, PyAny>,
    source: &Memory<'_>,
) -> PyResult<Memory<'py>> {
    other.map_or_else(|| Memory::target(data, "data"), |other| out(other, source))
}

/// The type of elements that are reduced, and the format for a view of them.
fn element_type(data: &Memory<'_>) -> PyResult<(ElementType, &'static str)> {
    let name = data.element();
    Ok(match name.as_str() {
        "int8" => (ElementType::I8, "b"),
        "int16" => (ElementType::I16, "h"),
        "int32" => (ElementType::I32, "i"),
        "int64" => (ElementType::I64, "q"),
        "uint8" => (ElementType::U8, "B"),
        "bool" => (ElementType::U8, "?"),
        "uint16" => (ElementType::U16, "H"),
        "uint32" => (ElementType::U32, "I"),
        "uint64" => (ElementType::U64, "Q"),
        "float32" => (ElementType::F32, "f"),
        "float64" => (ElementType::F64, "d"),
        _ => {
            return Err(PyTypeError::new_err(format!(
                "elements of the type {name} cannot be reduced: pass integers of 8 to 64 bits, float32 or float64"
            )));
        }
    })
}

fn operation(name: &str) -> PyResult<ReduceOp> {
    Ok(match name {
        "sum" => ReduceOp::Sum,
        "product" => ReduceOp::Product,
        "min" => ReduceOp::Min,
        "max" => ReduceOp::Max,
        "and" => ReduceOp::BitAnd,
        "or" => ReduceOp::BitOr,
        "xor" => ReduceOp::BitXor,
        "logical_and" => ReduceOp::LogicalAnd,
        "logical_or" => ReduceOp::LogicalOr,
        "logical_xor" => ReduceOp::LogicalXor,
        _ => {
            return Err(PyValueError::new_err(format!(
                "no operation {name:?}: sum, product, min, max, and, or, xor, logical_and, logical_or, logical_xor, or \
                 a function"
            )));
        }
    })
}

/// How the elements of an object are reduced.
pub(crate) enum Operation {
    Numbers(ElementType, ReduceOp),
    Function { function: Py<PyAny>, element_bytes: usize, format: &'static str },
}

impl Operation {
    /// From the argument `op`: a name, or a function of two memoryviews, the first of which gets the result.
    pub(crate) fn of(op: &Bound<'_, PyAny>, data: &Memory<'_>) -> PyResult<Self> {
        let (element, format) = element_type(data)?;
        if let Ok(name) = op.extract::<String>() {
            return Ok(Self::Numbers(element, operation(&name)?));
        }
        if !op.is_callable() {
            return Err(PyTypeError::new_err(
                "op is neither the name of an operation nor a function",
            ));
        }
        Ok(Self::Function { function: op.clone().unbind(), element_bytes: element.bytes(), format })
    }

    pub(crate) fn element_bytes(&self) -> usize {
        match self {
            Self::Numbers(element, _) => element.bytes(),
            Self::Function { element_bytes, .. } => *element_bytes,
        }
    }

    /// Calls `reduce` with the reduction.
    pub(crate) fn with<R>(&self, reduce: impl FnOnce(&mut Reduction<'_>) -> R) -> R {
        match self {
            Self::Numbers(element, operation) => {
                reduce(&mut Reduction::Numbers(*element, *operation))
            }
            Self::Function { function, element_bytes, format } => {
                let element_bytes = *element_bytes;
                let combine = &mut |into: *mut u8, from: *const u8, count: usize| {
                    let memory = (into, from, count * element_bytes);
                    Python::attach(|py| call_function(py, function, format, memory)).map_err(
                        |error| {
                            RAISED.set(Some(error));
                            Stop
                        },
                    )
                };
                reduce(&mut Reduction::Function { element_bytes, combine })
            }
        }
    }
}

/// Calls a function with views of copies, which it may keep, and copies the result back.
fn call_function(
    py: Python<'_>,
    function: &Py<PyAny>,
    format: &str,
    (into, from, bytes): (*mut u8, *const u8, usize),
) -> PyResult<()> {
    // SAFETY: the reduction guarantees both, and that nothing else accesses them during the call.
    let (mine, other) = unsafe {
        (std::slice::from_raw_parts_mut(into, bytes), std::slice::from_raw_parts(from, bytes))
    };
    let result = PyByteArray::new(py, mine);
    let memoryview = py.import("builtins")?.getattr("memoryview")?;
    let other = PyBytes::new(py, other);
    let views = (
        memoryview.call1((&result,))?.call_method1("cast", (format,))?,
        memoryview.call1((&other,))?.call_method1("cast", (format,))?,
    );
    function.call1(py, views)?;
    let result = result.to_vec();
    if result.len() != bytes {
        let length = result.len();
        return Err(PyValueError::new_err(format!(
            "the function has resized the memory of its first argument from {bytes} to {length} bytes: write into it"
        )));
    }
    mine.copy_from_slice(&result);
    Ok(())
}
