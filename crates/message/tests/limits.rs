//! Processes that run out of what the system grants: descriptors, the size of files. A call that
//! fails changes nothing, says what ran out, and works when it is there again.

mod support;

use std::fs::File;

use memferry_message::{Builder, Rights};
use support::process::{self, Child};
use support::pair;

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

#[test]
fn an_attach_without_descriptors_fails_and_the_next_one_reaches_the_right_window() {
    Child::spawn(&mut process::command("few descriptors to attach")).finish();
}

#[test]
fn other_processes_begin_here() {
    match process::role().as_deref() {
        Some("few descriptors to attach") => attach_with_few_descriptors(),
        _ => {}
    }
}
