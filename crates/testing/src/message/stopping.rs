//! Processes that a test stops, above all one that stops during a chunk of a message.

use std::io::{Read, Write};
use std::process::Stdio;
use std::time::Duration;

use memferry_message::ring::claims::SenderProgress;
use memferry_message::{Endpoint, Source, TAG_ALL};
use memferry_sys::cross_memory::{self, IoVec};

use super::process::{self, Child, setting};
use super::raw_peer::{RawPeer, first, kind};
use super::{TIMEOUT, until};

/// The length of the message of a claimer.
pub const BYTES: usize = 16 << 20;

/// Announces a message, claims a chunk of it, and stops before the copy. When it continues, it
/// writes the chunk and reports it.
pub fn claimer() {
    let source = vec![7u8; BYTES];
    let mut raw = RawPeer::connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
    raw.write(&[first(kind::REACH, 3, 0), 0, 0, 0, 0, 0, 0, 0]);
    let address = source.as_ptr() as u64;
    raw.write(&[first(kind::REQUEST, 0, 0), 1, BYTES as u64, 5, address, 0, 0, 0]);
    let mut accept = None;
    until("it is accepted", || {
        let words = raw.peek();
        if words.is_some() {
            raw.consumer.advance();
        }
        accept = words.filter(|words| words[0] >> 32 & 0xFF == u64::from(kind::ACCEPT));
        accept.is_some()
    });
    let words = accept.unwrap();
    let (record, generation) = ((words[6] >> 32) as u16, (words[6] >> 48) as u16);
    let (chunk_bytes, target) = (words[6] & 0xFFFF_FFFF, words[4]);
    let chunks = (BYTES as u64).div_ceil(chunk_bytes);
    let chunk = raw.memory.claims(false, record.into()).claim_back(generation, chunks);
    let Some(chunk) = chunk.unwrap() else {
        // The receiver was faster.
        return send_to_test(b"m");
    };
    let at = chunk * chunk_bytes;
    if setting("MEMFERRY_TEST_MISBEHAVES") == "1" {
        raw.write(&[first(99, 0, 0), 0, 0, 0, 0, 0, 0, 0]);
    }
    send_to_test(b"c");
    // SAFETY: stops this process, until the test continues it.
    unsafe { libc::raise(libc::SIGSTOP) };
    let length = (BYTES as u64 - at).min(chunk_bytes) as usize;
    let theirs = [IoVec { address: (target + at) as usize, length }];
    let ours = [IoVec { address: source.as_ptr() as usize + at as usize, length }];
    // SAFETY: the receiver has sent the target, and the chunk is claimed.
    let written =
        unsafe { cross_memory::write(std::os::unix::process::parent_id(), &theirs, &ours) };
    let record = raw.memory.claims(false, record.into());
    record.publish(generation, SenderProgress { chunks: 1, returned: None });
    send_to_test(if written.is_ok() { b"w" } else { b"x" });
    std::thread::sleep(TIMEOUT);
}

/// Sends bytes to the test that started this process.
pub fn send_to_test(word: &[u8]) {
    std::io::stderr().write_all(word).unwrap();
}

/// A process that reports on its standard error.
pub struct StoppedPeer {
    /// The process.
    pub child: Child,
    output: std::process::ChildStderr,
}

impl StoppedPeer {
    /// Starts a process in a role.
    #[track_caller]
    pub fn spawn(role: &str, name: &str, misbehaves: bool) -> Self {
        let mut command = process::command(role);
        command
            .env("MEMFERRY_TEST_NAME", name)
            .env("MEMFERRY_TEST_MISBEHAVES", u8::from(misbehaves).to_string())
            .stderr(Stdio::piped());
        let mut child = Child::spawn(&mut command);
        let output = child.take_errors();
        Self { child, output }
    }

    /// Waits for its next report.
    pub fn hear(&mut self) -> u8 {
        let mut word = [0];
        self.output.read_exact(&mut word).expect("the other process reports");
        word[0]
    }

    /// Sends a signal to the process.
    pub fn signal(&self, signal: i32) {
        // SAFETY: a signal to a child of this test.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Waits until it is stopped.
    pub fn await_stop(&self) {
        until("it is stopped", || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
        });
    }

    /// Waits until a claimer has claimed a chunk and is stopped there; returns `false` if none was
    /// left.
    pub fn has_claimed(&mut self) -> bool {
        match self.hear() {
            b'c' => self.await_stop(),
            word => {
                assert_eq!(word, b'm');
                return false;
            }
        }
        true
    }

    /// The same for a receive of an endpoint without other calls. A call that posts a receive
    /// processes control messages, and copies nothing: chunks are left.
    pub fn await_claim(&mut self, owner: &Endpoint) {
        std::thread::scope(|scope| {
            let claiming = scope.spawn(|| self.has_claimed());
            let mut others = Vec::new();
            until("a chunk is claimed", || {
                // Accepts connections, and nothing else.
                owner.peers();
                others.push(owner.irecv(Source::Any, 2, TAG_ALL, vec![0u8; 8]).unwrap());
                std::thread::sleep(Duration::from_millis(1));
                claiming.is_finished()
            });
            others.iter_mut().for_each(|other| other.operation().cancel());
            assert!(claiming.join().unwrap(), "a chunk was left");
        });
    }
}
