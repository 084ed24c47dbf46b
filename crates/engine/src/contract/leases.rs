//! The pinned memory of a descriptor, for engines that translate addresses themselves.
//!
//! The submitter pins memory with the engine's [`Pinner`] and attaches the leases to the
//! descriptors, so that no page is unpinned before the last descriptor over it is dropped. The
//! engine finds its own addresses of the memory in these leases.

use std::sync::Arc;

use memferry_memory::pin_cache::Lease;
use memferry_memory::pinning::{Access, DmaSegment, PageRange, PinToken};

pub use memferry_memory::pinning::Pinner;

use super::{Descriptor, Opcode};

/// The leases that keep the memory of descriptors pinned. Descriptors over the same two ranges
/// share them.
#[derive(Debug, Clone, Default)]
pub struct DescriptorLeases {
    /// The lease of the source, if the operation reads one in host memory.
    pub source: Option<Arc<Lease>>,
    /// The lease of the target, if there is one in host memory.
    pub target: Option<Arc<Lease>>,
    /// The lease of the second target of a dualcast.
    pub second: Option<Arc<Lease>>,
    /// The lease of the transfer's notification variable, for engines that write it themselves.
    pub variable: Option<Arc<Lease>>,
}

/// The location of pinned memory, for the engine whose pinner pinned it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinnedLocation<'a> {
    /// The pinner's token of the pin, which the lease of the descriptor holds.
    pub token: &'a PinToken,
    /// The range of the pin.
    pub range: PageRange,
    /// The offset of the memory in the pinned range, in bytes.
    pub offset_bytes: u64,
}

impl PinnedLocation<'_> {
    /// The device's address of the byte at `offset`, and how many bytes from there on are contiguous
    /// for the device, at most `max_bytes`. `None` where nothing is pinned.
    pub fn segment(&self, offset: u64, max_bytes: u64) -> Option<DmaSegment> {
        self.token.segment(self.offset_bytes + offset, max_bytes)
    }

    /// The device's address of the first `bytes` bytes, if they are pinned and contiguous for the device.
    #[inline]
    pub fn contiguous(&self, bytes: u64) -> Option<u64> {
        self.token.contiguous(self.offset_bytes, bytes)
    }
}

impl Descriptor {
    /// The location of the pinned source. `None` if any of it is not pinned.
    pub fn pinned_source(&self) -> Option<PinnedLocation<'_>> {
        locate(self.leases()?.source.as_deref()?, self.source(), self.length())
    }

    /// The location of the pinned target. `None` if any of it is not pinned.
    pub fn pinned_target(&self) -> Option<PinnedLocation<'_>> {
        locate(self.leases()?.target.as_deref()?, self.target(), self.length())
    }

    /// The location of the pinned second target of a dualcast. `None` if any of it is not pinned.
    pub fn pinned_second(&self) -> Option<PinnedLocation<'_>> {
        locate(self.leases()?.second.as_deref()?, self.second_target()?, self.length())
    }
}

/// A notification variable that the engine writes after the data.
#[derive(Debug, Clone, Copy)]
pub struct NotificationWrite<'a> {
    /// The location of the pinned variable.
    pub location: PinnedLocation<'a>,
    /// The value to write.
    pub value: u64,
}

impl Descriptor {
    /// The notification write that follows this descriptor, if it is the last of its transfer and
    /// the variable is pinned. `before` is the number of bytes of the same transfer that the
    /// channel accepted earlier and completes before the notification write; if other bytes of the
    /// transfer are outstanding, the engine must not write the variable. An engine that has written
    /// the variable reports it by [`Descriptor::finish_notified`].
    pub fn notification_write(
        &self,
        before: impl FnOnce() -> u64,
    ) -> Option<NotificationWrite<'_>> {
        let lease = self.leases()?.variable.as_deref()?;
        let notify = self.final_notification().filter(|_| self.is_last_outstanding(before))?;
        let at = locate(lease, notify.address(), size_of::<u64>() as u64)?;
        Some(NotificationWrite { location: at, value: notify.value() })
    }
}

#[inline]
fn locate(lease: &Lease, address: u64, length: u64) -> Option<PinnedLocation<'_>> {
    let range = lease.range();
    let offset_bytes = address.checked_sub(range.start() as u64)?;
    let end = offset_bytes.checked_add(length)?;
    let token = lease.token();
    (end <= range.bytes() as u64).then_some(PinnedLocation { token, range, offset_bytes })
}

impl Opcode {
    /// The access that the source must be pinned for; `None` if the operation has no source.
    pub fn source_access(self) -> Option<Access> {
        match self {
            Self::Copy
            | Self::Move
            | Self::Compare
            | Self::Crc
            | Self::CopyCrc
            | Self::Dualcast => Some(Access::Read),
            Self::Fill => None,
        }
    }

    /// The access that the target must be pinned for, and the second one of a dualcast; `None` if
    /// the operation has no target.
    pub fn target_access(self) -> Option<Access> {
        match self {
            Self::Copy | Self::Move | Self::Fill | Self::CopyCrc | Self::Dualcast => {
                Some(Access::Write)
            }
            Self::Compare => Some(Access::Read),
            Self::Crc => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memferry_memory::pin_cache::{InvalidationMode, PinCache, PinCacheLimits};
    use memferry_memory::pinning::PopulatePinner;
    use memferry_sys::Pages;
    use memferry_sys::pages::page_bytes;

    #[test]
    fn a_descriptor_finds_its_memory_in_its_pins_and_nothing_beyond_them() {
        let cache = PinCache::new(
            Arc::new(PopulatePinner),
            PinCacheLimits::default(),
            InvalidationMode::Explicit,
        )
        .unwrap();
        let pages = Pages::new(4 * page_bytes()).unwrap();
        let (start, page) = (pages.as_ptr() as u64, page_bytes() as u64);
        let lease = cache.acquire((start + page) as usize, page_bytes(), Access::Write).unwrap();
        let range = lease.range();
        let leases = Arc::new(DescriptorLeases {
            target: Some(Arc::new(lease)),
            ..DescriptorLeases::default()
        });
        let pinned_target = |address: u64, length: u64| {
            // SAFETY: the descriptor is never executed.
            let fill = unsafe { Descriptor::new(Opcode::Fill, 0, address, length) };
            assert_eq!(fill.pinned_target(), None);
            let fill = fill.pinned_by(leases.clone());
            assert_eq!(fill.pinned_source(), None);
            fill.pinned_target().map(|found| (found.token.clone(), found.range, found.offset_bytes))
        };
        let at = |offset_bytes| Some((PinToken::new(0), range, offset_bytes));
        assert_eq!(pinned_target(start + page, page), at(0));
        assert_eq!(pinned_target(start + page + 7, page - 7), at(7));
        assert_eq!(pinned_target(start + page + 7, page - 6), None);
        assert_eq!(pinned_target(start + page - 1, 2), None);
        assert_eq!(pinned_target(start + page, u64::MAX), None);
    }
}
