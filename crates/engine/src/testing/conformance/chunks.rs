//! Chunked transfers: claimed by channels and callers, used before the end, cancelled.

use std::sync::Arc;

use super::buffers::{GUARD, TestBuffers};
use super::test_engine::{ReportsTo, TestEngine, TestOperation, wait_until};
use super::{EngineUnderTest, Verdict};
use crate::completion::Completion;
use crate::contract::{Descriptor, ExecutionError, Opcode};

pub(super) fn transfers_cut_into_chunks_arrive_whole(subject: &EngineUnderTest) -> Verdict {
    let mut buffers = TestBuffers::new(subject, 300_000);
    let bench = TestEngine::with_channels(subject, 2);
    let sizes = [(1, 4096), (4095, 4096), (4096, 4096), (4097, 4096), (100, 1), (200_017, 10_000)];
    for (length, chunk_bytes) in sizes {
        for (round, helps) in [true, false].into_iter().enumerate() {
            let (from, to) = (round * 13, GUARD + 7 * round);
            let copy = TestOperation::copy(
                buffers.source(from, length),
                buffers.target(to, length),
                length,
            );
            buffers.prepare(to, length);
            buffers.expect_copy(from, to, length);
            assert_eq!(execute_shared(&bench, &copy, chunk_bytes, helps), None);
            buffers.check(to, length);
            if bench.can(Opcode::Compare) {
                let compare = copy.operation(Opcode::Compare);
                assert_eq!(execute_shared(&bench, &compare, chunk_bytes, helps), None);
                // Two differences in different chunks: the lower offset counts, in any order of
                // discovery.
                let bytes = [!buffers.bytes(to + length - 1, 1)[0]];
                buffers.write(to + length - 1, &bytes);
                let bytes = [!buffers.source_bytes(from + length / 3, 1)[0]];
                buffers.write(to + length / 3, &bytes);
                let found = execute_shared(&bench, &compare, chunk_bytes, helps);
                assert_eq!(found, Some(length as u64 / 3));
            }
            if bench.can(Opcode::Fill) {
                buffers.expect_fill(to, length, 0x11);
                let fill = TestOperation::fill(buffers.target(to, length), length, 0x11);
                assert_eq!(execute_shared(&bench, &fill, chunk_bytes, helps), None);
                buffers.check(to, length);
            }
        }
    }
    buffers.check_all();
    Verdict::Passed
}

/// Executes an operation by all channels, and by the caller from the back if `helps`.
fn execute_shared(
    bench: &TestEngine,
    job: &TestOperation,
    chunk_bytes: u64,
    helps: bool,
) -> Option<u64> {
    let completion = Arc::new(Completion::chunked(job.work(chunk_bytes)));
    bench.dispatch(job, &completion);
    while helps && completion.help_from_back() {}
    let output = bench.succeeds(&completion);
    assert_eq!(completion.ready_bytes(job.length), job.length);
    assert!(completion.is_range_ready(0, job.length));
    assert!(!completion.help_from_back() && !completion.help_from_front(), "nothing is left");
    output.difference
}

pub(super) fn the_finished_prefix_can_be_used_early(subject: &EngineUnderTest) -> Verdict {
    const LENGTH: usize = 1 << 20;
    let mut buffers = TestBuffers::new(subject, LENGTH);
    let bench = TestEngine::with_channels(subject, 2);
    for round in 0..4 {
        buffers.prepare(GUARD, LENGTH);
        buffers.expect_copy(round, GUARD, LENGTH);
        let job = TestOperation::copy(
            buffers.source(round, LENGTH),
            buffers.target(GUARD, LENGTH),
            LENGTH,
        );
        let completion = Arc::new(Completion::chunked(job.work(32 << 10)));
        std::thread::scope(|scope| {
            // Checks while the bytes move: ready bytes are in place, and stay so.
            scope.spawn(|| {
                let mut ready = 0;
                wait_until("all bytes to be ready", || {
                    let now = completion.ready_bytes(LENGTH as u64) as usize;
                    assert!(now >= ready, "the prefix only grows");
                    buffers.check_inside(GUARD + ready, now - ready);
                    ready = now;
                    for from in (0..LENGTH - 50_000).step_by(41_000) {
                        if completion.is_range_ready(from as u64, from as u64 + 50_000) {
                            buffers.check_inside(GUARD + from, 50_000);
                        }
                    }
                    ready == LENGTH
                });
            });
            bench.dispatch(&job, &completion);
            if round % 2 == 0 {
                while completion.help_from_back() {}
            }
            bench.succeeds(&completion);
        });
        buffers.check(GUARD, LENGTH);
    }
    buffers.check_all();
    Verdict::Passed
}

pub(super) fn a_cancelled_transfer_leaves_each_part_done_or_untouched(
    subject: &EngineUnderTest,
) -> Verdict {
    const CHUNKS: usize = 6;
    const CHUNK: usize = 2000;
    const LENGTH: usize = CHUNKS * CHUNK;
    let mut buffers = TestBuffers::new(subject, LENGTH);
    let bench = TestEngine::with_channels(subject, 2);
    for round in 0..300 {
        buffers.prepare(GUARD, LENGTH);
        let job =
            TestOperation::copy(buffers.source(7, LENGTH), buffers.target(GUARD, LENGTH), LENGTH);
        let completion = Arc::new(Completion::chunked(job.work(CHUNK as u64)));
        bench.dispatch(&job, &completion);
        for _ in 0..round % 4 {
            completion.help_from_back();
        }
        completion.cancel();
        let outcome = bench.outcome(&completion);

        let mut done = 0;
        for chunk in (0..LENGTH).step_by(CHUNK) {
            let mut done_parts = 0;
            for (from, length) in bench.parts_of(&job, chunk, CHUNK) {
                if buffers.bytes(GUARD + from, length) == buffers.source_bytes(7 + from, length) {
                    buffers.expect_copy(7 + from, GUARD + from, length);
                    done_parts += length;
                }
                // Otherwise the model still has the earlier contents of the part.
            }
            // A chunk of which only some parts are done does not count.
            done += if done_parts == CHUNK { CHUNK } else { 0 };
        }
        buffers.check(GUARD, LENGTH);
        match outcome {
            Ok(_) => assert_eq!(done, LENGTH, "a successful transfer is complete"),
            Err(error) => {
                assert_eq!(error, ExecutionError::Cancelled { done_bytes: done as u64 });
                assert!(completion.ready_bytes(LENGTH as u64) <= done as u64);
            }
        }
    }
    buffers.check_all();
    Verdict::Passed
}

pub(super) fn a_transfer_cancelled_before_it_began_touches_nothing(
    subject: &EngineUnderTest,
) -> Verdict {
    const LENGTH: usize = 10_000;
    let mut buffers = TestBuffers::new(subject, LENGTH);
    let bench = TestEngine::new(subject);
    buffers.prepare(GUARD, LENGTH);
    let job = TestOperation::copy(buffers.source(0, LENGTH), buffers.target(GUARD, LENGTH), LENGTH);
    let completion = Arc::new(Completion::chunked(job.work(1000)));
    completion.cancel();
    let cancelled = Err(ExecutionError::Cancelled { done_bytes: 0 });
    assert_eq!(completion.outcome(), Some(cancelled.clone()));
    assert!(!completion.help_from_back());
    if bench.capabilities().claims_chunks {
        // A late work offer finds nothing to claim.
        let accepted = bench.submit([Descriptor::work_offer(completion.clone())]);
        assert!(bench.channel().park(accepted[0].last(), super::CASE_TIMEOUT));
    }
    completion.cancel();
    assert_eq!(completion.outcome(), Some(cancelled));
    buffers.check_all();
    Verdict::Passed
}

pub(super) fn a_cancelled_whole_transfer_is_done_or_untouched(
    subject: &EngineUnderTest,
) -> Verdict {
    const COUNT: usize = 40;
    let bench = TestEngine::new(subject);
    let length = bench.max_part(512);
    let mut buffers = TestBuffers::new(subject, COUNT * (length + 2 * GUARD));
    let slot_offset = |index: usize| super::buffers::ALIGNED + index * length;
    for round in 0..20 {
        buffers.prepare(slot_offset(0), COUNT * length);
        let completions: Vec<_> = (0..COUNT).map(|_| Arc::new(Completion::whole())).collect();
        bench.submit(completions.iter().enumerate().map(|(index, completion)| {
            let source = buffers.source(index * length, length);
            let job =
                TestOperation::copy(source, buffers.target(slot_offset(index), length), length);
            job.descriptor().reports_to(completion.clone())
        }));
        completions.iter().skip(round).step_by(2).for_each(|completion| completion.cancel());
        for (index, completion) in completions.iter().enumerate() {
            match bench.outcome(completion) {
                Ok(_) => buffers.expect_copy(index * length, slot_offset(index), length),
                // Nothing of it was done: the model has the earlier contents.
                Err(error) => assert_eq!(error, ExecutionError::Cancelled { done_bytes: 0 }),
            }
            assert!(completion.is_cancelled() || completion.outcome().is_some_and(|o| o.is_ok()));
        }
        buffers.check(slot_offset(0), COUNT * length);
    }
    Verdict::Passed
}
