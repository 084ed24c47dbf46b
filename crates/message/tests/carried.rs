//! Messages from a remote transport are matched like all others. The transport of this test is a
//! model: two queues in one process.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use memferry_message::{
    CompletionEntry, CompletionKind, CompletionOptions, DisconnectReason, Endpoint, Envelope,
    Error, MatchSpec, Peer, RemoteEvent, RemoteRma, RemoteRmaOp, RemoteTransport, Segment, Source,
    TAG_ALL,
};

/// Longer messages are announced.
const SMALL: usize = 100;

#[derive(Debug)]
enum ModelPacket {
    Whole(Envelope, Vec<u8>),
    Waits { envelope: Envelope, length: u64, ticket: u64 },
    Wanted { ticket: u64, fetch: u64, length: u64 },
    Data { fetch: u64, bytes: Vec<u8> },
    Gone,
}

/// The messages in flight to each of the two.
type Mailboxes = Arc<Mutex<[VecDeque<ModelPacket>; 2]>>;

/// A transport between two endpoints, each of which has the other as peer 5.
#[derive(Debug)]
struct ModelTransport {
    side: usize,
    mailboxes: Mailboxes,
    waiting: HashMap<u64, Vec<Segment>>,
    fetching: HashMap<u64, Vec<Segment>>,
    completed: Vec<RemoteEvent>,
    credited: Arc<Mutex<u64>>,
}

const PEER_ID: u64 = 5;
const KEY: u64 = 12;

impl ModelTransport {
    fn post(&self, letter: ModelPacket) {
        self.mailboxes.lock().unwrap()[1 - self.side].push_back(letter);
    }
}

fn read(segments: &[Segment]) -> Vec<u8> {
    let bytes = |segment: &Segment| match segment.length {
        0 => Vec::new(),
        // SAFETY: the endpoint keeps the memory of a message until it completes.
        length => unsafe { std::slice::from_raw_parts(segment.address, length) }.to_vec(),
    };
    segments.iter().flat_map(bytes).collect()
}

impl RemoteTransport for ModelTransport {
    fn send(
        &mut self,
        peer: u64,
        number: u64,
        envelope: &Envelope,
        segments: &[Segment],
        late: bool,
    ) {
        assert_eq!(peer, PEER_ID);
        let bytes = read(segments);
        if bytes.len() <= SMALL && !late {
            self.post(ModelPacket::Whole(*envelope, bytes));
            self.completed.push(RemoteEvent::Sent { number, outcome: Ok(()) });
        } else {
            let (envelope, length, ticket) = (*envelope, bytes.len() as u64, number);
            self.waiting.insert(ticket, segments.to_vec());
            self.post(ModelPacket::Waits { envelope, length, ticket });
        }
    }

    fn fetch(&mut self, _: u64, ticket: u64, number: u64, segments: &[Segment], length: u64) {
        self.fetching.insert(number, segments.to_vec());
        self.post(ModelPacket::Wanted { ticket, fetch: number, length });
    }

    fn return_credit(&mut self, _: u64, bytes: u64) {
        *self.credited.lock().unwrap() += bytes;
    }

    /// The memory of the peer is one byte: its address. Only one key exists.
    fn start_rma(&mut self, peer: u64, number: u64, access: &RemoteRma) {
        assert_eq!((peer, access.local.length), (PEER_ID, 1));
        match (access.key, access.op) {
            (KEY, RemoteRmaOp::Put) => {
                assert_eq!(u64::from(read(&[access.local])[0]), access.address);
            }
            // SAFETY: the endpoint keeps the memory of an access until it completes.
            (KEY, RemoteRmaOp::Get) => unsafe { access.local.address.write(access.address as u8) },
            _ => return,
        }
        self.completed.push(RemoteEvent::RmaCompleted { number, outcome: Ok(()) });
    }

    fn poll(&mut self, events: &mut Vec<RemoteEvent>) {
        events.append(&mut self.completed);
        let letters = std::mem::take(&mut self.mailboxes.lock().unwrap()[self.side]);
        for letter in letters {
            match letter {
                ModelPacket::Whole(envelope, bytes) => {
                    events.push(RemoteEvent::Arrived { peer: PEER_ID, envelope, bytes });
                }
                ModelPacket::Waits { envelope, length, ticket } => {
                    let peer = PEER_ID;
                    events.push(RemoteEvent::Rts { peer, envelope, length, ticket });
                }
                ModelPacket::Wanted { ticket, fetch, length } => {
                    let mut bytes = read(&self.waiting.remove(&ticket).unwrap());
                    bytes.truncate(length as usize);
                    self.post(ModelPacket::Data { fetch, bytes });
                    events.push(RemoteEvent::Sent { number: ticket, outcome: Ok(()) });
                }
                ModelPacket::Data { fetch, bytes } => {
                    let mut bytes = &bytes[..];
                    for segment in self.fetching.remove(&fetch).unwrap() {
                        let (now, later) = bytes.split_at(segment.length.min(bytes.len()));
                        // SAFETY: as in `read`, for the length of the segment.
                        unsafe { segment.address.copy_from(now.as_ptr(), now.len()) };
                        bytes = later;
                    }
                    events.push(RemoteEvent::Fetched { number: fetch, outcome: Ok(()) });
                }
                ModelPacket::Gone => {
                    events.push(RemoteEvent::Disconnected {
                        peer: PEER_ID,
                        reason: DisconnectReason::Exited,
                    });
                }
            }
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn can_block(&mut self) -> bool {
        true
    }
}

struct RemoteSide {
    endpoint: Endpoint,
    peer: Peer,
    credited: Arc<Mutex<u64>>,
}

fn sides(name: &str) -> ([RemoteSide; 2], Mailboxes) {
    let boxes = Mailboxes::default();
    let sides = [0, 1].map(|side| {
        let name = format!("carried-{}-{name}-{side}", std::process::id());
        let endpoint = Endpoint::open(&name).unwrap();
        let taken = Arc::<Mutex<u64>>::default();
        let carrier = ModelTransport {
            side,
            mailboxes: boxes.clone(),
            waiting: HashMap::new(),
            fetching: HashMap::new(),
            completed: Vec::new(),
            credited: taken.clone(),
        };
        endpoint.set_remote_transport(Box::new(carrier)).unwrap();
        let other = endpoint.remote_peer(PEER_ID).unwrap();
        assert_eq!(endpoint.remote_id(other), Some(PEER_ID));
        RemoteSide { endpoint, peer: other, credited: taken }
    });
    (sides, boxes)
}

fn completions(sides: &[RemoteSide; 2], of: usize, count: usize) -> Vec<CompletionEntry> {
    let mut found = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(60);
    while found.len() < count {
        assert!(Instant::now() < deadline, "{} of {count} reports came", found.len());
        sides[1 - of].endpoint.progress();
        sides[of].endpoint.poll_completions(&mut found);
    }
    found
}

fn options(context: u64) -> CompletionOptions {
    CompletionOptions { context, ..CompletionOptions::default() }
}

fn target(bytes: &mut [u8]) -> [Segment; 1] {
    [Segment::target(bytes.as_mut_ptr(), bytes.len())]
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
        let mut destinations = vec![vec![0u8; 6000]; messages.len()];
        let post = |destinations: &mut [Vec<u8>]| {
            for (number, destination) in destinations.iter_mut().enumerate() {
                let wanted = MatchSpec::tagged(Source::Any, 1, TAG_ALL);
                // SAFETY: they live until their completions.
                unsafe {
                    two.endpoint
                        .post_receive(&wanted, &target(destination), number as u64)
                        .unwrap();
                };
            }
        };
        if expected_first {
            post(&mut destinations);
        }
        for (number, message) in messages.iter().enumerate() {
            let envelope = Envelope { tag: 1, data: Some(number as u64), ..Envelope::default() };
            let segments = [Segment::source(message.as_ptr(), message.len())];
            // SAFETY: the message lives until its completion.
            let sent = unsafe { one.endpoint.post_send(one.peer, envelope, &segments, options(9)) };
            assert!(sent.unwrap().is_none());
        }
        if !expected_first {
            while two
                .endpoint
                .peek(&MatchSpec::tagged(two.peer, 1, TAG_ALL), None)
                .unwrap()
                .is_none()
            {}
            post(&mut destinations);
        }
        let mut found = completions(&sides, 1, messages.len());
        found.sort_by_key(|report| report.context);
        for (number, report) in found.iter().enumerate() {
            assert_eq!((report.context, &report.outcome), (number as u64, &Ok(())));
            assert_eq!((report.envelope.data, report.peer), (Some(number as u64), Some(two.peer)));
            assert_eq!(report.length as usize, messages[number].len());
            assert_eq!(destinations[number][..messages[number].len()], messages[number][..]);
        }
        let sent = completions(&sides, 0, messages.len());
        assert!(sent.iter().all(|r| r.kind == CompletionKind::Send && r.outcome.is_ok()));
    }
    let small: usize = messages.iter().map(Vec::len).filter(|length| *length <= SMALL).sum();
    assert_eq!(*two.credited.lock().unwrap(), 2 * small as u64, "the credit is returned");
}

#[test]
fn a_receive_from_anybody_takes_what_comes_first_from_near_and_far() {
    let (sides, _) = sides("any");
    let [one, two] = &sides;
    let near = one.endpoint.add_peer(two.endpoint.name()).unwrap();
    one.endpoint.inject(one.peer, Envelope::tagged(3), b"far").unwrap();
    let mut destination = [0; 8];
    let wanted = MatchSpec::tagged(Source::Any, 3, TAG_ALL);
    // SAFETY: it lives until its completion, here and below.
    unsafe { two.endpoint.post_receive(&wanted, &target(&mut destination), 1).unwrap() };
    assert_eq!(completions(&sides, 1, 1)[0].peer, Some(two.peer));
    assert_eq!(&destination[..3], b"far");
    one.endpoint.inject(near, Envelope::tagged(3), b"near").unwrap();
    // SAFETY: as above.
    unsafe { two.endpoint.post_receive(&wanted, &target(&mut destination), 2).unwrap() };
    assert_ne!(completions(&sides, 1, 1)[0].peer, Some(two.peer));
    assert_eq!(&destination[..4], b"near");
}

#[test]
fn what_is_too_long_or_not_wanted_is_fetched_only_as_far_as_needed() {
    let (sides, _) = sides("cut");
    let [one, two] = &sides;
    let message = vec![7; 5000];
    let segments = [Segment::source(message.as_ptr(), message.len())];
    let mut destination = [0; 10];
    let wanted = MatchSpec::tagged(two.peer, 1, TAG_ALL);
    // SAFETY: all of it lives until the completions, here and below.
    unsafe {
        drop(one.endpoint.post_send(one.peer, Envelope::tagged(1), &segments, options(1)));
        two.endpoint.post_receive(&wanted, &target(&mut destination), 2).unwrap();
    }
    let cut = completions(&sides, 1, 1).pop().unwrap();
    let (message_bytes, buffer_bytes) = (5000, 10);
    assert_eq!(cut.outcome, Err(Error::Truncated { message_bytes, buffer_bytes }));
    assert_eq!((destination, completions(&sides, 0, 1)[0].context), ([7; 10], 1));
    // SAFETY: as above.
    drop(unsafe { one.endpoint.post_send(one.peer, Envelope::tagged(1), &segments, options(3)) });
    while two.endpoint.discard(&wanted).unwrap().is_none() {}
    assert_eq!(completions(&sides, 0, 1)[0].context, 3);
}

#[test]
fn everything_that_was_under_way_with_a_peer_that_is_gone_ends() {
    let (sides, boxes) = sides("gone");
    let [one, _] = &sides;
    let (message, mut destination) = (vec![7; 5000], [0; 10]);
    let segments = [Segment::source(message.as_ptr(), message.len())];
    // SAFETY: all of it lives until the completions.
    unsafe {
        drop(one.endpoint.post_send(one.peer, Envelope::tagged(1), &segments, options(1)));
        let wanted = MatchSpec::tagged(one.peer, 1, TAG_ALL);
        one.endpoint.post_receive(&wanted, &target(&mut destination), 2).unwrap();
    }
    boxes.lock().unwrap()[0].push_back(ModelPacket::Gone);
    for report in completions(&sides, 0, 2) {
        assert!(matches!(report.outcome, Err(Error::PeerDisconnected(_))), "{:?}", report.outcome);
    }
    assert!(one.endpoint.inject(one.peer, Envelope::tagged(1), b"more").is_err());
}

#[test]
fn accesses_end_in_reports_and_those_that_nobody_answers_with_their_peer() {
    let (sides, boxes) = sides("accesses");
    let [one, _] = &sides;
    let mut byte = [7u8];
    let [local] = target(&mut byte);
    for (way, kind) in
        [(RemoteRmaOp::Put, CompletionKind::Put), (RemoteRmaOp::Get, CompletionKind::Get)]
    {
        let access = RemoteRma { op: way, key: KEY, address: 7, local };
        // SAFETY: the byte lives until the completion, here and below.
        unsafe {
            let quiet = CompletionOptions { silent_on_success: true, ..options(3) };
            one.endpoint.post_remote_rma(one.peer, &access, quiet).unwrap();
            one.endpoint.post_remote_rma(one.peer, &access, options(4)).unwrap();
        }
        let report = completions(&sides, 0, 1).pop().unwrap();
        assert_eq!((report.kind, report.context, report.outcome), (kind, 4, Ok(())));
        assert_eq!(report.peer, Some(one.peer));
        let lost = RemoteRma { key: 1, ..access };
        // SAFETY: as above.
        unsafe { one.endpoint.post_remote_rma(one.peer, &lost, options(5)).unwrap() };
    }
    boxes.lock().unwrap()[0].push_back(ModelPacket::Gone);
    for report in completions(&sides, 0, 2) {
        assert!(matches!(report.outcome, Err(Error::PeerDisconnected(_))) && report.context == 5);
    }
    let nowhere = Segment::source(std::ptr::null(), 1);
    let access = RemoteRma { op: RemoteRmaOp::Put, key: KEY, address: 0, local: nowhere };
    // SAFETY: nothing is started.
    assert!(unsafe { one.endpoint.post_remote_rma(one.peer, &access, options(6)) }.is_err());
}

/// A transport that reports scripted events, and records the awaited peers.
#[derive(Debug, Default)]
struct ScriptedTransport {
    script: Arc<Mutex<Vec<RemoteEvent>>>,
    awaited: Arc<Mutex<Vec<u64>>>,
}

impl RemoteTransport for ScriptedTransport {
    fn send(&mut self, _: u64, _: u64, _: &Envelope, _: &[Segment], _: bool) {}
    fn fetch(&mut self, _: u64, _: u64, _: u64, _: &[Segment], _: u64) {}
    fn return_credit(&mut self, _: u64, _: u64) {}
    fn start_rma(&mut self, _: u64, _: u64, _: &RemoteRma) {}
    fn poll(&mut self, events: &mut Vec<RemoteEvent>) {
        events.append(&mut self.script.lock().unwrap());
    }
    fn wants_awaited_peers(&mut self) -> bool {
        true
    }
    fn set_awaited_peers(&mut self, peers: &[u64]) {
        *self.awaited.lock().unwrap() = peers.to_vec();
    }
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn can_block(&mut self) -> bool {
        true
    }
}

struct ScriptedEndpoint {
    endpoint: Endpoint,
    script: Arc<Mutex<Vec<RemoteEvent>>>,
    awaited: Arc<Mutex<Vec<u64>>>,
}

fn scripted_endpoint(name: &str, most_peers: usize) -> ScriptedEndpoint {
    let name = format!("cried-{}-{name}", std::process::id());
    let endpoint = Endpoint::builder().max_peers(most_peers).open(&name).unwrap();
    let crier = ScriptedTransport::default();
    let (says, awaited) = (crier.script.clone(), crier.awaited.clone());
    endpoint.set_remote_transport(Box::new(crier)).unwrap();
    ScriptedEndpoint { endpoint, script: says, awaited }
}

impl ScriptedEndpoint {
    /// Makes progress until a condition holds.
    fn until(&self, is_so: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_so() {
            assert!(Instant::now() < deadline, "the condition holds");
            self.endpoint.progress();
        }
    }

    /// Makes the transport report an event, until it is handled.
    fn push_event(&self, event: RemoteEvent) {
        // One poll handles all events of the poll before.
        self.script.lock().unwrap().push(event);
        self.until(|| self.script.lock().unwrap().is_empty());
    }

    fn receive(&self, from: Source) -> Vec<u8> {
        let mut destination = vec![0; 64];
        let wanted = MatchSpec::tagged(from, 0, 0);
        let mut reports = Vec::new();
        // SAFETY: it lives until its completion.
        unsafe { self.endpoint.post_receive(&wanted, &target(&mut destination), 1).unwrap() };
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.endpoint.poll_completions(&mut reports) {
            assert!(Instant::now() < deadline, "a message has arrived");
        }
        assert_eq!(reports[0].outcome, Ok(()));
        destination.truncate(reports[0].length as usize);
        destination
    }
}

fn arrived(peer: u64) -> RemoteEvent {
    RemoteEvent::Arrived { peer, envelope: Envelope::tagged(1), bytes: peer.to_le_bytes().into() }
}

#[test]
fn a_carrier_is_told_from_whom_receives_are_posted_and_who_is_probed() {
    let cried = scripted_endpoint("awaited", 16);
    let peers = [3, 4, 5].map(|number| cried.endpoint.remote_peer(number).unwrap());
    let is_told = |expected: &[u64]| *cried.awaited.lock().unwrap() == expected;
    let mut destinations = [[0; 8]; 3];
    let from = [Source::Any, peers[0].into(), peers[0].into()];
    for (number, (destination, from)) in destinations.iter_mut().zip(from).enumerate() {
        let wanted = MatchSpec::tagged(from, 9, TAG_ALL);
        // SAFETY: they live until they are cancelled.
        unsafe {
            cried.endpoint.post_receive(&wanted, &target(destination), number as u64).unwrap();
        }
    }
    cried.until(|| is_told(&[3]));
    let probed = MatchSpec::tagged(peers[2], 9, TAG_ALL);
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
    let cried = scripted_endpoint("places", 3);
    let stays = cried.endpoint.remote_peer(1000).unwrap();
    for number in 0..50 {
        let peer = cried.endpoint.remote_peer(number).unwrap();
        assert_eq!(cried.endpoint.remote_peer(number).unwrap(), peer);
        let other = cried.endpoint.remote_peer(500 + number).unwrap();
        assert!(cried.endpoint.remote_peer(2000).is_err(), "all slots are in use");
        cried.endpoint.remove_peer(peer);
        cried.endpoint.remove_peer(other);
        assert_eq!(cried.endpoint.remote_id(peer), Some(number), "one use is left");
        cried.endpoint.remove_peer(peer);
        assert_eq!(cried.endpoint.remote_id(peer), None);
        assert!(cried.endpoint.inject(peer, Envelope::tagged(1), b"to nobody").is_err());
    }
    assert_eq!(cried.endpoint.remote_id(stays), Some(1000));
}

#[test]
fn a_forgotten_peer_keeps_its_place_while_a_message_or_an_operation_refers_to_it() {
    let cried = scripted_endpoint("referred", 3);
    let [kept, sent, posted] = [1, 2, 3].map(|n| cried.endpoint.remote_peer(n).unwrap());
    cried.push_event(arrived(1));
    let bytes = [0; 8];
    let segments = [Segment::source(bytes.as_ptr(), bytes.len())];
    let mut destination = [0; 8];
    // SAFETY: both live until the endpoint is dropped.
    unsafe {
        drop(cried.endpoint.post_send(sent, Envelope::tagged(1), &segments, options(1)).unwrap());
        let wanted = MatchSpec::tagged(posted, 1, TAG_ALL);
        cried.endpoint.post_receive(&wanted, &target(&mut destination), 2).unwrap();
    }
    for peer in [kept, sent, posted] {
        cried.endpoint.remove_peer(peer);
    }
    assert!(cried.endpoint.remote_peer(4).is_err());
    assert_eq!(cried.receive(Source::Any), 1u64.to_le_bytes());
    cried.endpoint.remove_peer(cried.endpoint.remote_peer(4).unwrap());
    assert!(cried.endpoint.cancel_posted(2));
    let places = [5, 6].map(|n| cried.endpoint.remote_peer(n).unwrap());
    assert!(cried.endpoint.remote_peer(7).is_err(), "the send is in flight");
    assert!(!places.contains(&sent));
    cried.endpoint.close();
}

#[test]
fn peers_that_speak_unasked_and_go_leave_no_places_behind() {
    let cried = scripted_endpoint("unasked", 2);
    for peer in 0..50 {
        cried.push_event(arrived(peer));
        cried.push_event(RemoteEvent::Disconnected { peer, reason: DisconnectReason::Exited });
        assert_eq!(cried.receive(Source::Any), peer.to_le_bytes());
    }
    // No event has named this one.
    cried.push_event(RemoteEvent::Disconnected { peer: 70, reason: DisconnectReason::Closed });
    let both = [80, 81].map(|number| cried.endpoint.remote_peer(number).unwrap());
    assert!(cried.endpoint.remote_peer(82).is_err());
    for peer in both {
        cried.endpoint.remove_peer(peer);
    }
}
