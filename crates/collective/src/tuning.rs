//! The sizes at which a team changes from one algorithm to another. Rank 0 chooses them for all ranks.

/// How the memory of a team is laid out and used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tuning {
    /// The length of each of the two staging buffers of a rank, in bytes: a multiple of 4096.
    pub staging_bytes: usize,
    /// Up to this many bytes every rank reduces all data itself.
    pub direct_reduce_bytes: usize,
    /// From this many bytes on a reduction reads the memory of other ranks.
    pub reduce_cross_bytes: usize,
    /// From this many bytes on a broadcast reads the memory of the root. Until then the root copies into shared memory
    /// while the others copy out of it.
    pub broadcast_cross_bytes: usize,
    /// From this many bytes of a block on, gather and all-to-all read the memory of other ranks.
    pub exchange_cross_bytes: usize,
    /// The part of a broadcast that is published at a time.
    pub chunk_bytes: usize,
    /// Whether ranks may access each other's memory at all.
    pub allow_cross_memory: bool,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            staging_bytes: 1 << 20,
            direct_reduce_bytes: 4 << 10,
            reduce_cross_bytes: 4 << 20,
            broadcast_cross_bytes: 64 << 20,
            exchange_cross_bytes: 48 << 10,
            chunk_bytes: 128 << 10,
            allow_cross_memory: true,
        }
    }
}

impl Tuning {
    /// The number of words of [`Tuning::to_words`].
    pub(crate) const WORDS: usize = 7;

    pub(crate) fn to_words(self) -> [u64; Self::WORDS] {
        let bytes = [
            self.staging_bytes,
            self.direct_reduce_bytes,
            self.reduce_cross_bytes,
            self.broadcast_cross_bytes,
            self.exchange_cross_bytes,
            self.chunk_bytes,
            usize::from(self.allow_cross_memory),
        ];
        bytes.map(|bytes| bytes as u64)
    }

    pub(crate) fn from_words(words: [u64; Self::WORDS]) -> Self {
        let [staging, direct, reduce, broadcast, exchange, chunk, allow] =
            words.map(|word| usize::try_from(word).unwrap_or(usize::MAX));
        Self {
            staging_bytes: staging,
            // The data of a direct reduction is in one staging buffer.
            direct_reduce_bytes: direct.min(staging),
            reduce_cross_bytes: reduce,
            broadcast_cross_bytes: broadcast,
            exchange_cross_bytes: exchange,
            chunk_bytes: chunk.clamp(64, staging.max(64)),
            allow_cross_memory: allow == 1,
        }
    }
}
