//! Faults of the queue: late, full, closed.

use std::sync::Arc;
use std::time::Duration;

use memferry_engine::completion::{Launch, Order};
use memferry_engine::conformance::LIMIT;
use memferry_engine::fault::{Fault, Script};
use memferry_engine::{ChannelOptions, Completion, Engine, Finish, Operation, SubmitError, Taken};

use crate::engines;
use crate::place::{PAGE, Place, open, outcome, reporting, until};

#[test]
fn a_delayed_descriptor_keeps_those_behind_it_in_order() {
    let script = Script::of([Fault::Delay(Duration::from_millis(5))]);
    for engine in engines(&script) {
        let channel = open(&engine);
        let mut places = [Place::new(), Place::new(), Place::new()];
        let completions = [(); 3].map(|()| Arc::new(Completion::whole()));
        let mut batch: Vec<_> = places
            .iter_mut()
            .zip(&completions)
            .map(|(place, completion)| {
                Some(reporting(place.descriptor(Operation::Copy, 300), completion))
            })
            .collect();
        assert_eq!(channel.submit(&mut batch), Ok(Taken { first: 1, count: 3 }));
        until(&*channel, || {
            let over = completions.iter().filter(|completion| completion.is_done()).count() as u64;
            let prefix = completions.iter().take_while(|completion| completion.is_done()).count();
            assert_eq!(prefix as u64, over, "none overtakes the delayed one");
            channel.completed() == 3
        });
        places.iter().for_each(|place| place.check(Operation::Copy, 300));
    }
}

#[test]
fn a_ring_that_pretends_to_be_full_takes_nothing_and_loses_nothing() {
    for engine in engines(&Script::default().full([true, true, false])) {
        let (mut place, channel) = (Place::new(), open(&engine));
        let completion = Arc::new(Completion::whole());
        let descriptor = reporting(place.descriptor(Operation::Copy, 500), &completion);
        let mut batch = [Some(descriptor)];
        for _ in 0..2 {
            assert_eq!(channel.submit(&mut batch).unwrap().count, 0);
            assert!(batch[0].is_some() && !completion.is_done());
        }
        assert_eq!(channel.submit(&mut batch), Ok(Taken { first: 1, count: 1 }));
        outcome(&*channel, &completion).unwrap();
        place.check(Operation::Copy, 500);
        assert_eq!(channel.statistics().full, 2);
    }
}

#[test]
fn what_a_channel_never_takes_is_done_by_whoever_launches_it() {
    for engine in engines(&Script::default().full([true]).repeating()) {
        let (mut place, channel) = (Place::new(), open(&engine));
        let completion = Arc::new(Completion::whole());
        let descriptor = reporting(place.descriptor(Operation::Copy, PAGE), &completion);
        // SAFETY: the only descriptor of the completion.
        unsafe { Launch::now(&completion, [Order::one(channel.clone(), false, descriptor)]) };
        assert_eq!(completion.outcome(), Some(Ok(Finish { difference: None })));
        place.check(Operation::Copy, PAGE);
        assert_eq!(channel.statistics().submitted, 0);
    }
}

#[test]
fn a_channel_that_nobody_polls_does_not_take_without_end() {
    let options = ChannelOptions { capacity: Some(4), ..ChannelOptions::default() };
    for engine in engines(&Script::default()) {
        let (mut place, channel) = (Place::new(), engine.open_channel(&options).unwrap());
        let taken: usize = (0..10_000)
            .map(|_| {
                let mut batch = [Some(place.descriptor(Operation::Copy, 10))];
                channel.submit(&mut batch).unwrap().count
            })
            .sum();
        assert_eq!(taken, 4);
        assert!(channel.park(4, LIMIT));
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
    for engine in engines(&Script::of(faults)) {
        let mut places = [(); 4].map(|()| Place::new());
        let completions = [(); 4].map(|()| Arc::new(Completion::whole()));
        let channel = open(&engine);
        let mut batch: Vec<_> = places
            .iter_mut()
            .zip(&completions)
            .map(|(place, completion)| {
                Some(reporting(place.descriptor(Operation::Copy, 300), completion))
            })
            .collect();
        assert_eq!(channel.submit(&mut batch).unwrap().count, 4);
        channel.close();
        assert_eq!(channel.submit(&mut batch), Err(SubmitError::Closed));
        drop(channel);
        for (index, (place, completion)) in places.iter().zip(&completions).enumerate() {
            let outcome = completion.outcome().expect("a drop leaves nothing in flight");
            assert_eq!(outcome.is_err(), index == 1, "{outcome:?}");
            place.check(Operation::Copy, if index == 1 { 3 } else { 300 });
        }
    }
}
