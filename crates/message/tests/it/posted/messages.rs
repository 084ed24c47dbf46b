//! Messages: order, lanes, claims, several messages in one receive.

use super::*;

#[test]
fn a_message_to_a_known_name_connects_by_itself_and_carries_its_data() {
    let [(one, to_two), (two, to_one)] = pair("data");
    for (round, length) in
        [0, 1, 8, 40, 41, 48, 49, 4096, 8192, 8193, 100_000, 3 << 20].into_iter().enumerate()
    {
        let (bytes, mut destination) = (pattern(length, round), vec![0; length]);
        let data = (round % 2 == 0).then_some(0xDEAD_BEEF_0000 + round as u64);
        let envelope = Envelope { space: MatchSpace::Tagged, tag: round as u64, data };
        let wanted = MatchSpec::tagged(to_one, round as u64, TAG_ALL);
        // SAFETY: both live until their completions.
        let sent = unsafe {
            two.post_receive(&wanted, &target(&mut destination), 70 + round as u64).unwrap();
            one.post_send(to_two, envelope, &source(&bytes), options(5)).unwrap()
        };
        let received = completions(&[&one, &two], 1, 1).pop().unwrap();
        assert_eq!(received.outcome, Ok(()));
        assert_eq!((received.context, received.kind), (70 + round as u64, CompletionKind::Receive));
        assert_eq!((received.envelope, received.length), (envelope, length as u64));
        assert_eq!(received.peer, Some(to_one));
        let sent = sent.unwrap_or_else(|| completions(&[&one, &two], 0, 1).pop().unwrap());
        assert_eq!((sent.context, sent.kind, sent.peer), (5, CompletionKind::Send, Some(to_two)));
        assert!(destination == bytes, "{length} bytes arrived as they were sent");
    }
}

#[test]
fn many_messages_that_are_sent_before_anybody_answers_keep_their_order() {
    let [(one, to_two), (two, to_one)] = pair("order");
    for number in 0..500u64 {
        let length = [8, 3000, 20_000][number as usize % 3];
        one.inject(to_two, Envelope::tagged(number), &pattern(length, number as usize)).unwrap();
    }
    for number in 0..500u64 {
        let mut destination = vec![0; 20_000];
        // SAFETY: it lives until its completion.
        unsafe {
            two.post_receive(&MatchSpec::tagged(to_one, 0, 0), &target(&mut destination), 1)
                .unwrap();
        };
        let report = completions(&[&one, &two], 1, 1).pop().unwrap();
        assert_eq!((report.envelope.tag, report.outcome), (number, Ok(())));
        let length = report.length as usize;
        assert!(destination[..length] == pattern(length, number as usize));
    }
    let mut more = Vec::new();
    assert!(!one.poll_completions(&mut more), "injected messages make no completion entry");
}

#[test]
fn what_was_injected_before_the_first_word_is_not_lost_when_the_endpoint_closes() {
    let [(one, to_two), (two, to_one)] = pair("flush");
    one.inject(to_two, Envelope::tagged(1), b"the only one").unwrap();
    let mut destination = [0; 12];
    // SAFETY: it lives until its completion.
    unsafe {
        two.post_receive(&MatchSpec::tagged(to_one, 1, TAG_ALL), &target(&mut destination), 1)
            .unwrap();
    };
    let closing = std::thread::spawn(move || assert!(one.flush(Duration::from_secs(200))));
    assert_eq!(completions(&[&two], 0, 1)[0].outcome, Ok(()));
    closing.join().unwrap();
    assert_eq!(&destination, b"the only one");
}

#[test]
fn plain_and_tagged_messages_do_not_meet_each_others_receives() {
    let [(one, to_two), (two, _)] = pair("lanes");
    one.inject(to_two, Envelope::tagged(0), b"tagged").unwrap();
    one.inject(to_two, Envelope::untagged(), b"plain").unwrap();
    let (mut a, mut b) = ([0; 8], [0; 8]);
    // SAFETY: both live until their completions.
    unsafe {
        two.post_receive(&MatchSpec::untagged(Source::Any), &target(&mut a), 1).unwrap();
        two.post_receive(&MatchSpec::tagged(Source::Any, 0, 0), &target(&mut b), 2).unwrap();
    }
    let mut found = completions(&[&one, &two], 1, 2);
    found.sort_by_key(|report| report.context);
    assert_eq!((found[0].envelope.space, found[0].length), (MatchSpace::Untagged, 5));
    assert_eq!((found[1].envelope.space, found[1].length), (MatchSpace::Tagged, 6));
    assert_eq!((&a[..5], &b[..6]), (&b"plain"[..], &b"tagged"[..]));
}

#[test]
fn a_delivered_send_ends_only_after_somebody_has_received_it() {
    let [(one, to_two), (two, _)] = pair("delivered");
    let bytes = pattern(16, 3);
    let delivered =
        CompletionOptions { context: 9, delivery_complete: true, ..CompletionOptions::default() };
    // SAFETY: the bytes live until the completion.
    let sent = unsafe { one.post_send(to_two, Envelope::tagged(1), &source(&bytes), delivered) };
    assert!(sent.unwrap().is_none());
    let mut found = Vec::new();
    for _ in 0..200 {
        two.progress();
        assert!(!one.poll_completions(&mut found), "the message is not received yet");
    }
    let mut destination = [0; 16];
    // SAFETY: it lives until its completion.
    unsafe {
        two.post_receive(&MatchSpec::tagged(Source::Any, 1, TAG_ALL), &target(&mut destination), 2)
    }
    .unwrap();
    assert_eq!(completions(&[&one, &two], 1, 1)[0].outcome, Ok(()));
    assert_eq!(completions(&[&one, &two], 0, 1)[0].context, 9);
    assert_eq!(destination[..], bytes);
}

#[test]
fn a_quiet_send_is_told_of_only_when_it_fails() {
    let [(one, to_two), (two, to_one)] = pair("quiet");
    let bytes = pattern(1 << 20, 1);
    let mut destination = vec![0; 1 << 20];
    let quiet =
        CompletionOptions { context: 1, silent_on_success: true, ..CompletionOptions::default() };
    // SAFETY: both live until their completions, which are waited for.
    unsafe {
        assert!(
            one.post_send(to_two, Envelope::tagged(1), &source(&bytes), quiet).unwrap().is_none()
        );
        two.post_receive(&MatchSpec::tagged(to_one, 1, TAG_ALL), &target(&mut destination), 2)
            .unwrap();
    }
    completions(&[&one, &two], 1, 1);
    assert!(destination == bytes);
    // SAFETY: as above.
    let sent = unsafe { one.post_send(to_two, Envelope::tagged(1), &source(&bytes), quiet) };
    assert!(sent.unwrap().is_none());
    drop(two);
    let failed = completions(&[&one], 0, 1).pop().unwrap();
    assert!(matches!(failed.outcome, Err(Error::PeerDisconnected(_))), "{:?}", failed.outcome);
}

#[test]
fn a_message_that_is_set_aside_is_found_by_its_claim_alone() {
    let [(one, to_two), (two, to_one)] = pair("claim");
    let long = pattern(200_000, 4);
    for length in [5, 3000, 200_000] {
        // SAFETY: the bytes outlive everything here.
        drop(unsafe {
            one.post_send(to_two, Envelope::tagged(7), &source(&long[..length]), options(1))
        });
    }
    let wanted = MatchSpec::tagged(to_one, 7, TAG_ALL);
    let peek = |claim| {
        let deadline = Instant::now() + Duration::from_secs(200);
        loop {
            one.progress();
            if let Some(report) = two.peek(&wanted, claim).unwrap() {
                break report;
            }
            assert!(Instant::now() < deadline, "the message has arrived");
        }
    };
    assert_eq!(peek(None).length, 5);
    assert_eq!(peek(Some(100)).length, 5, "a peek changes nothing");
    assert_eq!(peek(Some(101)).length, 3000, "a claimed message is not found again");
    let mut destination = vec![0; 200_000];
    // SAFETY: it lives until its completion, here and below.
    unsafe { two.post_receive(&wanted, &target(&mut destination), 3).unwrap() };
    assert_eq!(completions(&[&one, &two], 1, 1)[0].length, 200_000);
    assert!(destination == long);
    // SAFETY: as above.
    unsafe { two.post_claimed(101, &target(&mut destination), 4).unwrap() };
    let claimed = completions(&[&one, &two], 1, 1).pop().unwrap();
    assert_eq!((claimed.context, claimed.length, claimed.peer), (4, 3000, Some(to_one)));
    assert!(destination[..3000] == long[..3000]);
    two.discard_claimed(100).unwrap();
    assert!(two.discard_claimed(100).is_err() && two.peek(&wanted, None).unwrap().is_none());
}

#[test]
fn a_discarded_message_ends_well_for_its_sender() {
    let [(one, to_two), (two, _)] = pair("discard");
    let bytes = pattern(1 << 20, 4);
    // SAFETY: the bytes live until the completion.
    drop(unsafe { one.post_send(to_two, Envelope::tagged(7), &source(&bytes), options(1)) });
    let deadline = Instant::now() + Duration::from_secs(200);
    while two.discard(&MatchSpec::tagged(Source::Any, 0, 0)).unwrap().is_none() {
        assert!(Instant::now() < deadline, "the message has arrived");
        one.progress();
    }
    assert_eq!(completions(&[&two, &one], 1, 1)[0].outcome, Ok(()));
}

#[test]
fn one_receive_takes_several_messages_until_it_is_full() {
    let [(one, to_two), (two, to_one)] = pair("several");
    let mut destination = vec![0u8; 1000];
    let begin = destination.as_mut_ptr();
    let mut expected = Vec::new();
    // One before the receive is posted, the others after.
    one.inject(to_two, Envelope::untagged(), &pattern(100, 0)).unwrap();
    let wait = MatchSpec::untagged(to_one);
    while two.peek(&wait, None).unwrap().is_none() {
        one.progress();
    }
    // SAFETY: it lives until its last completion.
    unsafe {
        two.post_multi_receive(&wait, Segment::target(begin, destination.len()), 6, 300).unwrap();
    }
    for number in 1..5 {
        one.inject(to_two, Envelope::untagged(), &pattern(100 + number * 100, number)).unwrap();
    }
    let found = completions(&[&one, &two], 1, 4);
    let mut at = 0;
    for (number, report) in found.iter().enumerate() {
        let length = 100 + number * 100;
        assert_eq!((report.context, report.length), (6, length as u64));
        assert_eq!(report.address, begin.wrapping_add(at));
        assert_eq!(report.is_last, number == 3, "before that, 400 bytes are left");
        at += length;
        expected.extend(pattern(length, number));
    }
    assert!(destination == expected);
    let next = loop {
        one.progress();
        if let Some(report) = two.peek(&wait, None).unwrap() {
            break report;
        }
    };
    assert_eq!(next.length, 500, "what does not fit waits for the next receive");
}

#[test]
fn posted_receives_can_be_cancelled_by_their_context() {
    let [(one, _), (two, to_one)] = pair("cancel");
    let mut destination = [0u8; 64];
    // SAFETY: it lives until its completion, for both.
    unsafe {
        two.post_receive(
            &MatchSpec::tagged(to_one, 1, TAG_ALL),
            &target(&mut destination[..32]),
            11,
        )
        .unwrap();
        let rest = Segment::target(destination[32..].as_mut_ptr(), 32);
        two.post_multi_receive(&MatchSpec::untagged(Source::Any), rest, 12, 8).unwrap();
    }
    assert!(!two.cancel_posted(10) && two.cancel_posted(11) && two.cancel_posted(12));
    let found = completions(&[&one, &two], 1, 2);
    for (report, context) in found.iter().zip([11, 12]) {
        assert!(report.context == context && matches!(report.outcome, Err(Error::Cancelled(_))));
        assert_eq!(report.is_last, context == 12);
    }
    assert!(!two.cancel_posted(11));
}

#[test]
fn a_message_that_is_too_long_is_told_of_with_its_whole_length() {
    let [(one, to_two), (two, to_one)] = pair("truncated");
    for length in [40, 5000, 300_000] {
        let (bytes, mut destination) = (pattern(length, 1), [0; 10]);
        let envelope = Envelope { tag: 3, data: Some(8), ..Envelope::default() };
        // SAFETY: both live until their completions.
        let sent = unsafe {
            two.post_receive(&MatchSpec::tagged(to_one, 3, TAG_ALL), &target(&mut destination), 2)
                .unwrap();
            one.post_send(to_two, envelope, &source(&bytes), options(1)).unwrap()
        };
        let report = completions(&[&one, &two], 1, 1).pop().unwrap();
        let (message_bytes, buffer_bytes) = (length as u64, 10);
        assert_eq!(report.outcome, Err(Error::Truncated { message_bytes, buffer_bytes }));
        assert_eq!((report.length, report.envelope), (message_bytes, envelope));
        assert_eq!(destination[..], bytes[..10]);
        if sent.is_none() {
            assert_eq!(completions(&[&two, &one], 1, 1)[0].outcome, Ok(()));
        }
    }
}
