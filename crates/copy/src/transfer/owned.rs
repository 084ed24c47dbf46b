//! Transfers that own their buffers while they run.

use std::fmt;
use std::future::Future;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use memferry_engine::MemoryKind;
use memferry_engine::cuda::DeviceMemory;
use memferry_sys::Pages;

use super::{Ordered, Predecessor, Transfer};
use crate::error::Error;

/// Memory of an engine-friendly kind: page-aligned, on huge pages where they are to be had.
#[derive(Debug)]
pub struct Buffer(Pages);

impl Buffer {
    /// `length` zeroed bytes.
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

/// An owned buffer that can be read from.
///
/// # Safety
/// The bytes must stay where they are, unchanged, while the value is moved or leaked, until it is
/// dropped.
pub unsafe trait OwnedSource: Send + 'static {
    /// Where the bytes are, and how many.
    fn source(&self) -> (*const u8, usize);

    /// What kind of memory they are in.
    fn source_memory(&self) -> MemoryKind {
        MemoryKind::Host
    }
}

/// An owned buffer that can be written to.
///
/// # Safety
/// The bytes must stay where they are while the value is moved or leaked, until it is dropped, and
/// nobody else may have access to them.
pub unsafe trait OwnedTarget: Send + 'static {
    /// Where the bytes are, and how many.
    fn target(&mut self) -> (*mut u8, usize);

    /// What kind of memory they are in.
    fn target_memory(&self) -> MemoryKind {
        MemoryKind::Host
    }
}

// SAFETY: a vector's bytes are on the heap and stay there when the vector is moved.
unsafe impl OwnedSource for Vec<u8> {
    fn source(&self) -> (*const u8, usize) {
        (self.as_ptr(), self.len())
    }
}

// SAFETY: as above, and a vector owns its bytes alone.
unsafe impl OwnedTarget for Vec<u8> {
    fn target(&mut self) -> (*mut u8, usize) {
        (self.as_mut_ptr(), self.len())
    }
}

// SAFETY: a box's bytes are on the heap and stay there when the box is moved.
unsafe impl OwnedSource for Box<[u8]> {
    fn source(&self) -> (*const u8, usize) {
        (self.as_ptr(), self.len())
    }
}

// SAFETY: as above, and a box owns its bytes alone.
unsafe impl OwnedTarget for Box<[u8]> {
    fn target(&mut self) -> (*mut u8, usize) {
        (self.as_mut_ptr(), self.len())
    }
}

// SAFETY: a mapping stays where it is until it is dropped.
unsafe impl OwnedSource for Buffer {
    fn source(&self) -> (*const u8, usize) {
        (self.0.as_ptr(), self.0.len())
    }
}

// SAFETY: as above, and the mapping is the buffer's alone.
unsafe impl OwnedTarget for Buffer {
    fn target(&mut self) -> (*mut u8, usize) {
        (self.0.as_ptr(), self.0.len())
    }
}

// SAFETY: shared bytes do not move or change while any owner is left, and this is one.
unsafe impl OwnedSource for Arc<[u8]> {
    fn source(&self) -> (*const u8, usize) {
        (self.as_ptr(), self.len())
    }
}

// SAFETY: static bytes never move or change.
unsafe impl OwnedSource for &'static [u8] {
    fn source(&self) -> (*const u8, usize) {
        (self.as_ptr(), self.len())
    }
}

// SAFETY: memory of a device stays where it is until it is given back, and no processor reaches it.
unsafe impl OwnedSource for DeviceMemory {
    fn source(&self) -> (*const u8, usize) {
        (self.as_ptr(), self.len())
    }

    fn source_memory(&self) -> MemoryKind {
        MemoryKind::Device
    }
}

// SAFETY: as above, and it is this value's alone.
unsafe impl OwnedTarget for DeviceMemory {
    fn target(&mut self) -> (*mut u8, usize) {
        (self.as_ptr(), self.len())
    }

    fn target_memory(&self) -> MemoryKind {
        MemoryKind::Device
    }
}

// SAFETY: no bytes at all: the source of a fill.
unsafe impl OwnedSource for () {
    fn source(&self) -> (*const u8, usize) {
        (std::ptr::NonNull::dangling().as_ptr(), 0)
    }
}

/// The buffers of a transfer in flight. `MaybeUninit` keeps the compiler from assuming that nobody
/// else touches what they point to.
struct Held<S, T>(MaybeUninit<(S, T)>);

impl<S, T> Held<S, T> {
    fn into_inner(self) -> (S, T) {
        let this = ManuallyDrop::new(self);
        // SAFETY: it is initialised from construction on, and read once: `this` is not dropped.
        unsafe { this.0.assume_init_read() }
    }
}

impl<S, T> Drop for Held<S, T> {
    fn drop(&mut self) {
        // SAFETY: initialised from construction on, and `into_inner` does not come here.
        unsafe { self.0.assume_init_drop() };
    }
}

impl<S, T> fmt::Debug for Held<S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Held")
    }
}

/// Where the bytes of a buffer are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bytes<P> {
    pub(crate) address: P,
    pub(crate) length: usize,
    pub(crate) memory: MemoryKind,
}

/// A request over owned buffers that failed, with the buffers.
pub struct Failed<S, T> {
    /// What went wrong.
    pub error: Error,
    /// The source, given back.
    pub source: S,
    /// The target, given back. Its contents are unspecified where the transfer had begun.
    pub target: T,
}

impl<S, T> fmt::Debug for Failed<S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Failed").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<S, T> fmt::Display for Failed<S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<S, T> std::error::Error for Failed<S, T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

/// A transfer that owns its buffers and hands them back at the end.
///
/// Dropped before the end, it detaches: the transfer goes on, and the buffers are freed when it is
/// over. It is also a future.
#[derive(Debug)]
#[must_use = "the buffers come back from `wait`"]
pub struct OwnedTransfer<S: OwnedSource, T: OwnedTarget> {
    transfer: Transfer,
    held: Option<Held<S, T>>,
}

impl<S: OwnedSource, T: OwnedTarget> OwnedTransfer<S, T> {
    /// Takes the buffers, then starts the transfer on them with `start`, which is given the
    /// addresses and lengths, and where they are.
    pub(crate) fn start(
        source: S,
        target: T,
        start: impl FnOnce(Bytes<*const u8>, Bytes<*mut u8>) -> Result<Transfer, Error>,
    ) -> Result<Self, Failed<S, T>> {
        let mut held = Held(MaybeUninit::new((source, target)));
        // SAFETY: initialised a line above. The addresses are taken where the buffers stay, because
        // moving a box again would end the right to use what was taken before.
        let (source, target) = unsafe { held.0.assume_init_mut() };
        let (memory, (address, length)) = (source.source_memory(), source.source());
        let from = Bytes { address, length, memory };
        let (memory, (address, length)) = (target.target_memory(), target.target());
        match start(from, Bytes { address, length, memory }) {
            Ok(transfer) => Ok(Self { transfer, held: Some(held) }),
            Err(error) => {
                let (source, target) = held.into_inner();
                Err(Failed { error, source, target })
            }
        }
    }

    /// The transfer without the buffers: to check, to cancel, for an eventfd.
    pub fn transfer(&self) -> &Transfer {
        &self.transfer
    }

    /// Whether it is over.
    pub fn is_done(&self) -> bool {
        self.transfer.is_done()
    }

    /// Waits for the end and hands the buffers back.
    pub fn wait(mut self) -> Result<(S, T), Failed<S, T>> {
        let outcome = self.transfer.wait();
        self.hand_back(outcome.map(|_| ()))
    }

    fn hand_back(&mut self, outcome: Result<(), Error>) -> Result<(S, T), Failed<S, T>> {
        if !self.transfer.is_done() {
            // Only a forked child comes here: its copy of the memory has no engine at work on it.
            debug_assert!(outcome.is_err());
        }
        let held = self.held.take().expect("the buffers are handed back once");
        let (source, target) = held.into_inner();
        match outcome {
            Ok(()) => Ok((source, target)),
            Err(error) => Err(Failed { error, source, target }),
        }
    }
}

impl<S: OwnedSource, T: OwnedTarget> Ordered for OwnedTransfer<S, T> {
    fn predecessor(&self) -> Predecessor {
        self.transfer.predecessor()
    }
}

impl<S: OwnedSource, T: OwnedTarget> Drop for OwnedTransfer<S, T> {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            // If it is over already, the buffers come straight back and are dropped here.
            let _ = self.transfer.completion().keep_until_end(held);
        }
    }
}

impl<S: OwnedSource + Unpin, T: OwnedTarget + Unpin> Future for OwnedTransfer<S, T> {
    type Output = Result<(S, T), Failed<S, T>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match Pin::new(&mut self.transfer).poll(context) {
            Poll::Ready(outcome) => Poll::Ready(self.hand_back(outcome.map(|_| ()))),
            Poll::Pending => Poll::Pending,
        }
    }
}
