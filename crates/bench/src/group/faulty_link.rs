//! Link between two threads that can corrupt a message, for tests of code that verifies messages.

use std::sync::mpsc::{Receiver, Sender, channel};

use crate::message::messages::Link;

/// One end of the link. It corrupts the last byte of one message, counted from 0.
pub(crate) struct FaultyLink {
    to: Sender<Vec<u8>>,
    from: Receiver<Vec<u8>>,
    sent: usize,
    pub(crate) corrupt_message: Option<usize>,
}

/// Returns two ends that corrupt nothing yet.
pub(crate) fn ends() -> (FaultyLink, FaultyLink) {
    let ((to_second, from_first), (to_first, from_second)) = (channel(), channel());
    let end = |to, from| FaultyLink { to, from, sent: 0, corrupt_message: None };
    (end(to_second, from_second), end(to_first, from_first))
}

/// Runs `role` at both ends, the second in a thread of its own; returns what the first measured. One
/// end corrupts the message with this number, the first end if `by_first`.
pub(crate) fn run_pair<T>(
    corrupt_message: Option<usize>,
    by_first: bool,
    role: impl Fn(&mut FaultyLink, bool) -> anyhow::Result<T> + Sync,
) -> anyhow::Result<T> {
    let (mut first, mut second) = ends();
    if by_first { &mut first } else { &mut second }.corrupt_message = corrupt_message;
    std::thread::scope(|scope| {
        scope.spawn(|| drop(role(&mut second, false)));
        let outcome = role(&mut first, true);
        // The second end may still wait for the first.
        drop(first);
        outcome
    })
}

impl Link for FaultyLink {
    fn send(&mut self, message: &[u8]) -> anyhow::Result<()> {
        let mut copy = message.to_vec();
        if let (true, Some(last)) = (self.corrupt_message == Some(self.sent), copy.last_mut()) {
            *last ^= 1;
        }
        self.sent += 1;
        Ok(self.to.send(copy)?)
    }

    fn receive(&mut self, message: &mut [u8]) -> anyhow::Result<()> {
        message.copy_from_slice(&self.from.recv()?);
        Ok(())
    }
}
