//! The engine of a network card in loopback: the card reads a frame from one address in memory and
//! writes it to another, without the processor.
//!
//! After G. Ciaccio, "Using a self-connected Gigabit Ethernet adapter as a memcpy() low-overhead
//! engine for MPI". The card is an 82574L or a relative (`e1000e` in Linux) in its internal
//! loopback, so it needs no cable. `frame` cuts bytes into frames, `e1000e` drives the rings and
//! registers, `queue` sends frames, waits for them, and retransmits lost ones.
//! `docs/design/devices.md` has the reasons.

mod e1000e;
mod frame;
mod queue;
pub mod registers;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_memory::dma_mappings::DmaMappings;
use memferry_sys::EventFd;
use memferry_sys::device::DmaDevice;
use memferry_sys::pages::page_bytes;
use memferry_sys::vfio::pci::E1000E;

use self::e1000e::E1000e;
use self::queue::{NicAtomicCounters, NicQueue};
use crate::contract::{
    Capabilities, Channel, ChannelOptions, CopyDirection, CostLine, Engine, EngineChoice,
    MemoryKind, MemoryKindSet, Opcode, OpcodeSet, OpenError, Pinner, RegistrationMode,
};
use crate::pci::{
    ACCESS_REVOKED, ChannelInterrupt, ChannelSlots, DeviceChannel, PciFactory, measure, open_all,
    open_error,
};

const NAME: &str = "nic";
/// The default capacity of a channel, in descriptors.
const CAPACITY: usize = 1024;
/// About thirty frames: enough to keep the card busy, and little to retransmit.
const MAX_DESCRIPTOR_BYTES: usize = 256 << 10;

/// The factory of the engine.
pub(crate) static FACTORY: PciFactory = PciFactory {
    name: NAME,
    variable: "MEMFERRY_NIC",
    expected: "off, auto, or the address of one card on the bus such as 0000:02:00.0",
    max_devices: 1,
    ids: E1000E,
    open: |addresses| {
        let engine = NicEngine::open(&addresses[0], NicConfig::default())?;
        Ok(EngineChoice { engine: Arc::new(engine), channels: 1 })
    },
};

/// The options of a card.
///
/// ```
/// use memferry::engine::nic::NicConfig;
///
/// let careful = NicConfig { verify_checksums: true };
/// assert_ne!(careful, NicConfig::default());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NicConfig {
    /// Whether the processor computes checksums of the data before it is sent and after it has
    /// arrived. The bus of a card may corrupt bits that the memory bus would not. The processor
    /// then writes notification variables, because only it knows that the data is intact.
    pub verify_checksums: bool,
}

/// The engine. It has one channel, because the card has one loopback path.
///
/// ```
/// use std::sync::Arc;
///
/// use memferry::Ferry;
/// use memferry::engine::testing::nic_model::NicModel;
/// use memferry::engine::nic::{NicConfig, NicEngine};
///
/// // A model of the card; `NicEngine::open` takes a card of the machine.
/// let engine = Arc::new(NicEngine::over_model(NicModel::new(), NicConfig::default())?);
/// let ferry = Ferry::builder().engine(engine, 1).build()?;
/// let (_, target) = ferry.icopy(vec![7u8; 64 << 10], vec![0u8; 64 << 10])?.wait()?;
/// assert_eq!(target[0], 7);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct NicEngine {
    device: Arc<dyn DmaDevice>,
    /// The interrupt of the card, if it has one.
    interrupt: Option<Arc<EventFd>>,
    pages: Arc<DmaMappings>,
    counters: Arc<NicAtomicCounters>,
    config: NicConfig,
    capabilities: Capabilities,
    slots: ChannelSlots,
    cost: CostLine,
}

/// The counters of a card.
///
/// ```
/// use memferry::engine::testing::nic_model::NicModel;
/// use memferry::engine::nic::{NicConfig, NicCounters, NicEngine};
///
/// let engine = NicEngine::over_model(NicModel::new(), NicConfig::default())?;
/// assert_eq!(engine.counters(), NicCounters::default()); // nothing was copied yet
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NicCounters {
    /// Frames that arrived.
    pub frames: u64,
    /// Bytes that the card copied.
    pub bytes_by_card: u64,
    /// Bytes that the processor copied because they were too few or misaligned. The fallback after
    /// a failure of the card is not counted.
    pub bytes_by_processor: u64,
    /// Retransmissions after a frame was lost or corrupted.
    pub retransmits: u64,
    /// Times that the card failed and the processor finished the descriptors.
    pub cpu_fallbacks: u64,
    /// Notification variables that the card wrote.
    pub notification_writes: u64,
    /// Segments of memory whose address was found in their lease.
    pub segments_found: u64,
    /// Segments that were not mapped for the card, so that the processor copied them.
    pub segments_missing: u64,
}

impl NicEngine {
    /// Creates the engine over a card.
    ///
    /// # Safety
    /// The device must be a card of this kind, or behave as such, and satisfy the contract of
    /// [`DmaDevice`] for mappings and for a reset. Until the engine and its channels are dropped,
    /// no other code may write its registers or end its mappings.
    pub unsafe fn over(device: Arc<dyn DmaDevice>, config: NicConfig) -> io::Result<Self> {
        // Opens the card once, so that a card that does not work fails here.
        let pages = Arc::new(DmaMappings::new(device.clone()));
        drop(E1000e::new(device.clone(), pages.clone(), false)?);
        let interrupt = device.connect_interrupts(1).map(|mut vectors| vectors.pop());
        let interrupt = interrupt.unwrap_or_else(|error| {
            tracing::debug!(card = device.name(), %error, "no interrupts: waiters sleep by estimate");
            None
        });
        Ok(Self {
            interrupt,
            pages,
            device,
            counters: Arc::default(),
            config,
            capabilities: Capabilities {
                operations: OpcodeSet::of(&[Opcode::Copy]),
                memory: MemoryKindSet::of(&[MemoryKind::Host]),
                max_descriptor_bytes: MAX_DESCRIPTOR_BYTES,
                preferred_alignment: page_bytes(),
                boundary_bytes: None,
                registration: RegistrationMode::BySubmitter,
                claims_chunks: false,
                infallible: false,
                auto_progress: false,
                writes_notifications: !config.verify_checksums,
            },
            slots: ChannelSlots::new(1),
            // Until it is measured: 1 Gb/s, and the latency of a frame.
            cost: CostLine::from_bandwidth(20_000.0, 0.125),
        })
    }

    /// Opens a card of the machine that is bound to vfio-pci, by its bus address, and measures its
    /// copies.
    pub fn open(address: &str, config: NicConfig) -> Result<Self, OpenError> {
        let mut devices = open_all(NAME, &[address], E1000E)?;
        let device = devices.pop().ok_or_else(|| open_error(NAME, &"no card was named"))?;
        // SAFETY: `open_all` compared its id, and only one program can open a device that is bound
        // to vfio-pci.
        let engine = unsafe { Self::over(device, config) };
        let engine = engine.map_err(|error| open_error(NAME, &error))?;
        let cost = measure(&engine).unwrap_or(engine.cost);
        Ok(Self { cost, counters: Arc::default(), ..engine })
    }

    /// The counters of the card.
    pub fn counters(&self) -> NicCounters {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let NicAtomicCounters { frames, bytes_by_card, bytes_by_processor, .. } = &*self.counters;
        NicCounters {
            frames: count(frames),
            bytes_by_card: count(bytes_by_card),
            bytes_by_processor: count(bytes_by_processor),
            retransmits: count(&self.counters.retransmits),
            cpu_fallbacks: count(&self.counters.cpu_fallbacks),
            notification_writes: count(&self.counters.notification_writes),
            segments_found: count(&self.counters.segments_found),
            segments_missing: count(&self.counters.segments_missing),
        }
    }

    /// The memory that is mapped for the card.
    pub fn pages(&self) -> &DmaMappings {
        &self.pages
    }
}

impl Engine for NicEngine {
    fn name(&self) -> &str {
        NAME
    }

    fn devices(&self) -> Vec<String> {
        vec![self.device.name().to_owned()]
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn cost(&self, _direction: CopyDirection) -> CostLine {
        self.cost
    }

    fn pinner(&self) -> Option<Arc<dyn Pinner>> {
        Some(self.pages.clone())
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        if self.pages.is_revoked() {
            return Err(open_error(NAME, &ACCESS_REVOKED));
        }
        let slot = self.slots.allocate();
        let slot = slot.ok_or_else(|| OpenError::Exhausted { engine: NAME.into() })?;
        let card = E1000e::new(self.device.clone(), self.pages.clone(), self.interrupt.is_some());
        let card = card.map_err(|error| OpenError::System {
            engine: NAME.into(),
            reason: format!("card {} could not be started: {error}", self.device.name()),
        })?;
        let (pages, counters) = (self.pages.clone(), self.counters.clone());
        let queue = NicQueue::new(card, pages, counters, self.config.verify_checksums, slot);
        let capacity = options.capacity.unwrap_or(CAPACITY);
        let event = self.interrupt.clone();
        let interrupt = event.map(|event| ChannelInterrupt::new(event, self.cost));
        let channel = DeviceChannel::new(Box::new(queue), capacity).with_interrupt(interrupt);
        Ok(Arc::new(channel.shown_as(NAME, options.label.as_deref())))
    }
}
