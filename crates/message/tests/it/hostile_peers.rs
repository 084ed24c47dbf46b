//! Peers that each violate the protocol in one point: an invalid request, invalid shared memory, no
//! replies, no reads, or endless messages.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use memferry_message::plan::PathKind;
use memferry_message::ring::claims::SenderProgress;
use memferry_message::{
    DisconnectReason, Endpoint, EndpointBuilder, Error, Peer, Source, TAG_ALL, TAG_ANY,
};
use memferry_sys::shared_memory::SealedMemory;
use memferry_testing::in_own_process;
use memferry_testing::message::memory::GuardedBuffer;
use memferry_testing::message::raw_peer::{self, RawPeer, first, kind};
use memferry_testing::message::traces::{memory_kib, resource_usage};
use memferry_testing::message::{is_readable, say, unique, until};
use memferry_testing::pattern::{first_wrong, pattern};

/// An endpoint, and an honest one that is connected to it.
struct VictimPair {
    victim: Endpoint,
    honest: Endpoint,
    to_honest: Peer,
    to_victim: Peer,
}

fn pair(builder: &EndpointBuilder) -> VictimPair {
    let sides = memferry_testing::message::pair(builder);
    let (to_honest, to_prey) = (sides.to_there, sides.to_here);
    VictimPair { victim: sides.here, honest: sides.there, to_honest, to_victim: to_prey }
}

impl VictimPair {
    /// A raw peer, and the prey's handle of it.
    fn connect_raw(&self) -> (RawPeer, Peer) {
        let before = self.victim.peers();
        let raw = std::thread::scope(|scope| {
            let name = self.victim.name();
            let connecting = scope.spawn(move || RawPeer::connect(name).unwrap());
            until("it has connected", || {
                self.victim.peers();
                connecting.is_finished()
            });
            connecting.join().unwrap()
        });
        let peer = self.victim.peers().into_iter().find(|peer| !before.contains(peer)).unwrap();
        (raw, peer)
    }

    /// A large message with the honest peer, from the prey and back.
    fn check_honest(&self) {
        let messages = [(&self.victim, self.to_honest), (&self.honest, self.to_victim)];
        let sends = messages.map(|(from, to)| from.isend(to, 77, pattern(400_000, 7)).unwrap());
        let receives = [(&self.victim, self.to_honest), (&self.honest, self.to_victim)]
            .map(|(at, from)| at.irecv(from, 77, TAG_ALL, vec![0; 400_000]).unwrap());
        let (mut sends, mut receives) = (sends, receives);
        until("the honest peer is served", || {
            self.honest.progress();
            // A completed operation makes no progress, and later ones need both sides.
            self.victim.progress();
            sends.iter_mut().chain(&mut receives).all(memferry_message::OwnedOperation::is_done)
        });
        for receive in receives {
            assert_eq!(first_wrong(&receive.wait().unwrap().1, 7), None);
        }
        sends.into_iter().for_each(|send| drop(send.wait().unwrap()));
    }
}

fn is_protocol_violation(outcome: Result<(), Error>) -> bool {
    matches!(outcome, Err(Error::PeerDisconnected(gone)) if matches!(gone.reason, DisconnectReason::ProtocolViolation(_)))
}

#[test]
fn those_who_say_no_hello_or_half_of_one_keep_nobody_out() {
    if !in_own_process() {
        return;
    }
    let prey = EndpointBuilder::new().background(true).open(&unique("prey")).unwrap();
    let before = resource_usage();
    let hello = raw_peer::hello(5, (0, 0), "name");
    let mut rude = Vec::new();
    for number in 0..200 {
        let socket = raw_peer::call(prey.name());
        match number % 4 {
            0 => {}
            1 => socket.send(&hello[..20], &[]).unwrap(),
            2 => socket.send(&[0xFF; 100], &[]).unwrap(),
            // All of it, without the memory.
            _ => socket.send(&hello, &[]).unwrap(),
        }
        rude.push(socket);
    }
    let honest = Endpoint::open(&unique("honest")).unwrap();
    let peer = honest.connect(prey.name()).unwrap();
    honest.send(peer, 1, b"hello").unwrap();
    prey.recv(Source::Any, 1, TAG_ALL, &mut [0; 5]).unwrap();
    assert_eq!(prey.peers().len(), 1);
    drop((rude, honest));
    until("nothing is left of them", || {
        prey.peers().is_empty() && resource_usage().descriptors <= before.descriptors + 3
    });
}

#[test]
fn shared_memory_that_could_be_taken_away_is_refused() {
    if !in_own_process() {
        return;
    }
    let prey = EndpointBuilder::new().background(true).open(&unique("prey")).unwrap();
    let hello = raw_peer::hello(6, (0, 0), "");
    for (what, descriptor) in raw_peer::bad_memory(memferry_message::ring::layout::CONNECTION_BYTES)
    {
        let socket = raw_peer::call(prey.name());
        socket.send(&hello, &[descriptor.as_fd()]).unwrap();
        let answer = raw_peer::answer(&socket).expect("a refusal");
        assert_ne!(answer[44..48], [0; 4], "accepted with memory that is {what}");
    }
    assert!(prey.peers().is_empty());
}

#[test]
fn regions_that_could_be_taken_away_end_the_connection() {
    if !in_own_process() {
        return;
    }
    let sides = pair(&EndpointBuilder::new());
    for (what, descriptor) in raw_peer::bad_memory(1 << 20) {
        let (mut raw, peer) = sides.connect_raw();
        let mut target = GuardedBuffer::plain(1 << 20);
        let at = target.address();
        // SAFETY: kept until the operation completes, below.
        let mut receive = unsafe { sides.victim.irecv_raw(peer, 0, TAG_ANY, at, 1 << 20) }.unwrap();
        assert!(raw.send_region(3, descriptor.as_fd()));
        raw.write(&[first(kind::SHARE, 1, 0), 3, 1 << 40, 1 << 20, 0, 0, 0, 0]);
        raw.write(&[first(kind::REQUEST, 0, 0), 5, 1 << 20, 1, 1 << 40, 3, 0, 0]);
        until("it is disconnected", || receive.test().is_some());
        assert!(is_protocol_violation(receive.wait().map(drop)), "{what}: {:?}", receive.wait());
        target.check_guards();
    }
    // Sealed correctly, but the message declares more bytes than there are.
    for (address, length) in [(0, 1 << 21), (u64::MAX - 5, 1 << 20)] {
        let (mut raw, peer) = sides.connect_raw();
        let memory = SealedMemory::new("region", 1 << 20).unwrap();
        raw.send_region(3, memory.as_fd());
        raw.write(&[first(kind::SHARE, 0, 0), 3, address, length, 0, 0, 0, 0]);
        let error = sides.victim.recv(peer, 0, TAG_ANY, &mut [0; 8]).map(drop);
        assert!(is_protocol_violation(error));
    }
    // A message without its region is harmless: the descriptor may have been lost. Messages that
    // need it fail.
    let (mut raw, peer) = sides.connect_raw();
    raw.write(&[first(kind::SHARE, 0, 0), 3, 1 << 40, 4096, 0, 0, 0, 0]);
    raw.write(&[first(kind::INLINE, 4, 0), 5, 0x7961_6B6F, 0, 0, 0, 0, 0]);
    let mut words = [0; 4];
    sides.victim.recv(peer, 5, TAG_ALL, &mut words).unwrap();
    assert_eq!(&words, b"okay");
    sides.check_honest();
}

#[test]
fn more_descriptors_than_notes_fill_no_table() {
    if !in_own_process() {
        return;
    }
    let sides = pair(&EndpointBuilder::new().background(true));
    let (raw, _) = sides.connect_raw();
    let before = resource_usage();
    let memory = SealedMemory::new("region", 4096).unwrap();
    let mut sent = 0;
    while sent < 1000 && raw.send_region(sent, memory.as_fd()) {
        raw.wake();
        sent += 1;
    }
    sides.check_honest();
    let grown = resource_usage().descriptors.saturating_sub(before.descriptors);
    say(format_args!("{sent} descriptors sent, the process holds {grown} more"));
    assert!(grown < 100);
}

#[test]
fn one_who_never_answers_stops_nobody() {
    if !in_own_process() {
        return;
    }
    let sides = pair(&EndpointBuilder::new());
    let (raw, peer) = sides.connect_raw();
    let mut sends: Vec<_> =
        (0..300).map(|tag| sides.victim.isend(peer, tag, pattern(100_000, tag)).unwrap()).collect();
    let receive = sides.victim.irecv(peer, 0, TAG_ANY, vec![0u8; 10]).unwrap();
    for _ in 0..3 {
        sides.check_honest();
    }
    assert!(sends.iter_mut().all(|send| !send.is_done()));
    sends[7].operation().cancel();
    sides.victim.clone().close();
    for send in sends {
        let error = send.wait().unwrap_err().error;
        assert!(matches!(error, Error::Closed | Error::Cancelled(_)), "{error}");
    }
    assert_eq!(receive.wait().unwrap_err().error, Error::Closed);
    drop(raw);
}

#[test]
fn claims_that_are_never_finished_are_given_up_in_the_end() {
    if !in_own_process() {
        return;
    }
    let began = Instant::now();
    for closes in [true, false] {
        let sides = pair(&EndpointBuilder::new().path(PathKind::Cooperative));
        let (mut raw, peer) = sides.connect_raw();
        let source = pattern(1 << 20, 1);
        let receives: Vec<_> = (0..20)
            .map(|tag| sides.victim.irecv(peer, tag, TAG_ALL, vec![0u8; 1 << 20]).unwrap())
            .collect();
        raw.write(&[first(kind::REACH, 3, 0), 0, 0, 0, 0, 0, 0, 0]);
        for tag in 0..20 {
            let address = source.as_ptr() as u64;
            raw.write(&[first(kind::REQUEST, 0, 0), tag, 1 << 20, tag, address, 0, 0, 0]);
        }
        let mut claimed = 0;
        until("all are accepted, and a chunk of each is claimed", || {
            sides.victim.progress();
            while let Some(words) = raw.peek() {
                raw.consumer.advance();
                raw.consumer.publish();
                if words[0] >> 32 & 0xFF == u64::from(kind::ACCEPT) {
                    let (record, generation) = ((words[6] >> 32) as u16, (words[6] >> 48) as u16);
                    let chunks = (1u64 << 20).div_ceil(words[6] & 0xFFFF_FFFF);
                    let record = raw.memory.claims(false, record.into());
                    claimed += usize::from(record.claim_back(generation, chunks) != Ok(None));
                }
            }
            claimed == 20
        });
        if closes {
            // The holder of a claim may still write: its process is alive, so the buffers are kept.
            std::thread::scope(|scope| {
                scope.spawn(|| sides.victim.clone().close());
                drop(raw);
            });
        } else {
            raw.write(&[first(99, 0, 0), 0, 0, 0, 0, 0, 0, 0]);
        }
        for receive in receives {
            let error = receive.wait().unwrap_err().error;
            assert!(matches!(error, Error::Closed | Error::PeerDisconnected(_)), "{error}");
        }
        if !closes {
            sides.check_honest();
        }
    }
    say(format_args!("giving up what 20 claims held took {:?}", began.elapsed() / 2));
}

/// A chunk that is published without a control message, and another call before the event loop
/// polls.
#[test]
fn an_event_loop_hears_of_a_chunk_although_other_calls_come_first() {
    if !in_own_process() {
        return;
    }
    let sides = pair(&EndpointBuilder::new().path(PathKind::Cooperative));
    let (mut raw, peer) = sides.connect_raw();
    let watch = sides.victim.ready_fd().unwrap();
    let source = pattern(1 << 20, 1);
    let mut receive = sides.victim.irecv(peer, 1, TAG_ALL, vec![0; 1 << 20]).unwrap();
    raw.write(&[first(kind::REACH, 3, 0), 0, 0, 0, 0, 0, 0, 0]);
    let address = source.as_ptr() as u64;
    raw.write(&[first(kind::REQUEST, 0, 0), 1, 1 << 20, 5, address, 0, 0, 0]);
    let (mut helping, mut others) = (None, Vec::new());
    until("a chunk is claimed, and all others are copied", || {
        while let Some(words) = raw.peek() {
            raw.consumer.advance();
            if words[0] >> 32 & 0xFF == u64::from(kind::ACCEPT) {
                let (record, generation) = ((words[6] >> 32) as u16, (words[6] >> 48) as u16);
                let (chunk_bytes, target) = (words[6] & 0xFFFF_FFFF, words[4]);
                helping = Some((record, generation, chunk_bytes, target));
                let record = raw.memory.claims(false, record.into());
                let chunks = (1u64 << 20).div_ceil(chunk_bytes);
                assert_eq!(record.claim_back(generation, chunks), Ok(Some(chunks - 1)));
            }
        }
        if helping.is_none() {
            // Takes in notes, and copies nothing yet.
            others.push(sides.victim.irecv(peer, 2, TAG_ALL, vec![0u8; 8]).unwrap());
        } else {
            sides.victim.progress();
        }
        helping.is_some() && !is_readable(&watch)
    });
    let (record, generation, chunk_bytes, target) = helping.unwrap();
    let at = (1 << 20) - chunk_bytes;
    // SAFETY: the receiver has sent the target, which is in this process, and the chunk is claimed.
    unsafe {
        let from = source.as_ptr().add(at as usize);
        std::ptr::copy_nonoverlapping(from, (target + at) as *mut u8, chunk_bytes as usize);
    }
    raw.memory
        .claims(false, record.into())
        .publish(generation, SenderProgress { chunks: 1, returned: None });
    raw.wake();
    assert!(is_readable(&watch));
    others.push(sides.victim.irecv(peer, 2, TAG_ALL, vec![0u8; 8]).unwrap());
    assert!(is_readable(&watch), "the call has taken the news away");
    sides.victim.progress();
    assert!(receive.is_done());
    assert_eq!(first_wrong(&receive.wait().unwrap().1, 1), None);
    drop(others);
}

#[test]
fn one_who_asks_and_never_reads_the_answers_is_thrown_out() {
    if !in_own_process() {
        return;
    }
    let sides = pair(&EndpointBuilder::new());
    let (mut raw, peer) = sides.connect_raw();
    let before = memory_kib(std::process::id(), "VmRSS");
    until("it is disconnected", || {
        for number in 0..200 {
            raw.write(&[first(kind::WITHDRAW, 0, 0), number, 0, 0, 0, 0, 0, 0]);
        }
        sides.victim.progress();
        raw.is_lost()
    });
    let grown = memory_kib(std::process::id(), "VmRSS").saturating_sub(before);
    assert!(grown < 64 << 10, "{grown} KiB were kept for it");
    assert!(is_protocol_violation(sides.victim.send(peer, 0, b"x")));
    sides.check_honest();
}

#[test]
fn one_who_sends_although_there_is_no_room_is_thrown_out() {
    if !in_own_process() {
        return;
    }
    let fill = [
        // Small messages, announcements, and messages whose remaining fragments never come.
        [first(kind::INLINE, 48, 0), 1, 0, 0, 0, 0, 0, 0],
        [first(kind::REQUEST, 0, 0), 1, 1 << 20, 5, 4096, 0, 0, 0],
        [first(kind::EAGER, 0, 0), 1, 1 << 40, 64, 0, 0, 0, 0],
    ];
    for words in fill {
        let sides =
            pair(&EndpointBuilder::new().max_unexpected_messages(50).max_unexpected_bytes(10_000));
        let (mut raw, peer) = sides.connect_raw();
        until("it is disconnected", || {
            for _ in 0..100 {
                raw.write(&words);
            }
            sides.victim.progress();
            raw.is_lost()
        });
        assert!(is_protocol_violation(sides.victim.send(peer, 0, b"x")));
        sides.check_honest();
    }
}

#[test]
fn one_who_never_stops_writing_does_not_keep_calls_from_returning() {
    if !in_own_process() {
        return;
    }
    for hangs_up in [false, true] {
        let sides = pair(&EndpointBuilder::new());
        let (mut raw, peer) = sides.connect_raw();
        let _watch = sides.victim.ready_fd().unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let over = &over;
            scope.spawn(move || {
                if hangs_up {
                    rustix::net::shutdown(&raw.socket, rustix::net::Shutdown::Both).unwrap();
                }
                while !over.load(Ordering::Relaxed) {
                    raw.write(&[first(kind::REACH, 3, 0), 0, 0, 0, 0, 0, 0, 0]);
                }
            });
            for _ in 0..20 {
                sides.check_honest();
            }
            if hangs_up {
                until("it is disconnected", || sides.victim.send(peer, 0, b"x").is_err());
            }
            over.store(true, Ordering::Relaxed);
        });
    }
}
