//! Packets from peers: each is validated against the state of this side, and an invalid one
//! disconnects its peer.

use memferry_message::{DisconnectReason, Envelope, MatchSpace, RemoteEvent};

use super::packet::{self, Packet, PacketBody};
use super::peers::{CREDIT_LIMIT, MAX_PENDING_RTS, PeerRts, cost};
use super::{FabricTransport, RawAddress, identifier_of};
use crate::abi::FI_ADDR_NOTAVAIL;
use crate::address::{Address, HostId};

/// Returns whether an address belongs to this host.
fn is_of_this_host(name: &RawAddress) -> bool {
    Address::from_bytes(name).is_some_and(|address| address.host == HostId::ours())
}

impl FabricTransport {
    /// Handles a packet, from this inner number if the sender is known.
    pub(super) fn on_packet(&mut self, bytes: &[u8], source: u64) {
        let Some((from, to)) = packet::addresses(bytes) else {
            return tracing::warn!("dropping invalid packet");
        };
        if to != identifier_of(&self.address) {
            return tracing::debug!(
                "dropping packet addressed to a previous endpoint of this address"
            );
        }
        if is_of_this_host(&from) {
            return tracing::warn!(
                "dropping packet from another host with an address of this host"
            );
        }
        let packet = packet::decode(bytes);
        let number = match packet {
            Ok(_) => self.directory.number(&from),
            // An invalid packet allocates no number.
            Err(_) => self.directory.find(&from),
        };
        let Some(peer) = number.and_then(|number| self.peer_of(number)) else {
            return tracing::warn!(
                "dropping packet: unknown sender (no usable address, or peer table full)"
            );
        };
        if !self.is_sender(peer, source) {
            return tracing::warn!(
                peer,
                "dropping packet: header names another sender than the provider reports"
            );
        }
        self.peers[peer].packets_received += 1;
        if self.peers[peer].disconnect_reason().is_some() {
            return;
        }
        let handled = match packet {
            Ok(packet) => self.dispatch_packet(peer, &packet),
            Err(error) => Err(DisconnectReason::ProtocolViolation(error.0)),
        };
        if let Err(reason) = handled {
            self.disconnect(peer, reason);
        }
    }

    /// Returns whether a packet from this inner number can be from a peer.
    ///
    /// The inner endpoint knows the senders whose addresses were inserted. A peer that sends first
    /// is not among them, and is accepted; after the first packet with a known sender, all packets
    /// of the peer must have it.
    fn is_sender(&mut self, peer: usize, source: u64) -> bool {
        let Ok(expected) = self.inner_number(peer) else { return false };
        let remote = &mut self.peers[peer];
        remote.is_confirmed |= source == expected;
        source == expected || (source == FI_ADDR_NOTAVAIL && !remote.is_confirmed)
    }

    /// Dispatches a packet of a peer.
    fn dispatch_packet(
        &mut self,
        peer: usize,
        packet: &Packet<'_>,
    ) -> Result<(), DisconnectReason> {
        match packet.body {
            PacketBody::Eager { envelope } => self.on_eager(peer, envelope, packet.payload),
            PacketBody::Rts { envelope, length, ticket, acknowledged } => {
                let announced = &mut self.peers[peer].pending_rts;
                if announced.len() >= MAX_PENDING_RTS
                    || announced.insert(ticket, PeerRts { length, acknowledged }).is_some()
                {
                    return Err(DisconnectReason::ProtocolViolation(
                        "too many announcements, or a duplicate",
                    ));
                }
                let peer = self.peers[peer].number;
                self.events.push(RemoteEvent::Rts { peer, envelope, length, ticket });
                Ok(())
            }
            PacketBody::Cts { ticket, label, length } => self.on_cts(peer, ticket, label, length),
            PacketBody::Fin { ticket } => self.on_fin(peer, ticket),
            PacketBody::Credit { cost } => self.on_credit(peer, cost),
            PacketBody::Close => Err(DisconnectReason::Closed),
            PacketBody::Write { ticket, extent } => {
                self.serve_write(peer, ticket, extent, packet.payload)
            }
            PacketBody::Read { ticket, extent, length } => {
                self.serve_read(peer, ticket, extent, length)
            }
            PacketBody::Reply { ticket, denial } => {
                self.on_reply(peer, ticket, denial, packet.payload)
            }
        }
    }

    fn on_eager(
        &mut self,
        peer: usize,
        envelope: Envelope,
        payload: &[u8],
    ) -> Result<(), DisconnectReason> {
        // Requests take no credit; the port limits their number.
        if envelope.space != MatchSpace::Service {
            let granted = &mut self.peers[peer].credits_granted;
            *granted += cost(payload.len() as u64);
            if *granted > CREDIT_LIMIT {
                return Err(DisconnectReason::ProtocolViolation("credit exceeded"));
            }
        }
        let (peer, bytes) = (self.peers[peer].number, payload.to_vec());
        self.events.push(RemoteEvent::Arrived { peer, envelope, bytes });
        Ok(())
    }

    /// Returns the credit of a peer's message that was taken. Several returns are sent as one.
    pub(super) fn credit_peer(&mut self, peer: usize, bytes: u64) {
        let remote = &mut self.peers[peer];
        remote.credits_to_return += cost(bytes);
        if remote.credits_to_return >= CREDIT_LIMIT / 4 && remote.disconnect_reason().is_none() {
            // Returned credit was granted: both sides count the same messages.
            let cost = std::mem::take(&mut remote.credits_to_return).min(remote.credits_granted);
            remote.credits_granted -= cost;
            self.push_control(peer, &PacketBody::Credit { cost });
        }
    }
}
