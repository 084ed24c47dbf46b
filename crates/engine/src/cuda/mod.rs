//! The copy engines of a GPU.
//!
//! Every GPU moves memory without the processor: into its own memory, out of it, and, one after the
//! other, from ordinary memory to ordinary memory. A channel is a thread with a stream for each
//! direction. It cuts transfers into pieces, keeps several of them under way, sleeps until the device
//! should be done, and reports piece by piece.
//!
//! | from, to | way |
//! |---|---|
//! | ordinary, device | one copy, from registered memory, or from a ring that the channel copies into |
//! | device, ordinary | one copy, into registered memory, or into a ring that the channel copies from |
//! | device, device | one copy |
//! | ordinary, ordinary | in by one stream, out by the other, through memory of the device; where the memory cannot be registered, the channel copies it itself |
//!
//! Ordinary memory is registered only if its owner says so ([`Registry::register`]): others in the
//! process who use CUDA too would have copies refused that cross the edge of what is registered. What
//! they have registered is used as it is. For a program that says that nobody else uses CUDA
//! ([`CudaEngine::sole_user`]), memory is registered piece by piece while earlier pieces move, in growing
//! pieces, and kept registered for the next time; descriptors whose memory is only
//! [passing](crate::Descriptor::passing) leave it unregistered.
//!
//! When the device is lost, what is in flight fails; what lies in ordinary memory is finished by the
//! processor, now and from then on.

mod channel;
mod copies;
mod flight;
#[cfg(feature = "cuda")]
mod measure;
pub mod model;
mod operations;
mod pace;
mod passage;
mod rates;
mod registrar;
mod slots;
mod steps;

use std::fmt;
use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use memferry_sys::cuda::{Driver, DriverError, code};
#[cfg(feature = "cuda")]
use memferry_sys::{fork, sync::lock};

pub use memferry_sys::cuda::DeviceFacts;
pub use rates::Rates;

use crate::contract::{
    Capabilities, Channel, ChannelOptions, CostLine, Direction, Engine, Limits, MemoryKind,
    MemoryKinds, OpenError, Operation, Operations, Preparation, Registration, Registry,
};
use registrar::Registrar;

/// Descriptors a channel holds unless told otherwise. Many: what does not fit and is not in ordinary
/// memory has to wait.
const DEFAULT_CAPACITY: usize = 4096;

/// Settings for opening a device.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Which device.
    pub ordinal: usize,
    /// How much ordinary memory is kept registered for later, for the sole user of CUDA.
    pub limits: Limits,
    /// Nobody else uses CUDA in this process: see [`CudaEngine::sole_user`].
    pub is_sole_user: bool,
}

impl Default for Settings {
    /// The first device. A quarter of the machine's memory may stay registered, up to 16 GiB.
    fn default() -> Self {
        const MOST_BYTES: usize = 16 << 30;
        let quarter = memferry_sys::pages::machine_bytes() / 4;
        let limits = Limits { most_bytes: quarter.min(MOST_BYTES), most_entries: 16 << 10 };
        Self { ordinal: 0, limits, is_sole_user: false }
    }
}

/// The copy engines of one GPU.
#[derive(Debug)]
pub struct CudaEngine {
    capabilities: Capabilities,
    device: Arc<Device>,
}

/// What the channels of an engine share.
pub(crate) struct Device {
    driver: Arc<dyn Driver>,
    rates: Rates,
    registrar: Arc<Registrar>,
    registry: Registry,
    is_lost: AtomicBool,
}

/// A device that this process has open. All engines for it share what is registered with it: a driver
/// registers a page once, and each must know what the others did. It stays open until the process ends,
/// as the context does that libraries share: an engine that is opened while the last one goes would
/// meet what that one is still unregistering.
#[cfg(feature = "cuda")]
#[derive(Debug)]
struct Opened {
    ordinal: usize,
    device: Arc<Device>,
    fork_generation: u64,
}

#[cfg(feature = "cuda")]
static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());

impl CudaEngine {
    /// Opens a device of this machine, and measures it. Takes about half a second, most of which
    /// the driver needs for itself. Engines for one device share it, with the limits of the first,
    /// until the process ends. Once one of them is the sole user of CUDA, all are.
    #[cfg(feature = "cuda")]
    pub fn open(settings: Settings) -> Result<Self, OpenError> {
        let refused = |reason| OpenError::System { engine: "cuda".into(), reason };
        let mut opened = lock(&OPENED);
        let here = fork::generation();
        let is_it = |known: &&Opened| {
            let is_same = known.ordinal == settings.ordinal && known.fork_generation == here;
            is_same && !known.device.is_lost()
        };
        let finish = |engine: Self| if settings.is_sole_user { engine.sole_user() } else { engine };
        if let Some(known) = opened.iter().find(is_it) {
            let device = known.device.clone();
            return Ok(finish(Self { capabilities: capabilities(), device }));
        }
        let driver = memferry_sys::cuda::Cuda::open(settings.ordinal).map_err(refused)?;
        let driver: Arc<dyn Driver> = Arc::new(driver);
        let rates = Rates::measure(&driver);
        let engine = Self::with_driver(driver, rates, settings.limits)?;
        let device = engine.device.clone();
        opened.push(Opened { ordinal: settings.ordinal, device, fork_generation: here });
        Ok(finish(engine))
    }

    /// An engine for a device behind any driver, such as a [model](model::ModelDevice).
    pub fn with_driver(
        driver: Arc<dyn Driver>,
        rates: Rates,
        limits: Limits,
    ) -> Result<Self, OpenError> {
        let registrar = Arc::new(Registrar::new(driver.clone()));
        let registry = Registry::new(registrar.clone(), limits).map_err(|error| {
            let reason = format!("memory cannot be kept registered: {error}");
            OpenError::System { engine: "cuda".into(), reason }
        })?;
        let is_lost = AtomicBool::new(false);
        let device = Arc::new(Device { driver, rates, registrar, registry, is_lost });
        Ok(Self { capabilities: capabilities(), device })
    }

    /// Says that nobody else uses CUDA in this process: no other library, no code of the program itself.
    /// Then ordinary memory that is copied again is registered with the device, in pieces, and stays so.
    /// Others would see their own copies of such memory refused ("invalid argument").
    pub fn sole_user(self) -> Self {
        self.device.registry.set_sole_user();
        self
    }

    /// What the device is.
    pub fn facts(&self) -> &DeviceFacts {
        self.device.driver.facts()
    }

    /// What was measured of it.
    pub fn rates(&self) -> &Rates {
        &self.device.rates
    }

    /// Where an address is: `None` if it is neither the device's nor registered.
    pub fn memory_kind(&self, address: u64) -> Option<MemoryKind> {
        let kind = |is_device| if is_device { MemoryKind::Device } else { MemoryKind::Host };
        self.device.driver.is_device(address).map(kind)
    }

    /// Takes memory of the device.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceMemory, DriverError> {
        let address = allocate(&*self.device.driver, bytes)?;
        Ok(DeviceMemory { device: self.device.clone(), address, bytes })
    }

    /// Free memory of the device, and all of it.
    pub fn memory_bytes(&self) -> Result<(usize, usize), DriverError> {
        self.device.driver.memory()
    }

    /// Whether the device is gone for good.
    pub fn is_lost(&self) -> bool {
        self.device.is_lost()
    }
}

fn capabilities() -> Capabilities {
    Capabilities {
        operations: Operations::of(&[
            Operation::Copy,
            Operation::Move,
            Operation::Fill,
            Operation::Compare,
        ]),
        memory: MemoryKinds::of(&[MemoryKind::Host, MemoryKind::Device]),
        largest_descriptor_bytes: usize::MAX,
        preferred_alignment: 4096,
        boundary_bytes: None,
        registration: Registration::ByEngine,
        claims_chunks: true,
        never_fails: false,
        self_driving: true,
        notifies: false,
    }
}

impl Engine for CudaEngine {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn cost(&self, direction: Direction) -> CostLine {
        self.device.rates.cost(direction)
    }

    fn registry(&self) -> Option<&Registry> {
        Some(&self.device.registry)
    }

    fn preparation(&self) -> Option<Preparation> {
        Some(self.device.rates.preparation(self.device.registry.is_sole_user()))
    }

    fn kind_of(&self, address: u64) -> Option<MemoryKind> {
        self.memory_kind(address)
    }

    fn reaches(&self, address: u64) -> bool {
        self.device.driver.reaches(address)
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        Ok(Arc::new(channel::open(&self.device, options, DEFAULT_CAPACITY)?))
    }
}

impl Device {
    fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    /// Takes note of what a driver said.
    fn heard(&self, error: DriverError) {
        if error.is_loss() && !self.is_lost.swap(true, Ordering::Relaxed) {
            tracing::error!(%error, "the GPU is lost: processors copy what they reach");
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("facts", self.driver.facts())
            .field("rates", &self.rates)
            .field("is_lost", &self.is_lost())
            .finish_non_exhaustive()
    }
}

/// Takes memory of the device. A driver takes addresses that the kernel calls free, also where
/// ordinary memory has gone a moment ago and is still being unregistered.
fn allocate(driver: &dyn Driver, bytes: usize) -> Result<u64, DriverError> {
    const TRIES: u32 = 20;
    const PAUSE: Duration = Duration::from_millis(1);
    let mut outcome = driver.allocate(bytes);
    for _ in 0..TRIES {
        match outcome {
            Err(DriverError { code: code::ALREADY_MAPPED, .. }) => std::thread::sleep(PAUSE),
            _ => break,
        }
        outcome = driver.allocate(bytes);
    }
    outcome
}

/// Memory of a device. It is given back when this is dropped; transfers over it must be over by
/// then, as their callers promise.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Arc<Device>,
    address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// The first address. No processor can use it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The same as a pointer, for requests.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address as *mut u8
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `CudaEngine::allocate`; whoever used it raw vouched for the end.
        unsafe { self.device.driver.free(self.address) };
    }
}
