//! The configuration of a port, and the context of its planner.

use std::time::Duration;

use memferry_memory::lookup::LookupConfig as LookupSettings;

/// All online cores: the affinity of this process says nothing about other processes.
pub(crate) use memferry_sys::affinity::online_cores;
use memferry_sys::cpu;

use super::has_device;
use crate::connect::AllowedUsers;
use crate::plan::{MessagePlanContext, MessageProfile, PathThresholds};

/// Configuration of an endpoint or link.
#[derive(Debug, Clone)]
pub(crate) struct PortConfig {
    pub(crate) allowed: AllowedUsers,
    pub(crate) limits: PathThresholds,
    pub(crate) cross_memory: bool,
    pub(crate) background: bool,
    pub(crate) spin_ns: Option<u64>,
    pub(crate) max_peers: usize,
    pub(crate) max_operations: usize,
    pub(crate) max_unexpected_bytes: usize,
    pub(crate) max_unexpected_messages: usize,
    pub(crate) connect_timeout: Duration,
    /// The lookup of windows. `None`: memory whose place can be computed is not looked up.
    pub(crate) lookup: Option<LookupSettings>,
}

impl Default for PortConfig {
    fn default() -> Self {
        Self {
            allowed: AllowedUsers::default(),
            limits: PathThresholds::default(),
            cross_memory: true,
            background: false,
            spin_ns: None,
            max_peers: 1024,
            max_operations: 1 << 16,
            max_unexpected_bytes: 16 << 20,
            max_unexpected_messages: 16 << 10,
            connect_timeout: Duration::from_secs(10),
            lookup: None,
        }
    }
}

impl PortConfig {
    pub(crate) fn plan_context(&self) -> MessagePlanContext {
        MessagePlanContext {
            // The builder has loaded the profile before, and has reported errors.
            profile: MessageProfile::load().cloned().unwrap_or_else(|_| MessageProfile::built_in()),
            thresholds: self.limits,
            l2_bytes: cpu::info().l2_bytes as u64,
            stream_bytes: super::streaming::stream_bytes(),
            has_device: has_device(),
        }
    }

    /// Time of polling before a sleep, in ns. It is longer if processes share cores: other processes run
    /// between two polls.
    pub(crate) fn spin_ns(&self, crowded: bool) -> u64 {
        const DEFAULT_SPIN_NS: u64 = 50_000;
        const OVERSUBSCRIBED_SPIN_NS: u64 = 100_000;
        self.spin_ns.unwrap_or(if crowded { OVERSUBSCRIBED_SPIN_NS } else { DEFAULT_SPIN_NS })
    }
}
