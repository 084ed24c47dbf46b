//! The copy engine that Intel built into its server chipsets and processors for two decades: I/OAT,
//! also called QuickData or CBDMA.
//!
//! A channel follows a chain of descriptors in memory, each of which names a piece to
//! copy or to fill by addresses that the device was given for it, and writes to a word in memory how
//! far it came. [`registers`] says how a channel is spoken to, [`descriptor`] what it reads, `queue`
//! is the driver of a channel, and [`model`] is a device for machines without one: the driver
//! cannot tell the difference. `docs/design/devices.md` has the reasons.

pub mod descriptor;
pub mod model;
mod queue;
pub mod registers;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use memferry_memory::device_pages::DevicePages;
use memferry_sys::device::Device;
use memferry_sys::pages::page_bytes;
use memferry_sys::vfio::pci::IOAT;

use self::model::IoatModel;
use self::queue::{Counters, Facts, Queue};
use self::registers as r;
use crate::contract::{
    Capabilities, Channel, ChannelOptions, CostLine, Direction, Engine, MemoryKind, MemoryKinds,
    OpenError, Operation, Operations, Pinner, Registration,
};
use crate::device::{CUT_OFF, DeviceChannel, Seats, measure, open_all, refused};

const NAME: &str = "ioat";
/// Descriptors that a channel holds unless told otherwise.
const CAPACITY: usize = 1024;
/// The longest descriptor, whatever the device would take.
const LARGEST_DESCRIPTOR: u64 = 16 << 20;

/// The engine, over one device or several that share their mappings of memory.
#[derive(Debug)]
pub struct IoatEngine {
    /// Each channel: its device and its number there.
    channels: Vec<(Arc<dyn Device>, usize)>,
    seats: Seats,
    facts: Facts,
    capabilities: Capabilities,
    cost: CostLine,
}

/// What the devices of an engine have done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoatCounters {
    /// Descriptors that were written for them.
    pub descriptors: u64,
    /// Times that a channel stopped and was started again.
    pub recoveries: u64,
}

impl IoatEngine {
    /// The engine over devices that nobody else uses. What is mapped for the first is mapped for all.
    ///
    /// # Safety
    /// The devices must be copy engines of this kind, or behave as such, and keep what
    /// [`Device`] says of mappings and of a reset. Until the engine and its channels are gone, nobody
    /// else may write their registers or end their mappings.
    pub unsafe fn over(devices: &[Arc<dyn Device>]) -> io::Result<Self> {
        let first = devices.first().ok_or(io::ErrorKind::NotFound)?;
        let (mut channels, mut largest, mut fills) = (Vec::new(), u64::MAX, true);
        for device in devices {
            let known = known(&**device)?;
            largest = largest.min(known.largest_bytes);
            fills &= known.fills;
            channels.extend((0..known.channels).map(|number| (device.clone(), number)));
        }
        for (device, number) in &channels {
            // Before any memory is mapped: whoever had the device before may have left it at work,
            // on addresses that are given out again.
            queue::stop(&**device, r::channel_base(*number)).or_else(|_| device.reset())?;
        }
        let pages = Arc::new(DevicePages::new(first.clone())?);
        let operations: &[_] = match fills {
            true => &[Operation::Copy, Operation::Fill],
            false => &[Operation::Copy],
        };
        Ok(Self {
            seats: Seats::new(channels.len()),
            channels,
            facts: Facts { largest_bytes: largest, fills, pages, counters: Arc::default() },
            capabilities: Capabilities {
                operations: Operations::of(operations),
                memory: MemoryKinds::of(&[MemoryKind::Host]),
                largest_descriptor_bytes: largest as usize,
                preferred_alignment: page_bytes(),
                // Pages that do not lie one behind the other for the device need a descriptor each.
                boundary_bytes: (!first.is_contiguous()).then(page_bytes),
                registration: Registration::ByMemoryLayer,
                claims_chunks: false,
                never_fails: false,
                self_driving: false,
                notifies: false,
            },
            // Until it is measured: what such devices are said to do.
            cost: CostLine::from_bandwidth(1500.0, 5.0),
        })
    }

    /// The engine over a model of a device.
    pub fn over_model(model: Arc<IoatModel>) -> io::Result<Self> {
        // SAFETY: a model behaves as it should, and whoever writes its registers or ends its mappings
        // makes the promises of the unsafe calls that do so.
        unsafe { Self::over(&[model]) }
    }

    /// The engine over devices of the machine that were handed over to programs, named by their
    /// addresses on the bus. Measures what their copies take.
    pub fn open(addresses: &[impl AsRef<str>]) -> Result<Self, OpenError> {
        let devices = open_all(NAME, addresses, IOAT)?;
        // SAFETY: `open_all` compared their identities, and a device that was handed over to a
        // program is opened by one only.
        let engine = unsafe { Self::over(&devices) }.map_err(|error| refused(NAME, &error))?;
        let cost = measure(&engine).unwrap_or(engine.cost);
        Ok(Self { cost, ..engine })
    }

    /// How many channels there are.
    pub fn channels(&self) -> usize {
        self.channels.len()
    }

    /// What the devices have done so far.
    pub fn counters(&self) -> IoatCounters {
        let Counters { descriptors, recoveries } = &*self.facts.counters;
        IoatCounters {
            descriptors: descriptors.load(Ordering::Relaxed),
            recoveries: recoveries.load(Ordering::Relaxed),
        }
    }

    /// The memory that the devices reach.
    pub fn pages(&self) -> &DevicePages {
        &self.facts.pages
    }
}

/// What a device says of itself.
struct Known {
    channels: usize,
    largest_bytes: u64,
    fills: bool,
}

fn known(device: &dyn Device) -> io::Result<Known> {
    let wrong = |what: String| io::Error::other(format!("device {}: {what}", device.name()));
    let version = device.read8(r::CBVER);
    if version == u8::MAX {
        return Err(wrong("it does not answer".into()));
    }
    if version < r::OLDEST_VERSION {
        let (major, minor) = (version >> 4, version & 0xF);
        return Err(wrong(format!("version {major}.{minor} of I/OAT; 3.0 or later is needed")));
    }
    let channels = usize::from(device.read8(r::CHANCNT) & r::CHANCNT_COUNT);
    if channels == 0 {
        return Err(wrong("it has no channels: they may be switched off in the firmware".into()));
    }
    let largest_bytes = r::largest_transfer_bytes(device.read8(r::XFERCAP))
        .ok_or_else(|| wrong("it does not say how much it copies at once".into()))?;
    let fills = device.read32(r::DMACAPABILITY) & r::DMACAPABILITY_FILL_BLOCK != 0;
    // More in one descriptor gains nothing, and would not be done in the time after which a channel
    // is taken to stand still.
    Ok(Known { channels, largest_bytes: largest_bytes.min(LARGEST_DESCRIPTOR), fills })
}

impl Engine for IoatEngine {
    fn name(&self) -> &str {
        NAME
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn cost(&self, _direction: Direction) -> CostLine {
        self.cost
    }

    fn pinner(&self) -> Option<Arc<dyn Pinner>> {
        Some(self.facts.pages.clone())
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        if self.facts.pages.is_cut_off() {
            return Err(refused(NAME, &CUT_OFF));
        }
        let seat = self.seats.take();
        let seat = seat.ok_or_else(|| OpenError::Exhausted { engine: NAME.into() })?;
        let (device, number) = &self.channels[seat.number()];
        let capacity = options.capacity.unwrap_or(CAPACITY);
        let queue = Queue::new(device.clone(), *number, capacity, self.facts.clone(), seat);
        let queue = queue.map_err(|error| OpenError::System {
            engine: NAME.into(),
            reason: format!("channel {number} of device {}: {error}", device.name()),
        })?;
        Ok(Arc::new(DeviceChannel::new(Box::new(queue), capacity)))
    }
}
