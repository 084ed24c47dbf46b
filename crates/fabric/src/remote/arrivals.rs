//! Packets from peers: each is checked against what this side knows, and one that cannot be right
//! ends its peer.

use memferry_message::{CarrierEvent, Envelope, Gone};

use super::packet::{self, Note, Packet};
use super::peers::{MOST_OFFERS, Offer, ROOM, cost};
use super::{Name, RemoteCarrier, identifier_of};
use crate::abi::FI_ADDR_NOTAVAIL;
use crate::address::{Address, HostId};

/// Whether an address is one that is not reached by way of another host.
fn is_of_this_host(name: &Name) -> bool {
    Address::from_bytes(name).is_some_and(|address| address.host == HostId::ours())
}

impl RemoteCarrier {
    /// A packet has come, from this inner number as far as that is known.
    pub(super) fn arrived(&mut self, bytes: &[u8], source: u64) {
        let Some((from, to)) = packet::names(bytes) else {
            return tracing::warn!("something that is no packet was dropped");
        };
        if to != identifier_of(&self.name) {
            return tracing::debug!("a packet for somebody who had this address before");
        }
        if is_of_this_host(&from) {
            return tracing::warn!("a packet from another host that claims to be of this one");
        }
        let packet = packet::decode(bytes);
        let number = match packet {
            Ok(_) => self.directory.number(&from),
            // Nobody gets a number for that.
            Err(_) => self.directory.find(&from),
        };
        let Some(peer) = number.and_then(|number| self.peer_of(number)) else {
            return tracing::warn!("a packet from nowhere was dropped");
        };
        if !self.is_sender(peer, source) {
            return tracing::warn!(peer, "a packet was dropped: another has sent it than it says");
        }
        self.peers[peer].heard += 1;
        if self.peers[peer].gone().is_some() {
            return;
        }
        let told = match packet {
            Ok(packet) => self.told(peer, &packet),
            Err(nonsense) => Err(Gone::Misbehaved(nonsense.0)),
        };
        if let Err(gone) = told {
            self.end(peer, gone);
        }
    }

    /// Whether a packet that came from this inner number can be a peer's.
    ///
    /// The inner endpoint knows the senders whose addresses it was given. A peer that speaks first is
    /// not among them, and is believed; from the first packet on that certainly came from it, all must.
    fn is_sender(&mut self, peer: usize, source: u64) -> bool {
        let Ok(expected) = self.inner_number(peer) else { return false };
        let remote = &mut self.peers[peer];
        remote.is_confirmed |= source == expected;
        source == expected || (source == FI_ADDR_NOTAVAIL && !remote.is_confirmed)
    }

    /// What a peer says.
    fn told(&mut self, peer: usize, packet: &Packet<'_>) -> Result<(), Gone> {
        match packet.note {
            Note::Whole { envelope } => self.whole(peer, envelope, packet.payload),
            Note::Announce { envelope, length, ticket, acknowledged } => {
                let offers = &mut self.peers[peer].offers;
                if offers.len() >= MOST_OFFERS
                    || offers.insert(ticket, Offer { length, acknowledged }).is_some()
                {
                    return Err(Gone::Misbehaved("it announced too much, or the same twice"));
                }
                let peer = self.peers[peer].number;
                self.events.push(CarrierEvent::Announced { peer, envelope, length, ticket });
                Ok(())
            }
            Note::Fetch { ticket, label, length } => self.asked(peer, ticket, label, length),
            Note::Done { ticket } => self.arrived_there(peer, ticket),
            Note::Room { cost } => self.has_room(peer, cost),
            Note::Bye => Err(Gone::Closed),
            Note::Write { ticket, extent } => {
                self.serve_write(peer, ticket, extent, packet.payload)
            }
            Note::Read { ticket, extent, length } => self.serve_read(peer, ticket, extent, length),
            Note::Answer { ticket, denial } => self.answered(peer, ticket, denial, packet.payload),
        }
    }

    fn whole(&mut self, peer: usize, envelope: Envelope, payload: &[u8]) -> Result<(), Gone> {
        let held = &mut self.peers[peer].held;
        *held += cost(payload.len() as u64);
        if *held > ROOM {
            return Err(Gone::Misbehaved("it sent more than there was room for"));
        }
        let (peer, bytes) = (self.peers[peer].number, payload.to_vec());
        self.events.push(CarrierEvent::Arrived { peer, envelope, bytes });
        Ok(())
    }

    /// A whole message of a peer's was taken. It is told of many at once.
    pub(super) fn make_room(&mut self, peer: usize, bytes: u64) {
        let remote = &mut self.peers[peer];
        remote.taken += cost(bytes);
        if remote.taken >= ROOM / 4 && remote.gone().is_none() {
            // What is told as taken was held: both count the same messages.
            let cost = std::mem::take(&mut remote.taken).min(remote.held);
            remote.held -= cost;
            self.push_note(peer, &Note::Room { cost });
        }
    }
}
