//! What a ferry has done so far.

use std::sync::atomic::{AtomicU64, Ordering};

use memferry_engine::ChannelStatistics;

/// Counters of a ferry, all rising. Blocking copies below the size from which they are shared are
/// not counted: they are a plain `memcpy`, and a counter would cost more than some of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Transfers that the caller carried out at once.
    pub by_caller: u64,
    /// Transfers handed to an engine.
    pub by_engine: u64,
    /// Chunks that a waiting caller carried out.
    pub helped_chunks: u64,
    /// Each engine by name, with its channels in the order they were opened.
    pub engines: Vec<(String, Vec<ChannelStatistics>)>,
}

impl Statistics {
    /// The sum over all channels of an engine.
    pub fn engine(&self, name: &str) -> ChannelStatistics {
        let found = self.engines.iter().filter(|(engine, _)| engine == name);
        found.flat_map(|(_, channels)| channels).fold(ChannelStatistics::default(), |a, b| a + *b)
    }
}

/// The counters behind [`Statistics`] that the ferry itself keeps.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) by_caller: AtomicU64,
    pub(crate) by_engine: AtomicU64,
}

impl Counters {
    pub(crate) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}
