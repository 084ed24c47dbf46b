//! Cancellation: an operation that is not matched ends as cancelled, a matched one completes as
//! usual.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};

use memferry_message::{EndpointBuilder, Error, Operation, Source, TAG_ALL, TAG_ANY};
use memferry_testing::message::{pair, until};
use memferry_testing::pattern::pattern;

#[test]
fn a_receive_that_nobody_met_is_cancelled_and_takes_no_message() {
    let sides = pair(&EndpointBuilder::new());
    let mut receive = sides.there.irecv(sides.to_here, 5, TAG_ALL, vec![0u8; 10]).unwrap();
    receive.operation().cancel();
    let error = receive.wait().unwrap_err().error;
    let peer = format!("peer {} (process {})", sides.here.name(), std::process::id());
    assert_eq!(
        error.to_string(),
        format!(
            "the receive of up to 10 bytes with tag 5 from {peer} was cancelled before it met its counterpart: \
             nothing was transferred"
        )
    );
    sides.here.send(sides.to_there, 5, b"later").unwrap();
    let mut buffer = [0; 5];
    sides.there.recv(sides.to_here, 5, TAG_ALL, &mut buffer).unwrap();
    assert_eq!(&buffer, b"later");
}

#[test]
fn a_send_that_nobody_met_is_cancelled_and_arrives_nowhere() {
    let sides = pair(&EndpointBuilder::new());
    let mut send = sides.here.isend(sides.to_there, 5, pattern(1 << 20, 1)).unwrap();
    sides.settle();
    assert!(!send.is_done());
    assert!(sides.there.iprobe(Source::Any, 5, TAG_ALL).unwrap().is_some());
    send.operation().cancel();
    sides.finish(&mut [send.operation()]);
    let failed = send.wait().unwrap_err();
    let (text, name) = (failed.error.to_string(), sides.there.name());
    let expected = format!("the send of 1048576 bytes with tag 5 to peer {name} (process ");
    assert!(matches!(failed.error, Error::Cancelled(_)) && text.starts_with(&expected), "{text}");
    assert!(failed.buffer == Some(pattern(1 << 20, 1)));
    assert!(sides.there.iprobe(Source::Any, 5, TAG_ALL).unwrap().is_none());
}

#[test]
fn a_send_that_is_awaited_no_more_keeps_no_waker() {
    struct Task;
    impl Wake for Task {
        fn wake(self: Arc<Self>) {}
    }
    let sides = pair(&EndpointBuilder::new());
    let mut send = sides.here.isend(sides.to_there, 5, pattern(1 << 20, 1)).unwrap();
    let tasks = [Arc::new(Task), Arc::new(Task)];
    for task in &tasks {
        let waker = Waker::from(task.clone());
        assert!(Pin::new(&mut send).poll(&mut Context::from_waker(&waker)).is_pending());
    }
    let count = |at: usize| Arc::strong_count(&tasks[at]);
    assert_eq!([count(0), count(1)], [1, 2], "the last waker is the one that is kept");
    // The message goes on without its handle.
    drop(send);
    assert_eq!(count(1), 1);
    let mut buffer = vec![0; 1 << 20];
    sides.there.recv(sides.to_here, 5, TAG_ALL, &mut buffer).unwrap();
    assert!(buffer == pattern(1 << 20, 1));
}

#[test]
fn cancelling_after_the_two_have_met_changes_nothing() {
    for size in [20, 5000, 100_000, 5 << 20] {
        for builder in [EndpointBuilder::new(), EndpointBuilder::new().cross_memory(false)] {
            let sides = pair(&builder);
            let mut receive = sides.there.irecv(sides.to_here, 5, TAG_ALL, vec![0; size]).unwrap();
            let mut send = sides.here.isend(sides.to_there, 5, pattern(size, 3)).unwrap();
            sides.there.progress();
            receive.operation().cancel();
            send.operation().cancel();
            sides.finish(&mut [send.operation(), receive.operation()]);
            send.wait().unwrap();
            let (received, buffer) = receive.wait().unwrap();
            assert_eq!(received.length, size as u64);
            assert!(buffer == pattern(size, 3));
        }
    }
}

#[test]
fn a_send_that_waits_for_room_is_cancelled_and_the_others_stay_in_order() {
    // The peer does not read, so the ring fills up: with cells, or with bytes.
    for size in [30, 4000] {
        let sides = pair(&EndpointBuilder::new().eager_bytes(8 << 10));
        let mut sends: Vec<_> = (0..600u64)
            .map(|tag| sides.here.isend(sides.to_there, tag, pattern(size, tag)).unwrap())
            .collect();
        let first = sends.iter_mut().position(|send| !send.is_done()).unwrap();
        assert!(first < 500, "the ring never fills up");
        let cancelled = [first as u64, first as u64 + 1, 550];
        for tag in cancelled {
            sends[tag as usize].operation().cancel();
        }
        for tag in cancelled {
            let outcome = sends[tag as usize].operation().test();
            assert!(matches!(outcome, Some(Err(Error::Cancelled(_)))), "nothing of {tag} was sent");
        }
        let sides = &sides;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for send in sends {
                    match send.wait() {
                        Ok((sent, _)) => assert!(!cancelled.contains(&sent.tag)),
                        Err(failed) => assert!(matches!(failed.error, Error::Cancelled(_))),
                    }
                }
            });
            let mut last = None;
            while last != Some(599) {
                let mut buffer = vec![0; size];
                let received = sides.there.recv(sides.to_here, 0, TAG_ANY, &mut buffer).unwrap();
                assert!(last < Some(received.tag) && !cancelled.contains(&received.tag));
                assert!(buffer == pattern(size, received.tag));
                last = Some(received.tag);
            }
        });
    }
}

#[test]
fn a_scope_takes_back_receives_that_nobody_met_and_waits_for_sends() {
    let sides = pair(&EndpointBuilder::new());
    let (mut buffer, message) = (vec![0; 100], pattern(1 << 20, 8));
    let left = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            sides.here.scope(|scope| {
                scope.irecv(sides.to_there, 1, TAG_ALL, &mut buffer).unwrap();
                scope.isend(sides.to_there, 2, &message).unwrap();
            });
            left.store(true, Ordering::Relaxed);
        });
        until("the message is offered", || {
            sides.there.iprobe(Source::Any, 2, TAG_ALL).unwrap().is_some()
        });
        assert!(!left.load(Ordering::Relaxed), "the message is still lent");
        let mut bytes = vec![0; 1 << 20];
        sides.there.recv(sides.to_here, 2, TAG_ALL, &mut bytes).unwrap();
        assert!(bytes == pattern(1 << 20, 8));
    });
    sides.there.send(sides.to_here, 1, b"nobody wants this now").unwrap();
    sides.settle();
    assert!(buffer.iter().all(|byte| *byte == 0));
}

#[test]
fn dropped_handles_keep_their_promise() {
    let sides = pair(&EndpointBuilder::new());
    // A dropped receive takes no message; a dropped send still arrives.
    drop(sides.there.irecv(sides.to_here, 1, TAG_ALL, vec![0u8; 100_000]).unwrap());
    drop(sides.here.isend(sides.to_there, 1, pattern(100_000, 1)).unwrap());
    let mut receive = sides.there.irecv(sides.to_here, 1, TAG_ALL, vec![0; 100_000]).unwrap();
    sides.finish(&mut [receive.operation()]);
    assert!(receive.wait().unwrap().1 == pattern(100_000, 1));
    sides.settle();
}

#[test]
fn an_operation_that_is_over_can_be_cancelled_and_asked_again() {
    let sides = pair(&EndpointBuilder::new());
    sides.here.send(sides.to_there, 1, b"once").unwrap();
    let mut receive = sides.there.irecv(sides.to_here, 1, TAG_ALL, vec![0u8; 4]).unwrap();
    let operation: &mut Operation = receive.operation();
    let outcome = operation.wait();
    operation.cancel();
    assert_eq!(operation.test(), Some(outcome.clone()));
    assert_eq!(operation.wait(), outcome);
    assert_eq!(Operation::wait_any(&mut [operation]), 0);
}
