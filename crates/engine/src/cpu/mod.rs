//! The processor engine: threads on spare cores that copy, fill and compare.

mod calibrate;
mod channel;
mod inline_channel;
mod profile;
mod sibling;

use std::sync::Arc;

#[doc(hidden)]
pub use channel::{BUSY_BYTES_PER_NS, LONG_BYTES, MAX_SPINS, POLLS_PER_CLOCK, YIELD_NS};
pub use profile::{CpuProfile, ProfileError, ProfileOrigin, ProfileSource};
pub use sibling::SiblingUse;

use crate::contract::{
    Capabilities, Channel, ChannelOptions, CopyDirection, CostLine, Engine, Kernel, MemoryKind,
    MemoryKindSet, OpcodeSet, OpenError, RegistrationMode,
};
use crate::runtime::wake_chain::WakeChain;
use crate::runtime::window::WindowKernel;

/// The default capacity of a channel, in descriptors.
pub const DEFAULT_CAPACITY: usize = 512;
/// The default time for which an idle channel polls before it sleeps, in nanoseconds. Waking a
/// sleeping thread takes about as long.
pub const DEFAULT_SPIN_NS: u64 = 50_000;

/// Spare cores as a copy engine.
///
/// ```
/// use std::sync::Arc;
///
/// use memferry::Ferry;
/// use memferry::engine::cpu::{CpuEngine, CpuProfile, ProfileSource};
///
/// let engine = CpuEngine::new(CpuProfile::load(&ProfileSource::BuiltIn)?);
/// let ferry = Ferry::builder().engine(Arc::new(engine), 1).build()?;
/// let mut target = [0u8; 4];
/// ferry.copy(&[1, 2, 3, 4], &mut target)?;
/// assert_eq!(target, [1, 2, 3, 4]);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct CpuEngine {
    capabilities: Capabilities,
    profile: Arc<CpuProfile>,
    spin_ns: u64,
    has_threads: bool,
    /// The channels, which wake each other.
    wake_chain: Arc<WakeChain>,
}

impl CpuEngine {
    /// Creates the engine with the measured profile of this machine.
    pub fn new(profile: Arc<CpuProfile>) -> Self {
        let is_single_core = memferry_sys::affinity::allowed_cores().len() == 1;
        Self {
            capabilities: Capabilities {
                operations: OpcodeSet::ALL,
                memory: MemoryKindSet::of(&[MemoryKind::Host]),
                max_descriptor_bytes: usize::MAX,
                preferred_alignment: 64,
                boundary_bytes: None,
                registration: RegistrationMode::NotRequired,
                claims_chunks: true,
                infallible: true,
                auto_progress: true,
                writes_notifications: false,
            },
            wake_chain: Arc::new(WakeChain::new(profile.wake_ns)),
            profile,
            // On a single core, a spinning channel only keeps other threads from running.
            spin_ns: if is_single_core { 0 } else { DEFAULT_SPIN_NS },
            has_threads: true,
        }
    }

    /// Creates the engine for a process that may not start threads: the submitting thread executes.
    pub fn without_threads(profile: Arc<CpuProfile>) -> Self {
        Self { has_threads: false, ..Self::new(profile) }
    }

    /// The measured profile.
    pub fn profile(&self) -> &Arc<CpuProfile> {
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

    fn cost(&self, _direction: CopyDirection) -> CostLine {
        CostLine::from_bandwidth(self.profile.handover_ns, self.profile.stream_gb_per_s)
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        if !self.has_threads {
            return Ok(Arc::new(inline_channel::InlineChannel::new()));
        }
        let CpuProfile { streaming, shared_stream_bytes, stream_gb_per_s, .. } = *self.profile;
        let kernel = Kernel::Stream(streaming).or_cached();
        let remote = if kernel.bypasses_caches() { Kernel::Cached } else { kernel };
        let (bytes, gb_per_s) = (shared_stream_bytes as u64, stream_gb_per_s);
        let window = WindowKernel { kernel, bytes, remote, gb_per_s };
        let idle = self.wake_chain.join();
        Ok(Arc::new(channel::open(options, DEFAULT_CAPACITY, self.spin_ns, Some(window), idle)?))
    }
}
