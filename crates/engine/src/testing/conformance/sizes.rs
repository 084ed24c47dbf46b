//! Every operation at all sizes and alignments, byte by byte.

use memferry_sys::copy::stream::Streaming;

use super::buffers::{GUARD, TestBuffers};
use super::test_engine::{TestEngine, TestOperation};
use super::{EngineUnderTest, Verdict};
use crate::contract::{Kernel, Opcode};

/// The shifts of sources and targets from aligned addresses.
const SHIFTS: [(usize, usize); 10] =
    [(0, 0), (0, 1), (1, 0), (3, 5), (7, 7), (15, 16), (31, 63), (63, 31), (32, 4), (60, 60)];

/// The distance between neighbouring slots: slots end in different parts of a page, and some of
/// them cross its end.
const STRIDE: usize = 4096 - 256;

fn around_powers_of_two() -> impl Iterator<Item = usize> {
    (7..=20).flat_map(|power| (1 << power) - 1..=(1 << power) + 1)
}

pub(super) fn every_small_size_is_copied_at_assorted_alignments(
    subject: &EngineUnderTest,
) -> Verdict {
    let mut buffers = TestBuffers::new(subject, STRIDE * (SHIFTS.len() + 1));
    let bench = TestEngine::new(subject);
    for length in 0..=130 {
        let mut running = Vec::new();
        for (slot, (from, to)) in SHIFTS.into_iter().enumerate() {
            let (from, to) = (slot * STRIDE + from, GUARD + slot * STRIDE + to);
            buffers.prepare(to, length);
            let job = TestOperation::copy(
                buffers.source(from, length),
                buffers.target(to, length),
                length,
            );
            buffers.expect_copy(from, to, length);
            running.push((to, bench.begin(&job)));
        }
        for (to, parts) in running {
            bench.end(parts);
            buffers.check(to, length);
        }
    }
    buffers.check_all();
    Verdict::Passed
}

pub(super) fn sizes_around_powers_of_two_are_copied(subject: &EngineUnderTest) -> Verdict {
    let mut buffers = TestBuffers::new(subject, (1 << 20) + 128);
    let bench = TestEngine::new(subject);
    for length in around_powers_of_two() {
        for (from, to) in [(0, GUARD), (1, GUARD + 32), (63, GUARD + 7)] {
            buffers.prepare(to, length);
            buffers.expect_copy(from, to, length);
            let job = TestOperation::copy(
                buffers.source(from, length),
                buffers.target(to, length),
                length,
            );
            bench.execute(&job);
            buffers.check(to, length);
        }
    }
    buffers.check_all();
    Verdict::Passed
}

pub(super) fn fills_of_every_size_touch_nothing_else(subject: &EngineUnderTest) -> Verdict {
    let mut buffers = TestBuffers::new(subject, (1 << 20) + 128);
    let bench = TestEngine::new(subject);
    if !bench.can(Opcode::Fill) {
        return bench.skip("fill");
    }
    for length in (0..=130).chain(around_powers_of_two()) {
        for to in [GUARD, GUARD + 1, GUARD + 63] {
            let value = (length * 7 + to) as u8;
            buffers.prepare(to, length);
            buffers.expect_fill(to, length, value);
            bench.execute(&TestOperation::fill(buffers.target(to, length), length, value));
            buffers.check(to, length);
        }
    }
    buffers.check_all();
    Verdict::Passed
}

pub(super) fn comparisons_find_the_first_difference(subject: &EngineUnderTest) -> Verdict {
    let mut buffers = TestBuffers::new(subject, (1 << 20) + 128);
    let bench = TestEngine::new(subject);
    if !bench.can(Opcode::Compare) {
        return bench.skip("compare");
    }
    for (round, length) in (0..=130).chain(around_powers_of_two()).enumerate() {
        let (from, to) = (round % 61, GUARD + round % 17);
        let source = buffers.source_bytes(from, length).to_vec();
        buffers.write(to, &source);
        let job =
            TestOperation::copy(buffers.source(from, length), buffers.target(to, length), length)
                .operation(Opcode::Compare);
        assert_eq!(bench.execute(&job), None, "{length} equal bytes");
        // From the back, so that each difference lies before the earlier ones.
        for at in [length.wrapping_sub(1), length / 2, 0] {
            if at < length {
                buffers.write(to + at, &[!source[at]]);
                assert_eq!(bench.execute(&job), Some(at as u64), "in {length} bytes");
            }
        }
        buffers.check(to, length);
    }
    buffers.check_all();
    Verdict::Passed
}

pub(super) fn overlapping_moves_have_the_result_of_memmove(subject: &EngineUnderTest) -> Verdict {
    let mut buffers = TestBuffers::new(subject, 512 << 10);
    let bench = TestEngine::new(subject);
    if !bench.can(Opcode::Move) {
        return bench.skip("move");
    }
    let small = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 130, 1000];
    let small = small.into_iter().flat_map(|length| (0..=70).map(move |by| (length, by)));
    let large = [(4097, 64), (65_536, 1), (65_537, 4096), (200_000, 199_999), (200_000, 31)];
    for (length, by) in small.chain(large) {
        for (from, to) in [(GUARD, GUARD + by), (GUARD + by, GUARD)] {
            let (source, target) = (buffers.target(from, length), buffers.target(to, length));
            let all = length as u64;
            if bench.capabilities().max_part(source, target, all) < all {
                continue;
            }
            buffers.prepare(GUARD, length + by);
            let bytes = buffers.source_bytes(length % 97, length).to_vec();
            buffers.write(from, &bytes);
            buffers.expect_move(from, to, length);
            bench.execute(&TestOperation::copy(source, target, length).operation(Opcode::Move));
            buffers.check(GUARD, length + by);
        }
    }
    buffers.check_all();
    Verdict::Passed
}

pub(super) fn every_kernel_moves_the_same_bytes(subject: &EngineUnderTest) -> Verdict {
    let mut buffers = TestBuffers::new(subject, 256 << 10);
    let bench = TestEngine::new(subject);
    // All kernels, not only those of this processor: an unsupported one must do no harm.
    let kernels = Streaming::ALL.into_iter().map(Kernel::Stream).chain([Kernel::Cached]);
    for kernel in kernels {
        for length in [1, 63, 64, 129, 4096, 16_384, 70_001, 200_000] {
            let (from, to) = (length % 64, GUARD + 5 * (length % 13));
            let copy = TestOperation::copy(
                buffers.source(from, length),
                buffers.target(to, length),
                length,
            );
            buffers.prepare(to, length);
            buffers.expect_copy(from, to, length);
            bench.execute(&TestOperation { kernel, ..copy });
            buffers.check(to, length);
            if bench.can(Opcode::Fill) {
                buffers.expect_fill(to, length, 0x77);
                let fill = TestOperation::fill(buffers.target(to, length), length, 0x77);
                bench.execute(&TestOperation { kernel, ..fill });
                buffers.check(to, length);
            }
        }
    }
    buffers.check_all();
    Verdict::Passed
}
