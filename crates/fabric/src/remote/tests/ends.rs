//! Peers and transports that end, and packets that no correct peer sends.

use super::*;

#[test]
fn a_peer_that_closes_is_gone_and_its_messages_end() {
    let Some([mut one, mut two]) = both() else { return };
    let (to_two, to_one) = (one.number(&two), two.number(&one));
    let bytes = pattern(1 << 20, 1);
    one.send(to_two, 1, Envelope::tagged(1), &bytes);
    two.send(to_one, 2, Envelope::tagged(1), b"the last word");
    let mut sides = [one, two];
    until(&mut sides, 1, is_message);
    let [mut one, two] = sides;
    // It closes without having fetched the message; its sent messages arrive.
    let closing = std::thread::spawn(move || drop(two));
    let deadline = Instant::now() + Duration::from_secs(200);
    while !one.events.iter().any(is_disconnected) && Instant::now() < deadline {
        one.transport.poll(&mut one.events);
    }
    closing.join().unwrap();
    assert!(matches!(one.take(is_message), Some(RemoteEvent::Arrived { .. })));
    let sent = one.take(is_sent);
    let reason = Error::PeerDisconnected(DisconnectReason::Closed.into());
    assert!(
        matches!(&sent, Some(RemoteEvent::Sent { number: 1, outcome: Err(e) }) if *e == reason),
        "{sent:?}"
    );
    assert!(
        matches!(one.take(is_disconnected), Some(RemoteEvent::Disconnected { peer, reason: DisconnectReason::Closed }) if peer == to_two)
    );
    one.send(to_two, 3, Envelope::tagged(1), b"too late");
    one.transport.poll(&mut one.events);
    assert!(matches!(one.take(is_sent), Some(RemoteEvent::Sent { outcome: Err(_), .. })));
}

#[test]
fn a_peer_that_is_not_there_is_gone() {
    let Some(mut one) = TestSide::new() else { return };
    let Some(other) = inner() else { return };
    let name = address_for(&other);
    drop(other);
    let to = one.directory.number(&name).unwrap();
    let bytes = pattern(100_000, 1);
    one.send(to, 1, Envelope::tagged(1), &bytes);
    one.transport.silence_timeout = Duration::from_millis(50);
    let deadline = Instant::now() + Duration::from_secs(200);
    while !one.events.iter().any(is_disconnected) {
        assert!(Instant::now() < deadline, "it is detected");
        one.transport.poll(&mut one.events);
    }
    assert!(matches!(one.take(is_sent), Some(RemoteEvent::Sent { outcome: Err(_), .. })));
}

#[test]
fn a_peer_that_does_not_look_for_a_while_is_not_given_up() {
    let Some(mut sides) = both() else { return };
    let to = sides[0].number(&sides[1]);
    sides[0].transport.silence_timeout = Duration::from_millis(10);
    let bytes = pattern(100_000, 1);
    sides[0].send(to, 1, Envelope::tagged(1), &bytes);
    let silence = Instant::now() + Duration::from_millis(300);
    while Instant::now() < silence {
        let one = &mut sides[0];
        one.transport.poll(&mut one.events);
    }
    assert!(receive(&mut sides, usize::MAX).3 == bytes);
    until(&mut sides, 0, is_sent);
    assert!(!sides[0].events.iter().any(is_disconnected));
}

#[test]
fn a_carrier_can_be_dropped_with_work_under_way() {
    let Some([mut one, two]) = both() else { return };
    let to = one.number(&two);
    let bytes = pattern(4 << 20, 1);
    one.send(to, 1, Envelope::tagged(1), &bytes);
    let mut sides = [one, two];
    let event = until(&mut sides, 1, is_message);
    let RemoteEvent::Rts { peer, ticket, length, .. } = event else { panic!("{event:?}") };
    let mut destination = vec![0; bytes.len()];
    let segments = [Segment::target(destination.as_mut_ptr(), destination.len())];
    sides[1].transport.fetch(peer, ticket, 1, &segments, length);
    for _ in 0..20 {
        let [one, two] = &mut sides;
        one.transport.poll(&mut one.events);
        two.transport.poll(&mut two.events);
    }
    let [mut one, two] = sides;
    drop(two);
    let as_left = destination.clone();
    let deadline = Instant::now() + Duration::from_secs(200);
    while !one.events.iter().any(is_disconnected) {
        assert!(Instant::now() < deadline, "it is detected");
        one.transport.poll(&mut one.events);
    }
    assert!(one.take(is_sent).is_some());
    assert!(destination == as_left, "nothing writes any more");
}

#[test]
fn a_carrier_that_nobody_has_used_is_quiet_and_can_be_waited_for() {
    let Some(mut sides) = both() else { return };
    let mut events = Vec::new();
    sides[1].transport.poll(&mut events);
    assert!(sides[1].transport.can_block());
    let to = sides[0].number(&sides[1]);
    sides[0].send(to, 1, Envelope::tagged(1), b"wake up");
    let deadline = Instant::now() + Duration::from_secs(200);
    while events.is_empty() {
        assert!(Instant::now() < deadline, "the descriptor becomes readable");
        let [one, two] = &mut sides;
        one.transport.poll(&mut one.events);
        if two.transport.can_block() {
            let Some(descriptor) = two.transport.descriptor() else { return };
            let mut waited =
                [rustix::event::PollFd::new(&descriptor, rustix::event::PollFlags::IN)];
            let moment = rustix::event::Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            if rustix::event::poll(&mut waited, Some(&moment)).unwrap() == 0 {
                continue;
            }
        }
        two.transport.poll(&mut events);
    }
}

#[test]
fn a_peer_that_says_what_cannot_be_is_given_up() {
    let envelope = Envelope::tagged(1);
    let nonsense = [
        PacketBody::Cts { ticket: 1, label: 1, length: 1 },
        PacketBody::Cts { ticket: u64::MAX, label: 0, length: 0 },
        PacketBody::Fin { ticket: 1 },
        PacketBody::Credit { cost: 1 },
        PacketBody::Credit { cost: u64::MAX },
        PacketBody::Close,
    ];
    for body in nonsense {
        let (Some(mut side), Some(from)) = (TestSide::new(), inner()) else { return };
        let name = address_for(&from);
        let bytes = packet::encode(&name, identifier_of(&side.address), &body, 0);
        assert!(inject(&mut side, &name, &from, &bytes).is_some(), "{body:?}");
    }
    let (Some(mut side), Some(from)) = (TestSide::new(), inner()) else { return };
    let name = address_for(&from);
    let whole =
        packet::encode(&name, identifier_of(&side.address), &PacketBody::Eager { envelope }, 0);
    assert!(inject(&mut side, &name, &from, &whole).is_none(), "that was right");
    let mut broken = whole.clone();
    broken[4] = 99;
    side.events.clear();
    assert!(inject(&mut side, &name, &from, &broken).is_some(), "and that was not");
}

#[test]
fn a_message_that_is_announced_twice_ends_its_peer() {
    let (Some(mut side), Some(from)) = (TestSide::new(), inner()) else { return };
    let name = address_for(&from);
    let body = PacketBody::Rts {
        envelope: Envelope::tagged(1),
        length: isize::MAX as u64,
        ticket: 4,
        acknowledged: true,
    };
    let bytes = packet::encode(&name, identifier_of(&side.address), &body, 0);
    assert!(inject(&mut side, &name, &from, &bytes).is_none());
    side.events.clear();
    assert!(inject(&mut side, &name, &from, &bytes).is_some());
}

#[test]
fn remote_peers_can_be_switched_off() {
    let settings = RemoteConfig { is_off: true, ..RemoteConfig::default() };
    let error = InnerEndpoint::open(&settings).unwrap_err();
    assert!(error.to_string().contains("MEMFERRY_REMOTE"), "{error}");
}

#[test]
fn an_interface_that_does_not_exist_is_named() {
    if !library::load() {
        return skip_without_libfabric();
    }
    let settings = RemoteConfig { interface: Some("nosuch0".into()), ..RemoteConfig::default() };
    let error = InnerEndpoint::open(&settings).unwrap_err();
    assert!(error.to_string().contains("nosuch0"), "{error}");
}

#[test]
fn small_messages_arrive_although_the_carrier_closes_before_the_peer_has_looked() {
    let Some([mut one, mut two]) = both() else { return };
    let to = one.number(&two);
    for number in 0..10 {
        one.send(to, number, Envelope::tagged(number), b"told as sent");
    }
    let closing = std::thread::spawn(move || drop(one));
    // The peer is busy for longer than a connection usually takes.
    std::thread::sleep(Duration::from_millis(1500));
    let deadline = Instant::now() + Duration::from_secs(200);
    while two.events.iter().filter(|event| is_message(event)).count() < 10 {
        assert!(Instant::now() < deadline, "they come: {:?}", two.events);
        two.transport.poll(&mut two.events);
    }
    closing.join().unwrap();
}

#[test]
fn nobody_speaks_for_another_once_it_has_spoken_itself() {
    let (Some(mut sides), Some(impostor)) = (both(), inner()) else { return };
    let (to, back) = (sides[0].number(&sides[1]), sides[1].number(&sides[0]));
    // Both have sent, so both know the other's address.
    sides[0].send(to, 1, Envelope::tagged(1), b"question");
    until(&mut sides, 1, is_message);
    sides[1].send(back, 1, Envelope::tagged(2), b"answer");
    until(&mut sides, 0, is_message);
    let target = identifier_of(&sides[0].address);
    let bye = packet::encode(&sides[1].address, target, &PacketBody::Close, 0);
    let at = impostor.insert(socket_of(&sides[0].address)).unwrap();
    let deadline = Instant::now() + Duration::from_secs(200);
    let mut finished = Vec::new();
    // SAFETY: the bytes live until the send completes.
    while unsafe { impostor.send(&bye, at, 1) } == Err(PostError::Again) || finished.is_empty() {
        assert!(Instant::now() < deadline);
        impostor.read(&mut finished);
        sides[0].transport.poll(&mut sides[0].events);
    }
    for number in 0..100 {
        sides[1].send(back, number, Envelope::tagged(number), b"still here");
        until(&mut sides, 0, is_message);
    }
    assert!(!sides[0].events.iter().any(is_disconnected));
}

#[test]
fn packets_for_others_and_from_this_host_have_no_effect() {
    let (Some(mut side), Some(from)) = (TestSide::new(), inner()) else { return };
    let (name, target) = (address_for(&from), identifier_of(&side.address));
    let whole = PacketBody::Eager { envelope: Envelope::tagged(1) };
    let mut ours = name;
    ours[20..36].copy_from_slice(&crate::address::HostId::ours().0);
    let mut broken = packet::encode(&name, target + 1, &whole, 0);
    broken[4] = 99;
    for bytes in [broken, packet::encode(&ours, target, &whole, 0)] {
        side.transport.on_packet(&bytes, crate::abi::FI_ADDR_NOTAVAIL);
    }
    side.transport.poll(&mut side.events);
    assert!(side.events.is_empty() && side.transport.peers.is_empty(), "{:?}", side.events);
    let right = packet::encode(&name, target, &whole, 0);
    side.transport.on_packet(&right, crate::abi::FI_ADDR_NOTAVAIL);
    side.transport.poll(&mut side.events);
    assert!(side.take(is_message).is_some());
}

#[test]
fn a_message_under_way_ends_when_its_host_has_vanished() {
    // Before the transports, which use it until they are dropped.
    let bytes = pattern(64 << 20, 1);
    let mut destination = vec![0; bytes.len()];
    let Some(mut sides) = both() else { return };
    let to = sides[0].number(&sides[1]);
    // The first connects, and sends what the other requests; then the other is silent.
    sides[0].send(to, 1, Envelope::tagged(1), &bytes);
    let event = until(&mut sides, 1, is_message);
    let RemoteEvent::Rts { peer, ticket, length, .. } = event else { panic!("{event:?}") };
    let segments = [Segment::target(destination.as_mut_ptr(), destination.len())];
    sides[1].transport.fetch(peer, ticket, 1, &segments, length);
    let deadline = Instant::now() + Duration::from_secs(200);
    while sides[0].transport.peers[0].data_in_flight == 0 {
        assert!(Instant::now() < deadline, "it is asked for");
        for side in &mut sides {
            side.transport.poll(&mut side.events);
        }
    }
    let one = &mut sides[0];
    one.transport.silence_timeout = Duration::from_millis(8);
    one.transport.disconnect(0, DisconnectReason::Exited);
    one.transport.peers[0].abort_at = Some(Instant::now());
    while !one.events.iter().any(is_disconnected) {
        assert!(Instant::now() < deadline, "the inner endpoint lets go");
        std::thread::sleep(Duration::from_millis(1));
        one.transport.can_block();
        one.transport.poll(&mut one.events);
        if one.transport.peers[0].is_aborted && Instant::now() + Duration::from_secs(50) > deadline
        {
            // Some versions do not release it; there is no need to wait for the next attempt.
            one.transport.peers[0].abort_at = Some(Instant::now());
        }
    }
    assert!(one.take(is_sent).is_some());
    // It can be used, and closed.
    one.send(to, 2, Envelope::tagged(1), b"nobody");
    one.transport.poll(&mut one.events);
    assert!(matches!(one.take(is_sent), Some(RemoteEvent::Sent { outcome: Err(_), .. })));
}
