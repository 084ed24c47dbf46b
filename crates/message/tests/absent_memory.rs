//! Memory of a peer that does not come: behind a userfaultfd that nobody answers, as it would be in a
//! file of a dead server. Calls that do not wait go on, and so does everything with other peers.

mod support;

use std::io::Read;

use memferry_message::plan::PathKind;
use memferry_message::{
    Builder, Endpoint, Error, Operation, Peer, Rights, Source, TAG_ALL, WindowHandle, kept_buffers,
};
use support::absent::{Absent, Role, await_word, readers, report};
use support::process::{self, setting};
use support::{alone, unique, until};

const BYTES: usize = 1 << 20;

#[test]
fn other_processes_begin_here() {
    match process::role().as_deref() {
        Some("sender") => sender(),
        Some("owner") => owner(),
        Some("vanisher") => vanisher(),
        Some("target") => target(),
        Some("talker") => talker(),
        _ => {}
    }
}

fn connect() -> (Endpoint, Peer) {
    let endpoint = Endpoint::open(&unique("child")).unwrap();
    let peer = endpoint.connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
    (endpoint, peer)
}

/// Says that an operation is under way, lets its memory come when the test says so, and says how it ended.
fn wait_until_it_comes(absent: Absent, mut operation: Operation) {
    report(b'a');
    std::thread::spawn(move || {
        await_word();
        absent.let_come();
        std::thread::park();
    });
    let outcome = operation.wait();
    report(if outcome.is_ok() { b'd' } else { b'e' });
    await_word();
}

/// Sends memory that does not come until the test says so.
fn sender() {
    let Some(absent) = Absent::new(BYTES) else { return report(b's') };
    let (endpoint, peer) = connect();
    // SAFETY: kept until the operation is over, or the process.
    let send = unsafe { endpoint.isend_raw(peer, 1, absent.address(), BYTES) };
    wait_until_it_comes(absent, send.unwrap());
}

/// Sends memory that was there when it was last looked at, and does not come again until the test says so.
fn vanisher() {
    let Some(absent) = Absent::new(BYTES) else { return report(b's') };
    let (endpoint, peer) = connect();
    absent.bring();
    // SAFETY: kept until the operation is over, for both.
    unsafe { endpoint.isend_raw(peer, 1, absent.address(), BYTES) }.unwrap().wait().unwrap();
    absent.take_away();
    // SAFETY: as above, or until the process ends.
    let send = unsafe { endpoint.isend_raw(peer, 1, absent.address(), BYTES) }.unwrap();
    wait_until_it_comes(absent, send);
}

/// Sends a small message whenever the test says so.
fn talker() {
    let (endpoint, peer) = connect();
    report(b'a');
    let mut word = [0];
    while std::io::stdin().read_exact(&mut word).is_ok() {
        endpoint.send(peer, 3, b"talk").unwrap();
    }
}

/// Receives into memory that does not come until the test says so.
fn target() {
    let Some(absent) = Absent::new(BYTES) else { return report(b's') };
    let (endpoint, peer) = connect();
    // SAFETY: kept until the process ends.
    let receive = unsafe { endpoint.irecv_raw(peer, 1, TAG_ALL, absent.address(), BYTES) };
    wait_until_it_comes(absent, receive.unwrap());
}

/// Exposes memory that does not come, and says where.
fn owner() {
    let Some(absent) = Absent::new(BYTES) else { return report(b's') };
    let (endpoint, peer) = connect();
    // SAFETY: kept until the process ends.
    let window = unsafe { endpoint.expose_raw(absent.address(), BYTES, Rights::READ_WRITE) };
    let window = window.unwrap();
    endpoint.send(peer, 2, &window.handle().to_bytes()).unwrap();
    report(b'a');
    await_word();
    absent.let_come();
    await_word();
}

/// Everything that must go on while the memory of a peer does not come.
fn others_go_on(endpoint: &Endpoint) {
    let myself = endpoint.myself().unwrap();
    for length in [7, 100_000] {
        let data = vec![3u8; length];
        let mut send = endpoint.isend(myself, 9, data).unwrap();
        let receive = endpoint.irecv(myself, 9, TAG_ALL, vec![0u8; length]).unwrap();
        assert!(receive.wait().unwrap().1.iter().all(|byte| *byte == 3));
        until("it is sent", || send.is_done());
        drop(send.wait());
    }
}

#[test]
fn a_receive_of_memory_that_does_not_come_stops_nobody() {
    let _alone = alone();
    for path in [None, Some(PathKind::Cooperative), Some(PathKind::Single)] {
        let builder = path.map_or_else(Builder::new, |path| Builder::new().path(path));
        let endpoint = builder.open(&unique("receiver")).unwrap();
        let Some(mut child) = Role::begin("sender", &endpoint) else { return };
        let mut receive = endpoint.irecv(Source::Any, 1, TAG_ALL, vec![7u8; BYTES]).unwrap();
        // Calls that do not wait return.
        for _ in 0..100 {
            assert!(!receive.is_done());
        }
        others_go_on(&endpoint);
        assert!(!receive.is_done());
        child.tell();
        let (received, buffer) = receive.wait().unwrap();
        assert_eq!(received.length, BYTES as u64);
        assert!(buffer.iter().all(|byte| *byte == 0));
        assert_eq!(child.hear(), b'd');
    }
}

#[test]
fn an_endpoint_closes_while_the_memory_of_a_peer_does_not_come() {
    let _alone = alone();
    for ends in [false, true] {
        let endpoint = Endpoint::open(&unique("receiver")).unwrap();
        let Some(mut child) = Role::begin("sender", &endpoint) else { return };
        let mut receive = endpoint.irecv(Source::Any, 1, TAG_ALL, vec![7u8; BYTES]).unwrap();
        until("a thread waits for the memory", || {
            assert!(!receive.is_done());
            readers() > 0
        });
        endpoint.close();
        let failed = receive.wait().map(drop).unwrap_err();
        assert_eq!(failed.error, Error::Closed);
        assert!(failed.buffer.is_none(), "a thread may still write to it");
        assert_eq!(kept_buffers(), 1);
        if ends {
            child.child.kill();
        } else {
            child.tell();
        }
        until("it is freed", || kept_buffers() == 0);
    }
}

#[test]
fn an_endpoint_closes_while_an_access_waits_for_memory_that_does_not_come() {
    let _alone = alone();
    for ends in [false, true] {
        let endpoint = Endpoint::open(&unique("visitor")).unwrap();
        let Some(mut child) = Role::begin("owner", &endpoint) else { return };
        let mut bytes = [0; WindowHandle::BYTES];
        let received = endpoint.recv(Source::Any, 2, TAG_ALL, &mut bytes).unwrap();
        let handle = WindowHandle::from_bytes(bytes).unwrap();
        let remote = endpoint.attach(received.source, handle).unwrap();
        let mut get = remote.iget(0, vec![7u8; BYTES]).unwrap();
        until("a thread waits for the memory", || {
            assert!(!get.is_done());
            readers() > 0
        });
        others_go_on(&endpoint);
        endpoint.clone().close();
        assert!(endpoint.is_busy(), "a thread may still write to the memory of the get");
        assert!(!get.is_done());
        if ends {
            child.child.kill();
        } else {
            child.tell();
        }
        until("it is over", || get.is_done());
        assert!(!endpoint.is_busy());
        drop(get.wait());
    }
}

#[test]
fn memory_that_goes_after_the_look_stops_only_the_thread_that_copies_it() {
    let _alone = alone();
    for (path, closes) in [
        (None, false),
        (Some(PathKind::Single), true),
        (Some(PathKind::Cooperative), false),
        (Some(PathKind::Cooperative), true),
    ] {
        let builder = path.map_or_else(Builder::new, |path| Builder::new().path(path));
        let endpoint = builder.open(&unique("receiver")).unwrap();
        let first = endpoint.irecv(Source::Any, 1, TAG_ALL, vec![7u8; BYTES]).unwrap();
        let Some(mut child) = Role::begin("vanisher", &endpoint) else { return };
        assert!(first.wait().unwrap().1.iter().all(|byte| *byte == 0));
        let receive = endpoint.irecv(Source::Any, 1, TAG_ALL, vec![7u8; BYTES]).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| receive.wait());
            until("a thread waits for the memory", || readers() > 0);
            endpoint.progress();
            others_go_on(&endpoint);
            if closes {
                endpoint.clone().close();
                assert!(endpoint.is_busy(), "a thread may still write to the memory");
            }
            child.tell();
            match waiting.join().unwrap() {
                Ok((received, _)) => assert!(!closes && received.length == BYTES as u64),
                Err(failed) => assert!(closes && failed.error == Error::Closed),
            }
        });
        until("nobody is at the memory", || kept_buffers() == 0 && !endpoint.is_busy());
        assert_eq!(child.hear(), if closes { b'e' } else { b'd' });
    }
}

#[test]
fn a_sender_that_helps_into_memory_that_does_not_come_stops_nobody() {
    let _alone = alone();
    for closes in [false, true] {
        let endpoint = Builder::new().path(PathKind::Cooperative).open(&unique("sender")).unwrap();
        let Some(mut child) = Role::begin("target", &endpoint) else { return };
        let peers = endpoint.peers();
        let mut send = endpoint.isend(peers[0], 1, vec![9u8; BYTES]).unwrap();
        std::thread::scope(|scope| {
            // Calls that do not wait return.
            for _ in 0..1000 {
                assert!(!send.is_done());
            }
            others_go_on(&endpoint);
            let waiting = scope.spawn(|| send.wait());
            others_go_on(&endpoint);
            if closes {
                endpoint.clone().close();
            }
            child.tell();
            match waiting.join().unwrap() {
                Ok(_) => assert!(!closes),
                Err(failed) => assert!(closes && failed.error == Error::Closed),
            }
        });
        until("nobody is at the memory", || kept_buffers() == 0 && !endpoint.is_busy());
        assert_eq!(child.hear(), if closes { b'e' } else { b'd' });
    }
}

#[test]
fn a_thread_that_sleeps_hears_its_peer_while_another_thread_is_stuck_in_a_copy() {
    let _alone = alone();
    for background in [false, true] {
        let builder = Builder::new().background(background);
        let endpoint = builder.open(&unique("receiver")).unwrap();
        let first = endpoint.irecv(Source::Any, 1, TAG_ALL, vec![7u8; BYTES]).unwrap();
        let Some(mut child) = Role::begin("vanisher", &endpoint) else { return };
        drop(first.wait().unwrap());
        let mut talker = Role::begin("talker", &endpoint).unwrap();
        std::thread::scope(|scope| {
            let hear = || endpoint.recv(Source::Any, 3, TAG_ALL, &mut [0; 8]).map(drop);
            let hearing = [scope.spawn(hear), scope.spawn(hear)];
            // Not to be right, but to be hard: those that hear should sleep deeply by now.
            std::thread::sleep(std::time::Duration::from_millis(100));
            let receive = endpoint.irecv(Source::Any, 1, TAG_ALL, vec![7u8; BYTES]).unwrap();
            let waiting = scope.spawn(|| receive.wait());
            until("a thread waits for the memory", || readers() > 0);
            // Any one of the three may be the one that is stuck; the others hear.
            let heard = || hearing.iter().filter(|thread| thread.is_finished()).count();
            talker.tell();
            talker.tell();
            until("another one has heard", || heard() > 0);
            endpoint.clone().close();
            child.tell();
            for thread in hearing {
                let outcome = thread.join().unwrap();
                assert!(matches!(outcome, Ok(()) | Err(Error::Closed)), "{outcome:?}");
            }
            let failed = waiting.join().unwrap().map(drop).unwrap_err();
            assert_eq!(failed.error, Error::Closed);
        });
        until("nobody is at the memory", || kept_buffers() == 0 && !endpoint.is_busy());
    }
}
