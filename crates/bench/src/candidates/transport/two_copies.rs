//! Two copies through shared memory: the sender copies a message in, fragment by fragment, and the
//! receiver copies the fragments out. It needs no permission, and message libraries do this with
//! small messages.

use anyhow::ensure;

use super::shared_ring::{RingShape, Rings};
use super::{Connect, Link, PeerSocket};

/// Large enough that the cost per fragment is negligible, while the ring stays in the caches.
const MAX_FRAGMENT: usize = 64 << 10;
const MIN_FRAGMENT: usize = 16 << 10;
const SHAPE: RingShape = RingShape { slots: 8, payload_bytes: MAX_FRAGMENT };

/// Fragment size for a message: a part of it, so that sender and receiver copy at the same time.
fn fragment_bytes(message_bytes: usize) -> usize {
    (message_bytes / 4).clamp(MIN_FRAGMENT, MAX_FRAGMENT)
}

pub(crate) struct TwoCopies(Rings);

impl Connect for TwoCopies {
    fn connect(meeting: PeerSocket) -> anyhow::Result<Self> {
        Rings::connect(meeting, SHAPE).map(Self)
    }
}

impl Link for TwoCopies {
    fn send(&mut self, message: &[u8]) -> anyhow::Result<()> {
        let outgoing = &mut self.0.writer;
        let most = fragment_bytes(message.len());
        let mut rest = message;
        // An empty message is one empty fragment.
        loop {
            let (fragment, behind) = rest.split_at(rest.len().min(most));
            let payload = outgoing.claim()?;
            // SAFETY: this side owns the payload of a claimed slot, and it has space for a
            // fragment.
            unsafe { payload.copy_from_nonoverlapping(fragment.as_ptr(), fragment.len()) };
            outgoing.publish([fragment.len() as u64, 0]);
            rest = behind;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    fn receive(&mut self, message: &mut [u8]) -> anyhow::Result<()> {
        let incoming = &mut self.0.reader;
        let most = fragment_bytes(message.len());
        let mut rest = message;
        loop {
            let (fragment, behind) = rest.split_at_mut(rest.len().min(most));
            let ([length, _], payload) = incoming.next()?;
            ensure!(length == fragment.len() as u64, "a fragment of {length} bytes arrived");
            // SAFETY: the payload of a received slot holds `length` bytes until it is released.
            unsafe { payload.copy_to_nonoverlapping(fragment.as_mut_ptr(), fragment.len()) };
            incoming.release();
            rest = behind;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }
}
