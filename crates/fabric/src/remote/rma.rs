//! Reads and writes of a peer's memory: split into fragments of one packet each, of which a few are
//! in flight at a time. Every fragment is replied to, and the last reply completes an access.
//!
//! The inner endpoint never uses the memory of an access: bytes are copied into packets, and out of
//! them.

use std::collections::{HashMap, VecDeque};

use memferry_message::{
    DisconnectReason, Error, RemoteEvent, RemoteRma, RemoteRmaOp, Rights, ValidationError,
};

use super::FabricTransport;
use super::packet::{MAX_EAGER, PacketBody};
use super::peers::QueuedOutput;
use crate::mr_table::{RmaDenied, RmaExtent};

/// The maximum number of fragments that wait for their replies, which a peer must be able to
/// buffer.
pub(super) const MAX_FRAGMENTS: usize = 32;

/// The accesses to one peer.
#[derive(Debug, Default)]
pub(super) struct OutgoingRma {
    all: HashMap<u64, RmaTransfer>,
    /// Accesses that are not requested completely, in order.
    pending: VecDeque<u64>,
    /// By ticket.
    fragments: HashMap<u64, RmaFragment>,
}

#[derive(Debug)]
struct RmaTransfer {
    rma: RemoteRma,
    /// The number of bytes requested.
    requested: usize,
    /// The number of fragments without a reply.
    fragments: usize,
    /// The first error, after which no fragment is requested.
    failure: Option<Error>,
}

/// A fragment that waits for its reply.
#[derive(Debug, Clone, Copy)]
struct RmaFragment {
    number: u64,
    offset: usize,
    length: usize,
}

/// The packet that requests a fragment, and its payload.
#[derive(Debug)]
struct FragmentRequest {
    body: PacketBody,
    payload: *const u8,
    length: usize,
}

/// A completed access.
type RmaResult = (u64, Result<(), Error>);

impl OutgoingRma {
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    fn start(&mut self, number: u64, rma: &RemoteRma) {
        let access = RmaTransfer { rma: *rma, requested: 0, fragments: 0, failure: None };
        self.all.insert(number, access);
        self.pending.push_back(number);
    }

    /// The next fragment to request, if another may be in flight.
    fn next_request(&mut self, ticket: u64) -> Option<FragmentRequest> {
        if self.fragments.len() >= MAX_FRAGMENTS {
            return None;
        }
        let number = *self.pending.front()?;
        let access = self.all.get_mut(&number).expect("a pending access exists");
        let RemoteRma { op, key, address, local } = access.rma;
        let offset = access.requested;
        let remaining = local.length - offset;
        let length = remaining.min(MAX_EAGER);
        access.requested += length;
        access.fragments += 1;
        if access.requested == local.length {
            self.pending.pop_front();
        }
        self.fragments.insert(ticket, RmaFragment { number, offset, length });
        let address = address.wrapping_add(offset as u64);
        let extent = RmaExtent { key, address, length: remaining as u64 };
        Some(match op {
            RemoteRmaOp::Put => {
                let payload = local.address.wrapping_add(offset).cast_const();
                FragmentRequest { body: PacketBody::Write { ticket, extent }, payload, length }
            }
            RemoteRmaOp::Get => {
                let body = PacketBody::Read { ticket, extent, length: length as u64 };
                FragmentRequest { body, payload: std::ptr::null(), length: 0 }
            }
        })
    }

    /// Handles the reply to a fragment. Returns the access that has completed with it, if any.
    fn on_reply(
        &mut self,
        ticket: u64,
        denial: Option<RmaDenied>,
        payload: &[u8],
    ) -> Result<Option<RmaResult>, DisconnectReason> {
        let fragment = self.fragments.remove(&ticket);
        let fragment =
            fragment.ok_or(DisconnectReason::ProtocolViolation("reply without a request"))?;
        let access = self.all.get_mut(&fragment.number).expect("an access with fragments exists");
        let RemoteRma { op, local, .. } = access.rma;
        let expected = match (op, denial) {
            (RemoteRmaOp::Get, None) => fragment.length,
            _ => 0,
        };
        if payload.len() != expected {
            return Err(DisconnectReason::ProtocolViolation("reply of a wrong length"));
        }
        let at = local.address.wrapping_add(fragment.offset);
        if expected > 0 {
            // SAFETY: the access is in flight, so its owner guarantees the memory, which contains
            // this fragment; the packet belongs to this side.
            unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), at, expected) };
        }
        access.fragments -= 1;
        if let Some(denial) = denial
            && access.failure.is_none()
        {
            access.failure = Some(access.error_of(denial));
            self.pending.retain(|waiting| *waiting != fragment.number);
        }
        let is_requested = access.failure.is_some() || access.requested == local.length;
        if access.fragments > 0 || !is_requested {
            return Ok(None);
        }
        let failure = self.all.remove(&fragment.number).and_then(|access| access.failure);
        Ok(Some((fragment.number, failure.map_or(Ok(()), Err))))
    }

    /// Removes all accesses, and returns their numbers.
    fn clear(&mut self) -> Vec<u64> {
        let ended = self.all.keys().copied().collect();
        *self = Self::default();
        ended
    }
}

impl RmaTransfer {
    /// The error, the same as for memory of this host.
    fn error_of(&self, denial: RmaDenied) -> Error {
        let RemoteRma { op, address, local, .. } = self.rma;
        let (asked, given) = match op {
            RemoteRmaOp::Put => (Rights::WRITE, Rights::READ),
            RemoteRmaOp::Get => (Rights::READ, Rights::WRITE),
        };
        match denial {
            RmaDenied::UnknownKey => Error::Withdrawn,
            RmaDenied::NoRight => Error::NotPermitted { asked, given },
            RmaDenied::Outside { region_bytes: window_bytes } => {
                let (offset, bytes) = (address, local.length as u64);
                ValidationError::OutsideWindow { offset, bytes, window_bytes }.into()
            }
        }
    }
}

impl FabricTransport {
    pub(super) fn begin_rma(&mut self, peer: usize, number: u64, access: &RemoteRma) {
        if let Some(reason) = self.peers[peer].disconnect_reason() {
            return self.report_rma(number, Err(Error::PeerDisconnected(reason.into())));
        }
        self.peers[peer].rma.start(number, access);
        self.request_fragments(peer);
    }

    /// Requests as many fragments as may be in flight.
    fn request_fragments(&mut self, peer: usize) {
        while let Some(request) = self.peers[peer].rma.next_request(self.tickets + 1) {
            self.tickets += 1;
            let mut packet = self.packet(peer, &request.body, request.length);
            if request.length > 0 {
                // SAFETY: the access is in flight, so its owner guarantees the bytes.
                packet.extend_from_slice(unsafe {
                    std::slice::from_raw_parts(request.payload, request.length)
                });
            }
            self.enqueue(peer, QueuedOutput::Packet(packet));
        }
    }

    /// Handles the reply to a fragment.
    pub(super) fn on_reply(
        &mut self,
        peer: usize,
        ticket: u64,
        denial: Option<RmaDenied>,
        payload: &[u8],
    ) -> Result<(), DisconnectReason> {
        match self.peers[peer].rma.on_reply(ticket, denial, payload)? {
            Some((number, outcome)) => self.report_rma(number, outcome),
            None => self.report_progress(peer),
        }
        self.request_fragments(peer);
        Ok(())
    }

    /// Fails the accesses to a disconnected peer.
    pub(super) fn drop_rma(&mut self, peer: usize, reason: &DisconnectReason) {
        for number in self.peers[peer].rma.clear() {
            self.report_rma(number, Err(Error::PeerDisconnected(reason.clone().into())));
        }
    }

    /// Reports progress, once per poll.
    pub(super) fn report_progress(&mut self, peer: usize) {
        if !matches!(self.events.last(), Some(RemoteEvent::Progress { .. })) {
            self.events.push(RemoteEvent::Progress { peer: self.peers[peer].number });
        }
    }

    pub(super) fn report_rma(&mut self, number: u64, outcome: Result<(), Error>) {
        self.events.push(RemoteEvent::RmaCompleted { number, outcome });
    }
}
