//! Messages that a carrier brings meet receives like all others. The carrier here is a model: two
//! boxes in one process.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use memferry_message::{
    AccessWay, CarriedAccess, Carrier, CarrierEvent, Ending, Endpoint, Envelope, Error, Peer,
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
                Letter::Gone => events.push(CarrierEvent::Gone { peer: OTHER }),
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
    let deadline = Instant::now() + Duration::from_secs(20);
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
