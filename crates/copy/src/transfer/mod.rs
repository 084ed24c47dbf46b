//! Handles of transfers, one kind for each ownership model of memory.
//!
//! | memory | handle | dropping the handle before completion |
//! |---|---|---|
//! | raw pointers | [`Transfer`] | detaches: the caller still guarantees the validity of the memory |
//! | owned buffers | [`OwnedTransfer`] | detaches: the buffers are freed at completion |
//! | scoped borrows | [`ScopedTransfer`] | detaches: the scope waits for it before it ends |
//!
//! In all three cases, no engine writes to memory after it is returned to the caller.
//!
//! The methods are the same on all handles: `wait` and `.await` return the same result, and
//! `check`, `wait_timeout`, `cancel` and `event` behave alike. On a handle that holds the memory,
//! `ready` and `wait_range` return slices, with positions in elements. A raw transfer holds no
//! memory and counts bytes: [`Transfer::ready_bytes`], [`Transfer::wait_bytes`].

mod buffers;
mod channel_waiter;
mod crc;
mod dualcast;
mod owned;
mod scoped;

use std::future::Future;
use std::io;
use std::ops::{Range, RangeBounds};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytemuck::Pod;
use memferry_engine::completion::{TransferOutput, WakerKey};
use memferry_engine::{Completion, Descriptor, ExecutionError, Sequence};
use memferry_sys::EventFd;
use memferry_sys::stats;

pub use buffers::{Buffer, OwnedSlice, OwnedSource, OwnedTarget};
pub(crate) use buffers::{BufferPair, BufferSpan};
pub(crate) use channel_waiter::{ChannelWaiter, WaitConfig};
pub use crc::CrcTransfer;
pub use owned::{FailedTransfer, OwnedTransfer};
pub use scoped::{ScopedTransfer, TransferScope};

use crate::error::{Error, ValidationError};
use crate::submit::SharedChunks;

/// A transfer that another transfer can be ordered after. Every handle implements it.
///
/// ```
/// use memferry::{Dependency, Options};
///
/// fn ordered(first: &impl Dependency) -> Options<'static> {
///     Options::new().after(first)
/// }
/// ```
pub trait Dependency: sealed::Sealed {
    #[doc(hidden)]
    fn predecessor(&self) -> Predecessor;
}

/// The completion of an earlier transfer, as an opaque type.
pub struct Predecessor(pub(crate) Arc<Completion>);

impl std::fmt::Debug for Predecessor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Predecessor").field("is_done", &self.0.is_done()).finish_non_exhaustive()
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Transfer {}
    impl<S: Send, T: Send> Sealed for super::OwnedTransfer<S, T> {}
    impl<T: super::Pod> Sealed for super::ScopedTransfer<'_, T> {}
    impl<H: Sealed> Sealed for super::CrcTransfer<H> {}
}

/// A running or finished transfer over memory whose validity the caller guarantees.
///
/// The handle is also a future. Clones refer to the same transfer.
///
/// ```
/// use memferry::{Ferry, Transfer};
///
/// let ferry = Ferry::new()?;
/// let (source, mut target) = ([1u8; 64], [0u8; 64]);
/// // SAFETY: both arrays live until the wait is over, and nothing else touches them.
/// let transfer: Transfer =
///     unsafe { ferry.icopy_raw(source.as_ptr(), target.as_mut_ptr(), 64) }?;
/// transfer.wait()?;
/// assert_eq!(transfer.ready_bytes(), 64);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a transfer tells whether it succeeded"]
pub struct Transfer {
    state: TransferState,
    length: u64,
    waiting: Waiting,
}

/// How a handle waits: whether a waiting caller executes what is queued, or claims chunks (bit 0), and the key of the
/// waker that it has left in its completion as a future (the other bits; 0 if none).
///
/// It is as wide as a word, as the tag of the state is: a transfer is moved by words, and a load of a
/// word of which a byte was just stored waits until that store has left the store buffer, behind the
/// stores to the ring, whose cache line comes from another core.
#[derive(Clone, Copy)]
struct Waiting(u64);

impl Waiting {
    const ASSISTS: u64 = 1;

    #[inline]
    fn new(assists: bool) -> Self {
        Self(u64::from(assists))
    }

    #[inline]
    fn waker(self) -> Option<WakerKey> {
        WakerKey::new((self.0 >> 1) as u32)
    }

    /// The same with another waker.
    fn with_waker(self, key: Option<WakerKey>) -> Self {
        Self(self.0 & Self::ASSISTS | u64::from(key.map_or(0, WakerKey::get)) << 1)
    }
}

impl Clone for Transfer {
    /// As a future, the clone has a waker of its own.
    #[inline]
    fn clone(&self) -> Self {
        let waiting = self.waiting.with_waker(None);
        Self { state: self.state.clone(), length: self.length, waiting }
    }
}

impl Drop for Transfer {
    /// A future that is dropped is awaited no more.
    #[inline]
    fn drop(&mut self) {
        if let Some(key) = self.waiting.waker()
            && let TransferState::Completion { completion, .. } = &self.state
        {
            completion.forget_waker(key);
        }
    }
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Transfer");
        shown.field("length", &self.length);
        match self.outcome() {
            None => shown.field("state", &"in progress").finish(),
            Some(Ok(_)) => shown.field("state", &"complete").finish(),
            Some(Err(error)) => shown.field("state", &"failed").field("error", &error).finish(),
        }
    }
}

/// The state of a transfer, by the form of its completion.
#[derive(Clone)]
#[repr(u64)]
enum TransferState {
    /// The transfer was executed inline and succeeded, with a CRC if it computes one.
    Done { crc: DoneCrc },
    /// One small descriptor that cannot fail; its sequence in the channel is its completion.
    Sequence { waiter: Arc<ChannelWaiter>, sequence: Sequence },
    /// Every other transfer.
    Completion { completion: Arc<Completion>, config: Arc<WaitConfig> },
}

/// The CRC of a transfer that was executed inline, if it computes one: a word, for the same reason.
#[derive(Clone, Copy)]
struct DoneCrc(u64);

impl DoneCrc {
    const NONE: u64 = u64::MAX;

    fn new(crc: Option<u32>) -> Self {
        Self(crc.map_or(Self::NONE, u64::from))
    }

    fn get(self) -> Option<u32> {
        u32::try_from(self.0).ok()
    }
}

impl Dependency for Transfer {
    fn predecessor(&self) -> Predecessor {
        Predecessor(self.completion())
    }
}

impl Transfer {
    /// Returns the completion of the transfer. A transfer that completes by sequence gets a new one
    /// from its channel, which completes it when it reaches the sequence.
    pub(crate) fn completion(&self) -> Arc<Completion> {
        match &self.state {
            TransferState::Done { .. } => Arc::new(Completion::done()),
            TransferState::Completion { completion, .. } => completion.clone(),
            TransferState::Sequence { waiter: lane, sequence, .. } => lane.completion_of(*sequence),
        }
    }
}

impl Transfer {
    pub(crate) fn done(length: u64) -> Self {
        Self::done_with_crc(length, None)
    }

    pub(crate) fn done_with_crc(length: u64, crc: Option<u32>) -> Self {
        Self {
            state: TransferState::Done { crc: DoneCrc::new(crc) },
            length,
            waiting: Waiting::new(false),
        }
    }

    #[inline]
    pub(crate) fn sequenced(
        waiter: Arc<ChannelWaiter>,
        sequence: Sequence,
        length: u64,
        assists: bool,
    ) -> Self {
        let state = TransferState::Sequence { waiter, sequence };
        Self { state, length, waiting: Waiting::new(assists) }
    }

    /// Submits the descriptor of a transfer that completes by sequence. `Err` returns it if the channel
    /// is full or closed; the transfer must not be used then.
    #[inline]
    pub(crate) fn submit_into(&mut self, descriptor: Descriptor) -> Result<(), Descriptor> {
        match &mut self.state {
            TransferState::Sequence { waiter, sequence } => {
                waiter.channel.submit_into(descriptor, sequence)
            }
            _ => Err(descriptor),
        }
    }

    pub(crate) fn with_completion(
        completion: Arc<Completion>,
        length: u64,
        helps: bool,
        config: Arc<WaitConfig>,
    ) -> Self {
        let state = TransferState::Completion { completion, config };
        Self { state, length, waiting: Waiting::new(helps) }
    }

    /// Returns the length of the transfer in bytes.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Returns whether the transfer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns whether the transfer is complete, successfully or not. If so, all its data is
    /// visible.
    ///
    /// If a device executes the transfer, this polls the device, as do [`check`](Self::check),
    /// [`ready_bytes`](Self::ready_bytes) and every wait. A poll may finish other transfers of the
    /// device: it wakes their tasks and drops what they keep. Do not hold a lock that those take.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.poll_channel();
        self.is_finished()
    }

    /// Polls the device that executes the transfer, if it does not report by itself. That may finish
    /// other transfers, and so run code of the user: no lock may be held.
    #[inline]
    fn poll_channel(&self) {
        if let TransferState::Completion { completion, .. } = &self.state {
            completion.poll_channel();
        }
    }

    /// [`Transfer::is_done`] as far as it is known, without a poll of a device.
    #[inline]
    pub(crate) fn is_finished(&self) -> bool {
        match &self.state {
            TransferState::Done { .. } => true,
            TransferState::Sequence { waiter: lane, sequence, .. } => {
                lane.channel.is_complete(*sequence)
            }
            TransferState::Completion { completion, .. } => completion.is_done(),
        }
    }

    /// Returns the result of the transfer, or `None` while it is in flight.
    pub fn check(&self) -> Option<Result<TransferOutput, Error>> {
        self.poll_channel();
        self.outcome()
    }

    /// [`Transfer::check`] as far as it is known, without a poll of a device.
    pub(crate) fn outcome(&self) -> Option<Result<TransferOutput, Error>> {
        let outcome = match &self.state {
            TransferState::Completion { completion, .. } => {
                completion.outcome().map(|outcome| outcome.map_err(Error::from))
            }
            TransferState::Done { crc } => {
                Some(Ok(TransferOutput { crc: crc.get(), ..TransferOutput::default() }))
            }
            TransferState::Sequence { .. } => {
                self.is_finished().then_some(Ok(TransferOutput::default()))
            }
        };
        outcome.or_else(|| self.is_lost_in_fork().then(|| Err(ExecutionError::Forked.into())))
    }

    /// Executes chunks until none is left to claim; returns how many. `None` if it has none.
    pub(crate) fn run_unclaimed(&self) -> Option<u64> {
        let TransferState::Completion { completion, config } = &self.state else { return None };
        completion.work()?;
        let mut own = 0;
        while self.assists() && !self.is_lost_in_fork() && completion.help_from_back() {
            own += 1;
        }
        config.caller_chunks.fetch_add(own, Ordering::Relaxed);
        Some(own)
    }

    /// Who executed the chunks of this transfer, which is complete; `None` if it had none.
    pub(crate) fn shared_chunks(&self, own: u64) -> Option<SharedChunks> {
        let TransferState::Completion { completion, .. } = &self.state else { return None };
        let (all, on_caller_core) =
            (completion.work()?.chunk_count(), completion.chunks_on_caller_core());
        Some(SharedChunks { all, own, on_caller_core })
    }

    /// Waits for completion: claims chunks that no engine has started, then spins for the
    /// configured time, then sleeps.
    pub fn wait(&self) -> Result<TransferOutput, Error> {
        self.wait_until(None).unwrap_or_else(|| unreachable!("there is no deadline"))
    }

    /// Waits at most `timeout`. Returns `None` if the transfer is still in flight then.
    pub fn wait_timeout(&self, timeout: Duration) -> Option<Result<TransferOutput, Error>> {
        self.wait_until(Instant::now().checked_add(timeout))
    }

    fn assists(&self) -> bool {
        self.waiting.0 & Waiting::ASSISTS != 0
    }

    fn wait_until(&self, deadline: Option<Instant>) -> Option<Result<TransferOutput, Error>> {
        if !matches!(self.state, TransferState::Done { .. }) {
            stats::thread(|counters| counters.waits.add(1));
        }
        match &self.state {
            // A forked child must not access what its parent has started, not even to claim chunks.
            _ if self.is_lost_in_fork() => {}
            TransferState::Done { .. } => {}
            TransferState::Sequence { waiter: lane, sequence } => {
                if lane.wait(*sequence, self.assists(), deadline) {
                    return Some(Ok(TransferOutput::default()));
                }
            }
            TransferState::Completion { completion, config: waiting } => {
                while self.assists() && completion.help_from_back() {
                    waiting.caller_chunks.fetch_add(1, Ordering::Relaxed);
                    if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                        return self.check();
                    }
                }
                completion.wait(waiting.spin_ns, deadline);
            }
        }
        self.check()
    }

    /// Returns whether the transfer was started before a fork, and therefore by a thread that this
    /// process does not have.
    fn is_lost_in_fork(&self) -> bool {
        let waiting = match &self.state {
            TransferState::Done { .. } => return false,
            TransferState::Sequence { waiter: lane, .. } => &lane.config,
            TransferState::Completion { config: waiting, .. } => waiting,
        };
        waiting.is_forked() && !self.is_finished()
    }

    /// Returns how many bytes from the start are ready. The caller may use them while the rest is
    /// in flight.
    pub fn ready_bytes(&self) -> u64 {
        match &self.state {
            TransferState::Completion { completion, .. } => {
                self.poll_channel();
                completion.ready_bytes(self.length)
            }
            _ if self.is_done() => self.length,
            _ => 0,
        }
    }

    /// Waits until a range of bytes is ready, possibly before the rest.
    pub fn wait_bytes(&self, range: Range<u64>) -> Result<(), Error> {
        const POLL_INTERVAL: Duration = Duration::from_micros(50);
        let (from, to, length) = (range.start, range.end, self.length);
        if from > to || to > length {
            return Err(ValidationError::OutOfRange { from, to, length }.into());
        }
        let TransferState::Completion { completion, config: waiting } = &self.state else {
            return self.wait().map(|_| ());
        };
        while from < to && !completion.is_range_ready(from, to) {
            if let Some(outcome) = self.check() {
                return outcome.map(|_| ());
            }
            // The caller claims chunks from the front, where the range is more likely to be.
            if self.assists() && completion.help_from_front() {
                waiting.caller_chunks.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            completion.wait(waiting.spin_ns, Instant::now().checked_add(POLL_INTERVAL));
        }
        Ok(())
    }

    /// Requests cancellation: parts that are not started yet are skipped. A part is what an engine
    /// executes as one: a chunk, or less where a device splits chunks, for example at pages. Each part
    /// is done or untouched in the end. The transfer then ends with [`ExecutionError::Cancelled`],
    /// which counts the bytes of chunks that are done, unless all of it was started already or it is
    /// too small to be split; in that case the call has no effect. The call does not wait.
    pub fn cancel(&self) {
        if let TransferState::Completion { completion, config: waiting, .. } = &self.state
            && !waiting.is_forked()
        {
            completion.cancel();
        }
    }

    /// Returns an eventfd that becomes readable when the transfer is complete, for `poll` and
    /// `epoll`.
    pub fn event(&self) -> io::Result<Arc<EventFd>> {
        let event = Arc::new(EventFd::new()?);
        self.completion().signal_on_completion(&event);
        Ok(event)
    }
}

/// Returns the bytes of a range of elements in a target of `length` bytes.
fn byte_range<T>(range: &impl RangeBounds<usize>, length: u64) -> Range<u64> {
    let size = size_of::<T>() as u64;
    let elements = (length / size.max(1)) as usize;
    let (from, to) = crate::ferry::bounds(range, elements);
    (from as u64).saturating_mul(size)..(to as u64).saturating_mul(size)
}

/// Returns the ready elements at the start of the transfer's target.
///
/// # Safety
/// The target must be that of the transfer, its memory must stay valid for `'a`, and only the
/// transfer may write to it.
unsafe fn ready_slice<'a, T: Pod>(transfer: &Transfer, target: *const T) -> &'a [T] {
    let count = transfer.ready_bytes() as usize / size_of::<T>().max(1);
    // SAFETY: these elements are ready, so no engine writes to them any more.
    unsafe { std::slice::from_raw_parts(target, count) }
}

/// Waits for a range of elements, and returns it.
///
/// # Safety
/// As for [`ready_slice`].
unsafe fn wait_slice<'a, T: Pod>(
    transfer: &Transfer,
    target: *const T,
    range: &impl RangeBounds<usize>,
) -> Result<&'a [T], Error> {
    let bytes = byte_range::<T>(range, transfer.len());
    transfer.wait_bytes(bytes.clone())?;
    let size = size_of::<T>().max(1);
    let (from, count) = (bytes.start as usize / size, (bytes.end - bytes.start) as usize / size);
    // SAFETY: the range lies inside the target and is ready, so no engine writes to it any more.
    Ok(unsafe { std::slice::from_raw_parts(target.add(from), count) })
}

impl Future for Transfer {
    type Output = Result<TransferOutput, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(outcome) = self.check() {
            return Poll::Ready(outcome);
        }
        let completion = self.completion();
        if let Some(key) = completion.wake_on_completion(self.waiting.waker(), context.waker()) {
            // The handle keeps the completion of a transfer that completes by sequence for the next
            // poll.
            if let TransferState::Sequence { waiter: lane, .. } = &self.state {
                let waiting = lane.config.clone();
                self.state = TransferState::Completion { completion, config: waiting };
                self.waiting = Waiting::new(false);
            }
            self.waiting = self.waiting.with_waker(Some(key));
            return Poll::Pending;
        }
        let outcome = completion.outcome().expect("it is over");
        Poll::Ready(outcome.map_err(Error::from))
    }
}
