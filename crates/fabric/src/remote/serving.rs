//! Reads and writes of peers, in registered memory of this side: each packet is checked and answered
//! at once, and nothing is kept of it.

use memferry_message::Gone;

use super::RemoteCarrier;
use super::accesses::MOST_PARTS;
use super::packet::{Note, SMALL};
use super::peers::Outgoing;
use crate::regions::Extent;

/// Answers to one peer that have not left, at most. A peer waits for answers before it asks for more.
const MOST_ANSWERS: usize = 4 * MOST_PARTS;

impl RemoteCarrier {
    /// A peer writes.
    pub(super) fn serve_write(
        &mut self,
        peer: usize,
        ticket: u64,
        extent: Extent,
        payload: &[u8],
    ) -> Result<(), Gone> {
        if payload.len() as u64 > extent.length {
            return Err(Gone::Misbehaved("it wrote more than it said"));
        }
        let denial = self.regions.write(extent, payload).err();
        let packet = self.packet(peer, &Note::Answer { ticket, denial }, 0);
        self.answer(peer, packet)
    }

    /// A peer reads.
    pub(super) fn serve_read(
        &mut self,
        peer: usize,
        ticket: u64,
        extent: Extent,
        length: u64,
    ) -> Result<(), Gone> {
        if length > extent.length || length > SMALL as u64 {
            return Err(Gone::Misbehaved("it wants more than it said"));
        }
        let mut packet = self.packet(peer, &Note::Answer { ticket, denial: None }, length as usize);
        if let Err(denial) = self.regions.read(extent, length as usize, &mut packet) {
            packet = self.packet(peer, &Note::Answer { ticket, denial: Some(denial) }, 0);
        }
        self.answer(peer, packet)
    }

    fn answer(&mut self, peer: usize, packet: Vec<u8>) -> Result<(), Gone> {
        let answers = &mut self.peers[peer].answers;
        if *answers >= MOST_ANSWERS {
            return Err(Gone::Misbehaved("it asked without taking the answers"));
        }
        *answers += 1;
        self.moved(peer);
        self.push(peer, Outgoing::Answer(packet));
        Ok(())
    }
}
