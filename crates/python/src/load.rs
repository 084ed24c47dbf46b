//! Loading of files.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use memferry::MemoryKind;
use memferry::load::{self, FileSource, Placement, ReadMode, SafetensorsFile, ShardedFiles};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::copies::ferry_for;
use crate::error::load_error;
use crate::release::drop_detached;
use crate::transfer::wait_with_signals;

/// One tensor of a file: the number of the file, name, type, shape, offset and length in bytes.
type TensorPlace = (usize, String, String, Vec<usize>, u64, usize);

fn place(file: usize, tensor: &load::Tensor) -> TensorPlace {
    let dtype = format!("{:?}", tensor.dtype);
    let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
    (file, name, dtype, shape, tensor.bytes.start, tensor.len())
}

/// The files of a model, open since their headers were read: what is loaded is what was checked,
/// also if other files have their names by then.
#[pyclass(module = "memferry", frozen)]
struct ModelFiles(Mutex<Option<Vec<FileSource>>>);

impl ModelFiles {
    fn of(files: Vec<FileSource>) -> Self {
        Self(Mutex::new(Some(files)))
    }
}

/// The files of a model, and its tensors.
type Model = (ModelFiles, Vec<TensorPlace>);

/// Reads and checks the header of a safetensors file.
#[pyfunction]
fn read_header(py: Python<'_>, path: PathBuf) -> PyResult<(Model, Py<PyDict>)> {
    let file = py.detach(|| SafetensorsFile::open(&path)).map_err(|error| load_error(&error))?;
    let tensors = file.tensors().iter().map(|tensor| place(0, tensor)).collect();
    let metadata = PyDict::new(py);
    for (key, value) in file.metadata() {
        metadata.set_item(key, value)?;
    }
    Ok(((ModelFiles::of(vec![file.into_source()]), tensors), metadata.unbind()))
}

/// Reads the index of a sharded model, and checks the headers of its files.
#[pyfunction]
fn read_index(py: Python<'_>, path: PathBuf) -> PyResult<Model> {
    let files = py.detach(|| ShardedFiles::open(&path)).map_err(|error| load_error(&error))?;
    let tensors = files.tensors().map(|(file, tensor)| place(file, tensor)).collect();
    Ok((ModelFiles::of(files.into_sources()), tensors))
}

/// Loads ranges of files to memory whose addresses the caller knows.
#[pyclass(module = "memferry", frozen)]
struct Loader {
    inner: load::Loader,
    kind: MemoryKind,
}

/// A range of a file and its target: number of the file, offset, address, length.
type PlacementTuple = (usize, u64, usize, usize);

#[pymethods]
impl Loader {
    /// `gpu=None` loads to host memory.
    #[new]
    #[pyo3(signature = (*, gpu=None, threads=None, mode="auto", block_bytes=None))]
    fn new(
        py: Python<'_>,
        gpu: Option<i32>,
        threads: Option<usize>,
        mode: &str,
        block_bytes: Option<usize>,
    ) -> PyResult<Self> {
        let mode = match mode {
            "auto" => ReadMode::Auto,
            "cached" => ReadMode::Cached,
            "direct" => ReadMode::Direct,
            other => {
                return Err(PyValueError::new_err(format!(
                    "{other:?} is not a way to read: \"auto\", \"cached\" or \"direct\""
                )));
            }
        };
        let mut builder = load::Loader::builder().read_mode(mode);
        if let Some(threads) = threads {
            builder = builder.threads(threads);
        }
        if let Some(bytes) = block_bytes {
            builder = builder.block_bytes(bytes);
        }
        let ferry = ferry_for(py, gpu)?;
        let kind = if gpu.is_some() { MemoryKind::Device } else { MemoryKind::Host };
        let inner = builder.build(ferry).map_err(|error| load_error(&error))?;
        Ok(Self { inner, kind })
    }

    #[getter]
    fn threads(&self) -> usize {
        self.inner.threads()
    }

    /// Starts to load. `targets` keeps the memory at the addresses alive until the load has ended.
    fn start(
        &self,
        py: Python<'_>,
        files: &Bound<'_, ModelFiles>,
        placements: Vec<PlacementTuple>,
        targets: Py<PyAny>,
    ) -> PyResult<Loading> {
        let files = files.get().0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let files = files.ok_or_else(|| PyValueError::new_err("the files were loaded already"))?;
        let loading = py.detach(|| {
            let placements: Vec<_> = placements
                .iter()
                .map(|&(file, offset, address, length)| {
                    Placement::new(file, offset, address as *mut u8, length)
                })
                .collect();
            // SAFETY: the caller, a module of this package, takes the addresses from tensors that
            // it has just allocated, each as long as its range, and passes them as `targets`, which
            // the returned object keeps until the load has ended.
            unsafe { self.inner.start_raw(files, &placements, self.kind) }
        });
        let loading = loading.map_err(|error| load_error(&error))?;
        Ok(Loading { inner: Mutex::new(Some(loading)), targets: Mutex::new(Some(targets)) })
    }
}

/// A load in progress.
#[pyclass(module = "memferry", frozen, weakref)]
struct Loading {
    inner: Mutex<Option<load::Loading>>,
    targets: Mutex<Option<Py<PyAny>>>,
}

impl Drop for Loading {
    fn drop(&mut self) {
        // Ends the threads before the targets are given up.
        drop_detached(self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}

#[pymethods]
impl Loading {
    /// `(delivered, total)` in bytes.
    #[getter]
    fn progress(&self, py: Python<'_>) -> (u64, u64) {
        py.detach(|| {
            let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            inner.as_ref().map_or((0, 0), |it| (it.delivered_bytes(), it.total_bytes()))
        })
    }

    /// Waits until the load has ended, `timeout` seconds at most. Returns its report, or `None` if
    /// it goes on.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Py<PyDict>>> {
        let ended = wait_with_signals(py, timeout, |step: Duration| {
            let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(loading) = inner.as_mut() else {
                return Some(Err(load::LoadError::Cancelled));
            };
            let ended = loading.wait_timeout(step);
            if ended.is_some() {
                *inner = None;
            }
            ended
        })?;
        let Some(ended) = ended else { return Ok(None) };
        drop(self.targets.lock().unwrap_or_else(PoisonError::into_inner).take());
        let report = ended.map_err(|error| load_error(&error))?;
        let shown = PyDict::new(py);
        shown.set_item("nbytes", report.bytes)?;
        shown.set_item("seconds", report.elapsed.as_secs_f64())?;
        shown.set_item("cpu_seconds", report.cpu_time.as_secs_f64())?;
        shown.set_item("cached_bytes", report.cached_bytes)?;
        shown.set_item("direct_bytes", report.direct_bytes)?;
        shown.set_item("buffered_bytes", report.buffered_bytes)?;
        shown.set_item("threads", report.threads)?;
        shown.set_item("staging_bytes", report.staging_bytes)?;
        Ok(Some(shown.unbind()))
    }

    /// Ends the load, and returns when nobody writes to the targets any more.
    fn cancel(&self, py: Python<'_>) {
        // Under the lock: whoever waits for the load returns after its threads have ended.
        py.detach(|| drop(self.inner.lock().unwrap_or_else(PoisonError::into_inner).take()));
        drop(self.targets.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// Adds the calls to the module.
pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Loader>()?;
    module.add_class::<ModelFiles>()?;
    module.add_class::<Loading>()?;
    module.add_function(wrap_pyfunction!(read_header, module)?)?;
    module.add_function(wrap_pyfunction!(read_index, module)?)
}
