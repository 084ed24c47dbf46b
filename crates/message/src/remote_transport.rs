//! The transport of messages to peers on other hosts.
//!
//! An endpoint matches messages of all peers in one queue. A remote transport, which is set when
//! the endpoint is opened, delivers those of other hosts: short messages arrive complete; long ones
//! are announced, and fetched when a receive has matched them. A transport never blocks, and only
//! one thread at a time calls it.

use std::fmt::Debug;
use std::os::fd::BorrowedFd;

use crate::envelope::Envelope;
use crate::error::{DisconnectReason, Error};
use crate::segments::Segment;

/// A transport of messages to and from peers on other hosts. It identifies peers by numbers of its
/// own.
pub trait RemoteTransport: Send + Debug {
    /// Sends a message to a peer. Its memory stays valid and unchanged until [`RemoteEvent::Sent`]
    /// with this number: when the memory may be reused or, if `delivered`, when the receiver has
    /// the whole message.
    fn send(
        &mut self,
        peer: u64,
        number: u64,
        envelope: &Envelope,
        segments: &[Segment],
        delivered: bool,
    );

    /// Fetches the first `length` bytes of an announced message. The memory stays valid until
    /// [`RemoteEvent::Fetched`] with this number. The sender is notified, even if `length` is 0.
    fn fetch(&mut self, peer: u64, ticket: u64, number: u64, segments: &[Segment], length: u64);

    /// Returns the credit of a message of `bytes` bytes that had arrived complete: a receive has
    /// taken it. Called once for every such message.
    fn return_credit(&mut self, peer: u64, bytes: u64);

    /// Starts to read or write memory of a peer. The memory of this side stays valid (and
    /// unchanged, for a put) until [`RemoteEvent::RmaCompleted`] with this number: when the bytes
    /// have arrived, or will no longer be accessed. The peer validates the request.
    fn start_rma(&mut self, peer: u64, number: u64, access: &RemoteRma);

    /// Returns whether the transport wants the list of awaited peers. Called after every poll; an
    /// occasional `true` is enough.
    fn wants_awaited_peers(&mut self) -> bool {
        false
    }

    /// Sets the awaited peers: those that posted receives name as their only source, or that were
    /// probed since the last call. The transport reports [`RemoteEvent::Disconnected`] for each of
    /// them that it can no longer reach, even if it has done so before.
    fn set_awaited_peers(&mut self, _peers: &[u64]) {}

    /// Polls for events.
    fn poll(&mut self, events: &mut Vec<RemoteEvent>);

    /// A descriptor that becomes readable when there may be events. If `can_block` returns `false`,
    /// the caller must poll again at once.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// Returns whether the caller may wait for the descriptor before the next poll without missing
    /// an event.
    fn can_block(&mut self) -> bool;
}

/// An access to memory of a peer on another host.
#[derive(Debug, Clone, Copy)]
pub struct RemoteRma {
    /// The direction of the access.
    pub op: RemoteRmaOp,
    /// The owner's key of the memory.
    pub key: u64,
    /// The address of the first byte, in the owner's address space.
    pub address: u64,
    /// The memory of this side.
    pub local: Segment,
}

/// The direction of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoteRmaOp {
    /// To the peer.
    Put,
    /// From the peer.
    Get,
}

/// An event of a remote transport.
pub enum RemoteEvent {
    /// A complete message has arrived.
    Arrived {
        /// The sender.
        peer: u64,
        /// The envelope of the message.
        envelope: Envelope,
        /// The payload.
        bytes: Vec<u8>,
    },
    /// A message was announced; its payload is in the sender's memory.
    Rts {
        /// The sender.
        peer: u64,
        /// The envelope of the message.
        envelope: Envelope,
        /// The length in bytes.
        length: u64,
        /// The number by which the message is fetched.
        ticket: u64,
    },
    /// A send is complete.
    Sent {
        /// The number of the send.
        number: u64,
        /// The result.
        outcome: Result<(), Error>,
    },
    /// A fetch is complete.
    Fetched {
        /// The number of the fetch.
        number: u64,
        /// The result.
        outcome: Result<(), Error>,
    },
    /// An access is complete.
    RmaCompleted {
        /// The number of the access.
        number: u64,
        /// The result.
        outcome: Result<(), Error>,
    },
    /// Bytes were transferred, but no operation is complete: a peer accesses memory of this side,
    /// or a part of an access is done. The caller should poll again soon.
    Progress {
        /// The peer.
        peer: u64,
    },
    /// A peer is no longer reachable. All operations in flight with it fail.
    Disconnected {
        /// The peer.
        peer: u64,
        /// The cause.
        reason: DisconnectReason,
    },
}

/// Prints no payload.
impl std::fmt::Debug for RemoteEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (name, id) = match self {
            Self::Arrived { peer, bytes, .. } => {
                let mut shown = f.debug_struct("Arrived");
                return shown.field("peer", peer).field("length", &bytes.len()).finish();
            }
            Self::Rts { peer, .. } => ("Rts", peer),
            Self::Sent { number, .. } => ("Sent", number),
            Self::Fetched { number, .. } => ("Fetched", number),
            Self::RmaCompleted { number, .. } => ("RmaCompleted", number),
            Self::Progress { peer } => ("Progress", peer),
            Self::Disconnected { peer, .. } => ("Disconnected", peer),
        };
        f.debug_tuple(name).field(id).finish()
    }
}
