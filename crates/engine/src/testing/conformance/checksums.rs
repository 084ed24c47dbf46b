//! CRCs, and copies with one: at all sizes and alignments, in chunks, cancelled.

use std::sync::Arc;

use memferry_sys::copy::stream::Streaming;

use super::buffers::{GUARD, TestBuffers};
use super::test_engine::{TestEngine, TestOperation};
use super::{EngineUnderTest, Verdict};
use crate::completion::Completion;
use crate::contract::{ExecutionError, Kernel, Opcode};
use crate::testing::dsa_model::crc::crc32c;

fn lengths() -> impl Iterator<Item = usize> {
    let around = (8..=18).flat_map(|power| (1 << power) - 1..=(1 << power) + 1);
    (0..=130).chain(around)
}

/// Executes an operation, and checks the CRC of each descriptor that the engine needs for it.
fn execute(bench: &TestEngine, buffers: &TestBuffers, job: &TestOperation, from: usize) {
    let parts = bench.begin(job);
    let ends = parts.iter().skip(1).map(|(offset, _)| *offset).chain([job.length]);
    for ((offset, completion), end) in parts.iter().zip(ends) {
        let bytes = buffers.source_bytes(from + *offset as usize, (end - offset) as usize);
        let output = bench.succeeds(completion);
        assert_eq!(output.crc, Some(crc32c(0, bytes)), "{offset}..{end} of {job:?}");
        assert_eq!(output.difference, None);
    }
}

pub(super) fn crcs_of_every_size_are_those_of_the_standard(subject: &EngineUnderTest) -> Verdict {
    let buffers = TestBuffers::new(subject, (1 << 18) + 128);
    let bench = TestEngine::new(subject);
    if !bench.can(Opcode::Crc) {
        return bench.skip("compute CRCs");
    }
    for length in lengths() {
        for from in [0, 1, 7, 63] {
            let source = buffers.source(from, length);
            let job = TestOperation::copy(source, source, length).operation(Opcode::Crc);
            execute(&bench, &buffers, &job, from);
        }
    }
    buffers.check_all();
    Verdict::Passed
}

pub(super) fn copies_with_a_crc_move_every_byte_and_return_it(
    subject: &EngineUnderTest,
) -> Verdict {
    let mut buffers = TestBuffers::new(subject, (1 << 18) + 128);
    let bench = TestEngine::new(subject);
    if !bench.can(Opcode::CopyCrc) {
        return bench.skip("compute CRCs of copies");
    }
    let kernels: Vec<_> =
        Streaming::ALL.into_iter().map(Kernel::Stream).chain([Kernel::Cached]).collect();
    for (round, length) in lengths().enumerate() {
        for (from, to) in [(0, GUARD), (3, GUARD + 5), (63, GUARD + 64)] {
            let (source, target) = (buffers.source(from, length), buffers.target(to, length));
            let copy = TestOperation::copy(source, target, length).operation(Opcode::CopyCrc);
            buffers.prepare(to, length);
            buffers.expect_copy(from, to, length);
            let kernel = kernels[round % kernels.len()];
            execute(&bench, &buffers, &TestOperation { kernel, ..copy }, from);
            buffers.check(to, length);
        }
    }
    buffers.check_all();
    Verdict::Passed
}

pub(super) fn crcs_of_chunks_make_the_crc_of_the_whole(subject: &EngineUnderTest) -> Verdict {
    let mut buffers = TestBuffers::new(subject, 300_000);
    let bench = TestEngine::with_channels(subject, 2);
    if !bench.can(Opcode::Crc) || !bench.can(Opcode::CopyCrc) {
        return bench.skip("compute CRCs");
    }
    let sizes = [(1, 4096), (4095, 4096), (4096, 4096), (4097, 4096), (100, 1), (200_017, 10_000)];
    for (length, chunk_bytes) in sizes {
        for (round, helps) in [true, false].into_iter().enumerate() {
            let (from, to) = (round * 13, GUARD + 7 * round);
            let (source, target) = (buffers.source(from, length), buffers.target(to, length));
            let expected = crc32c(0, buffers.source_bytes(from, length));
            let crc = TestOperation::copy(source, source, length).operation(Opcode::Crc);
            assert_eq!(execute_shared(&bench, &crc, chunk_bytes, helps), Some(expected));
            let copy = TestOperation::copy(source, target, length).operation(Opcode::CopyCrc);
            buffers.prepare(to, length);
            buffers.expect_copy(from, to, length);
            assert_eq!(execute_shared(&bench, &copy, chunk_bytes, helps), Some(expected));
            buffers.check(to, length);
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
) -> Option<u32> {
    let completion = Arc::new(Completion::chunked(job.work(chunk_bytes)));
    bench.dispatch(job, &completion);
    while helps && completion.help_from_back() {}
    bench.succeeds(&completion).crc
}

pub(super) fn a_cancelled_copy_with_a_crc_has_no_crc_or_the_right_one(
    subject: &EngineUnderTest,
) -> Verdict {
    const CHUNKS: usize = 6;
    const CHUNK: usize = 2000;
    const LENGTH: usize = CHUNKS * CHUNK;
    let mut buffers = TestBuffers::new(subject, LENGTH);
    let bench = TestEngine::with_channels(subject, 2);
    if !bench.can(Opcode::CopyCrc) {
        return bench.skip("compute CRCs of copies");
    }
    let expected = crc32c(0, buffers.source_bytes(7, LENGTH));
    for round in 0..100 {
        buffers.prepare(GUARD, LENGTH);
        let (source, target) = (buffers.source(7, LENGTH), buffers.target(GUARD, LENGTH));
        let job = TestOperation::copy(source, target, LENGTH).operation(Opcode::CopyCrc);
        let completion = Arc::new(Completion::chunked(job.work(CHUNK as u64)));
        bench.dispatch(&job, &completion);
        for _ in 0..round % 4 {
            completion.help_from_back();
        }
        completion.cancel();
        match bench.outcome(&completion) {
            Ok(output) => {
                assert_eq!(output.crc, Some(expected));
                buffers.expect_copy(7, GUARD, LENGTH);
                buffers.check(GUARD, LENGTH);
            }
            Err(error) => assert!(matches!(error, ExecutionError::Cancelled { .. }), "{error}"),
        }
    }
    Verdict::Passed
}
