//! Windows between processes: killed owners, killed accessors, forbidden memory, forks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memferry_message::{
    Endpoint, Error, Peer, RemoteWindow, Rights, ShareableBuffer, Source, TAG_ALL, Window,
    WindowHandle,
};
use memferry_testing::message::process::{self, Child, setting};
use memferry_testing::message::traces::{named_memory, resource_usage};
use memferry_testing::message::{Random, say, unique, until, withdraw};
use memferry_testing::pattern::{first_wrong, pattern};
use memferry_testing::{HangGuard, in_own_process};

const BYTES: usize = 16 << 20;
const TAG: u64 = 5;

/// A window over either kind of memory.
enum AnyWindow {
    Shareable(Window<ShareableBuffer>),
    Ordinary(Window<Vec<u8>>),
}

impl AnyWindow {
    fn expose(endpoint: &Endpoint, shareable: bool) -> Self {
        if shareable {
            let buffer = ShareableBuffer::new(BYTES).unwrap();
            Self::Shareable(endpoint.expose(buffer, Rights::READ_WRITE).unwrap())
        } else {
            Self::Ordinary(endpoint.expose(vec![0; BYTES], Rights::READ_WRITE).unwrap())
        }
    }

    fn handle(&self) -> WindowHandle {
        match self {
            Self::Shareable(window) => window.handle(),
            Self::Ordinary(window) => window.handle(),
        }
    }

    fn withdraw(self) -> Vec<u8> {
        match self {
            Self::Shareable(window) => withdraw(window).to_vec(),
            Self::Ordinary(window) => withdraw(window),
        }
    }
}

fn spawn(role: &str, endpoint: &Endpoint, shareable: bool) -> std::process::Command {
    let mut command = process::command(role);
    command
        .env("MEMFERRY_TEST_NAME", endpoint.name())
        .env("MEMFERRY_TEST_SHAREABLE", u8::from(shareable).to_string());
    command
}

/// Attaches the window whose handle a peer sends.
fn attach_sent(endpoint: &Endpoint) -> Result<RemoteWindow, Error> {
    let mut bytes = [0; WindowHandle::BYTES];
    let received = endpoint.recv(Source::Any, TAG, TAG_ALL, &mut bytes)?;
    endpoint.attach(received.source, WindowHandle::from_bytes(bytes).unwrap())
}

fn connect() -> (Endpoint, Peer) {
    let endpoint = Endpoint::open(&unique("child")).unwrap();
    let peer = endpoint.connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
    (endpoint, peer)
}

/// Exposes a window, sends its handle, and calls nothing after that.
fn owner() {
    let (endpoint, peer) = connect();
    let window = AnyWindow::expose(&endpoint, setting("MEMFERRY_TEST_SHAREABLE") == "1");
    endpoint.send(peer, TAG, &window.handle().to_bytes()).unwrap();
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Attaches a window and puts to it until it is killed.
fn visitor() {
    let (endpoint, peer) = connect();
    // A connection must exist before a process can send.
    endpoint.send(peer, TAG, &[]).unwrap();
    let remote = attach_sent(&endpoint).unwrap();
    let mut random = Random::new(std::process::id().into());
    let data = vec![1u8; BYTES];
    endpoint.send(peer, TAG, &[]).unwrap();
    loop {
        let length = random.below(BYTES as u64) as usize;
        if remote.put(0, &data[..length]).is_err() {
            return;
        }
    }
}

/// Gets and puts once, and reports the result.
fn guest() {
    let (endpoint, peer) = connect();
    endpoint.send(peer, TAG, &[]).unwrap();
    let outcome = attach_sent(&endpoint).and_then(|remote| {
        let mut head = vec![0; 300_000];
        remote.get(100, &mut head)?;
        remote.put(1 << 20, &head)
    });
    let words = match outcome {
        Ok(()) => "done".to_owned(),
        Err(error) => error.to_string(),
    };
    endpoint.send(peer, TAG, words.as_bytes()).unwrap();
}

#[test]
fn other_processes_begin_here() {
    match process::role().as_deref() {
        Some("owner") => owner(),
        Some("visitor") => visitor(),
        Some("guest") => guest(),
        Some("crowded") => exhaust_mappings(),
        _ => {}
    }
}

#[test]
fn an_owner_that_calls_nothing_is_put_to_and_got_from() {
    if !in_own_process() {
        return;
    }
    for shareable in [true, false] {
        let endpoint = Endpoint::open(&unique("initiator")).unwrap();
        let mut child = Child::spawn(&mut spawn("owner", &endpoint, shareable));
        let remote = attach_sent(&endpoint).unwrap();
        for (round, length) in [(1, 8), (2, 5000), (3, BYTES)] {
            remote.put(0, &pattern(length, round)).unwrap();
            let mut back = vec![0; length];
            remote.get(0, &mut back).unwrap();
            assert_eq!(first_wrong(&back, round), None);
        }
        child.kill();
    }
}

#[test]
fn a_killed_owner_is_an_error_and_soon() {
    if !in_own_process() {
        return;
    }
    let _guard = HangGuard::new("a killed owner is an error");
    let mut slowest = Duration::ZERO;
    for round in 0..30u64 {
        let endpoint = Endpoint::open(&unique("initiator")).unwrap();
        let mut child = Child::spawn(&mut spawn("owner", &endpoint, round % 2 == 0));
        let remote = attach_sent(&endpoint).unwrap();
        let data = vec![3u8; BYTES];
        let (error, late) = std::thread::scope(|scope| {
            let putting = scope.spawn(|| {
                let error = (0..1_000_000).find_map(|round: usize| {
                    let length = 1 << (round % 24);
                    remote.put(0, &data[..length]).err()
                });
                (error, Instant::now())
            });
            std::thread::sleep(Duration::from_micros(round * 777 % 9000));
            child.kill();
            let killed = Instant::now();
            let (error, ended) = putting.join().unwrap();
            (error, ended.saturating_duration_since(killed))
        });
        assert!(matches!(error, Some(Error::PeerDisconnected(_))), "{error:?}");
        slowest = slowest.max(late);
        let begun = remote.iput(0, vec![1u8; 1 << 20]).unwrap().wait().unwrap_err();
        assert!(matches!(begun.error, Error::PeerDisconnected(_)), "{begun:?}");
        assert!(matches!(remote.fence(), Err(Error::PeerDisconnected(_))));
    }
    say(format_args!("the slowest took {slowest:?} to be noticed"));
    assert!(named_memory().is_empty());
}

#[test]
fn a_killed_visitor_leaves_the_owner_its_memory() {
    if !in_own_process() {
        return;
    }
    let endpoint = Endpoint::open(&unique("owner")).unwrap();
    let mut before = None;
    for round in 0..30u64 {
        let mut child = Child::spawn(&mut spawn("visitor", &endpoint, round % 2 == 0));
        let hello = endpoint.recv(Source::Any, TAG, TAG_ALL, &mut []).unwrap();
        let window = AnyWindow::expose(&endpoint, round % 2 == 0);
        endpoint.send(hello.source, TAG, &window.handle().to_bytes()).unwrap();
        endpoint.recv(hello.source, TAG, TAG_ALL, &mut []).unwrap();
        std::thread::sleep(Duration::from_micros(round * 531 % 7000));
        child.kill();
        let memory = window.withdraw();
        // Each byte is the owner's or the accessor's.
        assert!(memory.iter().all(|&byte| byte <= 1));
        until("the killed peer is removed", || {
            endpoint.progress();
            endpoint.peers().is_empty()
        });
        // Objects that are created for the first connection stay, and so do those for blocking on
        // descriptors.
        let first = *before.get_or_insert_with(resource_usage);
        until("nothing of the killed process is left", || {
            let now = resource_usage();
            now.mappings == first.mappings && now.descriptors <= first.descriptors + 3
        });
    }
}

#[test]
fn an_owner_that_waits_for_a_killed_visitor_is_told() {
    if !in_own_process() {
        return;
    }
    let endpoint = Endpoint::open(&unique("owner")).unwrap();
    let mut child = Child::spawn(&mut spawn("visitor", &endpoint, true));
    let hello = endpoint.recv(Source::Any, TAG, TAG_ALL, &mut []).unwrap();
    let window = endpoint.expose(vec![0u8; BYTES], Rights::READ_WRITE).unwrap();
    endpoint.send(hello.source, TAG, &window.handle().to_bytes()).unwrap();
    let is_polling = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            window.wait(0, None, |value| {
                is_polling.store(true, Ordering::Relaxed);
                value == 7
            })
        });
        until("the owner waits", || is_polling.load(Ordering::Relaxed));
        child.kill();
        let outcome = waiting.join().unwrap();
        assert!(matches!(outcome, Err(Error::PeerDisconnected(_))), "{outcome:?}");
    });
}

#[test]
fn a_stopped_visitor_does_not_keep_others_from_the_window_being_closed() {
    if !in_own_process() {
        return;
    }
    let endpoint = Endpoint::open(&unique("owner")).unwrap();
    let child = Child::spawn(&mut spawn("visitor", &endpoint, true));
    let hello = endpoint.recv(Source::Any, TAG, TAG_ALL, &mut []).unwrap();
    let mut window =
        endpoint.expose(ShareableBuffer::new(BYTES).unwrap(), Rights::READ_WRITE).unwrap();
    endpoint.send(hello.source, TAG, &window.handle().to_bytes()).unwrap();
    endpoint.recv(hello.source, TAG, TAG_ALL, &mut []).unwrap();
    let signal = |signal| {
        // SAFETY: a signal to a child of this test.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
    };
    // It is nearly always in an access; stopped there, it keeps the memory in use.
    signal(libc::SIGSTOP);
    let buffer = loop {
        match window.withdraw() {
            Ok(buffer) => break buffer,
            Err(held) => {
                assert_eq!(held.peer, Some(hello.source));
                signal(libc::SIGCONT);
                window = held.window;
            }
        }
    };
    assert!(buffer.iter().all(|&byte| byte <= 1));
    signal(libc::SIGCONT);
}

#[test]
fn memory_that_may_not_be_reached_is_named_and_shareable_memory_is_reached() {
    if !in_own_process() {
        return;
    }
    for shareable in [true, false] {
        let endpoint = Endpoint::open(&unique("owner")).unwrap();
        let mut command = spawn("guest", &endpoint, shareable);
        let child = Child::spawn(command.env("MEMFERRY_CMA", "off"));
        let hello = endpoint.recv(Source::Any, TAG, TAG_ALL, &mut []).unwrap();
        let window = AnyWindow::expose(&endpoint, shareable);
        endpoint.send(hello.source, TAG, &window.handle().to_bytes()).unwrap();
        let mut words = vec![0; 500];
        let received = endpoint.recv(hello.source, TAG, TAG_ALL, &mut words).unwrap();
        let words = String::from_utf8(words[..received.length as usize].to_vec()).unwrap();
        if shareable {
            assert_eq!(words, "done");
        } else {
            assert!(
                words.contains("MEMFERRY_CMA=off") && words.contains("ShareableBuffer"),
                "{words}"
            );
        }
        child.finish();
    }
}

/// Has the maximum number of mappings of a process, and still accesses a window.
fn exhaust_mappings() {
    let (endpoint, peer) = connect();
    endpoint.send(peer, TAG, &[]).unwrap();
    let page = memferry_sys::pages::page_bytes();
    let mut mappings = 0;
    loop {
        // Adjacent mappings of different protection are not merged.
        let protection = if mappings % 2 == 0 { libc::PROT_READ } else { libc::PROT_NONE };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new mappings that nothing uses.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), page, protection, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            break;
        }
        mappings += 1;
    }
    let words = match attach_sent(&endpoint).and_then(|remote| {
        let mut head = vec![0; 3000];
        remote.get(100, &mut head)?;
        remote.put(1 << 20, &head)
    }) {
        Ok(()) => format!("done with {mappings}"),
        Err(error) => error.to_string(),
    };
    endpoint.send(peer, TAG, words.as_bytes()).unwrap();
}

#[test]
fn a_process_that_can_map_nothing_more_takes_another_way() {
    if !in_own_process() {
        return;
    }
    let endpoint = Endpoint::open(&unique("owner")).unwrap();
    let child = Child::spawn(&mut spawn("crowded", &endpoint, true));
    let hello = endpoint.recv(Source::Any, TAG, TAG_ALL, &mut []).unwrap();
    let window = AnyWindow::expose(&endpoint, true);
    endpoint.send(hello.source, TAG, &window.handle().to_bytes()).unwrap();
    let mut words = vec![0; 500];
    let received = endpoint.recv(hello.source, TAG, TAG_ALL, &mut words).unwrap();
    let words = String::from_utf8(words[..received.length as usize].to_vec()).unwrap();
    assert!(words.starts_with("done with "), "{words}");
    child.finish();
}

#[test]
fn memory_that_its_owner_unmaps_is_an_error_and_not_a_crash() {
    if !in_own_process() {
        return;
    }
    let endpoint = Endpoint::open(&unique("unmapping")).unwrap();
    let other = Endpoint::open(&unique("visiting")).unwrap();
    let peer = std::thread::scope(|scope| {
        let connecting = scope.spawn(|| other.connect(endpoint.name()).unwrap());
        until("the other side has connected", || endpoint.peers().len() == 1);
        connecting.join().unwrap()
    });
    for round in 0..50u64 {
        let pages = memferry_sys::Pages::new(BYTES).unwrap();
        // SAFETY: an access to memory that is no longer mapped is the subject of this test; it is
        // made by system calls, which report it.
        let window =
            unsafe { endpoint.expose_raw(pages.as_ptr(), BYTES, Rights::READ_WRITE) }.unwrap();
        let remote = other.attach(peer, window.handle()).unwrap();
        let data = vec![1; BYTES];
        std::thread::scope(|scope| {
            let putting = scope.spawn(|| (0..3).find_map(|_| remote.put(0, &data).err()));
            std::thread::sleep(Duration::from_micros(round * 100));
            drop(pages);
            let error = putting.join().unwrap();
            assert!(
                matches!(error, None | Some(Error::BadMemory(memferry_message::MemorySide::Peer))),
                "{error:?}"
            );
        });
    }
}

#[test]
fn a_forked_child_is_refused_and_harms_nothing() {
    if !in_own_process() {
        return;
    }
    let endpoint = Endpoint::open(&unique("forking")).unwrap();
    let window = endpoint.expose(vec![7u8; 4 << 20], Rights::READ_WRITE).unwrap();
    let remote = endpoint.attach(endpoint.self_peer().unwrap(), window.handle()).unwrap();
    // Over many lines, and in the background: all threads have been started.
    remote.put(100, &vec![7; 3 << 20]).unwrap();
    remote.iput(100, vec![7u8; 3 << 20]).unwrap().wait().unwrap();
    remote.put(0, &[8]).unwrap();
    // SAFETY: the child does only what is tested, and exits without running anything else.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let refused = remote.put(0, &[9]) == Err(Error::Forked)
            && endpoint.expose(vec![0u8; 10], Rights::READ).is_err()
            && endpoint.attach(remote.peer(), window.handle()).err() == Some(Error::Forked);
        drop(window);
        // The parent's threads do not exist here.
        drop(remote);
        drop(endpoint);
        // SAFETY: exits the child at once.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child of this test.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0);
    remote.put(1, &[9]).unwrap();
    assert_eq!(window.withdraw().unwrap()[..3], [8, 9, 7]);
}
