//! What a ferry has done so far.

use memferry_engine::ChannelStatistics;

/// Counters of a ferry, all rising. What the caller carries out at once is not counted: a locked
/// instruction behind a small copy waits for its stores, and costs more than some of the copies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statistics {
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
