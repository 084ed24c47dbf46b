//! Fault injection for the model.

use std::time::Duration;

pub use memferry_sys::device::code::{EFAULT, ENOMEM, ENOSPC};

use crate::ioat::registers::error;

/// The kernel's number of an I/O error.
pub const EIO: i32 = 5;
/// The kernel's number of an invalid argument.
pub const EINVAL: i32 = 22;
/// The kernel's number of a timeout.
pub const ETIMEDOUT: i32 = 110;

/// The events of a sequence at which a fault is injected.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FaultSchedule {
    /// No event.
    #[default]
    Never,
    /// The event with this number, counted from 1.
    At(u64),
    /// Every n-th event.
    Every(u64),
    /// Every event.
    Always,
}

impl FaultSchedule {
    /// Whether the event with this number is selected.
    pub fn matches(self, number: u64) -> bool {
        match self {
            Self::Never => false,
            Self::At(at) => number == at,
            Self::Every(every) => number.is_multiple_of(every),
            Self::Always => true,
        }
    }
}

/// The faults of the model. Events are counted over all channels, from the time at which the faults
/// were set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoatFaults {
    /// Descriptors at which the channel halts.
    pub halts: FaultSchedule,
    /// The error of these halts.
    pub halt_error: u32,
    /// Descriptors at which the channel stops without a report, until it is reset.
    pub stalls: FaultSchedule,
    /// Completion words that are not written. The registers still report what was finished.
    pub loses_write_backs: FaultSchedule,
    /// The additional time of every descriptor.
    pub delay: Duration,
    /// The number of resets that do not end.
    pub refused_resets: u32,
    /// The device is removed: its registers read as ones, and it copies nothing. A device that
    /// returns is in the power-on state.
    pub is_removed: bool,
    /// Mappings that fail.
    pub refuses_maps: FaultSchedule,
    /// The kernel error of these failures.
    pub map_error: i32,
    /// The maximum number of bytes that can be mapped at a time.
    pub max_mapped_bytes: Option<usize>,
}

impl Default for IoatFaults {
    /// No faults.
    fn default() -> Self {
        Self {
            halts: FaultSchedule::Never,
            halt_error: error::READ_DATA,
            stalls: FaultSchedule::Never,
            loses_write_backs: FaultSchedule::Never,
            delay: Duration::ZERO,
            refused_resets: 0,
            is_removed: false,
            refuses_maps: FaultSchedule::Never,
            map_error: ENOMEM,
            max_mapped_bytes: None,
        }
    }
}

/// The patience of a driver while nothing is to fail by a timeout. The driver waits for threads of the
/// model, which a busy machine may not run for seconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// The patience if a timeout is what the driver is to meet.
pub(crate) const SHORT_PATIENCE: Duration = Duration::from_secs(1);

impl IoatFaults {
    fn patience(&self) -> Duration {
        let is_silent = self.stalls != FaultSchedule::Never;
        let fails = is_silent || self.refused_resets > 0 || self.is_removed;
        if fails { SHORT_PATIENCE } else { PATIENCE }
    }
}

/// The faults and the events since they were set.
#[derive(Debug, Default)]
pub(super) struct IoatFaultScript {
    pub(super) faults: IoatFaults,
    /// By the faults as they were set: refused resets are counted down.
    pub(super) patience: Duration,
    descriptors: u64,
    write_backs: u64,
    maps: u64,
}

/// The fault that the script injects at a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InjectedFault {
    Runs { delay: Duration },
    Halts { error: u32 },
    Stalls,
}

impl IoatFaultScript {
    pub(super) fn new(faults: IoatFaults) -> Self {
        Self { patience: faults.patience(), faults, ..Self::default() }
    }

    pub(super) fn next_descriptor(&mut self) -> InjectedFault {
        self.descriptors += 1;
        let faults = self.faults;
        if faults.stalls.matches(self.descriptors) {
            InjectedFault::Stalls
        } else if faults.halts.matches(self.descriptors) {
            InjectedFault::Halts { error: faults.halt_error }
        } else {
            InjectedFault::Runs { delay: faults.delay }
        }
    }

    pub(super) fn loses_write_back(&mut self) -> bool {
        self.write_backs += 1;
        self.faults.loses_write_backs.matches(self.write_backs)
    }

    /// The error of a mapping that the script fails.
    pub(super) fn refuses_map(&mut self) -> Option<i32> {
        self.maps += 1;
        self.faults.refuses_maps.matches(self.maps).then_some(self.faults.map_error)
    }

    pub(super) fn refuses_reset(&mut self) -> bool {
        let refuses = self.faults.refused_resets > 0;
        self.faults.refused_resets = self.faults.refused_resets.saturating_sub(1);
        refuses
    }
}
