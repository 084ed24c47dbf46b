//! A peer whose hello or welcome names memory that does not come: it is not connected, and everything with
//! other peers goes on.

mod support;

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use memferry_message::ring::layout::{End, Memory};
use memferry_message::{Builder, Endpoint, Error, Link, Listener, Source, TAG_ALL};
use memferry_sys::packet_socket::{PacketListener, SocketName};
use support::absent::{Absent, Role, readers, report};
use support::process::{self, setting};
use support::{alone, raw_peer, unique, until};

#[test]
fn other_processes_begin_here() {
    match process::role().as_deref() {
        Some("lying caller") => lying_caller(),
        Some("lying listener") => lying_listener(),
        Some("honest caller") => honest_caller(),
        _ => {}
    }
}

/// How long a liar lives: a call that waits for it ends then, and the test notices.
const LIFE: Duration = Duration::from_secs(40);

/// Calls the test with a hello that names absent memory.
fn lying_caller() {
    let Some(absent) = Absent::new(4096) else { return report(b's') };
    let probe = (absent.address() as u64, 1);
    let connections: Vec<_> = (0..8)
        .map(|_| {
            let socket = raw_peer::call(&setting("MEMFERRY_TEST_NAME"));
            let (memory, descriptor) = Memory::create(End::Connecting).unwrap();
            let (hello, board) =
                (raw_peer::hello(raw_peer::identity(), probe, ""), raw_peer::board());
            socket.send(&hello, &[descriptor.as_fd(), board.as_fd()]).unwrap();
            (socket, memory)
        })
        .collect();
    report(b'a');
    std::thread::sleep(LIFE);
    drop(connections);
}

/// Answers the test's hello with a welcome that names absent memory.
fn lying_listener() {
    let Some(absent) = Absent::new(4096) else { return report(b's') };
    let name = SocketName::parse(&setting("MEMFERRY_TEST_NAME"));
    let listener = PacketListener::bind(&name).unwrap();
    report(b'a');
    let began = Instant::now();
    let mut sockets = Vec::new();
    while began.elapsed() < LIFE {
        sockets.extend(listener.accept().ok());
        for socket in &sockets {
            if socket.receive(&mut [0; 512]).is_ok_and(|(length, _)| length > 0) {
                let mut welcome = raw_peer::hello(9, (absent.address() as u64, 1), "");
                // It is no refusal.
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
    support::absent::await_word();
}

/// A process that lies, when it is ready to.
fn liar(role: &str, name: &str) -> Option<Role> {
    let mut liar = Role::spawn(role, name);
    let word = liar.hear();
    liar.is_ready(word).then_some(liar)
}

/// A message of an endpoint to itself.
fn others_go_on(endpoint: &Endpoint) {
    let myself = endpoint.myself().unwrap();
    endpoint.send(myself, 9, b"goes on").unwrap();
    endpoint.recv(myself, 9, TAG_ALL, &mut [0; 7]).unwrap();
}

#[test]
fn a_caller_whose_hello_names_memory_that_does_not_come_stops_nobody() {
    let _alone = alone();
    let prey = Endpoint::open(&unique("prey")).unwrap();
    let Some(mut liar) = liar("lying caller", prey.name()) else { return };
    until("a thread waits for the memory", || {
        prey.peers();
        readers() > 0
    });
    others_go_on(&prey);
    let mut honest = Role::begin("honest caller", &prey).unwrap();
    prey.recv(Source::Any, 1, TAG_ALL, &mut [0; 5]).unwrap();
    assert_eq!(prey.peers().len(), 2, "itself and the honest caller");
    others_go_on(&prey);
    assert!(liar.child.ended().is_none(), "a call has waited for the end of the liar");
    // As many threads as connections at most, and none when it is gone.
    assert!(readers() <= 8);
    prey.clone().close();
    assert!(liar.child.ended().is_none(), "a call has waited for the end of the liar");
    honest.tell();
    liar.child.kill();
    until("nobody waits any more", || readers() == 0);
}

#[test]
fn a_caller_of_links_whose_hello_names_memory_that_does_not_come_stops_nobody() {
    let _alone = alone();
    let name = unique("prey");
    let listener = Listener::bind(&name).unwrap();
    let Some(mut liar) = liar("lying caller", &name) else { return };
    until("a thread waits for the memory", || {
        assert!(listener.poll_accept().unwrap().is_none(), "a liar is not welcome");
        readers() > 0
    });
    let caller = std::thread::spawn(move || Link::connect(&name).unwrap());
    let link = listener.accept().unwrap();
    drop((caller.join().unwrap(), link));
    assert!(liar.child.ended().is_none(), "a call has waited for the end of the liar");
    liar.child.kill();
    until("nobody waits any more", || readers() == 0);
}

#[test]
fn a_listener_whose_welcome_names_memory_that_does_not_come_stops_nobody() {
    let _alone = alone();
    let name = unique("liar");
    let Some(mut liar) = liar("lying listener", &name) else { return };
    let builder = Builder::new().connect_timeout(Duration::from_secs(1));
    let prey = builder.open(&unique("prey")).unwrap();
    // A call that waits has an end.
    let error = prey.connect(&name).unwrap_err();
    assert!(matches!(error, Error::Connect(_)), "{error:?}");
    // A call that does not wait does not wait.
    let known = prey.know(&name).unwrap();
    let mut send = prey.isend(known, 1, vec![1u8; 10]).unwrap();
    until("the send has failed", || {
        others_go_on(&prey);
        send.is_done()
    });
    assert!(matches!(send.wait().map(drop).unwrap_err().error, Error::Connect(_)));
    assert!(liar.child.ended().is_none(), "a call has waited for the end of the liar");
    prey.close();
    liar.child.kill();
    until("nobody waits any more", || readers() == 0);
}
