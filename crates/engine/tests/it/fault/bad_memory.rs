//! Faults of the memory: no engine can finish, and the finished bytes are reported.

use std::sync::Arc;

use memferry_engine::completion::{ChannelBatch, ChunkedWork, Dispatch};
use memferry_engine::testing::fault::{Fault, FaultScript};
use memferry_engine::{
    Completion, Descriptor, ExecutionError, Kernel, Opcode, Submitted, TransferOutput,
};

use crate::fault::buffers::{
    FaultBuffers, PAGE, UNTOUCHED, execute, open, outcome, reporting, stops,
};
use crate::fault::engines;

#[test]
fn bad_memory_is_told_with_address_and_progress_and_nothing_past_it_is_touched() {
    for length in [1, 64, 100, PAGE] {
        for stop in stops(length) {
            let fault = Fault::BadMemory { done_bytes: stop as u64 };
            for engine in engines(&FaultScript::of([fault])) {
                let (mut buffers, channel) = (FaultBuffers::new(), open(&engine));
                let descriptor = buffers.descriptor(Opcode::Copy, length);
                let (target, done) = (descriptor.target(), stop.min(length));
                let error = execute(&*channel, descriptor).unwrap_err();
                let (address, done_bytes) = (target + done as u64, done as u64);
                assert_eq!(error, ExecutionError::BadMemory { address, done_bytes });
                assert_eq!(channel.error_of(1), Some(error));
                assert_eq!(channel.statistics().failed, 1);
                buffers.check(Opcode::Copy, done);
                // The channel still works.
                execute(&*channel, buffers.descriptor(Opcode::Copy, length)).unwrap();
                buffers.check(Opcode::Copy, length);
                assert_eq!(channel.error_of(2), None);
            }
        }
    }
}

#[test]
fn one_bad_part_fails_the_transfer_and_leaves_the_other_parts_done() {
    const PARTS: u64 = 4;
    const PART: u64 = 1000;
    for bad in 0..PARTS {
        let mut faults = vec![Fault::None; PARTS as usize];
        faults[bad as usize] = Fault::BadMemory { done_bytes: 100 };
        for engine in engines(&FaultScript::of(faults)) {
            let (mut buffers, channel) = (FaultBuffers::new(), open(&engine));
            let whole = buffers.descriptor(Opcode::Copy, (PARTS * PART) as usize);
            let (source, target) = (whole.source(), whole.target());
            // SAFETY: the buffers outlive the channel.
            let work = unsafe {
                let length = PARTS * PART;
                ChunkedWork::new(Opcode::Copy, Kernel::Cached, source, target, length, 0, PART)
            };
            while work.claim_front().is_some() {}
            let completion = Arc::new(Completion::chunked(work));
            let mut batch: Vec<_> = (0..PARTS)
                .map(|part| {
                    let (from, to) = (source + part * PART, target + part * PART);
                    // SAFETY: as above.
                    let copy = unsafe { Descriptor::new(Opcode::Copy, from, to, PART) };
                    // SAFETY: all chunks are claimed, and each is a part.
                    Some(unsafe { copy.part_of(completion.clone(), part * PART) })
                })
                .collect();
            assert_eq!(channel.submit(&mut batch), Ok(Submitted { first: 1, count: 4 }));
            let error = outcome(&*channel, &completion).unwrap_err();
            let address = target + bad * PART + 100;
            let done_bytes = (PARTS - 1) * PART;
            assert_eq!(error, ExecutionError::BadMemory { address, done_bytes });
            assert_eq!(completion.ready_bytes(PARTS * PART), bad * PART);
            for part in 0..PARTS {
                let range = (part * PART, (part + 1) * PART);
                assert_eq!(completion.is_range_ready(range.0, range.1), part != bad);
            }
            let hole = PAGE + (bad * PART) as usize + 100;
            let mut filled = buffers;
            let rest = hole..PAGE + ((bad + 1) * PART) as usize;
            assert!(filled.target.0[rest.clone()].iter().all(|&byte| byte == UNTOUCHED));
            let repair = filled.source.0[rest.clone()].to_vec();
            filled.target.0[rest].copy_from_slice(&repair);
            filled.check(Opcode::Copy, (PARTS * PART) as usize);
        }
    }
}

#[test]
fn what_follows_bad_memory_is_not_begun_and_what_follows_a_rescue_is() {
    for fault in [Fault::BadMemory { done_bytes: 5 }, Fault::EngineFault { done_bytes: 5 }] {
        for engine in engines(&FaultScript::of([fault])) {
            let channel = open(&engine);
            let (mut first, mut second) = (FaultBuffers::new(), FaultBuffers::new());
            let completions = [(); 2].map(|()| Arc::new(Completion::whole()));
            let batch = |buffers: &mut FaultBuffers, index: usize| {
                let descriptor = buffers.descriptor(Opcode::Copy, 200);
                ChannelBatch::one(
                    channel.clone(),
                    false,
                    reporting(descriptor, &completions[index]),
                )
            };
            let dependent = batch(&mut second, 1);
            // SAFETY: each completion has one descriptor.
            unsafe {
                Dispatch::after(&completions[..1], completions[1].clone(), vec![dependent]);
                Dispatch::now(&completions[0], [batch(&mut first, 0)]);
            }
            let result = outcome(&*channel, &completions[1]);
            if matches!(fault, Fault::BadMemory { .. }) {
                assert_eq!(result, Err(ExecutionError::Predecessor));
                second.check(Opcode::Copy, 0);
            } else {
                assert_eq!(result, Ok(TransferOutput::default()));
                first.check(Opcode::Copy, 200);
                second.check(Opcode::Copy, 200);
            }
        }
    }
}
