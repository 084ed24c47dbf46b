//! Memory whose pages do not come: behind a userfaultfd that nobody answers, as they would be in a file
//! of a dead server. And the processes whose memory it is.

use std::io::{Read, Write};
use std::process::{ChildStderr, ChildStdin, Stdio};

use memferry_message::Endpoint;
use memferry_sys::Pages;
use memferry_testing::{Requirement, skip};

use super::process::{self, Child};
use super::until;

/// Memory whose pages come when the owner says so.
pub(crate) struct Absent {
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
    /// `None` where memory cannot be kept from coming.
    pub(crate) fn new(bytes: usize) -> Option<Self> {
        const API: u64 = 0xAA;
        const API_CALL: u64 = 0xC018_AA3F;
        const REGISTER_CALL: u64 = 0xC020_AA00;
        const MISSING: u64 = 1;
        let pages = Pages::new(bytes).unwrap();
        // SAFETY: makes a descriptor.
        let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) } as i32;
        let mut api = Api { api: API, features: 0, calls: 0 };
        let start = pages.as_ptr() as u64;
        let mut register = Register { start, length: bytes as u64, mode: MISSING, calls: 0 };
        // SAFETY: both structures are what the calls expect; the pages are this function's.
        let done = unsafe {
            libc::ioctl(descriptor, API_CALL, &raw mut api) == 0
                && libc::ioctl(descriptor, REGISTER_CALL, &raw mut register) == 0
        };
        (descriptor >= 0 && done).then_some(Self { pages, descriptor })
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.pages.as_ptr()
    }

    /// Brings all pages, as zeroes.
    pub(crate) fn bring(&self) {
        const ZERO_CALL: u64 = 0xC020_AA04;
        let (start, length) = (self.address() as u64, self.pages.len() as u64);
        let mut zero = Register { start, length, mode: 0, calls: 0 };
        // SAFETY: the structure has the shape that the call expects; the pages are this value's.
        let done = unsafe { libc::ioctl(self.descriptor, ZERO_CALL, &raw mut zero) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    }

    /// Takes away pages that have come.
    pub(crate) fn take_away(&self) {
        // SAFETY: the pages are this value's; nobody reads them before they have come again.
        let done =
            unsafe { libc::madvise(self.address().cast(), self.pages.len(), libc::MADV_DONTNEED) };
        assert_eq!(done, 0);
    }

    /// From now on the pages come, as zeroes: nobody intercepts them any more.
    pub(crate) fn let_come(&self) {
        // SAFETY: the descriptor is this value's, and is closed once.
        unsafe { libc::close(self.descriptor) };
    }
}

/// Sends a byte to the test, from another process of it.
pub(crate) fn report(word: u8) {
    std::io::stderr().write_all(&[word]).unwrap();
}

/// Waits for the next byte from the test, or for its end.
pub(crate) fn await_word() {
    let _ = std::io::stdin().read_exact(&mut [0]);
}

/// Another process of the test, which is connected to it by pipes.
pub(crate) struct Role {
    pub(crate) child: Child,
    input: ChildStdin,
    output: ChildStderr,
}

impl Role {
    pub(crate) fn spawn(role: &str, name: &str) -> Self {
        let mut command = process::command(role);
        command.env("MEMFERRY_TEST_NAME", name).stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Child::spawn(&mut command);
        let (input, output) = (child.take_input(), child.take_errors());
        Self { child, input, output }
    }

    /// Spawns a process that connects to an endpoint, and waits for its first byte: `a` when it is
    /// ready, `s` where memory cannot be kept from coming. Then this is `None`.
    pub(crate) fn begin(role: &str, endpoint: &Endpoint) -> Option<Self> {
        let mut child = Self::spawn(role, endpoint.name());
        let word = std::thread::scope(|scope| {
            let hearing = scope.spawn(|| child.hear());
            until("the other process is ready", || {
                endpoint.progress();
                hearing.is_finished()
            });
            hearing.join().unwrap()
        });
        child.is_ready(word).then_some(child)
    }

    /// Whether the first byte of a process says that it is ready.
    pub(crate) fn is_ready(&self, word: u8) -> bool {
        if word == b's' {
            skip(Requirement::Userfaultfd, "memory cannot be kept from coming");
            return false;
        }
        assert_eq!(word, b'a');
        true
    }

    pub(crate) fn hear(&mut self) -> u8 {
        let mut word = [0];
        self.output.read_exact(&mut word).unwrap();
        word[0]
    }

    pub(crate) fn tell(&mut self) {
        self.input.write_all(b".").unwrap();
    }
}

/// How many threads of this process read memory of other processes, and have to wait for it.
pub(crate) fn readers() -> usize {
    let call = format!("{} ", libc::SYS_process_vm_readv);
    let calls = tasks().map(|task| std::fs::read_to_string(task.join("syscall")));
    // It says what a thread does that sleeps, and nothing of one that runs.
    calls.filter(|found| found.as_ref().is_ok_and(|found| found.starts_with(&call))).count()
}

/// How many threads of this process have a name that begins so.
pub(crate) fn threads_named(name: &str) -> usize {
    let names = tasks().map(|task| std::fs::read_to_string(task.join("comm")));
    names.filter(|found| found.as_ref().is_ok_and(|found| found.starts_with(name))).count()
}

fn tasks() -> impl Iterator<Item = std::path::PathBuf> {
    std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path())
}
