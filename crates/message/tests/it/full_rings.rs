//! Receivers without space: their senders wait, and nothing else does.

use memferry_message::{EndpointBuilder, Error, OwnedOperation, Peer, TAG_ALL, TAG_ANY};
use memferry_testing::message::{Pair, pair};
use memferry_testing::pattern::{first_wrong, pattern};

/// The number of bytes of unexpected messages that a side buffers.
const MAX_UNEXPECTED_BYTES: usize = 100_000;
const LENGTH: usize = 1000;

/// Two endpoints, of which `there` has sent more payload to `here` than `here` buffers.
fn flooded() -> (Pair, Vec<OwnedOperation<Vec<u8>>>) {
    flooded_with(
        &EndpointBuilder::new().max_unexpected_bytes(MAX_UNEXPECTED_BYTES).eager_bytes(8 << 10),
    )
}

fn flooded_with(builder: &EndpointBuilder) -> (Pair, Vec<OwnedOperation<Vec<u8>>>) {
    let sides = pair(builder);
    let sends: Vec<_> = (0..1500)
        .map(|tag| sides.there.isend(sides.to_here, tag, pattern(LENGTH, tag)).unwrap())
        .collect();
    sides.settle();
    (sides, sends)
}

/// Receives this many messages at `here`, in order.
fn receive(sides: &Pair, from: Peer, numbers: std::ops::Range<u64>) {
    for tag in numbers {
        let mut receive = sides.here.irecv(from, tag, TAG_ALL, vec![0; LENGTH]).unwrap();
        sides.finish(&mut [receive.operation()]);
        assert_eq!(first_wrong(&receive.wait().unwrap().1, tag), None, "message {tag}");
    }
}

#[test]
fn a_full_receiver_gets_the_rest_when_it_receives() {
    // One buffers announcements of all, the other not even those.
    for (sides, mut sends) in
        [flooded(), flooded_with(&EndpointBuilder::new().max_unexpected_messages(10))]
    {
        let waiting = sends.iter_mut().filter_map(|send| (!send.is_done()).then_some(())).count();
        assert!(waiting > 900, "only {waiting} are pending");
        receive(&sides, sides.to_there, 0..1500);
        sends.into_iter().for_each(|send| drop(send.wait().unwrap()));
    }
}

#[test]
fn a_message_that_is_asked_for_out_of_turn_passes_those_that_are_kept() {
    let (sides, sends) = flooded();
    // The last buffered message, while the ones before it stay.
    receive(&sides, sides.to_there, 60..61);
    receive(&sides, sides.to_there, 0..60);
    receive(&sides, sides.to_there, 61..1500);
    drop(sends);
}

#[test]
fn one_who_dies_with_a_full_ring_is_lost_and_what_it_had_sent_arrives() {
    let (sides, mut sends) = flooded();
    let mut back = sides.here.isend(sides.to_there, 1, pattern(1 << 20, 1)).unwrap();
    let mut posted = sides.here.irecv(sides.to_there, 1 << 40, TAG_ALL, vec![0u8; 8]).unwrap();
    assert!(!back.is_done() && !posted.is_done());
    let sent = sends.iter_mut().filter_map(|send| send.is_done().then_some(())).count() as u64;
    sides.there.clone().close();
    memferry_testing::message::until("everything with it has ended", || {
        back.is_done() && posted.is_done()
    });
    assert!(matches!(back.wait().unwrap_err().error, Error::PeerDisconnected(_)));
    assert!(matches!(posted.wait().unwrap_err().error, Error::PeerDisconnected(_)));
    assert!(sides.here.peers().is_empty());
    assert!(sent * LENGTH as u64 <= MAX_UNEXPECTED_BYTES as u64 + (1 << 20), "{sent} were taken");
    receive(&sides, sides.to_there, 0..sent);
    let none = sides.here.recv(sides.to_there, 0, TAG_ANY, &mut [0; LENGTH]);
    assert!(matches!(none, Err(Error::PeerDisconnected(_))), "{none:?}");
}

/// Replies overtake messages for which the receiver has no space: its own messages complete at the
/// same time.
#[test]
fn a_full_receiver_can_still_send() {
    let (sides, sends) = flooded();
    let mut send = sides.here.isend(sides.to_there, 5, pattern(1 << 20, 5)).unwrap();
    let mut receive = sides.there.irecv(sides.to_here, 5, TAG_ALL, vec![0u8; 1 << 20]).unwrap();
    sides.finish(&mut [receive.operation()]);
    sides.settle();
    assert!(send.is_done(), "it has arrived, but the send is not complete");
    drop(sends);
}

#[test]
fn the_last_of_many_messages_can_be_received_first() {
    let (sides, sends) = flooded();
    receive(&sides, sides.to_there, 1499..1500);
    receive(&sides, sides.to_there, 0..1499);
    sends.into_iter().for_each(|send| drop(send.wait().unwrap()));
}

#[test]
fn one_who_keeps_nothing_still_gets_what_it_asks_for() {
    for builder in [
        EndpointBuilder::new().max_unexpected_messages(0),
        EndpointBuilder::new().max_unexpected_bytes(0),
    ] {
        let sides = pair(&builder);
        for tag in 0..50 {
            // Unexpected, then expected.
            let sends = [0, 1]
                .map(|_| sides.there.isend(sides.to_here, tag, pattern(LENGTH, tag)).unwrap());
            sides.settle();
            receive(&sides, sides.to_there, tag..tag + 1);
            receive(&sides, sides.to_there, tag..tag + 1);
            for mut send in sends {
                sides.finish(&mut [send.operation()]);
            }
        }
    }
}
