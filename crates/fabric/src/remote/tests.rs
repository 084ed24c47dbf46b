//! Two transports in one process, over the loopback interface and a real libfabric.

// A test that checks nothing says so.
#![allow(clippy::print_stderr)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_message::{
    DisconnectReason, Envelope, Error, MatchSpace, RemoteEvent, RemoteTransport, Segment,
};

use super::packet::{MAX_EAGER, PacketBody};
use super::peers::{CREDIT_LIMIT, cost};
use super::*;

mod accesses;
mod endpoints;
mod ends;

/// A unique address, with the socket of an inner endpoint.
pub(super) fn address_for(inner: &InnerEndpoint) -> RawAddress {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut name = [0; 64];
    name[..4].copy_from_slice(b"mfy1");
    let id = NEXT.fetch_add(1, Ordering::Relaxed) << 32 | u64::from(std::process::id());
    name[4..12].copy_from_slice(&id.to_le_bytes());
    name[36..].copy_from_slice(&inner.address().0);
    name
}

fn skip_without_libfabric() {
    let why = "the library is not installed: apt install libfabric1";
    memferry_testing::skip(memferry_testing::Requirement::Libfabric, why);
}

/// An inner endpoint on the loopback interface, if there is a libfabric.
pub(super) fn inner() -> Option<InnerEndpoint> {
    if !library::load() {
        skip_without_libfabric();
        return None;
    }
    let settings = RemoteConfig { interface: Some("127.0.0.1".into()), ..RemoteConfig::default() };
    Some(InnerEndpoint::open(&settings).expect("libfabric reaches the loopback interface"))
}

/// A transport and its events.
struct TestSide {
    transport: FabricTransport,
    address: RawAddress,
    directory: Arc<Directory>,
    mr_table: Arc<MrTable>,
    events: Vec<RemoteEvent>,
}

impl TestSide {
    fn new() -> Option<Self> {
        let inner = inner()?;
        let (name, directory) = (address_for(&inner), Arc::new(Directory::default()));
        let regions = Arc::new(MrTable::default());
        let transport =
            FabricTransport::new(inner, name, Arc::clone(&directory), Arc::clone(&regions));
        Some(Self { transport, address: name, directory, mr_table: regions, events: Vec::new() })
    }

    fn number(&self, other: &Self) -> u64 {
        self.directory.number(&other.address).unwrap()
    }

    fn send(&mut self, to: u64, number: u64, envelope: Envelope, bytes: &[u8]) {
        let segments = [Segment::source(bytes.as_ptr(), bytes.len())];
        self.transport.send(to, number, &envelope, &segments, false);
    }

    fn take(&mut self, mut is_it: impl FnMut(&RemoteEvent) -> bool) -> Option<RemoteEvent> {
        let at = self.events.iter().position(&mut is_it)?;
        Some(self.events.remove(at))
    }
}

fn both() -> Option<[TestSide; 2]> {
    Some([TestSide::new()?, TestSide::new()?])
}

/// Makes progress on both until one has an event of the given kind.
fn until(
    sides: &mut [TestSide; 2],
    of: usize,
    mut is_it: impl FnMut(&RemoteEvent) -> bool,
) -> RemoteEvent {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(event) = sides[of].take(&mut is_it) {
            return event;
        }
        assert!(Instant::now() < deadline, "it has not come; there are {:?}", sides[of].events);
        for side in sides.iter_mut() {
            side.transport.poll(&mut side.events);
        }
    }
}

fn is_message(event: &RemoteEvent) -> bool {
    matches!(event, RemoteEvent::Arrived { .. } | RemoteEvent::Rts { .. })
}

fn is_sent(event: &RemoteEvent) -> bool {
    matches!(event, RemoteEvent::Sent { .. })
}

fn is_fetched(event: &RemoteEvent) -> bool {
    matches!(event, RemoteEvent::Fetched { .. })
}

fn is_disconnected(event: &RemoteEvent) -> bool {
    matches!(event, RemoteEvent::Disconnected { .. })
}

fn pattern(length: usize, seed: usize) -> Vec<u8> {
    memferry_testing::pattern::pattern(length, seed as u64)
}

/// Receives the next message on the second of two, as a port would.
fn receive(sides: &mut [TestSide; 2], destination: usize) -> (u64, Envelope, u64, Vec<u8>) {
    match until(sides, 1, is_message) {
        RemoteEvent::Arrived { peer, envelope, bytes } => {
            sides[1].transport.return_credit(peer, bytes.len() as u64);
            (peer, envelope, bytes.len() as u64, bytes)
        }
        RemoteEvent::Rts { peer, envelope, length, ticket } => {
            let mut bytes = vec![0; destination.min(length as usize)];
            let segments = [Segment::target(bytes.as_mut_ptr(), bytes.len())];
            sides[1].transport.fetch(peer, ticket, 77, &segments, bytes.len() as u64);
            let RemoteEvent::Fetched { number: 77, outcome: Ok(()) } = until(sides, 1, is_fetched)
            else {
                panic!("the fetch ends well");
            };
            (peer, envelope, length, bytes)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn messages_of_all_lengths_arrive_as_they_were_sent() {
    let Some(mut sides) = both() else { return };
    let to = sides[0].number(&sides[1]);
    let lengths = [0, 1, 100, MAX_EAGER - 1, MAX_EAGER, MAX_EAGER + 1, 65_536, 1_000_003, 8 << 20];
    for (round, length) in lengths.into_iter().enumerate() {
        let bytes = pattern(length, round);
        let data = (round % 2 == 0).then_some(round as u64);
        let lane = if round % 3 == 0 { MatchSpace::Untagged } else { MatchSpace::Tagged };
        let tag = if lane == MatchSpace::Untagged { 0 } else { u64::MAX - round as u64 };
        let envelope = Envelope { space: lane, tag, data };
        sides[0].send(to, round as u64, envelope, &bytes);
        let (peer, came_with, came_length, came) = receive(&mut sides, usize::MAX);
        assert_eq!(sides[1].directory.address(peer), Some(sides[0].address));
        assert_eq!((came_with, came_length), (envelope, length as u64));
        assert!(came == bytes, "{length} bytes arrived as they were sent");
        let sent = until(&mut sides, 0, is_sent);
        let RemoteEvent::Sent { number, outcome: Ok(()) } = sent else { panic!("{sent:?}") };
        assert_eq!(number, round as u64);
    }
}

#[test]
fn many_pieces_go_out_and_come_in() {
    let Some(mut sides) = both() else { return };
    let to = sides[0].number(&sides[1]);
    let bytes = pattern(300_000, 5);
    let segments: Vec<_> =
        bytes.chunks(1001).map(|part| Segment::source(part.as_ptr(), part.len())).collect();
    sides[0].transport.send(to, 1, &Envelope::tagged(1), &segments, false);
    let RemoteEvent::Rts { peer, ticket, length, .. } = until(&mut sides, 1, is_message) else {
        panic!("it is too long for a packet");
    };
    let mut destination = vec![0; 300_000];
    let segments: Vec<_> = destination
        .chunks_mut(777)
        .map(|part| Segment::target(part.as_mut_ptr(), part.len()))
        .collect();
    sides[1].transport.fetch(peer, ticket, 2, &segments, length);
    until(&mut sides, 1, is_fetched);
    until(&mut sides, 0, is_sent);
    assert!(destination == bytes);
}

#[test]
fn small_and_long_messages_keep_their_order() {
    let Some(mut sides) = both() else { return };
    let to = sides[0].number(&sides[1]);
    let all: Vec<_> =
        (0..600).map(|n| pattern([0, 8, 9000, 50_000, MAX_EAGER][n % 5], n)).collect();
    for (number, bytes) in all.iter().enumerate() {
        sides[0].send(to, number as u64, Envelope::tagged(number as u64), bytes);
    }
    for (number, bytes) in all.iter().enumerate() {
        let (_, envelope, _, came) = receive(&mut sides, usize::MAX);
        assert_eq!(envelope.tag, number as u64);
        assert!(came == *bytes, "message {number}");
    }
    for _ in 0..600 {
        until(&mut sides, 0, is_sent);
    }
}

#[test]
fn what_nobody_takes_is_announced_once_there_is_no_room_and_empty_messages_count() {
    let Some(mut sides) = both() else { return };
    let to = sides[0].number(&sides[1]);
    let fitting = (CREDIT_LIMIT / cost(0)) as usize;
    for number in 0..fitting + 3 {
        sides[0].send(to, number as u64, Envelope::tagged(1), &[]);
    }
    let mut from = 0;
    for _ in 0..fitting {
        match until(&mut sides, 1, is_message) {
            RemoteEvent::Arrived { peer, .. } => from = peer,
            other => panic!("{other:?}"),
        }
    }
    for _ in 0..3 {
        let event = until(&mut sides, 1, is_message);
        let RemoteEvent::Rts { ticket, .. } = event else { panic!("{event:?}") };
        sides[1].transport.fetch(from, ticket, 0, &[], 0);
        until(&mut sides, 1, is_fetched);
    }
    for _ in 0..fitting {
        sides[1].transport.return_credit(from, 0);
    }
    for _ in 0..fitting + 3 {
        until(&mut sides, 0, is_sent);
    }
    // The packets of these events arrive in order with this one.
    let back = sides[1].number(&sides[0]);
    sides[1].send(back, 0, Envelope::tagged(2), b"now");
    until(&mut sides, 0, is_message);
    sides[0].send(to, 1, Envelope::tagged(3), &[]);
    assert!(matches!(until(&mut sides, 1, is_message), RemoteEvent::Arrived { .. }));
}

#[test]
fn what_cannot_be_announced_yet_is_held_back_and_keeps_its_order() {
    let Some(mut sides) = both() else { return };
    let to = sides[0].number(&sides[1]);
    let long = pattern(MAX_EAGER + 1, 1);
    let count = 3 * peers::MAX_PENDING_RTS;
    for number in 0..count {
        let bytes = if number % 4 == 3 { &long[..5] } else { &long };
        sides[0].send(to, number as u64, Envelope::tagged(number as u64), bytes);
    }
    // Everything arrives before anything is fetched.
    for _ in 0..1000 {
        for side in &mut sides {
            side.transport.poll(&mut side.events);
        }
    }
    for number in 0..count {
        let (_, envelope, _, came) = receive(&mut sides, usize::MAX);
        assert_eq!(envelope.tag, number as u64);
        assert!(
            came == long[..came.len()]
                && came.len() == if number % 4 == 3 { 5 } else { MAX_EAGER + 1 }
        );
    }
    for _ in 0..count {
        let sent = until(&mut sides, 0, is_sent);
        assert!(matches!(sent, RemoteEvent::Sent { outcome: Ok(()), .. }));
    }
    assert!(!sides.iter().any(|side| side.events.iter().any(is_disconnected)));
}

#[test]
fn a_delivered_message_is_over_when_it_was_fetched_and_not_before() {
    let Some(mut sides) = both() else { return };
    let to = sides[0].number(&sides[1]);
    for length in [0usize, 5, 100_000] {
        let bytes = pattern(length, 1);
        let segments = [Segment::source(bytes.as_ptr(), bytes.len())];
        sides[0].transport.send(to, 9, &Envelope::tagged(1), &segments, true);
        let event = until(&mut sides, 1, is_message);
        let RemoteEvent::Rts { peer, ticket, .. } = event else { panic!("{event:?}") };
        for _ in 0..1000 {
            let [one, two] = &mut sides;
            one.transport.poll(&mut one.events);
            two.transport.poll(&mut two.events);
        }
        assert!(sides[0].take(is_sent).is_none());
        let mut destination = vec![0; length];
        let segments = [Segment::target(destination.as_mut_ptr(), length)];
        sides[1].transport.fetch(peer, ticket, 3, &segments, length as u64);
        until(&mut sides, 1, is_fetched);
        until(&mut sides, 0, is_sent);
        assert!(destination == bytes);
    }
}

#[test]
fn a_fetch_may_want_less_than_there_is() {
    let Some(mut sides) = both() else { return };
    let to = sides[0].number(&sides[1]);
    let bytes = pattern(100_000, 3);
    sides[0].send(to, 1, Envelope::tagged(1), &bytes);
    let (_, _, length, came) = receive(&mut sides, 60_001);
    assert_eq!(length, 100_000);
    assert!(came == bytes[..60_001]);
    sides[0].send(to, 1, Envelope::tagged(1), &bytes);
    receive(&mut sides, 0);
    assert!(matches!(until(&mut sides, 0, is_sent), RemoteEvent::Sent { outcome: Ok(()), .. }));
}

/// Sends a hand-made packet to a transport, as a peer with that address.
fn inject(
    side: &mut TestSide,
    as_name: &RawAddress,
    from: &InnerEndpoint,
    bytes: &[u8],
) -> Option<RemoteEvent> {
    let to = from.insert(socket_of(&side.address)).unwrap();
    let number = side.directory.number(as_name).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut finished = Vec::new();
    // SAFETY: the bytes live until the send completes.
    while unsafe { from.send(bytes, to, 1) } == Err(PostError::Again) {
        assert!(Instant::now() < deadline);
        from.read(&mut finished);
        side.transport.poll(&mut side.events);
    }
    while finished.is_empty() || !side.events.iter().any(|e| is_disconnected(e) || is_message(e)) {
        assert!(Instant::now() < deadline, "the packet has an effect");
        from.read(&mut finished);
        side.transport.poll(&mut side.events);
    }
    side.take(|event| matches!(event, RemoteEvent::Disconnected { peer, .. } if *peer == number))
}
