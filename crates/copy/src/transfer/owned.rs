//! Transfers that own their buffers while they are in flight.

use std::fmt;
use std::future::Future;
use std::io;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::RangeBounds;
use std::pin::Pin;
use std::ptr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytemuck::Pod;
use memferry_engine::DeviceBuffer;
use memferry_engine::MemoryKind;
use memferry_sys::{EventFd, Pages};

use super::{Dependency, Predecessor, Transfer, ready_slice, wait_slice};
use crate::error::Error;

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

/// The buffers of a transfer in flight. `MaybeUninit` prevents the compiler from assuming that no
/// other code accesses the memory that they point to.
struct InFlightBuffers<S, T>(MaybeUninit<(S, T)>);

impl<S, T> InFlightBuffers<S, T> {
    fn into_inner(self) -> (S, T) {
        let this = ManuallyDrop::new(self);
        // SAFETY: the value is initialised on construction, and read once: `this` is not dropped.
        unsafe { this.0.assume_init_read() }
    }
}

impl<S, T> Drop for InFlightBuffers<S, T> {
    fn drop(&mut self) {
        // SAFETY: the value is initialised on construction, and `into_inner` prevents this drop.
        unsafe { self.0.assume_init_drop() };
    }
}

impl<S, T> fmt::Debug for InFlightBuffers<S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InFlightBuffers")
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

/// A failed request over owned buffers, with the buffers.
///
/// ```
/// use memferry::Ferry;
///
/// let failed = Ferry::new()?.icopy(vec![1u8; 3], vec![0u8; 4]).unwrap_err();
/// println!("{}", failed.error);
/// let (source, target) = (failed.source, failed.target); // the buffers are back
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct FailedTransfer<S, T> {
    /// The error.
    pub error: Error,
    /// The returned source.
    pub source: S,
    /// The returned target. Its contents are unspecified if the transfer had started.
    pub target: T,
}

/// The buffers of a complete transfer, with the error if there is one.
type OwnedOutcome<S, T> = Result<(S, T), FailedTransfer<S, T>>;

impl<S, T> fmt::Debug for FailedTransfer<S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FailedTransfer").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<S, T> fmt::Display for FailedTransfer<S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<S, T> std::error::Error for FailedTransfer<S, T> {
    /// Returns the cause of the error; the text of the error itself is that of this type.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

/// A transfer that owns its buffers and returns them at completion.
///
/// Dropping it before completion detaches it: the transfer continues, and the buffers are freed
/// when it is complete. The handle is also a future.
///
/// ```
/// use memferry::Ferry;
///
/// let transfer = Ferry::new()?.icopy(vec![5u32; 1000], vec![0u32; 1000])?;
/// assert_eq!(transfer.wait_range(10..12)?, [5, 5]);
/// let (source, target) = transfer.wait()?; // or: transfer.await?
/// assert_eq!(source, target);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[must_use = "the buffers come back from `wait`"]
pub struct OwnedTransfer<S: Send + 'static, T: Send + 'static> {
    transfer: Transfer,
    /// The address of the target's bytes; null for a batch, which has many targets.
    target: *mut u8,
    buffers: Option<InFlightBuffers<S, T>>,
}

// SAFETY: the pointer is that of the target, which the handle owns and which may be sent to other
// threads.
unsafe impl<S: Send, T: Send> Send for OwnedTransfer<S, T> {}
// SAFETY: a shared handle gives read access only to ready elements of the target, which are plain.
unsafe impl<S: Send + Sync, T: Send + Sync> Sync for OwnedTransfer<S, T> {}

impl<S: Send, T: Send> fmt::Debug for OwnedTransfer<S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedTransfer").field("transfer", &self.transfer).finish_non_exhaustive()
    }
}

impl<S: OwnedSource, T: OwnedTarget> OwnedTransfer<S, T> {
    /// Takes the buffers, then calls `start` with their addresses, lengths and kinds of memory to
    /// start the transfer.
    pub(crate) fn start(
        source: S,
        target: T,
        start: impl FnOnce(BufferSpan<*const u8>, BufferSpan<*mut u8>) -> Result<Transfer, Error>,
    ) -> Result<Self, FailedTransfer<S, T>> {
        Self::start_with(source, target, |source, target| {
            let to = BufferSpan::of_target(target);
            Ok((start(BufferSpan::of_source(source), to)?, to.address))
        })
    }

    /// Takes the buffers, then calls `start` with them to start the transfer. It returns the address
    /// of the target's bytes too.
    pub(super) fn start_with(
        source: S,
        target: T,
        start: impl FnOnce(&S, &mut T) -> Result<(Transfer, *mut u8), Error>,
    ) -> Result<Self, FailedTransfer<S, T>> {
        let mut held = InFlightBuffers(MaybeUninit::new((source, target)));
        // SAFETY: the buffers are initialised in the line above. The addresses are taken at the
        // final location of the buffers, because moving a box again would invalidate pointers
        // derived before.
        let (source, target) = unsafe { held.0.assume_init_mut() };
        match start(source, target) {
            Ok((transfer, target)) => Ok(Self { transfer, target, buffers: Some(held) }),
            Err(error) => {
                let (source, target) = held.into_inner();
                Err(FailedTransfer { error, source, target })
            }
        }
    }
}

impl<S: OwnedSource, T: OwnedTarget> OwnedTransfer<Vec<S>, Vec<T>> {
    /// Takes the buffers of a batch, then calls `start` with the addresses, lengths and kinds of
    /// memory of each pair to start the transfer.
    pub(crate) fn start_many(
        sources: Vec<S>,
        targets: Vec<T>,
        start: impl FnOnce(Vec<BufferPair>) -> Result<Transfer, Error>,
    ) -> Result<Self, FailedTransfer<Vec<S>, Vec<T>>> {
        let mut held = InFlightBuffers(MaybeUninit::new((sources, targets)));
        // SAFETY: the buffers are initialised in the line above. The addresses are taken at the
        // final location of the buffers, on the heap, as in `start`.
        let (sources, targets) = unsafe { held.0.assume_init_mut() };
        let pairs = sources
            .iter()
            .zip(targets)
            .map(|(source, target)| (BufferSpan::of_source(source), BufferSpan::of_target(target)));
        match start(pairs.collect()) {
            Ok(transfer) => Ok(Self { transfer, target: ptr::null_mut(), buffers: Some(held) }),
            Err(error) => {
                let (source, target) = held.into_inner();
                Err(FailedTransfer { error, source, target })
            }
        }
    }
}

impl<S: Send, T: Send> OwnedTransfer<S, T> {
    /// Returns the transfer without the buffers, to order other transfers after it or to keep a
    /// clone.
    pub fn transfer(&self) -> &Transfer {
        &self.transfer
    }

    /// Returns whether the transfer is complete, successfully or not.
    pub fn is_done(&self) -> bool {
        self.transfer.is_done()
    }

    /// Returns the result, or `None` while the transfer is in flight. [`OwnedTransfer::wait`]
    /// returns the buffers.
    pub fn check(&self) -> Option<Result<(), Error>> {
        self.transfer.check().map(|outcome| outcome.map(drop))
    }

    /// Cancels the transfer as [`Transfer::cancel`] does.
    pub fn cancel(&self) {
        self.transfer.cancel();
    }

    /// Returns an eventfd as [`Transfer::event`] does.
    pub fn event(&self) -> io::Result<Arc<EventFd>> {
        self.transfer.event()
    }

    /// Waits for completion and returns the buffers.
    pub fn wait(mut self) -> Result<(S, T), FailedTransfer<S, T>> {
        let outcome = self.transfer.wait();
        self.return_buffers(outcome.map(|_| ()))
    }

    /// Waits at most `timeout`; returns the handle itself if the transfer is still in flight then.
    pub fn wait_timeout(mut self, timeout: Duration) -> Result<OwnedOutcome<S, T>, Self> {
        match self.transfer.wait_timeout(timeout) {
            Some(outcome) => Ok(self.return_buffers(outcome.map(|_| ()))),
            None => Err(self),
        }
    }

    fn return_buffers(
        &mut self,
        outcome: Result<(), Error>,
    ) -> Result<(S, T), FailedTransfer<S, T>> {
        if !self.transfer.is_finished() {
            // Only a forked child gets here: no engine accesses its copy of the memory.
            debug_assert!(outcome.is_err());
        }
        let held = self.buffers.take().expect("the buffers are handed back once");
        let (source, target) = held.into_inner();
        match outcome {
            Ok(()) => Ok((source, target)),
            Err(error) => Err(FailedTransfer { error, source, target }),
        }
    }
}

impl<S: OwnedSource, T: OwnedSlice> OwnedTransfer<S, T> {
    /// Returns the ready elements from the start, for use while the rest is in flight.
    ///
    /// # Panics
    /// If the buffers were returned already, by awaiting a borrow of the handle; and for a batch.
    pub fn ready(&self) -> &[T::Element] {
        // SAFETY: the handle owns the target, and the slice lives no longer than the borrow of the
        // handle.
        unsafe { ready_slice(&self.transfer, self.elements()) }
    }

    /// Waits until a range of elements is ready and returns it, possibly before the rest is ready.
    ///
    /// # Panics
    /// As [`OwnedTransfer::ready`].
    pub fn wait_range(&self, range: impl RangeBounds<usize>) -> Result<&[T::Element], Error> {
        // SAFETY: as above.
        unsafe { wait_slice(&self.transfer, self.elements(), &range) }
    }

    /// Returns the address of the target's elements while the handle owns them.
    fn elements(&self) -> *const T::Element {
        assert!(self.buffers.is_some(), "the buffers were handed back");
        assert!(!self.target.is_null(), "a batch has many targets");
        self.target.cast_const().cast()
    }
}

impl<S: Send, T: Send> Dependency for OwnedTransfer<S, T> {
    fn predecessor(&self) -> Predecessor {
        self.transfer.predecessor()
    }
}

impl<S: Send + 'static, T: Send + 'static> Drop for OwnedTransfer<S, T> {
    fn drop(&mut self) {
        if let Some(held) = self.buffers.take() {
            // If the transfer is complete, `keep_alive` returns the buffers and they are dropped
            // here.
            let _ = self.transfer.completion().keep_alive(held);
        }
    }
}

impl<S: Send + Unpin, T: Send + Unpin> Future for OwnedTransfer<S, T> {
    type Output = Result<(S, T), FailedTransfer<S, T>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match Pin::new(&mut self.transfer).poll(context) {
            Poll::Ready(outcome) => Poll::Ready(self.return_buffers(outcome.map(|_| ()))),
            Poll::Pending => Poll::Pending,
        }
    }
}
