//! The pinned memory of a descriptor, for engines that translate addresses themselves.
//!
//! The memory layer pins with the engine's own [`Pinner`]; the leases it gives travel with the
//! descriptors, so that no page is unpinned before the last descriptor over it is gone. The engine
//! asks a descriptor where its memory is pinned and finds its own name for it.

use std::sync::Arc;

use memferry_memory::pin_cache::Lease;
use memferry_memory::pinning::{Access, PageRange, Token};

pub use memferry_memory::pinning::Pinner;

use super::{Descriptor, Operation};

/// What keeps the memory of descriptors pinned. Descriptors over the same two pieces of memory
/// share it.
#[derive(Debug, Clone, Default)]
pub struct Pins {
    /// That of the source, if the operation reads one in ordinary memory.
    pub source: Option<Arc<Lease>>,
    /// That of the target, if it is in ordinary memory.
    pub target: Option<Arc<Lease>>,
    /// That of the transfer's notification variable, for engines that set it themselves.
    pub variable: Option<Arc<Lease>>,
}

/// Where pinned memory is, for the engine whose pinner pinned it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinnedAt {
    /// What the pinner calls the pin.
    pub token: Token,
    /// What that pin covers.
    pub range: PageRange,
    /// Where in the pinned range the memory begins.
    pub offset_bytes: u64,
}

impl Descriptor {
    /// Where the source is pinned. `None` if it is not, or not all of it.
    pub fn pinned_source(&self) -> Option<PinnedAt> {
        place(self.pins()?.source.as_deref()?, self.source(), self.length())
    }

    /// Where the target is pinned. `None` if it is not, or not all of it.
    pub fn pinned_target(&self) -> Option<PinnedAt> {
        place(self.pins()?.target.as_deref()?, self.target(), self.length())
    }
}

/// A notification variable that an engine is to set behind the data.
#[derive(Debug, Clone, Copy)]
pub struct Notice {
    /// Where the variable is pinned.
    pub at: PinnedAt,
    /// What it is to be set to.
    pub value: u64,
}

impl Descriptor {
    /// The notice that comes behind this descriptor, if it is the last of its transfer and the
    /// variable is pinned. `before` is how much of the same transfer the channel has taken before
    /// it, and will have done before the notice: if anything else of the transfer is missing, it is
    /// not for the engine to tell. An engine that has set the variable says so by
    /// [`Descriptor::finish_noticed`].
    pub fn notice(&self, before: impl FnOnce() -> u64) -> Option<Notice> {
        let lease = self.pins()?.variable.as_deref()?;
        let notify = self.closing_notify().filter(|_| self.is_all_behind(before))?;
        let at = place(lease, notify.address(), size_of::<u64>() as u64)?;
        Some(Notice { at, value: notify.value() })
    }
}

fn place(lease: &Lease, address: u64, length: u64) -> Option<PinnedAt> {
    let (token, range) = (lease.token(), lease.range());
    let offset_bytes = address.checked_sub(range.start() as u64)?;
    let end = offset_bytes.checked_add(length)?;
    (end <= range.bytes() as u64).then_some(PinnedAt { token, range, offset_bytes })
}

impl Operation {
    /// What the source must be pinned for; `None` if the operation has no source.
    pub fn source_access(self) -> Option<Access> {
        match self {
            Self::Copy | Self::Move | Self::Compare => Some(Access::Read),
            Self::Fill => None,
        }
    }

    /// What the target must be pinned for.
    pub fn target_access(self) -> Access {
        match self {
            Self::Copy | Self::Move | Self::Fill => Access::Write,
            Self::Compare => Access::Read,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memferry_memory::pin_cache::{Limits, PinCache, Watching};
    use memferry_memory::pinning::Populate;
    use memferry_sys::Pages;
    use memferry_sys::pages::page_bytes;

    #[test]
    fn a_descriptor_finds_its_memory_in_its_pins_and_nothing_beyond_them() {
        let cache =
            PinCache::new(Arc::new(Populate), Limits::default(), Watching::Explicit).unwrap();
        let pages = Pages::new(4 * page_bytes()).unwrap();
        let (start, page) = (pages.as_ptr() as u64, page_bytes() as u64);
        let lease = cache.acquire((start + page) as usize, page_bytes(), Access::Write).unwrap();
        let range = lease.range();
        let pins = Arc::new(Pins { target: Some(Arc::new(lease)), ..Pins::default() });
        let place = |address: u64, length: u64| {
            // SAFETY: it is never carried out.
            let fill = unsafe { Descriptor::new(Operation::Fill, 0, address, length) };
            assert_eq!(fill.pinned_target(), None);
            let fill = fill.pinned_by(pins.clone());
            assert_eq!(fill.pinned_source(), None);
            fill.pinned_target()
        };
        let at = |offset_bytes| Some(PinnedAt { token: Token(0), range, offset_bytes });
        assert_eq!(place(start + page, page), at(0));
        assert_eq!(place(start + page + 7, page - 7), at(7));
        assert_eq!(place(start + page + 7, page - 6), None);
        assert_eq!(place(start + page - 1, 2), None);
        assert_eq!(place(start + page, u64::MAX), None);
    }
}
