//! Requests to the layer above the port, which is the libfabric provider: it executes accesses to its memory
//! for peers, and hears of writes. A request matches no receive. It is kept here until the layer takes it,
//! and a completion entry without an operation reports that there are any.
//!
//! Requests are exempt from backpressure, which would announce them: no receive would ever fetch them, and a
//! request that waited in the send queue would hold up the messages behind it. The layers limit their number
//! instead, and a peer that exceeds the limit violates the protocol.

use std::collections::VecDeque;

use super::operations::OperationKind;
use super::peer_table::Reassembly;
use super::protocol::Protocol;
use super::{Peer, PortState};
use crate::completion::{CompletionEntry, CompletionKind};
use crate::control::inline_limit;
use crate::envelope::{Envelope, MatchSpace};
use crate::error::Error;
use crate::path::ReceiveStage;
use crate::plan::PathKind;
use crate::ring::bounce::BounceSpan;
use crate::ring::cells::ProtocolError;

/// Maximum length of a request.
const MAX_SERVICE_BYTES: u64 = 16 << 10;
/// Maximum number of requests of one peer that are not ended. Twice what the layers have in flight: a reply may
/// have arrived, and led to the next request, before the end of the first one is noted here.
const MAX_SERVICE_MESSAGES: usize = 2048;

/// A request of a peer.
#[derive(Debug, Clone)]
pub struct ServiceMessage {
    /// The sender.
    pub peer: Peer,
    /// The number of the connection: [`crate::Endpoint::connection_number`] was this when the request arrived.
    pub connection: u64,
    /// The envelope of the request.
    pub envelope: Envelope,
    /// The payload.
    pub bytes: Vec<u8>,
}

/// The operations in flight with a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PendingOps {
    /// Sends that are not complete.
    pub sends: bool,
    /// Puts and gets; those of this host count whatever their peer is.
    pub rma: bool,
    /// Requests without a reply.
    pub replies: bool,
}

/// The requests of peers, in order of arrival.
#[derive(Debug, Default)]
pub(super) struct ServiceInbox {
    is_enabled: bool,
    /// A completion entry reports that there are requests.
    is_reported: bool,
    messages: VecDeque<ServiceMessage>,
}

/// A request of which fragments arrive.
#[derive(Debug)]
pub(super) struct PartialService {
    envelope: Envelope,
    length: usize,
    bytes: Vec<u8>,
}

/// The path of a request that is not sent at once.
pub(super) fn path_of(envelope: &Envelope, length: u64) -> PathKind {
    if length <= inline_limit(envelope) as u64 { PathKind::Inline } else { PathKind::Eager }
}

impl Protocol {
    /// Keeps a request of a peer.
    pub(super) fn deliver_service(
        &mut self,
        peer: usize,
        envelope: Envelope,
        bytes: Vec<u8>,
    ) -> Result<(), ProtocolError> {
        if !self.service.is_enabled {
            return Err(ProtocolError("a request to an endpoint that serves none"));
        }
        if self.peers[peer].service_count >= MAX_SERVICE_MESSAGES {
            return Err(ProtocolError("requests beyond what there is room for"));
        }
        self.peers[peer].service_count += 1;
        let (from, connection) = (self.peers.peer(peer), self.peers[peer].ended_connections);
        self.service.messages.push_back(ServiceMessage { peer: from, connection, envelope, bytes });
        self.report_service();
        Ok(())
    }

    /// Reports that there are requests, unless an entry does so already.
    fn report_service(&mut self) {
        if !self.service.is_reported {
            self.service.is_reported = true;
            self.operations.count_completion();
            let entry = CompletionEntry::new(CompletionKind::Service, u64::MAX, Ok(()));
            self.operations.completions.push(entry);
        }
    }

    /// Starts a request that arrives in fragments.
    pub(super) fn start_service(
        &mut self,
        peer: usize,
        envelope: Envelope,
        length: u64,
    ) -> Result<(), ProtocolError> {
        let connection = self.peers.connection(peer);
        if connection.reassembly != Reassembly::None {
            return Err(ProtocolError("a request inside a message"));
        }
        if length > MAX_SERVICE_BYTES {
            return Err(ProtocolError("a request that is too long"));
        }
        let length = length as usize;
        let partial = PartialService { envelope, length, bytes: Vec::with_capacity(length) };
        connection.partial_service = Some(Box::new(partial));
        connection.reassembly = Reassembly::Service;
        Ok(())
    }

    /// Appends a fragment to a request. The last one delivers it.
    pub(super) fn append_service(
        &mut self,
        peer: usize,
        data: BounceSpan,
    ) -> Result<(), ProtocolError> {
        let connection = self.peers.connection(peer);
        let (source, length) = (connection.wire.incoming(data), data.length as usize);
        let Some(partial) = &mut connection.partial_service else {
            return Err(ProtocolError("a fragment of no request"));
        };
        if length > partial.length - partial.bytes.len() {
            return Err(ProtocolError("more fragments than the request has bytes"));
        }
        // SAFETY: the span lies inside the bounce ring; the vector has space for the whole request, of which
        // this is no more than the rest. The bytes are copied, because the peer may change them.
        unsafe {
            let end = partial.bytes.as_mut_ptr().add(partial.bytes.len());
            std::ptr::copy_nonoverlapping(source, end, length);
            partial.bytes.set_len(partial.bytes.len() + length);
        }
        let is_whole = partial.bytes.len() == partial.length;
        connection.wire.release_bounce(data);
        if is_whole && let Some(whole) = connection.partial_service.take() {
            connection.reassembly = Reassembly::None;
            return self.deliver_service(peer, whole.envelope, whole.bytes);
        }
        Ok(())
    }

    /// The operations in flight with a peer.
    pub(crate) fn pending_ops(&self, peer: Peer) -> Result<PendingOps, Error> {
        let index = self.peers.index_of(peer)?;
        let has = |choose: &dyn Fn(&OperationKind) -> bool| {
            !self.operations.pending_ids(choose).is_empty()
        };
        let is_reply = |kind: &OperationKind| {
            matches!(kind, OperationKind::Receive(receiving) if receiving.peer == index
                && receiving.envelope.space == MatchSpace::Reply
                && !matches!(receiving.stage, ReceiveStage::Posted))
        };
        Ok(PendingOps {
            sends: has(
                &|kind| matches!(kind, OperationKind::Send(sending) if sending.peer == index),
            ),
            rma: has(&|kind| match kind {
                OperationKind::Rma(_) => true,
                OperationKind::RemoteRma { peer, .. } => *peer == index,
                _ => false,
            }),
            replies: self.matches.has_posted_in(MatchSpace::Reply, index) || has(&is_reply),
        })
    }
}

impl PortState {
    /// Accepts requests from now on.
    pub(crate) fn enable_service(&mut self) {
        self.protocol.service.is_enabled = true;
    }

    /// Takes the first requests, `limit` at most. If there are more, another completion entry reports them.
    /// Their peers keep their slots until the requests are ended.
    pub(crate) fn take_services(&mut self, limit: usize) -> Vec<ServiceMessage> {
        let inbox = &mut self.protocol.service;
        let taken = inbox.messages.drain(..limit.min(inbox.messages.len())).collect();
        inbox.is_reported = false;
        if !inbox.messages.is_empty() {
            self.protocol.report_service();
        }
        taken
    }

    /// The number of the connection to a peer.
    pub(crate) fn connection_number(&self, peer: Peer) -> Result<u64, Error> {
        let index = self.protocol.peers.index_of(peer)?;
        Ok(self.protocol.peers[index].ended_connections)
    }

    /// Ends a request that a peer has sent in a connection.
    pub(crate) fn end_service(&mut self, peer: Peer, connection: u64) {
        if let Ok(index) = self.protocol.peers.index_of(peer) {
            let slot = &mut self.protocol.peers[index];
            let is_current = slot.ended_connections == connection;
            let count =
                if is_current { &mut slot.service_count } else { &mut slot.old_service_count };
            *count = count.saturating_sub(1);
        }
    }
}
