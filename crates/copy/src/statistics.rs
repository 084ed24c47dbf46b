//! Statistics of a ferry.

use memferry_engine::ChannelStatistics;
use memferry_memory::registration::RegistrationStatistics;

/// Counters of a ferry. They only rise, except for the sizes of what is held now. Transfers that
/// the caller executes inline are not counted: an atomic read-modify-write after a small copy waits
/// for its stores, and costs more than some of the copies.
///
/// ```
/// use memferry::Ferry;
///
/// let ferry = Ferry::new()?;
/// println!("{} chunks by waiting callers", ferry.statistics().caller_chunks);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Chunks and small transfers that waiting callers executed.
    pub caller_chunks: u64,
    /// The statistics of each engine by name, with its channels in the order in which they were
    /// opened.
    pub engines: Vec<(String, Vec<ChannelStatistics>)>,
    /// The pinned memory of each engine that needs it, by the engine's name.
    pub pinning: Vec<(String, RegistrationStatistics)>,
}

impl Statistics {
    /// Returns the statistics of an engine's pinned memory, if the engine needs any.
    pub fn pinning(&self, name: &str) -> Option<&RegistrationStatistics> {
        self.pinning.iter().find(|(engine, _)| engine == name).map(|(_, pinning)| pinning)
    }

    /// Returns the sum over all channels of an engine.
    pub fn engine(&self, name: &str) -> ChannelStatistics {
        let found = self.engines.iter().filter(|(engine, _)| engine == name);
        found.flat_map(|(_, channels)| channels).fold(ChannelStatistics::default(), |a, b| a + *b)
    }
}
