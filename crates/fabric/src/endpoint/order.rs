//! The order of operations to one peer, as far as it is not natural: a program may request that
//! accesses and atomic operations, or sends and accesses, do not overtake each other, and may fence
//! an operation. An operation that would overtake is not accepted yet.
//!
//! Natural are: sends after sends, accesses after accesses, and atomic operations after atomic
//! operations. Not offered is an access after a send: the message may wait for a receive that the
//! program posts only when it sees the access.

use memferry_message::{Peer, PendingOps};

use super::Endpoint;
use super::core::EndpointCore;
use crate::abi::*;
use crate::guard::{FiError, Result};

/// The orders of accesses and atomic operations among each other.
const AMONG_ACCESSES: u64 = FI_ORDER_RAR | FI_ORDER_RAW | FI_ORDER_WAR | FI_ORDER_WAW;
/// The orders of sends after accesses and atomic operations.
const OF_SENDS: u64 = FI_ORDER_SAR | FI_ORDER_SAW;

/// A kind of operation that may have to wait for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OrderedOp {
    Send,
    Rma,
    Atomic,
}

/// Returns whether sends wait for accesses, with the requested order.
pub(super) fn orders_sends(msg_order: u64) -> bool {
    msg_order & OF_SENDS != 0
}

impl Endpoint {
    /// Fails with `FI_EAGAIN` if an operation would overtake an earlier one that it must not
    /// overtake.
    pub(super) fn check_order(
        &self,
        core: &EndpointCore,
        peer: Peer,
        op: OrderedOp,
        flags: u64,
    ) -> Result {
        let is_fenced = flags & FI_FENCE != 0;
        if is_fenced && self.shared.caps & FI_FENCE == 0 {
            return Err(FiError(FI_EINVAL));
        }
        let of_op = if op == OrderedOp::Send { OF_SENDS } else { AMONG_ACCESSES };
        if !is_fenced && self.shared.msg_order & of_op == 0 {
            return Ok(());
        }
        let PendingOps { sends, rma, replies } = core.messages.pending_ops(peer)?;
        let must_wait = match op {
            _ if is_fenced => sends || rma || replies,
            OrderedOp::Send => rma || replies,
            OrderedOp::Rma => replies,
            OrderedOp::Atomic => rma,
        };
        if must_wait {
            // Makes progress, because a program may only retry.
            core.progress_for_retry();
            return Err(FiError(FI_EAGAIN));
        }
        Ok(())
    }
}
