//! Packets from peers: each is checked against what this side knows, and one that cannot be right
//! ends its peer.

use memferry_message::{CarrierEvent, Envelope, Gone};

use super::packet::{self, Note, Packet};
use super::peers::{MOST_OFFERS, Offer, ROOM, cost};
use super::{RemoteCarrier, identifier_of};

impl RemoteCarrier {
    /// A packet has come.
    pub(super) fn arrived(&mut self, bytes: &[u8]) {
        let packet = match packet::decode(bytes) {
            Ok(packet) => packet,
            Err(nonsense) => {
                tracing::warn!(what = nonsense.0, "a packet that no peer sends was dropped");
                let known = packet::sender(bytes).and_then(|from| self.directory.find(&from));
                if let Some(peer) = known.and_then(|number| self.peer_of(number)) {
                    self.end(peer, Gone::Misbehaved(nonsense.0));
                }
                return;
            }
        };
        if packet.to != identifier_of(&self.name) {
            return tracing::debug!("a packet for somebody who had this address before");
        }
        let number = self.directory.number(&packet.from);
        let Some(peer) = number.and_then(|number| self.peer_of(number)) else {
            return tracing::warn!("a packet from nowhere was dropped");
        };
        self.peers[peer].heard += 1;
        if self.peers[peer].gone().is_none()
            && let Err(gone) = self.told(peer, &packet)
        {
            self.end(peer, gone);
        }
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
                let peer = peer as u64;
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
        let (peer, bytes) = (peer as u64, payload.to_vec());
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
