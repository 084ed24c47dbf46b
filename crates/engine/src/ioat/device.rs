//! A device that the channels of an engine share. A reset of the device ends the chains of all its
//! channels: a counter tells each of them.

use std::io;
use std::sync::Arc;

use memferry_sys::device::DmaDevice;

use crate::pci::ResetGuard;

/// The device.
#[derive(Debug)]
pub(super) struct IoatDevice {
    device: Arc<dyn DmaDevice>,
    /// Channels are started and told of descriptors while the device is not reset.
    pub(super) guard: ResetGuard,
}

impl IoatDevice {
    /// A device with this many channels.
    pub(super) fn new(device: Arc<dyn DmaDevice>, channels: usize) -> Self {
        Self { device, guard: ResetGuard::new(channels) }
    }

    /// The registers and the memory of the device.
    pub(super) fn hardware(&self) -> &Arc<dyn DmaDevice> {
        &self.device
    }

    /// Resets the whole device.
    pub(super) fn reset(&self) -> io::Result<()> {
        self.guard.reset(|| self.device.reset())
    }
}
