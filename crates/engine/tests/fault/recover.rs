//! Faults of the engine alone: the processor finishes, and nobody notices but the counters.

use std::sync::Arc;
use std::time::Duration;

use memferry_engine::fault::{Fault, Script};
use memferry_engine::polled::PolledEngine;
use memferry_engine::{
    ChannelOptions, Completion, Descriptor, Engine, ExecutionError, Finish, Operation,
};

use crate::place::{PAGE, Place, carry_out, open, reporting, stops, until};
use crate::{around_cpu, engines};

#[test]
fn what_an_engine_leaves_undone_is_done_by_the_processor() {
    for length in [1, 2, 64, 100, 2049, PAGE] {
        for stop in stops(length) {
            let done_bytes = stop as u64;
            for fault in [Fault::Partial { done_bytes }, Fault::EngineFault { done_bytes }] {
                for engine in engines(&Script::of([fault, fault])) {
                    let channel = open(&engine);
                    for (operation, number) in [(Operation::Copy, 1), (Operation::Fill, 2)] {
                        let mut place = Place::new();
                        let result = carry_out(&*channel, place.descriptor(operation, length));
                        assert_eq!(result, Ok(Finish { difference: None }), "{fault:?}");
                        place.check(operation, length);
                        let whole = matches!(fault, Fault::Partial { .. }) && stop >= length;
                        until(&*channel, || channel.completed() == number);
                        match channel.error_of(number) {
                            None => assert!(whole, "{fault:?} of {length} is remembered"),
                            Some(ExecutionError::Engine { done_bytes, .. }) => {
                                assert_eq!(done_bytes, stop.min(length) as u64);
                            }
                            Some(other) => panic!("{other} for {fault:?}"),
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn faults_in_moves_and_comparisons_do_not_change_their_results() {
    let faults = [
        Fault::Partial { done_bytes: 10 },
        Fault::EngineFault { done_bytes: 70 },
        Fault::EngineFault { done_bytes: 0 },
        Fault::Partial { done_bytes: u64::MAX },
        Fault::Delay(Duration::from_micros(50)),
    ];
    let channel = open(&around_cpu(Script::of(faults).repeating()));
    for distance in [1, 13, 64, 100] {
        for (from, to) in [(PAGE, PAGE + distance), (PAGE + distance, PAGE)] {
            let mut place = Place::new();
            place.target.0.copy_from_slice(&place.source.0);
            let mut expected = place.target.0;
            expected.copy_within(from..from + 500, to);
            let start = place.target.0.as_mut_ptr() as u64;
            let (source, target) = (start + from as u64, start + to as u64);
            for fault in faults {
                place.target.0.copy_from_slice(&place.source.0);
                // SAFETY: inside the target, which outlives the order.
                let order = unsafe { Descriptor::new(Operation::Move, source, target, 500) };
                carry_out(&*channel, order).unwrap();
                assert!(place.target.0 == expected, "a move by {distance} with {fault:?}");
            }
        }
    }
    for difference in [None, Some(0), Some(9), Some(10), Some(69), Some(200), Some(299)] {
        let mut place = Place::new();
        place.target.0.copy_from_slice(&place.source.0);
        if let Some(at) = difference {
            place.target.0[PAGE + at as usize] ^= 0xFF;
        }
        for _ in faults {
            let found = carry_out(&*channel, place.descriptor(Operation::Compare, 300));
            assert_eq!(found, Ok(Finish { difference }));
        }
    }
}

#[test]
fn a_number_is_completed_only_when_the_rescued_bytes_are_there() {
    const LENGTH: usize = 8 << 20;
    let fault = Fault::EngineFault { done_bytes: 1000 };
    // The second refuses what is so long.
    let engines: [Arc<dyn Engine>; 2] =
        [around_cpu(Script::of([fault; 4])), Arc::new(PolledEngine::new())];
    // More than once: on a busy machine nobody may look in time.
    for engine in engines.iter().cycle().take(8) {
        let (source, mut target) = (vec![7u8; LENGTH], vec![0u8; LENGTH]);
        let channel = engine.open_channel(&ChannelOptions::default()).unwrap();
        let completion = Arc::new(Completion::whole());
        let (from, to) = (source.as_ptr() as u64, target.as_mut_ptr() as u64);
        // SAFETY: both live longer than the channel; nobody looks before the number is completed.
        let order = unsafe { Descriptor::new(Operation::Copy, from, to, LENGTH as u64) };
        channel.submit(&mut [Some(reporting(order, &completion))]).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    until(&*channel, || channel.completed() == 1);
                    assert!(completion.is_done());
                    // SAFETY: a byte of the target, which nobody writes any more.
                    let last = unsafe { *((to + LENGTH as u64 - 1) as *const u8) };
                    assert_eq!(last, 7);
                });
            }
        });
        assert!(target == source);
        assert_eq!(channel.statistics().failed, 1);
    }
}
