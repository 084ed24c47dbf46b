//! The settings of a port, and the facts that the planner gets from them.

use std::time::Duration;

use memferry_memory::lookup::{Geometry, Settings as LookupSettings};

/// A process bound to one core is not alone on the machine for that.
pub(crate) use memferry_sys::affinity::online_cores;
use memferry_sys::cpu;

use super::{copy_profile, has_device};
use crate::connect::Allowed;
use crate::plan::{Facts, Limits, Profile};

/// Settings of an endpoint or link.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) allowed: Allowed,
    pub(crate) limits: Limits,
    pub(crate) cross_memory: bool,
    pub(crate) background: bool,
    pub(crate) spin_ns: Option<u64>,
    pub(crate) most_peers: usize,
    pub(crate) most_operations: usize,
    pub(crate) most_kept_bytes: usize,
    pub(crate) most_kept: usize,
    pub(crate) connect_timeout: Duration,
    pub(crate) lookup: LookupSettings,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            allowed: Allowed::default(),
            limits: Limits::default(),
            cross_memory: true,
            background: false,
            spin_ns: None,
            most_peers: 1024,
            most_operations: 1 << 16,
            most_kept_bytes: 16 << 20,
            most_kept: 16 << 10,
            connect_timeout: Duration::from_secs(10),
            lookup: default_lookup(),
        }
    }
}

impl Settings {
    pub(crate) fn facts(&self) -> Facts {
        let copy = copy_profile();
        Facts {
            // The builder has asked for it before.
            profile: Profile::load().cloned().unwrap_or_else(|_| Profile::built_in()),
            limits: self.limits,
            l2_bytes: cpu::facts().l2_bytes as u64,
            stream_bytes: copy.shared_stream_bytes as u64,
            has_device: has_device(),
        }
    }

    /// How long to look before sleeping. Where processes share cores, others run between any two
    /// looks, so it is their time that passes.
    pub(crate) fn spin_ns(&self, crowded: bool) -> u64 {
        const ROOMY: u64 = 50_000;
        const CROWDED: u64 = 100_000;
        self.spin_ns.unwrap_or(if crowded { CROWDED } else { ROOMY })
    }
}

/// A cache of 16384 pages in lines of 64, four to a set: what the paper on dynamic handle lookup
/// found to be the best trade, and enough for 64 MiB at a time.
fn default_lookup() -> LookupSettings {
    LookupSettings::dynamic(Geometry::new(16 << 10, 64, 4).expect("a valid shape"))
}
