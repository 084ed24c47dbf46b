//! The limited number of channels of a device.

use std::sync::{Arc, Mutex};

use memferry_sys::sync::lock;

/// The free channel numbers.
#[derive(Debug, Clone)]
pub(crate) struct ChannelSlots(Arc<Mutex<Vec<usize>>>);

/// An allocated channel number; freed on drop.
#[derive(Debug)]
pub(crate) struct ChannelSlot {
    number: usize,
    slots: ChannelSlots,
}

impl ChannelSlots {
    /// Creates the numbers from 0 to `count` - 1.
    pub(crate) fn new(count: usize) -> Self {
        Self(Arc::new(Mutex::new((0..count).rev().collect())))
    }

    /// Allocates a number, if one is free.
    pub(crate) fn allocate(&self) -> Option<ChannelSlot> {
        let number = lock(&self.0).pop()?;
        Some(ChannelSlot { number, slots: self.clone() })
    }
}

impl ChannelSlot {
    pub(crate) fn number(&self) -> usize {
        self.number
    }
}

impl Drop for ChannelSlot {
    fn drop(&mut self) {
        lock(&self.slots.0).push(self.number);
    }
}
