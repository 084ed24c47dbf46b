//! The calls of the CUDA driver that memory transfers need, and their errors.
//!
//! [`CudaDriver`] is one device with one context. `Cuda` is the driver of the machine,
//! loaded at run time on first use; nothing is linked, so that a program also runs without it.
//! Models of a device implement the same trait.

#[cfg(feature = "cuda")]
mod library;
#[cfg(feature = "cuda")]
mod real;

#[cfg(feature = "cuda")]
pub use library::{CudaInventory, inventory};
#[cfg(feature = "cuda")]
pub use real::Cuda;

use std::fmt;

/// Handle of a stream: an in-order queue of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CudaStream(u64);

/// Handle of an event: a marker in a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CudaEvent(u64);

macro_rules! names {
    ($($name:ident),+) => {$(
        impl $name {
            /// Wraps a handle of the driver.
            ///
            /// # Safety
            /// The handle must belong to the driver that it is used with, and must not be
            /// destroyed.
            pub unsafe fn from_raw(handle: u64) -> Self {
                Self(handle)
            }

            /// The handle as the driver knows it.
            pub fn raw(self) -> u64 {
                self.0
            }
        }
    )+};
}

names!(CudaStream, CudaEvent);

/// Direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemcpyKind {
    /// From host memory to device memory.
    HostToDevice,
    /// From device memory to host memory.
    DeviceToHost,
    /// Within device memory.
    DeviceToDevice,
}

/// Properties of a device.
///
/// ```
/// use memferry::engine::cuda::CudaDeviceInfo;
/// use memferry::{CudaEngine, EngineSelection, Ferry};
///
/// let ferry = Ferry::builder().gpu(EngineSelection::Auto).build()?;
/// if let Some(gpu) = ferry.engine_as::<CudaEngine>() {
///     let info: &CudaDeviceInfo = gpu.info();
///     println!("GPU {}: {}, {} copy engines", info.ordinal, info.name, info.copy_engines);
/// }
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaDeviceInfo {
    /// Index among the devices of the process.
    pub ordinal: usize,
    /// Product name.
    pub name: String,
    /// Address on the bus, such as `0000:17:00.0`, if the driver tells it.
    pub address: Option<String>,
    /// The newest version of CUDA that the driver supports: 1000 * major + 10 * minor.
    pub driver_version: u32,
    /// The number of copies that run at the same time.
    pub copy_engines: usize,
    /// Whether read-only memory can be registered.
    pub registers_read_only: bool,
}

impl fmt::Display for CudaDeviceInfo {
    /// Writes the number, the product name and the address: `GPU 0 (NVIDIA H100, 0000:17:00.0)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({}", self.ordinal, self.name)?;
        if let Some(address) = &self.address {
            write!(f, ", {address}")?;
        }
        f.write_str(")")
    }
}

/// A device with a context in this process. Calls may come from any thread, unless stated
/// otherwise.
///
/// # Safety
/// Callers free memory on the basis of `is_complete`: it must not return true before everything
/// that was enqueued in the stream before the event is complete. Copies must access only the memory
/// that they were given.
pub unsafe trait CudaDriver: Send + Sync + fmt::Debug {
    /// Properties of the device.
    fn info(&self) -> &CudaDeviceInfo;

    /// Makes this device's context current on the calling thread.
    fn make_current(&self) -> Result<(), DriverError>;

    /// Runs `work` with this device's context current on the calling thread, and restores the
    /// context that the thread had.
    fn with_current(&self, work: &mut dyn FnMut()) -> Result<(), DriverError>;

    /// Free and total memory of the device, in bytes.
    fn memory(&self) -> Result<(usize, usize), DriverError>;

    /// Allocates device memory.
    fn allocate(&self, bytes: usize) -> Result<u64, DriverError>;

    /// Frees device memory.
    ///
    /// # Safety
    /// The address must come from [`CudaDriver::allocate`], and the memory must not be in use.
    unsafe fn free(&self, address: u64);

    /// Allocates host memory that is pinned and registered.
    fn allocate_pinned(&self, bytes: usize) -> Result<u64, DriverError>;

    /// Frees pinned host memory.
    ///
    /// # Safety
    /// The address must come from [`CudaDriver::allocate_pinned`], and the memory must not be in
    /// use.
    unsafe fn free_pinned(&self, address: u64);

    /// Pins host pages and registers them with the device. Registered pages cannot be registered
    /// again.
    fn register(&self, address: usize, bytes: usize, read_only: bool) -> Result<(), DriverError>;

    /// Undoes [`CudaDriver::register`] for the whole range that begins at `address`.
    ///
    /// # Safety
    /// No copy of this memory may be in a stream: the device would access pages that the kernel has
    /// reused.
    unsafe fn unregister(&self, address: usize) -> Result<(), DriverError>;

    /// Whether an address is in device memory; `None` if the driver does not know the address.
    fn is_device(&self, address: u64) -> Option<bool>;

    /// Whether this device can access an address that the caller takes for device memory: `false`
    /// if the address belongs to another device or is unknown to the driver.
    fn can_access(&self, address: u64) -> bool;

    /// Creates a stream. This call and all below need a thread on which the context is
    /// [current](CudaDriver::make_current).
    fn create_stream(&self) -> Result<CudaStream, DriverError>;

    /// Destroys a stream after its work is complete.
    fn destroy_stream(&self, stream: CudaStream);

    /// Creates an event.
    fn create_event(&self) -> Result<CudaEvent, DriverError>;

    /// Destroys an event.
    fn destroy_event(&self, event: CudaEvent);

    /// Enqueues a copy in a stream.
    ///
    /// # Safety
    /// Both ranges must be valid until the copy is complete, and until then no other code may write
    /// to either or read the target. Host memory must be registered and lie inside one
    /// registration.
    unsafe fn copy(
        &self,
        kind: MemcpyKind,
        source: u64,
        target: u64,
        bytes: usize,
        stream: CudaStream,
    ) -> Result<(), DriverError>;

    /// Copies host memory that is not registered, in a stream; returns when the copy is complete.
    ///
    /// # Safety
    /// Both ranges must be valid, and no other code may write to either or read the target.
    unsafe fn copy_sync(
        &self,
        kind: MemcpyKind,
        source: u64,
        target: u64,
        bytes: usize,
        stream: CudaStream,
    ) -> Result<(), DriverError>;

    /// Enqueues a fill of device memory in a stream.
    ///
    /// # Safety
    /// The range must be valid until the fill is complete, and until then no other code may access
    /// it.
    unsafe fn fill(
        &self,
        target: u64,
        value: u8,
        bytes: usize,
        stream: CudaStream,
    ) -> Result<(), DriverError>;

    /// Records an event in a stream.
    fn record_event(&self, event: CudaEvent, stream: CudaStream) -> Result<(), DriverError>;

    /// Makes a stream wait for an event of another stream.
    fn stream_wait_event(&self, stream: CudaStream, event: CudaEvent) -> Result<(), DriverError>;

    /// Waits until all work in a stream is complete, or the device is lost.
    fn synchronize(&self, stream: CudaStream);

    /// Whether the device has reached an event; `true` for an event that was never recorded.
    fn is_complete(&self, event: CudaEvent) -> Result<bool, DriverError>;
}

/// An error of a driver call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriverError {
    /// The name of the call.
    pub call: &'static str,
    /// The driver's error code.
    pub code: u32,
}

/// Error codes of the driver that are handled here.
pub mod code {
    /// An argument is invalid; also unmapped memory.
    pub const INVALID_VALUE: u32 = 1;
    /// Out of memory.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// The driver is being unloaded because the process exits.
    pub const DEINITIALIZED: u32 = 4;
    /// No device is available.
    pub const NO_DEVICE: u32 = 100;
    /// No device has this index.
    pub const INVALID_DEVICE: u32 = 101;
    /// The address is mapped as other memory.
    pub const ALREADY_MAPPED: u32 = 208;
    /// The work is not complete.
    pub const NOT_READY: u32 = 600;
    /// The device accessed an invalid address.
    pub const ILLEGAL_ADDRESS: u32 = 700;
    /// Some of the pages are registered already.
    pub const ALREADY_REGISTERED: u32 = 712;
    /// The operation is not supported on this machine.
    pub const NOT_SUPPORTED: u32 = 801;
    /// The driver's library and its kernel module have different versions.
    pub const DRIVER_MISMATCH: u32 = 803;
    /// An unknown error.
    pub const UNKNOWN: u32 = 999;
}

impl DriverError {
    /// Whether the device, or the context of this process on it, is permanently lost.
    pub fn is_device_lost(&self) -> bool {
        use code::{DEINITIALIZED, ILLEGAL_ADDRESS, UNKNOWN};
        // Uncorrectable memory errors, hardware faults, failed links between devices, and the
        // persistent errors after an invalid access, a trap or a timeout.
        matches!(
            self.code,
            DEINITIALIZED | UNKNOWN | 201 | 214 | 219 | 220 | 702 | 709 | 710 | 713..=721
        ) || self.code == ILLEGAL_ADDRESS
    }

    /// A description of the error code, for display.
    pub fn description(&self) -> &'static str {
        match self.code {
            code::INVALID_VALUE => "an argument is invalid, or the memory is not mapped",
            code::OUT_OF_MEMORY => "out of memory",
            3 | code::DEINITIALIZED => "the driver is unloaded: the process is exiting",
            34 => "libcuda.so.1 is a stub without a driver: run on a machine with a GPU",
            46 => "another process uses the device exclusively",
            code::NO_DEVICE => "no GPU exists or is visible (CUDA_VISIBLE_DEVICES)",
            code::INVALID_DEVICE => "no GPU has this index",
            201 | 709 => "the context of this process was destroyed",
            code::ALREADY_MAPPED => "the device has mapped the address to other memory",
            214 => "uncorrectable memory error of the device",
            code::ILLEGAL_ADDRESS => "the device accessed an invalid address",
            code::ALREADY_REGISTERED => "a part of the memory is registered already",
            800 => "the operation is not permitted",
            code::NOT_SUPPORTED => "the operation is not supported on this machine",
            code::DRIVER_MISMATCH => {
                "the driver's library and its kernel module have different versions: reboot or reload \
                 the module"
            }
            702 | 710 | 713..=721 => "the device failed during execution",
            _ => "unknown error code of the driver",
        }
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with {}: {}", self.call, self.code, self.description())
    }
}

impl std::error::Error for DriverError {}
