//! Copies, fills and comparisons, by ferries that are opened when they are first needed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use memferry::plan::CopyQuery;
use memferry::{EngineSelection, Ferry, MemoryKind, Region, Request};
use memferry_sys::cuda::{Cuda, CudaDriver, CudaStream, MemcpyKind};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{build_error, copy_error};
use crate::memory::{Held, Memory, check_lengths, device_of};
use crate::release::{self, drop_detached};
use crate::transfer::Transfer;

/// Copies of this size and less are made without letting other threads of Python run: that would
/// take longer than the copy.
const SHORT_BYTES: usize = 32 << 10;

/// Copies of this size and less to a GPU are left to its driver: longer ones are faster by several
/// channels.
const SHORT_DEVICE_BYTES: usize = 4 << 20;

/// The ferry without a GPU, and one for each GPU in use.
static FERRIES: Mutex<Option<HashMap<Option<i32>, Ferry>>> = Mutex::new(None);

/// The ferry for host memory, or for a GPU.
pub(crate) fn ferry_for(py: Python<'_>, device: Option<i32>) -> PyResult<Ferry> {
    let lock = || FERRIES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(ferry) = lock().as_ref().and_then(|ferries| ferries.get(&device)) {
        return Ok(ferry.clone());
    }
    // Opening takes up to half a second for a GPU. Two threads may both do it; one wins.
    let gpu = match device {
        None => EngineSelection::Off,
        Some(number) => EngineSelection::Devices(vec![number.to_string()]),
    };
    let ferry = py.detach(|| Ferry::builder().gpu(gpu).build());
    let ferry = ferry.map_err(|error| build_error(&error))?;
    Ok(lock().get_or_insert_default().entry(device).or_insert(ferry).clone())
}

/// The drivers of the GPUs whose streams were waited for.
static DRIVERS: Mutex<Option<HashMap<i32, Arc<Cuda>>>> = Mutex::new(None);

/// The driver of a GPU.
fn driver_of(py: Python<'_>, device: i32) -> PyResult<Arc<Cuda>> {
    // The lock is held only with the interpreter: a forked child finds it free.
    let lock = || DRIVERS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(driver) = lock().get_or_insert_default().get(&device) {
        return Ok(driver.clone());
    }
    let opened = py.detach(|| Cuda::open(device.unsigned_abs() as usize));
    let opened = Arc::new(opened.map_err(crate::error::Error::new_err)?);
    Ok(lock().get_or_insert_default().entry(device).or_insert(opened).clone())
}

/// Waits until a stream of another library has finished what it was given so far.
pub(crate) fn wait_for_stream(py: Python<'_>, device: i32, stream: u64) -> PyResult<()> {
    let driver = driver_of(py, device)?;
    // SAFETY: the handle is the exporter's, who keeps it valid, or names a default stream.
    let stream = unsafe { CudaStream::from_raw(stream) };
    let waited = py.detach(|| driver.with_current(&mut || driver.synchronize(stream)));
    waited.map_err(|error| crate::error::Error::new_err(error.to_string()))
}

/// The GPU that has an address: the array interface does not say it, but the driver does.
pub(crate) fn device_of_address(address: usize) -> PyResult<i32> {
    const DEVICE_ORDINAL: i32 = 9;
    type PointerGetAttribute = unsafe extern "C" fn(*mut libc::c_void, i32, u64) -> i32;
    // SAFETY: loading the driver has no effects of its own; whoever exports memory of a GPU has
    // loaded it before, and it is never unloaded.
    let symbol = unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL);
        if library.is_null() {
            return Err(crate::error::Error::new_err(
                "the array is on a GPU, but no NVIDIA driver can be loaded (libcuda.so.1)",
            ));
        }
        libc::dlsym(library, c"cuPointerGetAttribute".as_ptr())
    };
    if symbol.is_null() {
        return Err(crate::error::Error::new_err("the NVIDIA driver is too old"));
    }
    // SAFETY: this is the signature of the driver's call.
    let call = unsafe { std::mem::transmute::<*mut libc::c_void, PointerGetAttribute>(symbol) };
    let mut device = 0i32;
    // SAFETY: the attribute is an `int`, which the first argument points to.
    let code = unsafe { call((&raw mut device).cast(), DEVICE_ORDINAL, address as u64) };
    if code == 0 {
        return Ok(device);
    }
    Err(crate::error::Error::new_err(format!(
        "the driver does not know the memory at {address:#x} (error {code}): was the array freed?"
    )))
}

/// Copies the bytes of `source` to `target`, and returns when they are there.
#[pyfunction]
#[pyo3(signature = (target, source))]
fn copy(py: Python<'_>, target: &Bound<'_, PyAny>, source: &Bound<'_, PyAny>) -> PyResult<()> {
    release::drain(py);
    let (source, target) = (Memory::source(source, "source")?, Memory::target(target, "target")?);
    check_lengths(&source, &target)?;
    let ferry = ferry_for(py, device_of(&source, &target)?)?;
    let (from, to) = (source.range(), target.range());
    let run = || {
        let request = Request::copy(from.address as *const u8, to.address as *mut u8, from.length)
            .memory(from.kind(), to.kind());
        // SAFETY: both ranges are held until after the copy.
        unsafe { ferry.run_raw(request) }.map(|_| ())
    };
    let is_short = from.length <= SHORT_BYTES && from.device.or(to.device).is_none();
    let outcome = if is_short { run() } else { py.detach(run) };
    outcome.map_err(|error| copy_error(&error))
}

/// Copies between addresses, for the modules of this package, which keep the memory alive. A number
/// below 0 is host memory, others are GPUs. The copy follows the work in `stream`, which is a stream of
/// the GPU.
#[pyfunction]
fn copy_addresses(
    py: Python<'_>,
    target: usize,
    source: usize,
    nbytes: usize,
    target_gpu: i32,
    source_gpu: i32,
    stream: u64,
) -> PyResult<()> {
    let kind = |gpu: i32| if gpu < 0 { MemoryKind::Host } else { MemoryKind::Device };
    let gpu = target_gpu.max(source_gpu);
    if target_gpu >= 0 && source_gpu >= 0 && target_gpu != source_gpu {
        return Err(PyValueError::new_err(
            "copies between GPUs are for the library that owns them",
        ));
    }
    if source_gpu < 0 && target_gpu >= 0 && nbytes <= SHORT_DEVICE_BYTES {
        // In the stream itself the copy needs no wait for the work before it.
        let driver = driver_of(py, gpu)?;
        // SAFETY: the handle is that of the current stream, which the caller keeps.
        let stream = unsafe { CudaStream::from_raw(stream) };
        let (kind, from, to) = (MemcpyKind::HostToDevice, source as u64, target as u64);
        let mut outcome = Ok(());
        let entered = py.detach(|| {
            // SAFETY: the caller holds the tensors that have these addresses and this many bytes, and
            // the call returns when the copy is complete.
            driver.with_current(&mut || unsafe {
                outcome = driver.copy_sync(kind, from, to, nbytes, stream);
            })
        });
        if entered.and(outcome).is_ok() {
            return Ok(());
        }
        // The driver refuses memory that crosses the edge of a registration: the ferry stages it.
    }
    if gpu >= 0 {
        wait_for_stream(py, gpu, stream)?;
    }
    let ferry = ferry_for(py, (gpu >= 0).then_some(gpu))?;
    let outcome = py.detach(|| {
        let request = Request::copy(source as *const u8, target as *mut u8, nbytes)
            .memory(kind(source_gpu), kind(target_gpu));
        // SAFETY: the caller, a module of this package, holds the tensors that have these addresses
        // and this many bytes.
        unsafe { ferry.run_raw(request) }
    });
    outcome.map(|_| ()).map_err(|error| copy_error(&error))
}

/// Starts a copy of the bytes of `source` to `target`.
#[pyfunction]
#[pyo3(signature = (target, source))]
fn icopy(
    py: Python<'_>,
    target: &Bound<'_, PyAny>,
    source: &Bound<'_, PyAny>,
) -> PyResult<Transfer> {
    release::drain(py);
    let (source, target) = (Memory::source(source, "source")?, Memory::target(target, "target")?);
    check_lengths(&source, &target)?;
    let ferry = ferry_for(py, device_of(&source, &target)?)?;
    Transfer::start(py, &ferry, source, target)
}

/// Starts to copy each of `sources` to the target at the same place of `targets`, as one transfer.
#[pyfunction]
#[pyo3(signature = (targets, sources))]
fn icopy_many(
    py: Python<'_>,
    targets: &Bound<'_, PyAny>,
    sources: &Bound<'_, PyAny>,
) -> PyResult<Transfer> {
    release::drain(py);
    let sources = each(sources, "sources", Memory::source)?;
    let targets = each(targets, "targets", Memory::target)?;
    if sources.iter().chain(&targets).any(|held| held.kind() != MemoryKind::Host) {
        return Err(PyValueError::new_err("icopy_many copies host memory: use icopy for a GPU's"));
    }
    Transfer::start_many(py, &ferry_for(py, None)?, sources, targets)
}

/// Starts to set every byte of all `targets` to `value`, as one transfer.
#[pyfunction]
#[pyo3(signature = (targets, value=0))]
fn ifill_many(py: Python<'_>, targets: &Bound<'_, PyAny>, value: u8) -> PyResult<Transfer> {
    release::drain(py);
    let targets = each(targets, "targets", Memory::target)?;
    if targets.iter().any(|held| held.kind() != MemoryKind::Host) {
        return Err(PyValueError::new_err("ifill_many fills host memory: use fill for a GPU's"));
    }
    Transfer::start_fills(py, &ferry_for(py, None)?, targets, value)
}

/// The memory of each object of an iterable argument.
fn each<'py>(
    objects: &Bound<'py, PyAny>,
    argument: &str,
    memory: fn(&Bound<'py, PyAny>, &str) -> PyResult<Memory<'py>>,
) -> PyResult<Vec<Memory<'py>>> {
    let objects = objects.try_iter()?.enumerate();
    objects.map(|(at, object)| memory(&object?, &format!("{argument}[{at}]"))).collect()
}

/// Sets every byte of `target` to `value`.
#[pyfunction]
#[pyo3(signature = (target, value=0))]
fn fill(py: Python<'_>, target: &Bound<'_, PyAny>, value: u8) -> PyResult<()> {
    release::drain(py);
    let target = Memory::target(target, "target")?;
    let ferry = ferry_for(py, target.range().device)?;
    let (to, kind) = (target.range(), target.kind());
    let outcome = py.detach(|| {
        let request = Request::fill(to.address as *mut u8, value, to.length).memory(kind, kind);
        // SAFETY: the range is held until after the fill.
        unsafe { ferry.run_raw(request) }
    });
    outcome.map(|_| ()).map_err(|error| copy_error(&error))
}

/// The position of the first byte in which two objects differ; `None` if they are equal.
#[pyfunction]
fn compare(
    py: Python<'_>,
    left: &Bound<'_, PyAny>,
    right: &Bound<'_, PyAny>,
) -> PyResult<Option<u64>> {
    release::drain(py);
    let (left, right) = (Memory::source(left, "left")?, Memory::source(right, "right")?);
    check_lengths(&left, &right)?;
    if left.kind() != MemoryKind::Host || right.kind() != MemoryKind::Host {
        return Err(PyValueError::new_err("only host memory can be compared: copy it there first"));
    }
    let ferry = ferry_for(py, None)?;
    let (a, b) = (left.range(), right.range());
    let outcome = py.detach(|| {
        let request = Request::compare(a.address as *const u8, b.address as *const u8, a.length);
        // SAFETY: both ranges are held until after the comparison.
        unsafe { ferry.run_raw(request) }
    });
    outcome.map(|output| output.difference).map_err(|error| copy_error(&error))
}

/// Memory that stays registered with a GPU, for copies at full speed.
#[pyclass(module = "memferry", frozen)]
struct Registration {
    held: Mutex<Option<(Region, Held)>>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        drop_detached(self.held.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}

#[pymethods]
impl Registration {
    /// Ends the registration.
    fn close(&self, py: Python<'_>) {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((region, held)) = held {
            py.detach(|| drop(region));
            held.release(py);
        }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }
}

/// Registers the memory of an object with a GPU until the registration is closed.
#[pyfunction]
#[pyo3(signature = (memory, gpu=0))]
fn register(py: Python<'_>, memory: &Bound<'_, PyAny>, gpu: i32) -> PyResult<Registration> {
    let memory = Memory::source(memory, "memory")?;
    let ferry = ferry_for(py, Some(gpu))?;
    let range = memory.range();
    // SAFETY: the memory is held, and so stays mapped, until the region is dropped.
    let region = py.detach(|| unsafe { ferry.register(range.address as *const u8, range.length) });
    let region = region.map_err(|error| crate::error::Error::new_err(error.to_string()))?;
    Ok(Registration { held: Mutex::new(Some((region, memory.hold()))) })
}

/// Counters of the copies of this process: one dictionary for each engine's channel.
#[pyfunction]
#[pyo3(signature = (gpu=None))]
fn statistics<'py>(py: Python<'py>, gpu: Option<i32>) -> PyResult<Bound<'py, PyDict>> {
    let statistics = ferry_for(py, gpu)?.statistics();
    let all = PyDict::new(py);
    all.set_item("caller_chunks", statistics.caller_chunks)?;
    let engines = PyDict::new(py);
    for (name, channels) in &statistics.engines {
        let list = channels.iter().map(|channel| {
            let one = PyDict::new(py);
            one.set_item("submitted", channel.submitted)?;
            one.set_item("completed", channel.completed)?;
            one.set_item("failed", channel.failed)?;
            one.set_item("bytes", channel.bytes)?;
            Ok(one)
        });
        engines.set_item(name, list.collect::<PyResult<Vec<_>>>()?)?;
    }
    all.set_item("engines", engines)?;
    Ok(all)
}

/// How a copy of this size would be executed, and why.
#[pyfunction]
#[pyo3(signature = (nbytes, *, blocking=true, gpu=None))]
fn explain(py: Python<'_>, nbytes: u64, blocking: bool, gpu: Option<i32>) -> PyResult<String> {
    let ferry = ferry_for(py, gpu)?;
    let mut query = CopyQuery::copy(nbytes, blocking);
    if gpu.is_some() {
        query.target_memory = MemoryKind::Device;
    }
    let plan = ferry.explain(&query);
    let plan = plan.ok_or_else(|| copy_error(&ferry.plan_context().no_engine(&query).into()))?;
    Ok(format!("{:?}: {}", plan.strategy, plan.reason))
}

/// Adds the functions to the module.
pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Registration>()?;
    module.add_function(wrap_pyfunction!(copy, module)?)?;
    module.add_function(wrap_pyfunction!(copy_addresses, module)?)?;
    module.add_function(wrap_pyfunction!(icopy, module)?)?;
    module.add_function(wrap_pyfunction!(icopy_many, module)?)?;
    module.add_function(wrap_pyfunction!(fill, module)?)?;
    module.add_function(wrap_pyfunction!(ifill_many, module)?)?;
    module.add_function(wrap_pyfunction!(compare, module)?)?;
    crate::checksums::add(module)?;
    module.add_function(wrap_pyfunction!(register, module)?)?;
    module.add_function(wrap_pyfunction!(statistics, module)?)?;
    module.add_function(wrap_pyfunction!(explain, module)?)
}
