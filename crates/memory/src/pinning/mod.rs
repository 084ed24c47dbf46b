//! Making pages stay where they are while an engine or a peer works on them.
//!
//! A [`Pinner`] pins ranges of whole pages. [`Populate`] and [`Lock`] are the processor's; engines
//! that translate addresses themselves bring their own, which needs the four calls of the trait and
//! nothing else. [`Pinned`] is a pin that undoes itself, [`Overlapped`] pins a long range piece by
//! piece so that copying can begin early, and [`crate::pin_cache`] keeps pins for the next use.

mod error;
mod lock;
mod overlapped;
mod per_process;
mod pinned;
mod populate;
mod range;
mod registered;
mod schedule;
mod tally;

pub use error::PinError;
pub use lock::Lock;
pub use overlapped::{Chunk, Overlapped};
pub use per_process::PerProcess;
pub use pinned::Pinned;
pub use populate::Populate;
pub use range::PageRange;
pub use registered::Registered;
pub use schedule::{ChunkSchedule, Chunks};

/// What a pinned range will be used for. Writing includes reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// The pages are not touched, only watched. Pinners are never asked for this.
    Watch,
    /// The pages are copied from.
    Read,
    /// The pages are copied to.
    Write,
}

/// What a pinner calls a pin: the number of a table's slot, a key of a device, or nothing at all.
/// It means something only to the pinner that gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

/// Something that pins.
///
/// An engine with a translation of its own (an IOMMU, a table of registered buffers) implements
/// this, takes the translation from the [`Token`], and gets caching and overlapping for nothing.
/// A pinner that keeps state which a forked child must not share keeps it in a [`PerProcess`].
///
/// Pins of overlapping ranges must be independent of each other: the pin-down cache pins a larger
/// range while a smaller one inside it is still in use. Calls come from any thread, several at a
/// time, and, but for [`Pinner::outdate`], from none that holds a lock of the cache.
pub trait Pinner: Send + Sync + std::fmt::Debug {
    /// What people call it.
    fn name(&self) -> &'static str;

    /// Pins a range until [`Pinner::unpin`]. After an error nothing is pinned.
    fn pin(&self, range: PageRange, access: Access) -> Result<Token, PinError>;

    /// Pins exactly these bytes, in one piece, until [`Pinner::unpin`] with the pages that hold them.
    /// For pinners whose pins others can see, and to whom one page may be of several.
    fn pin_bytes(&self, address: usize, length: usize, access: Access) -> Result<Token, PinError> {
        self.pin(PageRange::covering(address, length)?, access)
    }

    /// Whether somebody else has pinned these bytes for the same device, so that they need no pin.
    fn is_pinned_by_others(&self, _address: usize, _length: usize) -> bool {
        false
    }

    /// Ends a pin, with the range and the token that it began with. The range may be mapped to
    /// other memory by now, or not at all.
    fn unpin(&self, range: PageRange, token: Token);

    /// The mapping of these addresses changed, or is about to, or is forgotten: no later pin may be
    /// served by what an earlier one of them still holds. Pins that have nothing in common need
    /// nothing here. Comes with a lock of the cache held, and must not call the cache.
    fn outdate(&self, _range: PageRange) {}

    /// Whether a pin may share the page frames of another that overlaps it, instead of asking the
    /// kernel for those that are mapped now.
    fn shares_frames(&self) -> bool {
        false
    }

    /// Whose a pin is. True: the addresses', so that it follows what is mapped there; once the
    /// mapping changes it is at worst slow. False: the page frames', so that it shows the old bytes
    /// for ever once the mapping changes; only such pins can be wrong.
    fn follows_mapping(&self) -> bool;
}
