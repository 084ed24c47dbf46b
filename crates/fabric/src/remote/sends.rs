//! Messages to peers: small ones in one packet while the peer has room, others announced and sent
//! straight from their memory when the peer asks for them.

use memferry_message::{CarrierEvent, Envelope, Error, Gone, Piece};

use super::flights::Flight;
use super::inner::Refused;
use super::packet::{Note, SMALL};
use super::peers::{MOST_OFFERS, Outgoing, ROOM, Remote, cost};
use super::{RemoteCarrier, memory};

/// An announced message of this side's.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) number: u64,
    pieces: Vec<Piece>,
    length: u64,
    delivered: bool,
    stage: Stage,
    /// The peer has said that it has the bytes.
    is_there: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The peer has not asked for it.
    Announced,
    /// The inner endpoint has it, or will have it.
    Asked { is_under_way: bool },
    /// Its memory is free.
    Left,
}

/// A message that cannot even be announced yet.
#[derive(Debug)]
pub(super) struct HeldBack {
    number: u64,
    envelope: Envelope,
    pieces: Vec<Piece>,
    delivered: bool,
}

/// Whether a message goes in a packet of its own.
fn is_whole(remote: &Remote, length: u64, delivered: bool) -> bool {
    length <= SMALL as u64 && !delivered && remote.spent + cost(length) <= ROOM
}

/// Whether a message can be sent or announced now.
fn can_go(remote: &Remote, length: u64, delivered: bool) -> bool {
    is_whole(remote, length, delivered) || remote.sends.len() < MOST_OFFERS - 1
}

impl Sending {
    /// Whether the inner endpoint may read its memory.
    pub(super) fn is_under_way(&self) -> bool {
        self.stage == Stage::Asked { is_under_way: true }
    }

    fn is_over(&self) -> bool {
        self.stage == Stage::Left && (self.is_there || !self.delivered)
    }
}

impl RemoteCarrier {
    /// Takes a message for a peer.
    pub(super) fn begin_send(
        &mut self,
        peer: usize,
        number: u64,
        envelope: &Envelope,
        pieces: &[Piece],
        delivered: bool,
    ) {
        if let Some(gone) = self.peers[peer].gone() {
            return self.sent(number, Err(Error::PeerGone(gone)));
        }
        let (envelope, remote) = (*envelope, &mut self.peers[peer]);
        if !remote.held_back.is_empty() || !can_go(remote, memory::total(pieces), delivered) {
            let pieces = pieces.to_vec();
            return remote.held_back.push_back(HeldBack { number, envelope, pieces, delivered });
        }
        self.dispatch(peer, number, envelope, pieces, delivered);
    }

    /// Sends what was held back, as far as that is possible by now.
    fn send_held_back(&mut self, peer: usize) {
        while let Some(first) = self.peers[peer].held_back.front()
            && can_go(&self.peers[peer], memory::total(&first.pieces), first.delivered)
            && let Some(first) = self.peers[peer].held_back.pop_front()
        {
            let HeldBack { number, envelope, pieces, delivered } = first;
            self.dispatch(peer, number, envelope, &pieces, delivered);
        }
    }

    /// Sends a message, or announces it.
    fn dispatch(
        &mut self,
        peer: usize,
        number: u64,
        envelope: Envelope,
        pieces: &[Piece],
        delivered: bool,
    ) {
        let length = memory::total(pieces);
        if is_whole(&self.peers[peer], length, delivered) {
            let mut bytes = self.packet(peer, &Note::Whole { envelope }, length as usize);
            // SAFETY: the message is under way, so its owner vouches for the pieces.
            unsafe { memory::gather(pieces, length, &mut bytes) };
            self.peers[peer].spent += cost(length);
            self.sent(number, Ok(()));
            return self.push(peer, Outgoing::Packet(bytes));
        }
        self.tickets += 1;
        let ticket = self.tickets;
        let stage = Stage::Announced;
        let sending =
            Sending { number, pieces: pieces.to_vec(), length, delivered, stage, is_there: false };
        self.peers[peer].sends.insert(ticket, sending);
        let note = Note::Announce { envelope, length, ticket, acknowledged: delivered };
        self.push_note(peer, &note);
    }

    /// A peer wants the first bytes of an announced message.
    pub(super) fn asked(
        &mut self,
        peer: usize,
        ticket: u64,
        label: u64,
        length: u64,
    ) -> Result<(), Gone> {
        let sending = self.peers[peer].sends.get_mut(&ticket);
        let sending = sending.ok_or(Gone::Misbehaved("it asked for what was not announced"))?;
        if sending.stage != Stage::Announced || length > sending.length {
            return Err(Gone::Misbehaved("it asked for more than was announced"));
        }
        if length == 0 {
            (sending.stage, sending.is_there) = (Stage::Left, true);
            self.end_if_over(peer, ticket);
        } else {
            sending.stage = Stage::Asked { is_under_way: false };
            self.push(peer, Outgoing::Bytes { ticket, label, length });
        }
        Ok(())
    }

    /// Hands the bytes of a message to the inner endpoint.
    pub(super) fn depart(
        &mut self,
        peer: usize,
        ticket: u64,
        label: u64,
        length: u64,
    ) -> Result<(), Refused> {
        let to = self.inner_number(peer)?;
        let context = self.flights.next();
        let remote = &mut self.peers[peer];
        // A peer that is gone takes its messages along.
        let Some(sending) = remote.sends.get_mut(&ticket) else { return Ok(()) };
        let mut gathered = None;
        let vectors = memory::vectors(&sending.pieces, length, self.inner.most_pieces());
        let vectors = vectors.unwrap_or_else(|| {
            let bytes = gathered.insert(Vec::with_capacity(length as usize));
            // SAFETY: the message is under way, so its owner vouches for the pieces.
            unsafe { memory::gather(&sending.pieces, length, bytes) };
            memory::own_vector(bytes)
        });
        // SAFETY: the pieces stay as they are until `Sent` is told, and the gathered bytes are kept.
        unsafe { self.inner.send_labelled(&vectors, to, label, context)? };
        sending.stage = Stage::Asked { is_under_way: true };
        remote.under_way += 1;
        self.flights.insert(Flight::Departure { peer, ticket, _gathered: gathered });
        Ok(())
    }

    /// The inner endpoint has sent the bytes of a message, or could not.
    pub(super) fn departed(&mut self, peer: usize, ticket: u64, outcome: Result<(), Gone>) {
        self.peers[peer].under_way -= 1;
        match outcome {
            Ok(()) => {
                if let Some(sending) = self.peers[peer].sends.get_mut(&ticket) {
                    sending.stage = Stage::Left;
                }
                self.end_if_over(peer, ticket);
                // Nobody is there to acknowledge it.
                self.drop_sends(peer);
            }
            Err(gone) => {
                if let Some(sending) = self.peers[peer].sends.remove(&ticket) {
                    self.sent(sending.number, Err(Error::PeerGone(gone.clone())));
                }
                self.end(peer, gone);
            }
        }
        self.settle(peer);
    }

    /// A peer says that it has the bytes.
    pub(super) fn arrived_there(&mut self, peer: usize, ticket: u64) -> Result<(), Gone> {
        let sending = self.peers[peer].sends.get_mut(&ticket);
        match sending.filter(|sending| sending.delivered && sending.stage != Stage::Announced) {
            // It may know before this side has looked at its own end.
            Some(sending) => sending.is_there = true,
            None => return Err(Gone::Misbehaved("it has what was not sent")),
        }
        self.end_if_over(peer, ticket);
        Ok(())
    }

    /// A peer has room for more whole messages.
    pub(super) fn has_room(&mut self, peer: usize, cost: u64) -> Result<(), Gone> {
        let spent = &mut self.peers[peer].spent;
        *spent = spent.checked_sub(cost).ok_or(Gone::Misbehaved("it took what was not sent"))?;
        self.send_held_back(peer);
        Ok(())
    }

    fn end_if_over(&mut self, peer: usize, ticket: u64) {
        let sends = &mut self.peers[peer].sends;
        if sends.get(&ticket).is_some_and(Sending::is_over)
            && let Some(sending) = sends.remove(&ticket)
        {
            self.sent(sending.number, Ok(()));
            if self.peers[peer].gone().is_none() {
                self.send_held_back(peer);
            }
        }
    }

    /// Ends the messages to a peer that is gone, except those whose memory is still in use.
    pub(super) fn drop_sends(&mut self, peer: usize) {
        let Some(gone) = self.peers[peer].gone() else { return };
        let held_back = std::mem::take(&mut self.peers[peer].held_back);
        let mut ended: Vec<_> = held_back.into_iter().map(|message| message.number).collect();
        self.peers[peer].sends.retain(|_, sending| {
            if !sending.is_under_way() {
                ended.push(sending.number);
            }
            sending.is_under_way()
        });
        for number in ended {
            self.sent(number, Err(Error::PeerGone(gone.clone())));
        }
    }

    fn sent(&mut self, number: u64, outcome: Result<(), Error>) {
        self.events.push(CarrierEvent::Sent { number, outcome });
    }
}
