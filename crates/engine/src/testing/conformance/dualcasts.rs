//! One source to two targets: at all sizes and alignments, in chunks, cancelled.

use std::sync::Arc;

use super::buffers::{ALIGNED, TestBuffers};
use super::test_engine::{TestEngine, TestOperation};
use super::{EngineUnderTest, Verdict};
use crate::completion::Completion;
use crate::contract::{ExecutionError, Kernel, Opcode};

/// The distance of the two targets in the target buffer: a multiple of the page.
const DISTANCE: usize = 1 << 18;
/// The largest length of which both targets and their guards fit.
const MAX_BYTES: usize = DISTANCE - 4096;

/// The offsets of the two targets: with the same offset in the page, and with another one.
fn targets() -> [[usize; 2]; 4] {
    let [near, far] = [ALIGNED, ALIGNED + DISTANCE];
    [[near, far], [near + 5, far + 5], [far + 64, near + 1], [near + 63, far + 4000]]
}

fn lengths() -> impl Iterator<Item = usize> {
    let around = (8..=17).flat_map(|power| (1 << power) - 1..=(1 << power) + 1);
    (0..=130).chain(around)
}

fn buffers(subject: &EngineUnderTest) -> TestBuffers {
    TestBuffers::new(subject, 2 * DISTANCE)
}

/// The dualcast, which the buffers expect from now on.
fn prepare(
    buffers: &mut TestBuffers,
    from: usize,
    targets: [usize; 2],
    length: usize,
) -> TestOperation {
    assert!(length <= MAX_BYTES);
    for to in targets {
        buffers.prepare(to, length);
        buffers.expect_copy(from, to, length);
    }
    let addresses = targets.map(|to| buffers.target(to, length));
    TestOperation::dualcast(buffers.source(from, length), addresses, length)
}

pub(super) fn dualcasts_of_every_size_write_both_targets_and_nothing_else(
    subject: &EngineUnderTest,
) -> Verdict {
    let mut buffers = buffers(subject);
    let bench = TestEngine::new(subject);
    if !bench.can(Opcode::Dualcast) {
        return bench.skip("write two targets");
    }
    for (round, length) in lengths().enumerate() {
        for (from, targets) in [0, 1, 63, 32].into_iter().zip(targets()) {
            let job = prepare(&mut buffers, from, targets, length);
            let kernel = match round % 3 {
                0 => Kernel::Stream(memferry_sys::copy::stream::Streaming::Sse2),
                _ => Kernel::Cached,
            };
            bench.execute(&TestOperation { kernel, ..job });
            targets.iter().for_each(|&to| buffers.check(to, length));
        }
    }
    buffers.check_all();
    Verdict::Passed
}

pub(super) fn dualcasts_cut_into_chunks_arrive_whole_at_both_targets(
    subject: &EngineUnderTest,
) -> Verdict {
    let mut buffers = buffers(subject);
    let bench = TestEngine::with_channels(subject, 2);
    if !bench.can(Opcode::Dualcast) {
        return bench.skip("write two targets");
    }
    for (length, chunk_bytes) in [(1, 4096), (4097, 4096), (100, 1), (200_017, 10_000)] {
        for (round, targets) in targets().into_iter().enumerate() {
            let job = prepare(&mut buffers, 13 * round, targets, length);
            let completion = Arc::new(Completion::chunked(job.work(chunk_bytes)));
            bench.dispatch(&job, &completion);
            while round % 2 == 0 && completion.help_from_back() {}
            bench.succeeds(&completion);
            targets.iter().for_each(|&to| buffers.check(to, length));
        }
    }
    buffers.check_all();
    Verdict::Passed
}

pub(super) fn a_cancelled_dualcast_counts_the_chunks_that_both_targets_have(
    subject: &EngineUnderTest,
) -> Verdict {
    const CHUNKS: usize = 6;
    const CHUNK: usize = 2000;
    const LENGTH: usize = CHUNKS * CHUNK;
    let mut buffers = buffers(subject);
    let bench = TestEngine::with_channels(subject, 2);
    if !bench.can(Opcode::Dualcast) {
        return bench.skip("write two targets");
    }
    for round in 0..100 {
        let targets = targets()[round % 4];
        targets.iter().for_each(|&to| buffers.prepare(to, LENGTH));
        let addresses = targets.map(|to| buffers.target(to, LENGTH));
        let job = TestOperation::dualcast(buffers.source(7, LENGTH), addresses, LENGTH);
        let completion = Arc::new(Completion::chunked(job.work(CHUNK as u64)));
        bench.dispatch(&job, &completion);
        for _ in 0..round % 5 {
            completion.help_from_back();
        }
        completion.cancel();
        let outcome = bench.outcome(&completion);
        let is_done = |from: &usize| {
            let source = buffers.source_bytes(7 + from, CHUNK);
            targets.iter().all(|to| buffers.bytes(to + from, CHUNK) == source)
        };
        let done = CHUNK * (0..LENGTH).step_by(CHUNK).filter(is_done).count();
        match outcome {
            Ok(_) => assert_eq!(done, LENGTH, "a successful transfer is complete"),
            Err(error) => {
                assert_eq!(error, ExecutionError::Cancelled { done_bytes: done as u64 });
            }
        }
    }
    Verdict::Passed
}
