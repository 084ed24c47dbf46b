//! Endpoints and jobs.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use memferry::message::{self, Rights, Source, TAG_ALL, TAG_ANY};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::collective::{self, HostMemory, Operation as ReduceOperation};
use crate::error::message_error;
use crate::memory::Memory;
use crate::operation::{Operation, Status};
use crate::release::{self, drop_detached};
use crate::transfer::wait_with_signals;
use crate::window::{RemoteWindow, Window};

/// A peer of an endpoint.
#[pyclass(module = "memferry", frozen, eq, hash)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Peer(pub(crate) message::Peer);

#[pymethods]
impl Peer {
    fn __repr__(&self) -> String {
        format!("<memferry.Peer {:?}>", self.0)
    }
}

/// One process's address for tagged messages with many peers.
#[pyclass(module = "memferry", frozen, weakref)]
pub(crate) struct Endpoint {
    inner: Mutex<Option<message::Endpoint>>,
    /// Keeps the descriptor of `fileno` open.
    ready: Mutex<Option<message::ReadyFd>>,
}

impl Endpoint {
    fn of(endpoint: message::Endpoint) -> Self {
        Self { inner: Mutex::new(Some(endpoint)), ready: Mutex::default() }
    }

    pub(crate) fn get(&self) -> PyResult<message::Endpoint> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.clone().ok_or_else(|| message_error(&message::Error::Closed))
    }
}

impl Drop for Endpoint {
    /// Closing tells the peers, which may take a moment: other threads of Python run meanwhile.
    fn drop(&mut self) {
        drop_detached(self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// The source and the tags of a receive: `None` is any.
fn wanted(
    source: Option<&Bound<'_, Peer>>,
    tag: Option<u64>,
    mask: Option<u64>,
) -> (Source, u64, u64) {
    let source = source.map_or(Source::Any, |peer| Source::Peer(peer.get().0));
    let mask = mask.unwrap_or(if tag.is_some() { TAG_ALL } else { TAG_ANY });
    (source, tag.unwrap_or(0), mask)
}

#[pymethods]
impl Endpoint {
    /// Opens an endpoint with a name that peers connect to. With `background`, a thread makes
    /// progress while the program computes.
    #[new]
    #[pyo3(signature = (name, *, background=false))]
    fn new(py: Python<'_>, name: &str, background: bool) -> PyResult<Self> {
        let builder = message::Endpoint::builder().background(background);
        let opened = py.detach(|| builder.open(name));
        opened.map(Self::of).map_err(|error| message_error(&error))
    }

    /// The name it was opened with.
    #[getter]
    fn name(&self) -> PyResult<String> {
        Ok(self.get()?.name().to_owned())
    }

    /// Connects to the endpoint of this name.
    fn connect(&self, py: Python<'_>, name: &str) -> PyResult<Peer> {
        let endpoint = self.get()?;
        py.detach(|| endpoint.connect(name)).map(Peer).map_err(|error| message_error(&error))
    }

    /// The peers that are connected.
    #[getter]
    fn peers(&self) -> PyResult<Vec<Peer>> {
        Ok(self.get()?.peers().into_iter().map(Peer).collect())
    }

    /// The name of a peer.
    fn name_of(&self, peer: &Bound<'_, Peer>) -> PyResult<String> {
        self.get()?.name_of(peer.get().0).map_err(|error| message_error(&error))
    }

    /// Starts a send of the bytes of `data`.
    #[pyo3(signature = (peer, data, tag=0))]
    fn isend(
        &self,
        py: Python<'_>,
        peer: &Bound<'_, Peer>,
        data: &Bound<'_, PyAny>,
        tag: u64,
    ) -> PyResult<Operation> {
        release::drain(py);
        let (endpoint, peer) = (self.get()?, peer.get().0);
        let data = host(Memory::source(data, "data")?)?.hold();
        Operation::start(py, py.detach(|| endpoint.isend(peer, tag, data)))
    }

    /// Starts a receive into `buffer`, from a peer or any, with a tag or any.
    #[pyo3(signature = (buffer, source=None, tag=None, *, mask=None))]
    fn irecv(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        source: Option<&Bound<'_, Peer>>,
        tag: Option<u64>,
        mask: Option<u64>,
    ) -> PyResult<Operation> {
        release::drain(py);
        let endpoint = self.get()?;
        let buffer = host(Memory::target(buffer, "buffer")?)?.hold();
        let (source, tag, mask) = wanted(source, tag, mask);
        Operation::start(py, py.detach(|| endpoint.irecv(source, tag, mask, buffer)))
    }

    /// Sends the bytes of `data`, and returns when the memory may be changed.
    #[pyo3(signature = (peer, data, tag=0, *, timeout=None))]
    fn send(
        &self,
        py: Python<'_>,
        peer: &Bound<'_, Peer>,
        data: &Bound<'_, PyAny>,
        tag: u64,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        self.isend(py, peer, data, tag)?.wait_until(py, timeout).map(|_| ())
    }

    /// Receives a message into `buffer`, from a peer or any, with a tag or any.
    #[pyo3(signature = (buffer, source=None, tag=None, *, mask=None, timeout=None))]
    fn recv(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        source: Option<&Bound<'_, Peer>>,
        tag: Option<u64>,
        mask: Option<u64>,
        timeout: Option<f64>,
    ) -> PyResult<Status> {
        self.irecv(py, buffer, source, tag, mask)?.wait_until(py, timeout)
    }

    /// The status of the first message that a receive would match. Waits for one, unless `timeout`
    /// seconds pass: then `None`; with a timeout of 0 it only looks.
    #[pyo3(signature = (source=None, tag=None, *, mask=None, timeout=None))]
    fn probe(
        &self,
        py: Python<'_>,
        source: Option<&Bound<'_, Peer>>,
        tag: Option<u64>,
        mask: Option<u64>,
        timeout: Option<f64>,
    ) -> PyResult<Option<Status>> {
        let endpoint = self.get()?;
        let (source, tag, mask) = wanted(source, tag, mask);
        let found = wait_with_signals(py, timeout, |step| {
            let probed = endpoint.iprobe(source, tag, mask).transpose();
            if probed.is_none() && !step.is_zero() {
                endpoint.progress_timeout(step);
                return endpoint.iprobe(source, tag, mask).transpose();
            }
            probed
        })?;
        match found.transpose().map_err(|error| message_error(&error))? {
            Some(status) => Status::new(py, status).map(Some),
            None => Ok(None),
        }
    }

    /// Makes progress; returns whether there was any.
    fn progress(&self, py: Python<'_>) -> PyResult<bool> {
        let endpoint = self.get()?;
        Ok(py.detach(|| endpoint.progress()))
    }

    /// A descriptor for event loops, readable while there is work: then call `progress`.
    fn fileno(&self) -> PyResult<i32> {
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        if ready.is_none() {
            *ready = Some(self.get()?.ready_fd().map_err(|error| message_error(&error))?);
        }
        Ok(ready.as_ref().map_or(-1, |ready| ready.as_fd().as_raw_fd()))
    }

    /// Exposes the memory of an object to peers, until the window is closed.
    #[pyo3(signature = (memory, *, read=true, write=true))]
    fn expose(
        &self,
        py: Python<'_>,
        memory: &Bound<'_, PyAny>,
        read: bool,
        write: bool,
    ) -> PyResult<Window> {
        let rights = match (read, write) {
            (true, true) => Rights::READ_WRITE,
            (true, false) => Rights::READ,
            (false, true) => Rights::WRITE,
            (false, false) => {
                return Err(PyValueError::new_err("peers must be allowed to read or to write"));
            }
        };
        let memory = match write {
            true => Memory::target(memory, "memory")?,
            false => Memory::source(memory, "memory")?,
        };
        let (endpoint, memory) = (self.get()?, host(memory)?);
        let is_read_only = memory.range().is_read_only;
        let held = memory.hold();
        match py.detach(|| endpoint.expose(held, rights)) {
            Ok(window) => Ok(Window::of(window, is_read_only)),
            Err(failed) => {
                let error = message_error(&failed.error);
                release::drop_now(py, failed);
                Err(error)
            }
        }
    }

    /// Attaches a window that a peer has exposed, by the bytes of its handle.
    fn attach(
        &self,
        py: Python<'_>,
        peer: &Bound<'_, Peer>,
        handle: &Bound<'_, PyBytes>,
    ) -> PyResult<RemoteWindow> {
        let bytes = handle.as_bytes().try_into().map_err(|_| {
            PyValueError::new_err("these bytes are not the handle of a window: wrong length")
        })?;
        let handle = message::WindowHandle::from_bytes(bytes)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let (endpoint, peer) = (self.get()?, peer.get().0);
        let attached = py.detach(|| endpoint.attach(peer, handle));
        attached.map(RemoteWindow::of).map_err(|error| message_error(&error))
    }

    /// Closes the endpoint: operations in flight end, and peers are told.
    fn close(&self, py: Python<'_>) {
        let endpoint = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(endpoint) = endpoint {
            py.detach(|| endpoint.close());
        }
        release::drain(py);
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }
}

/// Messages are of host memory.
pub(crate) fn host(memory: Memory<'_>) -> PyResult<Memory<'_>> {
    if memory.range().device.is_some() {
        return Err(PyValueError::new_err(
            "messages are of host memory: copy the array to the host first",
        ));
    }
    Ok(memory)
}

/// The endpoints of several processes, connected by rank.
#[pyclass(module = "memferry", frozen, weakref)]
pub(crate) struct Job {
    inner: message::Job,
    endpoint: Py<Endpoint>,
}

#[pymethods]
impl Job {
    /// Joins a job of `size` processes, and returns when all are there. Raises `Error` after `timeout`
    /// seconds, and names the rank that is missing.
    #[staticmethod]
    #[pyo3(signature = (name, rank, size, *, timeout=10.0))]
    fn join(py: Python<'_>, name: &str, rank: usize, size: usize, timeout: f64) -> PyResult<Self> {
        let timeout = Duration::try_from_secs_f64(timeout)
            .map_err(|error| PyValueError::new_err(format!("timeout: {error}")))?;
        let builder = message::EndpointBuilder::new().connect_timeout(timeout);
        let inner = py.detach(|| builder.join(name, rank, size));
        let inner = inner.map_err(|error| message_error(&error))?;
        let endpoint = Py::new(py, Endpoint::of(inner.endpoint().clone()))?;
        Ok(Self { inner, endpoint })
    }

    /// The endpoint of this process.
    #[getter]
    fn endpoint(&self, py: Python<'_>) -> Py<Endpoint> {
        self.endpoint.clone_ref(py)
    }

    #[getter]
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    #[getter]
    fn size(&self) -> usize {
        self.inner.size()
    }

    /// The peer with a rank.
    fn peer(&self, rank: usize) -> PyResult<Peer> {
        if rank >= self.inner.size() {
            let size = self.inner.size();
            return Err(PyIndexError::new_err(format!("rank {rank} of a job of {size}")));
        }
        Ok(Peer(self.inner.peer(rank)))
    }

    /// The rank of a peer; `None` if it does not belong to the job.
    fn rank_of(&self, peer: &Bound<'_, Peer>) -> Option<usize> {
        self.inner.rank_of(peer.get().0)
    }

    /// Waits until all ranks have called it.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        collective::run(py, &self.inner, message::Job::barrier)
    }

    /// Copies the bytes of rank `root` to the buffers of all ranks.
    #[pyo3(signature = (buffer, root=0))]
    fn broadcast(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>, root: usize) -> PyResult<()> {
        let memory = match root == self.inner.rank() {
            true => Memory::source(buffer, "buffer")?,
            false => Memory::target(buffer, "buffer")?,
        };
        let range = HostMemory::of(&memory)?;
        // SAFETY: the view keeps the memory in place; that no other code uses it is the promise of the caller.
        collective::run(py, &self.inner, |job| unsafe {
            job.broadcast_raw(range.pointer(), range.bytes, root)
        })
    }

    /// Reduces the elements of all ranks to all ranks: in place, or into `out`.
    #[pyo3(signature = (data, op=None, *, out=None))]
    fn allreduce(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        op: Option<&Bound<'_, PyAny>>,
        out: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.reduce_any(py, data, op, out, None)
    }

    /// Reduces the elements of all ranks to rank `root`: in place, or into `out`.
    #[pyo3(signature = (data, op=None, root=0, *, out=None))]
    fn reduce(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        op: Option<&Bound<'_, PyAny>>,
        root: usize,
        out: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.reduce_any(py, data, op, out, Some(root))
    }

    /// Copies the bytes of all ranks into `out` of rank `root`, in the order of the ranks.
    #[pyo3(signature = (data, out=None, root=0))]
    fn gather(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        root: usize,
    ) -> PyResult<()> {
        let (size, is_root) = (self.inner.size(), root == self.inner.rank());
        let source = Memory::source(data, "data")?;
        let from = HostMemory::of(&source)?;
        let target = match (out, is_root) {
            (Some(out), true) => Some(collective::out(out, &source)?),
            (None, true) => return Err(PyValueError::new_err("the root of a gather needs out")),
            (_, false) => None,
        };
        let into = target.as_ref().map_or(Ok(from), HostMemory::of)?;
        if is_root {
            into.expect(from.bytes * size, "out")?;
        }
        // SAFETY: as in `broadcast`.
        collective::run(py, &self.inner, |job| unsafe {
            job.gather_raw(from.pointer(), into.pointer(), from.bytes, root)
        })
    }

    /// Copies the bytes of all ranks into `out` of all ranks, in the order of the ranks.
    fn allgather(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let source = Memory::source(data, "data")?;
        let target = collective::out(out, &source)?;
        let (from, into) = (HostMemory::of(&source)?, HostMemory::of(&target)?);
        into.expect(from.bytes * self.inner.size(), "out")?;
        // SAFETY: as in `broadcast`.
        collective::run(py, &self.inner, |job| unsafe {
            job.allgather_raw(from.pointer(), into.pointer(), from.bytes)
        })
    }

    /// Copies the n-th of as many equal blocks of bytes as there are ranks to rank n: in place, or into `out`.
    #[pyo3(signature = (data, out=None))]
    fn alltoall(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let source = Memory::source(data, "data")?;
        let target = collective::out_or(out, data, &source)?;
        let (from, into) = (HostMemory::of(&source)?, HostMemory::of(&target)?);
        let block = from.bytes / self.inner.size();
        from.expect(block * self.inner.size(), "data, a block for each rank,")?;
        into.expect(from.bytes, "out")?;
        // SAFETY: as in `broadcast`.
        collective::run(py, &self.inner, |job| unsafe {
            job.alltoall_raw(from.pointer(), into.pointer(), block)
        })
    }
}

impl Job {
    fn reduce_any(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        op: Option<&Bound<'_, PyAny>>,
        out: Option<&Bound<'_, PyAny>>,
        root: Option<usize>,
    ) -> PyResult<()> {
        let sum = PyString::new(py, "sum");
        let source = Memory::source(data, "data")?;
        let operation = ReduceOperation::of(op.unwrap_or(sum.as_any()), &source)?;
        let from = HostMemory::of(&source)?;
        let target = match root.is_none_or(|root| root == self.inner.rank()) {
            true => Some(collective::out_or(out, data, &source)?),
            false => None,
        };
        let into = target.as_ref().map_or(Ok(from), HostMemory::of)?;
        into.expect(from.bytes, "out")?;
        let count = from.bytes / operation.element_bytes();
        collective::run(py, &self.inner, |job| {
            operation.with(|reduction| {
                let (from, into) = (from.pointer().cast_const(), into.pointer());
                // SAFETY: as in `broadcast`.
                unsafe {
                    match root {
                        Some(root) => job.reduce_raw(reduction, from, into, count, root),
                        None => job.allreduce_raw(reduction, from, into, count),
                    }
                }
            })
        })
    }
}
