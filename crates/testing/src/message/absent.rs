//! Memory whose pages never become resident: behind a userfaultfd that no thread serves, as they
//! would be in a file of a failed server. And the processes that own it.

use std::io::{Read, Write};
use std::process::{ChildStderr, ChildStdin, Stdio};

use crate::{Requirement, skip};
use memferry_message::Endpoint;
use memferry_sys::Pages;

use super::process::{self, Child};
use super::until;

/// Memory whose pages become resident on command of the owner.
pub struct NonresidentMemory {
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

impl NonresidentMemory {
    /// Returns `None` where userfaultfd is not available.
    pub fn new(bytes: usize) -> Option<Self> {
        const API: u64 = 0xAA;
        const API_CALL: u64 = 0xC018_AA3F;
        const REGISTER_CALL: u64 = 0xC020_AA00;
        const MISSING: u64 = 1;
        let pages = Pages::new(bytes).unwrap();
        // SAFETY: creates a descriptor.
        let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) } as i32;
        let mut api = Api { api: API, features: 0, calls: 0 };
        let start = pages.as_ptr() as u64;
        let mut register = Register { start, length: bytes as u64, mode: MISSING, calls: 0 };
        // SAFETY: both structures have the layout of the calls; the function owns the pages.
        let done = unsafe {
            libc::ioctl(descriptor, API_CALL, &raw mut api) == 0
                && libc::ioctl(descriptor, REGISTER_CALL, &raw mut register) == 0
        };
        (descriptor >= 0 && done).then_some(Self { pages, descriptor })
    }

    /// Where it begins.
    pub fn address(&self) -> *mut u8 {
        self.pages.as_ptr()
    }

    /// Makes all pages resident, as zeroes.
    pub fn bring(&self) {
        const ZERO_CALL: u64 = 0xC020_AA04;
        let (start, length) = (self.address() as u64, self.pages.len() as u64);
        let mut zero = Register { start, length, mode: 0, calls: 0 };
        // SAFETY: the structure has the layout of the call; this value owns the pages.
        let done = unsafe { libc::ioctl(self.descriptor, ZERO_CALL, &raw mut zero) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    }

    /// Discards resident pages.
    pub fn take_away(&self) {
        // SAFETY: this value owns the pages; no thread reads them before they are resident again.
        let done =
            unsafe { libc::madvise(self.address().cast(), self.pages.len(), libc::MADV_DONTNEED) };
        assert_eq!(done, 0);
    }

    /// Makes all pages resident on access, as zeroes, from now on: faults are no longer
    /// intercepted.
    pub fn stop_intercepting(&self) {
        // SAFETY: this value owns the descriptor, and closes it once.
        unsafe { libc::close(self.descriptor) };
    }
}

/// Sends a byte to the test, from another process of it.
pub fn report(word: u8) {
    std::io::stderr().write_all(&[word]).unwrap();
}

/// Waits for the next byte from the test, or for its exit.
pub fn wait_for_byte() {
    let _ = std::io::stdin().read_exact(&mut [0]);
}

/// Another process of the test, which is connected to it by pipes.
pub struct Role {
    /// The process.
    pub child: Child,
    input: ChildStdin,
    output: ChildStderr,
}

impl Role {
    /// Starts a process in a role.
    #[track_caller]
    pub fn spawn(role: &str, name: &str) -> Self {
        let mut command = process::command(role);
        command.env("MEMFERRY_TEST_NAME", name).stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Child::spawn(&mut command);
        let (input, output) = (child.take_input(), child.take_errors());
        Self { child, input, output }
    }

    /// Spawns a process that connects to an endpoint, and waits for its first byte: `a` when it is
    /// ready, `s` where userfaultfd is not available. Then this is `None`.
    #[track_caller]
    pub fn begin(role: &str, endpoint: &Endpoint) -> Option<Self> {
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

    /// Returns whether the first byte of a process reports that it is ready.
    pub fn is_ready(&self, word: u8) -> bool {
        if word == b's' {
            skip(Requirement::Userfaultfd, "memory cannot be kept from coming");
            return false;
        }
        assert_eq!(word, b'a');
        true
    }

    /// Waits for the next byte of the process.
    pub fn hear(&mut self) -> u8 {
        let mut word = [0];
        self.output.read_exact(&mut word).unwrap();
        word[0]
    }

    /// Lets the process continue.
    pub fn tell(&mut self) {
        self.input.write_all(b".").unwrap();
    }
}

/// The number of threads of this process that are blocked on memory of other processes.
pub fn readers() -> usize {
    let call = format!("{} ", libc::SYS_process_vm_readv);
    let calls = tasks().map(|task| std::fs::read_to_string(task.join("syscall")));
    // The file describes a sleeping thread, and says nothing of a running one.
    calls.filter(|found| found.as_ref().is_ok_and(|found| found.starts_with(&call))).count()
}

/// The number of threads of this process whose name has this prefix.
pub fn threads_named(name: &str) -> usize {
    let names = tasks().map(|task| std::fs::read_to_string(task.join("comm")));
    names.filter(|found| found.as_ref().is_ok_and(|found| found.starts_with(name))).count()
}

fn tasks() -> impl Iterator<Item = std::path::PathBuf> {
    std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path())
}
