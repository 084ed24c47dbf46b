//! One operation between addresses in host memory and in the device.

use std::sync::Arc;

use memferry_engine::DeviceBuffer;
use memferry_engine::completion::ChunkedWork;
use memferry_engine::{Completion, Descriptor, Kernel, MemoryKind, Opcode};
use memferry_sys::Pages;

/// An address and its kind of memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryAddress {
    pub(crate) address: u64,
    pub(crate) kind: MemoryKind,
}

impl MemoryAddress {
    pub(crate) fn plus(self, bytes: usize) -> Self {
        Self { address: self.address + bytes as u64, ..self }
    }
}

/// An address in host memory. The memory must outlive the operations on it.
pub(crate) fn host(pages: &Pages, at: usize) -> MemoryAddress {
    assert!(at < pages.len());
    MemoryAddress { address: pages.as_ptr() as u64 + at as u64, kind: MemoryKind::Host }
}

/// An address in the device. The memory must outlive the operations on it.
pub(crate) fn device(memory: &DeviceBuffer, at: usize) -> MemoryAddress {
    assert!(at < memory.len());
    MemoryAddress { address: memory.address() + at as u64, kind: MemoryKind::Device }
}

/// One operation between addresses whose memory the test keeps until the operation is complete.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CudaOperation {
    operation: Opcode,
    source: MemoryAddress,
    target: MemoryAddress,
    length: u64,
    value: u8,
    is_transient: bool,
    chunk_bytes: Option<u64>,
}

impl CudaOperation {
    pub(crate) fn copy(source: MemoryAddress, target: MemoryAddress, length: usize) -> Self {
        let (operation, length) = (Opcode::Copy, length as u64);
        Self { operation, source, target, length, value: 0, is_transient: false, chunk_bytes: None }
    }

    pub(crate) fn fill(target: MemoryAddress, length: usize, value: u8) -> Self {
        let nowhere = MemoryAddress { address: 0, ..target };
        Self { operation: Opcode::Fill, value, ..Self::copy(nowhere, target, length) }
    }

    pub(crate) fn operation(self, operation: Opcode) -> Self {
        Self { operation, ..self }
    }

    pub(crate) fn transient(self, is_passing: bool) -> Self {
        Self { is_transient: is_passing, ..self }
    }

    /// As one descriptor, or in chunks of this size.
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
        // SAFETY: the memory is a test's own, which keeps it until the operation is complete.
        let work =
            unsafe { ChunkedWork::new(operation, kernel, source, target, length, value, chunk) };
        Completion::chunked(work.in_memory(self.source.kind, self.target.kind))
    }

    pub(crate) fn descriptor(&self, completion: &Arc<Completion>) -> Descriptor {
        if self.is_cut() {
            return Descriptor::work_offer(completion.clone()).transient(self.is_transient);
        }
        let (source, target) = (self.source.address, self.target.address);
        // SAFETY: as above; nothing else reports to the completion.
        unsafe {
            Descriptor::new(self.operation, source, target, self.length)
                .memory(self.source.kind, self.target.kind)
                .value(self.value)
                .transient(self.is_transient)
                .completes(completion.clone())
        }
    }
}
