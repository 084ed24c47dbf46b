//! Two copies through shared memory: the sender copies a message in, fragment by fragment, and the
//! receiver copies it out behind it. What works without any permission, and what message libraries
//! do with small messages.

use anyhow::ensure;

use super::shared_ring::{Rings, Shape};
use super::{Connect, Link, Meeting};

/// Large enough that hand-overs do not count, while the ring stays in the caches.
const LARGEST_FRAGMENT: usize = 64 << 10;
const SMALLEST_FRAGMENT: usize = 16 << 10;
const SHAPE: Shape = Shape { slots: 8, payload_bytes: LARGEST_FRAGMENT };

/// What is copied in one go of a message of a length: a part of it, so that the receiver copies while
/// the sender does.
fn fragment_bytes(message_bytes: usize) -> usize {
    (message_bytes / 4).clamp(SMALLEST_FRAGMENT, LARGEST_FRAGMENT)
}

pub(in crate::bench::group) struct TwoCopies(Rings);

impl Connect for TwoCopies {
    fn connect(meeting: Meeting) -> anyhow::Result<Self> {
        Rings::connect(meeting, SHAPE).map(Self)
    }
}

impl Link for TwoCopies {
    fn send(&mut self, message: &[u8]) -> anyhow::Result<()> {
        let outgoing = &mut self.0.outgoing;
        let most = fragment_bytes(message.len());
        let mut rest = message;
        // An empty message is a fragment too.
        loop {
            let (fragment, behind) = rest.split_at(rest.len().min(most));
            let payload = outgoing.claim()?;
            // SAFETY: the payload of a claimed slot is this side's and has room for a fragment.
            unsafe { payload.copy_from_nonoverlapping(fragment.as_ptr(), fragment.len()) };
            outgoing.publish([fragment.len() as u64, 0]);
            rest = behind;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    fn receive(&mut self, message: &mut [u8]) -> anyhow::Result<()> {
        let incoming = &mut self.0.incoming;
        let most = fragment_bytes(message.len());
        let mut rest = message;
        loop {
            let (fragment, behind) = rest.split_at_mut(rest.len().min(most));
            let ([length, _], payload) = incoming.next()?;
            ensure!(length == fragment.len() as u64, "a fragment of {length} bytes arrived");
            // SAFETY: the payload of a slot that came holds `length` bytes until it is given back.
            unsafe { payload.copy_to_nonoverlapping(fragment.as_mut_ptr(), fragment.len()) };
            incoming.give_back();
            rest = behind;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }
}
