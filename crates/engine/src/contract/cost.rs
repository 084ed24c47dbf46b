//! The cost line of an engine: what a transfer of a size will take.

use super::MemoryKind;

/// From one kind of memory to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Direction {
    /// Where the bytes come from.
    pub source: MemoryKind,
    /// Where they go.
    pub target: MemoryKind,
}

impl Direction {
    /// Inside ordinary memory.
    pub const HOST_TO_HOST: Self = Self { source: MemoryKind::Host, target: MemoryKind::Host };
    /// From ordinary memory to a device.
    pub const TO_DEVICE: Self = Self { source: MemoryKind::Host, target: MemoryKind::Device };
    /// From a device to ordinary memory.
    pub const FROM_DEVICE: Self = Self { source: MemoryKind::Device, target: MemoryKind::Host };
    /// Inside a device.
    pub const IN_DEVICE: Self = Self { source: MemoryKind::Device, target: MemoryKind::Device };
}

/// What it costs to make ordinary memory ready for an engine that registers it itself, beside the
/// cost of the transfer. Both go on while earlier bytes move.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Preparation {
    /// Whether memory is registered that its owner has not registered.
    pub registers: bool,
    /// Registering it.
    pub register: CostLine,
    /// Registering it where it is made of huge pages.
    pub register_huge: CostLine,
    /// Copying it through a ring instead, by one channel.
    pub stage: CostLine,
}

/// Start-up plus time per byte.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostLine {
    /// What every transfer costs, however small.
    pub startup_ns: f64,
    /// What each byte adds.
    pub ns_per_byte: f64,
}

impl CostLine {
    /// The line of a start-up time and a bandwidth in bytes per nanosecond (GB/s).
    pub fn from_bandwidth(startup_ns: f64, gb_per_s: f64) -> Self {
        Self { startup_ns, ns_per_byte: 1.0 / gb_per_s }
    }

    /// The estimate for a size.
    pub fn estimate_ns(&self, bytes: u64) -> f64 {
        self.startup_ns + self.ns_per_byte * bytes as f64
    }

    /// The bandwidth that the line approaches, in GB/s.
    pub fn gb_per_s(&self) -> f64 {
        1.0 / self.ns_per_byte
    }
}
