//! Processes that a test stops, above all one that stops in the middle of a chunk of a message.

use std::io::{Read, Write};
use std::process::Stdio;
use std::time::Duration;

use memferry_message::ring::record::Finished;
use memferry_message::{Endpoint, Source, TAG_ALL};
use memferry_sys::cross_memory::{self, Stretch};

use super::process::{self, Child, setting};
use super::raw_peer::{RawPeer, first, kind};
use super::{PATIENCE, until};

/// How long the message of a claimer is.
pub(crate) const BYTES: usize = 16 << 20;

/// Announces a message, claims a chunk of it, and stops as if it were about to copy. When it goes on,
/// it writes the chunk and says so.
pub(crate) fn claimer() {
    let source = vec![7u8; BYTES];
    let mut raw = RawPeer::connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
    raw.write(&[first(kind::REACH, 3, 0), 0, 0, 0, 0, 0, 0, 0]);
    let address = source.as_ptr() as u64;
    raw.write(&[first(kind::REQUEST, 0, 0), 1, BYTES as u64, 5, address, 0, 0, 0]);
    let mut accept = None;
    until("it is accepted", || {
        let words = raw.consumer.peek();
        if words.is_some() {
            raw.consumer.pass();
        }
        accept = words.filter(|words| words[0] >> 32 & 0xFF == u64::from(kind::ACCEPT));
        accept.is_some()
    });
    let words = accept.unwrap();
    let (record, generation) = ((words[6] >> 32) as u16, (words[6] >> 48) as u16);
    let (chunk_bytes, target) = (words[6] & 0xFFFF_FFFF, words[4]);
    let chunks = (BYTES as u64).div_ceil(chunk_bytes);
    let chunk = raw.memory.record(false, record.into()).claim_back(generation, chunks);
    let Some(chunk) = chunk.unwrap() else {
        // The receiver was faster.
        return say_to_test(b"m");
    };
    let at = chunk * chunk_bytes;
    if setting("MEMFERRY_TEST_MISBEHAVES") == "1" {
        raw.write(&[first(99, 0, 0), 0, 0, 0, 0, 0, 0, 0]);
    }
    say_to_test(b"c");
    // SAFETY: stops this process, until the test lets it go on.
    unsafe { libc::raise(libc::SIGSTOP) };
    let length = (BYTES as u64 - at).min(chunk_bytes) as usize;
    let theirs = [Stretch { address: (target + at) as usize, length }];
    let ours = [Stretch { address: source.as_ptr() as usize + at as usize, length }];
    // SAFETY: the receiver has named the target, and the chunk is claimed.
    let written =
        unsafe { cross_memory::write(std::os::unix::process::parent_id(), &theirs, &ours) };
    let record = raw.memory.record(false, record.into());
    record.tell(generation, Finished { chunks: 1, returned: None });
    say_to_test(if written.is_ok() { b"w" } else { b"x" });
    std::thread::sleep(PATIENCE);
}

pub(crate) fn say_to_test(word: &[u8]) {
    std::io::stderr().write_all(word).unwrap();
}

/// A process that speaks by its standard error.
pub(crate) struct Stopping {
    pub(crate) child: Child,
    output: std::process::ChildStderr,
}

impl Stopping {
    pub(crate) fn spawn(role: &str, name: &str, misbehaves: bool) -> Self {
        let mut command = process::command(role);
        command
            .env("MEMFERRY_TEST_NAME", name)
            .env("MEMFERRY_TEST_MISBEHAVES", u8::from(misbehaves).to_string())
            .stderr(Stdio::piped());
        let mut child = Child::spawn(&mut command);
        let output = child.take_errors();
        Self { child, output }
    }

    /// Waits for its next word.
    pub(crate) fn hear(&mut self) -> u8 {
        let mut word = [0];
        self.output.read_exact(&mut word).expect("the other process says something");
        word[0]
    }

    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: a signal to a child of this test.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Waits until it is stopped.
    pub(crate) fn await_stop(&self) {
        until("it is stopped", || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
        });
    }

    /// Waits until a claimer has claimed a chunk and is stopped there; `false` if none was left.
    pub(crate) fn has_claimed(&mut self) -> bool {
        match self.hear() {
            b'c' => self.await_stop(),
            word => {
                assert_eq!(word, b'm');
                return false;
            }
        }
        true
    }

    /// The same for a receive of an endpoint that nobody else moves. A call that begins a receive
    /// takes in what came, and copies nothing: chunks are left.
    pub(crate) fn await_claim(&mut self, owner: &Endpoint) {
        std::thread::scope(|scope| {
            let claiming = scope.spawn(|| self.has_claimed());
            let mut others = Vec::new();
            until("a chunk is claimed", || {
                // Takes callers, and nothing else.
                owner.peers();
                others.push(owner.irecv(Source::Any, 2, TAG_ALL, vec![0; 8]).unwrap());
                std::thread::sleep(Duration::from_millis(1));
                claiming.is_finished()
            });
            others.iter_mut().for_each(|other| other.operation().cancel());
            assert!(claiming.join().unwrap(), "a chunk was left");
        });
    }
}
