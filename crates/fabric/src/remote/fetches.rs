//! Announced messages of peers: memory is given to the inner endpoint first, then the peer is asked
//! to send straight into it.

use memferry_message::{CarrierEvent, Error, Gone, Piece};

use super::flights::Flight;
use super::inner::{Finished, Refused};
use super::packet::Note;
use super::peers::Outgoing;
use super::{RemoteCarrier, memory};

/// A fetch that the inner endpoint has, or will have.
#[derive(Debug)]
pub(super) struct Fetch {
    pub(super) number: u64,
    ticket: u64,
    length: u64,
    acknowledged: bool,
    pieces: Vec<Piece>,
    /// The bytes come here first if the inner endpoint cannot take so many pieces.
    gathered: Option<Vec<u8>>,
}

impl RemoteCarrier {
    /// Fetches the first bytes of an announced message.
    pub(super) fn begin_fetch(
        &mut self,
        peer: usize,
        ticket: u64,
        number: u64,
        pieces: &[Piece],
        length: u64,
    ) {
        let offer = self.peers[peer].offers.remove(&ticket);
        let gone = self.peers[peer].gone();
        let (Some(offer), None) = (offer, &gone) else {
            let gone = gone.unwrap_or(Gone::Ended);
            return self.fetched(number, Err(Error::PeerGone(gone)));
        };
        let length = length.min(offer.length).min(memory::total(pieces));
        if length == 0 {
            // Asking for nothing tells the sender that it is over.
            self.push_note(peer, &Note::Fetch { ticket, label: 0, length: 0 });
            return self.fetched(number, Ok(()));
        }
        let (acknowledged, pieces, gathered) = (offer.acknowledged, pieces.to_vec(), None);
        let fetch = Fetch { number, ticket, length, acknowledged, pieces, gathered };
        self.push(peer, Outgoing::Fetch(fetch));
    }

    /// Gives the memory of a fetch to the inner endpoint, then asks the peer.
    pub(super) fn land(&mut self, peer: usize, mut fetch: Fetch) -> Result<(), (Fetch, Refused)> {
        let from = match self.inner_number(peer) {
            Ok(from) => from,
            Err(refused) => return Err((fetch, refused)),
        };
        let context = self.flights.next();
        let vectors = memory::vectors(&fetch.pieces, fetch.length, self.inner.most_pieces());
        let vectors = vectors.unwrap_or_else(|| {
            let bytes = fetch.gathered.get_or_insert_with(|| vec![0; fetch.length as usize]);
            memory::own_vector(bytes)
        });
        let label = self.labels + 1;
        // SAFETY: the pieces stay valid until `Fetched` is told, and the gathered bytes are kept.
        let taken = unsafe { self.inner.receive_labelled(&vectors, from, label, context) };
        if let Err(refused) = taken {
            return Err((fetch, refused));
        }
        self.labels = label;
        let note = Note::Fetch { ticket: fetch.ticket, label, length: fetch.length };
        self.peers[peer].under_way += 1;
        self.flights.insert(Flight::Landing { peer, fetch });
        let packet = self.packet(peer, &note, 0);
        // In its place in the order.
        self.peers[peer].outgoing.push_front(Outgoing::Packet(packet));
        Ok(())
    }

    /// The bytes of a fetch have come, or will not.
    pub(super) fn landed(&mut self, peer: usize, fetch: Fetch, finished: Finished) {
        self.peers[peer].under_way -= 1;
        let is_whole = finished.length as u64 == fetch.length;
        let outcome = match (finished.outcome, self.peers[peer].gone()) {
            (Ok(()), _) if is_whole => Ok(()),
            (_, Some(gone)) => Err(gone),
            (Ok(()), None) => Err(Gone::Misbehaved("it sent fewer bytes than it was asked for")),
            (Err(code), None) => {
                tracing::debug!(code, "bytes from another host did not come");
                Err(Gone::Ended)
            }
        };
        if let Err(gone) = &outcome {
            self.end(peer, gone.clone());
        } else {
            if let Some(bytes) = &fetch.gathered {
                // SAFETY: the receive is under way until `Fetched` is told.
                unsafe { memory::scatter(&fetch.pieces, bytes) };
            }
            if fetch.acknowledged && self.peers[peer].gone().is_none() {
                self.push_note(peer, &Note::Done { ticket: fetch.ticket });
            }
        }
        self.fetched(fetch.number, outcome.map_err(Error::PeerGone));
        self.settle(peer);
    }

    pub(super) fn fetched(&mut self, number: u64, outcome: Result<(), Error>) {
        self.events.push(CarrierEvent::Fetched { number, outcome });
    }
}
