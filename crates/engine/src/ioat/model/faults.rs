//! How the model misbehaves.

use std::time::Duration;

pub use memferry_sys::device::code::{EFAULT, ENOMEM, ENOSPC};

use super::super::registers::error;

/// The kernel's number for a device that does not answer.
pub const EIO: i32 = 5;
/// The kernel's number for a request that makes no sense.
pub const EINVAL: i32 = 22;
/// The kernel's number for something that takes too long.
pub const ETIMEDOUT: i32 = 110;

/// Which of the things that happen one after the other are meant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum When {
    /// None.
    #[default]
    Never,
    /// The one of this number, counted from 1.
    At(u64),
    /// One in so many.
    Every(u64),
    /// Each.
    Always,
}

impl When {
    /// Whether the thing of this number is meant.
    pub fn hits(self, number: u64) -> bool {
        match self {
            Self::Never => false,
            Self::At(at) => number == at,
            Self::Every(every) => number.is_multiple_of(every),
            Self::Always => true,
        }
    }
}

/// How the model misbehaves. What is counted is counted over all channels, from the moment at which
/// the faults were set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Faults {
    /// Descriptors at which the channel halts.
    pub halts: When,
    /// With which error it does.
    pub halt_error: u32,
    /// Descriptors at which the channel stops and says nothing, until it is reset.
    pub stalls: When,
    /// Completion words that are not written. The registers still say what was finished.
    pub loses_write_backs: When,
    /// Every descriptor takes so much longer.
    pub delay: Duration,
    /// So many resets do not end.
    pub refused_resets: u32,
    /// The device is gone: its registers read as ones, and nothing moves. A device that comes back
    /// is in the state of power-on.
    pub is_dead: bool,
    /// Mappings that are refused.
    pub refuses_maps: When,
    /// With which of the kernel's errors they are.
    pub map_error: i32,
    /// No more than so many bytes can be mapped at a time.
    pub most_mapped_bytes: Option<usize>,
}

impl Default for Faults {
    /// None at all.
    fn default() -> Self {
        Self {
            halts: When::Never,
            halt_error: error::READ_DATA,
            stalls: When::Never,
            loses_write_backs: When::Never,
            delay: Duration::ZERO,
            refused_resets: 0,
            is_dead: false,
            refuses_maps: When::Never,
            map_error: ENOMEM,
            most_mapped_bytes: None,
        }
    }
}

/// The faults and how much has happened since they were set.
#[derive(Debug, Default)]
pub(super) struct Script {
    pub(super) faults: Faults,
    descriptors: u64,
    write_backs: u64,
    maps: u64,
}

/// What becomes of a descriptor by the script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Runs { delay: Duration },
    Halts { error: u32 },
    Stalls,
}

impl Script {
    pub(super) fn new(faults: Faults) -> Self {
        Self { faults, ..Self::default() }
    }

    pub(super) fn next_descriptor(&mut self) -> Fate {
        self.descriptors += 1;
        let faults = self.faults;
        if faults.stalls.hits(self.descriptors) {
            Fate::Stalls
        } else if faults.halts.hits(self.descriptors) {
            Fate::Halts { error: faults.halt_error }
        } else {
            Fate::Runs { delay: faults.delay }
        }
    }

    pub(super) fn loses_write_back(&mut self) -> bool {
        self.write_backs += 1;
        self.faults.loses_write_backs.hits(self.write_backs)
    }

    /// The error of a mapping that the script refuses.
    pub(super) fn refuses_map(&mut self) -> Option<i32> {
        self.maps += 1;
        self.faults.refuses_maps.hits(self.maps).then_some(self.faults.map_error)
    }

    pub(super) fn refuses_reset(&mut self) -> bool {
        let refuses = self.faults.refused_resets > 0;
        self.faults.refused_resets = self.faults.refused_resets.saturating_sub(1);
        refuses
    }
}
