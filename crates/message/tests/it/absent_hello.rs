//! A peer whose connect request or reply names memory that never becomes resident: it is not
//! connected, and everything with other peers continues.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use memferry_message::ring::layout::{ConnectionEnd, ConnectionMemory};
use memferry_message::{Endpoint, EndpointBuilder, Error, Link, Listener, Source, TAG_ALL};
use memferry_sys::seqpacket::{SeqPacketListener, SocketName};
use memferry_testing::in_own_process;
use memferry_testing::message::absent::{NonresidentMemory, Role, readers, report};
use memferry_testing::message::process::{self, setting};
use memferry_testing::message::{raw_peer, unique, until};

#[test]
fn other_processes_begin_here() {
    match process::role().as_deref() {
        Some("lying caller") => lying_caller(),
        Some("lying listener") => lying_listener(),
        Some("honest caller") => honest_caller(),
        _ => {}
    }
}

/// How long a lying process lives: a call that blocks on it returns then, and the test detects
/// that. No call that does not block takes this long, on a busy machine either.
const PROCESS_LIFETIME: Duration = Duration::from_secs(200);

/// Connects to the test with a request that names nonresident memory.
fn lying_caller() {
    let Some(absent) = NonresidentMemory::new(4096) else { return report(b's') };
    let probe = (absent.address() as u64, 1);
    let connections: Vec<_> = (0..8)
        .map(|_| {
            let socket = raw_peer::call(&setting("MEMFERRY_TEST_NAME"));
            let (memory, descriptor) = ConnectionMemory::create(ConnectionEnd::Connector).unwrap();
            let (hello, board) =
                (raw_peer::hello(raw_peer::identity(), probe, ""), raw_peer::board());
            socket.send(&hello, &[descriptor.as_fd(), board.as_fd()]).unwrap();
            (socket, memory)
        })
        .collect();
    report(b'a');
    std::thread::sleep(PROCESS_LIFETIME);
    drop(connections);
}

/// Replies to the test's request with a reply that names nonresident memory.
fn lying_listener() {
    let Some(absent) = NonresidentMemory::new(4096) else { return report(b's') };
    let name = SocketName::parse(&setting("MEMFERRY_TEST_NAME"));
    let listener = SeqPacketListener::bind(&name).unwrap();
    report(b'a');
    let began = Instant::now();
    let mut sockets = Vec::new();
    while began.elapsed() < PROCESS_LIFETIME {
        sockets.extend(listener.accept().ok());
        for socket in &sockets {
            if socket.receive(&mut [0; 512]).is_ok_and(|(length, _)| length > 0) {
                let mut welcome = raw_peer::hello(9, (absent.address() as u64, 1), "");
                // It is no rejection.
                welcome.extend([0; 8]);
                let board = raw_peer::board();
                socket.send(&welcome, &[board.as_fd()]).unwrap();
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Connects, sends a message, and stays until the test ends it.
fn honest_caller() {
    let endpoint = Endpoint::open(&unique("honest")).unwrap();
    let peer = endpoint.connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
    endpoint.send(peer, 1, b"hello").unwrap();
    report(b'a');
    memferry_testing::message::absent::wait_for_byte();
}

/// A lying process, once it is ready.
fn liar(role: &str, name: &str) -> Option<Role> {
    let mut liar = Role::spawn(role, name);
    let word = liar.hear();
    liar.is_ready(word).then_some(liar)
}

/// A message of an endpoint to itself.
fn check_other_connects(endpoint: &Endpoint) {
    let myself = endpoint.self_peer().unwrap();
    endpoint.send(myself, 9, b"goes on").unwrap();
    endpoint.recv(myself, 9, TAG_ALL, &mut [0; 7]).unwrap();
}

#[test]
fn a_caller_whose_hello_names_memory_that_does_not_come_stops_nobody() {
    if !in_own_process() {
        return;
    }
    let prey = Endpoint::open(&unique("prey")).unwrap();
    let Some(mut liar) = liar("lying caller", prey.name()) else { return };
    until("a thread waits for the memory", || {
        prey.peers();
        readers() > 0
    });
    check_other_connects(&prey);
    let mut honest = Role::begin("honest caller", &prey).unwrap();
    prey.recv(Source::Any, 1, TAG_ALL, &mut [0; 5]).unwrap();
    assert_eq!(prey.peers().len(), 2, "itself and the honest caller");
    check_other_connects(&prey);
    assert!(liar.child.ended().is_none(), "a call has blocked until the liar exited");
    // At most as many threads as connections, and none after its exit.
    assert!(readers() <= 8);
    prey.clone().close();
    assert!(liar.child.ended().is_none(), "a call has blocked until the liar exited");
    honest.tell();
    liar.child.kill();
    until("no thread is blocked", || readers() == 0);
}

#[test]
fn a_caller_of_links_whose_hello_names_memory_that_does_not_come_stops_nobody() {
    if !in_own_process() {
        return;
    }
    let name = unique("prey");
    let listener = Listener::bind(&name).unwrap();
    let Some(mut liar) = liar("lying caller", &name) else { return };
    until("a thread waits for the memory", || {
        assert!(listener.poll_accept().unwrap().is_none(), "a liar is not accepted");
        readers() > 0
    });
    let caller = std::thread::spawn(move || Link::connect(&name).unwrap());
    let link = listener.accept().unwrap();
    drop((caller.join().unwrap(), link));
    assert!(liar.child.ended().is_none(), "a call has blocked until the liar exited");
    liar.child.kill();
    until("no thread is blocked", || readers() == 0);
}

#[test]
fn a_listener_whose_welcome_names_memory_that_does_not_come_stops_nobody() {
    if !in_own_process() {
        return;
    }
    let name = unique("liar");
    let Some(mut liar) = liar("lying listener", &name) else { return };
    let builder = EndpointBuilder::new().connect_timeout(Duration::from_secs(1));
    let prey = builder.open(&unique("prey")).unwrap();
    // A blocking call has a timeout.
    let error = prey.connect(&name).unwrap_err();
    assert!(matches!(error, Error::Connect(_)), "{error:?}");
    // A non-blocking call does not block.
    let known = prey.add_peer(&name).unwrap();
    let mut send = prey.isend(known, 1, vec![1u8; 10]).unwrap();
    until("the send has failed", || {
        check_other_connects(&prey);
        send.is_done()
    });
    assert!(matches!(send.wait().map(drop).unwrap_err().error, Error::Connect(_)));
    assert!(liar.child.ended().is_none(), "a call has blocked until the liar exited");
    prey.close();
    liar.child.kill();
    until("no thread is blocked", || readers() == 0);
}
