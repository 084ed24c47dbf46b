//! Memory of a peer that never becomes resident: behind a userfaultfd that no thread serves, as it
//! would be in a file of a failed server. Non-blocking calls continue, and so does everything with
//! other peers.

use std::io::Read;

use memferry_message::plan::PathKind;
use memferry_message::{
    Endpoint, EndpointBuilder, Error, Operation, Peer, Rights, Source, TAG_ALL, WindowHandle,
    quarantined_buffers,
};
use memferry_testing::in_own_process;
use memferry_testing::message::absent::{NonresidentMemory, Role, readers, report, wait_for_byte};
use memferry_testing::message::process::{self, setting};
use memferry_testing::message::{unique, until};

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

/// Reports that an operation is in flight, makes its memory resident on a command of the test, and
/// reports the result.
fn wait_until_resident(absent: NonresidentMemory, mut operation: Operation) {
    report(b'a');
    std::thread::spawn(move || {
        wait_for_byte();
        absent.stop_intercepting();
        std::thread::park();
    });
    let outcome = operation.wait();
    report(if outcome.is_ok() { b'd' } else { b'e' });
    wait_for_byte();
}

/// Sends memory that becomes resident on a command of the test.
fn sender() {
    let Some(absent) = NonresidentMemory::new(BYTES) else { return report(b's') };
    let (endpoint, peer) = connect();
    // SAFETY: kept until the operation completes, or the process exits.
    let send = unsafe { endpoint.isend_raw(peer, 1, absent.address(), BYTES) };
    wait_until_resident(absent, send.unwrap());
}

/// Sends memory that was resident when it was last checked, and becomes resident again on a command
/// of the test.
fn vanisher() {
    let Some(absent) = NonresidentMemory::new(BYTES) else { return report(b's') };
    let (endpoint, peer) = connect();
    absent.bring();
    // SAFETY: kept until the operation completes, for both.
    unsafe { endpoint.isend_raw(peer, 1, absent.address(), BYTES) }.unwrap().wait().unwrap();
    absent.take_away();
    // SAFETY: as above, or until the process exits.
    let send = unsafe { endpoint.isend_raw(peer, 1, absent.address(), BYTES) }.unwrap();
    wait_until_resident(absent, send);
}

/// Sends a small message on each command of the test.
fn talker() {
    let (endpoint, peer) = connect();
    report(b'a');
    let mut word = [0];
    while std::io::stdin().read_exact(&mut word).is_ok() {
        endpoint.send(peer, 3, b"talk").unwrap();
    }
}

/// Receives into memory that becomes resident on a command of the test.
fn target() {
    let Some(absent) = NonresidentMemory::new(BYTES) else { return report(b's') };
    let (endpoint, peer) = connect();
    // SAFETY: kept until the process exits.
    let receive = unsafe { endpoint.irecv_raw(peer, 1, TAG_ALL, absent.address(), BYTES) };
    wait_until_resident(absent, receive.unwrap());
}

/// Exposes memory that never becomes resident, and sends its handle.
fn owner() {
    let Some(absent) = NonresidentMemory::new(BYTES) else { return report(b's') };
    let (endpoint, peer) = connect();
    // SAFETY: kept until the process exits.
    let window = unsafe { endpoint.expose_raw(absent.address(), BYTES, Rights::READ_WRITE) };
    let window = window.unwrap();
    endpoint.send(peer, 2, &window.handle().to_bytes()).unwrap();
    report(b'a');
    wait_for_byte();
    absent.stop_intercepting();
    wait_for_byte();
}

/// Everything that must continue while the memory of a peer is not resident.
fn check_other_messages(endpoint: &Endpoint) {
    let myself = endpoint.self_peer().unwrap();
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
    if !in_own_process() {
        return;
    }
    for path in [None, Some(PathKind::Cooperative), Some(PathKind::Single)] {
        let builder =
            path.map_or_else(EndpointBuilder::new, |path| EndpointBuilder::new().path(path));
        let endpoint = builder.open(&unique("receiver")).unwrap();
        let Some(mut child) = Role::begin("sender", &endpoint) else { return };
        let mut receive = endpoint.irecv(Source::Any, 1, TAG_ALL, vec![7u8; BYTES]).unwrap();
        // Non-blocking calls return.
        for _ in 0..100 {
            assert!(!receive.is_done());
        }
        check_other_messages(&endpoint);
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
    if !in_own_process() {
        return;
    }
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
        assert_eq!(quarantined_buffers(), 1);
        if ends {
            child.child.kill();
        } else {
            child.tell();
        }
        until("it is freed", || quarantined_buffers() == 0);
    }
}

#[test]
fn an_endpoint_closes_while_an_access_waits_for_memory_that_does_not_come() {
    if !in_own_process() {
        return;
    }
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
        check_other_messages(&endpoint);
        endpoint.clone().close();
        assert!(endpoint.is_busy(), "a thread may still write to the memory of the get");
        assert!(!get.is_done());
        if ends {
            child.child.kill();
        } else {
            child.tell();
        }
        until("it is complete", || get.is_done());
        assert!(!endpoint.is_busy());
        drop(get.wait());
    }
}

#[test]
fn memory_that_goes_after_the_look_stops_only_the_thread_that_copies_it() {
    if !in_own_process() {
        return;
    }
    for (path, closes) in [
        (None, false),
        (Some(PathKind::Single), true),
        (Some(PathKind::Cooperative), false),
        (Some(PathKind::Cooperative), true),
    ] {
        let builder =
            path.map_or_else(EndpointBuilder::new, |path| EndpointBuilder::new().path(path));
        let endpoint = builder.open(&unique("receiver")).unwrap();
        let first = endpoint.irecv(Source::Any, 1, TAG_ALL, vec![7u8; BYTES]).unwrap();
        let Some(mut child) = Role::begin("vanisher", &endpoint) else { return };
        assert!(first.wait().unwrap().1.iter().all(|byte| *byte == 0));
        let receive = endpoint.irecv(Source::Any, 1, TAG_ALL, vec![7u8; BYTES]).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| receive.wait());
            until("a thread waits for the memory", || readers() > 0);
            endpoint.progress();
            check_other_messages(&endpoint);
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
        until("no thread accesses the memory", || {
            quarantined_buffers() == 0 && !endpoint.is_busy()
        });
        assert_eq!(child.hear(), if closes { b'e' } else { b'd' });
    }
}

#[test]
fn a_sender_that_helps_into_memory_that_does_not_come_stops_nobody() {
    if !in_own_process() {
        return;
    }
    for closes in [false, true] {
        let endpoint =
            EndpointBuilder::new().path(PathKind::Cooperative).open(&unique("sender")).unwrap();
        let Some(mut child) = Role::begin("target", &endpoint) else { return };
        let peers = endpoint.peers();
        let mut send = endpoint.isend(peers[0], 1, vec![9u8; BYTES]).unwrap();
        std::thread::scope(|scope| {
            // Non-blocking calls return.
            for _ in 0..1000 {
                assert!(!send.is_done());
            }
            check_other_messages(&endpoint);
            let waiting = scope.spawn(|| send.wait());
            check_other_messages(&endpoint);
            if closes {
                endpoint.clone().close();
            }
            child.tell();
            match waiting.join().unwrap() {
                Ok(_) => assert!(!closes),
                Err(failed) => assert!(closes && failed.error == Error::Closed),
            }
        });
        until("no thread accesses the memory", || {
            quarantined_buffers() == 0 && !endpoint.is_busy()
        });
        assert_eq!(child.hear(), if closes { b'e' } else { b'd' });
    }
}

#[test]
fn a_thread_that_sleeps_hears_its_peer_while_another_thread_is_stuck_in_a_copy() {
    if !in_own_process() {
        return;
    }
    for background in [false, true] {
        let builder = EndpointBuilder::new().background(background);
        let endpoint = builder.open(&unique("receiver")).unwrap();
        let first = endpoint.irecv(Source::Any, 1, TAG_ALL, vec![7u8; BYTES]).unwrap();
        let Some(mut child) = Role::begin("vanisher", &endpoint) else { return };
        drop(first.wait().unwrap());
        let mut talker = Role::begin("talker", &endpoint).unwrap();
        std::thread::scope(|scope| {
            let receive_one = || endpoint.recv(Source::Any, 3, TAG_ALL, &mut [0; 8]).map(drop);
            let receivers = [scope.spawn(receive_one), scope.spawn(receive_one)];
            // Makes the test harder, and is not needed for its result: the waiting threads should
            // sleep by now.
            std::thread::sleep(std::time::Duration::from_millis(100));
            let receive = endpoint.irecv(Source::Any, 1, TAG_ALL, vec![7u8; BYTES]).unwrap();
            let waiting = scope.spawn(|| receive.wait());
            until("a thread waits for the memory", || readers() > 0);
            // Any one of the three may be the one that is blocked; the others receive.
            let finished = || receivers.iter().filter(|thread| thread.is_finished()).count();
            talker.tell();
            talker.tell();
            until("another thread has received", || finished() > 0);
            endpoint.clone().close();
            child.tell();
            for thread in receivers {
                let outcome = thread.join().unwrap();
                assert!(matches!(outcome, Ok(()) | Err(Error::Closed)), "{outcome:?}");
            }
            let failed = waiting.join().unwrap().map(drop).unwrap_err();
            assert_eq!(failed.error, Error::Closed);
        });
        until("no thread accesses the memory", || {
            quarantined_buffers() == 0 && !endpoint.is_busy()
        });
    }
}
