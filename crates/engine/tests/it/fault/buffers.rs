//! Test buffers, and waits with a timeout.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use memferry_engine::testing::conformance::CASE_TIMEOUT;
use memferry_engine::testing::fault::FaultEngine;
use memferry_engine::{
    Channel, ChannelOptions, Completion, Descriptor, Engine, ExecutionError, Opcode, TransferOutput,
};

pub(crate) const PAGE: usize = 4096;
pub(crate) const UNTOUCHED: u8 = 0xC3;

/// A source page and a target page, each between guard pages that detect stray writes.
#[repr(align(4096))]
pub(crate) struct GuardedPages(pub(crate) [u8; 3 * PAGE]);

pub(crate) struct FaultBuffers {
    pub(crate) source: Box<GuardedPages>,
    pub(crate) target: Box<GuardedPages>,
}

impl FaultBuffers {
    pub(crate) fn new() -> Self {
        let mut source = Box::new(GuardedPages([0; 3 * PAGE]));
        for (at, byte) in source.0.iter_mut().enumerate() {
            *byte = (at * 31 + at / 251) as u8 | 1;
        }
        Self { source, target: Box::new(GuardedPages([UNTOUCHED; 3 * PAGE])) }
    }

    /// A descriptor over the middle page.
    pub(crate) fn descriptor(&mut self, operation: Opcode, length: usize) -> Descriptor {
        let source = self.source.0[PAGE..].as_ptr() as u64;
        let target = self.target.0[PAGE..].as_mut_ptr() as u64;
        // SAFETY: the pages live in boxes that the tests keep until the channel is dropped.
        unsafe { Descriptor::new(operation, source, target, length as u64) }.value(0x42)
    }

    /// Checks that the middle page has the operation's result, and nothing else was written.
    #[track_caller]
    pub(crate) fn check(&self, operation: Opcode, done: usize) {
        let mut expected = [UNTOUCHED; 3 * PAGE];
        match operation {
            Opcode::Fill => expected[PAGE..PAGE + done].fill(0x42),
            _ => expected[PAGE..PAGE + done].copy_from_slice(&self.source.0[PAGE..PAGE + done]),
        }
        let wrong = (0..3 * PAGE).find(|&at| self.target.0[at] != expected[at]);
        assert_eq!(wrong, None, "the first wrong byte");
    }
}

pub(crate) fn open(engine: &FaultEngine) -> Arc<dyn Channel> {
    engine.open_channel(&ChannelOptions::default()).unwrap()
}

/// Polls until a condition holds.
#[track_caller]
pub(crate) fn poll_until(channel: &dyn Channel, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + CASE_TIMEOUT;
    while !so() {
        assert!(Instant::now() < deadline, "timeout");
        if !channel.poll() {
            std::thread::yield_now();
        }
    }
}

#[track_caller]
pub(crate) fn outcome(
    channel: &dyn Channel,
    completion: &Completion,
) -> Result<TransferOutput, ExecutionError> {
    poll_until(channel, || completion.is_done());
    completion.outcome().unwrap()
}

/// A descriptor that is the only one to report to a completion.
pub(crate) fn reporting(descriptor: Descriptor, completion: &Arc<Completion>) -> Descriptor {
    // SAFETY: these tests create one descriptor for each completion that is not chunked.
    unsafe { descriptor.completes(completion.clone()) }
}

/// Submits one descriptor and waits for its end.
#[track_caller]
pub(crate) fn execute(
    channel: &dyn Channel,
    descriptor: Descriptor,
) -> Result<TransferOutput, ExecutionError> {
    let completion = Arc::new(Completion::whole());
    let accepted = channel.submit(&mut [Some(reporting(descriptor, &completion))]).unwrap();
    assert_eq!(accepted.count, 1);
    outcome(channel, &completion)
}

/// Offsets at which an engine may stop: the ends, their neighbours, and cache lines.
pub(crate) fn stops(length: usize) -> Vec<usize> {
    let stops = [0, 1, 63, 64, 65, length / 2, length.saturating_sub(1), length, length + 9];
    stops.into_iter().collect::<HashSet<_>>().into_iter().collect()
}
