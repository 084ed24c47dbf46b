//! Copies that the calling thread makes itself.

use memferry_engine::contract::{CopyDirection, DEVICE_STREAM_MARKS};
use memferry_engine::testing::cuda_model::CudaFaults;
use memferry_engine::{Engine, ExecutionError};

use crate::cuda::common::{
    CudaUnderTest, KIB, MIB, check, pattern, patterned, subjects, untouched,
};

const SIZES: [usize; 8] = [1, 4097, 64 * KIB, 256 * KIB, 256 * KIB + 1, MIB, MIB + 4099, 2 * MIB];

#[test]
fn short_copies_arrive_whole_in_both_directions() {
    for subject in subjects() {
        for size in SIZES {
            let (source, target) = (patterned(3, size + 7), untouched(size + 100));
            let memory = subject.device(size);
            let (from, to) = (source.as_ptr() as u64 + 7, target.as_ptr() as u64 + 13);
            // SAFETY: the ranges have this length and outlive the calls.
            let copied = unsafe {
                let engine = &subject.engine;
                let inward = CopyDirection::HOST_TO_DEVICE;
                let outward = CopyDirection::DEVICE_TO_HOST;
                [
                    engine.copy_by_caller(inward, from, memory.address(), size),
                    engine.copy_by_caller(outward, memory.address(), to, size),
                ]
            };
            assert_eq!(copied, [Some(Ok(())), Some(Ok(()))], "{size} bytes on {}", subject.name);
            let what = format!("{size} bytes by the caller on {}", subject.name);
            check(target.as_slice(), 13, &source.as_slice()[7..], &what);
        }
    }
}

#[test]
fn long_copies_and_memory_that_is_not_there_are_left_to_channels() {
    let subject = CudaUnderTest::modelled(CudaFaults::default());
    let (memory, source) = (subject.device(5 * MIB), patterned(1, 5 * MIB));
    let (direction, address) = (CopyDirection::HOST_TO_DEVICE, source.as_ptr() as u64);
    // SAFETY: the ranges have this length and outlive the call; the second is refused before it is
    // read.
    let refused = unsafe {
        [
            subject.engine.copy_by_caller(direction, address, memory.address(), 5 * MIB),
            subject.engine.copy_by_caller(direction, 4096, memory.address(), 100),
            subject.engine.copy_by_caller(CopyDirection::HOST_TO_HOST, address, address, 100),
        ]
    };
    assert_eq!(refused, [None, None, None]);
}

#[test]
fn a_lost_device_fails_a_copy_of_the_caller_and_is_asked_no_more() {
    let faults = CudaFaults { lost_at_copy: Some(2), ..CudaFaults::default() };
    let subject = CudaUnderTest::modelled(faults);
    let (memory, target) = (subject.device(MIB), untouched(MIB));
    let (direction, address) = (CopyDirection::DEVICE_TO_HOST, target.as_ptr() as u64);
    // SAFETY: the ranges have this length and outlive the calls.
    let copy =
        || unsafe { subject.engine.copy_by_caller(direction, memory.address(), address, MIB) };
    let failed = copy();
    assert!(matches!(failed, Some(Err(ExecutionError::Engine { .. }))), "{failed:?}");
    assert!(subject.engine.is_lost());
    assert_eq!(copy(), None);
}

#[test]
fn without_pinned_memory_the_caller_leaves_copies_from_the_device_to_channels() {
    let faults = CudaFaults { no_pinned_memory: true, ..CudaFaults::default() };
    let subject = CudaUnderTest::modelled(faults);
    let (memory, target) = (subject.device(KIB), untouched(KIB));
    let (direction, address) = (CopyDirection::DEVICE_TO_HOST, target.as_ptr() as u64);
    // SAFETY: the ranges have this length and outlive the call.
    let copied =
        unsafe { subject.engine.copy_by_caller(direction, memory.address(), address, KIB) };
    assert_eq!(copied, None);
}

#[test]
fn registered_memory_is_copied_straight() {
    let subject = CudaUnderTest::modelled(CudaFaults::default());
    let (source, memory) = (patterned(5, MIB), subject.device(MIB));
    // SAFETY: the memory outlives the registration.
    let lease = unsafe { subject.registrations().register(source.as_ptr() as usize, MIB) };
    let before = subject.stats().copies;
    let (direction, address) = (CopyDirection::HOST_TO_DEVICE, source.as_ptr() as u64);
    // SAFETY: the ranges have this length and outlive the call.
    let copied =
        unsafe { subject.engine.copy_by_caller(direction, address, memory.address(), MIB) };
    assert_eq!(copied, Some(Ok(())));
    assert_eq!(subject.stats().copies, before + 1, "one copy, not one for each staging buffer");
    check(&subject.download(&memory), 0, source.as_slice(), "registered memory");
    drop(lease);
}

#[test]
fn many_threads_copy_by_themselves_at_once() {
    let subject = CudaUnderTest::modelled(CudaFaults::default());
    std::thread::scope(|scope| {
        for seed in 0..6 {
            let subject = &subject;
            scope.spawn(move || {
                let (bytes, memory) = (pattern(seed, 700 * KIB), subject.device(700 * KIB));
                let target = untouched(700 * KIB);
                for _ in 0..10 {
                    let (from, to) = (bytes.as_ptr() as u64, target.as_ptr() as u64);
                    let (inward, outward) =
                        (CopyDirection::HOST_TO_DEVICE, CopyDirection::DEVICE_TO_HOST);
                    let engine = &subject.engine;
                    // SAFETY: the ranges have this length and outlive the calls.
                    let copied = unsafe {
                        [
                            engine.copy_by_caller(inward, from, memory.address(), bytes.len()),
                            engine.copy_by_caller(outward, memory.address(), to, bytes.len()),
                        ]
                    };
                    assert_eq!(copied, [Some(Ok(())), Some(Ok(()))]);
                    check(target.as_slice(), 0, &bytes, "by one of many threads");
                }
            });
        }
    });
}

#[test]
fn a_stream_of_a_thread_copies_pinned_memory_in_order() {
    let subject = CudaUnderTest::modelled(CudaFaults::default());
    let (source, memory) = (patterned(9, 4 * MIB), subject.device(4 * MIB));
    // SAFETY: the memory outlives the registration and the stream.
    let lease = unsafe { subject.registrations().register(source.as_ptr() as usize, 4 * MIB) };
    let mut stream = subject.engine.open_stream().expect("a stream");
    for part in 0..64 {
        let (mark, start) = (part % DEVICE_STREAM_MARKS, part * 64 * KIB);
        stream.wait(mark).unwrap();
        // SAFETY: the part lies inside the registered memory and the target, which both outlive
        // the stream.
        unsafe {
            let from = source.as_ptr().wrapping_add(start);
            stream.copy_to_device(from, memory.address() + start as u64, 64 * KIB).unwrap();
        }
        stream.mark(mark).unwrap();
    }
    drop(stream);
    check(&subject.download(&memory), 0, source.as_slice(), "by a stream that was dropped");
    drop(lease);
}
