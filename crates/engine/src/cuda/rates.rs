//! What the device was measured to do, when it was opened.

use crate::contract::{CostLine, Direction, MemoryKind, Preparation};

/// What it takes to wake a channel, and for the channel to wake who waits.
const HAND_OVER_NS: f64 = 40_000.0;

/// Start-up times and bandwidths, in nanoseconds and bytes per nanosecond (GB/s).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// From the hand-over of a small copy to its end.
    pub startup_ns: f64,
    /// From registered memory to the device.
    pub inward: f64,
    /// From the device to registered memory.
    pub outward: f64,
    /// Between registered memory, through the device.
    pub through: f64,
    /// Inside the device.
    pub within: f64,
    /// Registering a little memory and undoing that.
    pub register_startup_ns: f64,
    /// Registering memory of ordinary pages.
    pub register: f64,
    /// Registering memory of huge pages.
    pub register_huge: f64,
    /// One channel that copies memory through its ring.
    pub stage: f64,
}

impl Default for Rates {
    /// Sensible for a current device, where nothing was measured.
    fn default() -> Self {
        Self {
            startup_ns: 10_000.0,
            inward: 50.0,
            outward: 50.0,
            through: 40.0,
            within: 1000.0,
            register_startup_ns: 100_000.0,
            register: 18.0,
            register_huge: 30.0,
            stage: 7.0,
        }
    }
}

impl Rates {
    /// What a copy of registered memory costs.
    pub(super) fn cost(&self, direction: Direction) -> CostLine {
        use MemoryKind::{Device, Host};
        let (factor, rate) = match (direction.source, direction.target) {
            (Host, Host) => (2.0, self.through),
            (Host, Device) => (1.0, self.inward),
            (Device, Host) => (1.0, self.outward),
            (Device, Device) => (1.0, self.within),
        };
        CostLine::from_bandwidth(HAND_OVER_NS + factor * self.startup_ns, rate)
    }

    /// What it costs to make memory ready.
    pub(super) fn preparation(&self, registers: bool) -> Preparation {
        Preparation {
            registers,
            register: CostLine::from_bandwidth(self.register_startup_ns, self.register),
            register_huge: CostLine::from_bandwidth(self.register_startup_ns, self.register_huge),
            stage: CostLine::from_bandwidth(self.startup_ns, self.stage),
        }
    }
}
