//! Checksums, copies with one, and copies to two targets, of host memory.

use memferry::{Request, TransferOutput};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::copies::ferry_for;
use crate::error::{Error, copy_error};
use crate::memory::{Memory, check_lengths};
use crate::release;
use memferry::MemoryKind;

/// Runs a request over the memory of objects.
///
/// # Safety
/// The memory of the request must be that of the objects.
unsafe fn run(
    py: Python<'_>,
    request: Request<'_>,
    memory: &[Memory<'_>],
) -> PyResult<TransferOutput> {
    if memory.iter().any(|memory| memory.kind() != MemoryKind::Host) {
        return Err(PyValueError::new_err("only host memory can be used: copy it there first"));
    }
    let ferry = ferry_for(py, None)?;
    // SAFETY: the objects are held until after the request is complete.
    let outcome = py.detach(|| unsafe { ferry.run_raw(request) });
    outcome.map_err(|error| copy_error(&error))
}

fn crc_of(output: TransferOutput) -> PyResult<u32> {
    output.crc.ok_or_else(|| Error::new_err("the transfer returned no CRC"))
}

/// The CRC-32C of the bytes of an object.
#[pyfunction]
fn crc(py: Python<'_>, source: &Bound<'_, PyAny>) -> PyResult<u32> {
    release::drain(py);
    let source = Memory::source(source, "source")?;
    let range = source.range();
    let request = Request::crc(range.address as *const u8, range.length);
    // SAFETY: the range is that of the object.
    crc_of(unsafe { run(py, request, &[source]) }?)
}

/// Copies the bytes of `source` to `target`; returns their CRC-32C when they are there.
#[pyfunction]
#[pyo3(signature = (target, source))]
fn copy_crc(py: Python<'_>, target: &Bound<'_, PyAny>, source: &Bound<'_, PyAny>) -> PyResult<u32> {
    release::drain(py);
    let (source, target) = (Memory::source(source, "source")?, Memory::target(target, "target")?);
    check_lengths(&source, &target)?;
    let (from, to) = (source.range(), target.range());
    let request = Request::copy_crc(from.address as *const u8, to.address as *mut u8, from.length);
    // SAFETY: the ranges are those of the objects.
    crc_of(unsafe { run(py, request, &[source, target]) }?)
}

/// Copies the bytes of `source` to two targets, and returns when they are there.
#[pyfunction]
#[pyo3(signature = (first, second, source))]
fn dualcast(
    py: Python<'_>,
    first: &Bound<'_, PyAny>,
    second: &Bound<'_, PyAny>,
    source: &Bound<'_, PyAny>,
) -> PyResult<()> {
    release::drain(py);
    let (source, first) = (Memory::source(source, "source")?, Memory::target(first, "first")?);
    let second = Memory::target(second, "second")?;
    check_lengths(&source, &first)?;
    check_lengths(&source, &second)?;
    let (from, a, b) = (source.range(), first.range(), second.range());
    let request = Request::dualcast(
        from.address as *const u8,
        a.address as *mut u8,
        b.address as *mut u8,
        from.length,
    );
    // SAFETY: the ranges are those of the objects.
    unsafe { run(py, request, &[source, first, second]) }.map(drop)
}

/// Adds the functions to the module.
pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(crc, module)?)?;
    module.add_function(wrap_pyfunction!(copy_crc, module)?)?;
    module.add_function(wrap_pyfunction!(dualcast, module)?)
}
