//! Memory to copy between, and waits that end.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use memferry_engine::conformance::LIMIT;
use memferry_engine::fault::FaultEngine;
use memferry_engine::{
    Channel, ChannelOptions, Completion, Descriptor, Engine, ExecutionError, Finish, Operation,
};

pub(crate) const PAGE: usize = 4096;
pub(crate) const UNTOUCHED: u8 = 0xC3;

/// A page to copy from and a page to copy to, with nothing around that could be hit unseen.
#[repr(align(4096))]
pub(crate) struct Pages(pub(crate) [u8; 3 * PAGE]);

pub(crate) struct Place {
    pub(crate) source: Box<Pages>,
    pub(crate) target: Box<Pages>,
}

impl Place {
    pub(crate) fn new() -> Self {
        let mut source = Box::new(Pages([0; 3 * PAGE]));
        for (at, byte) in source.0.iter_mut().enumerate() {
            *byte = (at * 31 + at / 251) as u8 | 1;
        }
        Self { source, target: Box::new(Pages([UNTOUCHED; 3 * PAGE])) }
    }

    /// An order over the middle page.
    pub(crate) fn descriptor(&mut self, operation: Operation, length: usize) -> Descriptor {
        let source = self.source.0[PAGE..].as_ptr() as u64;
        let target = self.target.0[PAGE..].as_mut_ptr() as u64;
        // SAFETY: the pages live in boxes that the tests keep until the channel is dropped.
        unsafe { Descriptor::new(operation, source, target, length as u64) }.value(0x42)
    }

    /// The middle page has these bytes of the operation's result, and nothing else was touched.
    #[track_caller]
    pub(crate) fn check(&self, operation: Operation, done: usize) {
        let mut expected = [UNTOUCHED; 3 * PAGE];
        match operation {
            Operation::Fill => expected[PAGE..PAGE + done].fill(0x42),
            _ => expected[PAGE..PAGE + done].copy_from_slice(&self.source.0[PAGE..PAGE + done]),
        }
        let wrong = (0..3 * PAGE).find(|&at| self.target.0[at] != expected[at]);
        assert_eq!(wrong, None, "the first wrong byte");
    }
}

pub(crate) fn open(engine: &FaultEngine) -> Arc<dyn Channel> {
    engine.open_channel(&ChannelOptions::default()).unwrap()
}

/// Polls until something is so.
#[track_caller]
pub(crate) fn until(channel: &dyn Channel, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !so() {
        assert!(Instant::now() < deadline, "gave up waiting");
        if !channel.poll() {
            std::thread::yield_now();
        }
    }
}

#[track_caller]
pub(crate) fn outcome(
    channel: &dyn Channel,
    completion: &Completion,
) -> Result<Finish, ExecutionError> {
    until(channel, || completion.is_done());
    completion.outcome().unwrap()
}

/// A descriptor that alone reports to a completion.
pub(crate) fn reporting(descriptor: Descriptor, completion: &Arc<Completion>) -> Descriptor {
    // SAFETY: these tests make one descriptor for each completion that is not chunked.
    unsafe { descriptor.completes(completion.clone()) }
}

/// Submits one descriptor and waits for its end.
#[track_caller]
pub(crate) fn carry_out(
    channel: &dyn Channel,
    descriptor: Descriptor,
) -> Result<Finish, ExecutionError> {
    let completion = Arc::new(Completion::whole());
    let taken = channel.submit(&mut [Some(reporting(descriptor, &completion))]).unwrap();
    assert_eq!(taken.count, 1);
    outcome(channel, &completion)
}

/// Offsets at which an engine may stop: the ends, their neighbours, and cache lines.
pub(crate) fn stops(length: usize) -> Vec<usize> {
    let stops = [0, 1, 63, 64, 65, length / 2, length.saturating_sub(1), length, length + 9];
    stops.into_iter().collect::<HashSet<_>>().into_iter().collect()
}
