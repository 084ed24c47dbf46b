//! How errors name peers and operations.

use super::operations::OperationKind;
use super::peer_table::PeerTable;
use super::posted_buffer::PostedReceive;
use super::protocol::Protocol;
use crate::control::OperationId;
use crate::envelope::MatchSpace;
use crate::error::{Disconnect, Error, OperationName, PeerName};
use crate::path::ReceiveStage;

impl PeerTable {
    /// The peer of a slot, which may be disconnected. Unknown if no peer is known yet: an operation that any
    /// peer may match has no slot.
    #[cold]
    pub(super) fn peer_name(&self, peer: usize) -> PeerName {
        let Some(slot) = self.slots.get(peer) else {
            return PeerName::default();
        };
        if let Some(connection) = &slot.connection {
            return connection.wire.peer.label();
        }
        let last = slot.last_peer.as_ref().map(|(id, name)| (name, id.credentials.pid));
        match (slot.added_name(), slot.remote_id, last) {
            (Some(name), ..) => {
                // An earlier peer of this slot may have had another name.
                let pid = last.filter(|(last, _)| *last == name).map_or(0, |(_, pid)| pid);
                PeerName::of_process(name, pid)
            }
            (None, Some(number), _) => PeerName::new(&format!("peer {number} on another host")),
            (None, None, Some((name, pid))) => PeerName::of_process(name, pid),
            (None, None, None) => PeerName::default(),
        }
    }

    /// The error with the name of the peer, if it is a disconnect that names none.
    pub(super) fn with_peer_name(&self, peer: usize, error: Error) -> Error {
        match error {
            Error::PeerDisconnected(Disconnect { peer: name, reason }) if name.is_unknown() => {
                Error::PeerDisconnected(Disconnect::new(self.peer_name(peer), reason))
            }
            error => error,
        }
    }
}

impl Protocol {
    /// What an operation in flight is.
    #[cold]
    pub(crate) fn operation_name(&self, number: OperationId) -> OperationName {
        let Some(operation) = self.operations.peek(number) else {
            return "operation".into();
        };
        let text = match &operation.kind {
            OperationKind::Send(sending) => {
                let tag = tag_text(sending.envelope.space, sending.envelope.tag, u64::MAX);
                let to = self.peers.peer_name(sending.peer);
                format!("send of {} bytes{tag} to {to}", sending.length)
            }
            OperationKind::Receive(receiving) => {
                let (tag, from) = match (&receiving.stage, self.posted_key(number)) {
                    (ReceiveStage::Posted, Some(posted)) => posted,
                    _ => {
                        let envelope = &receiving.envelope;
                        let tag = tag_text(envelope.space, envelope.tag, u64::MAX);
                        (tag, self.peers.peer_name(receiving.peer).to_string())
                    }
                };
                format!("receive of up to {} bytes{tag} from {from}", receiving.capacity)
            }
            OperationKind::MultiReceive(_) => {
                let (tag, from) = self.posted_key(number).unwrap_or_default();
                format!("receive of several messages{tag} from {from}")
            }
            OperationKind::Rma(_) => "access to a window".to_owned(),
            OperationKind::RemoteRma { peer, .. } => {
                format!("access to a window of {}", self.peers.peer_name(*peer))
            }
        };
        text.as_str().into()
    }

    /// The tag and the sender that a posted receive names.
    fn posted_key(&self, number: OperationId) -> Option<(String, String)> {
        let key = self.matches.key_of(&PostedReceive::Operation(number))?;
        let from = key.source.map(|peer| self.peers.peer_name(peer).to_string());
        Some((
            tag_text(key.space, key.tag, key.mask),
            from.unwrap_or_else(|| "any peer".to_owned()),
        ))
    }
}

/// ` with tag 7`; empty where there is none.
fn tag_text(space: MatchSpace, tag: u64, mask: u64) -> String {
    match mask {
        _ if space == MatchSpace::Untagged => String::new(),
        0 => " with any tag".to_owned(),
        u64::MAX => format!(" with tag {tag}"),
        mask => format!(" with tag {tag:#x} in the bits {mask:#x}"),
    }
}
