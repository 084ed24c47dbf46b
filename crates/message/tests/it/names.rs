//! The identity of a peer: names and identities that another process claims, and several names of
//! one socket.

use std::io::Write;
use std::os::fd::AsFd;
use std::process::Stdio;
use std::sync::Barrier;

use memferry_message::{Endpoint, EndpointBuilder, Peer, Source, TAG_ALL};
use memferry_testing::message::process::{self, Child, setting};
use memferry_testing::message::raw_peer::{self, RawPeer};
use memferry_testing::message::traces::Folder;
use memferry_testing::message::{patient, unique, until};
use memferry_testing::{Requirement, skip};

const TAG: u64 = 3;

/// A message there and one back.
fn exchange(here: (&Endpoint, Peer), there: (&Endpoint, Peer)) {
    for ((from, to), (at, source)) in [(here, there), (there, here)] {
        from.send(to, TAG, b"hello").unwrap();
        let mut words = [0; 5];
        assert_eq!(at.recv(source, TAG, TAG_ALL, &mut words).unwrap().source, source);
        assert_eq!(&words, b"hello");
    }
}

#[test]
fn two_that_call_each_other_by_different_names_of_a_socket_get_one_connection() {
    for round in 0..40 {
        let folder = Folder::new("aliases");
        let (a, b) = (folder.file("a"), folder.file("b"));
        std::os::unix::fs::symlink(&b, folder.file("link")).unwrap();
        let alias_of_b = folder.file(if round % 2 == 0 { "./b" } else { "link" });
        let (here, there) = (Endpoint::open(&a).unwrap(), Endpoint::open(&b).unwrap());
        let start = Barrier::new(2);
        let call = |from: &Endpoint, name: &str| {
            start.wait();
            from.connect(name).unwrap()
        };
        let (to_there, to_here) = std::thread::scope(|scope| {
            let calling = scope.spawn(|| call(&here, &alias_of_b));
            let to_here = call(&there, &folder.file("./a"));
            (calling.join().unwrap(), to_here)
        });
        exchange((&here, to_there), (&there, to_here));
        for endpoint in [&here, &there] {
            endpoint.progress();
            assert_eq!(endpoint.peers().len(), 1, "round {round}");
        }
        // With any of the names it is the same peer.
        let answering = there.clone();
        std::thread::scope(|scope| {
            let names = [b.as_str(), alias_of_b.as_str()];
            let calling = scope.spawn(move || names.map(|name| here.connect(name).unwrap()));
            until("it has connected", || {
                answering.progress();
                calling.is_finished()
            });
            assert_eq!(calling.join().unwrap(), [to_there; 2]);
        });
    }
}

/// Connects to a name on command, sends its identity, and replies.
fn victim() {
    let endpoint = patient().background(true).open(&setting("MEMFERRY_TEST_NAME")).unwrap();
    let mut line = String::new();
    while std::io::stdin().read_line(&mut line).unwrap() > 0 {
        let peer = endpoint.connect(line.trim()).unwrap();
        endpoint.send(peer, TAG, b"it is me").unwrap();
        line.clear();
    }
}

/// The process whose name and identity others claim, and its input.
fn spawn_victim(name: &str) -> (Child, std::process::ChildStdin) {
    let mut command = process::command("victim");
    command.env("MEMFERRY_TEST_NAME", name).stdin(Stdio::piped());
    let mut child = Child::spawn(&mut command);
    let input = child.take_input();
    (child, input)
}

#[test]
fn a_name_that_somebody_claims_leads_to_whoever_listens_there() {
    let name = unique("victim");
    let (child, mut input) = spawn_victim(&name);
    let prey = patient().background(true).open(&unique("prey")).unwrap();
    // When this process can listen there is no liar yet.
    drop(raw_peer::call(&name));
    let liar = RawPeer::connect_as(prey.name(), raw_peer::identity(), &name).unwrap();
    until("the liar is in", || prey.peers().len() == 1);
    let of_liar = prey.peers()[0];
    let found = prey.connect(&name).unwrap();
    assert_ne!(found, of_liar);
    writeln!(input, "{}", prey.name()).unwrap();
    let mut words = [0; 8];
    let received = prey.recv(Source::Any, TAG, TAG_ALL, &mut words).unwrap();
    assert_eq!((&words, received.source), (b"it is me", found));
    assert_eq!(prey.connect(&name).unwrap(), found);
    drop((liar, input));
    child.finish();
}

#[test]
fn an_identity_that_somebody_claims_keeps_nobody_out() {
    let name = unique("victim");
    let (child, mut input) = spawn_victim(&name);
    let prey = patient().background(true).open(&unique("prey")).unwrap();
    // A reply contains the identity of the accepting side.
    let socket = raw_peer::call(&name);
    let memory = memferry_message::ring::layout::ConnectionMemory::create(
        memferry_message::ring::layout::ConnectionEnd::Connector,
    );
    let board = raw_peer::board();
    let hello = raw_peer::hello(raw_peer::identity(), (0, 0), "");
    socket.send(&hello, &[memory.unwrap().1.as_fd(), board.as_fd()]).unwrap();
    let welcome = raw_peer::answer(&socket).unwrap();
    let identity = u128::from_le_bytes(welcome[12..28].try_into().unwrap());
    let liar = RawPeer::connect_as(prey.name(), identity, &name).unwrap();
    until("the liar is in", || prey.peers().len() == 1);
    let of_liar = prey.peers()[0];
    writeln!(input, "{}", prey.name()).unwrap();
    let mut words = [0; 8];
    let received = prey.recv(Source::Any, TAG, TAG_ALL, &mut words).unwrap();
    assert_eq!(&words, b"it is me");
    assert_ne!(received.source, of_liar);
    assert_eq!(prey.connect(&name).unwrap(), received.source);
    assert!(!liar.is_lost());
    drop((liar, input));
    child.finish();
}

/// Connects with a name on which it listens, or on which another process does.
fn other_user() {
    let (prey, claimed) = (setting("MEMFERRY_TEST_NAME"), setting("MEMFERRY_TEST_CLAIMED"));
    // Its own name leads to it; the other one does not.
    let honest = EndpointBuilder::new().allow_uid(0).open(&unique("honest")).unwrap();
    let peer = honest.connect(&prey).unwrap();
    honest.send(peer, TAG, honest.name().as_bytes()).unwrap();
    let _liar = RawPeer::connect_as(&prey, raw_peer::identity(), &claimed).unwrap();
    std::io::read_to_string(std::io::stdin()).unwrap();
}

#[test]
fn a_caller_of_another_user_has_the_name_that_it_listens_on_and_no_other() {
    use std::os::unix::process::CommandExt;
    const NOBODY: u32 = 65534;
    if rustix::process::geteuid().as_raw() != 0 {
        return skip(Requirement::Root, "only root can become another user");
    }
    let victim = patient().background(true).open(&unique("victim")).unwrap();
    let prey =
        EndpointBuilder::new().allow_uid(NOBODY).background(true).open(&unique("prey")).unwrap();
    // It is requested by name before any process connects.
    let known = prey.add_peer(victim.name()).unwrap();
    let mut command = process::command("other user");
    command.env("MEMFERRY_TEST_NAME", prey.name()).env("MEMFERRY_TEST_CLAIMED", victim.name());
    let mut child = Child::spawn(command.stdin(Stdio::piped()).uid(NOBODY));
    let mut words = [0; 64];
    let honest = prey.recv(Source::Any, TAG, TAG_ALL, &mut words).unwrap();
    let name = std::str::from_utf8(&words[..honest.length as usize]).unwrap();
    assert_eq!(prey.name_of(honest.source).unwrap(), name);
    assert_eq!(prey.connect(name).unwrap(), honest.source);
    until("the liar is in", || prey.peers().len() == 2);
    let liar = prey.peers().into_iter().find(|peer| *peer != honest.source).unwrap();
    assert_ne!(liar, known);
    assert_eq!(prey.name_of(liar).unwrap(), "");
    let found = prey.connect(victim.name()).unwrap();
    assert!(found != liar && found != honest.source);
    drop(child.take_input());
    child.finish();
}

#[test]
fn other_processes_begin_here() {
    match process::role().as_deref() {
        Some("victim") => victim(),
        Some("other user") => other_user(),
        _ => {}
    }
}
