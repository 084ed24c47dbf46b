//! Memory of a peer that does not come: behind a userfaultfd that nobody answers, as it would be in a
//! file of a dead server. Calls that do not wait go on, and so does everything with other peers.

mod support;

use std::io::{Read, Write};
use std::process::Stdio;

use memferry_message::plan::PathKind;
use memferry_message::{
    Builder, Endpoint, Error, Peer, Rights, Source, TAG_ALL, WindowHandle, kept_buffers,
};
use memferry_sys::Pages;
use memferry_testing::{Requirement, skip};
use support::process::{self, Child, setting};
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

/// Memory whose pages come when somebody says so.
struct Absent {
    pages: Pages,
    descriptor: i32,
}

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    calls: u64,
}

#[repr(C)]
struct Register {
    start: u64,
    length: u64,
    mode: u64,
    calls: u64,
}

impl Absent {
    fn new() -> Option<Self> {
        const API: u64 = 0xAA;
        const API_CALL: u64 = 0xC018_AA3F;
        const REGISTER_CALL: u64 = 0xC020_AA00;
        const MISSING: u64 = 1;
        let pages = Pages::new(BYTES).unwrap();
        // SAFETY: makes a descriptor.
        let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) } as i32;
        let mut api = Api { api: API, features: 0, calls: 0 };
        let start = pages.as_ptr() as u64;
        let mut register = Register { start, length: BYTES as u64, mode: MISSING, calls: 0 };
        // SAFETY: both structures are what the calls expect; the pages are this function's.
        let done = unsafe {
            libc::ioctl(descriptor, API_CALL, &raw mut api) == 0
                && libc::ioctl(descriptor, REGISTER_CALL, &raw mut register) == 0
        };
        (descriptor >= 0 && done).then_some(Self { pages, descriptor })
    }

    fn address(&self) -> *mut u8 {
        self.pages.as_ptr()
    }

    /// Brings all pages, as zeroes.
    fn bring(&self) {
        const ZERO_CALL: u64 = 0xC020_AA04;
        let (start, length) = (self.address() as u64, self.pages.len() as u64);
        let mut zero = Register { start, length, mode: 0, calls: 0 };
        // SAFETY: the structure has the shape that the call expects; the pages are this value's.
        let done = unsafe { libc::ioctl(self.descriptor, ZERO_CALL, &raw mut zero) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    }

    /// Takes away pages that have come.
    fn take_away(&self) {
        // SAFETY: the pages are this value's; nobody reads them before they have come again.
        let done =
            unsafe { libc::madvise(self.address().cast(), self.pages.len(), libc::MADV_DONTNEED) };
        assert_eq!(done, 0);
    }

    /// From now on the pages come, as zeroes: nobody intercepts them any more.
    fn let_come(&self) {
        // SAFETY: the descriptor is this value's, and is closed once.
        unsafe { libc::close(self.descriptor) };
    }
}

fn say(word: &[u8]) {
    std::io::stderr().write_all(word).unwrap();
}

fn await_word() {
    let _ = std::io::stdin().read_exact(&mut [0]);
}

fn connect() -> (Endpoint, Peer) {
    let endpoint = Endpoint::open(&unique("child")).unwrap();
    let peer = endpoint.connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
    (endpoint, peer)
}

/// Sends memory that does not come until the test says so.
fn sender() {
    let Some(absent) = Absent::new() else { return say(b"s") };
    let (endpoint, peer) = connect();
    // SAFETY: kept until the operation is over, or the process.
    let send = unsafe { endpoint.isend_raw(peer, 1, absent.address(), BYTES) };
    let mut send = send.unwrap();
    say(b"a");
    std::thread::spawn(move || {
        await_word();
        absent.let_come();
        std::thread::park();
    });
    let outcome = send.wait();
    say(if outcome.is_ok() { b"d" } else { b"e" });
    await_word();
}

/// Sends memory that was there when it was last looked at, and does not come again until the test says so.
fn vanisher() {
    let Some(absent) = Absent::new() else { return say(b"s") };
    let (endpoint, peer) = connect();
    absent.bring();
    // SAFETY: kept until the operation is over, for both.
    unsafe { endpoint.isend_raw(peer, 1, absent.address(), BYTES) }.unwrap().wait().unwrap();
    absent.take_away();
    // SAFETY: as above, or until the process ends.
    let mut send = unsafe { endpoint.isend_raw(peer, 1, absent.address(), BYTES) }.unwrap();
    say(b"a");
    std::thread::spawn(move || {
        await_word();
        absent.let_come();
        std::thread::park();
    });
    let outcome = send.wait();
    say(if outcome.is_ok() { b"d" } else { b"e" });
    await_word();
}

/// Sends a small message whenever the test says so.
fn talker() {
    let (endpoint, peer) = connect();
    say(b"a");
    let mut word = [0];
    while std::io::stdin().read_exact(&mut word).is_ok() {
        endpoint.send(peer, 3, b"talk").unwrap();
    }
}

/// Receives into memory that does not come until the test says so.
fn target() {
    let Some(absent) = Absent::new() else { return say(b"s") };
    let (endpoint, peer) = connect();
    // SAFETY: kept until the process ends.
    let receive = unsafe { endpoint.irecv_raw(peer, 1, TAG_ALL, absent.address(), BYTES) };
    let mut receive = receive.unwrap();
    say(b"a");
    std::thread::spawn(move || {
        await_word();
        absent.let_come();
        std::thread::park();
    });
    let outcome = receive.wait();
    say(if outcome.is_ok() { b"d" } else { b"e" });
    await_word();
}

/// Exposes memory that does not come, and says where.
fn owner() {
    let Some(absent) = Absent::new() else { return say(b"s") };
    let (endpoint, peer) = connect();
    // SAFETY: kept until the process ends.
    let window = unsafe { endpoint.expose_raw(absent.address(), BYTES, Rights::READ_WRITE) };
    let window = window.unwrap();
    endpoint.send(peer, 2, &window.handle().to_bytes()).unwrap();
    say(b"a");
    await_word();
    absent.let_come();
    await_word();
}

struct Role {
    child: Child,
    input: std::process::ChildStdin,
    output: std::process::ChildStderr,
}

impl Role {
    /// `None` where memory cannot be kept from coming.
    fn spawn(role: &str, name: &str) -> Option<Self> {
        let mut command = process::command(role);
        command.env("MEMFERRY_TEST_NAME", name).stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Child::spawn(&mut command);
        let (input, output) = (child.take_input(), child.take_errors());
        Some(Self { child, input, output })
    }

    fn hear(&mut self) -> u8 {
        let mut word = [0];
        self.output.read_exact(&mut word).unwrap();
        word[0]
    }

    fn tell(&mut self) {
        self.input.write_all(b".").unwrap();
    }
}

/// A child in a role, connected to an endpoint, with its memory absent.
fn begin(role: &str, endpoint: &Endpoint) -> Option<Role> {
    let mut child = Role::spawn(role, endpoint.name())?;
    let word = std::thread::scope(|scope| {
        let hearing = scope.spawn(|| child.hear());
        until("the other process is ready", || {
            endpoint.progress();
            hearing.is_finished()
        });
        hearing.join().unwrap()
    });
    if word == b's' {
        skip(Requirement::Userfaultfd, "memory cannot be kept from coming");
        return None;
    }
    assert_eq!(word, b'a');
    Some(child)
}

/// Whether a thread of this process reads memory of another process, and has to wait for it.
fn is_any_thread_reading() -> bool {
    is_any_thread_in(libc::SYS_process_vm_readv)
}

fn is_any_thread_in(call: libc::c_long) -> bool {
    let call = format!("{call} ");
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks.map(|task| std::fs::read_to_string(task.path().join("syscall"))).any(
        // It says what a thread does that sleeps, and nothing of one that runs.
        |found| found.is_ok_and(|found| found.starts_with(&call)),
    )
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
        let Some(mut child) = begin("sender", &endpoint) else { return };
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
        let Some(mut child) = begin("sender", &endpoint) else { return };
        let mut receive = endpoint.irecv(Source::Any, 1, TAG_ALL, vec![7u8; BYTES]).unwrap();
        until("a thread waits for the memory", || {
            assert!(!receive.is_done());
            is_any_thread_reading()
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
        let Some(mut child) = begin("owner", &endpoint) else { return };
        let mut bytes = [0; WindowHandle::BYTES];
        let received = endpoint.recv(Source::Any, 2, TAG_ALL, &mut bytes).unwrap();
        let handle = WindowHandle::from_bytes(bytes).unwrap();
        let remote = endpoint.attach(received.source, handle).unwrap();
        let mut get = remote.iget(0, vec![7u8; BYTES]).unwrap();
        until("a thread waits for the memory", || {
            assert!(!get.is_done());
            is_any_thread_reading()
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
        let Some(mut child) = begin("vanisher", &endpoint) else { return };
        assert!(first.wait().unwrap().1.iter().all(|byte| *byte == 0));
        let receive = endpoint.irecv(Source::Any, 1, TAG_ALL, vec![7u8; BYTES]).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| receive.wait());
            until("a thread waits for the memory", is_any_thread_reading);
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
        let Some(mut child) = begin("target", &endpoint) else { return };
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
        let Some(mut child) = begin("vanisher", &endpoint) else { return };
        drop(first.wait().unwrap());
        let mut talker = begin("talker", &endpoint).unwrap();
        std::thread::scope(|scope| {
            let hear = || endpoint.recv(Source::Any, 3, TAG_ALL, &mut [0; 8]).map(drop);
            let hearing = [scope.spawn(hear), scope.spawn(hear)];
            // Not to be right, but to be hard: those that hear should sleep deeply by now.
            std::thread::sleep(std::time::Duration::from_millis(100));
            let receive = endpoint.irecv(Source::Any, 1, TAG_ALL, vec![7u8; BYTES]).unwrap();
            let waiting = scope.spawn(|| receive.wait());
            until("a thread waits for the memory", is_any_thread_reading);
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
