//! The bounded ring between submitters and a channel's worker thread: many producers, one consumer,
//! and threads that help it.
//!
//! A slot is one cache line with a descriptor and its sequence. A submitter claims slots by
//! advancing the tail, writes the descriptor, then the sequence; the worker waits for the sequence
//! that it expects. The worker never writes to a slot: it publishes one rising number, the sequence
//! of the last descriptor it *finished*, and a slot is free again when its descriptor is finished.
//! So a submission moves exactly one cache line, and a completion one more.
//!
//! A waiting thread helps: it claims values that were submitted as shared, as the worker does, from
//! the front. It marks them as finished in a list of its own; only the worker publishes, in order.
//! The worker's claim is a compare-and-swap in a line that is its own while no thread helps.
//!
//! A consumer that lets no thread help, such as one that has several values in flight, takes and
//! completes instead ([`SubmissionRing::take`], [`SubmissionRing::complete`]): it counts for itself.
//!
//! Access rules: only submitters access `tail` and `limit`; the worker writes `consumer`, and all
//! threads read it; a slot belongs to the submitter that claimed it until the submitter has written
//! the sequence, then to the thread that claims its value, until `completed` reaches the sequence.
//! `finished` of a slot is written by the thread that claimed its value, and read by all.

mod claims;

use std::collections::TryReserveError;
use std::mem::MaybeUninit;
use std::sync::atomic::compiler_fence;

use crossbeam_utils::CachePadded;
use memferry_sys::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use memferry_sys::sync::{UnsafeCell, store_max};

use super::support::try_collect;
use crate::contract::{Sequence, SubmitError, Submitted};
pub use claims::{ClaimedRun, MAX_RUN, QUEUED_PER_RUN};

/// The top bit of the tail: the ring is closed.
const CLOSED: u64 = 1 << 63;
/// The top bit of a slot's sequence: any thread may claim the value.
const SHARED: u64 = 1 << 63;

/// The maximum capacity of a ring. More is never in flight, whatever an option says.
pub const MAX_CAPACITY: usize = 1 << 16;

/// A bounded ring of `T`, numbered from 1.
#[derive(Debug)]
pub struct SubmissionRing<T> {
    producer: CachePadded<ProducerLine>,
    consumer: CachePadded<ConsumerLine>,
    /// The number of values that the worker and its helpers have claimed.
    claimed: CachePadded<AtomicU64>,
    /// Who may publish finished values: see `claims`. The worker writes it around each long step.
    publisher: CachePadded<AtomicU32>,
    /// What all threads read for each value, and hardly anybody writes.
    fixed: CachePadded<FixedLine<T>>,
}

#[derive(Debug)]
struct FixedLine<T> {
    slots: Box<[RingSlot<T>]>,
    /// The last value of each slot that was finished before those in front of it were.
    finished: Box<[FinishedValue]>,
    /// Follows [`CLOSED`] of the tail: a worker that polls does not fetch the submitters' line.
    closed: AtomicBool,
}

#[derive(Debug)]
struct FinishedValue {
    sequence: AtomicU64,
    weight: AtomicU64,
}

#[derive(Debug)]
struct ProducerLine {
    /// The number of slots claimed since the start, and [`CLOSED`].
    tail: AtomicU64,
    /// The tail may rise to this value without a read of `completed`. It is in the line of the
    /// tail, so that a submitter does not fetch the worker's line each time.
    limit: AtomicU64,
}

/// The values that the worker publishes. They share a cache line, so one fetch gets both.
#[derive(Debug)]
struct ConsumerLine {
    completed: AtomicU64,
    /// The sum of the weights of all finished values.
    weight: AtomicU64,
}

/// Sequence and value in one cache line. Slots are two lines apart, because processors fetch lines
/// in pairs, and the worker polls the slot after the one that a submitter writes.
#[derive(Debug)]
#[cfg_attr(not(loom), repr(C, align(128)))]
struct RingSlot<T> {
    sequence: AtomicU64,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: values move from submitters to the worker through the protocol described above, which
// gives each slot one owner at a time; so sending `T` between threads is all that is needed.
unsafe impl<T: Send> Send for SubmissionRing<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SubmissionRing<T> {}

impl<T> SubmissionRing<T> {
    /// Creates a ring of `capacity` values, rounded up to a power of two, and at most
    /// [`MAX_CAPACITY`].
    ///
    /// # Panics
    /// If there is no memory for it.
    pub fn new(capacity: usize) -> Self {
        Self::try_new(capacity).expect("memory for a ring")
    }

    /// Creates a ring as [`SubmissionRing::new`] does; fails if there is no memory for it.
    pub fn try_new(capacity: usize) -> Result<Self, TryReserveError> {
        let capacity = capacity.clamp(1, MAX_CAPACITY).next_power_of_two();
        let slot = |_| RingSlot {
            sequence: AtomicU64::new(0),
            value: UnsafeCell::new(MaybeUninit::uninit()),
        };
        let finished = |_| FinishedValue { sequence: AtomicU64::new(0), weight: AtomicU64::new(0) };
        Ok(Self {
            producer: CachePadded::new(ProducerLine {
                tail: AtomicU64::new(0),
                limit: AtomicU64::new(capacity as u64),
            }),
            consumer: CachePadded::new(ConsumerLine {
                completed: AtomicU64::new(0),
                weight: AtomicU64::new(0),
            }),
            claimed: CachePadded::new(AtomicU64::new(0)),
            publisher: CachePadded::new(AtomicU32::new(claims::WORKER)),
            fixed: CachePadded::new(FixedLine {
                slots: try_collect(capacity, slot)?,
                finished: try_collect(capacity, finished)?,
                closed: AtomicBool::new(false),
            }),
        })
    }

    fn capacity(&self) -> u64 {
        self.fixed.slots.len() as u64
    }

    fn slot(&self, index: u64) -> &RingSlot<T> {
        let slots = &self.fixed.slots;
        &slots[index as usize & (slots.len() - 1)]
    }

    /// Moves values from the front of `batch` into the ring while there is space.
    pub fn push(&self, batch: &mut [Option<T>]) -> Result<Submitted, SubmitError> {
        self.push_marked(batch, 0)
    }

    /// Like [`SubmissionRing::push`], for values that any thread may claim.
    pub fn push_shared(&self, batch: &mut [Option<T>]) -> Result<Submitted, SubmitError> {
        self.push_marked(batch, SHARED)
    }

    fn push_marked(&self, batch: &mut [Option<T>], mark: u64) -> Result<Submitted, SubmitError> {
        let wanted = match &*batch {
            [only] => u64::from(only.is_some()),
            many => many.iter().flatten().count() as u64,
        };
        let Some((start, count)) = self.reserve(wanted)? else {
            return Ok(Submitted::NONE);
        };
        let values = batch.iter_mut().filter_map(Option::take).take(count as usize);
        for (index, value) in (start..).zip(values) {
            // SAFETY: claimed above, each once.
            unsafe { self.write(index, value) };
        }
        // From the last to the first: the worker polls the first, so the batch becomes visible as
        // one, and the worker fetches no slot that is still being written.
        (start..start + count).rev().for_each(|index| self.publish(index, mark));
        Ok(Submitted { first: start + 1, count: count as usize })
    }

    /// Moves one value into the ring and stores its sequence; `shared`: any thread may claim it.
    /// `Err` returns the value if the ring is full or closed.
    #[inline]
    pub fn push_one(&self, value: T, shared: bool, sequence: &mut Sequence) -> Result<(), T> {
        let Ok(Some((index, _))) = self.reserve(1) else {
            return Err(value);
        };
        *sequence = index + 1;
        // Before the stores to the slot, which stay in the store buffer until its line has arrived:
        // a load of the sequence together with its neighbours would wait behind them.
        compiler_fence(Ordering::Release);
        // SAFETY: claimed above.
        unsafe { self.write(index, value) };
        self.publish(index, if shared { SHARED } else { 0 });
        Ok(())
    }

    /// Requests the slot of the next value for writing: its line comes from the worker's core while the
    /// submitter does the rest.
    #[inline]
    pub fn prefetch_slot(&self) {
        let tail = self.producer.tail.load(Ordering::Relaxed);
        memferry_sys::copy::prefetch_for_write(std::ptr::from_ref(self.slot(tail)).cast());
    }

    /// Writes a value to its slot.
    ///
    /// # Safety
    /// The caller must have claimed the index, and write to it once.
    #[inline]
    unsafe fn write(&self, index: u64, value: T) {
        self.slot(index).value.with_mut(|cell| {
            // SAFETY: the claim is the caller's alone, and it was below `limit`, so the value of
            // the previous lap in the slot is finished and dropped.
            unsafe { (*cell).write(value) };
        });
    }

    /// Publishes a value that was written.
    #[inline]
    fn publish(&self, index: u64, mark: u64) {
        self.slot(index).sequence.store((index + 1) | mark, Ordering::Release);
    }

    /// Claims up to `wanted` slots for values; `None` when the ring is full.
    fn reserve(&self, wanted: u64) -> Result<Option<(u64, u64)>, SubmitError> {
        let mut tail = self.producer.tail.load(Ordering::Relaxed);
        loop {
            if tail & CLOSED != 0 {
                return Err(SubmitError::Closed);
            }
            let mut free = self.producer.limit.load(Ordering::Acquire).saturating_sub(tail);
            if free < wanted {
                // Acquire: the worker has finished with the slots that this number frees. `limit`
                // passes that on to submitters that do not read `completed` themselves.
                let limit = self.consumer.completed.load(Ordering::Acquire) + self.capacity();
                store_max(&self.producer.limit, limit);
                free = limit.saturating_sub(tail);
            }
            let count = free.min(wanted);
            if count == 0 {
                return Ok(None);
            }
            match self.producer.tail.compare_exchange_weak(
                tail,
                tail + count,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Ok(Some((tail, count))),
                Err(now) => tail = now,
            }
        }
    }

    /// Rejects values from now on.
    pub fn close(&self) {
        self.producer.tail.fetch_or(CLOSED, Ordering::AcqRel);
        // Release: who sees it finds the final tail.
        self.fixed.closed.store(true, Ordering::Release);
    }

    /// Whether [`SubmissionRing::close`] was called.
    pub fn is_closed(&self) -> bool {
        self.fixed.closed.load(Ordering::Acquire)
    }

    /// The number of values submitted since the start.
    pub fn submitted(&self) -> Sequence {
        self.producer.tail.load(Ordering::Acquire) & !CLOSED
    }

    /// The sequence of the last finished value.
    #[inline]
    pub fn completed(&self) -> Sequence {
        self.consumer.completed.load(Ordering::Acquire)
    }

    /// The sum of the weights of all finished values.
    pub fn finished_weight(&self) -> u64 {
        self.consumer.weight.load(Ordering::Relaxed)
    }

    /// Whether the value after `taken` has been written. For the worker only.
    #[inline]
    pub fn has_next(&self, taken: Sequence) -> bool {
        self.slot(taken).sequence.load(Ordering::Acquire) & !SHARED == taken + 1
    }

    /// Takes the value after `taken`, if it has been written. A taken value need not be completed
    /// before the next is taken.
    ///
    /// # Safety
    /// Only one thread at a time may call this, with the number of values that were taken so far.
    pub unsafe fn take(&self, taken: Sequence) -> Option<T> {
        if !self.has_next(taken) {
            return None;
        }
        // SAFETY: the sequence shows that the submitter has written the value and left the slot;
        // the caller guarantees to take it once. The slot is not reused before it is completed.
        Some(unsafe { self.read(taken) })
    }

    /// Moves the value out of a slot.
    ///
    /// # Safety
    /// The value must have been written, as its sequence shows, and be the caller's.
    unsafe fn read(&self, index: u64) -> T {
        // SAFETY: the caller guarantees that the value is there, and reads it once.
        self.slot(index).value.with(|cell| unsafe { (*cell).assume_init_read() })
    }

    /// Publishes that every value up to `sequence` is finished, and adds `weight`, that of
    /// the last one.
    ///
    /// # Safety
    /// Only the thread that takes may call this, with a number up to which it has taken every
    /// value.
    #[inline]
    pub unsafe fn complete(&self, sequence: Sequence, weight: u64) {
        let before = self.consumer.weight.load(Ordering::Relaxed);
        self.consumer.weight.store(before + weight, Ordering::Relaxed);
        self.consumer.completed.store(sequence, Ordering::Release);
    }
}

impl<T> Drop for SubmissionRing<T> {
    fn drop(&mut self) {
        let mut finished = self.consumer.completed.load(Ordering::Relaxed);
        // SAFETY: `&mut self`: no submitter and no worker is left, and each value is taken once.
        while let Some(value) = unsafe { self.take(finished) } {
            drop(value);
            finished += 1;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_and_its_number_share_one_cache_line() {
        type DescriptorSlot = RingSlot<crate::Descriptor>;
        let value = std::mem::offset_of!(DescriptorSlot, value);
        assert!(value + size_of::<crate::Descriptor>() <= 64);
    }

    #[test]
    fn a_ring_without_bound_is_bounded() {
        let ring = SubmissionRing::<u8>::new(usize::MAX);
        assert_eq!(ring.capacity(), MAX_CAPACITY as u64);
        let mut sequence = 0;
        assert_eq!(ring.push_one(7, false, &mut sequence), Ok(()));
        assert_eq!(sequence, 1);
        // SAFETY: this thread is the only consumer.
        assert_eq!(unsafe { ring.take(0) }, Some(7));
    }

    #[test]
    fn a_full_ring_takes_what_fits_and_leaves_the_rest() {
        let ring = SubmissionRing::new(4);
        let mut batch: Vec<_> = (0..6).map(Some).collect();
        assert_eq!(ring.push(&mut batch), Ok(Submitted { first: 1, count: 4 }));
        assert_eq!(batch, [None, None, None, None, Some(4), Some(5)]);
        assert_eq!(ring.push(&mut batch), Ok(Submitted::NONE));
        // SAFETY: this thread is the only consumer.
        assert_eq!(unsafe { ring.take(0) }, Some(0));
        assert_eq!(ring.push(&mut batch), Ok(Submitted::NONE), "a taken value is not yet finished");
        // SAFETY: this thread is the only consumer and has taken it.
        unsafe { ring.complete(1, 0) };
        assert_eq!(ring.push(&mut batch), Ok(Submitted { first: 5, count: 1 }));
        assert_eq!(batch[5], Some(5));
    }

    #[test]
    fn a_closed_ring_refuses_and_keeps_what_it_has() {
        let ring = SubmissionRing::new(4);
        ring.push(&mut [Some(7)]).unwrap();
        ring.close();
        assert_eq!(ring.push(&mut [Some(8)]), Err(SubmitError::Closed));
        assert_eq!(ring.submitted(), 1);
        // SAFETY: this thread is the only consumer.
        assert_eq!(unsafe { ring.take(0) }, Some(7));
    }

    #[test]
    fn a_dropped_ring_drops_what_was_not_taken() {
        let value = std::sync::Arc::new(());
        let ring = SubmissionRing::new(8);
        ring.push(&mut [Some(value.clone()), Some(value.clone())]).unwrap();
        // SAFETY: this thread is the only consumer.
        drop(unsafe { ring.take(0) });
        // SAFETY: this thread is the only consumer and has taken it.
        unsafe { ring.complete(1, 0) };
        drop(ring);
        assert_eq!(std::sync::Arc::strong_count(&value), 1);
    }

    #[test]
    fn many_submitters_lose_and_double_nothing() {
        const EACH: u64 = 20_000;
        let ring = SubmissionRing::new(16);
        let mut sums = [0u64; 4];
        std::thread::scope(|scope| {
            for submitter in 0..4u64 {
                let ring = &ring;
                scope.spawn(move || {
                    for number in 1..=EACH {
                        let mut batch = [Some((submitter, number))];
                        while ring.push(&mut batch).unwrap().count == 0 {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let mut last = [0; 4];
            for finished in 0..4 * EACH {
                let (submitter, number) = loop {
                    // SAFETY: this thread is the only consumer and takes each number once.
                    match unsafe { ring.take(finished) } {
                        Some(value) => break value,
                        None => std::thread::yield_now(),
                    }
                };
                assert_eq!(number, last[submitter as usize] + 1, "in order per submitter");
                last[submitter as usize] = number;
                sums[submitter as usize] += number;
                // SAFETY: as above, and it was taken.
                unsafe { ring.complete(finished + 1, 0) };
            }
        });
        assert_eq!(sums, [EACH * (EACH + 1) / 2; 4]);
    }
}
