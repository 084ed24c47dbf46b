//! Reads and writes of peers in registered memory of this side: each packet is validated and
//! replied to at once, and no state is kept.

use memferry_message::DisconnectReason;

use super::FabricTransport;
use super::packet::{MAX_EAGER, PacketBody};
use super::peers::QueuedOutput;
use super::rma::MAX_FRAGMENTS;
use crate::mr_table::RmaExtent;

/// The maximum number of replies to one peer that are not sent. A correct peer waits for replies
/// before it sends more requests.
const MAX_REPLIES: usize = 4 * MAX_FRAGMENTS;

impl FabricTransport {
    /// Executes a write of a peer.
    pub(super) fn serve_write(
        &mut self,
        peer: usize,
        ticket: u64,
        extent: RmaExtent,
        payload: &[u8],
    ) -> Result<(), DisconnectReason> {
        if payload.len() as u64 > extent.length {
            return Err(DisconnectReason::ProtocolViolation("write longer than its extent"));
        }
        let denial = self.mr_table.write(extent, payload).err();
        let packet = self.packet(peer, &PacketBody::Reply { ticket, denial }, 0);
        self.push_reply(peer, packet)
    }

    /// Executes a read of a peer.
    pub(super) fn serve_read(
        &mut self,
        peer: usize,
        ticket: u64,
        extent: RmaExtent,
        length: u64,
    ) -> Result<(), DisconnectReason> {
        if length > extent.length || length > MAX_EAGER as u64 {
            return Err(DisconnectReason::ProtocolViolation("read longer than its extent"));
        }
        let mut packet =
            self.packet(peer, &PacketBody::Reply { ticket, denial: None }, length as usize);
        if let Err(denial) = self.mr_table.read(extent, length as usize, &mut packet) {
            packet = self.packet(peer, &PacketBody::Reply { ticket, denial: Some(denial) }, 0);
        }
        self.push_reply(peer, packet)
    }

    fn push_reply(&mut self, peer: usize, packet: Vec<u8>) -> Result<(), DisconnectReason> {
        let replies = &mut self.peers[peer].replies;
        if *replies >= MAX_REPLIES {
            return Err(DisconnectReason::ProtocolViolation("replies not drained"));
        }
        *replies += 1;
        self.report_progress(peer);
        self.enqueue(peer, QueuedOutput::Reply(packet));
        Ok(())
    }
}
