//! Groups of small copies: a few that were claimed together are copied together, a line of each in
//! turn, with non-temporal stores and one fence, if that was measured to be faster.

use std::time::Instant;

use memferry_sys::copy::ahead::CopyRange;
use memferry_sys::copy::stream::{Streaming, TOGETHER};

use super::measured_kernel::{Choice, MeasuredKernel};
use super::ring::{ClaimedRun, SubmissionRing};
use crate::contract::{Descriptor, DescriptorScope, Kernel, Opcode, Sequence};

/// The number of copies in a group.
pub const GROUP: u64 = TOGETHER as u64;

/// The lengths in bytes of copies that are grouped. A shorter one is over before its pages are open,
/// and is copied while the next is requested; a longer one has enough pages open by itself.
pub const GROUPED_LENGTHS: std::ops::RangeInclusive<u64> = 2 << 10..=32 << 10;

/// The first copies of a claimed run, to be executed together.
#[derive(Debug)]
pub(crate) struct Group<'a> {
    ring: &'a SubmissionRing<Descriptor>,
    first: Sequence,
    ranges: [CopyRange; TOGETHER],
    streaming: Streaming,
    choice: Choice,
    kernel: &'a MeasuredKernel,
}

impl<'a> Group<'a> {
    /// The group at the front of a run; `None` if the next value is to be executed by itself.
    ///
    /// # Safety
    /// The calling thread must have claimed the run and taken none of it.
    #[inline]
    pub(super) unsafe fn at_front(
        ring: &'a SubmissionRing<Descriptor>,
        run: ClaimedRun,
        streaming: Kernel,
        kernel: &'a MeasuredKernel,
    ) -> Option<Self> {
        let Kernel::Stream(streaming) = streaming else { return None };
        if run.count < GROUP || !streaming.bypasses_caches() {
            return None;
        }
        let empty = CopyRange { source: std::ptr::null(), target: std::ptr::null_mut(), length: 0 };
        let mut ranges = [empty; TOGETHER];
        for (sequence, range) in run.sequences().zip(&mut ranges) {
            // SAFETY: the caller has claimed it and not taken it.
            *range = unsafe { ring.look_at_claimed(sequence, groupable) }?;
        }
        let choice = kernel.choose();
        let is_of_interest = choice.streams || choice.is_measured;
        let group = Self { ring, first: run.first, ranges, streaming, choice, kernel };
        is_of_interest.then_some(group)
    }

    /// The bytes of all its copies.
    pub(crate) fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.length as u64).sum()
    }

    /// The sequence and the length of each copy.
    pub(crate) fn copies(&self) -> [(Sequence, u64); TOGETHER] {
        std::array::from_fn(|at| (self.first + at as u64, self.ranges[at].length as u64))
    }

    /// Takes and executes the copies; `prepare` sets the kernel of one that does not stream.
    ///
    /// # Safety
    /// As for [`Group::at_front`]: none was taken since.
    pub(crate) unsafe fn execute(&self, prepare: impl Fn(Descriptor, Sequence) -> Descriptor) {
        let start = self.choice.is_measured.then(Instant::now);
        // SAFETY: the caller has claimed the sequences and takes each once, here.
        let take = |sequence| unsafe { self.ring.take_claimed(sequence) };
        let sequences = self.first..self.first + GROUP;
        if self.choice.streams {
            // SAFETY: the creators of the descriptors guarantee their memory until they are finished,
            // and that no two descriptors in flight write what the other uses. `Kernel` holds only
            // variants that the processor supports.
            unsafe { self.streaming.copy_together(self.ranges) };
            sequences.for_each(|sequence| drop(take(sequence)));
        } else {
            let mut next = Some(take(self.first));
            for sequence in sequences {
                let Some(descriptor) = next.take() else { break };
                next = (sequence + 1 < self.first + GROUP).then(|| take(sequence + 1));
                prepare(descriptor, sequence).run_before(next.as_ref());
            }
        }
        if let Some(start) = start {
            self.kernel.record(self.choice, self.bytes(), start.elapsed().as_nanos() as u64);
        }
    }
}

/// The memory of a descriptor that can be part of a group.
#[inline]
fn groupable(descriptor: &Descriptor) -> Option<CopyRange> {
    let is_groupable = descriptor.is_any_threads()
        && descriptor.operation() == Opcode::Copy
        && descriptor.scope() == DescriptorScope::Whole
        && descriptor.is_host_only()
        && descriptor.processor_kernel() == Kernel::Cached
        && GROUPED_LENGTHS.contains(&descriptor.length());
    is_groupable.then(|| CopyRange {
        source: descriptor.source() as *const u8,
        target: descriptor.target() as *mut u8,
        length: descriptor.length() as usize,
    })
}
