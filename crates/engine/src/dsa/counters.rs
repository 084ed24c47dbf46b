//! The counters of an engine, which its queues add to.

use std::sync::atomic::AtomicU64;

/// The counters of an engine.
#[derive(Debug, Default)]
pub(super) struct DsaAtomicCounters {
    pub(super) descriptors: AtomicU64,
    pub(super) submissions: AtomicU64,
    pub(super) batches: AtomicU64,
    pub(super) full: AtomicU64,
    pub(super) resumed_faults: AtomicU64,
    pub(super) recoveries: AtomicU64,
}
