//! Atomic operations on memory of peers: in this process if the memory is mapped here, else by a
//! request to its owner, which replies.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use memferry_message::{
    CompletionEntry, CompletionKind, CompletionOptions, Envelope, MatchSpace, MatchSpec, Peer,
    Segment, ServiceMessage, Source,
};

use super::Endpoint;
use super::core::{CompletionBinding, EndpointCore};
use super::order::OrderedOp;
use super::rma::RmaTarget;
use super::service::{ATOMIC, request};
use super::tracked::{FinishedOp, TrackedOp, TrackedRole};
use super::windows::RmaRoute;
use crate::abi::*;
use crate::atomic::{AtomicClass, AtomicKind, AtomicOperands, MAX_ATOMIC_BYTES, Misaligned, apply};
use crate::guard::{FiError, Result};
use crate::mr_table::RmaExtent;
use crate::queue::QueuedCompletion;

/// The maximum number of operations without a reply. The port of a peer accepts more.
const MAX_IN_FLIGHT: usize = 512;

/// The bytes of a request before the operands: ticket, key, address.
const HEADER_BYTES: usize = 24;

/// An operation on memory of a peer.
pub(super) struct AtomicCall<'a> {
    pub(super) class: AtomicClass,
    pub(super) datatype: i32,
    pub(super) op: i32,
    pub(super) target: RmaTarget,
    pub(super) operands: &'a [Segment],
    pub(super) compare: &'a [Segment],
    pub(super) results: &'a [Segment],
    pub(super) context: *mut c_void,
    pub(super) flags: u64,
    /// No entry is made on success, whatever the flags are.
    pub(super) is_injected: bool,
}

/// The numbers of an operation, in memory of this side.
struct GatheredOperands {
    values: Vec<u8>,
    compare: Vec<u8>,
}

impl GatheredOperands {
    fn borrow(&self) -> AtomicOperands<'_> {
        AtomicOperands { values: &self.values, compare: &self.compare }
    }
}

/// The codes of libfabric for an operation, in the tag of a request.
fn detail_of(call: &AtomicCall<'_>, count: usize) -> u64 {
    let class = match call.class {
        AtomicClass::Write => 0,
        AtomicClass::Fetch => 1,
        AtomicClass::Compare => 2,
    };
    class | (call.datatype as u64) << 8 | (call.op as u64) << 16 | (count as u64) << 24
}

/// Decodes an operation and its count of elements.
fn kind_of(detail: u64) -> Option<(AtomicKind, usize)> {
    let class = match detail as u8 {
        0 => AtomicClass::Write,
        1 => AtomicClass::Fetch,
        2 => AtomicClass::Compare,
        _ => return None,
    };
    let (datatype, op) = (i32::from((detail >> 8) as u8), i32::from((detail >> 16) as u8));
    let kind = AtomicKind::new(class, datatype, op).ok()?;
    let count = usize::try_from(detail >> 24).ok()?;
    (1..=kind.max_count()).contains(&count).then_some((kind, count))
}

fn total(segments: &[Segment]) -> usize {
    segments.iter().fold(0, |sum: usize, segment| sum.saturating_add(segment.length))
}

/// Copies the bytes of segments.
///
/// # Safety
/// The segments must be valid.
unsafe fn gather(segments: &[Segment]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(total(segments));
    for segment in segments.iter().filter(|segment| segment.length > 0) {
        let address = segment.address.cast_const();
        // SAFETY: the caller guarantees it.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(address, segment.length) });
    }
    bytes
}

/// Copies bytes into segments, as far as both go.
///
/// # Safety
/// The segments must be valid for writes.
unsafe fn scatter(segments: &[Segment], mut bytes: &[u8]) {
    for segment in segments {
        let length = segment.length.min(bytes.len());
        // SAFETY: the caller guarantees it; the bytes belong to this side.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), segment.address, length) };
        bytes = &bytes[length..];
    }
}

impl AtomicCall<'_> {
    /// Checks the lengths, and returns the operation and its number of bytes.
    fn check(&self) -> Result<(AtomicKind, usize)> {
        let kind = AtomicKind::new(self.class, self.datatype, self.op)?;
        let invalid = FiError(FI_EINVAL);
        let bytes = match kind.has_operands() {
            true => total(self.operands),
            false => total(self.results),
        };
        let is_compared = self.class == AtomicClass::Compare;
        let fits = (!is_compared || total(self.compare) == bytes)
            && (self.class == AtomicClass::Write || total(self.results) == bytes);
        let all = [self.operands, self.compare, self.results];
        let has_null = all.iter().enumerate().any(|(index, segments)| {
            (index > 0 || kind.has_operands())
                && segments.iter().any(|s| s.address.is_null() && s.length > 0)
        });
        if bytes == 0 || !fits || has_null {
            return Err(invalid);
        }
        if bytes > MAX_ATOMIC_BYTES {
            return Err(FiError(FI_EMSGSIZE));
        }
        Ok((kind, bytes))
    }
}

impl Endpoint {
    /// Starts an atomic operation.
    ///
    /// # Safety
    /// The operands must be valid until this returns, the results for writes until completion.
    pub(super) unsafe fn atomic(&self, call: &AtomicCall<'_>) -> Result {
        let core = self.core()?;
        if self.shared.caps & FI_ATOMIC == 0 || call.flags & FI_REMOTE_CQ_DATA != 0 {
            return Err(FiError(FI_EOPNOTSUPP));
        }
        let (kind, bytes) = call.check()?;
        let peer = core.peer(call.target.peer)?;
        self.check_order(core, peer, OrderedOp::Atomic, call.flags)?;
        // SAFETY: the caller guarantees the operands; the others are empty.
        let operands = unsafe {
            let values = if kind.has_operands() { gather(call.operands) } else { Vec::new() };
            GatheredOperands { values, compare: gather(call.compare) }
        };
        // SAFETY: the caller guarantees the results.
        if unsafe { self.atomic_here(core, peer, call, kind, bytes, &operands) }? {
            let (binding, flags) = (core.atomic_binding(kind), completion_flags(kind));
            binding.count(true);
            if !call.is_injected && !binding.is_silent(call.flags) {
                binding.deliver(QueuedCompletion::new(call.context as u64, flags));
            }
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { core.atomic_by_owner(peer, call, kind, bytes, &operands) }
    }

    /// Executes an operation in this process, if the memory is mapped here. Returns whether it has.
    ///
    /// # Safety
    /// The results must be valid for writes.
    unsafe fn atomic_here(
        &self,
        core: &EndpointCore,
        peer: Peer,
        call: &AtomicCall<'_>,
        kind: AtomicKind,
        bytes: usize,
        operands: &GatheredOperands,
    ) -> Result<bool> {
        let window = match core.rma_route(peer, call.target.key) {
            Ok(RmaRoute::Window(window)) => window,
            // The owner has another opinion of what is reachable.
            Ok(RmaRoute::Remote) | Err(FiError(FI_EPERM)) => return Ok(false),
            Err(code) => return Err(code),
        };
        // It must not overtake an operation that the owner executes.
        if core.service.atomics_in_flight.load(Ordering::Acquire) > 0 {
            return Ok(false);
        }
        let is_virtual = self.shared.domain.has_virtual_addresses();
        let start = if is_virtual { window.address() } else { 0 };
        let offset = call.target.address.wrapping_sub(start);
        let mut results = Vec::new();
        let count = bytes / kind.datatype.size();
        let applied = window.with_mapped(offset, bytes, kind.rights(), |at| {
            // SAFETY: the window maps these bytes, and keeps them while this runs.
            unsafe { apply(kind, at, count, operands.borrow(), &mut results) }
        })?;
        match applied {
            None => Ok(false),
            Some(Err(Misaligned)) => Err(FiError(FI_EINVAL)),
            Some(Ok(())) => {
                // SAFETY: the caller guarantees it.
                unsafe { scatter(call.results, &results) };
                Ok(true)
            }
        }
    }
}

/// The flags of a completion entry.
fn completion_flags(kind: AtomicKind) -> u64 {
    FI_ATOMIC | if kind.class == AtomicClass::Write { FI_WRITE } else { FI_READ }
}

impl EndpointCore {
    fn atomic_binding(&self, kind: AtomicKind) -> &CompletionBinding {
        if kind.class == AtomicClass::Write { &self.writes } else { &self.reads }
    }

    /// Requests an operation of the owner of the memory. Its reply completes the operation.
    ///
    /// # Safety
    /// The results must be valid for writes until completion.
    unsafe fn atomic_by_owner(
        &self,
        peer: Peer,
        call: &AtomicCall<'_>,
        kind: AtomicKind,
        bytes: usize,
        operands: &GatheredOperands,
    ) -> Result {
        let in_flight = &self.service.atomics_in_flight;
        if in_flight.load(Ordering::Acquire) >= MAX_IN_FLIGHT {
            self.progress_for_retry();
            return Err(FiError(FI_EAGAIN));
        }
        let ticket = self.service.tickets.fetch_add(1, Ordering::Relaxed);
        let is_silent = call.is_injected || self.atomic_binding(kind).is_silent(call.flags);
        let role = TrackedRole::Atomic { kind, bytes, ticket };
        let context = call.context as u64;
        let mark = self.tracked.add(TrackedOp { role, ..TrackedOp::new(context, is_silent) });
        // The reply: only the owner can send it.
        let (space, from) = (MatchSpace::Reply, Source::Peer(peer));
        let spec = MatchSpec { space, from, tag: ticket, mask: u64::MAX };
        in_flight.fetch_add(1, Ordering::AcqRel);
        // SAFETY: the caller guarantees the results.
        if let Err(error) = unsafe { self.messages.post_receive(&spec, call.results, mark) } {
            self.tracked.remove(mark);
            in_flight.fetch_sub(1, Ordering::AcqRel);
            return Err(error.into());
        }
        let RmaTarget { key, address, .. } = call.target;
        let length = HEADER_BYTES + operands.values.len() + operands.compare.len();
        let mut payload = Vec::with_capacity(length);
        [ticket, key, address].iter().for_each(|word| payload.extend(word.to_le_bytes()));
        payload.extend_from_slice(&operands.values);
        payload.extend_from_slice(&operands.compare);
        let detail = detail_of(call, bytes / kind.datatype.size());
        if let Err(error) = self.messages.inject(peer, request(ATOMIC, detail, None), &payload) {
            // The receive of a reply from a disconnected peer has failed, and reports the error.
            let is_reported = matches!(error, memferry_message::Error::PeerDisconnected(_));
            if !is_reported && self.tracked.abandon(mark, ticket) {
                self.messages.cancel_posted(mark);
                in_flight.fetch_sub(1, Ordering::AcqRel);
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// The entry of an operation whose reply has arrived, or that has failed.
    pub(super) fn finish_atomic(
        &self,
        kind: AtomicKind,
        bytes: usize,
        done: &FinishedOp,
        report: &CompletionEntry,
    ) -> (CompletionKind, QueuedCompletion) {
        self.service.atomics_in_flight.fetch_sub(1, Ordering::AcqRel);
        let mut entry = QueuedCompletion::new(done.context, completion_flags(kind));
        let expected = kind.result_bytes(bytes) as u64;
        entry.code = match (done.code, report.envelope.data) {
            (0, Some(0)) if report.length == expected => 0,
            (0, Some(code @ 1..=0xFFF)) => code as i32,
            // The owner violates the protocol.
            (0, _) => FI_EIO,
            (code, _) => code,
        };
        let is_write = kind.class == AtomicClass::Write;
        (if is_write { CompletionKind::Put } else { CompletionKind::Get }, entry)
    }

    /// Executes an operation of a peer on memory of this side, and replies. The request is ended when
    /// the reply has left: a peer that takes no replies has a limited number of them here.
    pub(super) fn serve_atomic(&self, message: &ServiceMessage) {
        let word = |index: usize| {
            let bytes = message.bytes.get(8 * index..).and_then(|rest| rest.first_chunk::<8>());
            bytes.map(|bytes| u64::from_le_bytes(*bytes))
        };
        let Some(ticket) = word(0) else {
            tracing::debug!("dropping an invalid request");
            return self.messages.end_service(message.peer, message.connection);
        };
        let mut results = Vec::new();
        let request = (kind_of(message.envelope.tag >> 8), word(1), word(2));
        let code = match request {
            (Some((kind, count)), Some(key), Some(address)) => {
                let operands = &message.bytes[HEADER_BYTES..];
                let bytes = count * kind.datatype.size();
                let extent = RmaExtent { key, address, length: bytes as u64 };
                self.execute_atomic(kind, count, extent, operands, &mut results)
            }
            _ => FI_EINVAL,
        };
        let envelope = Envelope { space: MatchSpace::Reply, tag: ticket, data: Some(code as u64) };
        self.reply(message, envelope, results);
    }

    /// Replies to a request, and ends it when the reply has left.
    fn reply(&self, message: &ServiceMessage, envelope: Envelope, bytes: Vec<u8>) {
        let ServiceMessage { peer, connection, .. } = *message;
        // A peer that has connected again does not wait for it.
        if self.messages.connection_number(peer) != Ok(connection) {
            return self.messages.end_service(peer, connection);
        }
        let bytes = bytes.into_boxed_slice();
        let pieces = [Segment::source(bytes.as_ptr(), bytes.len())];
        let role = TrackedRole::Reply { peer, connection };
        let op = TrackedOp { bytes: Some(bytes), role, ..TrackedOp::new(0, true) };
        let mark = self.tracked.add(op);
        let options =
            CompletionOptions { context: mark, silent_on_success: false, delivery_complete: false };
        self.service.replies_in_flight.fetch_add(1, Ordering::AcqRel);
        // SAFETY: the tracked operation owns the bytes until completion.
        match unsafe { self.messages.post_send(peer, envelope, &pieces, options) } {
            Ok(None) => {}
            Ok(Some(report)) => self.deliver(&report),
            Err(error) => {
                tracing::debug!(%error, "the reply to an atomic operation was not sent");
                self.tracked.remove(mark);
                self.on_reply_sent(peer, connection);
            }
        }
    }

    /// Executes an operation in registered memory. Returns an error code, or 0.
    fn execute_atomic(
        &self,
        kind: AtomicKind,
        count: usize,
        extent: RmaExtent,
        operands: &[u8],
        results: &mut Vec<u8>,
    ) -> i32 {
        let bytes = extent.length as usize;
        if operands.len() != kind.operand_bytes(bytes) {
            return FI_EINVAL;
        }
        let (values, compare) = operands.split_at(operands.len().min(bytes));
        let operands = AtomicOperands { values, compare };
        let applied = self.service.mr_table.access(extent, kind.rights(), |at| {
            // SAFETY: the table guarantees the bytes of the extent while this runs.
            unsafe { apply(kind, at, count, operands, results) }
        });
        match applied {
            Ok(Ok(())) => 0,
            Ok(Err(Misaligned)) => FI_EINVAL,
            Err(denied) => denied.code(),
        }
    }
}
