//! Copies in every direction, at every size and offset, as one descriptor and in chunks, registered
//! and transient.

use crate::cuda::common::{
    CudaOperation, CudaUnderTest, KIB, MIB, OK, check, device, host, outcome, patterned, subjects,
    untouched,
};

/// Sizes around pages, staging buffers and the maximum copy.
const SIZES: [usize; 12] = [
    1,
    63,
    4096,
    4097,
    MIB - 1,
    MIB,
    MIB + 1,
    3 * MIB + 17,
    16 * MIB - 1,
    16 * MIB,
    16 * MIB + 1,
    37 * MIB + 4099,
];

/// Offsets of the source, of two targets in the device, and of the last target.
const OFFSETS: [[usize; 4]; 2] = [[0; 4], [4095, 1, 77, 13]];

/// Copies to the device, inside it and back, and checks every step.
fn round_trip(
    subject: &CudaUnderTest,
    size: usize,
    offsets: [usize; 4],
    finish: impl Fn(CudaOperation) -> CudaOperation,
) {
    let [at_source, at_first, at_second, at_target] = offsets;
    let source = patterned(size as u32, at_source + size);
    let first = subject.device(at_first + size + 5);
    let second = subject.device(at_second + size + 5);
    let target = untouched(at_target + size + 5);
    let ways = [
        (host(&source, at_source), device(&first, at_first)),
        (device(&first, at_first), device(&second, at_second)),
        (device(&second, at_second), host(&target, at_target)),
    ];
    let what = format!("{size} bytes at {offsets:?} over {}", subject.name);
    for (from, to) in ways {
        assert_eq!(subject.execute(finish(CudaOperation::copy(from, to, size))), OK, "{what}");
    }
    let expected = &source.as_slice()[at_source..];
    check(&subject.download(&first), at_first, expected, &what);
    check(&subject.download(&second), at_second, expected, &what);
    check(target.as_slice(), at_target, expected, &what);
}

#[test]
fn bytes_come_back_from_the_device_unchanged_whatever_their_number_and_place() {
    for subject in subjects() {
        for size in SIZES {
            for offsets in OFFSETS {
                round_trip(&subject, size, offsets, |job| job);
            }
        }
    }
}

#[test]
fn bytes_that_pass_by_once_come_back_unchanged_and_leave_nothing_registered() {
    for subject in subjects() {
        for size in SIZES {
            for offsets in OFFSETS {
                round_trip(&subject, size, offsets, |job| job.transient(true));
            }
        }
    }
    let subject = CudaUnderTest::modelled(Default::default());
    round_trip(&subject, 3 * MIB + 17, OFFSETS[1], |job| job.transient(true));
    assert_eq!(subject.stats().registrations, 0);
    assert!(subject.stats().copies > 0);
}

#[test]
fn bytes_of_a_transfer_in_chunks_come_back_unchanged_by_one_channel_or_several() {
    // Smaller than a staging buffer, across its borders, and longer than any copy.
    let chunks = [4096, 300_001, 5 * MIB + 1, 32 * MIB];
    for count in [1, 3] {
        for subject in subjects() {
            let subject = subject.with_channels(count);
            for (chunk, is_passing) in chunks.into_iter().flat_map(|c| [(c, false), (c, true)]) {
                for size in [1, 4097, 3 * MIB + 17, 33 * MIB + 4099] {
                    // Tens of thousands of chunks show nothing that a thousand do not.
                    if size > chunk * 1024 {
                        continue;
                    }
                    let cut = |job: CudaOperation| job.cut(Some(chunk)).transient(is_passing);
                    round_trip(&subject, size, OFFSETS[1], cut);
                }
            }
        }
    }
}

/// Copies between host memory, and checks the result.
fn host_to_host(
    subject: &CudaUnderTest,
    size: usize,
    offsets: (usize, usize),
    job: impl Fn(CudaOperation) -> CudaOperation,
) {
    let (source, target) = (patterned(7, offsets.0 + size), untouched(offsets.1 + size + 5));
    let copy = CudaOperation::copy(host(&source, offsets.0), host(&target, offsets.1), size);
    let what = format!("{size} bytes at {offsets:?} over {}", subject.name);
    assert_eq!(subject.execute(job(copy)), OK, "{what}");
    check(target.as_slice(), offsets.1, &source.as_slice()[offsets.0..], &what);
}

#[test]
fn bytes_between_ordinary_memory_arrive_through_the_device() {
    for subject in subjects() {
        for size in SIZES {
            for offsets in [(0, 0), (4095, 13)] {
                for is_passing in [false, true] {
                    host_to_host(&subject, size, offsets, |job| job.transient(is_passing));
                }
            }
        }
    }
    let subject = CudaUnderTest::modelled(Default::default());
    host_to_host(&subject, 3 * MIB + 17, (4095, 13), |job| job);
    assert!(subject.stats().copies >= 2, "they go through the device");
}

#[test]
fn bytes_between_ordinary_memory_arrive_in_chunks_by_one_channel_or_several() {
    for count in [1, 3] {
        for subject in subjects() {
            let subject = subject.with_channels(count);
            for chunk in [64 * KIB, 300_001, 32 * MIB] {
                for is_passing in [false, true] {
                    let cut = |job: CudaOperation| job.cut(Some(chunk)).transient(is_passing);
                    host_to_host(&subject, 37 * MIB + 4099, (4095, 13), cut);
                }
            }
        }
    }
}

#[test]
fn source_and_target_may_share_a_page() {
    for subject in subjects() {
        for size in [100, 2 * MIB + 100, 20 * MIB + 100] {
            let mut memory = patterned(3, 2 * size);
            let expected = memory.as_slice()[..size].to_vec();
            memory.as_mut_slice()[size..].fill(0);
            let job = CudaOperation::copy(host(&memory, 0), host(&memory, size), size);
            assert_eq!(subject.execute(job), OK);
            assert!(memory.as_slice()[..size] == expected, "the source of {size} bytes is whole");
            assert!(memory.as_slice()[size..] == expected, "{size} bytes on {}", subject.name);
        }
    }
}

#[test]
fn copies_of_all_directions_may_be_in_flight_at_once() {
    const EACH: usize = 2 * MIB + 333;
    const ROUNDS: usize = 6;
    for subject in subjects() {
        let subject = subject.with_channels(2);
        let sources = patterned(1, ROUNDS * EACH);
        let inside = subject.upload(patterned(2, ROUNDS * EACH).as_slice());
        let (inward, within) = (subject.device(ROUNDS * EACH), subject.device(ROUNDS * EACH));
        let (outward, through) = (untouched(ROUNDS * EACH), untouched(ROUNDS * EACH));
        let completions: Vec<_> = (0..ROUNDS)
            .flat_map(|round| {
                let at = round * EACH;
                [
                    (host(&sources, at), device(&inward, at)),
                    (device(&inside, at), host(&outward, at)),
                    (host(&sources, at), host(&through, at)),
                    (device(&inside, at), device(&within, at)),
                ]
                .map(|(from, to)| (from, to, round))
            })
            .map(|(from, to, round)| {
                let chunks = (round % 2 == 1).then_some(256 * KIB);
                subject.start(
                    CudaOperation::copy(from, to, EACH).transient(round % 3 == 0).cut(chunks),
                )
            })
            .collect();
        assert!(completions.iter().all(|each| outcome(each) == OK));
        let (first, second) = (patterned(1, ROUNDS * EACH), patterned(2, ROUNDS * EACH));
        check(&subject.download(&inward), 0, first.as_slice(), "into the device");
        check(through.as_slice(), 0, first.as_slice(), "through the device");
        check(outward.as_slice(), 0, second.as_slice(), "out of the device");
        check(&subject.download(&within), 0, second.as_slice(), "inside the device");
    }
}
