//! Faults in CRCs, copies with one, and dualcasts: the processor finishes, and the result is right.

use std::sync::Arc;

use memferry_engine::completion::{ChannelBatch, ChunkedWork, Dispatch};
use memferry_engine::testing::fault::{Fault, FaultScript};
use memferry_engine::{Channel, Completion, Descriptor, Kernel, Opcode, TransferOutput};
use memferry_sys::crc;

use crate::fault::buffers::{FaultBuffers, PAGE, execute, open, outcome, stops};
use crate::fault::{around_cpu, engines, recoverable_faults};

fn crc_of(bytes: &[u8]) -> Option<u32> {
    // SAFETY: the slice is borrowed.
    Some(unsafe { crc::append(0, bytes.as_ptr(), bytes.len()) })
}

#[test]
fn a_fault_in_the_middle_changes_no_crc() {
    for length in [1, 64, 2049, PAGE] {
        for stop in stops(length) {
            let done_bytes = stop as u64;
            for fault in [Fault::Partial { done_bytes }, Fault::EngineFault { done_bytes }] {
                // One of the two does not support the operations.
                for engine in engines(&FaultScript::of([fault, fault])) {
                    let channel = open(&engine);
                    let mut buffers = FaultBuffers::new();
                    let expected = crc_of(&buffers.source.0[PAGE..PAGE + length]);
                    let expected = Ok(TransferOutput { crc: expected, difference: None });
                    let crc = buffers.descriptor(Opcode::Crc, length);
                    assert_eq!(execute(&*channel, crc), expected, "{fault:?} of {length}");
                    buffers.check(Opcode::Copy, 0);
                    let copy = buffers.descriptor(Opcode::CopyCrc, length);
                    assert_eq!(execute(&*channel, copy), expected, "{fault:?} of {length}");
                    buffers.check(Opcode::Copy, length);
                }
            }
        }
    }
}

#[test]
fn a_fault_in_a_dualcast_leaves_neither_target_behind() {
    const LENGTH: usize = 1500;
    for stop in stops(LENGTH) {
        let fault = Fault::EngineFault { done_bytes: stop as u64 };
        for engine in engines(&FaultScript::of([fault])) {
            let channel = open(&engine);
            let mut buffers = FaultBuffers::new();
            let second = buffers.target.0[PAGE + LENGTH..].as_mut_ptr() as u64;
            let first = buffers.descriptor(Opcode::Dualcast, LENGTH);
            // SAFETY: the second target follows the first in memory of the test.
            let dualcast = unsafe { first.with_second_target(second) };
            assert_eq!(execute(&*channel, dualcast), Ok(TransferOutput::default()));
            let source = &buffers.source.0[PAGE..PAGE + LENGTH];
            assert_eq!(buffers.target.0[PAGE..PAGE + 2 * LENGTH], [source, source].concat());
        }
    }
}

/// Executes an operation over the middle page in parts, each of which meets another fault.
fn execute_in_parts(channel: &Arc<dyn Channel>, whole: &Descriptor, second: u64) -> TransferOutput {
    const PART: u64 = 100;
    let (operation, length) = (whole.operation(), whole.length());
    let (source, target) = (whole.source(), whole.target());
    // SAFETY: the memory of the test, which outlives the channel.
    let work = unsafe {
        ChunkedWork::new(operation, Kernel::Cached, source, target, length, 0, 3 * PART)
            .with_second_target(second)
    };
    let completion = Arc::new(Completion::chunked(work));
    let mut parts = Vec::new();
    while let Some(chunk) = completion.work().unwrap().claim_front() {
        for offset in (chunk.offset..chunk.offset + chunk.length).step_by(PART as usize) {
            let length = PART.min(chunk.offset + chunk.length - offset);
            // SAFETY: the parts lie in chunks that were claimed, and have no byte in common.
            parts.push(unsafe {
                Descriptor::new(operation, source + offset, target + offset, length)
                    .part_of(completion.clone(), offset)
            });
        }
    }
    let batch = ChannelBatch::many(channel.clone(), false, parts);
    // SAFETY: these are all the descriptors of the transfer.
    unsafe { Dispatch::now(&completion, [batch]) };
    outcome(&**channel, &completion).unwrap()
}

#[test]
fn parts_that_meet_different_faults_make_the_right_whole() {
    let channel = open(&around_cpu(recoverable_faults()));
    for length in [1, 299, 300, 301, 2000] {
        let mut buffers = FaultBuffers::new();
        let expected = crc_of(&buffers.source.0[PAGE..PAGE + length]);
        for operation in [Opcode::Crc, Opcode::CopyCrc] {
            let whole = buffers.descriptor(operation, length);
            assert_eq!(execute_in_parts(&channel, &whole, 0).crc, expected, "{length}");
        }
        buffers.check(Opcode::Copy, length);
        let second = buffers.target.0[PAGE + length..].as_mut_ptr() as u64;
        let whole = buffers.descriptor(Opcode::Dualcast, length);
        execute_in_parts(&channel, &whole, second);
        let source = &buffers.source.0[PAGE..PAGE + length];
        assert_eq!(buffers.target.0[PAGE..PAGE + 2 * length], [source, source].concat());
    }
}
