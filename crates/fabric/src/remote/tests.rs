//! Two carriers in one process, over the loopback interface and a real libfabric.

// A test that checks nothing says so.
#![allow(clippy::print_stderr)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_message::{Carrier, CarrierEvent, Envelope, Error, Gone, Lane, Piece};

use super::packet::{Note, SMALL};
use super::peers::{ROOM, cost};
use super::*;

mod accesses;
mod endpoints;

/// An address that nobody else has, with the socket of an inner endpoint.
pub(super) fn name_for(inner: &Inner) -> Name {
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

/// An inner endpoint of the loopback interface, if there is a libfabric.
pub(super) fn inner() -> Option<Inner> {
    if !library::load() {
        skip_without_libfabric();
        return None;
    }
    let settings = Settings { interface: Some("127.0.0.1".into()), ..Settings::default() };
    Some(Inner::open(&settings).expect("libfabric reaches the loopback interface"))
}

/// A carrier and what it has said.
struct Side {
    carrier: RemoteCarrier,
    name: Name,
    directory: Arc<Directory>,
    regions: Arc<Regions>,
    events: Vec<CarrierEvent>,
}

impl Side {
    fn new() -> Option<Self> {
        let inner = inner()?;
        let (name, directory) = (name_for(&inner), Arc::new(Directory::default()));
        let regions = Arc::new(Regions::default());
        let carrier = RemoteCarrier::new(inner, name, Arc::clone(&directory), Arc::clone(&regions));
        Some(Self { carrier, name, directory, regions, events: Vec::new() })
    }

    fn number(&self, other: &Self) -> u64 {
        self.directory.number(&other.name).unwrap()
    }

    fn send(&mut self, to: u64, number: u64, envelope: Envelope, bytes: &[u8]) {
        let pieces = [Piece::source(bytes.as_ptr(), bytes.len())];
        self.carrier.send(to, number, &envelope, &pieces, false);
    }

    fn take(&mut self, mut is_it: impl FnMut(&CarrierEvent) -> bool) -> Option<CarrierEvent> {
        let at = self.events.iter().position(&mut is_it)?;
        Some(self.events.remove(at))
    }
}

fn both() -> Option<[Side; 2]> {
    Some([Side::new()?, Side::new()?])
}

/// Lets both move until the one has said something of the kind.
fn until(
    sides: &mut [Side; 2],
    of: usize,
    mut is_it: impl FnMut(&CarrierEvent) -> bool,
) -> CarrierEvent {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(event) = sides[of].take(&mut is_it) {
            return event;
        }
        assert!(Instant::now() < deadline, "it has not come; there are {:?}", sides[of].events);
        for side in sides.iter_mut() {
            side.carrier.poll(&mut side.events);
        }
    }
}

fn is_message(event: &CarrierEvent) -> bool {
    matches!(event, CarrierEvent::Arrived { .. } | CarrierEvent::Announced { .. })
}

fn is_sent(event: &CarrierEvent) -> bool {
    matches!(event, CarrierEvent::Sent { .. })
}

fn is_fetched(event: &CarrierEvent) -> bool {
    matches!(event, CarrierEvent::Fetched { .. })
}

fn is_gone(event: &CarrierEvent) -> bool {
    matches!(event, CarrierEvent::Gone { .. })
}

fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 31 + seed * 7 + at / 251) as u8).collect()
}

/// Receives the next message at the second of two, as a port would.
fn receive(sides: &mut [Side; 2], room: usize) -> (u64, Envelope, u64, Vec<u8>) {
    match until(sides, 1, is_message) {
        CarrierEvent::Arrived { peer, envelope, bytes } => {
            sides[1].carrier.taken(peer, bytes.len() as u64);
            (peer, envelope, bytes.len() as u64, bytes)
        }
        CarrierEvent::Announced { peer, envelope, length, ticket } => {
            let mut bytes = vec![0; room.min(length as usize)];
            let pieces = [Piece::target(bytes.as_mut_ptr(), bytes.len())];
            sides[1].carrier.fetch(peer, ticket, 77, &pieces, bytes.len() as u64);
            let CarrierEvent::Fetched { number: 77, outcome: Ok(()) } = until(sides, 1, is_fetched)
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
    let lengths = [0, 1, 100, SMALL - 1, SMALL, SMALL + 1, 65_536, 1_000_003, 8 << 20];
    for (round, length) in lengths.into_iter().enumerate() {
        let bytes = pattern(length, round);
        let data = (round % 2 == 0).then_some(round as u64);
        let lane = if round % 3 == 0 { Lane::Plain } else { Lane::Tagged };
        let tag = if lane == Lane::Plain { 0 } else { u64::MAX - round as u64 };
        let envelope = Envelope { lane, tag, data };
        sides[0].send(to, round as u64, envelope, &bytes);
        let (peer, came_with, came_length, came) = receive(&mut sides, usize::MAX);
        assert_eq!(sides[1].directory.name(peer), Some(sides[0].name));
        assert_eq!((came_with, came_length), (envelope, length as u64));
        assert!(came == bytes, "{length} bytes arrived as they were sent");
        let sent = until(&mut sides, 0, is_sent);
        let CarrierEvent::Sent { number, outcome: Ok(()) } = sent else { panic!("{sent:?}") };
        assert_eq!(number, round as u64);
    }
}

#[test]
fn many_pieces_go_out_and_come_in() {
    let Some(mut sides) = both() else { return };
    let to = sides[0].number(&sides[1]);
    let bytes = pattern(300_000, 5);
    let pieces: Vec<_> =
        bytes.chunks(1001).map(|part| Piece::source(part.as_ptr(), part.len())).collect();
    sides[0].carrier.send(to, 1, &Envelope::tagged(1), &pieces, false);
    let CarrierEvent::Announced { peer, ticket, length, .. } = until(&mut sides, 1, is_message)
    else {
        panic!("it is too long for a packet");
    };
    let mut room = vec![0; 300_000];
    let pieces: Vec<_> =
        room.chunks_mut(777).map(|part| Piece::target(part.as_mut_ptr(), part.len())).collect();
    sides[1].carrier.fetch(peer, ticket, 2, &pieces, length);
    until(&mut sides, 1, is_fetched);
    until(&mut sides, 0, is_sent);
    assert!(room == bytes);
}

#[test]
fn small_and_long_messages_keep_their_order() {
    let Some(mut sides) = both() else { return };
    let to = sides[0].number(&sides[1]);
    let all: Vec<_> = (0..600).map(|n| pattern([0, 8, 9000, 50_000, SMALL][n % 5], n)).collect();
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
    let fitting = (ROOM / cost(0)) as usize;
    for number in 0..fitting + 3 {
        sides[0].send(to, number as u64, Envelope::tagged(1), &[]);
    }
    let mut from = 0;
    for _ in 0..fitting {
        match until(&mut sides, 1, is_message) {
            CarrierEvent::Arrived { peer, .. } => from = peer,
            other => panic!("{other:?}"),
        }
    }
    for _ in 0..3 {
        let event = until(&mut sides, 1, is_message);
        let CarrierEvent::Announced { ticket, .. } = event else { panic!("{event:?}") };
        sides[1].carrier.fetch(from, ticket, 0, &[], 0);
        until(&mut sides, 1, is_fetched);
    }
    for _ in 0..fitting {
        sides[1].carrier.taken(from, 0);
    }
    for _ in 0..fitting + 3 {
        until(&mut sides, 0, is_sent);
    }
    // The packets that say so come in order with this one.
    let back = sides[1].number(&sides[0]);
    sides[1].send(back, 0, Envelope::tagged(2), b"now");
    until(&mut sides, 0, is_message);
    sides[0].send(to, 1, Envelope::tagged(3), &[]);
    assert!(matches!(until(&mut sides, 1, is_message), CarrierEvent::Arrived { .. }));
}

#[test]
fn what_cannot_be_announced_yet_is_held_back_and_keeps_its_order() {
    let Some(mut sides) = both() else { return };
    let to = sides[0].number(&sides[1]);
    let long = pattern(SMALL + 1, 1);
    let count = 3 * peers::MOST_OFFERS;
    for number in 0..count {
        let bytes = if number % 4 == 3 { &long[..5] } else { &long };
        sides[0].send(to, number as u64, Envelope::tagged(number as u64), bytes);
    }
    // Everything that can come has come before anything is fetched.
    for _ in 0..1000 {
        for side in &mut sides {
            side.carrier.poll(&mut side.events);
        }
    }
    for number in 0..count {
        let (_, envelope, _, came) = receive(&mut sides, usize::MAX);
        assert_eq!(envelope.tag, number as u64);
        assert!(
            came == long[..came.len()] && came.len() == if number % 4 == 3 { 5 } else { SMALL + 1 }
        );
    }
    for _ in 0..count {
        let sent = until(&mut sides, 0, is_sent);
        assert!(matches!(sent, CarrierEvent::Sent { outcome: Ok(()), .. }));
    }
    assert!(!sides.iter().any(|side| side.events.iter().any(is_gone)));
}

#[test]
fn a_delivered_message_is_over_when_it_was_fetched_and_not_before() {
    let Some(mut sides) = both() else { return };
    let to = sides[0].number(&sides[1]);
    for length in [0usize, 5, 100_000] {
        let bytes = pattern(length, 1);
        let pieces = [Piece::source(bytes.as_ptr(), bytes.len())];
        sides[0].carrier.send(to, 9, &Envelope::tagged(1), &pieces, true);
        let event = until(&mut sides, 1, is_message);
        let CarrierEvent::Announced { peer, ticket, .. } = event else { panic!("{event:?}") };
        for _ in 0..1000 {
            let [one, two] = &mut sides;
            one.carrier.poll(&mut one.events);
            two.carrier.poll(&mut two.events);
        }
        assert!(sides[0].take(is_sent).is_none());
        let mut room = vec![0; length];
        let pieces = [Piece::target(room.as_mut_ptr(), length)];
        sides[1].carrier.fetch(peer, ticket, 3, &pieces, length as u64);
        until(&mut sides, 1, is_fetched);
        until(&mut sides, 0, is_sent);
        assert!(room == bytes);
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
    assert!(matches!(until(&mut sides, 0, is_sent), CarrierEvent::Sent { outcome: Ok(()), .. }));
}

#[test]
fn a_peer_that_closes_is_gone_and_its_messages_end() {
    let Some([mut one, mut two]) = both() else { return };
    let (to_two, to_one) = (one.number(&two), two.number(&one));
    let bytes = pattern(1 << 20, 1);
    one.send(to_two, 1, Envelope::tagged(1), &bytes);
    two.send(to_one, 2, Envelope::tagged(1), b"the last word");
    let mut sides = [one, two];
    until(&mut sides, 1, is_message);
    let [mut one, two] = sides;
    // It closes without having fetched the message; what it had sent arrives.
    let closing = std::thread::spawn(move || drop(two));
    let deadline = Instant::now() + Duration::from_secs(60);
    while !one.events.iter().any(is_gone) && Instant::now() < deadline {
        one.carrier.poll(&mut one.events);
    }
    closing.join().unwrap();
    assert!(matches!(one.take(is_message), Some(CarrierEvent::Arrived { .. })));
    let sent = one.take(is_sent);
    let gone = Error::PeerGone(Gone::Closed);
    assert!(
        matches!(&sent, Some(CarrierEvent::Sent { number: 1, outcome: Err(e) }) if *e == gone),
        "{sent:?}"
    );
    assert!(
        matches!(one.take(is_gone), Some(CarrierEvent::Gone { peer, how: Gone::Closed }) if peer == to_two)
    );
    one.send(to_two, 3, Envelope::tagged(1), b"too late");
    one.carrier.poll(&mut one.events);
    assert!(matches!(one.take(is_sent), Some(CarrierEvent::Sent { outcome: Err(_), .. })));
}

#[test]
fn a_peer_that_is_not_there_is_gone() {
    let Some(mut one) = Side::new() else { return };
    let Some(other) = inner() else { return };
    let name = name_for(&other);
    drop(other);
    let to = one.directory.number(&name).unwrap();
    let bytes = pattern(100_000, 1);
    one.send(to, 1, Envelope::tagged(1), &bytes);
    one.carrier.patience = Duration::from_millis(50);
    let deadline = Instant::now() + Duration::from_secs(60);
    while !one.events.iter().any(is_gone) {
        assert!(Instant::now() < deadline, "it is noticed");
        one.carrier.poll(&mut one.events);
    }
    assert!(matches!(one.take(is_sent), Some(CarrierEvent::Sent { outcome: Err(_), .. })));
}

#[test]
fn a_peer_that_does_not_look_for_a_while_is_not_given_up() {
    let Some(mut sides) = both() else { return };
    let to = sides[0].number(&sides[1]);
    sides[0].carrier.patience = Duration::from_millis(10);
    let bytes = pattern(100_000, 1);
    sides[0].send(to, 1, Envelope::tagged(1), &bytes);
    let silence = Instant::now() + Duration::from_millis(300);
    while Instant::now() < silence {
        let one = &mut sides[0];
        one.carrier.poll(&mut one.events);
    }
    assert!(receive(&mut sides, usize::MAX).3 == bytes);
    until(&mut sides, 0, is_sent);
    assert!(!sides[0].events.iter().any(is_gone));
}

#[test]
fn a_carrier_can_be_dropped_with_work_under_way() {
    let Some([mut one, two]) = both() else { return };
    let to = one.number(&two);
    let bytes = pattern(4 << 20, 1);
    one.send(to, 1, Envelope::tagged(1), &bytes);
    let mut sides = [one, two];
    let event = until(&mut sides, 1, is_message);
    let CarrierEvent::Announced { peer, ticket, length, .. } = event else { panic!("{event:?}") };
    let mut room = vec![0; bytes.len()];
    let pieces = [Piece::target(room.as_mut_ptr(), room.len())];
    sides[1].carrier.fetch(peer, ticket, 1, &pieces, length);
    for _ in 0..20 {
        let [one, two] = &mut sides;
        one.carrier.poll(&mut one.events);
        two.carrier.poll(&mut two.events);
    }
    let [mut one, two] = sides;
    drop(two);
    let as_left = room.clone();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !one.events.iter().any(is_gone) {
        assert!(Instant::now() < deadline, "it is noticed");
        one.carrier.poll(&mut one.events);
    }
    assert!(one.take(is_sent).is_some());
    assert!(room == as_left, "nobody writes any more");
}

#[test]
fn a_carrier_that_nobody_has_used_is_quiet_and_can_be_waited_for() {
    let Some(mut sides) = both() else { return };
    let mut events = Vec::new();
    sides[1].carrier.poll(&mut events);
    assert!(sides[1].carrier.is_quiet());
    let to = sides[0].number(&sides[1]);
    sides[0].send(to, 1, Envelope::tagged(1), b"wake up");
    let deadline = Instant::now() + Duration::from_secs(60);
    while events.is_empty() {
        assert!(Instant::now() < deadline, "the descriptor tells");
        let [one, two] = &mut sides;
        one.carrier.poll(&mut one.events);
        if two.carrier.is_quiet() {
            let Some(descriptor) = two.carrier.descriptor() else { return };
            let mut waited =
                [rustix::event::PollFd::new(&descriptor, rustix::event::PollFlags::IN)];
            let moment = rustix::event::Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            if rustix::event::poll(&mut waited, Some(&moment)).unwrap() == 0 {
                continue;
            }
        }
        two.carrier.poll(&mut events);
    }
}

/// Sends a packet of one's own making to a carrier, as a peer of that name.
fn say(side: &mut Side, as_name: &Name, from: &Inner, bytes: &[u8]) -> Option<CarrierEvent> {
    let to = from.insert(socket_of(&side.name)).unwrap();
    let number = side.directory.number(as_name).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut finished = Vec::new();
    // SAFETY: the bytes live until the send has finished.
    while unsafe { from.send(bytes, to, 1) } == Err(Refused::Again) {
        assert!(Instant::now() < deadline);
        from.read(&mut finished);
        side.carrier.poll(&mut side.events);
    }
    while finished.is_empty() || !side.events.iter().any(|e| is_gone(e) || is_message(e)) {
        assert!(Instant::now() < deadline, "it has an effect");
        from.read(&mut finished);
        side.carrier.poll(&mut side.events);
    }
    side.take(|event| matches!(event, CarrierEvent::Gone { peer, .. } if *peer == number))
}

#[test]
fn a_peer_that_says_what_cannot_be_is_given_up() {
    let envelope = Envelope::tagged(1);
    let nonsense = [
        Note::Fetch { ticket: 1, label: 1, length: 1 },
        Note::Fetch { ticket: u64::MAX, label: 0, length: 0 },
        Note::Done { ticket: 1 },
        Note::Room { cost: 1 },
        Note::Room { cost: u64::MAX },
        Note::Bye,
    ];
    for note in nonsense {
        let (Some(mut side), Some(from)) = (Side::new(), inner()) else { return };
        let name = name_for(&from);
        let bytes = packet::encode(&name, identifier_of(&side.name), &note, 0);
        assert!(say(&mut side, &name, &from, &bytes).is_some(), "{note:?}");
    }
    let (Some(mut side), Some(from)) = (Side::new(), inner()) else { return };
    let name = name_for(&from);
    let whole = packet::encode(&name, identifier_of(&side.name), &Note::Whole { envelope }, 0);
    assert!(say(&mut side, &name, &from, &whole).is_none(), "that was right");
    let mut broken = whole.clone();
    broken[4] = 99;
    side.events.clear();
    assert!(say(&mut side, &name, &from, &broken).is_some(), "and that was not");
}

#[test]
fn a_message_that_is_announced_twice_ends_its_peer() {
    let (Some(mut side), Some(from)) = (Side::new(), inner()) else { return };
    let name = name_for(&from);
    let note = Note::Announce {
        envelope: Envelope::tagged(1),
        length: isize::MAX as u64,
        ticket: 4,
        acknowledged: true,
    };
    let bytes = packet::encode(&name, identifier_of(&side.name), &note, 0);
    assert!(say(&mut side, &name, &from, &bytes).is_none());
    side.events.clear();
    assert!(say(&mut side, &name, &from, &bytes).is_some());
}

#[test]
fn remote_peers_can_be_switched_off() {
    let settings = Settings { is_off: true, ..Settings::default() };
    let error = Inner::open(&settings).unwrap_err();
    assert!(error.to_string().contains("MEMFERRY_REMOTE"), "{error}");
}

#[test]
fn an_interface_that_does_not_exist_is_named() {
    if !library::load() {
        return skip_without_libfabric();
    }
    let settings = Settings { interface: Some("nosuch0".into()), ..Settings::default() };
    let error = Inner::open(&settings).unwrap_err();
    assert!(error.to_string().contains("nosuch0"), "{error}");
}

#[test]
fn small_messages_arrive_although_the_carrier_closes_before_the_peer_has_looked() {
    let Some([mut one, mut two]) = both() else { return };
    let to = one.number(&two);
    for number in 0..10 {
        one.send(to, number, Envelope::tagged(number), b"told as sent");
    }
    let closing = std::thread::spawn(move || drop(one));
    // The peer is busy for longer than a connection usually takes.
    std::thread::sleep(Duration::from_millis(1500));
    let deadline = Instant::now() + Duration::from_secs(60);
    while two.events.iter().filter(|event| is_message(event)).count() < 10 {
        assert!(Instant::now() < deadline, "they come: {:?}", two.events);
        two.carrier.poll(&mut two.events);
    }
    closing.join().unwrap();
}

#[test]
fn nobody_speaks_for_another_once_it_has_spoken_itself() {
    let (Some(mut sides), Some(impostor)) = (both(), inner()) else { return };
    let (to, back) = (sides[0].number(&sides[1]), sides[1].number(&sides[0]));
    // Both have spoken, so both know the other's address.
    sides[0].send(to, 1, Envelope::tagged(1), b"question");
    until(&mut sides, 1, is_message);
    sides[1].send(back, 1, Envelope::tagged(2), b"answer");
    until(&mut sides, 0, is_message);
    let target = identifier_of(&sides[0].name);
    let bye = packet::encode(&sides[1].name, target, &Note::Bye, 0);
    let at = impostor.insert(socket_of(&sides[0].name)).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut finished = Vec::new();
    // SAFETY: the bytes live until the send has finished.
    while unsafe { impostor.send(&bye, at, 1) } == Err(Refused::Again) || finished.is_empty() {
        assert!(Instant::now() < deadline);
        impostor.read(&mut finished);
        sides[0].carrier.poll(&mut sides[0].events);
    }
    for number in 0..100 {
        sides[1].send(back, number, Envelope::tagged(number), b"still here");
        until(&mut sides, 0, is_message);
    }
    assert!(!sides[0].events.iter().any(is_gone));
}

#[test]
fn packets_for_others_and_from_this_host_have_no_effect() {
    let (Some(mut side), Some(from)) = (Side::new(), inner()) else { return };
    let (name, target) = (name_for(&from), identifier_of(&side.name));
    let whole = Note::Whole { envelope: Envelope::tagged(1) };
    let mut ours = name;
    ours[20..36].copy_from_slice(&crate::address::HostId::ours().0);
    let mut broken = packet::encode(&name, target + 1, &whole, 0);
    broken[4] = 99;
    for bytes in [broken, packet::encode(&ours, target, &whole, 0)] {
        side.carrier.arrived(&bytes, crate::abi::FI_ADDR_NOTAVAIL);
    }
    side.carrier.poll(&mut side.events);
    assert!(side.events.is_empty() && side.carrier.peers.is_empty(), "{:?}", side.events);
    let right = packet::encode(&name, target, &whole, 0);
    side.carrier.arrived(&right, crate::abi::FI_ADDR_NOTAVAIL);
    side.carrier.poll(&mut side.events);
    assert!(side.take(is_message).is_some());
}

#[test]
fn a_message_under_way_ends_when_its_host_has_vanished() {
    // Before the carriers, which use it until they are gone.
    let bytes = pattern(64 << 20, 1);
    let mut room = vec![0; bytes.len()];
    let Some(mut sides) = both() else { return };
    let to = sides[0].number(&sides[1]);
    // The first connects, and sends what the other asks for; then the other is silent.
    sides[0].send(to, 1, Envelope::tagged(1), &bytes);
    let event = until(&mut sides, 1, is_message);
    let CarrierEvent::Announced { peer, ticket, length, .. } = event else { panic!("{event:?}") };
    let pieces = [Piece::target(room.as_mut_ptr(), room.len())];
    sides[1].carrier.fetch(peer, ticket, 1, &pieces, length);
    let deadline = Instant::now() + Duration::from_secs(60);
    while sides[0].carrier.peers[0].under_way == 0 {
        assert!(Instant::now() < deadline, "it is asked for");
        for side in &mut sides {
            side.carrier.poll(&mut side.events);
        }
    }
    let one = &mut sides[0];
    one.carrier.patience = Duration::from_millis(8);
    one.carrier.end(0, Gone::Ended);
    one.carrier.peers[0].cut_at = Some(Instant::now());
    while !one.events.iter().any(is_gone) {
        assert!(Instant::now() < deadline, "the inner endpoint lets go");
        one.carrier.is_quiet();
        one.carrier.poll(&mut one.events);
        if one.carrier.peers[0].is_cut && Instant::now() + Duration::from_secs(50) > deadline {
            // Some versions do not let go of it; no need to wait for the next try.
            one.carrier.peers[0].cut_at = Some(Instant::now());
        }
    }
    assert!(one.take(is_sent).is_some());
    // It can be used, and closed.
    one.send(to, 2, Envelope::tagged(1), b"nobody");
    one.carrier.poll(&mut one.events);
    assert!(matches!(one.take(is_sent), Some(CarrierEvent::Sent { outcome: Err(_), .. })));
}
