//! A channel of the engine, and memory for its copies.

use std::sync::Arc;
use std::time::Duration;

use memferry_engine::completion::{Completion, TransferOutput};
use memferry_engine::contract::{Channel, DescriptorLeases};
use memferry_engine::dsa::DsaEngine;
use memferry_engine::{ChannelOptions, Descriptor, Engine, ExecutionError, Opcode};
use memferry_memory::pin_cache::{InvalidationMode, PinCache, PinCacheLimits};
use memferry_memory::pinning::Access;
use memferry_sys::Pages;

const WAIT_TIMEOUT: Duration = Duration::from_secs(200);

/// The size of source and target.
pub(crate) const BYTES: usize = 1 << 20;

pub(crate) struct DsaRig {
    // Before the memory: the drop of the channel ends everything in flight.
    pub(crate) channel: Arc<dyn Channel>,
    pub(crate) engine: Arc<DsaEngine>,
    leases: Option<Arc<DescriptorLeases>>,
    _cache: Option<PinCache>,
    pub(crate) source: Pages,
    pub(crate) target: Pages,
}

impl DsaRig {
    /// A channel of an engine, with pinned memory if the engine needs it.
    pub(crate) fn new(engine: Arc<DsaEngine>) -> Self {
        let channel = engine.open_channel(&ChannelOptions::default()).unwrap();
        let (mut source, target) = (Pages::new(BYTES).unwrap(), Pages::new(BYTES).unwrap());
        for (index, byte) in source.as_mut_slice().iter_mut().enumerate() {
            *byte = (index * 31 + index / 251) as u8 | 1;
        }
        let cache = engine.pinner().map(|pinner| {
            let (limits, mode) = (PinCacheLimits::default(), InvalidationMode::Explicit);
            PinCache::new(pinner, limits, mode).unwrap()
        });
        let leases = cache.as_ref().map(|cache| {
            let lease = |pages: &Pages, access| {
                Some(Arc::new(cache.acquire(pages.as_ptr() as usize, BYTES, access).unwrap()))
            };
            Arc::new(DescriptorLeases {
                source: lease(&source, Access::Read),
                target: lease(&target, Access::Write),
                second: lease(&target, Access::Write),
                variable: None,
            })
        });
        Self { channel, engine, leases, _cache: cache, source, target }
    }

    /// A copy of a part of the source to the same part of the target, as a descriptor.
    pub(crate) fn copy(&self, at: usize, length: usize) -> (Descriptor, Arc<Completion>) {
        assert!(at + length <= BYTES);
        let (source, target) = (self.source.as_ptr() as u64, self.target.as_ptr() as u64);
        self.operation(Opcode::Copy, source + at as u64, target + at as u64, length)
    }

    /// Any operation, as a descriptor.
    pub(crate) fn operation(
        &self,
        operation: Opcode,
        source: u64,
        target: u64,
        length: usize,
    ) -> (Descriptor, Arc<Completion>) {
        // SAFETY: memory of the rig, which outlives the channel, or memory of which a test wants
        // to know that it is not accessible.
        self.complete(unsafe { Descriptor::new(operation, source, target, length as u64) })
    }

    /// A copy of the start of the source to two parts of the target, as a descriptor.
    pub(crate) fn dualcast(
        &self,
        first: usize,
        second: usize,
        length: usize,
    ) -> (Descriptor, Arc<Completion>) {
        assert!(first.max(second) + length <= BYTES && first.abs_diff(second) >= length);
        let (source, target) = (self.source.as_ptr() as u64, self.target.as_ptr() as u64);
        let [first, second] = [first, second].map(|at| target + at as u64);
        // SAFETY: memory of the rig, which outlives the channel; the targets do not overlap.
        self.complete(unsafe {
            Descriptor::new(Opcode::Dualcast, source, first, length as u64)
                .with_second_target(second)
        })
    }

    fn complete(&self, descriptor: Descriptor) -> (Descriptor, Arc<Completion>) {
        let completion = Arc::new(Completion::whole());
        // SAFETY: nothing else reports to the completion.
        let descriptor = unsafe { descriptor.completes(completion.clone()) };
        let descriptor = match &self.leases {
            Some(leases) => descriptor.pinned_by(leases.clone()),
            None => descriptor,
        };
        (descriptor, completion)
    }

    /// Submits descriptors in one batch.
    pub(crate) fn submit(&self, descriptors: Vec<Descriptor>) {
        let mut batch: Vec<_> = descriptors.into_iter().map(Some).collect();
        let accepted = self.channel.submit(&mut batch).unwrap();
        assert_eq!(accepted.count, batch.len());
    }

    /// Copies parts in one batch, and waits for all of them.
    pub(crate) fn copy_all(&self, parts: impl IntoIterator<Item = (usize, usize)>) {
        let (descriptors, completions): (Vec<_>, Vec<_>) =
            parts.into_iter().map(|(at, length)| self.copy(at, length)).unzip();
        self.submit(descriptors);
        self.finish();
        for completion in completions {
            assert!(matches!(completion.outcome(), Some(Ok(_))), "{:?}", completion.outcome());
        }
    }

    /// Runs one operation.
    pub(crate) fn run(
        &self,
        (descriptor, completion): (Descriptor, Arc<Completion>),
    ) -> Result<TransferOutput, ExecutionError> {
        self.submit(vec![descriptor]);
        self.finish();
        completion.outcome().expect("it is complete")
    }

    /// Waits for everything that was submitted.
    pub(crate) fn finish(&self) {
        let submitted = self.channel.statistics().submitted;
        assert!(self.channel.park(submitted, WAIT_TIMEOUT), "timeout waiting for the copies");
    }

    pub(crate) fn is_copied(&self, at: usize, length: usize) -> bool {
        self.target.as_slice()[at..at + length] == self.source.as_slice()[at..at + length]
    }
}
