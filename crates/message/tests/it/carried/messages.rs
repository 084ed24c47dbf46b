//! Messages and accesses over a model of a transport.

use super::*;

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
