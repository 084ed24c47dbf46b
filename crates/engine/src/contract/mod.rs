//! The engine contract: the traits [`Engine`] and [`Channel`], and the values that they exchange.
//!
//! A caller submits descriptors in batches. A channel reports completions as a rising sequence
//! number, so a check for completion is one load and one compare. A full channel is not an error:
//! the descriptors that it did not accept remain with the caller. An engine finishes or fails every
//! descriptor that it accepted.

mod capabilities;
mod cost;
mod descriptor;
mod device_memory;
mod device_stream;
mod error;
#[cfg(not(loom))]
pub(crate) mod factory;
mod leases;
mod opcode;
mod tuning;

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_sys::sync::{spin_hint, thread};

use crate::completion::Completion;

pub use capabilities::{Capabilities, MemoryKind, MemoryKindSet, OpcodeSet, RegistrationMode};
pub use cost::{CopyDirection, CostLine, RegistrationCosts};
pub use descriptor::{Descriptor, DescriptorScope};
pub use device_memory::{DeviceAllocError, DeviceAllocator, DeviceBuffer};
pub use device_stream::{DEVICE_STREAM_MARKS, DeviceStream};
pub use error::{ExecutionError, OpenError, SubmitError};
#[cfg(not(loom))]
pub use factory::{EngineChoice, EngineFactory, EngineSelection, OpenOptions};
pub use leases::{DescriptorLeases, NotificationWrite, PinnedLocation, Pinner};
pub use memferry_memory::pin_cache::PinCacheLimits;
#[cfg(not(loom))]
pub use memferry_memory::registration::{RegistrationCache, ReuseHint};
pub use opcode::{Kernel, Opcode};
pub use tuning::{GroupKernel, GroupKernels, TuningFact, TuningOrigin};

/// The number of a descriptor in its channel. The first descriptor has 1; 0 means none yet.
///
/// ```
/// use memferry::engine::Sequence;
///
/// let (completed, submitted): (Sequence, Sequence) = (3, 5);
/// assert!(completed < submitted); // descriptors 4 and 5 are in flight
/// ```
pub type Sequence = u64;

/// An implementation that moves bytes.
///
/// ```
/// use memferry::engine::cpu::{CpuEngine, CpuProfile, ProfileSource};
/// use memferry::engine::{ChannelOptions, CopyDirection, Engine};
///
/// let engine = CpuEngine::new(CpuProfile::load(&ProfileSource::BuiltIn)?);
/// assert_eq!(engine.name(), "cpu");
/// assert!(engine.cost(CopyDirection::HOST_TO_HOST).estimate_ns(1 << 20) > 0.0);
/// let channel = engine.open_channel(&ChannelOptions::default())?;
/// assert_eq!(channel.completed(), 0);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub trait Engine: Any + Send + Sync + Debug {
    /// The short name in plans, settings and reports.
    fn name(&self) -> &str;

    /// The names of its devices for display, each once: addresses on the bus, work queues such as
    /// `wq0.0`, or a GPU with its number. Empty for an engine without devices.
    fn devices(&self) -> Vec<String> {
        Vec::new()
    }

    /// The operations and limits of the engine, and its requirements of memory.
    fn capabilities(&self) -> &Capabilities;

    /// The measured cost of a transfer in one direction: start-up time plus time per byte.
    fn cost(&self, direction: CopyDirection) -> CostLine;

    /// The values by which the engine is tuned, with their reasons.
    fn tuning(&self) -> Vec<TuningFact> {
        Vec::new()
    }

    /// Whether the channels start an [ordered](Descriptor::ordered) descriptor when everything before
    /// it has ended. To the channels of other engines a submitter gives a transfer that is ordered
    /// after others when these are complete.
    fn orders_descriptors(&self) -> bool {
        false
    }

    /// The pinner for this engine's memory. An engine with [`RegistrationMode::BySubmitter`]
    /// returns one, every other engine `None`. The submitter pins memory with it and attaches the
    /// leases to the descriptors ([`Descriptor::pinned_source`], [`Descriptor::pinned_target`]);
    /// the engine fails a descriptor whose memory is not pinned.
    fn pinner(&self) -> Option<Arc<dyn Pinner>> {
        None
    }

    /// The registration cache of an engine with [`RegistrationMode::ByEngine`]; `None` for every
    /// other engine.
    #[cfg(not(loom))]
    fn registrations(&self) -> Option<&RegistrationCache> {
        None
    }

    /// The cost of registering or staging memory, for engines that have
    /// [`registrations`](Engine::registrations).
    fn registration_costs(&self) -> Option<RegistrationCosts> {
        None
    }

    /// The kind of memory at an address, if the engine knows it.
    fn memory_kind(&self, _address: u64) -> Option<MemoryKind> {
        None
    }

    /// Whether the engine can copy the device memory at this address: `false` if the memory belongs
    /// to another device.
    fn reaches(&self, _address: u64) -> bool {
        true
    }

    /// The allocator of device memory, for engines whose device has memory of its own.
    fn device_allocator(&self) -> Option<&dyn DeviceAllocator> {
        None
    }

    /// Copies between host and device memory on the calling thread, and returns when the copy is
    /// complete. `None` if the engine does not do that, or not for this copy: then a channel makes
    /// it.
    ///
    /// # Safety
    /// Both ranges must be valid, the one in host memory, the other in memory of the engine's
    /// device, as the direction says. No other code may write to either or read the target.
    unsafe fn copy_by_caller(
        &self,
        _direction: CopyDirection,
        _source: u64,
        _target: u64,
        _bytes: usize,
    ) -> Option<Result<(), ExecutionError>> {
        None
    }

    /// The longest copy in this direction that [`Engine::copy_by_caller`] makes; 0 if it makes none.
    fn max_caller_bytes(&self, _direction: CopyDirection) -> u64 {
        0
    }

    /// Opens a queue of the device for the calling thread, which makes its context current there
    /// for good. `None` if the engine has none.
    fn open_stream(&self) -> Option<Box<dyn DeviceStream>> {
        None
    }

    /// Opens an in-order queue. Dropping the last handle of a channel finishes or fails its
    /// outstanding descriptors before the drop returns.
    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError>;
}

/// An in-order queue of one engine. Any number of threads may use it at once.
///
/// ```
/// use std::time::Duration;
///
/// use memferry::engine::cpu::{CpuEngine, CpuProfile, ProfileSource};
/// use memferry::engine::{ChannelOptions, Descriptor, Engine, Opcode};
///
/// let engine = CpuEngine::new(CpuProfile::load(&ProfileSource::BuiltIn)?);
/// let channel = engine.open_channel(&ChannelOptions::default())?;
/// let (source, mut target) = (vec![7u8; 4096], vec![0u8; 4096]);
/// let (from, to) = (source.as_ptr() as u64, target.as_mut_ptr() as u64);
/// // SAFETY: both buffers live until the descriptor is complete, and nothing else uses them.
/// let descriptor = unsafe { Descriptor::new(Opcode::Copy, from, to, 4096) };
/// let sequence = channel.submit_one(descriptor).map_err(|_| "the channel is full")?;
/// while !channel.park(sequence, Duration::from_secs(1)) {}
/// assert_eq!(target, source);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
///
/// # Safety
/// Callers free memory when the channel reports completion. So `completed` must not reach a number
/// before the descriptor of that number is complete, and an accepted descriptor must not access its
/// memory after it was finished or dropped, or its number was reached. Numbers rise by one per
/// descriptor in the order of `submit`, without gaps.
///
/// A call that panics must leave the channel in a state in which it can be dropped. The drop of the
/// last handle finishes or fails everything in the channel, also if it unwinds, and the memory of a
/// descriptor is not accessed after that descriptor was dropped.
pub unsafe trait Channel: Send + Sync + Debug {
    /// Accepts descriptors from the front of `batch` while there is space, and replaces each
    /// accepted one with `None`; `None` entries are skipped. Accepting none is not an error.
    ///
    /// # Errors
    /// Only when the channel is closed; then no descriptor was accepted.
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError>;

    /// Like [`Channel::submit`], for one descriptor. Returns its sequence, or the descriptor itself
    /// if the channel is full or closed.
    fn submit_one(&self, descriptor: Descriptor) -> Result<Sequence, Descriptor> {
        let mut sequence = 0;
        self.submit_into(descriptor, &mut sequence).map(|()| sequence)
    }

    /// Like [`Channel::submit_one`], and stores the sequence. A channel that publishes the descriptor
    /// in memory of another core stores it before that: a later load of it does not wait then until
    /// the line of the descriptor has arrived.
    fn submit_into(
        &self,
        descriptor: Descriptor,
        sequence: &mut Sequence,
    ) -> Result<(), Descriptor> {
        let mut batch = [Some(descriptor)];
        let submitted = self.submit(&mut batch);
        match batch {
            [Some(descriptor)] => Err(descriptor),
            [None] => {
                *sequence = submitted.map_or(0, |submitted| submitted.first);
                Ok(())
            }
        }
    }

    /// A completion that completes when `completed()` reaches the sequence of an accepted
    /// descriptor. The call does not block and uses no space in the channel. `None` if the channel
    /// does not support it; then a sequence alone is not enough to track a transfer.
    fn completion_of(&self, _sequence: Sequence) -> Option<Arc<Completion>> {
        None
    }

    /// The last sequence such that every descriptor up to and including it is finished. The data of
    /// these descriptors is visible to the thread that reads the number.
    fn completed(&self) -> Sequence;

    /// Whether a descriptor is finished. It may be known before `completed()` reaches the sequence,
    /// if threads help the channel. The data of the descriptor is visible then.
    #[inline]
    fn is_complete(&self, sequence: Sequence) -> bool {
        self.completed() >= sequence
    }

    /// Executes a few queued descriptors on the calling thread, which waits for `sequence`, if any
    /// thread may execute them; returns how many.
    fn help(&self, _sequence: Sequence) -> u64 {
        0
    }

    /// The error of a failed descriptor, if the channel still records it. A channel records at
    /// least its last 64 failures.
    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError>;

    /// Makes progress on a channel without a thread; returns whether anything happened. A channel
    /// with automatic progress does nothing here.
    fn poll(&self) -> bool {
        false
    }

    /// Like [`Channel::poll`], but leaves whatever takes long, such as the recovery of a device, to
    /// the next `poll`. For callers that must not wait, if another thread polls as well.
    fn poll_briefly(&self) -> bool {
        self.poll()
    }

    /// Waits for a moment between two polls that found nothing.
    #[inline]
    fn pause(&self) {
        spin_hint();
    }

    /// Sleeps until the device of the channel raises an interrupt, or another thread has finished
    /// something, for at most `timeout`. The channel is polled first, and the thread does not sleep if
    /// `is_done` then. An interrupt is a hint: the caller polls after it.
    fn sleep_until_interrupt(
        &self,
        _timeout: Duration,
        _is_done: &dyn Fn() -> bool,
    ) -> InterruptSleep {
        InterruptSleep::Unavailable
    }

    /// Whether a thread polls the channel while anything is in flight, whoever else does.
    fn has_poll_thread(&self) -> bool {
        false
    }

    /// Blocks until `completed()` reaches `sequence` or the timeout expires; returns whether the
    /// sequence was reached. A channel without a thread makes progress in this call, which polls less
    /// and less often while nothing ends.
    fn park(&self, sequence: Sequence, timeout: Duration) -> bool {
        const POLLS_PER_CLOCK: u32 = 64;
        const POLLS_PER_YIELD: u32 = 256;
        const SPIN: Duration = Duration::from_millis(2);
        // Far less than what an engine takes for a pause of its polls.
        const LONGEST_SLEEP: Duration = Duration::from_millis(1);
        let deadline = Instant::now().checked_add(timeout);
        let (mut polls, mut idle_since) = (0u32, None);
        while self.completed() < sequence {
            if self.poll() {
                idle_since = None;
                continue;
            }
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(POLLS_PER_YIELD) {
                thread::yield_now();
            } else {
                spin_hint();
            }
            if polls % POLLS_PER_CLOCK != 1 {
                continue;
            }
            let now = Instant::now();
            if deadline.is_some_and(|at| now >= at) {
                return self.completed() >= sequence;
            }
            let idle = now - *idle_since.get_or_insert(now);
            if idle > SPIN {
                // So late that this much more does not matter.
                std::thread::sleep((idle / POLLS_PER_CLOCK).min(LONGEST_SLEEP));
            }
        }
        true
    }

    /// The estimated time in nanoseconds until everything in the channel is finished, for threads that
    /// wait for it and poll it; 0 if it is not known.
    fn estimate_ns(&self) -> u64 {
        0
    }

    /// Whether the channel sleeps, so that a submit would have to wake it. A hint only: the state
    /// may change before the caller uses it.
    fn is_asleep(&self) -> bool {
        false
    }

    /// The core on which the thread of the channel was last seen, if it has one. A hint only.
    fn core(&self) -> Option<usize> {
        None
    }

    /// Wakes the channel if it sleeps. A submit does this itself; callers need it only after a
    /// change that the channel cannot observe.
    fn wake(&self) {}

    /// Rejects new descriptors and finishes or fails the accepted ones. Returns at once; `park`
    /// waits until they are complete.
    fn close(&self);

    /// Bytes of accepted descriptors that are not yet finished.
    fn outstanding_bytes(&self) -> u64;

    /// The kernels of groups of small copies as they are now, if the channel measures them.
    fn group_kernels(&self) -> Option<GroupKernels> {
        None
    }

    /// The counters of the channel.
    fn statistics(&self) -> ChannelStatistics;
}

/// The end of a sleep until an interrupt.
///
/// ```
/// use std::time::Duration;
///
/// use memferry::engine::cpu::{CpuEngine, CpuProfile, ProfileSource};
/// use memferry::engine::{ChannelOptions, Engine, InterruptSleep};
///
/// let engine = CpuEngine::new(CpuProfile::load(&ProfileSource::BuiltIn)?);
/// let channel = engine.open_channel(&ChannelOptions::default())?;
/// let slept = channel.sleep_until_interrupt(Duration::from_secs(1), &|| false);
/// assert_eq!(slept, InterruptSleep::Unavailable); // a processor raises none
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InterruptSleep {
    /// The channel has no interrupt, or another thread sleeps until it: the caller did not sleep.
    Unavailable,
    /// No interrupt will come now, because the device is being recovered, has stopped, or has nothing that
    /// raises one, or it is not known, because another thread polls: the caller did not sleep. It may try
    /// again later.
    NotArmed,
    /// The timeout expired.
    TimedOut,
    /// The interrupt came, or something was finished meanwhile.
    Woken,
}

/// The result of a submit: `count` descriptors, numbered from `first`.
///
/// ```
/// use memferry::engine::cpu::{CpuEngine, CpuProfile, ProfileSource};
/// use memferry::engine::{ChannelOptions, Engine, Submitted};
///
/// let engine = CpuEngine::new(CpuProfile::load(&ProfileSource::BuiltIn)?);
/// let channel = engine.open_channel(&ChannelOptions::default())?;
/// assert_eq!(channel.submit(&mut [])?.count, Submitted::NONE.count);
/// assert_eq!(Submitted { first: 5, count: 3 }.last(), 7);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Submitted {
    /// The sequence of the first accepted descriptor; undefined when `count` is 0.
    pub first: Sequence,
    /// The number of accepted descriptors.
    pub count: usize,
}

impl Submitted {
    /// No descriptor was accepted.
    pub const NONE: Self = Self { first: 0, count: 0 };

    /// The sequence of the last accepted descriptor, or 0.
    pub fn last(&self) -> Sequence {
        if self.count == 0 { 0 } else { self.first + self.count as u64 - 1 }
    }
}

/// Options for a new channel. An engine ignores options that do not apply to it.
///
/// ```
/// use memferry::engine::cpu::{CpuEngine, CpuProfile, ProfileSource};
/// use memferry::engine::{ChannelOptions, Engine};
///
/// let engine = CpuEngine::new(CpuProfile::load(&ProfileSource::BuiltIn)?);
/// let options = ChannelOptions { capacity: Some(64), label: Some("log".into()), ..Default::default() };
/// let channel = engine.open_channel(&options)?;
/// assert_eq!(channel.outstanding_bytes(), 0);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct ChannelOptions {
    /// The core that the channel's thread is bound to.
    pub core: Option<usize>,
    /// The capacity in descriptors; rounded up to a power of two. Each engine has a maximum, and takes
    /// that if more is asked for.
    pub capacity: Option<usize>,
    /// The time in nanoseconds for which an idle channel polls before it sleeps.
    pub spin_ns: Option<u64>,
    /// The name of the channel's thread.
    pub label: Option<String>,
}

/// Counters of one channel; they only rise.
///
/// ```
/// use memferry::{ChannelStatistics, Ferry};
///
/// let ferry = Ferry::new()?;
/// let cpu: ChannelStatistics = ferry.statistics().engine("cpu");
/// assert_eq!(cpu.failed, 0);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChannelStatistics {
    /// Accepted descriptors.
    pub submitted: u64,
    /// Finished descriptors, failed ones included.
    pub completed: u64,
    /// Failed descriptors.
    pub failed: u64,
    /// Bytes copied, filled or compared.
    pub bytes: u64,
    /// The number of times the channel went to sleep; of a device, that a waiter slept until its
    /// interrupt.
    pub sleeps: u64,
    /// The number of times a submit woke the sleeping channel; of a device, that the interrupt woke a
    /// waiter.
    pub wakes: u64,
    /// The number of submits that a full channel did not accept completely.
    pub full: u64,
}

impl ChannelStatistics {
    /// Stores the statistics where `memferry top` reads them. Only for the writer of the block.
    pub fn show(&self, shown: &memferry_sys::stats::kinds::ChannelCounters) {
        shown.submitted.set(self.submitted);
        shown.completed.set(self.completed);
        shown.failed.set(self.failed);
        shown.bytes.set(self.bytes);
        shown.sleeps.set(self.sleeps);
        shown.wakes.set(self.wakes);
        shown.full.set(self.full);
        shown.depth.set(self.submitted.saturating_sub(self.completed));
    }
}

impl std::ops::Add for ChannelStatistics {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            submitted: self.submitted + other.submitted,
            completed: self.completed + other.completed,
            failed: self.failed + other.failed,
            bytes: self.bytes + other.bytes,
            sleeps: self.sleeps + other.sleeps,
            wakes: self.wakes + other.wakes,
            full: self.full + other.full,
        }
    }
}
