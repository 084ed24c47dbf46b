//! Faults of the queue: delayed, full, closed.

use std::sync::Arc;
use std::time::Duration;

use memferry_engine::completion::{ChannelBatch, Dispatch};
use memferry_engine::testing::conformance::CASE_TIMEOUT;
use memferry_engine::testing::fault::{Fault, FaultScript};
use memferry_engine::{
    ChannelOptions, Completion, Engine, Opcode, SubmitError, Submitted, TransferOutput,
};

use crate::fault::buffers::{FaultBuffers, PAGE, open, outcome, poll_until, reporting};
use crate::fault::engines;

#[test]
fn a_delayed_descriptor_keeps_those_behind_it_in_order() {
    let script = FaultScript::of([Fault::Delay(Duration::from_millis(5))]);
    for engine in engines(&script) {
        let channel = open(&engine);
        let mut places = [FaultBuffers::new(), FaultBuffers::new(), FaultBuffers::new()];
        let completions = [(); 3].map(|()| Arc::new(Completion::whole()));
        let mut batch: Vec<_> = places
            .iter_mut()
            .zip(&completions)
            .map(|(buffers, completion)| {
                Some(reporting(buffers.descriptor(Opcode::Copy, 300), completion))
            })
            .collect();
        assert_eq!(channel.submit(&mut batch), Ok(Submitted { first: 1, count: 3 }));
        poll_until(&*channel, || {
            let done = completions.iter().filter(|completion| completion.is_done()).count() as u64;
            let prefix = completions.iter().take_while(|completion| completion.is_done()).count();
            assert_eq!(prefix as u64, done, "none overtakes the delayed one");
            channel.completed() == 3
        });
        places.iter().for_each(|buffers| buffers.check(Opcode::Copy, 300));
    }
}

#[test]
fn a_ring_that_pretends_to_be_full_takes_nothing_and_loses_nothing() {
    for engine in engines(&FaultScript::default().full([true, true, false])) {
        let (mut buffers, channel) = (FaultBuffers::new(), open(&engine));
        let completion = Arc::new(Completion::whole());
        let descriptor = reporting(buffers.descriptor(Opcode::Copy, 500), &completion);
        let mut batch = [Some(descriptor)];
        for _ in 0..2 {
            assert_eq!(channel.submit(&mut batch).unwrap().count, 0);
            assert!(batch[0].is_some() && !completion.is_done());
        }
        assert_eq!(channel.submit(&mut batch), Ok(Submitted { first: 1, count: 1 }));
        outcome(&*channel, &completion).unwrap();
        buffers.check(Opcode::Copy, 500);
        assert_eq!(channel.statistics().full, 2);
    }
}

#[test]
fn what_a_channel_never_takes_is_done_by_whoever_launches_it() {
    for engine in engines(&FaultScript::default().full([true]).repeating()) {
        let (mut buffers, channel) = (FaultBuffers::new(), open(&engine));
        let completion = Arc::new(Completion::whole());
        let descriptor = reporting(buffers.descriptor(Opcode::Copy, PAGE), &completion);
        // SAFETY: the only descriptor of the completion.
        unsafe {
            Dispatch::now(&completion, [ChannelBatch::one(channel.clone(), false, descriptor)]);
        };
        assert_eq!(completion.outcome(), Some(Ok(TransferOutput::default())));
        buffers.check(Opcode::Copy, PAGE);
        assert_eq!(channel.statistics().submitted, 0);
    }
}

#[test]
fn a_channel_that_nobody_polls_does_not_take_without_end() {
    let options = ChannelOptions { capacity: Some(4), ..ChannelOptions::default() };
    for engine in engines(&FaultScript::default()) {
        let (mut buffers, channel) = (FaultBuffers::new(), engine.open_channel(&options).unwrap());
        let accepted: usize = (0..10_000)
            .map(|_| {
                let mut batch = [Some(buffers.descriptor(Opcode::Copy, 10))];
                channel.submit(&mut batch).unwrap().count
            })
            .sum();
        assert_eq!(accepted, 4);
        assert!(channel.park(4, CASE_TIMEOUT));
    }
}

#[test]
fn a_channel_dropped_with_delayed_and_failing_work_ends_all_of_it() {
    let faults = [
        Fault::Delay(Duration::from_millis(3)),
        Fault::BadMemory { done_bytes: 3 },
        Fault::Partial { done_bytes: 3 },
        Fault::None,
    ];
    for engine in engines(&FaultScript::of(faults)) {
        let mut places = [(); 4].map(|()| FaultBuffers::new());
        let completions = [(); 4].map(|()| Arc::new(Completion::whole()));
        let channel = open(&engine);
        let mut batch: Vec<_> = places
            .iter_mut()
            .zip(&completions)
            .map(|(buffers, completion)| {
                Some(reporting(buffers.descriptor(Opcode::Copy, 300), completion))
            })
            .collect();
        assert_eq!(channel.submit(&mut batch).unwrap().count, 4);
        channel.close();
        assert_eq!(channel.submit(&mut batch), Err(SubmitError::Closed));
        drop(channel);
        for (index, (buffers, completion)) in places.iter().zip(&completions).enumerate() {
            let outcome = completion.outcome().expect("a drop leaves nothing in flight");
            assert_eq!(outcome.is_err(), index == 1, "{outcome:?}");
            buffers.check(Opcode::Copy, if index == 1 { 3 } else { 300 });
        }
    }
}
