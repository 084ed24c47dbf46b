//! What a cache has done, in numbers.

/// Counts since the cache was made, and what it holds now.
///
/// Every request is a hit or a miss; merges and uncached ones are among the misses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Requests that found their memory pinned.
    pub hits: u64,
    /// Requests that had to pin.
    pub misses: u64,
    /// Regions pinned in place of smaller ones that they overlap.
    pub merges: u64,
    /// Regions dropped to make room.
    pub evictions: u64,
    /// Regions dropped because their mapping changed, or because they were to be forgotten.
    pub invalidations: u64,
    /// Requests that were pinned for one use.
    pub uncached: u64,
    /// Bytes pinned now, for whatever reason. A page in two pins counts twice.
    pub bytes_pinned: u64,
    /// Bytes in regions that requests can find now.
    pub bytes_kept: u64,
    /// Regions that requests can find now.
    pub entries: u64,
}
