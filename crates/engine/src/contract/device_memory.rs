//! Memory of devices.

use std::any::Any;
use std::fmt;

use thiserror::Error;

/// Memory of a device could not be allocated.
///
/// ```
/// use memferry::{DeviceAllocError, EngineSelection, Ferry};
///
/// let ferry = Ferry::builder().gpu(EngineSelection::Auto).build()?;
/// let refused = ferry.device_allocator().map(|gpu| gpu.allocate(usize::MAX));
/// let refused: Option<DeviceAllocError> = refused.and_then(Result::err);
/// println!("{refused:?}");
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct DeviceAllocError(pub String);

/// An engine that allocates memory of its device.
///
/// ```
/// use memferry::{DeviceAllocator, Ferry};
///
/// let ferry = Ferry::new()?;
/// let gpu: Option<&dyn DeviceAllocator> = ferry.device_allocator();
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub trait DeviceAllocator: Send + Sync {
    /// Allocates memory of the device.
    fn allocate(&self, bytes: usize) -> Result<DeviceBuffer, DeviceAllocError>;
}

/// Memory of a device, freed on drop. Transfers over it must be complete by then, as their callers
/// guarantee.
///
/// ```
/// use memferry::{DeviceBuffer, EngineSelection, Ferry};
///
/// let ferry = Ferry::builder().gpu(EngineSelection::Auto).build()?;
/// if let Some(gpu) = ferry.device_allocator() {
///     let mut weights: DeviceBuffer = gpu.allocate(4 << 20)?;
///     ferry.copy_to_device(&vec![1.0f32; 1 << 20], &mut weights, 0)?;
/// }
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct DeviceBuffer {
    address: u64,
    bytes: usize,
    /// Frees the memory when it is dropped.
    _allocation: Box<dyn Any + Send + Sync>,
}

impl DeviceBuffer {
    /// Wraps allocated memory, which the drop of `allocation` frees.
    ///
    /// # Safety
    /// The address must be that of `bytes` bytes of device memory, which stay allocated until
    /// `allocation` is dropped, and which nothing else owns.
    pub unsafe fn new(
        address: u64,
        bytes: usize,
        allocation: impl Any + Send + Sync,
    ) -> DeviceBuffer {
        Self { address, bytes, _allocation: Box::new(allocation) }
    }

    /// The first address. No processor can access it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The first address as a pointer, for requests.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address as *mut u8
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("address", &format_args!("{:#x}", self.address))
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}
