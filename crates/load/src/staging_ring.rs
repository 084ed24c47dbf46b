//! Pinned buffers between the reads and the copies of a device.

use std::mem::ManuallyDrop;
use std::sync::Mutex;

use memferry_copy::{Ferry, Region};
use memferry_sys::fork::OwnerProcess;
use memferry_sys::pages::Pages;
use memferry_sys::residency;

use crate::error::LoadError;

/// Buffers of equal size in one mapping, registered with the engines of a ferry.
#[derive(Debug)]
pub(crate) struct StagingRing {
    /// Ends before the pages do. Without it the engine stages again.
    registration: Option<Region>,
    pages: ManuallyDrop<Pages>,
    slot_bytes: usize,
    owner: OwnerProcess,
}

impl Drop for StagingRing {
    fn drop(&mut self) {
        drop(self.registration.take());
        // A forked child does not have the pages: whatever is mapped there now is not the ring's.
        if self.owner.is_current() {
            // SAFETY: they are dropped once, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.pages) };
        }
    }
}

impl StagingRing {
    /// Allocates, populates and registers `slots` buffers.
    pub(crate) fn new(ferry: &Ferry, slots: usize, slot_bytes: usize) -> Result<Self, LoadError> {
        let failed = |error: std::io::Error| LoadError::Memory {
            what: "the staging buffers",
            reason: error.to_string(),
        };
        let pages = Pages::huge(slots * slot_bytes).map_err(failed)?;
        // A child of a fork would share the pages, and the next write of a reader would go to a
        // copy that the device does not know.
        pages.exclude_from_fork().map_err(failed)?;
        // Where the kernel cannot do it at once, the reads do it page by page.
        let _ = residency::populate_write(pages.as_ptr() as usize, pages.len());
        // SAFETY: the pages stay mapped until this ring is dropped, which drops the region first;
        // loads keep the ring until their copies are complete.
        let registration = unsafe { ferry.register(pages.as_ptr(), pages.len()) };
        if let Err(error) = &registration {
            tracing::warn!(%error, "the staging buffers are not registered: loads are slower");
        }
        let (registration, pages) = (registration.ok(), ManuallyDrop::new(pages));
        Ok(Self { registration, pages, slot_bytes, owner: OwnerProcess::current() })
    }

    /// The start of a buffer, for the one thread it belongs to.
    pub(crate) fn slot(&self, number: usize) -> *mut u8 {
        debug_assert!((number + 1) * self.slot_bytes <= self.pages.len());
        self.pages.as_ptr().wrapping_add(number * self.slot_bytes)
    }

    /// Whether the device can copy from the buffers without staging.
    pub(crate) fn is_pinned(&self) -> bool {
        self.registration.is_some()
    }

    /// The size of all buffers together.
    pub(crate) fn bytes(&self) -> usize {
        self.pages.len()
    }
}

/// Keeps the ring of the last load for the next one.
#[derive(Debug, Default)]
pub(crate) struct SpareRing(Mutex<Option<StagingRing>>);

impl SpareRing {
    /// Takes the ring that was kept, or makes one: loads that overlap have a ring each.
    pub(crate) fn take(
        &self,
        make: impl FnOnce() -> Result<StagingRing, LoadError>,
    ) -> Result<StagingRing, LoadError> {
        let kept = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        kept.filter(|ring| ring.owner.is_current()).map_or_else(make, Ok)
    }

    /// Keeps a ring that no load uses any more.
    pub(crate) fn put_back(&self, ring: StagingRing) {
        *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(ring);
    }
}
