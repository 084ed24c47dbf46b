//! Peers that stop, pretend to access, or are killed while they access windows: memory is not
//! returned before the access ends or the peer exits.

use std::io::{Read, Write};
use std::process::Stdio;
use std::time::Instant;

use memferry_message::{
    Endpoint, EndpointBuilder, Listener, Rights, TAG_ALL, Window, WindowHandle, quarantined_buffers,
};
use memferry_testing::in_own_process;
use memferry_testing::message::process::{self, Child, setting};
use memferry_testing::message::raw_peer::RawPeer;
use memferry_testing::message::stopping::{StoppedPeer, send_to_test};
use memferry_testing::message::traces::resource_usage;
use memferry_testing::message::{TIMEOUT, unique, until, withdraw};

#[test]
fn other_processes_begin_here() {
    match process::role().as_deref() {
        Some("putter") => putter(),
        Some("pretender") => pretender(false),
        Some("pretender one by one") => pretender(true),
        Some("idler") => idler(),
        _ => {}
    }
}

/// A raw peer of an endpoint that accepts connections, and reads none of their messages.
fn connect_raw(owner: &Endpoint) -> RawPeer {
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| RawPeer::connect(owner.name()).unwrap());
        until("it has connected", || {
            owner.peers();
            connecting.is_finished()
        });
        connecting.join().unwrap()
    })
}

#[test]
fn an_owner_that_has_not_heard_of_a_visitors_reach_waits_for_it_nevertheless() {
    if !in_own_process() {
        return;
    }
    let owner = Endpoint::open(&unique("owner")).unwrap();
    let raw = connect_raw(&owner);
    let window = owner.expose(vec![0u8; 4096], Rights::READ_WRITE).unwrap();
    raw.memory.own_access().begin(0);
    let held = window.withdraw().map(drop).expect_err("a peer is accessing it");
    raw.memory.own_access().end();
    assert_eq!(withdraw(held.window), [0; 4096]);
}

const WINDOW_BYTES: usize = 256 << 10;

/// Connects, reads the handle of a window, puts to it until that fails, and reports it: repeatedly.
fn putter() {
    let (mut input, mut output) = (std::io::stdin(), std::io::stderr());
    let data = vec![7u8; WINDOW_BYTES];
    loop {
        let endpoint = Endpoint::open(&unique("putter")).unwrap();
        let peer = endpoint.connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
        let mut handle = [0; WindowHandle::BYTES];
        if input.read_exact(&mut handle).is_err() {
            return;
        }
        let remote = endpoint.attach(peer, WindowHandle::from_bytes(handle).unwrap()).unwrap();
        while remote.put(0, &data).is_ok() {}
        output.write_all(b".").unwrap();
    }
}

#[test]
fn a_window_that_is_withdrawn_while_a_peer_puts_does_not_change_afterwards() {
    if !in_own_process() {
        return;
    }
    let owner = Endpoint::open(&unique("owner")).unwrap();
    let mut command = process::command("putter");
    command.env("MEMFERRY_TEST_NAME", owner.name()).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Child::spawn(&mut command);
    let (mut input, mut output) = (child.take_input(), child.take_errors());
    let mut last = Vec::new();
    for round in 0..60 {
        until("it has connected anew", || {
            let now = owner.peers();
            let is_new = now.len() == 1 && now != last;
            is_new.then(|| last = now).is_some()
        });
        let window: Window<Vec<u8>> =
            owner.expose(vec![0; WINDOW_BYTES], Rights::READ_WRITE).unwrap();
        input.write_all(&window.handle().to_bytes()).unwrap();
        // As early as possible: the first put is running.
        let mut first = [0];
        until("it puts", || {
            window.read(0, &mut first);
            first[0] == 7
        });
        let mut buffer = withdraw(window);
        buffer.fill(0);
        output.read_exact(&mut first).unwrap();
        let later = buffer.iter().filter(|byte| **byte != 0).count();
        assert_eq!(later, 0, "round {round}: bytes were written after the window was withdrawn");
    }
}

/// Connects repeatedly, publishes an access to the first window, and closes when it is connected
/// anew: before that, the window may not exist yet. `one_by_one` connects only when the owner has closed
/// the connection before.
fn pretender(one_by_one: bool) {
    let mut _last = None;
    for _ in 0..30 {
        if let Some(raw) = RawPeer::connect(&setting("MEMFERRY_TEST_NAME")) {
            raw.memory.own_access().begin(0);
            if one_by_one {
                until("the owner has closed it", || raw.is_lost());
            }
            _last = Some(raw);
        }
    }
    send_to_test(b"d");
    std::thread::sleep(TIMEOUT);
}

#[test]
fn peers_that_pretend_to_visit_hold_little_and_all_of_it_goes_with_them() {
    if !in_own_process() {
        return;
    }
    let endpoint = Endpoint::open(&unique("owner")).unwrap();
    let shared = endpoint.expose(vec![0u8; 4096], Rights::READ_WRITE).unwrap();
    endpoint.ready_fd().unwrap();
    let before = resource_usage();
    for round in 0..3 {
        let name = unique("owner");
        let listener = Listener::bind(&name).unwrap();
        let ready = listener.ready_fd().unwrap();
        // With the descriptors of the listener itself.
        let before = resource_usage();
        let mut child = StoppedPeer::spawn("pretender one by one", &name, false);
        std::thread::scope(|scope| {
            let hearing = scope.spawn(|| child.hear());
            while !hearing.is_finished() {
                let Some(link) = listener.poll_accept().unwrap() else {
                    std::thread::yield_now();
                    continue;
                };
                let window = link.expose(vec![0u8; 4096], Rights::READ_WRITE).unwrap();
                until("it publishes an access", || window.is_accessed());
                link.close();
                drop(window);
            }
            assert_eq!(hearing.join().unwrap(), b'd');
        });
        drop(ready);
        // Callers that were accepted after the last poll are still in the listener's queue.
        until("its connections are taken and closed", || {
            while let Some(link) = listener.poll_accept().unwrap() {
                link.close();
            }
            resource_usage().descriptors <= before.descriptors + 4 * 8
        });
        let kept = quarantined_buffers();
        assert!((1..=8).contains(&kept), "round {round}: one process holds {kept} buffers");
        child.child.kill();
        until("nothing of it is left", || quarantined_buffers() == 0);
    }
    let mut child = StoppedPeer::spawn("pretender", endpoint.name(), false);
    std::thread::scope(|scope| {
        let hearing = scope.spawn(|| child.hear());
        until("it has attacked", || {
            endpoint.peers();
            hearing.is_finished()
        });
    });
    drop(child);
    until("nothing is left", || {
        endpoint.peers();
        shared.is_accessed();
        let now = resource_usage();
        now.descriptors <= before.descriptors && now.mappings <= before.mappings
    });
}

/// Connects, and does nothing.
fn idler() {
    let endpoint = Endpoint::open(&unique("idler")).unwrap();
    endpoint.connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
    send_to_test(b"i");
    std::thread::sleep(TIMEOUT);
}

#[test]
fn a_killed_peer_is_forgotten_in_busy_traffic_with_others() {
    if !in_own_process() {
        return;
    }
    let sides = memferry_testing::message::pair(&EndpointBuilder::new());
    let before = resource_usage();
    let mut child = StoppedPeer::spawn("idler", sides.here.name(), false);
    until("it has connected", || sides.here.peers().len() == 2);
    assert_eq!(child.hear(), b'i');
    child.child.kill();
    // There is always a message to receive: no call ever finds nothing to do.
    let deadline = Instant::now() + TIMEOUT;
    let mut is_forgotten = false;
    while !is_forgotten && Instant::now() < deadline {
        for _ in 0..20 {
            sides.there.send(sides.to_here, 1, b"traffic").unwrap();
        }
        for _ in 0..20 {
            sides.here.recv(sides.to_there, 1, TAG_ALL, &mut [0; 7]).unwrap();
        }
        // One is the pipe from the child.
        is_forgotten = resource_usage().descriptors <= before.descriptors + 1;
    }
    assert!(
        is_forgotten,
        "the descriptors of a killed peer stay: {before:?}, {:?}",
        resource_usage()
    );
}

// ---- messages ----
