//! Everything has a limit, and a caller that reaches a limit gets an error or waits.

use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};

use memferry_message::{
    ConnectError, Endpoint, EndpointBuilder, Error, OwnedOperation, ShareableBuffer, Source,
    TAG_ALL, TAG_ANY, ValidationError,
};
use memferry_testing::in_own_process;
use memferry_testing::message::process::{self, Child, setting};
use memferry_testing::message::traces::{memory_kib, resource_usage};
use memferry_testing::message::{pair, say, unique, until};
use memferry_testing::pattern::{fill, first_wrong, pattern};

/// The bytes that one peer may leave with another that does not receive.
const MAX_UNEXPECTED_BYTES: usize = 2 << 20;
const MESSAGES: u64 = 4000;
const LENGTH: usize = 4096;
/// Sends messages of that length eagerly, independent of the calibration.
const EAGER: u64 = 8 << 10;

/// A process that receives nothing before its input is closed, and then everything.
fn run_late_receiver() {
    let background = setting("MEMFERRY_TEST_BACKGROUND") == "on";
    let builder =
        EndpointBuilder::new().background(background).max_unexpected_bytes(MAX_UNEXPECTED_BYTES);
    let endpoint = builder.open(&setting("MEMFERRY_TEST_NAME")).unwrap();
    let peer = endpoint.connect(&setting("MEMFERRY_TEST_OTHER")).unwrap();
    endpoint.send(peer, 0, b"ready").unwrap();
    std::io::read_to_string(std::io::stdin()).unwrap();
    let mut buffer = vec![0; LENGTH];
    for number in 0..MESSAGES {
        let received = endpoint.recv(peer, 0, TAG_ANY, &mut buffer).unwrap();
        assert_eq!(received.tag, number, "out of order");
        assert_eq!(first_wrong(&buffer, number), None, "message {number}");
    }
    endpoint.send(peer, 0, b"done").unwrap();
}

/// Starts such a process and waits until it is connected.
fn spawn_late_receiver(endpoint: &Endpoint, background: &str) -> (Child, memferry_message::Peer) {
    let mut command = process::command("receives late");
    command
        .stdin(Stdio::piped())
        .env("MEMFERRY_TEST_NAME", unique("late"))
        .env("MEMFERRY_TEST_OTHER", endpoint.name())
        .env("MEMFERRY_TEST_BACKGROUND", background);
    let child = Child::spawn(&mut command);
    let received = endpoint.recv(Source::Any, 0, TAG_ANY, &mut [0; 8]).unwrap();
    (child, received.source)
}

fn flood(endpoint: &Endpoint, to: memferry_message::Peer) -> Vec<OwnedOperation<Vec<u8>>> {
    (0..MESSAGES).map(|tag| endpoint.isend(to, tag, pattern(LENGTH, tag)).unwrap()).collect()
}

#[test]
fn a_receiver_that_does_not_receive_keeps_little_and_later_gets_everything_in_order() {
    if !in_own_process() {
        return;
    }
    for background in ["off", "on"] {
        let endpoint = EndpointBuilder::new().eager_bytes(EAGER).open(&unique("flood")).unwrap();
        let (mut child, peer) = spawn_late_receiver(&endpoint, background);
        let before = memory_kib(child.id(), "VmRSS");
        let mut sends = flood(&endpoint, peer);
        let count = |sends: &mut Vec<OwnedOperation<_>>| {
            sends.iter_mut().filter_map(|send| send.is_done().then_some(())).count()
        };
        // Until nothing makes progress: the receiver has buffered as much as it may.
        let (mut done, mut quiet) = (0, 0);
        while quiet < 30 {
            let now = count(&mut sends);
            quiet = if now == done { quiet + 1 } else { 0 };
            done = now;
        }
        let limit = MAX_UNEXPECTED_BYTES + (1 << 20);
        assert!(done * LENGTH <= limit, "{done} messages of {LENGTH} bytes were sent");
        let grown = memory_kib(child.id(), "VmRSS").saturating_sub(before);
        say(format_args!("{background}: {done} of {MESSAGES} sent, the receiver grew {grown} KiB"));
        assert!(grown < 8 << 10, "the receiver grew by {grown} KiB");
        drop(child.take_input());
        for (tag, send) in sends.into_iter().enumerate() {
            assert!(send.wait().unwrap().1 == pattern(LENGTH, tag as u64));
        }
        endpoint.recv(peer, 0, TAG_ANY, &mut [0; 8]).unwrap();
        child.finish();
    }
}

#[test]
fn a_blocking_send_waits_for_the_receiver() {
    if !in_own_process() {
        return;
    }
    let endpoint = EndpointBuilder::new().eager_bytes(EAGER).open(&unique("blocking")).unwrap();
    let (mut child, peer) = spawn_late_receiver(&endpoint, "on");
    let (all_sent, before) = (AtomicBool::new(false), memory_kib(child.id(), "VmRSS"));
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            for tag in 0..MESSAGES {
                endpoint.send(peer, tag, &pattern(LENGTH, tag)).unwrap();
            }
            all_sent.store(true, Ordering::Relaxed);
        });
        until("half of the limit is buffered", || {
            let grown = memory_kib(child.id(), "VmRSS").saturating_sub(before);
            sending.is_finished() || grown >= MAX_UNEXPECTED_BYTES as u64 / 2048
        });
        // More is sent than the receiver may buffer, so the send cannot be complete.
        assert!(!all_sent.load(Ordering::Relaxed));
        drop(child.take_input());
    });
    endpoint.recv(peer, 0, TAG_ANY, &mut [0; 8]).unwrap();
    child.finish();
}

#[test]
fn one_peer_more_than_allowed_is_refused_with_the_reason() {
    if !in_own_process() {
        return;
    }
    let full = EndpointBuilder::new().max_peers(2).background(true).open(&unique("full")).unwrap();
    let others: Vec<_> = (0..3).map(|_| Endpoint::open(&unique("guest")).unwrap()).collect();
    others[0].connect(full.name()).unwrap();
    others[1].connect(full.name()).unwrap();
    let error = others[2].connect(full.name()).unwrap_err();
    assert!(matches!(&error, Error::Connect(ConnectError::Rejected(..))), "{error}");
    assert!(error.to_string().contains("max_peers"), "{error}");
    let listening = EndpointBuilder::new().background(true).open(&unique("listening")).unwrap();
    let error = full.connect(listening.name()).unwrap_err();
    assert_eq!(error, Error::Connect(ConnectError::TooManyPeers(2)));
    // A slot that becomes free can be used.
    let mut others = others.into_iter();
    others.next().unwrap().close();
    until("the slot is free", || full.peers().len() < 2);
    others.nth(1).unwrap().connect(full.name()).unwrap();
}

#[test]
fn more_operations_than_allowed_are_refused_and_room_comes_back() {
    if !in_own_process() {
        return;
    }
    let sides = pair(&EndpointBuilder::new().max_operations(10));
    let too_many = Error::Validation(ValidationError::TooManyOperations(10));
    let mut receives: Vec<_> = (0..10)
        .map(|tag| sides.there.irecv(sides.to_here, tag, TAG_ALL, vec![0u8; 8]).unwrap())
        .collect();
    let failed = sides.there.irecv(sides.to_here, 99, TAG_ALL, vec![1u8; 8]).unwrap_err();
    assert_eq!((failed.error, failed.buffer), (too_many.clone(), Some(vec![1; 8])));
    let mut sends: Vec<_> = (100..110)
        .map(|tag| sides.here.isend(sides.to_there, tag, pattern(1 << 20, tag)).unwrap())
        .collect();
    let failed = sides.here.isend(sides.to_there, 99, pattern(1 << 20, 9)).unwrap_err();
    assert_eq!(failed.error, too_many);
    assert!(failed.buffer == Some(pattern(1 << 20, 9)));
    // Unexpected messages do not help either: receiving one is an operation too.
    sides.settle();
    let failed = sides.there.irecv(sides.to_here, 100, TAG_ALL, vec![0u8; 1 << 20]).unwrap_err();
    assert_eq!(failed.error, too_many);
    receives.remove(0).operation().cancel();
    let mut receive = sides.there.irecv(sides.to_here, 100, TAG_ALL, vec![0; 1 << 20]).unwrap();
    sides.finish(&mut [receive.operation(), sends[0].operation()]);
    assert!(receive.wait().unwrap().1 == pattern(1 << 20, 100));
}

#[test]
fn many_shareable_buffers_are_as_good_as_few() {
    if !in_own_process() {
        return;
    }
    for builder in [EndpointBuilder::new(), EndpointBuilder::new().cross_memory(false)] {
        let sides = pair(&builder);
        let shareable = |seed| {
            let mut buffer = ShareableBuffer::new(40_000).unwrap();
            fill(&mut buffer, seed);
            buffer
        };
        // More than are mapped at a time, and more than are in flight at a time; twice, so that
        // slots of dropped ones are reused.
        for _ in 0..2 {
            let mut sends: Vec<_> = (0..200)
                .map(|tag| sides.here.isend(sides.to_there, tag, shareable(tag)).unwrap())
                .collect();
            let mut receives: Vec<_> = (0..200)
                .map(|tag| {
                    let buffer = shareable(1 << 20);
                    sides.there.irecv(sides.to_here, tag, TAG_ALL, buffer).unwrap()
                })
                .collect();
            let mut all: Vec<_> =
                sends.iter_mut().map(memferry_message::OwnedOperation::operation).collect();
            all.extend(receives.iter_mut().map(memferry_message::OwnedOperation::operation));
            sides.finish(&mut all);
            for (tag, receive) in receives.into_iter().enumerate() {
                let (_, buffer) = receive.wait().unwrap();
                assert_eq!(first_wrong(&buffer, tag as u64), None, "message {tag}");
            }
            for send in sends {
                send.wait().unwrap();
            }
        }
    }
}

#[test]
fn many_messages_at_a_time_are_as_good_as_few() {
    if !in_own_process() {
        return;
    }
    let sides = pair(&EndpointBuilder::new());
    let length = 300_000;
    let mut receives: Vec<_> = (0..100)
        .map(|tag| sides.there.irecv(sides.to_here, tag, TAG_ALL, vec![0; length]).unwrap())
        .collect();
    let mut sends: Vec<_> = (0..100)
        .map(|tag| sides.here.isend(sides.to_there, tag, pattern(length, tag)).unwrap())
        .collect();
    let mut all: Vec<_> =
        sends.iter_mut().map(memferry_message::OwnedOperation::operation).collect();
    all.extend(receives.iter_mut().map(memferry_message::OwnedOperation::operation));
    sides.finish(&mut all);
    for (tag, receive) in receives.into_iter().enumerate() {
        assert_eq!(first_wrong(&receive.wait().unwrap().1, tag as u64), None, "message {tag}");
    }
}

#[test]
fn coming_and_going_leaves_nothing_behind() {
    if !in_own_process() {
        return;
    }
    let guests = EndpointBuilder::new().eager_bytes(EAGER);
    let host = EndpointBuilder::new().background(true).open(&unique("host")).unwrap();
    let visit = || {
        let guest = guests.open(&unique("guest")).unwrap();
        let peer = guest.connect(host.name()).unwrap();
        guest.send(peer, 1, &pattern(5000, 1)).unwrap();
        let mut buffer = vec![0; 5000];
        host.recv(Source::Any, 1, TAG_ALL, &mut buffer).unwrap();
        assert_eq!(first_wrong(&buffer, 1), None);
    };
    visit();
    let before = resource_usage();
    for _ in 0..300 {
        visit();
    }
    until("no access is left", || {
        let now = resource_usage();
        host.peers().is_empty()
            && now.descriptors <= before.descriptors + 3
            && now.mappings <= before.mappings
    });
}

#[test]
fn a_hundred_callers_at_once_are_all_answered() {
    if !in_own_process() {
        return;
    }
    let host = EndpointBuilder::new().background(true).open(&unique("popular")).unwrap();
    std::thread::scope(|scope| {
        for number in 0..100u64 {
            let host = &host;
            scope.spawn(move || {
                let caller = Endpoint::open(&unique("caller")).unwrap();
                let peer = caller.connect(host.name()).unwrap();
                caller.send(peer, number, b"hello").unwrap();
                host.recv(Source::Any, number, TAG_ALL, &mut [0; 5]).unwrap();
            });
        }
    });
}

#[test]
fn other_processes_begin_here() {
    if process::role().is_some() {
        run_late_receiver();
    }
}
