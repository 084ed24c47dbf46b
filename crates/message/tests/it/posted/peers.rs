//! Peers: names, ends, windows, and waits for reports.

use super::*;

#[test]
fn an_endpoint_that_knows_itself_can_send_to_itself() {
    let (one, name) = endpoint("self");
    let me = one.add_peer(&name).unwrap();
    for length in [3, 5000, 500_000] {
        let (bytes, mut destination) = (pattern(length, 2), vec![0; length]);
        // SAFETY: both live until their completions.
        let sent = unsafe {
            one.post_receive(&MatchSpec::tagged(me, 1, TAG_ALL), &target(&mut destination), 2)
                .unwrap();
            one.post_send(me, Envelope::tagged(1), &source(&bytes), options(1)).unwrap()
        };
        let expected = if sent.is_some() { 1 } else { 2 };
        assert!(completions(&[&one], 0, expected).iter().all(|report| report.outcome.is_ok()));
        assert!(destination == bytes);
    }
}

#[test]
fn sends_to_a_name_where_nobody_is_fail_and_so_do_receives_from_it() {
    let (one, _) = endpoint("nobody");
    let nobody = one.add_peer("posted-nobody-is-here").unwrap();
    let nobody_either = one.add_peer("posted-nobody-is-here-either").unwrap();
    let mut destination = [0; 8];
    // SAFETY: both live until their completions.
    unsafe {
        one.post_receive(&MatchSpec::tagged(nobody_either, 0, 0), &target(&mut destination), 1)
            .unwrap();
        let sent = one.post_send(nobody, Envelope::tagged(1), &source(&[1; 8]), options(2));
        assert!(sent.unwrap().is_none());
    }
    for report in completions(&[&one], 0, 2) {
        assert!(matches!(report.outcome, Err(Error::PeerDisconnected(_))), "{:?}", report.outcome);
    }
    assert!(one.inject(nobody, Envelope::tagged(1), b"again").is_err());
}

#[test]
fn a_wait_for_reports_ends_when_it_is_interrupted() {
    let (one, _) = endpoint("interrupt");
    let waiter = one.clone();
    let task = std::thread::spawn(move || waiter.wait_completions(&mut Vec::new(), None));
    std::thread::sleep(Duration::from_millis(30));
    one.wake_waiter();
    assert!(!task.join().unwrap());
    assert!(!one.wait_completions(&mut Vec::new(), Some(Duration::from_millis(1))));
}

#[test]
fn a_window_is_found_by_its_key_and_accesses_to_it_end_in_reports() {
    let [(one, to_two), (two, _)] = pair("keys");
    let mut exposed = pattern(100_000, 1);
    let (address, length) = (exposed.as_mut_ptr(), exposed.len());
    // SAFETY: the memory lives until the window is withdrawn, and is not accessed before.
    let window = unsafe { two.expose_key(address, length, Rights::READ_WRITE, 77) }.unwrap();
    let deadline = Instant::now() + Duration::from_secs(200);
    while !one.is_connected(to_two).unwrap() {
        assert!(Instant::now() < deadline, "the connection is accepted");
        one.progress();
        two.progress();
    }
    assert!(matches!(one.attach_key(to_two, 78), Err(Error::Withdrawn)));
    let remote = one.attach_key(to_two, 77).unwrap();
    for (offset, length) in [(0, 8), (100, 100), (5000, 95_000)] {
        let (bytes, mut back) = (pattern(length, offset), vec![0; length]);
        // SAFETY: both live until their completions, here or at once.
        let over = unsafe {
            let put = remote.post_put(offset as u64, bytes.as_ptr(), length, options(1)).unwrap();
            let get =
                remote.post_get(offset as u64, back.as_mut_ptr(), length, options(2)).unwrap();
            [put, get].into_iter().flatten().count()
        };
        for report in completions(&[&one], 0, 2 - over) {
            let kind = [CompletionKind::Put, CompletionKind::Get][report.context as usize - 1];
            assert_eq!((report.kind, report.outcome), (kind, Ok(())));
        }
        assert!(back == bytes);
    }
    drop(remote);
    window.withdraw().unwrap();
    assert!(exposed[5000..] == pattern(95_000, 5000));
    assert!(matches!(one.attach_key(to_two, 77), Err(Error::Withdrawn)));
}

#[test]
fn a_receive_from_a_peer_that_ends_without_a_word_ends_too() {
    let [(one, to_two), (two, _)] = pair("silent");
    let mut destination = [0; 8];
    // SAFETY: it lives until its completion.
    unsafe {
        one.post_receive(&MatchSpec::tagged(to_two, 0, 0), &target(&mut destination), 1).unwrap();
    }
    drop(two);
    let ended = completions(&[&one], 0, 1).pop().unwrap();
    assert!(matches!(ended.outcome, Err(Error::PeerDisconnected(_))), "{:?}", ended.outcome);
    assert!(one.peek(&MatchSpec::tagged(to_two, 0, 0), None).is_err(), "no message can arrive");
    assert!(one.can_block(), "no connection is pending");
}

#[test]
fn a_peer_that_is_forgotten_leaves_no_receive_behind_for_the_next_one() {
    let (one, _) = endpoint("forget");
    // It exists, but does not reply.
    let (_silent, silent) = endpoint("forget-first");
    let first = one.add_peer(&silent).unwrap();
    let mut destination = [0; 8];
    // SAFETY: it lives until its completion.
    unsafe {
        one.post_receive(&MatchSpec::tagged(first, 0, 0), &target(&mut destination), 1).unwrap();
    };
    one.remove_peer(first);
    assert!(completions(&[&one], 0, 1)[0].outcome.is_err());
    let (two, name) = endpoint("forget-next");
    let next = one.add_peer(&name).unwrap();
    let to_one = two.add_peer(one.name()).unwrap();
    two.inject(to_one, Envelope::tagged(0), b"for next").unwrap();
    // SAFETY: as above.
    unsafe {
        one.post_receive(&MatchSpec::tagged(next, 0, 0), &target(&mut destination), 2).unwrap();
    };
    let report = completions(&[&two, &one], 1, 1).pop().unwrap();
    assert_eq!((report.context, report.outcome), (2, Ok(())));
    assert!(one.inject(first, Envelope::tagged(0), b"more").is_err());
}

#[test]
fn a_message_behind_any_number_of_unexpected_ones_can_be_received_first() {
    let names = ["many-1", "many-2"].map(|name| format!("posted-{}-{name}", std::process::id()));
    let open = |name: &str| Endpoint::builder().max_unexpected_bytes(4096).open(name).unwrap();
    let (one, two) = (open(&names[0]), open(&names[1]));
    let (to_two, to_one) = (one.add_peer(&names[1]).unwrap(), two.add_peer(&names[0]).unwrap());
    // In two segments each, and more than the receiver buffers.
    let bytes = pattern(1000, 1);
    let segments =
        [Segment::source(bytes.as_ptr(), 500), Segment::source(bytes[500..].as_ptr(), 500)];
    for _ in 0..3000 {
        // SAFETY: the bytes outlive everything here.
        drop(unsafe { one.post_send(to_two, Envelope::tagged(1), &segments, options(1)) });
    }
    one.inject(to_two, Envelope::tagged(2), b"the last").unwrap();
    let mut destination = [0; 1000];
    // SAFETY: it lives until its completion, here and below.
    unsafe {
        two.post_receive(&MatchSpec::tagged(to_one, 2, TAG_ALL), &target(&mut destination), 1)
            .unwrap();
    };
    assert_eq!(completions(&[&one, &two], 1, 1)[0].outcome, Ok(()));
    assert_eq!(&destination[..8], b"the last");
    for _ in 0..3000 {
        // SAFETY: as above.
        unsafe {
            two.post_receive(&MatchSpec::tagged(to_one, 1, TAG_ALL), &target(&mut destination), 2)
                .unwrap();
        }
        assert_eq!(completions(&[&one, &two], 1, 1)[0].outcome, Ok(()));
        assert!(destination[..] == bytes);
    }
}

#[test]
fn the_name_of_a_peer_is_known_after_it_has_gone() {
    let [(one, _), (two, to_one)] = pair("name");
    let name = two.name().to_owned();
    two.inject(to_one, Envelope::tagged(1), b"and gone").unwrap();
    let mut destination = [0; 8];
    // SAFETY: it lives until its completion.
    unsafe {
        one.post_receive(&MatchSpec::tagged(Source::Any, 1, TAG_ALL), &target(&mut destination), 1)
    }
    .unwrap();
    let report = completions(&[&two, &one], 1, 1).pop().unwrap();
    drop(two);
    for _ in 0..100 {
        one.progress();
    }
    assert_eq!(one.name_of(report.peer.unwrap()), Ok(name));
}
