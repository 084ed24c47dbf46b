//! Statistics of a cache.

/// Counters since the cache was created, and its current content.
///
/// Every request is a hit or a miss; merges and uncached requests are also misses.
///
/// ```
/// use std::sync::Arc;
///
/// use memferry::engine::testing::nic_model::NicModel;
/// use memferry::engine::nic::{NicConfig, NicEngine};
/// use memferry::{Ferry, PinCacheStatistics};
///
/// let card = Arc::new(NicEngine::over_model(NicModel::new(), NicConfig::default())?);
/// let statistics = Ferry::builder().engine(card, 1).build()?.statistics();
/// let pins: Option<PinCacheStatistics> = statistics.pinning("nic").map(|pinning| pinning.cache);
/// assert_eq!(pins.map(|pins| pins.hits), Some(0)); // nothing was copied yet
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PinCacheStatistics {
    /// Requests that found their memory pinned.
    pub hits: u64,
    /// Requests that had to pin.
    pub misses: u64,
    /// Entries pinned as replacements of smaller ones that they overlap.
    pub merges: u64,
    /// Entries evicted to make space.
    pub evictions: u64,
    /// Entries dropped because their mapping changed or they were invalidated.
    pub invalidations: u64,
    /// Requests that were pinned for one use.
    pub uncached: u64,
    /// Bytes pinned now, cached or not. A page of two pins counts twice.
    pub bytes_pinned: u64,
    /// Bytes in cached entries.
    pub bytes_cached: u64,
    /// Cached entries.
    pub entries: u64,
}
