//! Endpoints with carriers: what comes from other hosts is matched like everything else.

use std::collections::HashSet;

use memferry_message::{Ending, Endpoint, Peer, Report, Source, TAG_ALL, Wanted};

use super::*;

struct Carried {
    endpoint: Endpoint,
    listening: String,
    name: Name,
    directory: Arc<Directory>,
}

fn carried(what: &str) -> Option<Carried> {
    let inner = inner()?;
    let (name, directory) = (name_for(&inner), Arc::new(Directory::default()));
    let listening = format!("remote-{}-{what}-{}", std::process::id(), identifier_of(&name));
    let endpoint = Endpoint::open(&listening).unwrap();
    endpoint
        .carry(Box::new(RemoteCarrier::new(inner, name, Arc::clone(&directory), Arc::default())))
        .unwrap();
    Some(Carried { endpoint, listening, name, directory })
}

impl Carried {
    fn know(&self, other: &Self) -> Peer {
        self.endpoint.know_carried(self.directory.number(&other.name).unwrap()).unwrap()
    }
}

/// Lets all endpoints move until one of them has ended something.
fn reports(endpoints: &[&Endpoint], of: usize, count: usize) -> Vec<Report> {
    let mut found = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(60);
    while found.len() < count {
        assert!(Instant::now() < deadline, "{} of {count} reports came", found.len());
        for (index, endpoint) in endpoints.iter().enumerate() {
            if index == of {
                endpoint.collect(&mut found);
            } else {
                endpoint.progress();
            }
        }
    }
    found
}

fn target(bytes: &mut [u8]) -> [Piece; 1] {
    [Piece::target(bytes.as_mut_ptr(), bytes.len())]
}

fn source(bytes: &[u8]) -> [Piece; 1] {
    [Piece::source(bytes.as_ptr(), bytes.len())]
}

#[test]
fn posted_messages_go_to_another_host_and_come_from_it() {
    let (Some(one), Some(two)) = (carried("a"), carried("a")) else { return };
    let (to_two, to_one) = (one.know(&two), two.know(&one));
    let both = [&one.endpoint, &two.endpoint];
    for (round, length) in [0, 1, 40, 8192, 20_000, 3 << 20].into_iter().enumerate() {
        for delivered in [false, true] {
            let (bytes, mut room) = (pattern(length, round), vec![0; length]);
            let tag = round as u64;
            let envelope = Envelope { lane: Lane::Tagged, tag, data: Some(7) };
            let ending = Ending { context: 5, quiet: false, delivered };
            // SAFETY: both live until their reports have come.
            let sent = unsafe {
                let wanted = Wanted::tagged(to_one, tag, TAG_ALL);
                if round % 2 == 0 {
                    two.endpoint.post_receive(&wanted, &target(&mut room), 70).unwrap();
                }
                let sent = one.endpoint.post_send(to_two, envelope, &source(&bytes), ending);
                if round % 2 == 1 {
                    one.endpoint.progress();
                    two.endpoint.progress();
                    two.endpoint.post_receive(&wanted, &target(&mut room), 70).unwrap();
                }
                sent.unwrap()
            };
            let received = reports(&both, 1, 1).pop().unwrap();
            assert_eq!((received.outcome, received.context), (Ok(()), 70));
            assert_eq!((received.envelope, received.length), (envelope, length as u64));
            assert_eq!(received.peer, Some(to_one));
            let sent = sent.unwrap_or_else(|| reports(&both, 0, 1).pop().unwrap());
            assert_eq!((sent.context, sent.peer, sent.outcome), (5, Some(to_two), Ok(())));
            assert!(room == bytes, "{length} bytes arrived as they were sent");
        }
    }
}

#[test]
fn injected_messages_keep_their_order_even_if_there_are_more_than_there_is_room_for() {
    let (Some(one), Some(two)) = (carried("b"), carried("b")) else { return };
    let (to_two, to_one) = (one.know(&two), two.know(&one));
    let both = [&one.endpoint, &two.endpoint];
    for number in 0..400u64 {
        let bytes = pattern([8, 3000, 20_000][number as usize % 3], number as usize);
        one.endpoint.inject(to_two, Envelope::tagged(number), &bytes).unwrap();
    }
    for number in 0..400u64 {
        let mut room = vec![0; 20_000];
        let wanted = Wanted::tagged(to_one, 0, 0);
        // SAFETY: it lives until its report has come.
        unsafe { two.endpoint.post_receive(&wanted, &target(&mut room), 1).unwrap() };
        let report = reports(&both, 1, 1).pop().unwrap();
        assert_eq!((report.envelope.tag, report.outcome), (number, Ok(())));
        let length = report.length as usize;
        assert!(room[..length] == pattern(length, number as usize));
    }
}

#[test]
fn a_receive_from_anybody_takes_from_this_host_and_from_others() {
    let (Some(here), Some(there)) = (carried("c"), carried("c")) else { return };
    let near = Endpoint::open(&format!("{}-near", here.listening)).unwrap();
    let to_here = near.know(&here.listening).unwrap();
    let from_there = here.know(&there);
    let back = there.know(&here);
    let all = [&here.endpoint, &there.endpoint, &near];
    let mut sources = HashSet::new();
    for round in 0..40u64 {
        let bytes = pattern(if round % 4 < 2 { 100 } else { 200_000 }, round as usize);
        let mut room = vec![0; 200_000];
        let ending = Ending { context: 1, quiet: true, delivered: false };
        // SAFETY: both live until the receive's report has come, which is after the send's end.
        unsafe {
            let wanted = Wanted::tagged(Source::Any, 0, 0);
            here.endpoint.post_receive(&wanted, &target(&mut room), round).unwrap();
            let (from, to) = if round % 2 == 0 { (&near, to_here) } else { (all[1], back) };
            from.post_send(to, Envelope::tagged(round), &source(&bytes), ending).unwrap();
        }
        let report = reports(&all, 0, 1).pop().unwrap();
        assert_eq!((report.outcome, report.context), (Ok(()), round));
        assert!(room[..bytes.len()] == bytes);
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
    let (Some(one), Some(two)) = (carried("d"), carried("d")) else { return };
    let (to_two, to_one) = (one.know(&two), two.know(&one));
    two.endpoint.inject(to_one, Envelope::tagged(1), b"first").unwrap();
    let (mut first, mut second) = ([0; 8], [0; 8]);
    // SAFETY: both live until their reports have come.
    unsafe {
        let wanted = Wanted::tagged(to_two, 1, TAG_ALL);
        one.endpoint.post_receive(&wanted, &target(&mut first), 1).unwrap();
        one.endpoint.post_receive(&wanted, &target(&mut second), 2).unwrap();
    }
    assert_eq!(reports(&[&one.endpoint, &two.endpoint], 0, 1)[0].outcome, Ok(()));
    let closing = std::thread::spawn(move || drop(two));
    let report = reports(&[&one.endpoint], 0, 1).pop().unwrap();
    assert!(matches!(report.outcome, Err(Error::PeerGone(_))) && report.context == 2);
    closing.join().unwrap();
}

/// The address of somebody who was there once.
fn vanished() -> Option<Name> {
    let other = inner()?;
    Some(name_for(&other))
}

#[test]
fn a_receive_and_a_probe_from_a_host_that_has_vanished_end() {
    let (Some(one), Some(name)) = (carried("e"), vanished()) else { return };
    let gone = one.endpoint.know_carried(one.directory.claim(&name).unwrap()).unwrap();
    let mut room = [0; 8];
    let wanted = Wanted::tagged(gone, 1, TAG_ALL);
    // SAFETY: it lives until its report has come.
    unsafe { one.endpoint.post_receive(&wanted, &target(&mut room), 7).unwrap() };
    let report = reports(&[&one.endpoint], 0, 1).pop().unwrap();
    assert_eq!((report.context, report.outcome), (7, Err(Error::PeerGone(Gone::Ended))));
    let Some(name) = vanished() else { return };
    let gone = one.endpoint.know_carried(one.directory.claim(&name).unwrap()).unwrap();
    let wanted = Wanted::tagged(gone, 1, TAG_ALL);
    let deadline = Instant::now() + Duration::from_secs(60);
    while one.endpoint.peek(&wanted, None).is_ok() {
        assert!(Instant::now() < deadline, "a probe learns of it");
    }
}

#[test]
fn a_receive_from_a_peer_that_went_before_anybody_spoke_of_it_ends() {
    let (Some(one), Some(two)) = (carried("f"), carried("f")) else { return };
    let (to_one, two_name) = (two.know(&one), two.name);
    two.endpoint.inject(to_one, Envelope::tagged(1), b"last").unwrap();
    let closing = std::thread::spawn(move || drop(two));
    let mut room = [0; 8];
    let any = Wanted::tagged(Source::Any, 1, TAG_ALL);
    // SAFETY: both live until their reports have come.
    unsafe { one.endpoint.post_receive(&any, &target(&mut room), 1).unwrap() };
    assert_eq!(reports(&[&one.endpoint], 0, 1)[0].outcome, Ok(()));
    while !closing.is_finished() {
        one.endpoint.progress();
    }
    closing.join().unwrap();
    let from = one.endpoint.know_carried(one.directory.claim(&two_name).unwrap()).unwrap();
    let wanted = Wanted::tagged(from, 1, TAG_ALL);
    // SAFETY: as above. It may also be refused.
    let posted = unsafe { one.endpoint.post_receive(&wanted, &target(&mut room), 2) };
    if posted.is_ok() {
        let report = reports(&[&one.endpoint], 0, 1).pop().unwrap();
        assert!(matches!(report.outcome, Err(Error::PeerGone(_))) && report.context == 2);
    }
}

#[test]
fn more_peers_may_come_and_go_than_there_are_numbers() {
    let Some(one) = carried("g") else { return };
    let mut bytes = [0; 8];
    for round in 0..3 * 64u64 {
        let Some(two) = carried("g") else { return };
        let to_one = two.know(&one);
        two.endpoint.inject(to_one, Envelope::tagged(round), b"hello").unwrap();
        let closing = std::thread::spawn(move || drop(two));
        let wanted = Wanted::tagged(Source::Any, round, TAG_ALL);
        // SAFETY: it lives until its report has come.
        unsafe { one.endpoint.post_receive(&wanted, &target(&mut bytes), 1).unwrap() };
        assert_eq!(reports(&[&one.endpoint], 0, 1)[0].outcome, Ok(()), "round {round}");
        while !closing.is_finished() {
            one.endpoint.progress();
        }
        closing.join().unwrap();
    }
}
