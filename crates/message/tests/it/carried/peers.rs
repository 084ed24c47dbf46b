//! Peers of a transport whose events the test writes.

use super::*;

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
        let deadline = Instant::now() + Duration::from_secs(200);
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
        let deadline = Instant::now() + Duration::from_secs(200);
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
