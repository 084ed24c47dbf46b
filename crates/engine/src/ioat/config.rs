//! What the queues of an engine have in common.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use memferry_memory::dma_mappings::DmaMappings;

/// The counters of a device.
#[derive(Debug)]
pub(super) struct IoatAtomicCounters {
    /// For each channel of the engine, whose queue alone writes its counter.
    pub(super) descriptors: Box<[AtomicU64]>,
    pub(super) recoveries: AtomicU64,
}

impl IoatAtomicCounters {
    /// Counters of this many channels.
    pub(super) fn new(channels: usize) -> Self {
        let descriptors = (0..channels).map(|_| AtomicU64::new(0)).collect();
        Self { descriptors, recoveries: AtomicU64::new(0) }
    }
}

/// The properties of the device that a queue needs.
#[derive(Debug, Clone)]
pub(super) struct IoatQueueConfig {
    pub(super) max_bytes: u64,
    pub(super) supports_fill: bool,
    pub(super) pages: Arc<DmaMappings>,
    pub(super) counters: Arc<IoatAtomicCounters>,
}
