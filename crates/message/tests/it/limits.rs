//! Processes that reach limits of the system: descriptors, the size of files. A call that fails
//! changes nothing, names the limit, and works when the limit is raised.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::time::Duration;

use memferry_message::{Endpoint, EndpointBuilder, Peer, Rights, ShareableBuffer};
use memferry_testing::message::process::{self, Child, setting};
use memferry_testing::message::{TIMEOUT, pair, unique};

/// Peers of a process with a low limit of descriptors.
const MANY_PEERS: usize = 100;

/// Descriptors that a process holds, so that only a given number of further ones can be created.
struct FewDescriptors {
    open_files: Vec<File>,
    before: libc::rlimit,
}

fn limit(kind: libc::__rlimit_resource_t) -> libc::rlimit {
    let mut found = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes to a local variable.
    assert_eq!(unsafe { libc::getrlimit(kind, &mut found) }, 0);
    found
}

fn set_limit(kind: libc::__rlimit_resource_t, limit: &libc::rlimit) {
    // SAFETY: reads a local variable, and changes a limit of this process.
    assert_eq!(unsafe { libc::setrlimit(kind, limit) }, 0);
}

impl FewDescriptors {
    /// Lets this process create `free` more descriptors.
    fn leave_free(free: usize) -> Self {
        let before = limit(libc::RLIMIT_NOFILE);
        let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        set_limit(libc::RLIMIT_NOFILE, &libc::rlimit { rlim_cur: open + 32, ..before });
        let mut held = Vec::new();
        while let Ok(file) = File::open("/dev/null") {
            held.push(file);
        }
        assert!(held.len() >= free);
        held.truncate(held.len() - free);
        Self { open_files: held, before }
    }
}

impl Drop for FewDescriptors {
    fn drop(&mut self) {
        self.open_files.clear();
        set_limit(libc::RLIMIT_NOFILE, &self.before);
    }
}

/// Attaches windows with a few descriptors free. A process of its own, because of the limit.
fn attach_with_few_descriptors() {
    const BYTES: usize = 4096;
    for free in 0..12 {
        let both = pair(&EndpointBuilder::new());
        // Both tables have a window at the same index. Nothing may be written to that of the
        // visitor.
        let mine = both.here.expose(vec![0u8; BYTES], Rights::READ_WRITE).unwrap();
        let theirs = both.there.expose(vec![0u8; BYTES], Rights::READ_WRITE).unwrap();
        let scarce = FewDescriptors::leave_free(free);
        let first = both.here.attach(both.to_there, theirs.handle());
        drop(scarce);
        if let Err(error) = &first {
            assert!(format!("{error:?}").contains("open files"), "{free} free: {error:?}");
        }
        drop(first);
        let remote = both.here.attach(both.to_there, theirs.handle()).unwrap();
        remote.put(0, &[7u8; BYTES]).unwrap();
        assert!(mine.withdraw().unwrap().iter().all(|byte| *byte == 0), "{free} free");
        drop(remote);
        assert!(theirs.withdraw().unwrap().iter().all(|byte| *byte == 7), "{free} free");
    }
}

/// Accepts connections with a few descriptors free, until it is killed.
fn listen_with_few_descriptors() {
    let endpoint = Endpoint::open(&setting("MEMFERRY_TEST_NAME")).unwrap();
    let _scarce = FewDescriptors::leave_free(setting("MEMFERRY_TEST_FREE").parse().unwrap());
    std::io::stderr().write_all(b"scarce\n").unwrap();
    loop {
        endpoint.progress_timeout(Duration::from_millis(50));
    }
}

/// Connects with a few descriptors free.
fn connect_with_few_descriptors() {
    let there = EndpointBuilder::new().background(true).open(&unique("there")).unwrap();
    let mut connected = 0;
    for free in 0..12 {
        let here = Endpoint::open(&unique("here")).unwrap();
        let scarce = FewDescriptors::leave_free(free);
        let first = here.connect(there.name());
        drop(scarce);
        match first {
            Ok(_) => connected += 1,
            Err(error) => {
                let text = format!("{error:?}");
                assert!(text.contains("open files") || text.contains("descriptors"), "{error:?}");
            }
        }
        let peer = here.connect(there.name()).unwrap();
        here.send(peer, 1, b"hello").unwrap();
    }
    assert!(connected > 0, "twelve descriptors suffice");
}

/// An error and its causes, as programs print them.
fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Connects with 100 peers of the test, by calls or by first messages. Returns those that were reached, and the errors
/// of the others.
fn connect_with_all(here: &Endpoint, names: &str, by_message: bool) -> (Vec<Peer>, Vec<String>) {
    let (mut reached, mut refused, mut sends) = (Vec::new(), Vec::new(), Vec::new());
    for index in 0..MANY_PEERS {
        let name = format!("{names}-{index}");
        if by_message {
            let peer = here.add_peer(&name).unwrap();
            sends.push((peer, here.isend(peer, 1, vec![1u8]).unwrap()));
        } else {
            match here.connect(&name) {
                Ok(peer) => reached.push(peer),
                Err(error) => refused.push(with_causes(&error)),
            }
        }
    }
    for (peer, send) in sends {
        match send.wait() {
            Ok(_) => reached.push(peer),
            Err(failed) => refused.push(with_causes(&failed.error)),
        }
    }
    (reached, refused)
}

/// Connects with 100 peers of the test under a soft and a hard limit of descriptors, by calls and by
/// first messages.
fn connect_with_many_peers() {
    let number = |name: &str| setting(name).parse::<u64>().unwrap();
    let (soft, hard) = (number("MEMFERRY_TEST_SOFT"), number("MEMFERRY_TEST_HARD"));
    set_limit(libc::RLIMIT_NOFILE, &libc::rlimit { rlim_cur: soft, rlim_max: hard });
    let names = setting("MEMFERRY_TEST_NAME");
    let suffices = hard > 1000;
    let names_the_limit = |text: &String| text.contains("open files") && text.contains("ulimit -n");
    for by_message in [false, true] {
        // A message waits for descriptors until the timeout, a call does not. On a busy machine the peers that could
        // be reached need a longer one.
        let mut timeout = if by_message && !suffices { Duration::from_secs(2) } else { TIMEOUT };
        let (here, reached, refused) = loop {
            let here =
                EndpointBuilder::new().connect_timeout(timeout).open(&unique("hub")).unwrap();
            let (reached, refused) = connect_with_all(&here, &names, by_message);
            let is_slow = reached.len() <= 10 || !refused.iter().all(names_the_limit);
            if !is_slow || timeout >= TIMEOUT {
                break (here, reached, refused);
            }
            timeout *= 4;
        };
        for text in &refused {
            assert!(names_the_limit(text), "{text}");
        }
        assert_eq!(refused.is_empty(), suffices, "{} were refused", refused.len());
        assert!(reached.len() > 10, "only {} were reached", reached.len());
        // Those that are connected are not affected.
        for peer in &reached {
            here.send(*peer, 2, b"still here").unwrap();
        }
        drop(here);
        let patient = EndpointBuilder::new().connect_timeout(TIMEOUT);
        let again = patient.open(&unique("hub")).unwrap();
        let peer = again.connect(&format!("{names}-{}", MANY_PEERS - 1)).unwrap();
        again.send(peer, 2, b"back").unwrap();
    }
}

/// Starts a process that connects with endpoints of this one, under limits of its descriptors.
fn run_with_many_peers(soft: u64, hard: u64) {
    let name = unique("many");
    let peers: Vec<_> =
        (0..MANY_PEERS).map(|index| Endpoint::open(&format!("{name}-{index}")).unwrap()).collect();
    let mut command = process::command("many peers");
    command
        .env("MEMFERRY_TEST_NAME", &name)
        .env("MEMFERRY_TEST_SOFT", soft.to_string())
        .env("MEMFERRY_TEST_HARD", hard.to_string());
    let mut child = Child::spawn(&mut command);
    let status = loop {
        if let Some(status) = child.ended() {
            break status;
        }
        for peer in &peers {
            peer.progress();
        }
        std::thread::sleep(Duration::from_micros(100));
    };
    assert!(status.success(), "{status}");
}

/// Opens, connects, exposes and allocates under a limit of the size of files. None of it may kill
/// the process.
fn under_a_limit_of_file_size() {
    // The parent must not have blocked the signal that would kill this process. SAFETY: sets the
    // default action of a signal.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_DFL) };
    let unlimited = limit(libc::RLIMIT_FSIZE);
    let to = |bytes| set_limit(libc::RLIMIT_FSIZE, &libc::rlimit { rlim_cur: bytes, ..unlimited });
    let names_the_limit = |text: String| {
        assert!(text.contains("file size limit") && text.contains("ulimit -f"), "{text}");
    };
    let there = EndpointBuilder::new().background(true).open(&unique("there")).unwrap();
    to(4096);
    names_the_limit(format!("{:?}", Endpoint::open(&unique("here")).unwrap_err()));
    names_the_limit(ShareableBuffer::new(8192).unwrap_err().to_string());
    assert!(ShareableBuffer::new(100).is_ok());
    to(1 << 20);
    let here = Endpoint::open(&unique("here")).unwrap();
    names_the_limit(format!("{:?}", here.connect(there.name()).unwrap_err()));
    // More than a connection, and far less than the maximum window table.
    to(2 << 20);
    let peer = here.connect(there.name()).unwrap();
    here.send(peer, 1, b"hello").unwrap();
    let mut windows = Vec::new();
    let refused = loop {
        let mut bytes = vec![0u8; 8];
        // SAFETY: the memory is kept until this process exits.
        match unsafe { here.expose_raw(bytes.as_mut_ptr(), 8, Rights::READ) } {
            Ok(window) => windows.push((window, bytes)),
            Err(error) => break error,
        }
    };
    names_the_limit(format!("{refused:?}"));
    to(unlimited.rlim_cur);
    let last = [9u8; 8];
    // SAFETY: the memory is kept until this process exits.
    let window = unsafe { here.expose_raw(last.as_ptr().cast_mut(), 8, Rights::READ) }.unwrap();
    // A peer that connected when the table was short finds windows that were added since.
    let back = there.connect(here.name()).unwrap();
    let remote = there.attach(back, window.handle()).unwrap();
    let mut found = [0; 8];
    remote.get(0, &mut found).unwrap();
    assert_eq!(found, [9; 8]);
}

#[test]
fn a_limit_of_the_size_of_files_is_an_error_and_ends_no_process() {
    Child::spawn(&mut process::command("limit of file size")).finish();
}

#[test]
fn a_caller_hears_of_the_descriptors_that_the_acceptor_lacks() {
    for free in ["1", "2"] {
        let name = unique("scarce");
        let mut command = process::command("few descriptors to listen");
        command.env("MEMFERRY_TEST_NAME", &name).env("MEMFERRY_TEST_FREE", free);
        let mut child = Child::spawn(command.stderr(Stdio::piped()));
        let mut line = String::new();
        let mut reports = BufReader::new(child.take_errors());
        reports.read_line(&mut line).unwrap();
        assert_eq!(line, "scarce\n");
        let here = Endpoint::open(&unique("here")).unwrap();
        let text = here.connect(&name).unwrap_err().to_string();
        child.kill();
        assert!(text.contains("open descriptors") && text.contains("ulimit -n"), "{free}: {text}");
    }
}

#[test]
fn a_connect_without_descriptors_fails_for_that_and_the_next_one_works() {
    Child::spawn(&mut process::command("few descriptors to connect")).finish();
}

#[test]
fn an_attach_without_descriptors_fails_and_the_next_one_reaches_the_right_window() {
    Child::spawn(&mut process::command("few descriptors to attach")).finish();
}

#[test]
fn a_process_with_more_peers_than_descriptors_is_told_the_limit_and_keeps_those_that_it_has() {
    run_with_many_peers(64, 64);
}

#[test]
fn a_low_soft_limit_of_descriptors_limits_no_connections() {
    run_with_many_peers(64, 4096);
}

#[test]
fn other_processes_begin_here() {
    match process::role().as_deref() {
        Some("few descriptors to attach") => attach_with_few_descriptors(),
        Some("few descriptors to listen") => listen_with_few_descriptors(),
        Some("few descriptors to connect") => connect_with_few_descriptors(),
        Some("many peers") => connect_with_many_peers(),
        Some("limit of file size") => under_a_limit_of_file_size(),
        _ => {}
    }
}
