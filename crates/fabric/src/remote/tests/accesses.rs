//! Reads and writes of memory that a peer on another host has registered.

use memferry_message::{RemoteRma, RemoteRmaOp, Rights, ValidationError};

use super::*;
use crate::mr::MrRange;
use crate::mr_table::{RmaDenied, RmaExtent};

const KEY: u64 = 40;

/// Registers memory with a side, which must not outlive it.
fn register(side: &TestSide, key: u64, memory: &mut [u8], rights: Rights) {
    let segment = Segment::target(memory.as_mut_ptr(), memory.len());
    // SAFETY: tests keep the memory until the key is removed or the side is dropped.
    unsafe { side.mr_table.insert(key, MrRange { segment, rights: Some(rights) }) };
}

fn is_accessed(event: &RemoteEvent) -> bool {
    matches!(event, RemoteEvent::RmaCompleted { .. })
}

fn put(bytes: &[u8], key: u64, address: u64) -> RemoteRma {
    let local = Segment::source(bytes.as_ptr(), bytes.len());
    RemoteRma { op: RemoteRmaOp::Put, key, address, local }
}

fn get(bytes: &mut [u8], key: u64, address: u64) -> RemoteRma {
    let local = Segment::target(bytes.as_mut_ptr(), bytes.len());
    RemoteRma { op: RemoteRmaOp::Get, key, address, local }
}

/// Starts an access of the first side to the memory of the second.
fn begin(sides: &mut [TestSide; 2], number: u64, access: &RemoteRma) {
    let to = sides[0].number(&sides[1]);
    sides[0].transport.start_rma(to, number, access);
}

fn end(sides: &mut [TestSide; 2]) -> (u64, Result<(), Error>) {
    match until(sides, 0, is_accessed) {
        RemoteEvent::RmaCompleted { number, outcome } => (number, outcome),
        other => panic!("{other:?}"),
    }
}

fn access(sides: &mut [TestSide; 2], access: &RemoteRma) -> Result<(), Error> {
    begin(sides, 9, access);
    end(sides).1
}

#[test]
fn accesses_of_all_lengths_reach_the_registered_memory_and_nothing_beside_it() {
    let Some(mut sides) = both() else { return };
    let mut memory = vec![0; (3 << 20) + 200];
    register(&sides[1], KEY, &mut memory, Rights::READ_WRITE);
    for (round, length) in
        [0, 1, 16 << 10, MAX_EAGER, MAX_EAGER + 1, 3 << 20].into_iter().enumerate()
    {
        let (bytes, mut back) = (pattern(length, round), vec![0; length]);
        assert_eq!(access(&mut sides, &put(&bytes, KEY, 100)), Ok(()));
        // The access is complete, so the bytes have arrived.
        assert!(memory[100..100 + length] == bytes, "{length} bytes were written");
        assert!(memory[..100].iter().chain(&memory[100 + length..]).all(|byte| *byte == 0));
        assert_eq!(access(&mut sides, &get(&mut back, KEY, 100)), Ok(()));
        assert!(back == bytes, "{length} bytes were read");
        memory.fill(0);
    }
}

#[test]
fn many_accesses_at_once_end_each_for_itself() {
    let Some(mut sides) = both() else { return };
    let mut memory = pattern(40_000, 5);
    register(&sides[1], KEY, &mut memory, Rights::READ_WRITE);
    let mut rooms = vec![vec![0; 20_000]; 100];
    for (number, destination) in rooms.iter_mut().enumerate() {
        begin(&mut sides, number as u64, &get(destination, KEY, number as u64));
    }
    let mut ended: Vec<_> = rooms.iter().map(|_| end(&mut sides)).collect();
    ended.sort_by_key(|(number, _)| *number);
    for (at, (number, outcome)) in ended.into_iter().enumerate() {
        assert_eq!((number, outcome), (at as u64, Ok(())));
        assert!(rooms[at] == memory[at..at + 20_000]);
    }
}

#[test]
fn what_is_not_permitted_is_told_and_nothing_is_touched() {
    let Some(mut sides) = both() else { return };
    let (mut readable, mut writable) = (vec![1; 100_000], vec![2; 100_000]);
    register(&sides[1], 1, &mut readable, Rights::READ);
    register(&sides[1], 2, &mut writable, Rights::WRITE);
    for length in [0, 1, 90_000] {
        let (bytes, mut destination) = (vec![7; length], vec![8; length]);
        assert_eq!(access(&mut sides, &put(&bytes, 3, 0)), Err(Error::Withdrawn));
        assert_eq!(access(&mut sides, &get(&mut destination, 3, 0)), Err(Error::Withdrawn));
        let (asked, given) = (Rights::WRITE, Rights::READ);
        let denied = Err(Error::NotPermitted { asked, given });
        assert_eq!(access(&mut sides, &put(&bytes, 1, 0)), denied);
        let denied = Err(Error::NotPermitted { asked: given, given: asked });
        assert_eq!(access(&mut sides, &get(&mut destination, 2, 0)), denied);
        let (offset, bytes_asked, window_bytes) = (100_001 - length as u64, length as u64, 100_000);
        let outside =
            ValidationError::OutsideWindow { offset, bytes: bytes_asked, window_bytes }.into();
        assert_eq!(access(&mut sides, &put(&bytes, 2, offset)), Err(Error::clone(&outside)));
        assert_eq!(access(&mut sides, &get(&mut destination, 1, offset)), Err(outside));
        assert!(destination == vec![8; length]);
    }
    assert!(readable == vec![1; 100_000] && writable == vec![2; 100_000]);
    // None of these errors disconnects.
    assert_eq!(access(&mut sides, &put(&[5], 2, 99_999)), Ok(()));
    assert_eq!(writable[99_999], 5);
}

#[test]
fn a_registration_that_goes_while_it_is_accessed_is_left_alone_from_then_on() {
    let Some(mut sides) = both() else { return };
    let mut memory = vec![0; 3 << 20];
    register(&sides[1], KEY, &mut memory, Rights::READ_WRITE);
    let (bytes, mut destination) = (vec![7; memory.len()], vec![0; memory.len()]);
    begin(&mut sides, 1, &put(&bytes, KEY, 0));
    begin(&mut sides, 2, &get(&mut destination, KEY, 0));
    let deadline = Instant::now() + Duration::from_secs(200);
    let first = memory.as_ptr();
    // SAFETY: the memory is valid; other threads write to it, so it is read anew each time.
    while unsafe { first.read_volatile() } == 0 {
        assert!(Instant::now() < deadline, "it begins");
        for side in &mut sides {
            side.transport.poll(&mut side.events);
        }
    }
    sides[1].mr_table.remove(KEY);
    let as_left = memory.clone();
    let mut ended = [end(&mut sides), end(&mut sides)];
    ended.sort_by_key(|(number, _)| *number);
    assert_eq!(ended, [(1, Err(Error::Withdrawn)), (2, Err(Error::Withdrawn))]);
    assert!(memory == as_left, "nothing writes any more");
}

#[test]
fn accesses_to_a_peer_that_closes_end() {
    let Some(mut sides) = both() else { return };
    let mut memory = vec![0; 3 << 20];
    register(&sides[1], KEY, &mut memory, Rights::READ_WRITE);
    let bytes = vec![7; memory.len()];
    assert_eq!(access(&mut sides, &put(&[1], KEY, 0)), Ok(()));
    begin(&mut sides, 1, &put(&bytes, KEY, 0));
    let [mut one, two] = sides;
    let closing = std::thread::spawn(move || drop(two));
    let deadline = Instant::now() + Duration::from_secs(200);
    while !one.events.iter().any(is_disconnected) {
        assert!(Instant::now() < deadline, "it is detected");
        one.transport.poll(&mut one.events);
    }
    closing.join().unwrap();
    let ended = one.take(is_accessed);
    let Some(RemoteEvent::RmaCompleted { number: 1, outcome: Err(Error::PeerDisconnected(_)) }) =
        ended
    else {
        panic!("{ended:?}");
    };
    let to = one.directory.number(&one.transport.peers[0].address).unwrap();
    one.transport.start_rma(to, 2, &put(&bytes, KEY, 0));
    one.transport.poll(&mut one.events);
    let late = one.take(is_accessed);
    assert!(matches!(late, Some(RemoteEvent::RmaCompleted { number: 2, outcome: Err(_) })));
}

#[test]
fn an_access_to_a_peer_that_is_not_there_ends() {
    let (Some(mut one), Some(other)) = (TestSide::new(), inner()) else { return };
    let name = address_for(&other);
    drop(other);
    let to = one.directory.number(&name).unwrap();
    one.transport.silence_timeout = Duration::from_millis(50);
    one.transport.start_rma(to, 1, &put(b"nobody", KEY, 0));
    let deadline = Instant::now() + Duration::from_secs(200);
    while !one.events.iter().any(is_accessed) {
        assert!(Instant::now() < deadline, "it is detected");
        one.transport.poll(&mut one.events);
    }
}

#[test]
fn a_peer_that_answers_or_asks_for_what_cannot_be_is_given_up() {
    let extent = RmaExtent { key: KEY, address: 0, length: 1 };
    let nonsense = [
        (PacketBody::Reply { ticket: 1, denial: None }, 0),
        (PacketBody::Reply { ticket: 0, denial: Some(RmaDenied::UnknownKey) }, 0),
        (PacketBody::Write { ticket: 1, extent }, 2),
        (PacketBody::Read { ticket: 1, extent, length: 2 }, 0),
        (
            PacketBody::Read {
                ticket: 1,
                extent: RmaExtent { length: u64::MAX, ..extent },
                length: 1 << 40,
            },
            0,
        ),
    ];
    for (body, payload) in nonsense {
        let (Some(mut side), Some(from)) = (TestSide::new(), inner()) else { return };
        let name = address_for(&from);
        let mut bytes = packet::encode(&name, identifier_of(&side.address), &body, payload);
        bytes.resize(bytes.len() + payload, 0);
        assert!(inject(&mut side, &name, &from, &bytes).is_some(), "{body:?}");
    }
}
