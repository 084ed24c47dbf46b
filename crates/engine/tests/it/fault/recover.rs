//! Faults of the engine alone: the processor finishes, and only the counters show it.

use std::sync::Arc;
use std::time::Duration;

use memferry_engine::testing::fault::{Fault, FaultScript};
use memferry_engine::testing::polled::PolledEngine;
use memferry_engine::{
    ChannelOptions, Completion, Descriptor, Engine, ExecutionError, Opcode, TransferOutput,
};

use crate::fault::buffers::{FaultBuffers, PAGE, execute, open, poll_until, reporting, stops};
use crate::fault::{around_cpu, engines};

#[test]
fn what_an_engine_leaves_undone_is_done_by_the_processor() {
    for length in [1, 2, 64, 100, 2049, PAGE] {
        for stop in stops(length) {
            let done_bytes = stop as u64;
            for fault in [Fault::Partial { done_bytes }, Fault::EngineFault { done_bytes }] {
                for engine in engines(&FaultScript::of([fault, fault])) {
                    let channel = open(&engine);
                    for (operation, number) in [(Opcode::Copy, 1), (Opcode::Fill, 2)] {
                        let mut buffers = FaultBuffers::new();
                        let result = execute(&*channel, buffers.descriptor(operation, length));
                        assert_eq!(result, Ok(TransferOutput::default()), "{fault:?}");
                        buffers.check(operation, length);
                        let whole = matches!(fault, Fault::Partial { .. }) && stop >= length;
                        poll_until(&*channel, || channel.completed() == number);
                        match channel.error_of(number) {
                            None => assert!(whole, "{fault:?} of {length} is recorded"),
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
    let channel = open(&around_cpu(FaultScript::of(faults).repeating()));
    for distance in [1, 13, 64, 100] {
        for (from, to) in [(PAGE, PAGE + distance), (PAGE + distance, PAGE)] {
            let mut buffers = FaultBuffers::new();
            buffers.target.0.copy_from_slice(&buffers.source.0);
            let mut expected = buffers.target.0;
            expected.copy_within(from..from + 500, to);
            let start = buffers.target.0.as_mut_ptr() as u64;
            let (source, target) = (start + from as u64, start + to as u64);
            for fault in faults {
                buffers.target.0.copy_from_slice(&buffers.source.0);
                // SAFETY: inside the target, which outlives the descriptor.
                let copy = unsafe { Descriptor::new(Opcode::Move, source, target, 500) };
                execute(&*channel, copy).unwrap();
                assert!(buffers.target.0 == expected, "a move by {distance} with {fault:?}");
            }
        }
    }
    for difference in [None, Some(0), Some(9), Some(10), Some(69), Some(200), Some(299)] {
        let mut buffers = FaultBuffers::new();
        buffers.target.0.copy_from_slice(&buffers.source.0);
        if let Some(at) = difference {
            buffers.target.0[PAGE + at as usize] ^= 0xFF;
        }
        for _ in faults {
            let found = execute(&*channel, buffers.descriptor(Opcode::Compare, 300));
            assert_eq!(found, Ok(TransferOutput { difference, crc: None }));
        }
    }
}

#[test]
fn a_number_is_completed_only_when_the_rescued_bytes_are_there() {
    const LENGTH: usize = 8 << 20;
    let fault = Fault::EngineFault { done_bytes: 1000 };
    // The second engine rejects this length.
    let engines: [Arc<dyn Engine>; 2] =
        [around_cpu(FaultScript::of([fault; 4])), Arc::new(PolledEngine::new())];
    // Several times: on a busy machine the polling thread may be too late.
    for engine in engines.iter().cycle().take(8) {
        let (source, mut target) = (vec![7u8; LENGTH], vec![0u8; LENGTH]);
        let channel = engine.open_channel(&ChannelOptions::default()).unwrap();
        let completion = Arc::new(Completion::whole());
        let (from, to) = (source.as_ptr() as u64, target.as_mut_ptr() as u64);
        // SAFETY: both outlive the channel; the target is read only after the sequence is
        // completed.
        let copy = unsafe { Descriptor::new(Opcode::Copy, from, to, LENGTH as u64) };
        channel.submit(&mut [Some(reporting(copy, &completion))]).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    poll_until(&*channel, || channel.completed() == 1);
                    assert!(completion.is_done());
                    // SAFETY: a byte of the target, which is not written any more.
                    let last = unsafe { *((to + LENGTH as u64 - 1) as *const u8) };
                    assert_eq!(last, 7);
                });
            }
        });
        assert!(target == source);
        assert_eq!(channel.statistics().failed, 1);
    }
}
