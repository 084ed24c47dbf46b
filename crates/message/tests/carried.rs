//! Messages that a carrier brings meet receives like all others. The carrier here is a model: two
//! boxes in one process.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use memferry_message::{
    AccessWay, CarriedAccess, Carrier, CarrierEvent, Ending, Endpoint, Envelope, Error, Gone, Peer,
    Piece, Report, ReportKind, Source, TAG_ALL, Wanted,
};

/// Longer messages are announced.
const SMALL: usize = 100;

#[derive(Debug)]
enum Letter {
    Whole(Envelope, Vec<u8>),
    Waits { envelope: Envelope, length: u64, ticket: u64 },
    Wanted { ticket: u64, fetch: u64, length: u64 },
    Data { fetch: u64, bytes: Vec<u8> },
    Gone,
}

/// What is on its way to each of the two.
type Boxes = Arc<Mutex<[VecDeque<Letter>; 2]>>;

/// Carries messages between two endpoints, each of which has the other as peer 5.
#[derive(Debug)]
struct Model {
    side: usize,
    boxes: Boxes,
    waiting: HashMap<u64, Vec<Piece>>,
    fetching: HashMap<u64, Vec<Piece>>,
    over: Vec<CarrierEvent>,
    taken: Arc<Mutex<u64>>,
}

const OTHER: u64 = 5;
const KEY: u64 = 12;

impl Model {
    fn post(&self, letter: Letter) {
        self.boxes.lock().unwrap()[1 - self.side].push_back(letter);
    }
}

fn read(pieces: &[Piece]) -> Vec<u8> {
    let bytes = |piece: &Piece| match piece.length {
        0 => Vec::new(),
        // SAFETY: the endpoint keeps the memory of a message until it is over.
        length => unsafe { std::slice::from_raw_parts(piece.address, length) }.to_vec(),
    };
    pieces.iter().flat_map(bytes).collect()
}

impl Carrier for Model {
    fn send(&mut self, peer: u64, number: u64, envelope: &Envelope, pieces: &[Piece], late: bool) {
        assert_eq!(peer, OTHER);
        let bytes = read(pieces);
        if bytes.len() <= SMALL && !late {
            self.post(Letter::Whole(*envelope, bytes));
            self.over.push(CarrierEvent::Sent { number, outcome: Ok(()) });
        } else {
            let (envelope, length, ticket) = (*envelope, bytes.len() as u64, number);
            self.waiting.insert(ticket, pieces.to_vec());
            self.post(Letter::Waits { envelope, length, ticket });
        }
    }

    fn fetch(&mut self, _: u64, ticket: u64, number: u64, pieces: &[Piece], length: u64) {
        self.fetching.insert(number, pieces.to_vec());
        self.post(Letter::Wanted { ticket, fetch: number, length });
    }

    fn taken(&mut self, _: u64, bytes: u64) {
        *self.taken.lock().unwrap() += bytes;
    }

    /// The other's memory is a byte: its address. Only one key is answered.
    fn access(&mut self, peer: u64, number: u64, access: &CarriedAccess) {
        assert_eq!((peer, access.local.length), (OTHER, 1));
        match (access.key, access.way) {
            (KEY, AccessWay::Put) => {
                assert_eq!(u64::from(read(&[access.local])[0]), access.address);
            }
            // SAFETY: the endpoint keeps the memory of an access until it is over.
            (KEY, AccessWay::Get) => unsafe { access.local.address.write(access.address as u8) },
            _ => return,
        }
        self.over.push(CarrierEvent::Accessed { number, outcome: Ok(()) });
    }

    fn poll(&mut self, events: &mut Vec<CarrierEvent>) {
        events.append(&mut self.over);
        let letters = std::mem::take(&mut self.boxes.lock().unwrap()[self.side]);
        for letter in letters {
            match letter {
                Letter::Whole(envelope, bytes) => {
                    events.push(CarrierEvent::Arrived { peer: OTHER, envelope, bytes });
                }
                Letter::Waits { envelope, length, ticket } => {
                    let peer = OTHER;
                    events.push(CarrierEvent::Announced { peer, envelope, length, ticket });
                }
                Letter::Wanted { ticket, fetch, length } => {
                    let mut bytes = read(&self.waiting.remove(&ticket).unwrap());
                    bytes.truncate(length as usize);
                    self.post(Letter::Data { fetch, bytes });
                    events.push(CarrierEvent::Sent { number: ticket, outcome: Ok(()) });
                }
                Letter::Data { fetch, bytes } => {
                    let mut bytes = &bytes[..];
                    for piece in self.fetching.remove(&fetch).unwrap() {
                        let (now, later) = bytes.split_at(piece.length.min(bytes.len()));
                        // SAFETY: as in `read`, for a length that the piece has.
                        unsafe { piece.address.copy_from(now.as_ptr(), now.len()) };
                        bytes = later;
                    }
                    events.push(CarrierEvent::Fetched { number: fetch, outcome: Ok(()) });
                }
                Letter::Gone => {
                    events.push(CarrierEvent::Gone { peer: OTHER, how: Gone::Ended });
                }
            }
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn is_quiet(&mut self) -> bool {
        true
    }
}

struct Side {
    endpoint: Endpoint,
    other: Peer,
    taken: Arc<Mutex<u64>>,
}

fn sides(name: &str) -> ([Side; 2], Boxes) {
    let boxes = Boxes::default();
    let sides = [0, 1].map(|side| {
        let name = format!("carried-{}-{name}-{side}", std::process::id());
        let endpoint = Endpoint::open(&name).unwrap();
        let taken = Arc::<Mutex<u64>>::default();
        let carrier = Model {
            side,
            boxes: boxes.clone(),
            waiting: HashMap::new(),
            fetching: HashMap::new(),
            over: Vec::new(),
            taken: taken.clone(),
        };
        endpoint.carry(Box::new(carrier)).unwrap();
        let other = endpoint.know_carried(OTHER).unwrap();
        assert_eq!(endpoint.carried_number(other), Some(OTHER));
        Side { endpoint, other, taken }
    });
    (sides, boxes)
}

fn reports(sides: &[Side; 2], of: usize, count: usize) -> Vec<Report> {
    let mut found = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(60);
    while found.len() < count {
        assert!(Instant::now() < deadline, "{} of {count} reports came", found.len());
        sides[1 - of].endpoint.progress();
        sides[of].endpoint.collect(&mut found);
    }
    found
}

fn ending(context: u64) -> Ending {
    Ending { context, ..Ending::default() }
}

fn target(bytes: &mut [u8]) -> [Piece; 1] {
    [Piece::target(bytes.as_mut_ptr(), bytes.len())]
}

#[test]
fn carried_messages_arrive_in_order_whether_they_are_waited_for_or_not() {
    let (sides, _) = sides("order");
    let [one, two] = &sides;
    let messages: Vec<Vec<u8>> = [0, 5, 5000, SMALL, SMALL + 1, 1]
        .iter()
        .map(|length| vec![*length as u8; *length])
        .collect();
    for expected_first in [false, true] {
        let mut rooms = vec![vec![0u8; 6000]; messages.len()];
        let post = |rooms: &mut [Vec<u8>]| {
            for (number, room) in rooms.iter_mut().enumerate() {
                let wanted = Wanted::tagged(Source::Any, 1, TAG_ALL);
                // SAFETY: they live until their reports have come.
                unsafe {
                    two.endpoint.post_receive(&wanted, &target(room), number as u64).unwrap();
                };
            }
        };
        if expected_first {
            post(&mut rooms);
        }
        for (number, message) in messages.iter().enumerate() {
            let envelope = Envelope { tag: 1, data: Some(number as u64), ..Envelope::default() };
            let pieces = [Piece::source(message.as_ptr(), message.len())];
            // SAFETY: the message lives until its report has come.
            let sent = unsafe { one.endpoint.post_send(one.other, envelope, &pieces, ending(9)) };
            assert!(sent.unwrap().is_none());
        }
        if !expected_first {
            while two.endpoint.peek(&Wanted::tagged(two.other, 1, TAG_ALL), None).unwrap().is_none()
            {
            }
            post(&mut rooms);
        }
        let mut found = reports(&sides, 1, messages.len());
        found.sort_by_key(|report| report.context);
        for (number, report) in found.iter().enumerate() {
            assert_eq!((report.context, &report.outcome), (number as u64, &Ok(())));
            assert_eq!((report.envelope.data, report.peer), (Some(number as u64), Some(two.other)));
            assert_eq!(report.length as usize, messages[number].len());
            assert_eq!(rooms[number][..messages[number].len()], messages[number][..]);
        }
        let sent = reports(&sides, 0, messages.len());
        assert!(sent.iter().all(|r| r.kind == ReportKind::Send && r.outcome.is_ok()));
    }
    let small: usize = messages.iter().map(Vec::len).filter(|length| *length <= SMALL).sum();
    assert_eq!(*two.taken.lock().unwrap(), 2 * small as u64, "the room is told of");
}

#[test]
fn a_receive_from_anybody_takes_what_comes_first_from_near_and_far() {
    let (sides, _) = sides("any");
    let [one, two] = &sides;
    let near = one.endpoint.know(two.endpoint.name()).unwrap();
    one.endpoint.inject(one.other, Envelope::tagged(3), b"far").unwrap();
    let mut room = [0; 8];
    let wanted = Wanted::tagged(Source::Any, 3, TAG_ALL);
    // SAFETY: it lives until its report has come, here and below.
    unsafe { two.endpoint.post_receive(&wanted, &target(&mut room), 1).unwrap() };
    assert_eq!(reports(&sides, 1, 1)[0].peer, Some(two.other));
    assert_eq!(&room[..3], b"far");
    one.endpoint.inject(near, Envelope::tagged(3), b"near").unwrap();
    // SAFETY: as above.
    unsafe { two.endpoint.post_receive(&wanted, &target(&mut room), 2).unwrap() };
    assert_ne!(reports(&sides, 1, 1)[0].peer, Some(two.other));
    assert_eq!(&room[..4], b"near");
}

#[test]
fn what_is_too_long_or_not_wanted_is_fetched_only_as_far_as_needed() {
    let (sides, _) = sides("cut");
    let [one, two] = &sides;
    let message = vec![7; 5000];
    let pieces = [Piece::source(message.as_ptr(), message.len())];
    let mut room = [0; 10];
    let wanted = Wanted::tagged(two.other, 1, TAG_ALL);
    // SAFETY: all of it lives until the reports have come, here and below.
    unsafe {
        drop(one.endpoint.post_send(one.other, Envelope::tagged(1), &pieces, ending(1)));
        two.endpoint.post_receive(&wanted, &target(&mut room), 2).unwrap();
    }
    let cut = reports(&sides, 1, 1).pop().unwrap();
    let (message_bytes, buffer_bytes) = (5000, 10);
    assert_eq!(cut.outcome, Err(Error::Truncated { message_bytes, buffer_bytes }));
    assert_eq!((room, reports(&sides, 0, 1)[0].context), ([7; 10], 1));
    // SAFETY: as above.
    drop(unsafe { one.endpoint.post_send(one.other, Envelope::tagged(1), &pieces, ending(3)) });
    while two.endpoint.discard(&wanted).unwrap().is_none() {}
    assert_eq!(reports(&sides, 0, 1)[0].context, 3);
}

#[test]
fn everything_that_was_under_way_with_a_peer_that_is_gone_ends() {
    let (sides, boxes) = sides("gone");
    let [one, _] = &sides;
    let (message, mut room) = (vec![7; 5000], [0; 10]);
    let pieces = [Piece::source(message.as_ptr(), message.len())];
    // SAFETY: all of it lives until the reports have come.
    unsafe {
        drop(one.endpoint.post_send(one.other, Envelope::tagged(1), &pieces, ending(1)));
        let wanted = Wanted::tagged(one.other, 1, TAG_ALL);
        one.endpoint.post_receive(&wanted, &target(&mut room), 2).unwrap();
    }
    boxes.lock().unwrap()[0].push_back(Letter::Gone);
    for report in reports(&sides, 0, 2) {
        assert!(matches!(report.outcome, Err(Error::PeerGone(_))), "{:?}", report.outcome);
    }
    assert!(one.endpoint.inject(one.other, Envelope::tagged(1), b"more").is_err());
}

#[test]
fn accesses_end_in_reports_and_those_that_nobody_answers_with_their_peer() {
    let (sides, boxes) = sides("accesses");
    let [one, _] = &sides;
    let mut byte = [7u8];
    let [local] = target(&mut byte);
    for (way, kind) in [(AccessWay::Put, ReportKind::Put), (AccessWay::Get, ReportKind::Get)] {
        let access = CarriedAccess { way, key: KEY, address: 7, local };
        // SAFETY: the byte lives until the report has come, here and below.
        unsafe {
            let quiet = Ending { quiet: true, ..ending(3) };
            one.endpoint.post_carried(one.other, &access, quiet).unwrap();
            one.endpoint.post_carried(one.other, &access, ending(4)).unwrap();
        }
        let report = reports(&sides, 0, 1).pop().unwrap();
        assert_eq!((report.kind, report.context, report.outcome), (kind, 4, Ok(())));
        assert_eq!(report.peer, Some(one.other));
        let lost = CarriedAccess { key: 1, ..access };
        // SAFETY: as above.
        unsafe { one.endpoint.post_carried(one.other, &lost, ending(5)).unwrap() };
    }
    boxes.lock().unwrap()[0].push_back(Letter::Gone);
    for report in reports(&sides, 0, 2) {
        assert!(matches!(report.outcome, Err(Error::PeerGone(_))) && report.context == 5);
    }
    let nowhere = Piece::source(std::ptr::null(), 1);
    let access = CarriedAccess { way: AccessWay::Put, key: KEY, address: 0, local: nowhere };
    // SAFETY: nothing is begun.
    assert!(unsafe { one.endpoint.post_carried(one.other, &access, ending(6)) }.is_err());
}

/// A carrier that says what it is told to, and hears from whom messages are awaited.
#[derive(Debug, Default)]
struct Crier {
    says: Arc<Mutex<Vec<CarrierEvent>>>,
    awaited: Arc<Mutex<Vec<u64>>>,
}

impl Carrier for Crier {
    fn send(&mut self, _: u64, _: u64, _: &Envelope, _: &[Piece], _: bool) {}
    fn fetch(&mut self, _: u64, _: u64, _: u64, _: &[Piece], _: u64) {}
    fn taken(&mut self, _: u64, _: u64) {}
    fn access(&mut self, _: u64, _: u64, _: &CarriedAccess) {}
    fn poll(&mut self, events: &mut Vec<CarrierEvent>) {
        events.append(&mut self.says.lock().unwrap());
    }
    fn wants_awaited(&mut self) -> bool {
        true
    }
    fn awaited(&mut self, peers: &[u64]) {
        *self.awaited.lock().unwrap() = peers.to_vec();
    }
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn is_quiet(&mut self) -> bool {
        true
    }
}

struct Cried {
    endpoint: Endpoint,
    says: Arc<Mutex<Vec<CarrierEvent>>>,
    awaited: Arc<Mutex<Vec<u64>>>,
}

fn cried(name: &str, most_peers: usize) -> Cried {
    let name = format!("cried-{}-{name}", std::process::id());
    let endpoint = Endpoint::builder().most_peers(most_peers).open(&name).unwrap();
    let crier = Crier::default();
    let (says, awaited) = (crier.says.clone(), crier.awaited.clone());
    endpoint.carry(Box::new(crier)).unwrap();
    Cried { endpoint, says, awaited }
}

impl Cried {
    /// Moves on until it is so.
    fn until(&self, is_so: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_so() {
            assert!(Instant::now() < deadline, "it comes to be so");
            self.endpoint.progress();
        }
    }

    /// Lets the carrier say something, until it is dealt with.
    fn say(&self, event: CarrierEvent) {
        // One look deals with all that the look before has brought.
        self.says.lock().unwrap().push(event);
        self.until(|| self.says.lock().unwrap().is_empty());
    }

    fn receive(&self, from: Source) -> Vec<u8> {
        let mut room = vec![0; 64];
        let wanted = Wanted::tagged(from, 0, 0);
        let mut reports = Vec::new();
        // SAFETY: it lives until its report has come.
        unsafe { self.endpoint.post_receive(&wanted, &target(&mut room), 1).unwrap() };
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.endpoint.collect(&mut reports) {
            assert!(Instant::now() < deadline, "a message is there");
        }
        assert_eq!(reports[0].outcome, Ok(()));
        room.truncate(reports[0].length as usize);
        room
    }
}

fn arrived(peer: u64) -> CarrierEvent {
    CarrierEvent::Arrived { peer, envelope: Envelope::tagged(1), bytes: peer.to_le_bytes().into() }
}

#[test]
fn a_carrier_is_told_from_whom_receives_are_posted_and_who_is_probed() {
    let cried = cried("awaited", 16);
    let peers = [3, 4, 5].map(|number| cried.endpoint.know_carried(number).unwrap());
    let is_told = |expected: &[u64]| *cried.awaited.lock().unwrap() == expected;
    let mut rooms = [[0; 8]; 3];
    let from = [Source::Any, peers[0].into(), peers[0].into()];
    for (number, (room, from)) in rooms.iter_mut().zip(from).enumerate() {
        let wanted = Wanted::tagged(from, 9, TAG_ALL);
        // SAFETY: they live until they are cancelled.
        unsafe {
            cried.endpoint.post_receive(&wanted, &target(room), number as u64).unwrap();
        }
    }
    cried.until(|| is_told(&[3]));
    let probed = Wanted::tagged(peers[2], 9, TAG_ALL);
    cried.until(|| {
        assert!(cried.endpoint.peek(&probed, None).unwrap().is_none());
        is_told(&[3, 5])
    });
    cried.until(|| is_told(&[3]));
    assert!(cried.endpoint.cancel_posted(1));
    cried.until(|| is_told(&[3]));
    assert!(cried.endpoint.cancel_posted(2));
    cried.until(|| is_told(&[]));
    assert!(cried.endpoint.cancel_posted(0));
}

#[test]
fn a_carried_peer_that_is_forgotten_as_often_as_it_was_asked_for_gives_up_its_place() {
    let cried = cried("places", 3);
    let stays = cried.endpoint.know_carried(1000).unwrap();
    for number in 0..50 {
        let peer = cried.endpoint.know_carried(number).unwrap();
        assert_eq!(cried.endpoint.know_carried(number).unwrap(), peer);
        let other = cried.endpoint.know_carried(500 + number).unwrap();
        assert!(cried.endpoint.know_carried(2000).is_err(), "all places are taken");
        cried.endpoint.forget(peer);
        cried.endpoint.forget(other);
        assert_eq!(cried.endpoint.carried_number(peer), Some(number), "one use is left");
        cried.endpoint.forget(peer);
        assert_eq!(cried.endpoint.carried_number(peer), None);
        assert!(cried.endpoint.inject(peer, Envelope::tagged(1), b"to nobody").is_err());
    }
    assert_eq!(cried.endpoint.carried_number(stays), Some(1000));
}

#[test]
fn a_forgotten_peer_keeps_its_place_while_a_message_or_an_operation_refers_to_it() {
    let cried = cried("referred", 3);
    let [kept, sent, posted] = [1, 2, 3].map(|n| cried.endpoint.know_carried(n).unwrap());
    cried.say(arrived(1));
    let bytes = [0; 8];
    let pieces = [Piece::source(bytes.as_ptr(), bytes.len())];
    let mut room = [0; 8];
    // SAFETY: both live until the end of the endpoint.
    unsafe {
        drop(cried.endpoint.post_send(sent, Envelope::tagged(1), &pieces, ending(1)).unwrap());
        let wanted = Wanted::tagged(posted, 1, TAG_ALL);
        cried.endpoint.post_receive(&wanted, &target(&mut room), 2).unwrap();
    }
    for peer in [kept, sent, posted] {
        cried.endpoint.forget(peer);
    }
    assert!(cried.endpoint.know_carried(4).is_err());
    assert_eq!(cried.receive(Source::Any), 1u64.to_le_bytes());
    cried.endpoint.forget(cried.endpoint.know_carried(4).unwrap());
    assert!(cried.endpoint.cancel_posted(2));
    let places = [5, 6].map(|n| cried.endpoint.know_carried(n).unwrap());
    assert!(cried.endpoint.know_carried(7).is_err(), "the send is under way");
    assert!(!places.contains(&sent));
    cried.endpoint.close();
}

#[test]
fn peers_that_speak_unasked_and_go_leave_no_places_behind() {
    let cried = cried("unasked", 2);
    for peer in 0..50 {
        cried.say(arrived(peer));
        cried.say(CarrierEvent::Gone { peer, how: Gone::Ended });
        assert_eq!(cried.receive(Source::Any), peer.to_le_bytes());
    }
    // Nobody has spoken of this one.
    cried.say(CarrierEvent::Gone { peer: 70, how: Gone::Closed });
    let both = [80, 81].map(|number| cried.endpoint.know_carried(number).unwrap());
    assert!(cried.endpoint.know_carried(82).is_err());
    for peer in both {
        cried.endpoint.forget(peer);
    }
}
