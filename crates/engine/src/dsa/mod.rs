//! Intel's data streaming accelerator DSA, the successor of I/OAT in server processors since 2023.
//!
//! A work queue takes descriptors of 64 bytes, each by one write to a portal, and reports each end
//! by a completion record in memory. [`descriptor`] and [`record`] define both, [`registers`] the
//! registers of the device. `queue` is the driver of a work queue; `pci_device` and `idxd` are the
//! two ways to one: a device that is bound to vfio-pci, which this process configures and whose
//! memory is pinned; and a queue of the kernel's `idxd` driver, which shares the address space of
//! the process, so that nothing is pinned. `docs/design/dsa.md` has the reasons.

mod calibration;
mod counters;
pub mod descriptor;
mod factory;
mod idxd;
mod pci_device;
mod queue;
mod queue_memory;
pub mod record;
pub mod registers;
mod slot;
mod translate;
mod tuning;
mod work_queue;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use memferry_memory::dma_mappings::DmaMappings;
use memferry_sys::device::DmaDevice;
use memferry_sys::idxd::IdxdFiles;
use memferry_sys::pages::page_bytes;
use memferry_sys::portal::Portal;
use memferry_sys::vfio::pci::DSA;

use self::counters::DsaAtomicCounters;
pub(crate) use self::factory::FACTORY;
pub use self::idxd::IdxdQueueChoice;
use self::pci_device::DsaPciDevice;
use self::queue::DsaQueue;
pub use self::tuning::published_tuning;
use self::tuning::{DsaProperties, DsaTuning};
use self::work_queue::{QueueLimits, WorkQueue};
use crate::contract::{
    Capabilities, Channel, ChannelOptions, CopyDirection, CostLine, Engine, MemoryKind,
    MemoryKindSet, Opcode, OpcodeSet, OpenError, Pinner, RegistrationMode, TuningFact,
};
use crate::pci::{
    ACCESS_REVOKED, ChannelInterrupt, ChannelSlots, DeviceChannel, MeasuredChannel, distinct,
    open_error, open_vfio,
};

const NAME: &str = "dsa";
/// The default capacity of a channel, in descriptors.
const CAPACITY: usize = 512;

/// A device, and its portals.
pub type DeviceWithPortals = (Arc<dyn DmaDevice>, Arc<Portal>);

/// The engine, over devices of VFIO that share their mappings, or over queues of the kernel.
///
/// ```
/// use std::sync::Arc;
///
/// use memferry::Ferry;
/// use memferry::engine::dsa::DsaEngine;
/// use memferry::engine::testing::dsa_model::DsaModel;
///
/// // A model of the device; `DsaEngine::open` takes a device of the machine.
/// let engine = Arc::new(DsaEngine::over_model(DsaModel::new())?);
/// let ferry = Ferry::builder().engine(engine, 1).build()?;
/// let (_, target) = ferry.icopy(vec![7u8; 1 << 20], vec![0u8; 1 << 20])?.wait()?;
/// assert_eq!(target[0], 7);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DsaEngine {
    queues: QueueSource,
    slots: ChannelSlots,
    capabilities: Capabilities,
    tuning: DsaTuning,
    /// The limits that all queues have in common.
    limits: QueueLimits,
    counters: Arc<DsaAtomicCounters>,
}

/// Where the queues of an engine come from.
#[derive(Debug)]
enum QueueSource {
    /// The device and the number on it of each queue.
    Devices { queues: Vec<(Arc<DsaPciDevice>, usize)>, pages: Arc<DmaMappings> },
    /// The files of the queues.
    Files { files: Arc<dyn IdxdFiles>, queues: Vec<IdxdQueueChoice> },
}

/// The counters of an engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DsaCounters {
    /// Descriptors that were written for the devices.
    pub descriptors: u64,
    /// Descriptors that were submitted to work queues: batches, and those in no batch.
    pub submissions: u64,
    /// Batches among them.
    pub batches: u64,
    /// Times that a work queue had no space.
    pub full: u64,
    /// Page faults after which a descriptor was resumed.
    pub resumed_faults: u64,
    /// Times that a queue stopped and was restarted.
    pub recoveries: u64,
}

impl DsaEngine {
    /// Creates the engine over devices that nothing else uses, with their portals. Memory that is
    /// mapped for the first is mapped for all.
    ///
    /// # Safety
    /// The devices must be accelerators of this kind, or behave as such, and satisfy the contract
    /// of [`DmaDevice`] for mappings and for a reset; the portals must be theirs. Until the engine
    /// and its channels are dropped, no other code may write their registers or portals or end
    /// their mappings.
    pub unsafe fn over(devices: &[DeviceWithPortals]) -> io::Result<Self> {
        let (first, _) = devices.first().ok_or(io::ErrorKind::NotFound)?;
        let pages = Arc::new(DmaMappings::new(first.clone()));
        let (mut queues, mut limits) = (Vec::new(), None);
        for (device, portals) in devices {
            let device = DsaPciDevice::new(device.clone(), portals.clone(), pages.clone())?;
            limits = Some(common_limits(limits, device.limits()));
            let device = Arc::new(device);
            queues.extend((0..device.queues()).map(|number| (device.clone(), number)));
        }
        let limits = limits.ok_or(io::ErrorKind::NotFound)?;
        let capabilities = Capabilities {
            // Pages that are not contiguous for the device need a descriptor each.
            boundary_bytes: (!first.is_contiguous()).then(page_bytes),
            registration: RegistrationMode::BySubmitter,
            ..capabilities(&limits)
        };
        Ok(Self::new(QueueSource::Devices { queues, pages }, capabilities, limits))
    }

    /// Creates the engine over queues of the kernel's driver, of which at least one is needed.
    ///
    /// # Safety
    /// The files must be queues of the `idxd` driver, or behave as such: descriptors access the
    /// memory of this process at its own addresses, and the end of a file ends its descriptors.
    pub unsafe fn over_queues(
        files: Arc<dyn IdxdFiles>,
        queues: Vec<IdxdQueueChoice>,
    ) -> io::Result<Self> {
        let limits = queues.iter().map(IdxdQueueChoice::limits);
        let limits = limits.reduce(|a, b| common_limits(Some(a), b));
        let limits = limits.ok_or(io::ErrorKind::NotFound)?;
        Ok(Self::new(QueueSource::Files { files, queues }, capabilities(&limits), limits))
    }

    fn new(queues: QueueSource, capabilities: Capabilities, limits: QueueLimits) -> Self {
        let count = match &queues {
            QueueSource::Devices { queues, .. } => queues.len(),
            QueueSource::Files { queues, .. } => queues.len(),
        };
        Self {
            queues,
            slots: ChannelSlots::new(count),
            capabilities,
            // Until the device is measured.
            tuning: DsaTuning::published(),
            limits,
            counters: Arc::default(),
        }
    }

    /// Opens devices of the machine that are bound to vfio-pci, by their bus addresses, and
    /// measures their copies.
    pub fn open(addresses: &[impl AsRef<str>]) -> Result<Self, OpenError> {
        let mut devices: Vec<DeviceWithPortals> = Vec::new();
        for device in open_vfio(NAME, addresses, DSA)? {
            let portals = device.portals().map_err(|error| open_error(NAME, &error))?;
            devices.push((Arc::new(device), portals));
        }
        // SAFETY: `open_vfio` compared their ids, and only one program can open a device that is
        // bound to vfio-pci.
        let engine = unsafe { Self::over(&devices) }.map_err(|error| open_error(NAME, &error))?;
        Ok(engine.measured())
    }

    /// Measures the device, and tunes the driver by that.
    fn measured(self) -> Self {
        let published = self.tuning;
        let engine = Self { tuning: DsaTuning::unsplit(), ..self };
        let tuning = MeasuredChannel::open(&engine).as_ref().and_then(calibration::measure);
        // The measurement is no work of a user.
        Self { tuning: tuning.unwrap_or(published), counters: Arc::default(), ..engine }
    }

    /// The number of channels.
    pub fn channels(&self) -> usize {
        match &self.queues {
            QueueSource::Devices { queues, .. } => queues.len(),
            QueueSource::Files { queues, .. } => queues.len(),
        }
    }

    /// The counters of the devices.
    pub fn counters(&self) -> DsaCounters {
        let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &*self.counters;
        DsaCounters {
            descriptors: read(&counters.descriptors),
            submissions: read(&counters.submissions),
            batches: read(&counters.batches),
            full: read(&counters.full),
            resumed_faults: read(&counters.resumed_faults),
            recoveries: read(&counters.recoveries),
        }
    }

    /// The memory that is mapped for the devices; `None` if nothing is pinned.
    pub fn pages(&self) -> Option<&DmaMappings> {
        match &self.queues {
            QueueSource::Devices { pages, .. } => Some(pages),
            QueueSource::Files { .. } => None,
        }
    }

    /// Opens the work queue of a channel; returns its name too.
    fn open_queue(&self) -> Result<(Box<dyn WorkQueue>, String), OpenError> {
        let slot = self.slots.allocate();
        let slot = slot.ok_or_else(|| OpenError::Exhausted { engine: NAME.into() })?;
        let refused = |name: &str, error: &dyn std::fmt::Display| OpenError::System {
            engine: NAME.into(),
            reason: format!("{name}: {error}"),
        };
        match &self.queues {
            QueueSource::Devices { queues, .. } => {
                let (device, number) = &queues[slot.number()];
                let name = format!("queue {number} of device {}", device.name());
                match device.open_queue(slot, *number) {
                    Ok(queue) => Ok((Box::new(queue), name)),
                    Err(error) => Err(refused(&name, &error)),
                }
            }
            QueueSource::Files { files, queues } => {
                let choice = &queues[slot.number()];
                let name = choice.path().display().to_string();
                match idxd::open(files, choice, slot) {
                    Ok(queue) => Ok((Box::new(queue), name)),
                    Err(error) => Err(refused(&name, &error)),
                }
            }
        }
    }
}

/// The limits that two devices have in common.
fn common_limits(one: Option<QueueLimits>, other: QueueLimits) -> QueueLimits {
    let Some(one) = one else { return other };
    QueueLimits {
        size: one.size.min(other.size),
        max_bytes: one.max_bytes.min(other.max_bytes),
        max_batch: one.max_batch.min(other.max_batch),
        opcodes: one.opcodes & other.opcodes,
        cache_control: one.cache_control && other.cache_control,
    }
}

/// The capabilities of an engine whose memory needs no pins.
fn capabilities(limits: &QueueLimits) -> Capabilities {
    use descriptor::opcode as device;
    let known = [
        (Opcode::Copy, device::MEMMOVE),
        (Opcode::Fill, device::FILL),
        (Opcode::Compare, device::COMPARE),
        (Opcode::Crc, device::CRC),
        (Opcode::CopyCrc, device::COPY_CRC),
        (Opcode::Dualcast, device::DUALCAST),
    ];
    let supported = known.iter().filter(|(_, opcode)| limits.supports(*opcode));
    let operations: Vec<_> = supported.map(|(operation, _)| *operation).collect();
    Capabilities {
        operations: OpcodeSet::of(&operations),
        memory: MemoryKindSet::of(&[MemoryKind::Host]),
        max_descriptor_bytes: limits.max_bytes as usize,
        preferred_alignment: 64,
        boundary_bytes: None,
        registration: RegistrationMode::NotRequired,
        claims_chunks: false,
        infallible: false,
        auto_progress: false,
        writes_notifications: false,
    }
}

impl Engine for DsaEngine {
    fn name(&self) -> &str {
        NAME
    }

    fn devices(&self) -> Vec<String> {
        match &self.queues {
            QueueSource::Devices { queues, .. } => {
                distinct(queues.iter().map(|(device, _)| device.name().to_owned()))
            }
            QueueSource::Files { files, queues } => {
                queues.iter().map(|queue| files.name(queue.path())).collect()
            }
        }
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn orders_descriptors(&self) -> bool {
        self.limits.max_batch > 1
    }

    fn cost(&self, _direction: CopyDirection) -> CostLine {
        self.tuning.line
    }

    fn tuning(&self) -> Vec<TuningFact> {
        let (populated_bytes, has_interrupts) = match &self.queues {
            QueueSource::Devices { queues, .. } => {
                (None, queues.iter().any(|(device, _)| device.has_interrupts()))
            }
            QueueSource::Files { .. } => (Some(idxd::MAX_TOUCH_BYTES), false),
        };
        self.tuning.facts(DsaProperties {
            queues: self.channels(),
            max_batch: self.limits.max_batch,
            cache_control: self.limits.cache_control,
            populated_bytes,
            has_interrupts,
        })
    }

    fn pinner(&self) -> Option<Arc<dyn Pinner>> {
        match &self.queues {
            QueueSource::Devices { pages, .. } => Some(pages.clone()),
            QueueSource::Files { .. } => None,
        }
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        if self.pages().is_some_and(DmaMappings::is_revoked) {
            return Err(open_error(NAME, &ACCESS_REVOKED));
        }
        let (queue, name) = self.open_queue()?;
        let capacity = options.capacity.unwrap_or(CAPACITY);
        let interrupt = queue.interrupt();
        let interrupt = interrupt.map(|(_, event)| ChannelInterrupt::new(event, self.tuning.line));
        let queue = DsaQueue::new(queue, capacity, &self.tuning, self.counters.clone());
        let queue = queue.map_err(|error| OpenError::System {
            engine: NAME.into(),
            reason: format!("{name}: {error}"),
        })?;
        let channel = DeviceChannel::new(Box::new(queue), capacity).with_interrupt(interrupt);
        Ok(Arc::new(channel.shown_as(NAME, options.label.as_deref())))
    }
}
