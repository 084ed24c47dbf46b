//! Ours: a link, whose two processes read and write in order.

use anyhow::ensure;
use memferry::message::{self, Error, Listener};

use super::{Connect, Link, Meeting};

/// The tag that the messages of a link have.
const TAG: u64 = 0;

pub(in crate::bench::group) struct OurLink(message::Link);

impl Connect for OurLink {
    fn connect(meeting: Meeting) -> anyhow::Result<Self> {
        if meeting.is_first() {
            let listener = Listener::bind(meeting.name())?;
            meeting.give(&[0], &[])?;
            return Ok(Self(listener.accept()?));
        }
        let [] = meeting.take(&mut [0])?;
        Ok(Self(message::Link::connect(meeting.name())?))
    }
}

impl Link for OurLink {
    fn send(&mut self, message: &[u8]) -> anyhow::Result<()> {
        Ok(self.0.write(message)?)
    }

    fn receive(&mut self, message: &mut [u8]) -> anyhow::Result<()> {
        let expected = message.len() as u64;
        let length = self.0.read(message)?;
        ensure!(length == expected, "a message of {length} bytes arrived");
        Ok(())
    }

    /// All writes begin before the first is waited for.
    fn send_often(&mut self, message: &[u8], times: usize) -> anyhow::Result<()> {
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
