//! The copy engines of a GPU.
//!
//! Every GPU moves memory without the processor: into its own memory, out of it, and, by one copy
//! after the other, from host memory to host memory. A channel is a worker thread with a stream for
//! each direction. It cuts transfers into copies, keeps several of them in flight, sleeps until the
//! device should be done, and reports copy by copy.
//!
//! | from, to | route |
//! |---|---|
//! | host, device | one copy, from registered memory, or from a staging buffer that the worker fills |
//! | device, host | one copy, into registered memory, or into a staging buffer that the worker copies out |
//! | device, device | one copy |
//! | host, host | in by one stream, out by the other, through a staging ring on the device; if the memory cannot be registered, the worker copies it itself |
//!
//! Host memory is registered only if its owner requests it ([`RegistrationCache::register`]): the
//! driver rejects copies of other CUDA users in the process that cross the edge of a registration.
//! What they have registered is used as it is. For a program that declares that no other library
//! uses CUDA ([`CudaEngine::sole_user`]), memory is registered in growing ranges while earlier
//! ranges are copied, and stays registered for reuse; descriptors over
//! [transient](crate::Descriptor::transient) memory leave it unregistered.
//!
//! When the device is lost, the copies in flight fail; the processor finishes those between host
//! memory, now and from then on.

mod caller;
mod channel;
mod completion_poll;
mod copies;
mod device_staging;
mod factory;
mod host_staging;
mod in_flight;
mod issue;
#[cfg(feature = "cuda")]
mod measure;
mod operations;
mod pinner;
mod profile;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use memferry_memory::pin_cache::PinCacheLimits;
pub use memferry_sys::cuda::CudaDeviceInfo;
use memferry_sys::cuda::{CudaDriver, DriverError, MemcpyKind, code};
#[cfg(feature = "cuda")]
use memferry_sys::fork::PerProcess;
pub use profile::CudaProfile;

use crate::contract::{
    Capabilities, Channel, ChannelOptions, CopyDirection, CostLine, DeviceAllocError,
    DeviceAllocator, DeviceBuffer, DeviceStream, Engine, ExecutionError, MemoryKind, MemoryKindSet,
    Opcode, OpcodeSet, OpenError, RegistrationCache, RegistrationCosts, RegistrationMode,
};
use caller::{CallerCopy, CallerStream};
use factory::CudaFactory;
use pinner::CudaPinner;

/// The factory of the engine.
pub(crate) static FACTORY: CudaFactory = CudaFactory;

/// The default capacity of a channel, in descriptors. Large, because a submitter of device memory
/// must wait when the channel is full.
const DEFAULT_CAPACITY: usize = 4096;

/// Options for opening a device.
#[derive(Debug, Clone, Copy)]
pub struct CudaConfig {
    /// The index of the device.
    pub ordinal: usize,
    /// The limits of the host memory that stays registered for reuse, for the sole user of CUDA.
    pub limits: PinCacheLimits,
    /// No other library uses CUDA in this process: see [`CudaEngine::sole_user`].
    pub is_sole_user: bool,
}

impl Default for CudaConfig {
    /// The first device. A quarter of the machine's memory may stay registered, up to 16 GiB.
    fn default() -> Self {
        const MAX_BYTES: usize = 16 << 30;
        let quarter = memferry_sys::pages::machine_bytes() / 4;
        let limits = PinCacheLimits { max_bytes: quarter.min(MAX_BYTES), max_entries: 16 << 10 };
        Self { ordinal: 0, limits, is_sole_user: false }
    }
}

/// The copy engines of one GPU.
///
/// ```
/// use memferry::{CudaEngine, EngineSelection, Ferry};
///
/// let ferry = Ferry::builder().gpu(EngineSelection::Auto).build()?;
/// if let Some(gpu) = ferry.engine_as::<CudaEngine>() {
///     println!("{}: {:?} bytes free and in all", gpu.info().name, gpu.memory_bytes()?);
/// }
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct CudaEngine {
    capabilities: Capabilities,
    device: Arc<CudaContext>,
}

/// The state that the channels of an engine share.
pub(crate) struct CudaContext {
    driver: Arc<dyn CudaDriver>,
    profile: CudaProfile,
    pinner: Arc<CudaPinner>,
    registrations: RegistrationCache,
    is_lost: AtomicBool,
    /// Streams of callers that no call uses.
    idle_streams: Mutex<Vec<caller::CallerStream>>,
}

/// A device that this process has open. All engines of a device share its registrations: a driver
/// registers a page once, and each engine must know what the others registered. The device stays
/// open until the process exits, as the primary context does: an engine that is opened while the
/// last one closes would conflict with ranges that are still being unregistered.
#[cfg(feature = "cuda")]
#[derive(Debug)]
struct OpenCudaDevice {
    ordinal: usize,
    device: Arc<CudaContext>,
}

/// Those of this process: a driver does not work in a forked child.
#[cfg(feature = "cuda")]
static OPEN_DEVICES: PerProcess<std::sync::Mutex<Vec<OpenCudaDevice>>> = PerProcess::new();

impl CudaEngine {
    /// Opens a device of this machine and measures it. Takes about half a second, most of it inside
    /// the driver. Engines of one device share it, with the limits of the first engine, until the
    /// process exits. Once one of them is the sole user of CUDA, all are.
    #[cfg(feature = "cuda")]
    pub fn open(config: CudaConfig) -> Result<Self, OpenError> {
        let open_error = |reason| OpenError::System { engine: "cuda".into(), reason };
        let mut opened = OPEN_DEVICES.lock();
        let is_reusable = |open_device: &&OpenCudaDevice| {
            open_device.ordinal == config.ordinal && !open_device.device.is_lost()
        };
        let finish = |engine: Self| if config.is_sole_user { engine.sole_user() } else { engine };
        if let Some(open_device) = opened.iter().find(is_reusable) {
            let device = open_device.device.clone();
            return Ok(finish(Self { capabilities: capabilities(), device }));
        }
        let driver = memferry_sys::cuda::Cuda::open(config.ordinal).map_err(open_error)?;
        let driver: Arc<dyn CudaDriver> = Arc::new(driver);
        let profile = CudaProfile::measure(&driver);
        let engine = Self::with_driver(driver, profile, config.limits)?;
        let device = engine.device.clone();
        opened.push(OpenCudaDevice { ordinal: config.ordinal, device });
        Ok(finish(engine))
    }

    /// Creates an engine for a device behind any driver, such as a model.
    pub fn with_driver(
        driver: Arc<dyn CudaDriver>,
        profile: CudaProfile,
        limits: PinCacheLimits,
    ) -> Result<Self, OpenError> {
        let pinner = Arc::new(CudaPinner::new(driver.clone()));
        let registrations = RegistrationCache::shared(pinner.clone(), limits).map_err(|error| {
            let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
            let cause = cause.unwrap_or_default();
            let reason = format!("the registration cache could not be started: {error}{cause}");
            OpenError::System { engine: "cuda".into(), reason }
        })?;
        let is_lost = AtomicBool::new(false);
        let idle_streams = Mutex::default();
        let device = CudaContext { driver, profile, pinner, registrations, is_lost, idle_streams };
        let device = Arc::new(device);
        Ok(Self { capabilities: capabilities(), device })
    }

    /// Declares that no other code of this process uses CUDA: no library, and not the program
    /// itself. The engine then registers reused host memory with the device, in several ranges, and
    /// keeps it registered. Copies of such memory by other CUDA users would fail ("invalid
    /// argument").
    pub fn sole_user(self) -> Self {
        self.device.registrations.set_sole_user();
        self
    }

    /// The properties of the device.
    pub fn info(&self) -> &CudaDeviceInfo {
        self.device.driver.info()
    }

    /// The measured profile.
    pub fn profile(&self) -> &CudaProfile {
        &self.device.profile
    }

    /// The kind of memory at an address: `None` if it is neither device memory nor registered.
    pub fn memory_kind(&self, address: u64) -> Option<MemoryKind> {
        let kind = |is_device| if is_device { MemoryKind::Device } else { MemoryKind::Host };
        self.device.driver.is_device(address).map(kind)
    }

    /// Allocates memory of the device.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceBuffer, DriverError> {
        let address = allocate(&*self.device.driver, bytes)?;
        let allocation = CudaAllocation { device: self.device.clone(), address };
        // SAFETY: the driver has just allocated the memory, and only the allocation frees it.
        Ok(unsafe { DeviceBuffer::new(address, bytes, allocation) })
    }

    /// The free and the total memory of the device in bytes.
    pub fn memory_bytes(&self) -> Result<(usize, usize), DriverError> {
        self.device.driver.memory()
    }

    /// Whether the device is lost for good.
    pub fn is_lost(&self) -> bool {
        self.device.is_lost()
    }
}

fn capabilities() -> Capabilities {
    Capabilities {
        operations: OpcodeSet::of(&[Opcode::Copy, Opcode::Move, Opcode::Fill, Opcode::Compare]),
        memory: MemoryKindSet::of(&[MemoryKind::Host, MemoryKind::Device]),
        max_descriptor_bytes: usize::MAX,
        preferred_alignment: 4096,
        boundary_bytes: None,
        registration: RegistrationMode::ByEngine,
        claims_chunks: true,
        infallible: false,
        auto_progress: true,
        writes_notifications: false,
    }
}

impl Engine for CudaEngine {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn devices(&self) -> Vec<String> {
        vec![self.info().to_string()]
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn cost(&self, direction: CopyDirection) -> CostLine {
        self.device.profile.cost(direction)
    }

    fn registrations(&self) -> Option<&RegistrationCache> {
        Some(&self.device.registrations)
    }

    fn registration_costs(&self) -> Option<RegistrationCosts> {
        Some(self.device.profile.registration_costs(self.device.registrations.is_sole_user()))
    }

    fn memory_kind(&self, address: u64) -> Option<MemoryKind> {
        self.memory_kind(address)
    }

    fn reaches(&self, address: u64) -> bool {
        self.device.driver.can_access(address)
    }

    fn device_allocator(&self) -> Option<&dyn DeviceAllocator> {
        Some(self)
    }

    fn max_caller_bytes(&self, direction: CopyDirection) -> u64 {
        match direction {
            CopyDirection::HOST_TO_DEVICE => caller::MAX_BYTES_IN as u64,
            CopyDirection::DEVICE_TO_HOST => caller::MAX_BYTES_OUT as u64,
            _ => 0,
        }
    }

    unsafe fn copy_by_caller(
        &self,
        direction: CopyDirection,
        source: u64,
        target: u64,
        bytes: usize,
    ) -> Option<Result<(), ExecutionError>> {
        let kind = match direction {
            CopyDirection::HOST_TO_DEVICE => MemcpyKind::HostToDevice,
            CopyDirection::DEVICE_TO_HOST => MemcpyKind::DeviceToHost,
            _ => return None,
        };
        // SAFETY: the caller upholds the contract.
        unsafe { caller::copy_now(&self.device, CallerCopy { kind, source, target, bytes }) }
    }

    fn open_stream(&self) -> Option<Box<dyn DeviceStream>> {
        if self.device.is_lost() {
            return None;
        }
        self.device.driver.make_current().ok()?;
        let stream = CallerStream::open(&self.device).ok()?;
        Some(Box::new(stream))
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        Ok(Arc::new(channel::open(&self.device, options, DEFAULT_CAPACITY)?))
    }
}

impl DeviceAllocator for CudaEngine {
    fn allocate(&self, bytes: usize) -> Result<DeviceBuffer, DeviceAllocError> {
        self.allocate(bytes).map_err(|error| DeviceAllocError(error.to_string()))
    }
}

impl CudaContext {
    fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    /// Records an error of the driver; a lost device is marked.
    fn record_error(&self, error: DriverError) {
        if error.is_device_lost() && !self.is_lost.swap(true, Ordering::Relaxed) {
            tracing::error!(%error, "the GPU is lost: processors copy host memory from now on");
        }
    }
}

impl fmt::Debug for CudaContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaContext")
            .field("info", self.driver.info())
            .field("profile", &self.profile)
            .field("is_lost", &self.is_lost())
            .finish_non_exhaustive()
    }
}

/// Allocates memory of the device. The driver picks addresses that the kernel reports as free, also
/// where host memory was just unmapped and is still being unregistered; such a conflict is retried
/// for 20 ms.
fn allocate(driver: &dyn CudaDriver, bytes: usize) -> Result<u64, DriverError> {
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

/// An allocation of device memory, freed on drop.
#[derive(Debug)]
struct CudaAllocation {
    device: Arc<CudaContext>,
    address: u64,
}

impl Drop for CudaAllocation {
    fn drop(&mut self) {
        // SAFETY: allocated in `CudaEngine::allocate`; users of the raw address guarantee that
        // their copies are complete.
        unsafe { self.device.driver.free(self.address) };
    }
}
