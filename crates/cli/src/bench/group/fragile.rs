//! A link between two threads that can break a message, for tests of those who check messages.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::messages::Link;

/// Breaks the last byte of one message, counted from 0.
pub(super) struct Fragile {
    to: Sender<Vec<u8>>,
    from: Receiver<Vec<u8>>,
    sent: usize,
    pub(super) breaks: Option<usize>,
}

/// Two ends, neither of which breaks anything yet.
pub(super) fn ends() -> (Fragile, Fragile) {
    let ((to_second, from_first), (to_first, from_second)) = (channel(), channel());
    let end = |to, from| Fragile { to, from, sent: 0, breaks: None };
    (end(to_second, from_second), end(to_first, from_first))
}

impl Link for Fragile {
    fn send(&mut self, message: &[u8]) -> anyhow::Result<()> {
        let mut copy = message.to_vec();
        if let (true, Some(last)) = (self.breaks == Some(self.sent), copy.last_mut()) {
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
