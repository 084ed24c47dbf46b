//! Posted buffers: small messages that a poll passes on without a completion entry.

use memferry_message::{BufferReceived, EndpointBuilder, ValidationError};

use super::*;
use memferry_sys::stats::reader::{BlockView, processes};

/// What a poll has found: a message for a buffer, or a completion entry.
#[derive(Debug)]
enum Found {
    Received(BufferReceived),
    Entry(CompletionEntry),
}

impl Found {
    fn context(&self) -> u64 {
        match self {
            Self::Received(received) => received.context,
            Self::Entry(entry) => entry.context,
        }
    }

    fn length(&self) -> usize {
        match self {
            Self::Received(received) => received.length,
            Self::Entry(entry) => entry.length as usize,
        }
    }
}

/// Polls with a limit until `count` messages or entries have come.
fn poll(from: &Endpoint, at: &Endpoint, limit: usize, count: usize) -> Vec<Found> {
    let (mut found, mut entries) = (Vec::new(), Vec::new());
    let deadline = Instant::now() + Duration::from_secs(200);
    while found.len() < count {
        assert!(Instant::now() < deadline, "{} of {count} came", found.len());
        from.progress();
        let before = found.len();
        at.poll_received(&mut entries, limit, |received| found.push(Found::Received(received)));
        assert!(found.len() - before <= limit);
        found.extend(entries.drain(..).map(Found::Entry));
    }
    found
}

/// Two connected endpoints: messages have gone both ways.
fn connected(name: &str) -> [(Endpoint, memferry_message::Peer); 2] {
    let [(one, to_two), (two, to_one)] = pair(name);
    for ((here, to), (there, back)) in
        [((&one, to_two), (&two, to_one)), ((&two, to_one), (&one, to_two))]
    {
        here.inject(to, Envelope::tagged(u64::MAX), b"").unwrap();
        let mut nothing = [0; 1];
        // SAFETY: it lives until its completion.
        unsafe {
            there
                .post_receive(&MatchSpec::tagged(back, u64::MAX, TAG_ALL), &target(&mut nothing), 0)
                .unwrap();
        }
        completions(&[here, there], 1, 1);
    }
    [(one, to_two), (two, to_one)]
}

/// The counters of the messages with the endpoint of a test.
fn counters(name: &str) -> BlockView {
    let (pid, name) = (std::process::id(), format!("posted-{}-{name}", std::process::id()));
    let blocks = processes(Some(pid)).unwrap().swap_remove(0).blocks;
    blocks.into_iter().find(|block| block.kind == "peer" && block.name == name).unwrap()
}

#[test]
fn messages_of_every_size_reach_their_posted_buffers_in_order() {
    let [(one, to_two), (two, to_one)] = connected("buffers-order");
    let lengths: Vec<usize> =
        (0..400).map(|n| [8, 0, 40, 48, 49, 3000, 8, 20_000][n % 8]).collect();
    let mut destinations: Vec<Vec<u8>> = lengths.iter().map(|_| vec![0xEE; 20_000]).collect();
    for (number, destination) in destinations.iter_mut().enumerate() {
        let from = if number % 2 == 0 { Source::Peer(to_one) } else { Source::Any };
        let wanted = MatchSpec::tagged(from, 9, TAG_ALL);
        // SAFETY: they live until their completions.
        unsafe { two.post_buffer(&wanted, &target(destination), number as u64).unwrap() };
    }
    let (mut found, mut sent) = (Vec::new(), 0);
    for batch in lengths.chunks(16) {
        for length in batch {
            let data = (sent % 3 == 0).then_some(sent as u64);
            let envelope = Envelope { data, ..Envelope::tagged(9) };
            one.inject(to_two, envelope, &pattern(*length, sent)).unwrap();
            sent += 1;
        }
        found.extend(poll(&one, &two, 5, batch.len()));
    }
    let (mut in_cells, mut in_pieces) = (0, 0);
    found.sort_by_key(Found::context);
    for (number, message) in found.iter().enumerate() {
        assert_eq!((message.context(), message.length()), (number as u64, lengths[number]));
        let expected = pattern(lengths[number], number);
        let destination = &destinations[number];
        assert!(destination[..expected.len()] == expected, "{} bytes", expected.len());
        assert!(destination[expected.len()..].iter().all(|byte| *byte == 0xEE));
        if let Found::Received(received) = message {
            *(if received.length <= 48 { &mut in_cells } else { &mut in_pieces }) += 1;
            assert_eq!(received.peer, to_one);
            assert_eq!(received.envelope.data, (number % 3 == 0).then_some(number as u64));
            assert_eq!(received.address.cast_const(), destination.as_ptr());
        }
    }
    assert!(in_cells > 50, "{in_cells} small messages came without an entry");
    assert!(in_pieces > 10, "{in_pieces} messages in the bounce ring came without an entry");
    // Each is counted once at both sides, however it came, with the empty one that connected them.
    let (count, bytes) = (lengths.len() as u64 + 1, lengths.iter().sum::<usize>() as u64);
    let deadline = Instant::now() + Duration::from_secs(200);
    // The sender learns of the end of the last message later.
    while counters("buffers-order-2").sum("sent") < count && Instant::now() < deadline {
        one.progress();
    }
    let (at_one, at_two) = (counters("buffers-order-2"), counters("buffers-order-1"));
    assert_eq!((at_one.sum("sent"), at_one.sum("sent_bytes")), (count, bytes));
    assert_eq!((at_two.sum("received"), at_two.sum("received_bytes")), (count, bytes));
    assert_eq!(at_two.values("received"), at_one.values("sent"));
}

#[test]
fn a_message_longer_than_its_posted_buffer_is_truncated() {
    let [(one, to_two), (two, to_one)] = connected("buffers-short");
    // In a cell, and in the bounce ring.
    for message in [pattern(8, 1), pattern(3000, 2)] {
        let mut destination = [0; 4];
        let wanted = MatchSpec::tagged(to_one, 1, TAG_ALL);
        // SAFETY: it lives until its completion.
        unsafe { two.post_buffer(&wanted, &target(&mut destination), 3).unwrap() };
        one.inject(to_two, Envelope::tagged(1), &message).unwrap();
        let Some(Found::Entry(entry)) = poll(&one, &two, 8, 1).pop() else { panic!("no entry") };
        let error = Error::Truncated { message_bytes: message.len() as u64, buffer_bytes: 4 };
        assert_eq!((entry.context, entry.outcome), (3, Err(error)));
        assert_eq!(destination, message[..4]);
    }
}

#[test]
fn posted_buffers_end_when_they_are_cancelled_or_their_peer_or_endpoint_is_closed() {
    let [(one, to_two), (two, to_one)] = connected("buffers-end");
    let mut destinations = [[0u8; 8]; 4];
    for (number, destination) in destinations.iter_mut().enumerate() {
        let from = if number < 2 { Source::Peer(to_one) } else { Source::Any };
        let wanted = MatchSpec::tagged(from, 1, TAG_ALL);
        // SAFETY: they live until their completions.
        unsafe { two.post_buffer(&wanted, &target(destination), number as u64).unwrap() };
    }
    assert!(two.cancel_posted(1) && two.cancel_posted(2));
    assert!(!two.cancel_posted(1), "it is cancelled already");
    let mut ended = poll(&one, &two, 8, 2);
    ended.extend({
        one.inject(to_two, Envelope::tagged(2), b"of no interest").unwrap();
        one.clone().close();
        poll(&one, &two, 8, 1)
    });
    let contexts: Vec<u64> = ended.iter().map(Found::context).collect();
    assert_eq!(contexts, [1, 2, 0]);
    for found in &ended {
        let Found::Entry(entry) = found else { panic!("{found:?} is no entry") };
        match entry.context {
            0 => assert!(matches!(entry.outcome, Err(Error::PeerDisconnected(_)))),
            _ => assert!(matches!(entry.outcome, Err(Error::Cancelled(_)))),
        }
    }
    two.clone().close();
    let mut entries = Vec::new();
    two.poll_received(&mut entries, 8, |received| panic!("{received:?} after the close"));
    let [entry] = &entries[..] else { panic!("{entries:?}") };
    assert_eq!((entry.context, &entry.outcome), (3, &Err(Error::Closed)));
    assert!(!two.is_busy());
}

#[test]
fn posted_buffers_count_as_operations() {
    let name = format!("posted-{}-buffers-many", std::process::id());
    let endpoint = EndpointBuilder::new().max_operations(3).open(&name).unwrap();
    let wanted = MatchSpec::tagged(Source::Any, 1, TAG_ALL);
    let mut destination = [[0; 8]; 4];
    let mut post = |number: usize| {
        // SAFETY: it lives until the endpoint is closed.
        unsafe { endpoint.post_buffer(&wanted, &target(&mut destination[number]), number as u64) }
    };
    assert!((0..3).all(|number| post(number).is_ok()));
    let error = Error::Validation(ValidationError::TooManyOperations(3));
    assert_eq!(post(3), Err(error.clone()));
    assert!(endpoint.cancel_posted(1));
    assert_eq!(post(3), Ok(()));
    endpoint.close();
}
