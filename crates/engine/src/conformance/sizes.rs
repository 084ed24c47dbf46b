//! Every operation at all sizes and alignments, byte by byte.

use memferry_sys::copy::stream::Streaming;

use super::bench::{Bench, Job};
use super::field::{Field, GUARD};
use super::{Subject, Verdict};
use crate::contract::{Kernel, Operation};

/// How far sources and targets are shifted from aligned places.
const SHIFTS: [(usize, usize); 10] =
    [(0, 0), (0, 1), (1, 0), (3, 5), (7, 7), (15, 16), (31, 63), (63, 31), (32, 4), (60, 60)];

/// Distance between the places of neighbours: they end in different parts of a page, and some of
/// them lie across its end.
const STRIDE: usize = 4096 - 256;

fn around_powers_of_two() -> impl Iterator<Item = usize> {
    (7..=20).flat_map(|power| (1 << power) - 1..=(1 << power) + 1)
}

pub(super) fn every_small_size_is_copied_at_assorted_alignments(subject: &Subject) -> Verdict {
    let mut field = Field::new(subject, STRIDE * (SHIFTS.len() + 1));
    let bench = Bench::new(subject);
    for length in 0..=130 {
        let mut running = Vec::new();
        for (place, (from, to)) in SHIFTS.into_iter().enumerate() {
            let (from, to) = (place * STRIDE + from, GUARD + place * STRIDE + to);
            field.prepare(to, length);
            let job = Job::copy(field.source(from, length), field.target(to, length), length);
            field.expect_copy(from, to, length);
            running.push((to, bench.begin(&job)));
        }
        for (to, pieces) in running {
            bench.end(pieces);
            field.check(to, length);
        }
    }
    field.check_all();
    Verdict::Passed
}

pub(super) fn sizes_around_powers_of_two_are_copied(subject: &Subject) -> Verdict {
    let mut field = Field::new(subject, (1 << 20) + 128);
    let bench = Bench::new(subject);
    for length in around_powers_of_two() {
        for (from, to) in [(0, GUARD), (1, GUARD + 32), (63, GUARD + 7)] {
            field.prepare(to, length);
            field.expect_copy(from, to, length);
            let job = Job::copy(field.source(from, length), field.target(to, length), length);
            bench.carry_out(&job);
            field.check(to, length);
        }
    }
    field.check_all();
    Verdict::Passed
}

pub(super) fn fills_of_every_size_touch_nothing_else(subject: &Subject) -> Verdict {
    let mut field = Field::new(subject, (1 << 20) + 128);
    let bench = Bench::new(subject);
    if !bench.can(Operation::Fill) {
        return bench.skip("fill");
    }
    for length in (0..=130).chain(around_powers_of_two()) {
        for to in [GUARD, GUARD + 1, GUARD + 63] {
            let value = (length * 7 + to) as u8;
            field.prepare(to, length);
            field.expect_fill(to, length, value);
            bench.carry_out(&Job::fill(field.target(to, length), length, value));
            field.check(to, length);
        }
    }
    field.check_all();
    Verdict::Passed
}

pub(super) fn comparisons_find_the_first_difference(subject: &Subject) -> Verdict {
    let mut field = Field::new(subject, (1 << 20) + 128);
    let bench = Bench::new(subject);
    if !bench.can(Operation::Compare) {
        return bench.skip("compare");
    }
    for (turn, length) in (0..=130).chain(around_powers_of_two()).enumerate() {
        let (from, to) = (turn % 61, GUARD + turn % 17);
        let source = field.source_bytes(from, length).to_vec();
        field.write(to, &source);
        let job = Job::copy(field.source(from, length), field.target(to, length), length)
            .operation(Operation::Compare);
        assert_eq!(bench.carry_out(&job), None, "{length} equal bytes");
        // From the back, so that each difference lies before those that are there already.
        for at in [length.wrapping_sub(1), length / 2, 0] {
            if at < length {
                field.write(to + at, &[!source[at]]);
                assert_eq!(bench.carry_out(&job), Some(at as u64), "in {length} bytes");
            }
        }
        field.check(to, length);
    }
    field.check_all();
    Verdict::Passed
}

pub(super) fn overlapping_moves_have_the_result_of_memmove(subject: &Subject) -> Verdict {
    let mut field = Field::new(subject, 512 << 10);
    let bench = Bench::new(subject);
    if !bench.can(Operation::Move) {
        return bench.skip("move");
    }
    let small = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 130, 1000];
    let small = small.into_iter().flat_map(|length| (0..=70).map(move |by| (length, by)));
    let large = [(4097, 64), (65_536, 1), (65_537, 4096), (200_000, 199_999), (200_000, 31)];
    for (length, by) in small.chain(large) {
        for (from, to) in [(GUARD, GUARD + by), (GUARD + by, GUARD)] {
            let (source, target) = (field.target(from, length), field.target(to, length));
            let all = length as u64;
            if bench.capabilities().longest_piece(source, target, all) < all {
                continue;
            }
            field.prepare(GUARD, length + by);
            let bytes = field.source_bytes(length % 97, length).to_vec();
            field.write(from, &bytes);
            field.expect_move(from, to, length);
            bench.carry_out(&Job::copy(source, target, length).operation(Operation::Move));
            field.check(GUARD, length + by);
        }
    }
    field.check_all();
    Verdict::Passed
}

pub(super) fn every_kernel_moves_the_same_bytes(subject: &Subject) -> Verdict {
    let mut field = Field::new(subject, 256 << 10);
    let bench = Bench::new(subject);
    // All kernels, not only those of this processor: a wrong wish must do no harm.
    let kernels = Streaming::ALL.into_iter().map(Kernel::Stream).chain([Kernel::Cached]);
    for kernel in kernels {
        for length in [1, 63, 64, 129, 4096, 16_384, 70_001, 200_000] {
            let (from, to) = (length % 64, GUARD + 5 * (length % 13));
            let copy = Job::copy(field.source(from, length), field.target(to, length), length);
            field.prepare(to, length);
            field.expect_copy(from, to, length);
            bench.carry_out(&Job { kernel, ..copy });
            field.check(to, length);
            if bench.can(Operation::Fill) {
                field.expect_fill(to, length, 0x77);
                let fill = Job::fill(field.target(to, length), length, 0x77);
                bench.carry_out(&Job { kernel, ..fill });
                field.check(to, length);
            }
        }
    }
    field.check_all();
    Verdict::Passed
}
