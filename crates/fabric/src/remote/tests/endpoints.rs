//! Endpoints with transports: messages from other hosts are matched like all others.

use std::collections::HashSet;

use memferry_message::{
    CompletionEntry, CompletionOptions, Disconnect, Endpoint, MatchSpec, Peer, Source, TAG_ALL,
};

use super::*;

struct RemoteEndpoint {
    endpoint: Endpoint,
    listening: String,
    address: RawAddress,
    directory: Arc<Directory>,
}

fn remote_endpoint(what: &str) -> Option<RemoteEndpoint> {
    let inner = inner()?;
    let (name, directory) = (address_for(&inner), Arc::new(Directory::default()));
    let listening = format!("remote-{}-{what}-{}", std::process::id(), identifier_of(&name));
    let endpoint = Endpoint::open(&listening).unwrap();
    endpoint
        .set_remote_transport(Box::new(FabricTransport::new(
            inner,
            name,
            Arc::clone(&directory),
            Arc::default(),
        )))
        .unwrap();
    Some(RemoteEndpoint { endpoint, listening, address: name, directory })
}

impl RemoteEndpoint {
    fn add_peer(&self, other: &Self) -> Peer {
        self.endpoint.remote_peer(self.directory.number(&other.address).unwrap()).unwrap()
    }
}

/// Makes progress on all endpoints until one of them has `count` completions.
fn completions(endpoints: &[&Endpoint], of: usize, count: usize) -> Vec<CompletionEntry> {
    let mut found = Vec::new();
    let begin = Instant::now();
    while found.len() < count {
        let elapsed = begin.elapsed();
        assert!(elapsed < Duration::from_secs(60), "{} of {count} reports came", found.len());
        if elapsed > Duration::from_millis(100) {
            // The end of a vanished host takes seconds: leave the processor to other tests.
            std::thread::sleep(Duration::from_millis(1));
        }
        for (index, endpoint) in endpoints.iter().enumerate() {
            if index == of {
                endpoint.poll_completions(&mut found);
            } else {
                endpoint.progress();
            }
        }
    }
    found
}

fn target(bytes: &mut [u8]) -> [Segment; 1] {
    [Segment::target(bytes.as_mut_ptr(), bytes.len())]
}

fn source(bytes: &[u8]) -> [Segment; 1] {
    [Segment::source(bytes.as_ptr(), bytes.len())]
}

#[test]
fn posted_messages_go_to_another_host_and_come_from_it() {
    let (Some(one), Some(two)) = (remote_endpoint("a"), remote_endpoint("a")) else { return };
    let (to_two, to_one) = (one.add_peer(&two), two.add_peer(&one));
    let both = [&one.endpoint, &two.endpoint];
    for (round, length) in [0, 1, 40, 8192, 20_000, 3 << 20].into_iter().enumerate() {
        for delivered in [false, true] {
            let (bytes, mut destination) = (pattern(length, round), vec![0; length]);
            let tag = round as u64;
            let envelope = Envelope { space: MatchSpace::Tagged, tag, data: Some(7) };
            let ending = CompletionOptions {
                context: 5,
                silent_on_success: false,
                delivery_complete: delivered,
            };
            // SAFETY: both live until their completions.
            let sent = unsafe {
                let wanted = MatchSpec::tagged(to_one, tag, TAG_ALL);
                if round % 2 == 0 {
                    two.endpoint.post_receive(&wanted, &target(&mut destination), 70).unwrap();
                }
                let sent = one.endpoint.post_send(to_two, envelope, &source(&bytes), ending);
                if round % 2 == 1 {
                    one.endpoint.progress();
                    two.endpoint.progress();
                    two.endpoint.post_receive(&wanted, &target(&mut destination), 70).unwrap();
                }
                sent.unwrap()
            };
            let received = completions(&both, 1, 1).pop().unwrap();
            assert_eq!((received.outcome, received.context), (Ok(()), 70));
            assert_eq!((received.envelope, received.length), (envelope, length as u64));
            assert_eq!(received.peer, Some(to_one));
            let sent = sent.unwrap_or_else(|| completions(&both, 0, 1).pop().unwrap());
            assert_eq!((sent.context, sent.peer, sent.outcome), (5, Some(to_two), Ok(())));
            assert!(destination == bytes, "{length} bytes arrived as they were sent");
        }
    }
}

#[test]
fn injected_messages_keep_their_order_even_if_there_are_more_than_there_is_room_for() {
    let (Some(one), Some(two)) = (remote_endpoint("b"), remote_endpoint("b")) else { return };
    let (to_two, to_one) = (one.add_peer(&two), two.add_peer(&one));
    let both = [&one.endpoint, &two.endpoint];
    for number in 0..400u64 {
        let bytes = pattern([8, 3000, 20_000][number as usize % 3], number as usize);
        one.endpoint.inject(to_two, Envelope::tagged(number), &bytes).unwrap();
    }
    for number in 0..400u64 {
        let mut destination = vec![0; 20_000];
        let wanted = MatchSpec::tagged(to_one, 0, 0);
        // SAFETY: it lives until its completion.
        unsafe { two.endpoint.post_receive(&wanted, &target(&mut destination), 1).unwrap() };
        let report = completions(&both, 1, 1).pop().unwrap();
        assert_eq!((report.envelope.tag, report.outcome), (number, Ok(())));
        let length = report.length as usize;
        assert!(destination[..length] == pattern(length, number as usize));
    }
}

#[test]
fn a_receive_from_anybody_takes_from_this_host_and_from_others() {
    let (Some(here), Some(there)) = (remote_endpoint("c"), remote_endpoint("c")) else { return };
    let near = Endpoint::open(&format!("{}-near", here.listening)).unwrap();
    let to_here = near.add_peer(&here.listening).unwrap();
    let from_there = here.add_peer(&there);
    let back = there.add_peer(&here);
    let all = [&here.endpoint, &there.endpoint, &near];
    let mut sources = HashSet::new();
    for round in 0..40u64 {
        let bytes = pattern(if round % 4 < 2 { 100 } else { 200_000 }, round as usize);
        let mut destination = vec![0; 200_000];
        let ending =
            CompletionOptions { context: 1, silent_on_success: true, delivery_complete: false };
        // SAFETY: both live until the receive's completion, which is after the send's.
        unsafe {
            let wanted = MatchSpec::tagged(Source::Any, 0, 0);
            here.endpoint.post_receive(&wanted, &target(&mut destination), round).unwrap();
            let (from, to) = if round % 2 == 0 { (&near, to_here) } else { (all[1], back) };
            from.post_send(to, Envelope::tagged(round), &source(&bytes), ending).unwrap();
        }
        let report = completions(&all, 0, 1).pop().unwrap();
        assert_eq!((report.outcome, report.context), (Ok(()), round));
        assert!(destination[..bytes.len()] == bytes);
        assert_eq!(report.peer == Some(from_there), round % 2 == 1);
        sources.insert(report.peer);
        for _ in 0..200 {
            for endpoint in all {
                endpoint.progress();
            }
        }
    }
    assert_eq!(sources.len(), 2);
}

#[test]
fn a_receive_from_a_host_that_closes_ends() {
    let (Some(one), Some(two)) = (remote_endpoint("d"), remote_endpoint("d")) else { return };
    let (to_two, to_one) = (one.add_peer(&two), two.add_peer(&one));
    two.endpoint.inject(to_one, Envelope::tagged(1), b"first").unwrap();
    let (mut first, mut second) = ([0; 8], [0; 8]);
    // SAFETY: both live until their completions.
    unsafe {
        let wanted = MatchSpec::tagged(to_two, 1, TAG_ALL);
        one.endpoint.post_receive(&wanted, &target(&mut first), 1).unwrap();
        one.endpoint.post_receive(&wanted, &target(&mut second), 2).unwrap();
    }
    assert_eq!(completions(&[&one.endpoint, &two.endpoint], 0, 1)[0].outcome, Ok(()));
    let closing = std::thread::spawn(move || drop(two));
    let report = completions(&[&one.endpoint], 0, 1).pop().unwrap();
    assert!(matches!(report.outcome, Err(Error::PeerDisconnected(_))) && report.context == 2);
    closing.join().unwrap();
}

/// The address of an endpoint that no longer exists.
fn vanished() -> Option<RawAddress> {
    let other = inner()?;
    Some(address_for(&other))
}

#[test]
fn a_receive_and_a_probe_from_a_host_that_has_vanished_end() {
    let (Some(one), Some(name)) = (remote_endpoint("e"), vanished()) else { return };
    let reason = one.endpoint.remote_peer(one.directory.claim(&name).unwrap()).unwrap();
    let mut destination = [0; 8];
    let wanted = MatchSpec::tagged(reason, 1, TAG_ALL);
    // SAFETY: it lives until its completion.
    unsafe { one.endpoint.post_receive(&wanted, &target(&mut destination), 7).unwrap() };
    let report = completions(&[&one.endpoint], 0, 1).pop().unwrap();
    let Err(Error::PeerDisconnected(Disconnect { reason, .. })) = report.outcome else {
        panic!("{:?}", report.outcome);
    };
    assert_eq!((report.context, reason), (7, DisconnectReason::Exited));
    let Some(name) = vanished() else { return };
    let reason = one.endpoint.remote_peer(one.directory.claim(&name).unwrap()).unwrap();
    let wanted = MatchSpec::tagged(reason, 1, TAG_ALL);
    let deadline = Instant::now() + Duration::from_secs(200);
    while one.endpoint.peek(&wanted, None).is_ok() {
        assert!(Instant::now() < deadline, "a probe learns of it");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_receive_from_a_peer_that_went_before_anybody_spoke_of_it_ends() {
    let (Some(one), Some(two)) = (remote_endpoint("f"), remote_endpoint("f")) else { return };
    let (to_one, two_name) = (two.add_peer(&one), two.address);
    two.endpoint.inject(to_one, Envelope::tagged(1), b"last").unwrap();
    let closing = std::thread::spawn(move || drop(two));
    let mut destination = [0; 8];
    let any = MatchSpec::tagged(Source::Any, 1, TAG_ALL);
    // SAFETY: both live until their completions.
    unsafe { one.endpoint.post_receive(&any, &target(&mut destination), 1).unwrap() };
    assert_eq!(completions(&[&one.endpoint], 0, 1)[0].outcome, Ok(()));
    while !closing.is_finished() {
        one.endpoint.progress();
    }
    closing.join().unwrap();
    let from = one.endpoint.remote_peer(one.directory.claim(&two_name).unwrap()).unwrap();
    let wanted = MatchSpec::tagged(from, 1, TAG_ALL);
    // SAFETY: as above. It may also be rejected.
    let posted = unsafe { one.endpoint.post_receive(&wanted, &target(&mut destination), 2) };
    if posted.is_ok() {
        let report = completions(&[&one.endpoint], 0, 1).pop().unwrap();
        assert!(matches!(report.outcome, Err(Error::PeerDisconnected(_))) && report.context == 2);
    }
}

#[test]
fn more_peers_may_come_and_go_than_there_are_numbers() {
    let Some(one) = remote_endpoint("g") else { return };
    let mut bytes = [0; 8];
    for round in 0..64 + 16u64 {
        let Some(two) = remote_endpoint("g") else { return };
        let to_one = two.add_peer(&one);
        two.endpoint.inject(to_one, Envelope::tagged(round), b"hello").unwrap();
        let closing = std::thread::spawn(move || drop(two));
        let wanted = MatchSpec::tagged(Source::Any, round, TAG_ALL);
        // SAFETY: it lives until its completion.
        unsafe { one.endpoint.post_receive(&wanted, &target(&mut bytes), 1).unwrap() };
        assert_eq!(completions(&[&one.endpoint], 0, 1)[0].outcome, Ok(()), "round {round}");
        while !closing.is_finished() {
            one.endpoint.progress();
        }
        closing.join().unwrap();
    }
}
