//! The processor engine: threads on spare cores that copy, fill and compare.

mod calibrate;
mod caller;
mod channel;
pub mod park;
mod profile;
pub mod ring;

use std::sync::Arc;

pub use profile::{Origin, Profile, ProfileError, ProfileSource};

use crate::contract::{
    Capabilities, Channel, ChannelOptions, CostLine, Direction, Engine, MemoryKind, MemoryKinds,
    OpenError, Operation, Operations, Registration,
};

/// Descriptors a channel holds unless told otherwise.
const DEFAULT_CAPACITY: usize = 512;
/// How long an idle channel looks for work before it sleeps, unless told otherwise. Waking a
/// sleeping thread takes about as long.
const DEFAULT_SPIN_NS: u64 = 50_000;

/// Spare cores as a copy engine.
#[derive(Debug)]
pub struct CpuEngine {
    capabilities: Capabilities,
    profile: Arc<Profile>,
    spin_ns: u64,
    has_threads: bool,
}

impl CpuEngine {
    /// The engine with what was measured of this machine.
    pub fn new(profile: Arc<Profile>) -> Self {
        let alone = memferry_sys::affinity::allowed_cores().len() == 1;
        Self {
            capabilities: Capabilities {
                operations: Operations::of(&[
                    Operation::Copy,
                    Operation::Move,
                    Operation::Fill,
                    Operation::Compare,
                ]),
                memory: MemoryKinds::of(&[MemoryKind::Host]),
                largest_descriptor_bytes: usize::MAX,
                preferred_alignment: 64,
                boundary_bytes: None,
                registration: Registration::NotNeeded,
                claims_chunks: true,
                never_fails: true,
                self_driving: true,
                notifies: false,
            },
            profile,
            // On a single core, a spinning channel only keeps others from running.
            spin_ns: if alone { 0 } else { DEFAULT_SPIN_NS },
            has_threads: true,
        }
    }

    /// The same for a process that may start no thread: whoever submits carries out.
    pub fn without_threads(profile: Arc<Profile>) -> Self {
        Self { has_threads: false, ..Self::new(profile) }
    }

    /// What was measured.
    pub fn profile(&self) -> &Arc<Profile> {
        &self.profile
    }
}

impl Engine for CpuEngine {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn cost(&self, _direction: Direction) -> CostLine {
        CostLine::from_bandwidth(self.profile.handover_ns, self.profile.stream_gb_per_s)
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        if !self.has_threads {
            return Ok(Arc::new(caller::CallerChannel::new()));
        }
        Ok(Arc::new(channel::open(options, DEFAULT_CAPACITY, self.spin_ns)?))
    }
}
