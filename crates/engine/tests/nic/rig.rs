//! An engine with a channel, memory that is pinned for it, and a guard area around each target that
//! must not change.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_engine::completion::{ChunkedWork, Completion, Notification, PendingNotification};
use memferry_engine::contract::{Channel, DescriptorLeases};
use memferry_engine::nic::NicEngine;
use memferry_engine::{ChannelOptions, Descriptor, Engine, Kernel, Opcode};
use memferry_memory::pin_cache::{InvalidationMode, Lease, PinCache, PinCacheLimits};
use memferry_memory::pinning::Access;
use memferry_sys::Pages;

const WAIT_TIMEOUT: Duration = Duration::from_secs(200);
/// The initial value of target bytes.
const UNTOUCHED: u8 = 0xA5;

pub(crate) struct NicRig {
    // Before the memory: the drop of the channel ends everything in flight.
    channel: Arc<dyn Channel>,
    pub(crate) cache: PinCache,
    pub(crate) engine: Arc<NicEngine>,
    source: Pages,
    target: Pages,
    expected: Vec<u8>,
}

/// A copy between offsets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TestCopy {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) length: usize,
}

impl NicRig {
    /// Creates source and target of `bytes` bytes each.
    pub(crate) fn new(engine: Arc<NicEngine>, bytes: usize) -> Self {
        let channel = engine.open_channel(&ChannelOptions::default()).expect("a channel");
        let pinner = engine.pinner().expect("an engine that pins");
        let cache =
            PinCache::new(pinner, PinCacheLimits::default(), InvalidationMode::Explicit).unwrap();
        let mut source = Pages::new(bytes).unwrap();
        for (at, byte) in source.as_mut_slice().iter_mut().enumerate() {
            *byte = (at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()[6];
        }
        let mut target = Pages::new(bytes).unwrap();
        target.as_mut_slice().fill(UNTOUCHED);
        let expected = vec![UNTOUCHED; bytes];
        Self { channel, cache, engine, source, target, expected }
    }

    fn lease(&self, address: u64, length: usize, access: Access) -> Option<Arc<Lease>> {
        Some(Arc::new(self.cache.acquire(address as usize, length, access).unwrap()))
    }

    /// The descriptor of a copy, with its memory pinned, and the variable if one is given.
    fn descriptor(&mut self, copy: TestCopy, variable: Option<&Notification>) -> Descriptor {
        let TestCopy { from, to, length } = copy;
        self.expected[to..to + length]
            .copy_from_slice(&self.source.as_slice()[from..from + length]);
        let source = self.source.as_ptr() as u64 + from as u64;
        let target = self.target.as_ptr() as u64 + to as u64;
        let variable = variable.map(|variable| std::ptr::from_ref(variable) as u64);
        let pins = DescriptorLeases {
            source: self.lease(source, length, Access::Read),
            target: self.lease(target, length, Access::Write),
            second: None,
            variable: variable.and_then(|at| self.lease(at, 8, Access::Write)),
        };
        // SAFETY: both lie inside memory that outlives the channel, and nothing else uses it.
        unsafe { Descriptor::new(Opcode::Copy, source, target, length as u64) }
            .pinned_by(Arc::new(pins))
    }

    fn submit(&self, descriptors: Vec<Descriptor>) {
        let mut batch: Vec<_> = descriptors.into_iter().map(Some).collect();
        let mut submitted = 0;
        while submitted < batch.len() {
            submitted +=
                self.channel.submit(&mut batch[submitted..]).expect("an open channel").count;
            self.channel.poll();
        }
        let last = self.channel.statistics().submitted;
        assert!(self.channel.park(last, WAIT_TIMEOUT), "timeout waiting for the copies");
    }

    /// The channel.
    pub(crate) fn channel(&self) -> Arc<dyn Channel> {
        self.channel.clone()
    }

    /// Starts a copy, and polls for nothing.
    pub(crate) fn begin(&mut self, copy: TestCopy) -> Arc<Completion> {
        let completion = Arc::new(Completion::whole());
        // SAFETY: the only descriptor of the completion.
        let descriptor = unsafe { self.descriptor(copy, None).completes(completion.clone()) };
        assert_eq!(self.channel.submit(&mut [Some(descriptor)]).unwrap().count, 1);
        completion
    }

    /// Executes copies, each as a transfer of its own, in one batch.
    pub(crate) fn copy(&mut self, copies: &[TestCopy]) {
        let completions: Vec<_> = copies.iter().map(|_| Arc::new(Completion::whole())).collect();
        let descriptors = copies.iter().zip(&completions);
        let descriptors = descriptors
            .map(|(copy, completion)| {
                // SAFETY: the only descriptor of the completion.
                unsafe { self.descriptor(*copy, None).completes(completion.clone()) }
            })
            .collect();
        self.submit(descriptors);
        for completion in completions {
            completion.outcome().expect("complete").expect("success");
        }
        self.check();
    }

    /// Executes copies as parts of one transfer, in one batch, with a notification at the end.
    pub(crate) fn deliver(&mut self, copies: &[TestCopy], variable: &Notification, value: u64) {
        let (descriptors, completion) = self.delivery(copies, variable, value);
        self.submit(descriptors);
        completion.outcome().expect("complete").expect("success");
        self.check();
    }

    /// Executes transfers in one batch, each a copy with a notification at the end, and polls the
    /// variables all the time: each has the value 0 or its own.
    pub(crate) fn deliver_each(&mut self, copies: &[(TestCopy, &Notification, u64)]) {
        let (mut batch, mut completions) = (Vec::new(), Vec::new());
        for (copy, variable, value) in copies {
            let (descriptors, completion) = self.delivery(&[*copy], variable, *value);
            batch.extend(descriptors.into_iter().map(Some));
            completions.push(completion);
        }
        let accepted = self.channel.submit(&mut batch).expect("an open channel");
        assert_eq!(accepted.count, batch.len(), "more than the capacity of the channel");
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while completions.iter().any(|completion| !completion.is_done()) {
            self.channel.poll();
            for (_, variable, value) in copies {
                let found = variable.load();
                assert!(found == 0 || found == *value, "{found} instead of {value}");
            }
            assert!(Instant::now() < deadline, "timeout waiting for the copies");
        }
        for (_, variable, value) in copies {
            assert_eq!(variable.load(), *value);
        }
        self.check();
    }

    fn delivery(
        &mut self,
        copies: &[TestCopy],
        variable: &Notification,
        value: u64,
    ) -> (Vec<Descriptor>, Arc<Completion>) {
        let length: usize = copies.iter().map(|copy| copy.length).sum();
        let (start, length) = (self.target.as_ptr() as u64, length as u64);
        // SAFETY: never executed as it is: all of it is claimed at once.
        let work = unsafe {
            ChunkedWork::new(Opcode::Copy, Kernel::Cached, start, start, length, 0, length)
        };
        while work.claim_front().is_some() {}
        // SAFETY: the variable outlives the calling function, which waits for the end.
        let notify = unsafe { PendingNotification::new(variable, value) };
        let completion = Arc::new(Completion::chunked(work).notifying(Some(notify)));
        let mut offset = 0;
        let descriptors = copies
            .iter()
            .map(|copy| {
                let part = self.descriptor(*copy, Some(variable));
                // SAFETY: all chunks are claimed, and the copies are consecutive.
                let part = unsafe { part.part_of(completion.clone(), offset) };
                offset += copy.length as u64;
                part
            })
            .collect();
        (descriptors, completion)
    }

    /// Checks all of the target.
    fn check(&self) {
        let wrong = self.target.as_slice().iter().zip(&self.expected).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "the first wrong byte");
    }

    /// Makes the source read-only.
    pub(crate) fn protect_source(&self) {
        let (start, bytes) = (self.source.as_ptr(), self.source.len());
        // SAFETY: the pages are this rig's own, and are only read from now on.
        let done = unsafe { libc::mprotect(start.cast(), bytes, libc::PROT_READ) };
        assert_eq!(done, 0);
    }
}

/// Waits until a condition holds, and fails after the timeout.
pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "timeout waiting for {what}");
        std::thread::yield_now();
    }
}

impl std::fmt::Debug for NicRig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rig").field("engine", &self.engine).finish_non_exhaustive()
    }
}
