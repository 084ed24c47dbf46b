//! The buffers that a transfer can own while it is in flight.

use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;
use memferry_engine::DeviceBuffer;
use memferry_engine::MemoryKind;
use memferry_sys::Pages;

/// A page-aligned buffer, on huge pages where these are available.
///
/// ```
/// use memferry::{Buffer, Ferry};
///
/// let (_, target) = Ferry::new()?.icopy(Buffer::new(4096)?, Buffer::new(4096)?)?.wait()?;
/// assert_eq!(target.len(), 4096);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct Buffer(Pages);

/// Prints the length, not the bytes.
impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("length", &self.0.len()).finish()
    }
}

impl Buffer {
    /// Allocates `length` zeroed bytes.
    pub fn new(length: usize) -> std::io::Result<Self> {
        Pages::huge(length).map(Self)
    }
}

impl std::ops::Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

impl std::ops::DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.as_mut_slice()
    }
}

/// An owned buffer that a transfer can read.
///
/// ```
/// use memferry::{Ferry, OwnedSource};
///
/// fn send(ferry: &Ferry, source: impl OwnedSource) {
///     let (_, bytes) = source.source();
///     drop(ferry.icopy(source, vec![0u8; bytes]));
/// }
/// ```
///
/// # Safety
/// The bytes must keep their address and contents while the value is moved or leaked, until it is
/// dropped.
pub unsafe trait OwnedSource: Send + 'static {
    /// Returns the address and the length in bytes.
    fn source(&self) -> (*const u8, usize);

    /// Returns the kind of memory of the bytes.
    fn source_memory(&self) -> MemoryKind {
        MemoryKind::Host
    }
}

/// An owned buffer that a transfer can write.
///
/// ```
/// use memferry::OwnedTarget;
///
/// let (_, bytes) = vec![0u32; 2].target();
/// assert_eq!(bytes, 8);
/// ```
///
/// # Safety
/// The bytes must keep their address while the value is moved or leaked, until it is dropped, and
/// no other code may have access to them.
pub unsafe trait OwnedTarget: Send + 'static {
    /// Returns the address and the length in bytes.
    fn target(&mut self) -> (*mut u8, usize);

    /// Returns the kind of memory of the bytes.
    fn target_memory(&self) -> MemoryKind {
        MemoryKind::Host
    }
}

/// An owned buffer of plain elements that a transfer can lend while it is in flight.
///
/// ```
/// use memferry::{Ferry, OwnedSlice, OwnedSource, OwnedTransfer};
///
/// /// The first element, as soon as it has arrived.
/// fn first<S: OwnedSource, T: OwnedSlice>(transfer: &OwnedTransfer<S, T>) -> Option<T::Element> {
///     Some(transfer.wait_range(..1).ok()?[0])
/// }
///
/// let transfer = Ferry::new()?.icopy(vec![5u64; 8], vec![0u64; 8])?;
/// assert_eq!(first(&transfer), Some(5));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
///
/// # Safety
/// [`OwnedTarget::target`] must return the bytes of a slice of elements, aligned for them, in memory of the host.
pub unsafe trait OwnedSlice: OwnedTarget {
    /// The type of the elements. Threads that share a transfer read them at the same time.
    type Element: Pod + Sync;
}

// SAFETY: the elements of a vector are on the heap and keep their address when the vector is moved.
unsafe impl<T: Pod + Send> OwnedSource for Vec<T> {
    fn source(&self) -> (*const u8, usize) {
        (self.as_ptr().cast(), size_of_val(&self[..]))
    }
}

// SAFETY: as above, and a vector is the only owner of its elements; any bytes are valid elements.
unsafe impl<T: Pod + Send> OwnedTarget for Vec<T> {
    fn target(&mut self) -> (*mut u8, usize) {
        (self.as_mut_ptr().cast(), size_of_val(&self[..]))
    }
}

// SAFETY: the bytes are those of the vector's elements.
unsafe impl<T: Pod + Send + Sync> OwnedSlice for Vec<T> {
    type Element = T;
}

// SAFETY: the elements of a box are on the heap and keep their address when the box is moved.
unsafe impl<T: Pod + Send> OwnedSource for Box<[T]> {
    fn source(&self) -> (*const u8, usize) {
        (self.as_ptr().cast(), size_of_val(&self[..]))
    }
}

// SAFETY: as above, and a box is the only owner of its elements; any bytes are valid elements.
unsafe impl<T: Pod + Send> OwnedTarget for Box<[T]> {
    fn target(&mut self) -> (*mut u8, usize) {
        (self.as_mut_ptr().cast(), size_of_val(&self[..]))
    }
}

// SAFETY: the bytes are those of the box's elements.
unsafe impl<T: Pod + Send + Sync> OwnedSlice for Box<[T]> {
    type Element = T;
}

// SAFETY: a mapping keeps its address until it is dropped.
unsafe impl OwnedSource for Buffer {
    fn source(&self) -> (*const u8, usize) {
        (self.0.as_ptr(), self.0.len())
    }
}

// SAFETY: as above, and the buffer is the only owner of the mapping.
unsafe impl OwnedTarget for Buffer {
    fn target(&mut self) -> (*mut u8, usize) {
        (self.0.as_ptr(), self.0.len())
    }
}

// SAFETY: the bytes are those of the mapping.
unsafe impl OwnedSlice for Buffer {
    type Element = u8;
}

// SAFETY: shared elements keep their address and contents while an owner exists, and this value is
// one.
unsafe impl<T: Pod + Send + Sync> OwnedSource for Arc<[T]> {
    fn source(&self) -> (*const u8, usize) {
        (self.as_ptr().cast(), size_of_val(&self[..]))
    }
}

// SAFETY: static elements keep their address and contents for ever.
unsafe impl<T: Pod + Sync> OwnedSource for &'static [T] {
    fn source(&self) -> (*const u8, usize) {
        (self.as_ptr().cast(), size_of_val(*self))
    }
}

// SAFETY: device memory keeps its address until it is freed, and no processor accesses it.
unsafe impl OwnedSource for DeviceBuffer {
    fn source(&self) -> (*const u8, usize) {
        (self.as_ptr(), self.len())
    }

    fn source_memory(&self) -> MemoryKind {
        MemoryKind::Device
    }
}

// SAFETY: as above, and this value is the only owner of the memory.
unsafe impl OwnedTarget for DeviceBuffer {
    fn target(&mut self) -> (*mut u8, usize) {
        (self.as_ptr(), self.len())
    }

    fn target_memory(&self) -> MemoryKind {
        MemoryKind::Device
    }
}

// SAFETY: the value has no bytes: it is the source of a fill.
unsafe impl OwnedSource for () {
    fn source(&self) -> (*const u8, usize) {
        (std::ptr::NonNull::dangling().as_ptr(), 0)
    }
}

/// The address, length and kind of memory of a buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BufferSpan<P> {
    pub(crate) address: P,
    pub(crate) length: usize,
    pub(crate) memory: MemoryKind,
}

impl BufferSpan<*const u8> {
    pub(super) fn of_source(source: &impl OwnedSource) -> Self {
        let (address, length) = source.source();
        Self { address, length, memory: source.source_memory() }
    }
}

impl BufferSpan<*mut u8> {
    pub(super) fn of_target(target: &mut impl OwnedTarget) -> Self {
        let (address, length) = target.target();
        Self { address, length, memory: target.target_memory() }
    }
}

/// Source and target of a copy.
pub(crate) type BufferPair = (BufferSpan<*const u8>, BufferSpan<*mut u8>);
