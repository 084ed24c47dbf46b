//! The descriptor: one hardware-sized order to a channel.

use std::fmt;
use std::sync::Arc;

use memferry_sys::copy::stream::Streaming;

use super::{ExecutionError, MemoryKind, Pins};
use crate::completion::{Chunk, Completion, Notify, Work};
use crate::execute;

/// What to do with the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Operation {
    /// Copy between ranges that do not overlap.
    Copy,
    /// Copy between ranges that may overlap, with memmove's result.
    Move,
    /// Set every byte of the target to a value.
    Fill,
    /// Find the first byte in which source and target differ.
    Compare,
}

/// How a processor should move the bytes. Other engines ignore it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Through the caches.
    Cached,
    /// Around the caches. The variant must be one that the processor supports.
    Stream(Streaming),
}

impl Kernel {
    /// The name used in plans and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cached => "cached",
            Self::Stream(variant) => variant.name(),
        }
    }

    /// The kernel itself, or the cached one where this processor cannot run it: a wrong wish costs
    /// speed, never an illegal instruction.
    #[inline]
    pub(crate) fn or_cached(self) -> Self {
        match self {
            Self::Stream(variant) if !variant.is_supported() => Self::Cached,
            kernel => kernel,
        }
    }
}

/// What part of its transfer a descriptor carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Scope {
    /// All of it: when the descriptor ends, the transfer ends.
    Whole,
    /// A fixed part.
    Part,
    /// An invitation to claim chunks of the transfer until none is left.
    Chunks,
}

/// One order: operation, source, target, length. Optional settings by the methods that follow.
///
/// A descriptor with a completion reports to it when it is finished, and as failed when it is
/// dropped unfinished: none is ever lost.
pub struct Descriptor {
    operation: Operation,
    scope: Scope,
    kernel: Kernel,
    source_memory: MemoryKind,
    target_memory: MemoryKind,
    value: u8,
    flags: Flags,
    source: u64,
    target: u64,
    length: u64,
    offset: u64,
    completion: Option<Arc<Completion>>,
    /// Dropped after everything else is over: the memory stays pinned for as long as this exists.
    pins: Option<Arc<Pins>>,
}

/// Yes-or-no facts in one byte, because a descriptor has no more room.
#[derive(Debug, Clone, Copy, Default)]
struct Flags(u8);

impl Flags {
    /// The completion is quiet: it can be finished without being read.
    const QUIET: u8 = 1;
    /// Memory that is not registered stays so.
    const PASSING: u8 = 2;
    /// Others claim from the same transfer.
    const SHARED: u8 = 4;

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
    /// An order over raw memory.
    ///
    /// # Safety
    /// Until the descriptor is finished, the source must stay valid for reads and the target for
    /// writes of `length` bytes (those that the operation uses), and nobody else may access the
    /// target, or write to the source. For [`Operation::Copy`] the two must not overlap.
    #[inline]
    pub unsafe fn new(operation: Operation, source: u64, target: u64, length: u64) -> Self {
        Self {
            operation,
            scope: Scope::Whole,
            kernel: Kernel::Cached,
            source_memory: MemoryKind::Host,
            target_memory: MemoryKind::Host,
            value: 0,
            flags: Flags::default(),
            source,
            target,
            length,
            offset: 0,
            completion: None,
            pins: None,
        }
    }

    /// An invitation to claim the chunks of a transfer; see [`Completion::chunked`]. Dropping an
    /// invitation only declines it: whoever made the transfer sees to it that somebody accepts
    /// one ([`Launch::now`](crate::completion::Launch::now) does).
    pub fn chunks(completion: Arc<Completion>) -> Self {
        let work = completion.work().expect("only a chunked completion has chunks to claim");
        let (source_memory, target_memory) = work.memory_kinds();
        Self {
            operation: work.operation,
            scope: Scope::Chunks,
            kernel: work.kernel,
            source_memory,
            target_memory,
            value: work.value,
            flags: Flags::default(),
            source: work.source,
            target: work.target,
            length: work.length,
            offset: 0,
            completion: Some(completion),
            pins: None,
        }
    }

    /// Whether somebody is told of its end, other than by its number.
    #[inline]
    pub(crate) fn has_completion(&self) -> bool {
        self.completion.is_some()
    }

    /// The value that a fill writes.
    #[inline]
    pub fn value(mut self, value: u8) -> Self {
        self.value = value;
        self
    }

    /// How a processor should move the bytes.
    #[inline]
    pub fn kernel(mut self, kernel: Kernel) -> Self {
        self.kernel = kernel.or_cached();
        self
    }

    /// Where source and target are.
    #[inline]
    pub fn memory(mut self, source: MemoryKind, target: MemoryKind) -> Self {
        (self.source_memory, self.target_memory) = (source, target);
        self
    }

    /// Memory that passes by once: an engine that registers memory itself leaves what is not
    /// registered as it is, if it has another way.
    #[inline]
    pub fn passing(mut self, passing: bool) -> Self {
        self.flags.set(Flags::PASSING, passing);
        self
    }

    /// Other engines are invited to the same transfer: claim no more than is needed to be busy.
    pub fn shared(mut self, shared: bool) -> Self {
        self.flags.set(Flags::SHARED, shared);
        self
    }

    /// Says what its memory is pinned by, and keeps it pinned until the descriptor is gone.
    pub fn pinned_by(mut self, pins: Arc<Pins>) -> Self {
        self.pins = Some(pins);
        self
    }

    /// Reports to a completion that has no other descriptor.
    ///
    /// # Safety
    /// The end of the descriptor must be the end of the completion's transfer: the completion is a
    /// [whole](Completion::whole) one, and nothing else reports to it. Memory is given back on its
    /// word.
    pub unsafe fn completes(mut self, completion: Arc<Completion>) -> Self {
        self.flags.set(Flags::QUIET, completion.is_quiet());
        self.completion = Some(completion);
        self
    }

    /// Reports to a chunked completion, of which it carries the part at `offset`.
    ///
    /// # Safety
    /// The part must have a length and lie inside one chunk. Whoever makes the part must have claimed
    /// the chunk, and must make no other part over the same bytes: memory is given back when all bytes
    /// were reported.
    pub unsafe fn part_of(mut self, completion: Arc<Completion>, offset: u64) -> Self {
        self.scope = Scope::Part;
        self.offset = offset;
        self.completion = Some(completion);
        self
    }

    /// A second order over the same memory that reports to nobody, for engines that wrap another
    /// and finish the original themselves. `length` may be shorter.
    ///
    /// # Safety
    /// The copy must be finished before the original is.
    pub unsafe fn unreported_copy(&self, length: u64) -> Self {
        let pins = self.pins.clone();
        Self { completion: None, pins, scope: Scope::Whole, length, ..*self }
    }

    /// What to do.
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// What part of its transfer it carries.
    pub fn scope(&self) -> Scope {
        self.scope
    }

    /// The address to read from.
    pub fn source(&self) -> u64 {
        self.source
    }

    /// The address to write to.
    pub fn target(&self) -> u64 {
        self.target
    }

    /// How many bytes.
    #[inline]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Where source and target are.
    pub fn memory_kinds(&self) -> (MemoryKind, MemoryKind) {
        (self.source_memory, self.target_memory)
    }

    /// Whether memory that is not registered is to be left so.
    pub fn is_passing(&self) -> bool {
        self.flags.has(Flags::PASSING)
    }

    /// Whether other engines are invited to the same transfer.
    pub fn is_shared(&self) -> bool {
        self.flags.has(Flags::SHARED)
    }

    /// What its memory is pinned by, if it is.
    pub fn pins(&self) -> Option<&Pins> {
        self.pins.as_deref()
    }

    /// The value that a fill writes.
    pub fn fill_value(&self) -> u8 {
        self.value
    }

    /// How a processor should move the bytes.
    pub(crate) fn processor_kernel(&self) -> Kernel {
        self.kernel
    }

    /// Whether a processor can carry it out itself.
    #[inline]
    pub fn is_host_only(&self) -> bool {
        self.source_memory == MemoryKind::Host && self.target_memory == MemoryKind::Host
    }

    /// Whether both are of one transfer.
    pub(crate) fn is_of_same_transfer(&self, other: &Self) -> bool {
        match (&self.completion, &other.completion) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    /// What is to be told at the end of its transfer, if it carries the last bytes of it.
    pub fn closing_notify(&self) -> Option<Notify> {
        let completion = self.completion.as_ref()?;
        let end = completion.work().map_or(self.length, Work::length);
        completion.notify().filter(|_| self.offset + self.length == end)
    }

    /// Whether nothing of its transfer is missing but itself and `before` bytes.
    pub fn is_all_behind(&self, before: impl FnOnce() -> u64) -> bool {
        let work = self.completion.as_ref().and_then(|completion| completion.work());
        work.is_none_or(|work| work.missing_bytes() == Some(before() + self.length))
    }

    /// Reports a good end, behind which the engine has set the notification variable.
    pub fn finish_noticed(self) {
        if let Some(completion) = &self.completion {
            completion.mark_notified();
        }
        self.finish(Ok(None));
    }

    /// Whether its transfer was cancelled before it began.
    pub fn is_cancelled(&self) -> bool {
        self.completion.as_ref().is_some_and(|completion| completion.is_cancelled())
    }

    /// Carries it out on the calling processor and reports. Returns the bytes it moved itself,
    /// which for an invitation may be fewer than its length.
    #[inline]
    pub fn run(mut self) -> u64 {
        assert!(self.is_host_only(), "a processor cannot reach device memory");
        if self.scope == Scope::Chunks {
            let completion = self.completion.as_ref().expect("an invitation has a completion");
            return completion.run_from_front();
        }
        // SAFETY: whoever made the descriptor vouched for its memory until it is finished.
        let difference = unsafe { self.execute_range(0, self.length) };
        if let Some(completion) = self.completion.take() {
            self.report(&completion, Ok(difference));
        }
        self.length
    }

    /// Carries out a range of it on the calling processor without reporting.
    ///
    /// # Safety
    /// The descriptor's memory must still be vouched for, and be the host's.
    unsafe fn execute_range(&self, from: u64, to: u64) -> Option<u64> {
        if from == to {
            return None;
        }
        // SAFETY: the range lies inside the descriptor's memory.
        unsafe {
            execute::run(
                self.operation,
                self.kernel,
                self.source.wrapping_add(from),
                self.target.wrapping_add(from),
                to - from,
                self.value,
            )
        }
        .map(|at| at + from)
    }

    /// For an invitation: claims the next bytes of the transfer, whole chunks and at most `most`
    /// bytes of them, but at least one. `None` when nothing is left to claim.
    pub fn claim(&self, most: u64) -> Option<Chunk> {
        self.completion.as_ref()?.work()?.claim_run(most)
    }

    /// For an invitation: how many bytes of the transfer nobody has claimed, about.
    pub fn unclaimed_bytes(&self) -> u64 {
        let work = self.completion.as_ref().and_then(|completion| completion.work());
        work.map_or(0, Work::unclaimed_bytes)
    }

    /// Reports the end of bytes that were claimed by [`Descriptor::claim`]: `Ok` with the offset in
    /// them of the first difference for a compare. As in [`Descriptor::finish`], the calling
    /// processor finishes what it can.
    ///
    /// # Safety
    /// The bytes must have been claimed through this descriptor, each is reported once, and nothing
    /// accesses them any more: memory is given back when all bytes were reported.
    pub unsafe fn finish_claimed(
        &self,
        claimed: Chunk,
        result: Result<Option<u64>, ExecutionError>,
    ) {
        let Some(completion) = self.completion.as_ref().filter(|_| self.scope == Scope::Chunks)
        else {
            return;
        };
        match result {
            Err(error) if error.is_recoverable() && self.is_host_only() => {
                completion.run_claimed(claimed);
            }
            result => completion.finish_claimed(claimed, &result),
        }
    }

    /// Reports the end of the descriptor: `Ok` with the offset of the first difference for a
    /// compare, or an error. Where the engine failed but the memory is sound and the host's, the
    /// calling processor finishes the rest, and the transfer succeeds. Without a completion there is
    /// nobody to finish it for: then only the channel's `error_of` tells.
    pub fn finish(mut self, result: Result<Option<u64>, ExecutionError>) {
        let Some(completion) = self.completion.take() else {
            return;
        };
        if self.scope == Scope::Chunks {
            // Declined: what nobody has claimed is for others to claim.
            return;
        }
        let result = match result {
            Err(error) if error.is_recoverable() && self.is_host_only() => {
                let from = self.rescue_start(error.done_bytes());
                // SAFETY: the memory is vouched for until the descriptor is finished, which
                // happens below.
                Ok(unsafe { self.execute_range(from, self.length) })
            }
            other => other,
        };
        self.report(&completion, result);
    }

    fn report(&self, completion: &Completion, result: Result<Option<u64>, ExecutionError>) {
        match self.scope {
            Scope::Whole if self.flags.has(Flags::QUIET) && result == Ok(None) => {
                completion.finish_quietly();
            }
            Scope::Whole => completion.finish_whole(result),
            Scope::Part => completion.finish_part(self.offset, self.length, result),
            Scope::Chunks => {}
        }
    }

    /// Where a processor takes over from a failed engine. An overlapping copy cannot be resumed
    /// half-way, because its source may be overwritten already: engines report such a failure
    /// before the first byte.
    fn rescue_start(&self, done_bytes: u64) -> u64 {
        match self.operation {
            Operation::Copy | Operation::Fill => done_bytes.min(self.length),
            Operation::Move | Operation::Compare => 0,
        }
    }
}

impl Drop for Descriptor {
    #[inline]
    fn drop(&mut self) {
        if let Some(completion) = self.completion.take() {
            let reason = "its channel ended before it was carried out (did the engine panic?)";
            self.report(&completion, Err(ExecutionError::Engine { done_bytes: 0, reason }));
        }
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
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}
