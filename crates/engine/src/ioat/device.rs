//! A device that the channels of an engine share. A reset of the device ends the chains of all its
//! channels: a counter tells each of them.

use std::io;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, TryLockError};

use memferry_sys::device::DmaDevice;

/// The device.
#[derive(Debug)]
pub(super) struct IoatDevice {
    device: Arc<dyn DmaDevice>,
    /// The number of resets of the whole device. Locked for reading while a channel is started or
    /// told of descriptors, for writing during a reset.
    resets: RwLock<u64>,
}

impl IoatDevice {
    pub(super) fn new(device: Arc<dyn DmaDevice>) -> Self {
        Self { device, resets: RwLock::new(0) }
    }

    /// The registers and the memory of the device.
    pub(super) fn hardware(&self) -> &Arc<dyn DmaDevice> {
        &self.device
    }

    /// Resets the whole device.
    pub(super) fn reset(&self) -> io::Result<()> {
        let mut resets = self.resets.write().unwrap_or_else(PoisonError::into_inner);
        // Before the reset, which may fail half-way.
        *resets += 1;
        self.device.reset()
    }

    /// The number of resets; the device is not reset while the guard lives.
    pub(super) fn hold(&self) -> RwLockReadGuard<'_, u64> {
        self.resets.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, without waiting; `None` while the device is being reset.
    pub(super) fn try_hold(&self) -> Option<RwLockReadGuard<'_, u64>> {
        match self.resets.try_read() {
            Ok(resets) => Some(resets),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}
