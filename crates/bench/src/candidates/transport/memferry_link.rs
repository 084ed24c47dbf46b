//! Memferry's link, whose two processes read and write in order.

use anyhow::ensure;
use memferry::message::{self, Error, Listener};

use super::{Connect, Link, PeerSocket};

/// Tag of the messages of a link.
const TAG: u64 = 0;

pub(crate) struct MemferryLink(message::Link);

impl Connect for MemferryLink {
    fn connect(meeting: PeerSocket) -> anyhow::Result<Self> {
        if meeting.is_first() {
            let listener = Listener::bind(meeting.name())?;
            meeting.send(&[0], &[])?;
            return Ok(Self(listener.accept()?));
        }
        let [] = meeting.receive(&mut [0])?;
        Ok(Self(message::Link::connect(meeting.name())?))
    }
}

impl Link for MemferryLink {
    fn send(&mut self, message: &[u8]) -> anyhow::Result<()> {
        Ok(self.0.write(message)?)
    }

    fn receive(&mut self, message: &mut [u8]) -> anyhow::Result<()> {
        let expected = message.len() as u64;
        let length = self.0.read(message)?;
        ensure!(length == expected, "a message of {length} bytes arrived");
        Ok(())
    }

    /// Starts all writes before it waits for the first.
    fn send_repeated(&mut self, message: &[u8], times: usize) -> anyhow::Result<()> {
        let (link, peer) = (&self.0, self.0.peer());
        link.scope(|scope| {
            let mut writes = Vec::with_capacity(times);
            for _ in 0..times {
                writes.push(scope.isend(peer, TAG, message)?);
            }
            writes.iter_mut().try_for_each(|write| write.wait().map(drop))
        })
        .map_err(|error: Error| error.into())
    }
}
