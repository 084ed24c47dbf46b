//! Engines that touch pinned memory alone: how the suite pins for them, and what they must refuse.

use std::sync::Arc;
use std::time::Duration;

use memferry_memory::pin_cache::{Lease, Limits, PinCache, Watching};
use memferry_memory::pinning::Access;

use super::bench::{Bench, Job, Reporting, until};
use super::field::{ALIGNED, Field};
use super::{Subject, Verdict};
use crate::completion::Completion;
use crate::contract::{
    Channel, ChannelStatistics, Descriptor, ExecutionError, MemoryKind, Pinner, Pins, Registration,
    Sequence, SubmitError, Taken,
};

/// A channel that pins the memory of every descriptor before another channel is given it.
///
/// Nothing is kept pinned for later: each descriptor has its own pins, which end with it, so that
/// whoever lets go of a descriptor too early lets go of its memory too.
#[derive(Debug)]
pub(super) struct Pinning {
    inner: Arc<dyn Channel>,
    cache: PinCache,
}

impl Pinning {
    pub(super) fn new(inner: Arc<dyn Channel>, pinner: Arc<dyn Pinner>) -> Self {
        let nothing = Limits { most_bytes: 0, most_entries: 0 };
        let cache = PinCache::new(pinner, nothing, Watching::Explicit);
        Self { inner, cache: cache.expect("a cache without threads") }
    }

    fn pinned(&self, descriptor: Descriptor) -> Descriptor {
        if descriptor.pins().is_some() || descriptor.length() == 0 {
            return descriptor;
        }
        let (operation, length) = (descriptor.operation(), descriptor.length());
        let lease = |kind: MemoryKind, address: u64, access: Option<Access>| {
            let access = access.filter(|_| kind == MemoryKind::Host)?;
            Some(Arc::new(lease(&self.cache, address, length, access)))
        };
        let (source_memory, target_memory) = descriptor.memory_kinds();
        let pins = Pins {
            source: lease(source_memory, descriptor.source(), operation.source_access()),
            target: lease(target_memory, descriptor.target(), Some(operation.target_access())),
            variable: descriptor.closing_notify().map(|notify| {
                const WORD: u64 = size_of::<u64>() as u64;
                Arc::new(self::lease(&self.cache, notify.address(), WORD, Access::Write))
            }),
        };
        descriptor.pinned_by(Arc::new(pins))
    }
}

fn lease(cache: &PinCache, address: u64, length: u64, access: Access) -> Lease {
    cache.acquire(address as usize, length as usize, access).expect("memory that can be pinned")
}

// SAFETY: numbers and descriptors are the inner channel's; descriptors are only given pins.
unsafe impl Channel for Pinning {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Taken, SubmitError> {
        for entry in batch.iter_mut() {
            *entry = entry.take().map(|descriptor| self.pinned(descriptor));
        }
        self.inner.submit(batch)
    }

    fn completed(&self) -> Sequence {
        self.inner.completed()
    }

    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError> {
        self.inner.error_of(sequence)
    }

    fn poll(&self) -> bool {
        self.inner.poll()
    }

    fn park(&self, sequence: Sequence, timeout: Duration) -> bool {
        self.inner.park(sequence, timeout)
    }

    fn is_asleep(&self) -> bool {
        self.inner.is_asleep()
    }

    fn wake(&self) {
        self.inner.wake();
    }

    fn close(&self) {
        self.inner.close();
    }

    fn outstanding_bytes(&self) -> u64 {
        self.inner.outstanding_bytes()
    }

    fn statistics(&self) -> ChannelStatistics {
        self.inner.statistics()
    }
}

fn needs_pins(bench: &Bench) -> bool {
    bench.capabilities().registration == Registration::ByMemoryLayer
}

pub(super) fn an_engine_with_pinned_memory_is_complete(subject: &Subject) -> Verdict {
    let bench = Bench::new(subject);
    assert_eq!(bench.engine.pinner().is_some(), needs_pins(&bench), "a pinner, if it needs one");
    assert!(
        !(needs_pins(&bench) && bench.capabilities().claims_chunks),
        "an invitation cannot say where its memory is pinned"
    );
    Verdict::Passed
}

pub(super) fn memory_that_is_not_pinned_is_not_touched_by_the_engine(subject: &Subject) -> Verdict {
    refuses(subject, |_, descriptor, _| descriptor)
}

pub(super) fn memory_pinned_for_another_place_is_not_touched_by_the_engine(
    subject: &Subject,
) -> Verdict {
    refuses(subject, |cache, descriptor, elsewhere| {
        let length = descriptor.length();
        let source = Arc::new(lease(cache, descriptor.source(), length, Access::Read));
        let target = Arc::new(lease(cache, elsewhere, length, Access::Write));
        let pins = Pins { source: Some(source), target: Some(target), variable: None };
        descriptor.pinned_by(Arc::new(pins))
    })
}

/// Gives the engine a copy with pins that are wrong, once as an order that reports to nobody, of
/// which no byte may be moved, and once as one that the processor finishes.
fn refuses(subject: &Subject, wrong: impl Fn(&PinCache, Descriptor, u64) -> Descriptor) -> Verdict {
    let bench = Bench::new(subject);
    if !needs_pins(&bench) {
        return bench.skip("need pinned memory");
    }
    let length = bench.one_piece(512);
    let engine = bench.engine.clone();
    drop(bench.channels);
    let channel = engine.open_channel(&subject.options).expect("the channel that was given back");
    let pinner = engine.pinner().expect("an engine with pinned memory pins it");
    let cache = PinCache::new(pinner, Limits::default(), Watching::Explicit);
    let cache = cache.expect("a cache without threads");
    let mut field = Field::new(subject, 4 * ALIGNED);
    field.prepare(ALIGNED, length);
    let job = Job::copy(field.source(0, length), field.target(ALIGNED, length), length);
    let elsewhere = field.target(3 * ALIGNED, length);

    let submit = |descriptor: Descriptor| {
        let taken = channel.submit(&mut [Some(descriptor)]).expect("an open channel");
        assert_eq!(taken.count, 1);
        assert!(channel.park(taken.last(), super::LIMIT));
        let error = channel.error_of(taken.last()).expect("it is refused");
        assert!(matches!(error, ExecutionError::Engine { done_bytes: 0, .. }), "{error}");
    };
    submit(wrong(&cache, job.descriptor(), elsewhere));
    field.check(ALIGNED, length);

    let completion = Arc::new(Completion::whole());
    submit(wrong(&cache, job.descriptor().reports_to(completion.clone()), elsewhere));
    until("the end", || completion.is_done());
    field.expect_copy(0, ALIGNED, length);
    field.check_all();
    Verdict::Passed
}
