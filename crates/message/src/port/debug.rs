//! `Debug` for ports and operations: one line, without the payload of messages.

use std::fmt;

use super::operations::OperationKind;
use super::{Port, UnexpectedPayload};
use crate::completion::CompletionKind;
use crate::control::OperationId;
use crate::path::{ReceiveStage, SendStage};

/// The fields of an operation in flight that are shown.
pub(crate) struct OperationInfo {
    pub(crate) kind: &'static str,
    /// The slot of the peer, once it is known.
    pub(crate) peer: Option<usize>,
    /// Tag and length of the message, once it is known.
    pub(crate) message: Option<(u64, u64)>,
    pub(crate) state: &'static str,
}

impl OperationInfo {
    fn new(kind: &'static str, state: &'static str) -> Self {
        Self { kind, peer: None, message: None, state }
    }

    fn of(deed: &OperationKind) -> Self {
        match deed {
            OperationKind::Send(sending) => Self {
                peer: Some(sending.peer),
                message: Some((sending.envelope.tag, sending.length)),
                ..Self::new("send", send_state(&sending.stage))
            },
            OperationKind::Receive(receiving)
                if matches!(receiving.stage, ReceiveStage::Posted) =>
            {
                Self::new("receive", "posted")
            }
            OperationKind::Receive(receiving) => Self {
                peer: Some(receiving.peer),
                message: Some((receiving.envelope.tag, receiving.length)),
                ..Self::new("receive", receive_state(&receiving.stage))
            },
            OperationKind::MultiReceive(_) => Self::new("receive of several messages", "posted"),
            OperationKind::Rma(kind) => Self::new(access_kind(*kind), "in progress"),
            OperationKind::RemoteRma { kind, peer } => {
                Self { peer: Some(*peer), ..Self::new(access_kind(*kind), "in progress") }
            }
        }
    }
}

fn access_kind(kind: CompletionKind) -> &'static str {
    match kind {
        CompletionKind::Get => "get",
        _ => "put",
    }
}

fn send_state(stage: &SendStage) -> &'static str {
    match stage {
        SendStage::Queued => "queued",
        SendStage::Streaming { .. } => "streaming",
        SendStage::RtsSent => "announced",
        SendStage::Copying(_) => "copying",
        SendStage::CancelPending => "cancelling",
        SendStage::Remote => "remote",
        SendStage::Quiescing(_) => "over, its memory is still in use",
    }
}

fn receive_state(stage: &ReceiveStage) -> &'static str {
    match stage {
        ReceiveStage::Posted => "posted",
        ReceiveStage::Arriving { .. } => "arriving",
        ReceiveStage::RtsMatched { .. } => "matched",
        ReceiveStage::FinPending { .. } => "complete",
        ReceiveStage::Fetching(_) => "copying",
        ReceiveStage::Remote => "remote",
        ReceiveStage::Quiescing(_) => "failed, its memory is still in use",
    }
}

impl Port {
    /// The fields of an operation that are shown. Returns `None` if the operation is unknown or the
    /// port is locked: the calling thread may hold the lock.
    pub(crate) fn operation_info(&self, number: OperationId) -> Option<OperationInfo> {
        let mut state = self.state.try_lock()?;
        state.protocol.operations.get(number).map(|operation| OperationInfo::of(&operation.kind))
    }
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Port");
        if let Some(state) = self.state.try_lock() {
            let peers =
                state.protocol.peers.iter().filter(|slot| slot.connection.is_some()).count();
            shown.field("peers", &peers).field("operations", &state.protocol.operations.count());
            shown.field("unexpected", &state.protocol.matches.unexpected_len());
        }
        shown.finish_non_exhaustive()
    }
}

impl fmt::Debug for UnexpectedPayload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Kept");
        shown.field("length", &self.length()).field("is_complete", &self.is_complete());
        shown.finish_non_exhaustive()
    }
}
