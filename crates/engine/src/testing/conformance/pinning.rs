//! Engines that access only pinned memory: how the suite pins for them, and what they must reject.

use std::sync::Arc;
use std::time::Duration;

use memferry_memory::pin_cache::{InvalidationMode, Lease, PinCache, PinCacheLimits};
use memferry_memory::pinning::Access;

use super::buffers::{ALIGNED, TestBuffers};
use super::test_engine::{ReportsTo, TestEngine, TestOperation, wait_until};
use super::{EngineUnderTest, Verdict};
use crate::completion::Completion;
use crate::contract::{
    Channel, ChannelStatistics, Descriptor, DescriptorLeases, ExecutionError, MemoryKind, Pinner,
    RegistrationMode, Sequence, SubmitError, Submitted,
};

/// A channel that pins the memory of every descriptor before it submits it to another channel.
///
/// Nothing stays cached: each descriptor has its own pins, which end with it, so that a descriptor
/// that is dropped too early unpins its memory too early.
#[derive(Debug)]
pub(super) struct PinningChannel {
    inner: Arc<dyn Channel>,
    cache: PinCache,
}

impl PinningChannel {
    pub(super) fn new(inner: Arc<dyn Channel>, pinner: Arc<dyn Pinner>) -> Self {
        let no_caching = PinCacheLimits { max_bytes: 0, max_entries: 0 };
        let cache = PinCache::new(pinner, no_caching, InvalidationMode::Explicit);
        Self { inner, cache: cache.expect("a cache without threads") }
    }

    fn pinned(&self, descriptor: Descriptor) -> Descriptor {
        if descriptor.leases().is_some() || descriptor.length() == 0 {
            return descriptor;
        }
        let (operation, length) = (descriptor.operation(), descriptor.length());
        let lease = |kind: MemoryKind, address: u64, access: Option<Access>| {
            let access = access.filter(|_| kind == MemoryKind::Host)?;
            Some(Arc::new(lease(&self.cache, address, length, access)))
        };
        let (source_memory, target_memory) = descriptor.memory_kinds();
        let leases = DescriptorLeases {
            source: lease(source_memory, descriptor.source(), operation.source_access()),
            target: lease(target_memory, descriptor.target(), operation.target_access()),
            second: descriptor
                .second_target()
                .and_then(|second| lease(target_memory, second, operation.target_access())),
            variable: descriptor.final_notification().map(|notify| {
                const WORD: u64 = size_of::<u64>() as u64;
                Arc::new(self::lease(&self.cache, notify.address(), WORD, Access::Write))
            }),
        };
        descriptor.pinned_by(Arc::new(leases))
    }
}

fn lease(cache: &PinCache, address: u64, length: u64, access: Access) -> Lease {
    cache.acquire(address as usize, length as usize, access).expect("memory that can be pinned")
}

// SAFETY: numbers and descriptors are the inner channel's; descriptors only get leases.
unsafe impl Channel for PinningChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
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

fn needs_pins(bench: &TestEngine) -> bool {
    bench.capabilities().registration == RegistrationMode::BySubmitter
}

pub(super) fn an_engine_with_pinned_memory_is_complete(subject: &EngineUnderTest) -> Verdict {
    let bench = TestEngine::new(subject);
    assert_eq!(bench.engine.pinner().is_some(), needs_pins(&bench), "a pinner, if it needs one");
    assert!(
        !(needs_pins(&bench) && bench.capabilities().claims_chunks),
        "a work offer cannot carry leases"
    );
    Verdict::Passed
}

pub(super) fn memory_that_is_not_pinned_is_not_touched_by_the_engine(
    subject: &EngineUnderTest,
) -> Verdict {
    refuses(subject, |_, descriptor, _| descriptor)
}

pub(super) fn memory_pinned_for_another_place_is_not_touched_by_the_engine(
    subject: &EngineUnderTest,
) -> Verdict {
    refuses(subject, |cache, descriptor, elsewhere| {
        let length = descriptor.length();
        let source = Arc::new(lease(cache, descriptor.source(), length, Access::Read));
        let target = Arc::new(lease(cache, elsewhere, length, Access::Write));
        let (source, target) = (Some(source), Some(target));
        let leases = DescriptorLeases { source, target, ..DescriptorLeases::default() };
        descriptor.pinned_by(Arc::new(leases))
    })
}

/// Submits a copy with wrong pins, first as a descriptor without a completion, of which no byte may
/// be moved, and then as one that the processor finishes.
fn refuses(
    subject: &EngineUnderTest,
    wrong: impl Fn(&PinCache, Descriptor, u64) -> Descriptor,
) -> Verdict {
    let bench = TestEngine::new(subject);
    if !needs_pins(&bench) {
        return bench.skip("need pinned memory");
    }
    let length = bench.max_part(512);
    let engine = bench.engine.clone();
    drop(bench.channels);
    let channel = engine.open_channel(&subject.options).expect("the channel that was closed");
    let pinner = engine.pinner().expect("an engine with pinned memory pins it");
    let cache = PinCache::new(pinner, PinCacheLimits::default(), InvalidationMode::Explicit);
    let cache = cache.expect("a cache without threads");
    let mut buffers = TestBuffers::new(subject, 4 * ALIGNED);
    buffers.prepare(ALIGNED, length);
    let job =
        TestOperation::copy(buffers.source(0, length), buffers.target(ALIGNED, length), length);
    let elsewhere = buffers.target(3 * ALIGNED, length);

    let submit = |descriptor: Descriptor| {
        let accepted = channel.submit(&mut [Some(descriptor)]).expect("an open channel");
        assert_eq!(accepted.count, 1);
        assert!(channel.park(accepted.last(), super::CASE_TIMEOUT));
        let error = channel.error_of(accepted.last()).expect("it is rejected");
        assert!(matches!(error, ExecutionError::Engine { done_bytes: 0, .. }), "{error}");
    };
    submit(wrong(&cache, job.descriptor(), elsewhere));
    buffers.check(ALIGNED, length);

    let completion = Arc::new(Completion::whole());
    submit(wrong(&cache, job.descriptor().reports_to(completion.clone()), elsewhere));
    wait_until("the end", || completion.is_done());
    buffers.expect_copy(0, ALIGNED, length);
    buffers.check_all();
    Verdict::Passed
}
