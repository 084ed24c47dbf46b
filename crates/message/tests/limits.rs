//! Processes that run out of what the system grants: descriptors, the size of files. A call that
//! fails changes nothing, says what ran out, and works when it is there again.

mod support;

use std::fs::File;
use std::time::Duration;

use memferry_message::{Builder, ConnectError, Endpoint, Error, Rights, ShareableBuffer};
use support::process::{self, Child, setting};
use support::{pair, unique, until};

/// Descriptors that a process holds while this lives, so that only so many more can be made.
struct Scarce {
    held: Vec<File>,
    before: libc::rlimit,
}

fn limit(kind: libc::__rlimit_resource_t) -> libc::rlimit {
    let mut found = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes to a local variable.
    assert_eq!(unsafe { libc::getrlimit(kind, &mut found) }, 0);
    found
}

fn set_limit(kind: libc::__rlimit_resource_t, limit: &libc::rlimit) {
    // SAFETY: reads a local variable, and changes what this process may have.
    assert_eq!(unsafe { libc::setrlimit(kind, limit) }, 0);
}

impl Scarce {
    /// From now on this process can make `free` descriptors more.
    fn leave(free: usize) -> Self {
        let before = limit(libc::RLIMIT_NOFILE);
        let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        set_limit(libc::RLIMIT_NOFILE, &libc::rlimit { rlim_cur: open + 32, ..before });
        let mut held = Vec::new();
        while let Ok(file) = File::open("/dev/null") {
            held.push(file);
        }
        assert!(held.len() >= free);
        held.truncate(held.len() - free);
        Self { held, before }
    }
}

impl Drop for Scarce {
    fn drop(&mut self) {
        self.held.clear();
        set_limit(libc::RLIMIT_NOFILE, &self.before);
    }
}

/// Attaches windows with ever so many descriptors free. A process of its own, because of the limit.
fn attach_with_few_descriptors() {
    const BYTES: usize = 4096;
    for free in 0..12 {
        let both = pair(&Builder::new());
        // Both lists have a window at the same place. Nothing may come to that of the visitor.
        let mine = both.here.expose(vec![0u8; BYTES], Rights::READ_WRITE).unwrap();
        let theirs = both.there.expose(vec![0u8; BYTES], Rights::READ_WRITE).unwrap();
        let scarce = Scarce::leave(free);
        let first = both.here.attach(both.to_there, theirs.handle());
        drop(scarce);
        if let Err(error) = &first {
            assert!(error.to_string().contains("open files"), "{free} free: {error}");
        }
        drop(first);
        let remote = both.here.attach(both.to_there, theirs.handle()).unwrap();
        remote.put(0, &[7u8; BYTES]).unwrap();
        assert!(mine.withdraw().unwrap().iter().all(|byte| *byte == 0), "{free} free");
        drop(remote);
        assert!(theirs.withdraw().unwrap().iter().all(|byte| *byte == 7), "{free} free");
    }
}

/// Answers callers with so many descriptors free, until it is killed.
fn listen_with_few_descriptors() {
    let endpoint = Endpoint::open(&setting("MEMFERRY_TEST_NAME")).unwrap();
    let _scarce = Scarce::leave(setting("MEMFERRY_TEST_FREE").parse().unwrap());
    loop {
        endpoint.progress_timeout(Duration::from_millis(50));
    }
}

/// Connects with so many descriptors free.
fn connect_with_few_descriptors() {
    let there = Builder::new().background(true).open(&unique("there")).unwrap();
    let mut connected = 0;
    for free in 0..12 {
        let here = Endpoint::open(&unique("here")).unwrap();
        let scarce = Scarce::leave(free);
        let first = here.connect(there.name());
        drop(scarce);
        match first {
            Ok(_) => connected += 1,
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("open files") || text.contains("descriptors"), "{error}");
            }
        }
        let peer = here.connect(there.name()).unwrap();
        here.send(peer, 1, b"hello").unwrap();
    }
    assert!(connected > 0, "twelve descriptors suffice");
}

/// Opens, connects, exposes and allocates under a limit of the size of files. None of it may end
/// the process.
fn under_a_limit_of_file_size() {
    // One that would end this process must not be caught by whoever started it.
    // SAFETY: sets what a signal does to what it does anyway.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_DFL) };
    let unlimited = limit(libc::RLIMIT_FSIZE);
    let to = |bytes| set_limit(libc::RLIMIT_FSIZE, &libc::rlimit { rlim_cur: bytes, ..unlimited });
    let names_the_limit = |text: String| {
        assert!(text.contains("size of files") && text.contains("ulimit -f"), "{text}");
    };
    let there = Builder::new().background(true).open(&unique("there")).unwrap();
    to(4096);
    names_the_limit(Endpoint::open(&unique("here")).unwrap_err().to_string());
    names_the_limit(ShareableBuffer::new(8192).unwrap_err().to_string());
    assert!(ShareableBuffer::new(100).is_ok());
    to(1 << 20);
    let here = Endpoint::open(&unique("here")).unwrap();
    names_the_limit(here.connect(there.name()).unwrap_err().to_string());
    // More than a connection, and far less than the list of windows may become.
    to(2 << 20);
    let peer = here.connect(there.name()).unwrap();
    here.send(peer, 1, b"hello").unwrap();
    let mut windows = Vec::new();
    let refused = loop {
        let mut bytes = vec![0u8; 8];
        // SAFETY: the memory is kept until this process ends.
        match unsafe { here.expose_raw(bytes.as_mut_ptr(), 8, Rights::READ) } {
            Ok(window) => windows.push((window, bytes)),
            Err(error) => break error,
        }
    };
    names_the_limit(refused.to_string());
    to(unlimited.rlim_cur);
    let last = [9u8; 8];
    // SAFETY: the memory is kept until this process ends.
    let window = unsafe { here.expose_raw(last.as_ptr().cast_mut(), 8, Rights::READ) }.unwrap();
    // A peer that connected when the list was short finds what was added since.
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
        let mut child = Child::spawn(&mut command);
        let here = Endpoint::open(&unique("here")).unwrap();
        let mut error = None;
        until("it answers", || {
            error = here.connect(&name).err();
            !matches!(error, Some(Error::Connect(ConnectError::NobodyListens(_))))
        });
        child.kill();
        let text = error.expect("there is no room for a connection").to_string();
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
fn other_processes_begin_here() {
    match process::role().as_deref() {
        Some("few descriptors to attach") => attach_with_few_descriptors(),
        Some("few descriptors to listen") => listen_with_few_descriptors(),
        Some("few descriptors to connect") => connect_with_few_descriptors(),
        Some("limit of file size") => under_a_limit_of_file_size(),
        _ => {}
    }
}
