//! Ports and operations in `{:?}`: short, and without the bytes of anybody's messages.

use std::fmt;

use super::operations::Deed;
use super::{Kept, Port};
use crate::path::{ReceiveStage, SendStage};
use crate::report::ReportKind;
use crate::wire::Number;

/// What is shown of an operation under way.
pub(crate) struct Shown {
    pub(crate) kind: &'static str,
    /// The peer's place, once it is known.
    pub(crate) peer: Option<usize>,
    /// Tag and length of the message, once it is known.
    pub(crate) message: Option<(u64, u64)>,
    pub(crate) state: &'static str,
}

impl Shown {
    fn new(kind: &'static str, state: &'static str) -> Self {
        Self { kind, peer: None, message: None, state }
    }

    fn of(deed: &Deed) -> Self {
        match deed {
            Deed::Send(sending) => Self {
                peer: Some(sending.peer),
                message: Some((sending.envelope.tag, sending.length)),
                ..Self::new("send", send_state(&sending.stage))
            },
            Deed::Receive(receiving) if matches!(receiving.stage, ReceiveStage::Posted) => {
                Self::new("receive", "posted")
            }
            Deed::Receive(receiving) => Self {
                peer: Some(receiving.peer),
                message: Some((receiving.envelope.tag, receiving.length)),
                ..Self::new("receive", receive_state(&receiving.stage))
            },
            Deed::Several(_) => Self::new("receive of several messages", "posted"),
            Deed::Access(kind) => Self::new(access_kind(*kind), "in progress"),
            Deed::CarriedAccess { kind, peer } => {
                Self { peer: Some(*peer), ..Self::new(access_kind(*kind), "in progress") }
            }
        }
    }
}

fn access_kind(kind: ReportKind) -> &'static str {
    match kind {
        ReportKind::Get => "get",
        _ => "put",
    }
}

fn send_state(stage: &SendStage) -> &'static str {
    match stage {
        SendStage::Queued => "queued",
        SendStage::Streaming { .. } => "streaming",
        SendStage::Announced => "announced",
        SendStage::Helping(_) => "copying",
        SendStage::Withdrawing => "cancelling",
        SendStage::Carried => "remote",
        SendStage::Held(_) => "over, its memory is still in use",
    }
}

fn receive_state(stage: &ReceiveStage) -> &'static str {
    match stage {
        ReceiveStage::Posted => "posted",
        ReceiveStage::Arriving { .. } => "arriving",
        ReceiveStage::Met { .. } => "matched",
        ReceiveStage::Arrived { .. } => "complete",
        ReceiveStage::Fetching(_) => "copying",
        ReceiveStage::Carried => "remote",
        ReceiveStage::Held(_) => "failed, its memory is still in use",
    }
}

impl Port {
    /// What is to be shown of an operation. `None` if it is unknown, or if the port is in use: the
    /// thread that asks may be the one that holds the lock.
    pub(crate) fn show(&self, number: Number) -> Option<Shown> {
        let mut state = self.state.try_lock().ok()?;
        state.operations.get(number).map(|operation| Shown::of(&operation.deed))
    }
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Port");
        if let Ok(state) = self.state.try_lock() {
            let peers = state.peers.iter().filter(|slot| slot.connection.is_some()).count();
            shown.field("peers", &peers).field("operations", &state.operations.count());
            shown.field("unexpected", &state.matching.kept_count());
        }
        shown.finish_non_exhaustive()
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Kept");
        shown.field("length", &self.length()).field("is_complete", &self.is_complete());
        shown.finish_non_exhaustive()
    }
}
