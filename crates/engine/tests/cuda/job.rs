//! One operation between places in ordinary memory and in the device.

use std::sync::Arc;

use memferry_engine::completion::Work;
use memferry_engine::cuda::DeviceMemory;
use memferry_engine::{Completion, Descriptor, Kernel, MemoryKind, Operation};
use memferry_sys::Pages;

/// An address and what kind of memory is there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) address: u64,
    pub(crate) kind: MemoryKind,
}

impl Place {
    pub(crate) fn plus(self, bytes: usize) -> Self {
        Self { address: self.address + bytes as u64, ..self }
    }
}

/// A place in ordinary memory. The memory must outlive the jobs on it.
pub(crate) fn host(pages: &Pages, at: usize) -> Place {
    assert!(at < pages.len());
    Place { address: pages.as_ptr() as u64 + at as u64, kind: MemoryKind::Host }
}

/// A place in the device. The memory must outlive the jobs on it.
pub(crate) fn device(memory: &DeviceMemory, at: usize) -> Place {
    assert!(at < memory.len());
    Place { address: memory.address() + at as u64, kind: MemoryKind::Device }
}

/// One operation between places whose memory the test keeps until the job is over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    operation: Operation,
    source: Place,
    target: Place,
    length: u64,
    value: u8,
    is_passing: bool,
    chunk_bytes: Option<u64>,
}

impl Job {
    pub(crate) fn copy(source: Place, target: Place, length: usize) -> Self {
        let (operation, length) = (Operation::Copy, length as u64);
        Self { operation, source, target, length, value: 0, is_passing: false, chunk_bytes: None }
    }

    pub(crate) fn fill(target: Place, length: usize, value: u8) -> Self {
        let nowhere = Place { address: 0, ..target };
        Self { operation: Operation::Fill, value, ..Self::copy(nowhere, target, length) }
    }

    pub(crate) fn operation(self, operation: Operation) -> Self {
        Self { operation, ..self }
    }

    pub(crate) fn passing(self, is_passing: bool) -> Self {
        Self { is_passing, ..self }
    }

    /// Whole, or cut into chunks of this size.
    pub(crate) fn cut(self, chunk_bytes: Option<usize>) -> Self {
        Self { chunk_bytes: chunk_bytes.map(|bytes| bytes as u64), ..self }
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.chunk_bytes.is_some()
    }

    pub(crate) fn completion(&self) -> Completion {
        let Self { operation, length, value, .. } = *self;
        let (source, target, kernel) = (self.source.address, self.target.address, Kernel::Cached);
        let Some(chunk) = self.chunk_bytes else { return Completion::whole() };
        // SAFETY: the places are a test's own, which keeps them until the job is over.
        let work = unsafe { Work::new(operation, kernel, source, target, length, value, chunk) };
        Completion::chunked(work.in_memory(self.source.kind, self.target.kind))
    }

    pub(crate) fn descriptor(&self, completion: &Arc<Completion>) -> Descriptor {
        if self.is_cut() {
            return Descriptor::chunks(completion.clone()).passing(self.is_passing);
        }
        let (source, target) = (self.source.address, self.target.address);
        // SAFETY: as above; nothing else reports to the completion.
        unsafe {
            Descriptor::new(self.operation, source, target, self.length)
                .memory(self.source.kind, self.target.kind)
                .value(self.value)
                .passing(self.is_passing)
                .completes(completion.clone())
        }
    }
}
