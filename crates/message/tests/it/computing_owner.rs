//! Processes that connect and send while the owner of the name computes: it makes no call until the
//! other side has done its part.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStderr, Stdio};

use memferry_message::{ConnectError, Endpoint, Error, Link, Listener, Source, TAG_ALL};
use memferry_testing::message::process::{self, Child, setting};
use memferry_testing::message::traces::resource_usage;
use memferry_testing::message::{Random, is_readable, say, unique, until};
use memferry_testing::pattern::{first_wrong, pattern};
use memferry_testing::{HangGuard, in_own_process};

/// Sizes of every path: in a cell, in the bounce ring, and announced.
const SIZES: [usize; 5] = [0, 8, 3000, 60_000, 4 << 20];

/// Another process, and what it reports.
struct Reporter {
    child: Child,
    reports: BufReader<ChildStderr>,
}

impl Reporter {
    fn spawn(role: &str, name: &str) -> Self {
        let mut command = process::command(role);
        command.env("MEMFERRY_TEST_NAME", name).stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Child::spawn(&mut command);
        let reports = BufReader::new(child.take_errors());
        Self { child, reports }
    }

    /// Computes until the process has reported: this process makes no call of an endpoint or link.
    fn compute_until_reported(&mut self) {
        let mut line = String::new();
        self.reports.read_line(&mut line).unwrap();
        assert_eq!(line, "done\n");
    }

    /// Lets the process exit, which waits for that.
    fn release(mut self) {
        drop(self.child.take_input());
        self.child.finish();
    }
}

/// Reports that this process has done its part.
fn report() {
    std::io::stderr().write_all(b"done\n").unwrap();
}

/// Waits until the test releases this process.
fn wait_for_release() {
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// Connects to the name and starts a message of each size.
fn sends() {
    let endpoint = Endpoint::open(&unique("sender")).unwrap();
    let peer = endpoint.connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
    let sends: Vec<_> = SIZES
        .iter()
        .map(|&size| endpoint.isend(peer, size as u64, pattern(size, size as u64)).unwrap())
        .collect();
    report();
    sends.into_iter().for_each(|send| drop(send.wait().unwrap()));
    wait_for_release();
}

#[test]
fn messages_of_every_size_are_sent_before_the_receiver_makes_a_call() {
    if !in_own_process() {
        return;
    }
    let _hang = HangGuard::new("messages to an owner that computes");
    let owner = Endpoint::open(&unique("computing")).unwrap();
    let mut sender = Reporter::spawn("sends", owner.name());
    sender.compute_until_reported();
    for size in SIZES {
        let mut buffer = vec![0; size];
        let received = owner.recv(Source::Any, size as u64, TAG_ALL, &mut buffer).unwrap();
        assert_eq!(received.length as usize, size);
        assert_eq!(first_wrong(&buffer, size as u64), None);
    }
    sender.release();
}

/// Connects to the name and sends small messages until one finds no space; the last one is their
/// number.
fn fills_rings() {
    let endpoint = Endpoint::open(&unique("sender")).unwrap();
    let peer = endpoint.connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
    let mut sends = Vec::new();
    loop {
        let number = sends.len() as u64;
        let mut send = endpoint.isend(peer, number, pattern(2000, number)).unwrap();
        let is_full = !send.is_done();
        sends.push(send);
        if is_full {
            break;
        }
    }
    let count = (sends.len() as u64).to_le_bytes().to_vec();
    sends.push(endpoint.isend(peer, u64::MAX, count).unwrap());
    report();
    sends.into_iter().for_each(|send| drop(send.wait().unwrap()));
    wait_for_release();
}

#[test]
fn a_sender_fills_the_rings_before_the_receiver_makes_a_call() {
    if !in_own_process() {
        return;
    }
    let _hang = HangGuard::new("full rings of an owner that computes");
    let owner = Endpoint::open(&unique("computing")).unwrap();
    let mut sender = Reporter::spawn("fills_rings", owner.name());
    sender.compute_until_reported();
    let mut count = [0; 8];
    owner.recv(Source::Any, u64::MAX, TAG_ALL, &mut count).unwrap();
    for number in 0..u64::from_le_bytes(count) {
        let mut buffer = vec![0; 2000];
        owner.recv(Source::Any, number, TAG_ALL, &mut buffer).unwrap();
        assert_eq!(first_wrong(&buffer, number), None);
    }
    sender.release();
}

/// Connects a link to the name, and writes a small and a large message.
fn writes() {
    let link = Link::connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
    link.write(b"small").unwrap();
    let write = link.iwrite(pattern(1 << 20, 1)).unwrap();
    report();
    write.wait().unwrap();
    wait_for_release();
}

#[test]
fn links_are_connected_and_written_before_they_are_accepted() {
    if !in_own_process() {
        return;
    }
    let _hang = HangGuard::new("links to an owner that computes");
    let name = unique("computing");
    let listener = Listener::bind(&name).unwrap();
    let ready = listener.ready_fd().unwrap();
    assert!(!is_readable(&ready));
    let mut writers: Vec<_> = (0..3).map(|_| Reporter::spawn("writes", &name)).collect();
    writers.iter_mut().for_each(Reporter::compute_until_reported);
    let links: Vec<_> = writers
        .iter()
        .map(|_| {
            until("the listener is readable", || is_readable(&ready));
            listener.poll_accept().unwrap().expect("a process has connected")
        })
        .collect();
    assert!(!is_readable(&ready));
    for link in &links {
        let mut small = [0; 5];
        assert_eq!(link.read(&mut small).unwrap(), 5);
        assert_eq!(&small, b"small");
        let mut large = vec![0; 1 << 20];
        link.read(&mut large).unwrap();
        assert_eq!(first_wrong(&large, 1), None);
    }
    writers.into_iter().for_each(Reporter::release);
}

/// Connects a link, and leaves.
fn leaves() {
    drop(Link::connect(&setting("MEMFERRY_TEST_NAME")).unwrap());
    report();
    wait_for_release();
}

#[test]
fn a_link_whose_peer_left_without_a_message_is_not_accepted() {
    if !in_own_process() {
        return;
    }
    let _hang = HangGuard::new("links of a process that leaves");
    let name = unique("computing");
    let listener = Listener::bind(&name).unwrap();
    let mut left = Reporter::spawn("leaves", &name);
    left.compute_until_reported();
    let mut writer = Reporter::spawn("writes", &name);
    writer.compute_until_reported();
    let link = listener.accept().unwrap();
    assert_eq!(link.peek().unwrap(), Some(5));
    link.read(&mut [0; 5]).unwrap();
    link.read(&mut vec![0; 1 << 20]).unwrap();
    left.release();
    writer.release();
    assert!(listener.poll_accept().unwrap().is_none());
}

/// Connects again and again.
fn connects() {
    let endpoint = Endpoint::open(&unique("caller")).unwrap();
    report();
    loop {
        let _ = endpoint.connect(&setting("MEMFERRY_TEST_NAME"));
        let _ = Link::connect(&setting("MEMFERRY_TEST_OTHER"));
    }
}

fn spawn_connecting(endpoint: &str, links: &str) -> Child {
    let mut command = process::command("connects");
    command.env("MEMFERRY_TEST_NAME", endpoint).env("MEMFERRY_TEST_OTHER", links);
    Child::spawn(command.stderr(Stdio::null()))
}

#[test]
fn processes_that_are_killed_while_they_connect_to_an_owner_that_computes_leave_nothing() {
    if !in_own_process() {
        return;
    }
    let _hang = HangGuard::new("killed while they connect");
    let seed = Random::fresh_seed();
    say(format_args!("seed {seed}"));
    let mut random = Random::new(seed);
    let owner = Endpoint::open(&unique("computing")).unwrap();
    let links = unique("computing-links");
    let listener = Listener::bind(&links).unwrap();
    let before = resource_usage();
    for _ in 0..20 {
        let mut child = spawn_connecting(owner.name(), &links);
        // The random delay hides nothing: the time of the kill is the random input of the test.
        std::thread::sleep(std::time::Duration::from_micros(random.below(9000)));
        child.kill();
    }
    until("nothing of the killed processes is left", || {
        let now = resource_usage();
        let none_waits = listener.poll_accept().unwrap().is_none();
        // Made once: for the sleep of the endpoint, and for probes that are slow.
        let few_descriptors = now.descriptors <= before.descriptors + 3;
        owner.peers().is_empty() && none_waits && now.mappings == before.mappings && few_descriptors
    });
}

#[test]
fn an_owner_closes_while_others_connect() {
    if !in_own_process() {
        return;
    }
    let _hang = HangGuard::new("closing while others connect");
    for _ in 0..50 {
        let name = unique("closing");
        let (owner, links) = (Endpoint::open(&name).unwrap(), format!("{name}-links"));
        let listener = Listener::bind(&links).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let endpoint = Endpoint::open(&unique("caller")).unwrap();
                    let failed = endpoint.connect(&name).err();
                    let refused = |error: &Error| matches!(error, Error::Connect(_));
                    assert!(failed.as_ref().is_none_or(refused), "{failed:?}");
                    let failed = Link::connect(&links).err();
                    assert!(failed.as_ref().is_none_or(refused), "{failed:?}");
                });
            }
            owner.close();
            drop(listener);
        });
        let error = Link::connect(&links).unwrap_err();
        assert_eq!(error, Error::Connect(ConnectError::NoListener(links)));
    }
}

#[test]
fn a_forked_child_has_names_of_its_own_and_leaves_those_of_its_parent_alone() {
    if !in_own_process() {
        return;
    }
    let _hang = HangGuard::new("forked child");
    let (owner, links) = (Endpoint::open(&unique("forking")).unwrap(), unique("forking-links"));
    let listener = Listener::bind(&links).unwrap();
    let own_name = unique("child");
    // SAFETY: the child does only what is tested, and exits without running anything else.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let refused =
            matches!(listener.poll_accept(), Err(Error::Forked)) && listener.ready_fd().is_err();
        drop(listener);
        drop(owner);
        // The child has a thread of its own for its own name.
        let own = Endpoint::open(&own_name).and_then(|own| {
            let other = Endpoint::open(&unique("child-other"))?;
            let peer = other.connect(own.name())?;
            other.send(peer, 1, b"here")?;
            own.recv(Source::Any, 1, TAG_ALL, &mut [0; 4])
        });
        // SAFETY: exits the child at once.
        unsafe { libc::_exit(i32::from(!refused || own.is_err())) };
    }
    let mut status = 0;
    // SAFETY: waits for the child of this test.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0);
    let mut sender = Reporter::spawn("sends", owner.name());
    sender.compute_until_reported();
    let mut writer = Reporter::spawn("writes", &links);
    writer.compute_until_reported();
    assert!(listener.poll_accept().unwrap().is_some());
    for size in SIZES {
        owner.recv(Source::Any, size as u64, TAG_ALL, &mut vec![0; size]).unwrap();
    }
    sender.release();
}

#[test]
fn an_event_loop_sees_a_peer_that_connected_while_the_owner_computed() {
    if !in_own_process() {
        return;
    }
    let _hang = HangGuard::new("event loop");
    let owner = Endpoint::open(&unique("computing")).unwrap();
    let ready = owner.ready_fd().unwrap();
    assert!(!is_readable(&ready));
    let other = Endpoint::open(&unique("caller")).unwrap();
    let peer = other.connect(owner.name()).unwrap();
    until("the owner is readable", || is_readable(&ready));
    assert_eq!(owner.peers().len(), 1);
    assert!(!is_readable(&ready));
    other.send(peer, 1, b"hello").unwrap();
    assert!(is_readable(&ready));
}

#[test]
fn other_processes_begin_here() {
    match process::role().as_deref() {
        Some("sends") => sends(),
        Some("fills_rings") => fills_rings(),
        Some("writes") => writes(),
        Some("leaves") => leaves(),
        Some("connects") => connects(),
        _ => {}
    }
}
