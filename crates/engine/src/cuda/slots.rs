//! A few pieces of registered memory of equal size, which passing bytes are copied into or out of.

use std::sync::Arc;

use memferry_sys::cuda::Driver;

/// A ring of slots. Its memory is taken with the first use at the latest, and given back at the end.
#[derive(Debug)]
pub(super) struct Slots {
    driver: Arc<dyn Driver>,
    slot_bytes: usize,
    count: usize,
    /// The memory, once it is there.
    base: Option<u64>,
    /// The one that came back last is given out first: it is likeliest to be in the cache.
    free: Vec<u64>,
    /// There was no memory to be had; it is not asked for again.
    is_refused: bool,
}

/// What became of a wish for a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    /// The address of a free slot, which is in use now.
    Slot(u64),
    /// All are in use: one will be free later.
    Busy,
    /// There is no memory for slots.
    Refused,
}

impl Slots {
    pub(super) fn new(driver: Arc<dyn Driver>, slot_bytes: usize, count: usize) -> Self {
        let (free, is_refused) = (Vec::new(), false);
        Self { driver, slot_bytes, count, base: None, free, is_refused }
    }

    /// Takes a slot.
    pub(super) fn take(&mut self) -> Wish {
        self.prepare();
        if self.is_refused {
            return Wish::Refused;
        }
        self.free.pop().map_or(Wish::Busy, Wish::Slot)
    }

    /// Takes the memory, if that was not done or refused before.
    pub(super) fn prepare(&mut self) {
        if self.base.is_none() && !self.is_refused {
            match self.driver.allocate_pinned(self.slot_bytes * self.count) {
                Ok(base) => {
                    self.base = Some(base);
                    let slot = |index| base + (index * self.slot_bytes) as u64;
                    self.free = (0..self.count).map(slot).collect();
                }
                Err(error) => {
                    tracing::warn!(%error, "no pinned memory to copy through");
                    self.is_refused = true;
                }
            }
        }
    }

    /// Gives a slot back.
    pub(super) fn give_back(&mut self, slot: u64) {
        self.free.push(slot);
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        let Some(base) = self.base else { return };
        // SAFETY: it is from the matching call, and whoever used slots waited for the device.
        unsafe { self.driver.free_pinned(base) };
    }
}
