//! The message protocol of a port: sends, receives, handlers of control messages, and steps of operations.
//!
//! It owns the four parts that these need. It accesses neither [`super::wakeup`] nor [`super::windows`]: it
//! returns what concerns them as an event, or sets [`Protocol::changed`], and [`super::PortState`] acts on
//! it.

use std::sync::Arc;

use super::UnexpectedPayload;
use super::operations::OperationTable;
use super::peer_table::PeerTable;
use super::planner::Planner;
use super::posted_buffer::PostedReceive;
use super::service::ServiceInbox;
use crate::matching::MatchQueues;
use crate::path::ActiveCopy;
use crate::ring::cells::ProtocolError;

/// The parts of a port that messages need. It is a structure in the port's state rather than a set of
/// borrows: its methods then reach all four parts from one pointer, as the small-message path requires.
pub(crate) struct Protocol {
    pub(crate) peers: PeerTable,
    pub(super) matches: MatchQueues<PostedReceive, UnexpectedPayload>,
    pub(crate) operations: OperationTable,
    pub(crate) planner: Planner,
    pub(super) copies: CopySchedule,
    pub(super) service: ServiceInbox,
    /// The call posts receives and does not wait for them.
    pub(super) posts_ahead: bool,
    /// Something has changed that no completion reports: a message was buffered, a peer is disconnected, or
    /// an operation waits for its memory. A thread may wait for that; the port's guard notifies it at the
    /// unlock.
    pub(super) changed: bool,
    /// Number of steps that operations have done.
    #[cfg(test)]
    pub(super) steps: u64,
}

/// Copies that threads make without the lock.
#[derive(Debug, Default)]
pub(super) struct CopySchedule {
    /// Some operation has a copy to make that no thread has taken.
    pub(super) is_due: bool,
    /// The copy that the thread with the lock makes next, after it unlocks the port, and its peer.
    pub(super) next: Option<(usize, Arc<ActiveCopy>)>,
    /// The peer whose operations are stepped first.
    pub(super) next_peer: usize,
    /// The waits in a row that had what they waited for, and left copies to others.
    postponed: u32,
}

impl CopySchedule {
    /// A thread that has what it waits for leaves copies to the senders and to waits that last longer. In
    /// a program whose messages are always there already, no wait does.
    const MAX_POSTPONED: u32 = 32;

    /// A thread makes a copy of a peer's message.
    pub(super) fn begin(&mut self, peer: usize) {
        (self.next_peer, self.postponed) = (peer + 1, 0);
    }

    /// Counts a wait that leaves copies to others. Returns whether it must make one.
    pub(super) fn count_postponed(&mut self) -> bool {
        self.postponed = self.postponed.saturating_add(1);
        self.postponed >= Self::MAX_POSTPONED
    }
}

/// What a control message changed outside of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(super) enum ControlEvent {
    /// Nothing.
    Handled,
    /// The peer has shared or unshared a region: translations of its windows are stale.
    RegionChanged(u32),
    /// The peer sends no more messages.
    PeerClosed,
}

/// What a receive requires of the port after it was matched or posted.
#[derive(Debug)]
#[must_use]
pub(super) enum MatchEvent {
    /// Nothing.
    Handled,
    /// The receive is posted: its source may have to be connected.
    Posted,
    /// A message at its sender was matched, or its match failed: the peer has to make progress.
    Rendezvous { peer: usize, outcome: Result<(), ProtocolError> },
}

impl Protocol {
    pub(super) fn new(peers: PeerTable, operations: OperationTable, planner: Planner) -> Self {
        Self {
            peers,
            matches: MatchQueues::default(),
            operations,
            planner,
            copies: CopySchedule::default(),
            service: ServiceInbox::default(),
            posts_ahead: false,
            changed: false,
            #[cfg(test)]
            steps: 0,
        }
    }

    /// Whether receives are posted or messages are buffered: these match before a message that arrives.
    #[inline]
    pub(super) fn has_queued_matches(&self) -> bool {
        self.matches.has_posted() || self.matches.unexpected_len() > 0
    }

    /// Whether an engine copies for this port.
    pub(crate) fn is_offloading(&mut self) -> bool {
        let Self { peers, operations, .. } = self;
        peers.polled_connections().flat_map(|connection| &connection.active).any(|number| {
            operations.receiving(*number).is_some_and(|receiving| receiving.is_offloaded())
        })
    }
}
