//! Failures of the driver: the copy takes another route or reports an error; nothing hangs, and no
//! wrong bytes arrive.

use std::time::Duration;

use memferry_engine::testing::cuda_model::CudaFaults;
use memferry_engine::{ExecutionError, Opcode, TransferOutput};

use crate::cuda::common::{
    CudaOperation, CudaUnderTest, KIB, MIB, OK, check, device, host, outcome, pattern, patterned,
    untouched,
};

const SIZE: usize = 5 * MIB + 77;

/// Copies bytes between host memory, to the device, inside it and back, as one descriptor and in
/// chunks.
fn everything_arrives(subject: &CudaUnderTest) {
    for (cut, is_passing) in [(None, false), (Some(300_001), false), (None, true)] {
        let seed = 1 + cut.map_or(0, |_| 1) + u32::from(is_passing) * 2;
        let (source, middle, target) = (patterned(seed, SIZE), untouched(SIZE), untouched(SIZE));
        let (first, second) = (subject.device(SIZE), subject.device(SIZE));
        let ways = [
            (host(&source, 0), host(&middle, 0)),
            (host(&middle, 0), device(&first, 0)),
            (device(&first, 0), device(&second, 0)),
            (device(&second, 0), host(&target, 0)),
        ];
        for (from, to) in ways {
            let job = CudaOperation::copy(from, to, SIZE).cut(cut).transient(is_passing);
            assert_eq!(subject.execute(job), OK);
        }
        check(middle.as_slice(), 0, source.as_slice(), "between host memory");
        check(target.as_slice(), 0, source.as_slice(), "by the device");
        assert_eq!(
            subject.execute(CudaOperation::fill(host(&target, 5), SIZE - 5, 9).cut(cut)),
            OK
        );
        check(&target.as_slice()[5..], 0, &vec![9; SIZE - 5], "a fill");
    }
}

#[test]
fn without_device_memory_to_pass_through_processors_copy_between_ordinary_memory() {
    let faults = CudaFaults { max_device_bytes: Some(16 * MIB), ..CudaFaults::default() };
    let subject = CudaUnderTest::modelled(faults).with_channels(2);
    let (source, target) = (patterned(1, SIZE), untouched(SIZE));
    assert_eq!(subject.execute(CudaOperation::copy(host(&source, 0), host(&target, 0), SIZE)), OK);
    check(target.as_slice(), 0, source.as_slice(), "by the processor");
    assert_eq!(subject.stats().copies, 0, "the device copies nothing");
    everything_arrives(&subject);
    assert_eq!(subject.channels.iter().map(|each| each.statistics().failed).sum::<u64>(), 0);
    // Only moves inside the device need device memory.
    let memory = subject.device(MIB);
    let job = CudaOperation::copy(device(&memory, 0), device(&memory, 100), MIB - 100);
    let error = subject.execute(job.operation(Opcode::Move)).unwrap_err();
    assert!(matches!(error, ExecutionError::Engine { .. }), "{error}");
}

#[test]
fn without_pinned_memory_copies_of_the_device_arrive_all_the_same() {
    let faults = CudaFaults { no_pinned_memory: true, ..CudaFaults::default() };
    let subject = CudaUnderTest::modelled(faults).with_channels(2);
    everything_arrives(&subject);
    let faults = CudaFaults { refuses_registrations: Some(1), ..faults };
    let subject = CudaUnderTest::modelled(faults).with_channels(2);
    everything_arrives(&subject);
    assert_eq!(subject.stats().registrations, 0, "nothing was registered, nothing pinned");
    // Only compares need pinned memory.
    let (memory, same) = (subject.upload(&pattern(1, KIB)), patterned(1, KIB));
    let job =
        CudaOperation::copy(device(&memory, 0), host(&same, 0), KIB).operation(Opcode::Compare);
    let error = subject.execute(job).unwrap_err();
    assert!(matches!(error, ExecutionError::Engine { .. }), "{error}");
}

#[test]
fn everything_arrives_if_registrations_are_refused_always_or_now_and_then() {
    for every in 1..=5 {
        let faults = CudaFaults { refuses_registrations: Some(every), ..CudaFaults::default() };
        let subject = CudaUnderTest::modelled(faults).with_channels(2);
        everything_arrives(&subject);
        let statistics = subject.registrations().statistics();
        let is_counted = statistics.failures > 0 && statistics.last_error.is_some();
        assert!(is_counted, "every {every}th is rejected");
        assert_eq!(subject.stats().registrations == 0, every == 1);
        subject.registrations().cache().invalidate_all();
        let seen = subject.stats();
        assert_eq!(seen.registrations, seen.unregistrations, "no partial registration is left");
    }
}

#[test]
fn a_refused_copy_is_made_up_for_by_the_processor_where_it_reaches() {
    // Rejects the first half of a copy through the device, the second, and later ones.
    for number in 1..=12 {
        for cut in [None, Some(300_001)] {
            let faults = CudaFaults { refused_copy: Some(number), ..CudaFaults::default() };
            let subject = CudaUnderTest::modelled(faults);
            let (source, target) = (patterned(1, SIZE), untouched(SIZE));
            let job = CudaOperation::copy(host(&source, 0), host(&target, 0), SIZE).cut(cut);
            assert_eq!(subject.execute(job), OK, "copy {number} is rejected");
            check(target.as_slice(), 0, source.as_slice(), "retried");
            let filled = untouched(SIZE);
            assert_eq!(
                subject.execute(CudaOperation::fill(host(&filled, 0), SIZE, 7).cut(cut)),
                OK
            );
            check(filled.as_slice(), 0, &vec![7; SIZE], "a fill");
            assert!(subject.stats().copies >= number, "the rejected copy was issued");
            assert!(!subject.engine.is_lost());
        }
    }
}

#[test]
fn a_refused_copy_of_device_memory_is_an_error_and_the_next_is_not() {
    for number in 1..=4 {
        for cut in [None, Some(300_001)] {
            for is_passing in [false, true] {
                let faults = CudaFaults { refused_copy: Some(number), ..CudaFaults::default() };
                let subject = CudaUnderTest::modelled(faults);
                let (source, inside) = (patterned(1, SIZE), subject.device(SIZE));
                let job = CudaOperation::copy(host(&source, 0), device(&inside, 0), SIZE).cut(cut);
                let job = job.transient(is_passing);
                let error = subject.execute(job).unwrap_err();
                let ExecutionError::Engine { done_bytes, .. } = error else { panic!("{error}") };
                assert!(done_bytes < SIZE as u64);
                assert_eq!(subject.execute(job), OK);
                check(&subject.download(&inside), 0, source.as_slice(), "the second attempt");
                assert!(!subject.engine.is_lost());
            }
        }
    }
}

#[test]
fn what_is_told_as_done_before_a_refused_copy_is_done() {
    for number in [2, 4, 6] {
        let faults = CudaFaults { refused_copy: Some(number), ..CudaFaults::default() };
        let subject = CudaUnderTest::modelled(faults);
        let (source, inside) = (patterned(1, SIZE), subject.device(SIZE));
        let job = CudaOperation::copy(host(&source, 0), device(&inside, 0), SIZE);
        let done = subject.execute(job).unwrap_err().done_bytes() as usize;
        assert!(done > 0 && done < SIZE, "{done} bytes are done");
        let found = subject.model().read(inside.address(), SIZE);
        assert!(found[..done] == source.as_slice()[..done]);
    }
}

#[test]
fn a_refused_copy_in_a_comparison_is_an_error_of_that_comparison_alone() {
    for number in 1..=3 {
        // Each compare takes one copy.
        let faults = CudaFaults { refused_copy: Some(number), ..CudaFaults::default() };
        let subject = CudaUnderTest::modelled(faults);
        let (inside, same) = (subject.device(MIB), patterned(1, MIB));
        subject.model().write(inside.address(), same.as_slice());
        let job =
            CudaOperation::copy(host(&same, 0), device(&inside, 0), MIB).operation(Opcode::Compare);
        for round in 1..=3 {
            let found = subject.execute(job);
            assert_eq!(found.is_err(), round == number, "{found:?}");
            assert!(found.is_err() || found == OK, "{found:?}");
        }
    }
}

#[test]
fn a_refused_copy_in_a_move_is_an_error_of_that_move_alone() {
    const LENGTH: usize = 33 * MIB;
    for number in 1..=4 {
        // A move takes four copies: two parts, each to a staging buffer and from it.
        let faults = CudaFaults { refused_copy: Some(number), ..CudaFaults::default() };
        let subject = CudaUnderTest::modelled(faults);
        let mut expected = pattern(1, LENGTH + 77);
        let inside = subject.device(LENGTH + 77);
        subject.model().write(inside.address(), &expected);
        let copies = subject.stats().copies;
        let job = CudaOperation::copy(device(&inside, 0), device(&inside, 77), LENGTH);
        let error = subject.execute(job.operation(Opcode::Move)).unwrap_err();
        assert_eq!(error.done_bytes(), 0, "a move that failed cannot be resumed");
        assert_eq!(subject.stats().copies, copies + number - 1, "issued copies are complete");
        subject.model().write(inside.address(), &expected);
        assert_eq!(subject.execute(job.operation(Opcode::Move)), OK);
        expected.copy_within(..LENGTH, 77);
        check(&subject.download(&inside), 0, &expected, "the next move");
    }
}

#[test]
fn a_fill_that_is_refused_does_not_reach_what_comes_after_it() {
    // The stream from the device has so much work that the rejected fill is late.
    const BEFORE: usize = 8;
    const AFTER: usize = 6;
    const EACH: usize = 64 * KIB;
    let faults = CudaFaults {
        refused_copy: Some(BEFORE as u64 + 2),
        delay: Duration::from_millis(4),
        ..CudaFaults::default()
    };
    let subject = CudaUnderTest::modelled(faults);
    let inside = subject.upload(&pattern(1, EACH));
    let (out, filled) = (untouched(BEFORE * EACH), untouched(EACH));
    let (source, target) = (patterned(2, AFTER * EACH), untouched(AFTER * EACH));
    let before = |at| CudaOperation::copy(device(&inside, 0), host(&out, at * EACH), EACH);
    let after = |at| CudaOperation::copy(host(&source, at * EACH), host(&target, at * EACH), EACH);
    let jobs = (0..BEFORE)
        .map(before)
        .chain([CudaOperation::fill(host(&filled, 0), EACH, 0xEE)])
        .chain((0..AFTER).map(after));
    let completions: Vec<_> = jobs.map(|job| subject.start(job)).collect();
    assert!(completions.iter().all(|each| outcome(each) == OK));
    check(filled.as_slice(), 0, &[0xEE; EACH], "the fill itself, by the processor");
    check(target.as_slice(), 0, source.as_slice(), "what comes after it");
    assert_eq!(subject.channels[0].statistics().failed, 1, "the fill was rejected");
}

#[test]
fn comparisons_beside_copies_that_need_the_same_ring_end() {
    let faults = CudaFaults { delay: Duration::from_micros(300), ..CudaFaults::default() };
    let subject = CudaUnderTest::modelled(faults).with_channels(2);
    let (bytes, same) = (pattern(1, 3 * MIB), patterned(1, 3 * MIB));
    // Each copy has a target of its own: two channels may make two of them at once.
    let (inside, others) = (subject.upload(&bytes), [(); 5].map(|()| subject.device(3 * MIB)));
    let completions: Vec<_> = (0..10)
        .map(|index| {
            let cut = (index % 3 == 0).then_some(256 * KIB);
            let other = device(&others[index / 2], 0);
            let copy = CudaOperation::copy(host(&same, 0), other, 3 * MIB).transient(true);
            let compare = CudaOperation::copy(device(&inside, 0), host(&same, 0), 3 * MIB);
            let compare = compare.operation(Opcode::Compare);
            subject.start(if index % 2 == 0 { copy } else { compare }.cut(cut))
        })
        .collect();
    for completion in completions {
        assert_eq!(outcome(&completion), Ok(TransferOutput::default()));
    }
    for other in &others {
        check(&subject.download(other), 0, &bytes, "the copies");
    }
}
