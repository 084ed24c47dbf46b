//! The descriptor: one command to a channel, within the limits of the engine.

mod report;

use std::fmt;
use std::sync::Arc;

use super::{DescriptorLeases, Kernel, MemoryKind, Opcode};
use crate::completion::{Chunk, ChunkedWork, Completion, PendingNotification};
use crate::runtime::execute::{self, Operands};

/// The part of its transfer that a descriptor covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum DescriptorScope {
    /// The whole transfer: the transfer completes with the descriptor.
    Whole,
    /// A fixed part.
    Part,
    /// A work offer: the channel claims chunks of the transfer until none is left.
    WorkOffer,
}

/// One command: operation, source, target, length; the setter methods add options.
///
/// A descriptor with a completion reports to it exactly once: when it is finished, or as failed
/// when it is dropped unfinished.
///
/// ```
/// use memferry::engine::{Descriptor, Opcode};
///
/// let (source, mut target) = (vec![7u8; 4096], vec![0u8; 4096]);
/// let (from, to) = (source.as_ptr() as u64, target.as_mut_ptr() as u64);
/// // SAFETY: both buffers live until the descriptor has run, and nothing else uses them.
/// let descriptor = unsafe { Descriptor::new(Opcode::Copy, from, to, 4096) };
/// assert_eq!(descriptor.length(), 4096);
/// descriptor.run(); // as a channel does
/// assert_eq!(target, source);
/// ```
pub struct Descriptor {
    operation: Opcode,
    scope: DescriptorScope,
    kernel: Kernel,
    source_memory: MemoryKind,
    target_memory: MemoryKind,
    value: u8,
    flags: DescriptorFlags,
    source: u64,
    target: u64,
    length: u64,
    /// Of a part: its offset in the transfer. Of a whole dualcast: the second target, which those of
    /// a part and of a work offer find in the work. One field, because of the size.
    position: u64,
    completion: Option<Arc<Completion>>,
    /// Dropped last: the memory stays pinned while the descriptor exists.
    leases: Option<Arc<DescriptorLeases>>,
}

/// Boolean options in one byte, because the descriptor must fit into 56 bytes.
#[derive(Debug, Clone, Copy, Default)]
struct DescriptorFlags(u8);

impl DescriptorFlags {
    /// The completion has no listeners: it can be finished without being read.
    const NO_LISTENERS: u8 = 1;
    /// The engine does not register memory that is not registered.
    const TRANSIENT: u8 = 2;
    /// Other engines claim chunks of the same transfer.
    const SHARED: u8 = 4;
    /// Any thread may execute the descriptor, in any order and with any copy loop.
    const ANY_THREAD: u8 = 8;
    /// It begins when everything before it in its channel has ended.
    const ORDERED: u8 = 16;

    fn set(&mut self, flag: u8, on: bool) {
        self.0 = if on { self.0 | flag } else { self.0 & !flag };
    }

    fn has(self, flag: u8) -> bool {
        self.0 & flag != 0
    }
}

/// A slot of a ring holds a descriptor and its sequence number in one cache line.
const _: () = assert!(size_of::<Descriptor>() <= 56);

impl Descriptor {
    /// Creates a descriptor over raw memory.
    ///
    /// # Safety
    /// Until the descriptor is finished, the source must stay valid for reads and the target for
    /// writes of `length` bytes (those that the operation uses), and no other thread or device may
    /// access the target, or write to the source. Except for [`Opcode::Move`] the two must not
    /// overlap. An [`Opcode::Dualcast`] must have a [second target](Descriptor::with_second_target).
    #[inline]
    pub unsafe fn new(operation: Opcode, source: u64, target: u64, length: u64) -> Self {
        Self {
            operation,
            scope: DescriptorScope::Whole,
            kernel: Kernel::Cached,
            source_memory: MemoryKind::Host,
            target_memory: MemoryKind::Host,
            value: 0,
            flags: DescriptorFlags::default(),
            source,
            target,
            length,
            position: 0,
            completion: None,
            leases: None,
        }
    }

    /// Creates a work offer for the chunks of a transfer; see [`Completion::chunked`]. Dropping a
    /// work offer only declines it: the creator of the transfer makes sure that at least one is
    /// executed ([`Dispatch::now`](crate::completion::Dispatch::now) does).
    pub fn work_offer(completion: Arc<Completion>) -> Self {
        let work = completion.work().expect("only a chunked completion has chunks to claim");
        let (source_memory, target_memory) = work.memory_kinds();
        Self {
            operation: work.operation,
            scope: DescriptorScope::WorkOffer,
            kernel: work.kernel,
            source_memory,
            target_memory,
            value: work.value,
            flags: DescriptorFlags::default(),
            source: work.source,
            target: work.target,
            length: work.length,
            position: 0,
            completion: Some(completion),
            leases: None,
        }
    }

    /// Whether the descriptor reports to a completion, and not by its sequence alone.
    #[inline]
    pub(crate) fn has_completion(&self) -> bool {
        self.completion.is_some()
    }

    /// Sets the byte that a fill writes.
    #[inline]
    pub fn value(mut self, value: u8) -> Self {
        self.value = value;
        self
    }

    /// Sets the second target of a dualcast. A [part](Descriptor::part_of) of a transfer has that of
    /// the transfer ([`ChunkedWork::with_second_target`]).
    ///
    /// # Safety
    /// As for the target in [`Descriptor::new`]. The second target must overlap neither source nor
    /// target.
    #[inline]
    pub unsafe fn with_second_target(mut self, second: u64) -> Self {
        self.position = second;
        self
    }

    /// Sets the copy loop of a processor.
    #[inline]
    pub fn kernel(mut self, kernel: Kernel) -> Self {
        self.kernel = kernel.or_cached();
        self
    }

    /// Sets the kinds of memory of source and target.
    #[inline]
    pub fn memory(mut self, source: MemoryKind, target: MemoryKind) -> Self {
        (self.source_memory, self.target_memory) = (source, target);
        self
    }

    /// Marks memory that is used once: an engine that registers memory itself does not register it
    /// if another route exists.
    #[inline]
    pub fn transient(mut self, is_transient: bool) -> Self {
        self.flags.set(DescriptorFlags::TRANSIENT, is_transient);
        self
    }

    /// Marks a transfer whose chunks other engines claim too: the channel claims only what keeps it
    /// busy.
    pub fn shared(mut self, shared: bool) -> Self {
        self.flags.set(DescriptorFlags::SHARED, shared);
        self
    }

    /// Allows any thread to execute the descriptor, before or after its neighbours in the channel and
    /// with any copy loop: a thread that waits for the channel may help it. For descriptors without
    /// a completion.
    #[inline]
    pub fn any_thread(mut self) -> Self {
        self.flags.set(DescriptorFlags::ANY_THREAD, true);
        self
    }

    /// Starts the descriptor only when everything that its channel accepted before it has ended, and
    /// not at all if a transfer fails that its own is ordered after
    /// ([`Completion::ordered_after`]). For channels of an engine that
    /// [orders descriptors](super::Engine::orders_descriptors), and for descriptors with a completion. What
    /// the channel does not accept waits for those transfers alone.
    ///
    /// It must write nothing that a transfer before it reads or writes which it is ordered after: an
    /// engine that does not know whether that one was executed repeats it, perhaps after this one.
    pub fn ordered(mut self) -> Self {
        self.flags.set(DescriptorFlags::ORDERED, true);
        self
    }

    /// Attaches the leases of its memory; the memory stays pinned until the descriptor is dropped.
    pub fn pinned_by(mut self, leases: Arc<DescriptorLeases>) -> Self {
        self.leases = Some(leases);
        self
    }

    /// Reports to a completion that has no other descriptor.
    ///
    /// # Safety
    /// The end of the descriptor must be the end of the completion's transfer: the completion is a
    /// [whole](Completion::whole) one, and nothing else reports to it. The owner frees the memory
    /// when the completion reports the end.
    pub unsafe fn completes(mut self, completion: Arc<Completion>) -> Self {
        self.flags.set(DescriptorFlags::NO_LISTENERS, completion.has_no_listeners());
        self.completion = Some(completion);
        self
    }

    /// Reports to a chunked completion, of which the descriptor covers the part at `offset`.
    ///
    /// # Safety
    /// The part must have a length and lie inside the work. The creator of the part must have
    /// claimed every chunk that it touches, and must create no other part over the same bytes: the
    /// owner frees the memory when all bytes were reported.
    pub unsafe fn part_of(mut self, completion: Arc<Completion>, offset: u64) -> Self {
        self.scope = DescriptorScope::Part;
        self.position = offset;
        self.completion = Some(completion);
        self
    }

    /// Creates a second descriptor over the same memory that reports to no completion, for engines
    /// that wrap another engine and finish the original themselves. `length` may be shorter.
    ///
    /// # Safety
    /// The copy must be finished before the original is.
    pub unsafe fn unreported_copy(&self, length: u64) -> Self {
        let (leases, position) = (self.leases.clone(), self.second_target().unwrap_or(0));
        Self { completion: None, leases, scope: DescriptorScope::Whole, position, length, ..*self }
    }

    /// The operation.
    pub fn operation(&self) -> Opcode {
        self.operation
    }

    /// The part of its transfer that the descriptor covers.
    pub fn scope(&self) -> DescriptorScope {
        self.scope
    }

    /// The source address.
    pub fn source(&self) -> u64 {
        self.source
    }

    /// The target address.
    pub fn target(&self) -> u64 {
        self.target
    }

    /// The second target address of a dualcast; `None` for every other operation.
    pub fn second_target(&self) -> Option<u64> {
        if self.operation != Opcode::Dualcast {
            return None;
        }
        let work = self.completion.as_ref().and_then(|completion| completion.work());
        match self.scope {
            DescriptorScope::Whole => Some(self.position),
            DescriptorScope::Part | DescriptorScope::WorkOffer => {
                Some(work?.second_target().wrapping_add(self.offset()))
            }
        }
    }

    /// The addresses, for a processor.
    pub(crate) fn operands(&self) -> Operands {
        let second = self.second_target().unwrap_or(0);
        Operands { source: self.source, target: self.target, second }
    }

    /// The offset in its transfer.
    fn offset(&self) -> u64 {
        if self.scope == DescriptorScope::Part { self.position } else { 0 }
    }

    /// The length in bytes.
    #[inline]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// The kinds of memory of source and target.
    pub fn memory_kinds(&self) -> (MemoryKind, MemoryKind) {
        (self.source_memory, self.target_memory)
    }

    /// Whether the engine must not register memory that is not registered.
    pub fn is_transient(&self) -> bool {
        self.flags.has(DescriptorFlags::TRANSIENT)
    }

    /// Whether other engines claim chunks of the same transfer.
    pub fn is_shared(&self) -> bool {
        self.flags.has(DescriptorFlags::SHARED)
    }

    /// Whether any thread may execute the descriptor. One with a completion is the worker's: its end
    /// runs code of the user.
    #[inline]
    pub(crate) fn is_any_threads(&self) -> bool {
        self.flags.has(DescriptorFlags::ANY_THREAD) && self.completion.is_none()
    }

    /// Whether it starts only when everything before it in its channel has ended.
    #[inline]
    pub fn is_ordered(&self) -> bool {
        self.flags.has(DescriptorFlags::ORDERED)
    }

    /// Whether it must not start because a transfer failed that its own is ordered after.
    #[inline]
    pub(crate) fn has_failed_predecessor(&self) -> bool {
        self.is_ordered()
            && self
                .completion
                .as_ref()
                .is_some_and(|completion| completion.has_failed_predecessor())
    }

    /// Takes the order from a descriptor that its channel did not accept; returns its completion if it
    /// must wait for others.
    pub(crate) fn take_order(&mut self) -> Option<Arc<Completion>> {
        let completion = self.completion.as_ref().filter(|_| self.is_ordered());
        let waits = completion.filter(|completion| !completion.predecessors().is_empty()).cloned();
        self.flags.set(DescriptorFlags::ORDERED, false);
        waits
    }

    /// The leases of its memory, if it is pinned.
    pub fn leases(&self) -> Option<&DescriptorLeases> {
        self.leases.as_deref()
    }

    /// The byte that a fill writes.
    pub fn fill_value(&self) -> u8 {
        self.value
    }

    /// The copy loop of a processor.
    pub(crate) fn processor_kernel(&self) -> Kernel {
        self.kernel
    }

    /// Whether a processor can execute the descriptor.
    #[inline]
    pub fn is_host_only(&self) -> bool {
        self.source_memory == MemoryKind::Host && self.target_memory == MemoryKind::Host
    }

    /// Whether both descriptors belong to one transfer.
    pub(crate) fn is_of_same_transfer(&self, other: &Self) -> bool {
        match (&self.completion, &other.completion) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    /// The notification of its transfer, if the descriptor covers the last bytes.
    pub fn final_notification(&self) -> Option<PendingNotification> {
        let completion = self.completion.as_ref()?;
        let end = completion.work().map_or(self.length, ChunkedWork::length);
        completion.notification().filter(|_| self.offset() + self.length == end)
    }

    /// Whether the outstanding bytes of its transfer are exactly this descriptor and `before`
    /// bytes.
    pub fn is_last_outstanding(&self, before: impl FnOnce() -> u64) -> bool {
        let work = self.completion.as_ref().and_then(|completion| completion.work());
        work.is_none_or(|work| work.remaining_bytes() == Some(before() + self.length))
    }

    /// Reports success after the engine has written the notification variable.
    pub fn finish_notified(self) {
        if let Some(completion) = &self.completion {
            completion.mark_notified();
        }
        self.finish(Ok(None));
    }

    /// Whether somebody learns of the end of its transfer without polling the channel: a sleeper, a
    /// listener, or a reader of a notification variable.
    pub fn is_awaited(&self) -> bool {
        self.completion.as_ref().is_some_and(|completion| completion.is_awaited())
    }

    /// Whether its transfer was cancelled before the descriptor started.
    pub fn is_cancelled(&self) -> bool {
        self.completion.as_ref().is_some_and(|completion| completion.is_cancelled())
    }

    /// Executes the descriptor on the calling processor and reports. Returns the bytes that this
    /// call moved, which for a work offer may be fewer than the length.
    #[inline]
    pub fn run(self) -> u64 {
        self.run_valued().0
    }

    /// [`Descriptor::run`] that returns the value too, as [`Descriptor::finish`] takes it; that of a
    /// work offer is reported to its transfer alone.
    #[inline]
    pub fn run_valued(mut self) -> (u64, Option<u64>) {
        assert!(self.is_host_only(), "a processor cannot access device memory");
        if self.scope == DescriptorScope::WorkOffer {
            let completion = self.completion.as_ref().expect("a work offer has a completion");
            completion.pass_on();
            return (completion.run_from_front(), None);
        }
        // SAFETY: the creator of the descriptor guarantees its memory until it is finished.
        let value = unsafe { self.execute_range(0, self.length) };
        if let Some(completion) = self.completion.take() {
            self.report(&completion, Ok(value));
        }
        (self.length, value)
    }

    /// [`Descriptor::run`] of one that `next` follows in a queue: the memory of that one is requested
    /// meanwhile.
    #[inline]
    pub(crate) fn run_before(mut self, next: Option<&Self>) -> u64 {
        let is_host_range = |it: &Self| it.is_host_only() && it.scope != DescriptorScope::WorkOffer;
        let Some(next) = next.filter(|next| is_host_range(next)) else { return self.run() };
        let is_requesting = [Kernel::Cached, Kernel::of_segments()].contains(&self.kernel)
            && self.operation == Opcode::Copy
            && self.length > 0
            && next.operation == Opcode::Copy
            && is_host_range(&self);
        if !is_requesting {
            execute::prefetch(next.operation, next.source, next.target);
            return self.run();
        }
        let Self { operation, source, target, length, .. } = *next;
        let next = execute::NextRange { operation, source, target, length };
        let kernel = Kernel::of_segments();
        // SAFETY: the creator of the descriptor guarantees its memory until it is finished.
        unsafe {
            execute::run_before(Opcode::Copy, kernel, self.operands(), self.length, 0, Some(next));
        }
        if let Some(completion) = self.completion.take() {
            self.report(&completion, Ok(None));
        }
        self.length
    }

    /// Executes a range of the descriptor on the calling processor without reporting.
    ///
    /// # Safety
    /// The creator's guarantee for the descriptor's memory must still hold, and the memory must be
    /// host memory.
    unsafe fn execute_range(&self, from: u64, to: u64) -> Option<u64> {
        if from == to {
            return self.operation.has_crc().then_some(0);
        }
        // SAFETY: the range lies inside the descriptor's memory.
        unsafe {
            execute::run(
                self.operation,
                self.kernel,
                self.operands().moved_by(from),
                to - from,
                self.value,
            )
        }
        // An operation with a CRC has no part that is done: it starts from 0.
        .map(|value| value + from)
    }

    /// For a work offer: claims the next bytes of the transfer, as whole chunks: at least one
    /// chunk, and not more than `max_bytes` otherwise. `None` when no chunk is left.
    pub fn claim(&self, max_bytes: u64) -> Option<Chunk> {
        self.completion.as_ref()?.work()?.claim_run(max_bytes)
    }

    /// For a work offer: the approximate number of unclaimed bytes of the transfer.
    pub fn unclaimed_bytes(&self) -> u64 {
        let work = self.completion.as_ref().and_then(|completion| completion.work());
        work.map_or(0, ChunkedWork::unclaimed_bytes)
    }
}

impl fmt::Debug for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Descriptor")
            .field("operation", &self.operation)
            .field("scope", &self.scope)
            .field("source", &format_args!("{:#x}", self.source))
            .field("target", &format_args!("{:#x}", self.target))
            .field("length", &self.length)
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}
