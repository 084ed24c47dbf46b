//! The engine of a network card that talks to itself: what is sent from one place in memory is
//! received at another, and no processor touches it.
//!
//! After G. Ciaccio, "Using a self-connected Gigabit Ethernet adapter as a memcpy() low-overhead
//! engine for MPI". The card is an 82574L or a relative (`e1000e` in Linux) in its own loopback, so it
//! needs no cable. `frame` says how bytes are cut up, `card` knows the rings and registers,
//! `queue` sends, awaits, and sends again what was lost. `docs/design/devices.md` has the reasons.

mod card;
mod frame;
pub mod model;
mod queue;
pub mod registers;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_memory::device_pages::DevicePages;
use memferry_sys::device::Device;
use memferry_sys::pages::page_bytes;
use memferry_sys::vfio::pci::E1000E;

use self::card::Card;
use self::model::NicModel;
use self::queue::{Counters, Queue};
use crate::contract::{
    Capabilities, Channel, ChannelOptions, CostLine, Direction, Engine, MemoryKind, MemoryKinds,
    OpenError, Operation, Operations, Pinner, Registration,
};
use crate::device::{CUT_OFF, DeviceChannel, Seats, measure, open_all, refused};

const NAME: &str = "nic";
/// Descriptors that a channel holds unless told otherwise.
const CAPACITY: usize = 1024;
/// About thirty frames: enough to keep the card busy, and little to do again.
const LARGEST_DESCRIPTOR: usize = 256 << 10;

/// What can be chosen about a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Settings {
    /// Whether the processor makes sums of what is sent and of what has landed. The bus of a card
    /// may damage bits where that of memory would not. Notification variables are then set by the
    /// processor, because only it knows that the data is right.
    pub checks: bool,
}

/// The engine. It has one channel, because the card has one loop.
#[derive(Debug)]
pub struct NicEngine {
    device: Arc<dyn Device>,
    pages: Arc<DevicePages>,
    counters: Arc<Counters>,
    settings: Settings,
    capabilities: Capabilities,
    seats: Seats,
    cost: CostLine,
}

/// What a card has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NicCounters {
    /// Frames that arrived.
    pub frames: u64,
    /// Bytes that the card moved.
    pub bytes_by_card: u64,
    /// Bytes that the processor moved, because they were too few or badly aligned. What it moved
    /// because the card failed is not in here.
    pub bytes_by_processor: u64,
    /// Times that frames were sent again because one was lost or damaged.
    pub sent_again: u64,
    /// Times that the card gave up, and left the work to the processor.
    pub given_up: u64,
    /// Notification variables that the card has set.
    pub notices: u64,
}

impl NicEngine {
    /// The engine over a card.
    ///
    /// # Safety
    /// The device must be a card of this kind, or behave as such, and keep what [`Device`] says of
    /// mappings and of a reset. Until the engine and its channels are gone, nobody else may write its
    /// registers or end its mappings.
    pub unsafe fn over(device: Arc<dyn Device>, settings: Settings) -> io::Result<Self> {
        // The card is tried at once, so that one which does not work is told here.
        drop(Card::new(device.clone())?);
        Ok(Self {
            pages: Arc::new(DevicePages::new(device.clone())?),
            device,
            counters: Arc::default(),
            settings,
            capabilities: Capabilities {
                operations: Operations::of(&[Operation::Copy]),
                memory: MemoryKinds::of(&[MemoryKind::Host]),
                largest_descriptor_bytes: LARGEST_DESCRIPTOR,
                preferred_alignment: page_bytes(),
                boundary_bytes: None,
                registration: Registration::ByMemoryLayer,
                claims_chunks: false,
                never_fails: false,
                self_driving: false,
                notifies: !settings.checks,
            },
            seats: Seats::new(1),
            // Until it is measured: 1 Gb/s, and what a frame takes before it begins.
            cost: CostLine::from_bandwidth(20_000.0, 0.125),
        })
    }

    /// The engine over a model of a card.
    pub fn over_model(model: Arc<NicModel>, settings: Settings) -> io::Result<Self> {
        // SAFETY: a model behaves as it should, and whoever writes its registers or ends its mappings
        // makes the promises of the unsafe calls that do so.
        unsafe { Self::over(model, settings) }
    }

    /// The engine over a card of the machine that was handed over to programs, named by its address
    /// on the bus. Measures what its copies take.
    pub fn open(address: &str, settings: Settings) -> Result<Self, OpenError> {
        let mut devices = open_all(NAME, &[address], E1000E)?;
        let device = devices.pop().ok_or_else(|| refused(NAME, &"no card was named"))?;
        // SAFETY: `open_all` compared its identity, and a device that was handed over to a program is
        // opened by one only.
        let engine = unsafe { Self::over(device, settings) };
        let engine = engine.map_err(|error| refused(NAME, &error))?;
        let cost = measure(&engine).unwrap_or(engine.cost);
        Ok(Self { cost, counters: Arc::default(), ..engine })
    }

    /// What the card has done so far.
    pub fn counters(&self) -> NicCounters {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { frames, bytes_by_card, bytes_by_processor, .. } = &*self.counters;
        NicCounters {
            frames: count(frames),
            bytes_by_card: count(bytes_by_card),
            bytes_by_processor: count(bytes_by_processor),
            sent_again: count(&self.counters.sent_again),
            given_up: count(&self.counters.given_up),
            notices: count(&self.counters.notices),
        }
    }

    /// The memory that the card reaches.
    pub fn pages(&self) -> &DevicePages {
        &self.pages
    }
}

impl Engine for NicEngine {
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
        Some(self.pages.clone())
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        if self.pages.is_cut_off() {
            return Err(refused(NAME, &CUT_OFF));
        }
        let seat = self.seats.take();
        let seat = seat.ok_or_else(|| OpenError::Exhausted { engine: NAME.into() })?;
        let card = Card::new(self.device.clone()).map_err(|error| OpenError::System {
            engine: NAME.into(),
            reason: format!("card {} could not be started: {error}", self.device.name()),
        })?;
        let (pages, counters) = (self.pages.clone(), self.counters.clone());
        let queue = Queue::new(card, pages, counters, self.settings.checks, seat);
        let capacity = options.capacity.unwrap_or(CAPACITY);
        Ok(Arc::new(DeviceChannel::new(Box::new(queue), capacity)))
    }
}
