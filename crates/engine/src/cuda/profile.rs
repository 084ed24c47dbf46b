//! The profile of a device, measured when it is opened.

use crate::contract::{CopyDirection, CostLine, MemoryKind, RegistrationCosts};

/// The time in nanoseconds to wake a channel, and for the channel to wake a waiter.
const HANDOFF_NS: f64 = 40_000.0;

/// Start-up times and bandwidths, in nanoseconds and bytes per nanosecond (GB/s).
///
/// ```
/// use memferry::engine::cuda::CudaProfile;
///
/// let typical = CudaProfile::default();
/// assert!(typical.host_to_device > typical.staging); // registered memory is faster
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CudaProfile {
    /// The time from the submission of a small copy to its end, in nanoseconds.
    pub startup_ns: f64,
    /// The bandwidth from registered memory to the device.
    pub host_to_device: f64,
    /// The bandwidth from the device to registered memory.
    pub device_to_host: f64,
    /// The bandwidth between registered memory, through the device.
    pub host_to_host: f64,
    /// The bandwidth inside the device.
    pub device_to_device: f64,
    /// The time to register and unregister 64 KiB, in nanoseconds.
    pub register_startup_ns: f64,
    /// The bandwidth of registering memory in normal pages.
    pub register: f64,
    /// The bandwidth of registering memory in huge pages.
    pub register_huge: f64,
    /// The bandwidth of one channel through its staging buffers.
    pub staging: f64,
}

impl Default for CudaProfile {
    /// Typical values of a current device, for devices that could not be measured.
    fn default() -> Self {
        Self {
            startup_ns: 10_000.0,
            host_to_device: 50.0,
            device_to_host: 50.0,
            host_to_host: 40.0,
            device_to_device: 1000.0,
            register_startup_ns: 100_000.0,
            register: 18.0,
            register_huge: 30.0,
            staging: 7.0,
        }
    }
}

impl CudaProfile {
    /// The cost of a copy of registered memory.
    pub(super) fn cost(&self, direction: CopyDirection) -> CostLine {
        use MemoryKind::{Device, Host};
        let (factor, rate) = match (direction.source, direction.target) {
            (Host, Host) => (2.0, self.host_to_host),
            (Host, Device) => (1.0, self.host_to_device),
            (Device, Host) => (1.0, self.device_to_host),
            (Device, Device) => (1.0, self.device_to_device),
        };
        CostLine::from_bandwidth(HANDOFF_NS + factor * self.startup_ns, rate)
    }

    /// The cost of registering or staging memory.
    pub(super) fn registration_costs(&self, registers: bool) -> RegistrationCosts {
        RegistrationCosts {
            registers,
            register: CostLine::from_bandwidth(self.register_startup_ns, self.register),
            register_huge: CostLine::from_bandwidth(self.register_startup_ns, self.register_huge),
            staging: CostLine::from_bandwidth(self.startup_ns, self.staging),
        }
    }
}
