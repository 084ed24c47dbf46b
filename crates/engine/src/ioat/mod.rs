//! Intel's copy engine I/OAT, also called QuickData or CBDMA, of two decades of server chipsets and
//! processors.
//!
//! A channel follows a chain of descriptors in memory, each of which describes a copy or a fill by
//! IOVAs, and writes its progress to a word in memory. [`registers`] defines the registers of a
//! channel, [`descriptor`] its descriptors, and `queue` is the driver of a channel.
//! `docs/design/devices.md` has the reasons.

mod config;
pub mod descriptor;
mod device;
mod queue;
pub mod registers;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use memferry_memory::dma_mappings::DmaMappings;
use memferry_sys::device::DmaDevice;
use memferry_sys::pages::page_bytes;
use memferry_sys::vfio::pci::IOAT;

use self::config::{IoatAtomicCounters, IoatQueueConfig};
use self::device::IoatDevice;
use self::queue::IoatQueue;
use self::registers as r;
use crate::contract::{
    Capabilities, Channel, ChannelOptions, CopyDirection, CostLine, Engine, EngineChoice,
    MemoryKind, MemoryKindSet, Opcode, OpcodeSet, OpenError, Pinner, RegistrationMode,
};
use crate::pci::{
    ACCESS_REVOKED, ChannelInterrupt, ChannelSlots, DeviceChannel, PciFactory, distinct, measure,
    open_all, open_error,
};

const NAME: &str = "ioat";
/// The default capacity of a channel, in descriptors.
const CAPACITY: usize = 1024;
/// The maximum length of a descriptor in bytes, even if the device supports more.
const MAX_DESCRIPTOR_BYTES: u64 = 16 << 20;

/// The factory of the engine.
pub(crate) static FACTORY: PciFactory = PciFactory {
    name: NAME,
    variable: "MEMFERRY_IOAT",
    expected: "off, auto, or addresses on the bus such as 0000:00:04.0, with commas between them",
    max_devices: usize::MAX,
    ids: IOAT,
    open: |addresses| {
        let engine = IoatEngine::open(addresses)?;
        Ok(EngineChoice { channels: engine.channels(), engine: Arc::new(engine) })
    },
};

/// The engine, over one device or several that share their mappings of memory.
///
/// ```
/// use std::sync::Arc;
///
/// use memferry::Ferry;
/// use memferry::engine::ioat::IoatEngine;
/// use memferry::engine::testing::ioat_model::IoatModel;
///
/// // A model of the device; `IoatEngine::open` takes a device of the machine.
/// let engine = Arc::new(IoatEngine::over_model(IoatModel::new())?);
/// let ferry = Ferry::builder().engine(engine, 1).build()?;
/// let (_, target) = ferry.icopy(vec![7u8; 1 << 20], vec![0u8; 1 << 20])?.wait()?;
/// assert_eq!(target[0], 7);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct IoatEngine {
    /// The device and the channel number on it, for each channel.
    channels: Vec<(Arc<IoatDevice>, usize)>,
    slots: ChannelSlots,
    config: IoatQueueConfig,
    capabilities: Capabilities,
    cost: CostLine,
}

/// The counters of the devices of an engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoatCounters {
    /// Descriptors that were written for the devices.
    pub descriptors: u64,
    /// Times that a channel stopped and was restarted.
    pub recoveries: u64,
}

impl IoatEngine {
    /// Creates the engine over devices that nothing else uses. Memory that is mapped for the first
    /// is mapped for all.
    ///
    /// # Safety
    /// The devices must be copy engines of this kind, or behave as such, and satisfy the contract
    /// of [`DmaDevice`] for mappings and for a reset. Until the engine and its channels are
    /// dropped, no other code may write their registers or end their mappings.
    pub unsafe fn over(devices: &[Arc<dyn DmaDevice>]) -> io::Result<Self> {
        let first = devices.first().ok_or(io::ErrorKind::NotFound)?;
        let (mut channels, mut max_bytes, mut supports_fill) = (Vec::new(), u64::MAX, true);
        for device in devices {
            let limits = read_limits(&**device)?;
            max_bytes = max_bytes.min(limits.max_bytes);
            supports_fill &= limits.supports_fill;
            let device = Arc::new(IoatDevice::new(device.clone(), limits.channels));
            channels.extend((0..limits.channels).map(|number| (device.clone(), number)));
        }
        for (shared, number) in &channels {
            let device = shared.hardware();
            // Stopped before any memory is mapped: the previous user may have left the device
            // running, on addresses that are allocated again.
            device::stop(&**device, r::channel_base(*number)).or_else(|_| device.reset())?;
        }
        let pages = Arc::new(DmaMappings::new(first.clone()));
        let operations: &[_] = match supports_fill {
            true => &[Opcode::Copy, Opcode::Fill],
            false => &[Opcode::Copy],
        };
        Ok(Self {
            slots: ChannelSlots::new(channels.len()),
            config: IoatQueueConfig {
                max_bytes,
                supports_fill,
                pages,
                counters: Arc::new(IoatAtomicCounters::new(channels.len())),
            },
            channels,
            capabilities: Capabilities {
                operations: OpcodeSet::of(operations),
                memory: MemoryKindSet::of(&[MemoryKind::Host]),
                max_descriptor_bytes: max_bytes as usize,
                preferred_alignment: page_bytes(),
                // Pages that are not contiguous for the device need a descriptor each.
                boundary_bytes: (!first.is_contiguous()).then(page_bytes),
                registration: RegistrationMode::BySubmitter,
                claims_chunks: false,
                infallible: false,
                auto_progress: false,
                writes_notifications: false,
            },
            // A typical value, until the device is measured.
            cost: CostLine::from_bandwidth(1500.0, 5.0),
        })
    }

    /// Opens devices of the machine that are bound to vfio-pci, by their bus addresses, and
    /// measures their copies.
    pub fn open(addresses: &[impl AsRef<str>]) -> Result<Self, OpenError> {
        let devices = open_all(NAME, addresses, IOAT)?;
        // SAFETY: `open_all` compared their ids, and only one program can open a device that is
        // bound to vfio-pci.
        let engine = unsafe { Self::over(&devices) }.map_err(|error| open_error(NAME, &error))?;
        let cost = measure(&engine).unwrap_or(engine.cost);
        Ok(Self { cost, ..engine })
    }

    /// The number of channels.
    pub fn channels(&self) -> usize {
        self.channels.len()
    }

    /// The counters of the devices.
    pub fn counters(&self) -> IoatCounters {
        let IoatAtomicCounters { descriptors, recoveries } = &*self.config.counters;
        IoatCounters {
            descriptors: descriptors.iter().map(|each| each.load(Ordering::Relaxed)).sum(),
            recoveries: recoveries.load(Ordering::Relaxed),
        }
    }

    /// The memory that is mapped for the devices.
    pub fn pages(&self) -> &DmaMappings {
        &self.config.pages
    }
}

/// The limits that a device reports.
struct IoatLimits {
    channels: usize,
    max_bytes: u64,
    supports_fill: bool,
}

fn read_limits(device: &dyn DmaDevice) -> io::Result<IoatLimits> {
    let device_error = |what: String| io::Error::other(format!("device {}: {what}", device.name()));
    let version = device.read8(r::CBVER);
    if version == u8::MAX {
        return Err(device_error("it does not respond".into()));
    }
    if version < r::MIN_VERSION {
        let (major, minor) = (version >> 4, version & 0xF);
        return Err(device_error(format!(
            "I/OAT version {major}.{minor} is not supported: 3.0 or later is required"
        )));
    }
    let channels = usize::from(device.read8(r::CHANCNT) & r::CHANCNT_COUNT);
    if channels == 0 {
        return Err(device_error("it has no channels: the firmware may have disabled them".into()));
    }
    let max_bytes = r::max_transfer_bytes(device.read8(r::XFERCAP))
        .ok_or_else(|| device_error("it reports an invalid maximum transfer size".into()))?;
    let supports_fill = device.read32(r::DMACAPABILITY) & r::DMACAPABILITY_FILL_BLOCK != 0;
    // A longer descriptor is not faster, and would exceed the stall timeout of a channel.
    Ok(IoatLimits { channels, max_bytes: max_bytes.min(MAX_DESCRIPTOR_BYTES), supports_fill })
}

impl Engine for IoatEngine {
    fn name(&self) -> &str {
        NAME
    }

    fn devices(&self) -> Vec<String> {
        distinct(self.channels.iter().map(|(device, _)| device.hardware().name().to_owned()))
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn cost(&self, _direction: CopyDirection) -> CostLine {
        self.cost
    }

    fn pinner(&self) -> Option<Arc<dyn Pinner>> {
        Some(self.config.pages.clone())
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        if self.config.pages.is_revoked() {
            return Err(open_error(NAME, &ACCESS_REVOKED));
        }
        let slot = self.slots.allocate();
        let slot = slot.ok_or_else(|| OpenError::Exhausted { engine: NAME.into() })?;
        let (device, number) = &self.channels[slot.number()];
        let name = device.hardware().name();
        let capacity = options.capacity.unwrap_or(CAPACITY);
        let queue = IoatQueue::new(device.clone(), *number, capacity, self.config.clone(), slot);
        let queue = queue.map_err(|error| OpenError::System {
            engine: NAME.into(),
            reason: format!("channel {number} of device {name}: {error}"),
        })?;
        let event = device.interrupt(*number).cloned();
        let interrupt = event.map(|event| ChannelInterrupt::new(event, self.cost));
        let channel = DeviceChannel::new(Box::new(queue), capacity).with_interrupt(interrupt);
        Ok(Arc::new(channel.shown_as(NAME, options.label.as_deref())))
    }
}
