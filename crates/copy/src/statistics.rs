//! What a ferry has done so far.

use memferry_engine::ChannelStatistics;
use memferry_memory::pin_cache::{self, Watching};
use memferry_memory::pinning::PinError;

/// Counters of a ferry, rising but for what is held now. What the caller carries out at once is not counted: a locked
/// instruction behind a small copy waits for its stores, and costs more than some of the copies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Chunks that a waiting caller carried out.
    pub helped_chunks: u64,
    /// Each engine by name, with its channels in the order they were opened.
    pub engines: Vec<(String, Vec<ChannelStatistics>)>,
    /// The pinned memory of each engine that needs it, by the engine's name.
    pub pinning: Vec<(String, PinStatistics)>,
}

/// What was pinned for an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PinStatistics {
    /// What its pin-down cache has done, and holds now.
    pub cache: pin_cache::Statistics,
    /// How the cache learns that memory was unmapped: by events, or by
    /// [`Ferry::forget`](crate::Ferry::forget).
    pub watching: Watching,
    /// How often memory that is there could not be pinned.
    pub refused: u64,
    /// Bytes that the processor moved because of that.
    pub refused_bytes: u64,
    /// Why memory could not be pinned the last time.
    pub last_refusal: Option<PinError>,
}

impl Statistics {
    /// The pinned memory of an engine, if it needs any.
    pub fn pinning(&self, name: &str) -> Option<&PinStatistics> {
        self.pinning.iter().find(|(engine, _)| engine == name).map(|(_, pinning)| pinning)
    }

    /// The sum over all channels of an engine.
    pub fn engine(&self, name: &str) -> ChannelStatistics {
        let found = self.engines.iter().filter(|(engine, _)| engine == name);
        found.flat_map(|(_, channels)| channels).fold(ChannelStatistics::default(), |a, b| a + *b)
    }
}
