//! The lifetime of channels, engines and device memory: everything in flight completes, and
//! everything is freed.

use std::sync::Arc;
use std::time::Duration;

use memferry_engine::testing::conformance::CASE_TIMEOUT;
use memferry_engine::testing::cuda_model::CudaFaults;
use memferry_engine::{
    ChannelOptions, Completion, Descriptor, ExecutionError, MemoryKind, Opcode, SubmitError,
};

use crate::cuda::common::{
    CudaOperation, CudaUnderTest, KIB, MIB, OK, UNTOUCHED, check, device, host, outcome, pattern,
    patterned, subjects, untouched, wait_until,
};

/// A slow device, so that copies are in flight at the end.
fn slow() -> CudaFaults {
    CudaFaults { delay: Duration::from_millis(10), ..CudaFaults::default() }
}

#[test]
fn a_channel_dropped_with_work_in_flight_finishes_it() {
    const EACH: usize = 3 * MIB + 5;
    for is_passing in [false, true] {
        let mut subject = CudaUnderTest::modelled(slow());
        let source = patterned(1, EACH);
        let (inside, through) = (subject.device(EACH), untouched(EACH));
        let (loaded, back) = (subject.upload(source.as_slice()), untouched(EACH));
        let jobs = [
            (host(&source, 0), device(&inside, 0)),
            (host(&source, 0), host(&through, 0)),
            (device(&loaded, 0), host(&back, 0)),
        ];
        subject.model().hold_after(Some(subject.stats().copies));
        let completions = jobs.map(|(from, to)| {
            subject.start(CudaOperation::copy(from, to, EACH).transient(is_passing).cut(None))
        });
        assert!(!completions[2].is_done(), "work is in flight");
        subject.model().hold_after(None);
        subject.channels.clear();
        for completion in &completions {
            assert_eq!(completion.outcome(), Some(OK), "a drop leaves nothing in flight");
        }
        check(through.as_slice(), 0, source.as_slice(), "through the device");
        check(back.as_slice(), 0, source.as_slice(), "out of the device");
        assert!(subject.model().read(inside.address(), EACH) == source.as_slice());
    }
}

/// A descriptor of length 0.
fn empty(completion: &Arc<Completion>) -> Descriptor {
    // SAFETY: no byte is accessed, and nothing else reports to the completion.
    unsafe { Descriptor::new(Opcode::Copy, 0, 0, 0).completes(completion.clone()) }
}

#[test]
fn a_closed_channel_takes_nothing_more_and_finishes_what_it_has() {
    let subject = CudaUnderTest::modelled(slow());
    let (source, inside) = (patterned(1, MIB), subject.device(MIB));
    let completion = subject.start(CudaOperation::copy(host(&source, 0), device(&inside, 0), MIB));
    let channel = &subject.channels[0];
    channel.close();
    let mut batch = [Some(empty(&Arc::new(Completion::whole())))];
    assert_eq!(channel.submit(&mut batch), Err(SubmitError::Closed));
    assert_eq!(outcome(&completion), OK);
    assert!(subject.model().read(inside.address(), MIB) == source.as_slice());
}

#[test]
fn channels_and_device_memory_outlive_their_engine() {
    let mut subject = CudaUnderTest::modelled(slow());
    let (source, target) = (patterned(1, 2 * MIB), untouched(2 * MIB));
    let inside = subject.device(2 * MIB);
    let other = CudaUnderTest::modelled(CudaFaults::default());
    drop(std::mem::replace(&mut subject.engine, other.engine.clone()));
    let jobs = [(host(&source, 0), device(&inside, 0)), (device(&inside, 0), host(&target, 0))];
    for (from, to) in jobs {
        assert_eq!(subject.execute(CudaOperation::copy(from, to, 2 * MIB)), OK);
    }
    check(target.as_slice(), 0, source.as_slice(), "after the engine is dropped");
    assert!(subject.stats().registrations > 0);
    drop((inside, std::mem::take(&mut subject.channels)));
    let seen = subject.stats();
    assert_eq!(seen.registrations, seen.unregistrations, "nothing stays registered");
}

#[test]
fn device_memory_is_counted_and_given_back() {
    let mut subject = CudaUnderTest::modelled(CudaFaults::default());
    let (free, total) = subject.engine.memory_bytes().unwrap();
    assert_eq!(free, total);
    let memory = subject.engine.allocate(5 * MIB).unwrap();
    assert_eq!((memory.len(), memory.is_empty()), (5 * MIB, false));
    assert_eq!(memory.as_ptr() as u64, memory.address());
    assert_eq!(subject.engine.memory_bytes().unwrap(), (free - 5 * MIB, total));
    let (source, target) = (patterned(1, MIB), untouched(MIB));
    assert_eq!(subject.execute(CudaOperation::copy(host(&source, 0), host(&target, 0), MIB)), OK);
    let bytes = subject.stats().device_bytes;
    assert!(bytes > 5 << 20, "a channel has a staging ring on the device");
    drop(memory);
    assert_eq!(subject.stats().device_bytes, bytes - (5 << 20));
    subject.channels.clear();
    assert_eq!(subject.stats().device_bytes, 0);
    assert!(subject.engine.allocate(total + 1).is_err());
    assert!(subject.engine.allocate(0).is_err());
}

#[test]
fn an_engine_knows_which_memory_is_the_devices() {
    for subject in subjects() {
        let (memory, ordinary) = (subject.device(MIB), patterned(1, MIB));
        let kind = |address: u64| subject.engine.memory_kind(address);
        for at in [0, 1, MIB as u64 - 1] {
            assert_eq!(kind(memory.address() + at), Some(MemoryKind::Device));
        }
        let address = ordinary.as_ptr() as u64;
        // On the machine's GPU this address may have been registered before.
        assert!(!subject.is_model() || kind(address).is_none());
        assert_eq!(
            subject.execute(CudaOperation::copy(host(&ordinary, 0), device(&memory, 0), MIB)),
            OK
        );
        if subject.caches_registrations() {
            assert_eq!(kind(address + 77), Some(MemoryKind::Host), "it is registered");
        }
    }
}

#[test]
fn a_full_ring_of_copies_over_device_memory_loses_none() {
    const CAPACITY: usize = 8;
    const COUNT: usize = 100;
    const EACH: usize = 64 * KIB + 1;
    for mut subject in subjects() {
        let options = ChannelOptions { capacity: Some(CAPACITY), ..ChannelOptions::default() };
        subject.channels.clear();
        subject.open(&options);
        let source = patterned(1, COUNT * EACH);
        let (inside, target) = (subject.device(COUNT * EACH), untouched(COUNT * EACH));
        let both_ways =
            [(host(&source, 0), device(&inside, 0)), (device(&inside, 0), host(&target, 0))];
        for (from, to) in both_ways {
            let completions: Vec<_> = (0..COUNT)
                .map(|index| {
                    let (from, to) = (from.plus(index * EACH), to.plus(index * EACH));
                    subject.start(CudaOperation::copy(from, to, EACH).transient(index % 3 == 0))
                })
                .collect();
            assert!(completions.iter().all(|each| outcome(each) == OK));
        }
        check(target.as_slice(), 0, source.as_slice(), subject.name);
        let channel = &subject.channels[0];
        wait_until("the last sequence", || channel.completed() == channel.statistics().submitted);
        let statistics = channel.statistics();
        assert_eq!(statistics.submitted, 2 * COUNT as u64 + 1, "and a fill at the start");
        assert_eq!((statistics.failed, channel.outstanding_bytes()), (0, 0));
    }
}

#[test]
fn a_batch_that_is_too_long_is_taken_as_far_as_there_is_room() {
    const CAPACITY: usize = 4;
    let mut subject = CudaUnderTest::modelled(slow());
    let (inside, target) = (subject.upload(&pattern(1, 12 * KIB)), untouched(12 * KIB));
    subject.channels.clear();
    let options = ChannelOptions { capacity: Some(CAPACITY), ..ChannelOptions::default() };
    subject.open(&options);
    let jobs: Vec<_> = (0..12)
        .map(|index| {
            CudaOperation::copy(device(&inside, index * KIB), host(&target, index * KIB), KIB)
        })
        .collect();
    let completions = [(); 12].map(|()| Arc::new(Completion::whole()));
    let describe =
        |(job, completion): (&CudaOperation, &Arc<Completion>)| Some(job.descriptor(completion));
    let mut batch: Vec<_> = jobs.iter().zip(&completions).map(describe).collect();
    let accepted = subject.channels[0].submit(&mut batch).unwrap().count;
    assert!((CAPACITY..12).contains(&accepted), "{accepted} are accepted");
    assert_eq!(batch.iter().filter(|left| left.is_some()).count(), 12 - accepted);
    assert!(subject.channels[0].park(accepted as u64, CASE_TIMEOUT));
    // The caller keeps what was not accepted: dropped, it fails.
    drop(batch);
    for (index, completion) in completions.iter().enumerate() {
        assert_eq!(outcome(completion).is_ok(), index < accepted);
    }
    check(target.as_slice(), 0, &pattern(1, 12 * KIB)[..accepted * KIB], "what was accepted");
}

#[test]
fn a_marker_ends_after_everything_before_it() {
    let subject = CudaUnderTest::modelled(slow());
    let (source, inside) = (patterned(1, 5 * MIB), subject.device(5 * MIB));
    let copy = subject.start(CudaOperation::copy(host(&source, 0), device(&inside, 0), 5 * MIB));
    let marker = Arc::new(Completion::whole());
    let mut batch = [Some(empty(&marker))];
    assert_eq!(subject.channels[0].submit(&mut batch).unwrap().count, 1);
    assert_eq!(outcome(&marker), OK);
    assert!(copy.is_done(), "the copy was complete before");
}

#[test]
fn a_cancelled_transfer_ends_early_and_those_behind_it_do_not_notice() {
    const LENGTH: usize = 24 * MIB;
    let subject = CudaUnderTest::modelled(slow());
    let (source, inside) = (patterned(1, LENGTH), subject.device(LENGTH));
    let job = CudaOperation::copy(host(&source, 0), device(&inside, 0), LENGTH).transient(true);
    let mut done_bytes = LENGTH as u64;
    // If this thread does not run for long, the transfer may complete before the cancellation: then
    // it is repeated.
    wait_until("a transfer to be cancelled in time", || {
        subject.model().write(inside.address(), &vec![UNTOUCHED; LENGTH]);
        let transfer = subject.start(job.cut(Some(64 * KIB)));
        wait_until("the first chunks", || transfer.ready_bytes(LENGTH as u64) > 0);
        transfer.cancel();
        match outcome(&transfer) {
            Ok(_) => false,
            Err(ExecutionError::Cancelled { done_bytes: done }) => {
                done_bytes = done;
                true
            }
            Err(other) => panic!("{other}"),
        }
    });
    let (done, all) = (subject.model().read(inside.address(), LENGTH), source.as_slice());
    assert!(done_bytes > 0 && done_bytes < LENGTH as u64, "{done_bytes} bytes are done");
    check(&done, 0, &all[..done_bytes as usize], "the reported bytes, and no more");
    assert_eq!(subject.execute(job), OK);
    assert!(subject.model().read(inside.address(), LENGTH) == all);
}
