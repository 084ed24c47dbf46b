//! Peers on other hosts: whoever can carry messages there.
//!
//! An endpoint matches messages from everywhere in one list. Those of other hosts are brought by a
//! carrier, which an endpoint is given when it is opened: small ones arrive whole, longer ones are
//! announced and fetched when a receive has met them. A carrier never waits, and is only ever called
//! by one thread at a time.

use std::fmt::Debug;
use std::os::fd::BorrowedFd;

use crate::envelope::Envelope;
use crate::error::{Error, Gone};
use crate::pieces::Piece;

/// Carries messages to and from peers on other hosts, which it names by numbers of its own.
pub trait Carrier: Send + Debug {
    /// Takes a message for a peer. Its memory stays valid and unchanged until
    /// [`CarrierEvent::Sent`] says the number: when it may be used again or, if `delivered`, when
    /// the receiver has all of it.
    fn send(
        &mut self,
        peer: u64,
        number: u64,
        envelope: &Envelope,
        pieces: &[Piece],
        delivered: bool,
    );

    /// Fetches the first `length` bytes of an announced message. The memory stays valid until
    /// [`CarrierEvent::Fetched`] says the number. The sender is told, whatever the length.
    fn fetch(&mut self, peer: u64, ticket: u64, number: u64, pieces: &[Piece], length: u64);

    /// A message that had arrived whole, of so many bytes (or none), was taken by a receive: there is
    /// room for another. Called once for every such message.
    fn taken(&mut self, peer: u64, bytes: u64);

    /// Begins to read or write memory of a peer's. The memory of this side stays valid (unchanged,
    /// for a put) until [`CarrierEvent::Accessed`] says the number: when the bytes are where they
    /// belong, or nobody moves them any more. The peer checks what it is asked for.
    fn access(&mut self, peer: u64, number: u64, access: &CarriedAccess);

    /// Whether it wants to be told from whom messages are awaited. Asked after every look; `true` now
    /// and then is enough.
    fn wants_awaited(&mut self) -> bool {
        false
    }

    /// The peers that posted receives name as their only source, or that were probed since the last
    /// call. All others are not awaited. A carrier that cannot reach one of them any more says
    /// [`CarrierEvent::Gone`], even if it has said so before.
    fn awaited(&mut self, _peers: &[u64]) {}

    /// Looks what has happened.
    fn poll(&mut self, events: &mut Vec<CarrierEvent>);

    /// Becomes readable when there may be something to look at. `false` from `is_quiet` says that it
    /// must be looked at again at once.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// Whether nothing will be lost if the next look waits for the descriptor.
    fn is_quiet(&mut self) -> bool;
}

/// An access to memory of a peer on another host.
#[derive(Debug, Clone, Copy)]
pub struct CarriedAccess {
    /// Whether bytes go there or come from there.
    pub way: AccessWay,
    /// What the owner calls the memory.
    pub key: u64,
    /// Where in it, as the owner counts.
    pub address: u64,
    /// The memory of this side.
    pub local: Piece,
}

/// Which way the bytes of an access go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessWay {
    /// To the peer.
    Put,
    /// From the peer.
    Get,
}

/// What a carrier has to say.
pub enum CarrierEvent {
    /// A message has come, all of it.
    Arrived {
        /// From whom.
        peer: u64,
        /// What came with it.
        envelope: Envelope,
        /// Its bytes.
        bytes: Vec<u8>,
    },
    /// A message waits at its sender.
    Announced {
        /// From whom.
        peer: u64,
        /// What came with it.
        envelope: Envelope,
        /// How long it is.
        length: u64,
        /// What to fetch it by.
        ticket: u64,
    },
    /// A send is over.
    Sent {
        /// Which one.
        number: u64,
        /// How it ended.
        outcome: Result<(), Error>,
    },
    /// A fetch is over.
    Fetched {
        /// Which one.
        number: u64,
        /// How it ended.
        outcome: Result<(), Error>,
    },
    /// An access is over.
    Accessed {
        /// Which one.
        number: u64,
        /// How it ended.
        outcome: Result<(), Error>,
    },
    /// Bytes moved, but nothing is over: a peer accesses memory of this side, or a part of an access
    /// is done. Whoever looks should look again soon.
    Moved {
        /// With whom.
        peer: u64,
    },
    /// A peer cannot be reached any more. What was under way with it ends with that.
    Gone {
        /// Who.
        peer: u64,
        /// How it ended.
        how: Gone,
    },
}

/// Without the bytes of messages.
impl std::fmt::Debug for CarrierEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (name, id) = match self {
            Self::Arrived { peer, bytes, .. } => {
                let mut shown = f.debug_struct("Arrived");
                return shown.field("peer", peer).field("length", &bytes.len()).finish();
            }
            Self::Announced { peer, .. } => ("Announced", peer),
            Self::Sent { number, .. } => ("Sent", number),
            Self::Fetched { number, .. } => ("Fetched", number),
            Self::Accessed { number, .. } => ("Accessed", number),
            Self::Moved { peer } => ("Moved", peer),
            Self::Gone { peer, .. } => ("Gone", peer),
        };
        f.debug_tuple(name).field(id).finish()
    }
}
