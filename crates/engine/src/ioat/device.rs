//! A device that the channels of an engine share. A reset of the device ends the chains of all its
//! channels: a counter tells each of them.

use std::io;
use std::sync::Arc;

use memferry_sys::EventFd;
use memferry_sys::device::DmaDevice;

use super::registers::{self as r, ChannelState};
use crate::pci::{ResetGuard, poll_until};

/// The device.
#[derive(Debug)]
pub(super) struct IoatDevice {
    device: Arc<dyn DmaDevice>,
    /// Channels are started and told of descriptors while the device is not reset.
    pub(super) guard: ResetGuard,
    /// The interrupts of the channels; fewer, or none, if the device or the kernel has none.
    interrupts: Vec<Arc<EventFd>>,
}

impl IoatDevice {
    /// A device with this many channels.
    pub(super) fn new(device: Arc<dyn DmaDevice>, channels: usize) -> Self {
        let interrupts = device.connect_interrupts(channels).unwrap_or_else(|error| {
            tracing::debug!(device = device.name(), %error, "no interrupts: waiters sleep by estimate");
            Vec::new()
        });
        Self { device, guard: ResetGuard::new(channels), interrupts }
    }

    /// The interrupt of a channel.
    pub(super) fn interrupt(&self, channel: usize) -> Option<&Arc<EventFd>> {
        self.interrupts.get(channel)
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

/// Stops the channel with these registers in any state, and clears its errors.
pub(super) fn stop(device: &dyn DmaDevice, at: usize) -> io::Result<()> {
    let timeout = device.patience();
    let status = || device.read64(at + r::CHANSTS);
    let is_running = |status| {
        let state = ChannelState::of(status);
        matches!(state, Some(ChannelState::Active | ChannelState::Idle | ChannelState::Armed))
    };
    if is_running(status()) {
        // SAFETY: a channel that stops accesses no memory.
        unsafe { device.write8(at + r::CHANCMD, r::CHANCMD_SUSPEND) };
        // A channel that ignores the command is reset all the same.
        let _ = poll_until(timeout, || !is_running(status()));
    }
    let errors = device.read32(at + r::CHANERR);
    // SAFETY: as above.
    unsafe {
        device.write32(at + r::CHANERR, errors);
        device.write8(at + r::CHANCMD, r::CHANCMD_RESET);
    }
    let is_reset_done = || device.read8(at + r::CHANCMD) & r::CHANCMD_RESET == 0;
    match poll_until(timeout, is_reset_done) {
        true => Ok(()),
        false => Err(io::Error::other("the channel cannot be reset")),
    }
}
