//! Windows of a peer whose memory never becomes resident: accesses to the windows of other peers
//! continue.

use memferry_message::{Endpoint, Error, RemoteWindow, Rights, Source, TAG_ALL, WindowHandle};
use memferry_testing::in_own_process;
use memferry_testing::message::absent::{
    NonresidentMemory, Role, readers, report, threads_named, wait_for_byte,
};
use memferry_testing::message::process::{self, setting};
use memferry_testing::message::{unique, until};

const BYTES: usize = 1 << 20;
/// The content of ordinary windows.
const FILLING: u8 = 5;

#[test]
fn other_processes_begin_here() {
    match process::role().as_deref() {
        Some("absent owner") => owner(true),
        Some("ordinary owner") => owner(false),
        _ => {}
    }
}

/// Exposes memory, and sends its handle. Nonresident memory becomes resident on a command of the
/// test.
fn owner(is_absent: bool) {
    let absent = NonresidentMemory::new(BYTES);
    let Some(absent) = absent else { return report(b's') };
    let mut ordinary = vec![FILLING; BYTES];
    let address = if is_absent { absent.address() } else { ordinary.as_mut_ptr() };
    let endpoint = Endpoint::open(&unique("owner")).unwrap();
    let peer = endpoint.connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
    // SAFETY: kept until the process exits.
    let window = unsafe { endpoint.expose_raw(address, BYTES, Rights::READ_WRITE) }.unwrap();
    endpoint.send(peer, 2, &window.handle().to_bytes()).unwrap();
    report(b'a');
    wait_for_byte();
    absent.stop_intercepting();
    wait_for_byte();
}

/// A process that exposes memory, and its window.
fn begin(role: &str, visitor: &Endpoint) -> Option<(Role, RemoteWindow)> {
    let child = Role::begin(role, visitor)?;
    let mut bytes = [0; WindowHandle::BYTES];
    let received = visitor.recv(Source::Any, 2, TAG_ALL, &mut bytes).unwrap();
    let handle = WindowHandle::from_bytes(bytes).unwrap();
    Some((child, visitor.attach(received.source, handle).unwrap()))
}

/// Gets and puts in the background, and some that the caller waits for.
fn check_other_accesses(window: &RemoteWindow) {
    let mut get = window.iget(0, vec![0u8; BYTES]).unwrap();
    until("a get has ended", || get.is_done());
    assert!(get.wait().unwrap().1.iter().all(|byte| *byte == FILLING));
    let mut put = window.iput(0, vec![FILLING; BYTES / 2]).unwrap();
    until("a put has ended", || put.is_done());
    put.wait().unwrap();
    let mut bytes = vec![0; BYTES];
    window.get(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == FILLING));
    window.fence().unwrap();
}

#[test]
fn an_access_to_memory_that_does_not_come_keeps_no_accesses_to_others_waiting() {
    if !in_own_process() {
        return;
    }
    for ends in [false, true] {
        let visitor = Endpoint::open(&unique("visitor")).unwrap();
        let Some((mut absent, far)) = begin("absent owner", &visitor) else { return };
        let Some((_ordinary, near)) = begin("ordinary owner", &visitor) else { return };
        // Once before, so that the thread exists.
        check_other_accesses(&near);
        let mut stuck = far.iget(0, vec![7u8; BYTES]).unwrap();
        let mut behind = far.iget(0, vec![7u8; BYTES]).unwrap();
        until("a thread waits for the memory", || readers() == 1);
        for _ in 0..10 {
            check_other_accesses(&near);
        }
        assert!(!stuck.is_done() && !behind.is_done());
        visitor.clone().close();
        assert!(visitor.is_busy(), "a thread may still write to the memory of the get");
        assert!(!stuck.is_done());
        assert_eq!(behind.wait().map(drop).unwrap_err().error, Error::Closed);
        if ends {
            absent.child.kill();
        } else {
            absent.tell();
        }
        until("the get has ended", || stuck.is_done());
        assert!(!visitor.is_busy());
        until("no thread is left", || threads_named("memferry-window") == 0);
    }
}

#[test]
fn accesses_go_on_while_the_memory_of_several_peers_does_not_come() {
    if !in_own_process() {
        return;
    }
    let visitor = Endpoint::open(&unique("visitor")).unwrap();
    let mut absent = Vec::new();
    for _ in 0..3 {
        let Some(owner) = begin("absent owner", &visitor) else { return };
        absent.push(owner);
    }
    let Some((_ordinary, near)) = begin("ordinary owner", &visitor) else { return };
    let gets = absent.iter().map(|(_, far)| far.iget(0, vec![7u8; BYTES]).unwrap());
    let mut gets: Vec<_> = gets.collect();
    let mut last = near.iget(0, vec![0u8; BYTES]).unwrap();
    until("the operation with resident memory has completed", || last.is_done());
    until("a thread waits for each of the others", || readers() == 3);
    check_other_accesses(&near);
    assert!(gets.iter_mut().all(|get| !get.is_done()));
    let threads = threads_named("memferry-window");
    assert!(threads <= 5, "{threads} threads for four windows");
    for ((child, _), mut get) in absent.iter_mut().zip(gets) {
        child.tell();
        until("its memory is resident", || get.is_done());
        assert!(get.wait().unwrap().1.iter().all(|byte| *byte == 0));
        check_other_accesses(&near);
    }
    until("unneeded threads have exited", || threads_named("memferry-window") <= 1);
    check_other_accesses(&near);
    visitor.clone().close();
    assert!(!visitor.is_busy());
    until("no thread is left", || threads_named("memferry-window") == 0);
}
