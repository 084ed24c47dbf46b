//! Pinning: keeping pages in place while an engine or a peer accesses them.
//!
//! A [`Pinner`] pins ranges of whole pages. [`PopulatePinner`] serves the processor; engines
//! that translate addresses themselves provide their own. [`PinnedRange`] is a pin that is undone on
//! drop, [`ChunkSchedule`] cuts a long range into chunks so that copying can start early, and
//! [`crate::pin_cache`] keeps pins for reuse. The feature `comparison` adds pinners that only benches
//! and tests use.

mod error;
mod fork_local;
#[cfg(feature = "comparison")]
mod io_uring;
#[cfg(feature = "comparison")]
mod mlock;
mod pinned;
#[cfg(feature = "comparison")]
mod pipeline;
mod populate;
mod range;
#[cfg(feature = "comparison")]
mod refcount;
mod schedule;
mod token;

pub use error::PinError;
pub use fork_local::ForkLocal;
#[cfg(feature = "comparison")]
pub use io_uring::IoUringPinner;
#[cfg(feature = "comparison")]
pub use mlock::MlockPinner;
pub use pinned::PinnedRange;
#[cfg(feature = "comparison")]
pub use pipeline::{PinPipeline, PinnedChunk};
pub use populate::PopulatePinner;
pub use range::PageRange;
pub use schedule::{ChunkRanges, ChunkSchedule};
pub use token::{DmaSegment, PinToken};

/// The access that a pinned range is used for. Writing includes reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// The pages are only monitored, not accessed. Never passed to a pinner.
    MonitorOnly,
    /// The pages are copied from.
    Read,
    /// The pages are copied to.
    Write,
}

/// A method of pinning.
///
/// An engine with a translation of its own (an IOMMU, a table of registered buffers) implements
/// this trait and finds its addresses in the [`PinToken`]; caching and pipelining work with any
/// implementation. A pinner keeps state that a forked child must not share in a [`ForkLocal`].
///
/// Pins of overlapping ranges must be independent of each other: the pin cache pins a larger range
/// while a smaller one inside it is in use. Calls come from any thread, also concurrently. Except
/// for [`Pinner::invalidate`], the calling thread holds no lock of the cache.
pub trait Pinner: Send + Sync + std::fmt::Debug {
    /// The name for display.
    fn name(&self) -> &'static str;

    /// Pins a range until [`Pinner::unpin`]. After an error nothing is pinned.
    fn pin(&self, range: PageRange, access: Access) -> Result<PinToken, PinError>;

    /// Pins exactly these bytes as one range, until [`Pinner::unpin`] with the pages that contain
    /// them. For pinners whose pins other libraries can see, and where several pins may share a
    /// page.
    fn pin_bytes(
        &self,
        address: usize,
        length: usize,
        access: Access,
    ) -> Result<PinToken, PinError> {
        self.pin(PageRange::covering(address, length)?, access)
    }

    /// Whether other code has pinned these bytes for the same device, so that no pin is needed.
    fn is_pinned_by_others(&self, _address: usize, _length: usize) -> bool {
        false
    }

    /// Ends a pin, given its range and token. The range may be unmapped or mapped to other memory
    /// by now.
    fn unpin(&self, range: PageRange, token: &PinToken);

    /// Reports that the mapping of these addresses has changed or is about to change, or that the
    /// range was invalidated: resources of earlier pins must not serve later ones. Pinners whose
    /// pins share nothing need not implement this. The caller holds a lock of the cache, so the
    /// method must not call the cache.
    fn invalidate(&self, _range: PageRange) {}

    /// Whether a pin may share the page frames of an overlapping pin, instead of pinning those that
    /// are mapped now.
    fn shares_pages(&self) -> bool {
        false
    }

    /// Whether a pin belongs to addresses or to page frames. True: to the addresses, so that it
    /// follows the current mapping; after a change of the mapping it is at worst slow. False: to
    /// the page frames, so that after a change it permanently refers to the old bytes; only such
    /// pins can be stale.
    fn tracks_mapping(&self) -> bool;
}
