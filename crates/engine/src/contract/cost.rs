//! The cost line of an engine: an estimate of the time that a transfer takes.

use super::MemoryKind;

/// The kinds of memory of source and target.
///
/// ```
/// use memferry::engine::{CopyDirection, MemoryKind};
///
/// let upload = CopyDirection { source: MemoryKind::Host, target: MemoryKind::Device };
/// assert_eq!(upload, CopyDirection::HOST_TO_DEVICE);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CopyDirection {
    /// The kind of the source.
    pub source: MemoryKind,
    /// The kind of the target.
    pub target: MemoryKind,
}

impl CopyDirection {
    /// Between two ranges of host memory.
    pub const HOST_TO_HOST: Self = Self { source: MemoryKind::Host, target: MemoryKind::Host };
    /// From host memory to a device.
    pub const HOST_TO_DEVICE: Self = Self { source: MemoryKind::Host, target: MemoryKind::Device };
    /// From a device to host memory.
    pub const DEVICE_TO_HOST: Self = Self { source: MemoryKind::Device, target: MemoryKind::Host };
    /// Between two ranges of one device.
    pub const DEVICE_TO_DEVICE: Self =
        Self { source: MemoryKind::Device, target: MemoryKind::Device };
}

/// The cost of preparing host memory for an engine that registers it itself, in addition to the
/// cost of the transfer. Both kinds of preparation overlap with the copy of earlier bytes.
///
/// ```
/// use memferry::Ferry;
/// use memferry::plan::RegistrationCosts;
///
/// let ferry = Ferry::new()?;
/// let costs: Vec<Option<RegistrationCosts>> =
///     ferry.plan_context().engines.iter().map(|engine| engine.registration_costs).collect();
/// assert!(costs.iter().all(Option::is_none)); // processors register nothing
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RegistrationCosts {
    /// Whether the engine registers memory that its owner has not registered.
    pub registers: bool,
    /// The cost of registering memory.
    pub register: CostLine,
    /// The cost of registering memory in huge pages.
    pub register_huge: CostLine,
    /// The cost of copying memory through the staging buffers of one channel instead.
    pub staging: CostLine,
}

/// A start-up time plus a time per byte.
///
/// ```
/// use memferry::engine::CostLine;
///
/// let line = CostLine::from_bandwidth(1000.0, 10.0); // 1 µs, then 10 GB/s
/// assert_eq!(line.estimate_ns(1_000_000).round(), 101_000.0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostLine {
    /// The fixed cost of a transfer, in nanoseconds.
    pub startup_ns: f64,
    /// The cost of each byte, in nanoseconds.
    pub ns_per_byte: f64,
}

impl CostLine {
    /// The line with a start-up time in nanoseconds and a bandwidth in GB/s (bytes per nanosecond).
    pub fn from_bandwidth(startup_ns: f64, gb_per_s: f64) -> Self {
        Self { startup_ns, ns_per_byte: 1.0 / gb_per_s }
    }

    /// The estimated time of a transfer of `bytes`, in nanoseconds.
    pub fn estimate_ns(&self, bytes: u64) -> f64 {
        self.startup_ns + self.ns_per_byte * bytes as f64
    }

    /// The asymptotic bandwidth of the line, in GB/s.
    pub fn gb_per_s(&self) -> f64 {
        1.0 / self.ns_per_byte
    }
}
