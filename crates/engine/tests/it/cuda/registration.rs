//! Registered memory: reused, shared, limited, and left alone if it belongs to another user.

use std::time::Duration;

use memferry_engine::MemoryKind;
use memferry_engine::contract::PinCacheLimits;
use memferry_engine::testing::cuda_model::CudaFaults;
use memferry_sys::cuda::CudaDriver;

use crate::cuda::common::{
    CudaOperation, CudaUnderTest, KIB, MIB, MemoryAddress, OK, check, device, host, outcome,
    pattern, patterned, subjects, untouched,
};

#[test]
fn memory_that_was_used_before_is_found_registered() {
    const SIZE: usize = 5 * MIB + 100;
    let subject = CudaUnderTest::modelled(CudaFaults::default());
    let (mut source, target, inside) = (untouched(SIZE), untouched(SIZE), subject.device(SIZE));
    let fresh = subject.stats().registrations;
    let mut after = Vec::new();
    for seed in 1..=3 {
        source.as_mut_slice().copy_from_slice(&pattern(seed, SIZE));
        let ways = [
            (host(&source, 0), device(&inside, 0)),
            (device(&inside, 0), host(&target, 0)),
            (host(&source, 0), host(&target, 0)),
        ];
        for (from, to) in ways {
            assert_eq!(subject.execute(CudaOperation::copy(from, to, SIZE)), OK);
            check(&subject.download(&inside), 0, &pattern(seed, SIZE), "the latest bytes");
        }
        check(target.as_slice(), 0, &pattern(seed, SIZE), "the latest bytes");
        after.push((subject.stats(), subject.registrations().cache().statistics()));
    }
    let [first, second, third] = [0, 1, 2].map(|index: usize| after[index]);
    assert!(first.0.registrations > fresh);
    if !subject.caches_registrations() {
        assert_eq!(third.0.registrations, third.0.unregistrations, "nothing is cached");
        let why = "nothing stays registered";
        return memferry_testing::skip(memferry_testing::Requirement::Userfaultfd, why);
    }
    assert_eq!(second.0.registrations, first.0.registrations, "a cached registration is reused");
    assert_eq!(third.0.registrations, first.0.registrations);
    assert_eq!((third.0.unregistrations, third.1.evictions), (0, 0));
    assert!(first.1.hits < second.1.hits && second.1.hits < third.1.hits);
    assert_eq!((second.1.misses, third.1.misses), (first.1.misses, first.1.misses));
    assert!(third.1.bytes_cached >= 2 * SIZE as u64);
    // After an invalidation it is registered anew.
    subject.registrations().invalidate(source.as_ptr() as usize, SIZE);
    subject.registrations().invalidate(target.as_ptr() as usize, SIZE);
    let forgotten = subject.stats();
    assert_eq!(forgotten.registrations, forgotten.unregistrations);
    assert_eq!(subject.registrations().cache().statistics().bytes_pinned, 0);
    assert_eq!(
        subject.execute(CudaOperation::copy(host(&source, 0), device(&inside, 0), SIZE)),
        OK
    );
    assert!(subject.stats().registrations > forgotten.registrations);
}

#[test]
fn memory_that_was_read_is_not_registered_a_second_time_to_be_written() {
    let subject = CudaUnderTest::modelled(CudaFaults::default());
    let (memory, inside) = (patterned(1, 4 * MIB), subject.device(4 * MIB));
    let other = subject.upload(&pattern(2, 4 * MIB));
    let registrations = || subject.stats().registrations;
    assert_eq!(
        subject.execute(CudaOperation::copy(host(&memory, 0), device(&inside, 0), 4 * MIB)),
        OK
    );
    let read = registrations();
    assert!(read > 0);
    assert_eq!(
        subject.execute(CudaOperation::copy(device(&other, 0), host(&memory, 0), 4 * MIB)),
        OK
    );
    check(memory.as_slice(), 0, &pattern(2, 4 * MIB), "the written bytes");
    assert!(!subject.caches_registrations() || registrations() == read);
}

#[test]
fn overlapping_sources_may_be_registered_and_in_flight_at_once() {
    let slow = CudaFaults { delay: Duration::from_millis(1), ..CudaFaults::default() };
    for subject in subjects().into_iter().chain([CudaUnderTest::modelled(slow)]) {
        let subject = subject.with_channels(2);
        for round in 0..4 {
            let source = patterned(round, 12 * MIB);
            let (first, second) = (subject.device(8 * MIB), subject.device(8 * MIB));
            let (third, fourth) = (untouched(8 * MIB), untouched(8 * MIB));
            let jobs = [
                CudaOperation::copy(host(&source, 0), device(&first, 0), 8 * MIB),
                CudaOperation::copy(host(&source, 4 * MIB), device(&second, 0), 8 * MIB)
                    .cut(Some(MIB)),
                CudaOperation::copy(host(&source, 2 * MIB + 5), host(&third, 0), 8 * MIB),
                CudaOperation::copy(host(&source, 3 * MIB), host(&fourth, 0), 8 * MIB)
                    .cut(Some(700_001)),
            ];
            let completions = jobs.map(|job| subject.start(job));
            assert!(completions.iter().all(|each| outcome(each) == OK), "{}", subject.name);
            let bytes = source.as_slice();
            check(&subject.download(&first), 0, &bytes[..8 * MIB], "the first");
            check(&subject.download(&second), 0, &bytes[4 * MIB..], "the second");
            check(third.as_slice(), 0, &bytes[2 * MIB + 5..10 * MIB + 5], "the third");
            check(fourth.as_slice(), 0, &bytes[3 * MIB..11 * MIB], "the fourth");
        }
    }
}

#[test]
fn targets_that_share_a_page_may_be_in_flight_at_once() {
    const EACH: usize = 300 * KIB + 100;
    for subject in subjects() {
        let subject = subject.with_channels(3);
        let inside = subject.upload(&pattern(5, 10 * EACH));
        for _ in 0..4 {
            let target = untouched(10 * EACH);
            let begin = |at: usize, cut| {
                let at = at * EACH;
                let job = CudaOperation::copy(device(&inside, at), host(&target, at), EACH);
                subject.start(job.cut(cut))
            };
            let completions = [0, 2, 4, 6, 8, 1, 3, 5, 7, 9].map(|at| begin(at, Some(70_001)));
            assert!(completions.iter().all(|each| outcome(each) == OK));
            check(target.as_slice(), 0, &pattern(5, 10 * EACH), subject.name);
        }
    }
}

#[test]
fn an_engine_that_may_keep_little_or_nothing_registered_copies_all_the_same() {
    let limits = [(0, 0), (MIB, 1024), (1 << 30, 1), (6 * MIB, 3)];
    for (most_bytes, most_entries) in limits {
        let slow = CudaFaults { delay: Duration::from_micros(200), ..CudaFaults::default() };
        let subject = CudaUnderTest::limited(
            slow,
            PinCacheLimits { max_bytes: most_bytes, max_entries: most_entries },
        )
        .with_channels(2);
        let (first, second) = (patterned(1, 9 * MIB + 7), patterned(2, 9 * MIB + 7));
        let inside = [(); 2].map(|()| subject.device(9 * MIB + 7));
        let targets = [(); 2].map(|()| untouched(9 * MIB + 7));
        for _ in 0..3 {
            for stage in 0..2 {
                let completions: Vec<_> = [&first, &second]
                    .into_iter()
                    .enumerate()
                    .map(|(index, source)| {
                        let (device, target) = (device(&inside[index], 0), &targets[index]);
                        let ways = [(host(source, 0), device), (device, host(target, 0))];
                        let (from, to) = ways[stage];
                        subject.start(CudaOperation::copy(from, to, 9 * MIB + 7).cut(Some(MIB)))
                    })
                    .collect();
                assert!(completions.iter().all(|each| outcome(each) == OK));
            }
        }
        check(targets[0].as_slice(), 0, first.as_slice(), "the first");
        check(targets[1].as_slice(), 0, second.as_slice(), "the second");
        let kept = subject.registrations().cache().statistics();
        assert!(kept.bytes_cached <= most_bytes as u64 && kept.entries <= most_entries as u64);
        let seen = subject.stats();
        assert!(seen.registrations > 0);
        if most_entries == 0 || !subject.caches_registrations() {
            assert_eq!(seen.registrations, seen.unregistrations);
        }
    }
}

#[test]
fn memory_that_the_application_registered_is_used_and_left_registered() {
    let subject = CudaUnderTest::modelled(CudaFaults::default());
    let (source, inside) = (patterned(1, 4 * MIB), subject.device(4 * MIB));
    let address = source.as_ptr() as usize;
    subject.model().register(address, 4 * MIB, false).unwrap();
    assert_eq!(
        subject.execute(CudaOperation::copy(host(&source, 0), device(&inside, 0), 4 * MIB)),
        OK
    );
    check(&subject.download(&inside), 0, source.as_slice(), "registered by another user");
    subject.registrations().invalidate(address, 4 * MIB);
    let seen = subject.stats();
    assert_eq!((seen.registrations, seen.unregistrations), (1, 0));
    // SAFETY: every copy is complete.
    let unregistered = unsafe { subject.model().unregister(address) };
    unregistered.expect("it is the application's to unregister");
}

#[test]
fn memory_that_nobody_registered_is_never_registered_where_others_use_the_device() {
    const SIZE: usize = 5 * MIB + 100;
    let subject = CudaUnderTest::shared(CudaFaults::default()).with_channels(2);
    let (source, target, inside) = (patterned(1, SIZE), untouched(SIZE), subject.device(SIZE));
    for cut in [None, Some(MIB)] {
        let ways = [
            (host(&source, 0), device(&inside, 0)),
            (device(&inside, 0), host(&target, 0)),
            (host(&source, 0), host(&target, 0)),
        ];
        for (from, to) in ways.into_iter().cycle().take(9) {
            assert_eq!(subject.execute(CudaOperation::copy(from, to, SIZE).cut(cut)), OK);
        }
        assert_eq!(subject.execute(CudaOperation::fill(host(&target, 0), 7, 1).cut(cut)), OK);
    }
    check(&subject.download(&inside), 0, source.as_slice(), "into the device");
    assert_eq!(
        (subject.stats().registrations, subject.registrations().statistics().failures),
        (0, 0)
    );
}

#[test]
fn what_its_owner_registers_is_one_piece_of_exactly_its_bytes_and_is_copied_straight() {
    const SIZE: usize = 40 * MIB + 77;
    for subject in [
        CudaUnderTest::shared(CudaFaults::default()),
        CudaUnderTest::modelled(CudaFaults::default()),
    ] {
        let (memory, inside) = (patterned(1, SIZE + 300), subject.device(SIZE));
        let (address, registrations) = (memory.as_ptr() as usize + 99, subject.registrations());
        // SAFETY: the memory outlives its registration.
        assert!(unsafe { registrations.register(address, SIZE) }.unwrap().is_none());
        assert_eq!(subject.model().registered(), [(address, SIZE)]);
        let job = CudaOperation::copy(host(&memory, 99), device(&inside, 0), SIZE);
        assert_eq!(subject.execute(job), OK);
        let expected = &memory.as_slice()[99..99 + SIZE];
        check(&subject.download(&inside), 0, expected, subject.name);
        assert_eq!(subject.model().registered(), [(address, SIZE)], "nothing outside it");
        registrations.unregister(address, SIZE);
        assert_eq!(subject.model().registered(), []);
    }
}

#[test]
fn a_region_that_is_unregistered_while_it_is_copied_stays_registered_until_the_end() {
    const SIZE: usize = 16 * MIB;
    let slow = CudaFaults { delay: Duration::from_millis(2), ..CudaFaults::default() };
    let subject = CudaUnderTest::shared(slow);
    let (memory, inside) = (patterned(1, SIZE), subject.device(SIZE));
    let (address, registrations) = (memory.as_ptr() as usize, subject.registrations());
    for _ in 0..4 {
        // SAFETY: the memory outlives its registration, and the copy.
        unsafe { registrations.register(address, SIZE) }.unwrap();
        let copy = subject.start(CudaOperation::copy(host(&memory, 0), device(&inside, 0), SIZE));
        registrations.unregister(address, SIZE);
        assert_eq!(outcome(&copy), OK);
        check(&subject.download(&inside), 0, memory.as_slice(), "into the device");
        assert_eq!(subject.model().registered(), []);
    }
}

#[test]
fn memory_that_others_have_registered_is_used_as_it_is_where_others_use_the_device() {
    const SIZE: usize = 4 * MIB;
    let mut subject = CudaUnderTest::shared(CudaFaults::default());
    // The driver rejects a copy across the edge of a foreign registration, and the copy takes
    // another route.
    subject.allows_unregistered_copies = true;
    let (memory, inside) = (patterned(1, 2 * SIZE), subject.device(2 * SIZE));
    let address = memory.as_ptr() as usize;
    subject.model().register(address, SIZE, false).unwrap();
    subject.model().register(address + SIZE, SIZE, false).unwrap();
    for (at, size) in [(0, SIZE), (SIZE, SIZE), (0, 2 * SIZE), (SIZE / 2, SIZE)] {
        let job = CudaOperation::copy(host(&memory, at), device(&inside, at), size);
        assert_eq!(subject.execute(job), OK);
    }
    check(&subject.download(&inside), 0, memory.as_slice(), "registered by another user");
    assert_eq!(subject.stats().registrations, 2);
    // SAFETY: the memory outlives its registration.
    let registered = unsafe { subject.registrations().register(address, SIZE) };
    assert!(registered.is_ok(), "it is registered already");
    subject.registrations().unregister(address, SIZE);
    assert_eq!(subject.model().registered(), [(address, SIZE), (address + SIZE, SIZE)]);
}

#[test]
fn memory_across_the_edges_of_regions_is_copied_without_a_ring_too() {
    const SIZE: usize = 3 * MIB + 11;
    let subject =
        CudaUnderTest::shared(CudaFaults { no_pinned_memory: true, ..CudaFaults::default() });
    let (source, target) = (patterned(1, SIZE), untouched(SIZE));
    let inside = subject.device(SIZE);
    for memory in [&source, &target] {
        for (at, bytes) in [(MIB + 7, 5_000), (MIB + 5_007, 1), (2 * MIB, MIB)] {
            let address = memory.as_ptr() as usize + at;
            // SAFETY: the memory outlives the copies of it.
            assert!(unsafe { subject.registrations().register(address, bytes) }.unwrap().is_none());
        }
    }
    let passing = |job: CudaOperation| subject.execute(job.transient(true));
    assert_eq!(passing(CudaOperation::copy(host(&source, 0), device(&inside, 0), SIZE)), OK);
    assert_eq!(passing(CudaOperation::copy(device(&inside, 0), host(&target, 0), SIZE)), OK);
    check(target.as_slice(), 0, source.as_slice(), "to the device and back");
    let nowhere = MemoryAddress { address: 1 << 44, kind: MemoryKind::Host };
    assert!(passing(CudaOperation::copy(nowhere, device(&inside, 0), SIZE)).is_err());
}

#[test]
fn memory_of_which_the_application_registered_a_part_is_copied_in_other_ways() {
    // The first half of a page range, its two ends with a hole between them, and its middle.
    #[allow(clippy::single_range_in_vec_init)]
    for parts in [&[0..8][..], &[0..2, 14..16], &[5..7]] {
        let mut subject = CudaUnderTest::modelled(CudaFaults::default());
        subject.allows_unregistered_copies = true;
        let size = 16 * memferry_sys::pages::page_bytes();
        let (memory, inside, target) = (patterned(1, size), subject.device(size), untouched(size));
        for pages in [&memory, &target] {
            for part in parts {
                let page = size / 16;
                let start = pages.as_ptr() as usize + part.start * page;
                subject.model().register(start, part.len() * page, false).unwrap();
            }
        }
        let ways = [
            (host(&memory, 0), device(&inside, 0)),
            (device(&inside, 0), host(&target, 0)),
            (host(&memory, 0), host(&target, 0)),
        ];
        for (from, to) in ways {
            assert_eq!(subject.execute(CudaOperation::copy(from, to, size)), OK, "{parts:?}");
        }
        check(&subject.download(&inside), 0, memory.as_slice(), "into the device");
        check(target.as_slice(), 0, memory.as_slice(), "out of the device");
    }
}
