//! What arrives: each note is matched with the operation it belongs to. Nothing that a note says
//! is believed before it was held against what this side knows.

use memferry_sys::shared_memory::Access;

use super::{Assembling, Kept, PIECES_OF_ONE, PeerSlot, Request, State};
use crate::envelope::Envelope;
use crate::error::{Error, Gone};
use crate::path::{self, ReceiveStage, Receiving, Step};
use crate::pieces::{MOST_PIECES, scatter};
use crate::plan::LARGEST_EAGER_LIMIT;
use crate::ring::cells::{Nonsense, Words};
use crate::ring::fullness::{NO_MESSAGES, NO_PAYLOADS};
use crate::ring::layout::{CELLS, SPACE_BYTES};
use crate::ring::space::Span;
use crate::wire::{Note, Number};

/// The most that one message can weigh.
const HEAVIEST: usize = 1 + MOST_PIECES / PIECES_OF_ONE;

/// What became of a note.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It was dealt with.
    Passed,
    /// The peer says that nothing follows.
    Closes,
}

impl State {
    /// Deals with one note of a peer.
    pub(super) fn deliver(&mut self, peer: usize, words: &Words) -> Result<Fate, Nonsense> {
        match Note::decode(words)? {
            Note::Inline { envelope, length, payload } => {
                self.deliver_inline(peer, envelope, length, &payload)?;
            }
            Note::Eager { envelope, length, first } => {
                self.deliver_eager(peer, envelope, length, first)?;
            }
            Note::Fragment { receiver: None, data } => self.deliver_next(peer, data)?,
            Note::Fragment { receiver: Some(number), data } => {
                self.deliver_requested(peer, number, data)?;
            }
            Note::Request { envelope, length, sender, source, core, expects, absent } => {
                let source = self.wire(peer).read_place(source, length)?;
                let request = Request { sender, source, core, expects, absent };
                match self.met(peer, &envelope, length) {
                    Some(number) => {
                        let arrival = self.matching.number_arrival();
                        self.meet(number, (peer, arrival), envelope, length, request)?;
                    }
                    None => drop(self.keep(peer, envelope, Kept::There { length, request })?),
                }
            }
            Note::Accept { sender, receiver, length, manner } => {
                self.accepted(peer, sender, receiver, length, &manner)?;
            }
            Note::Finish { sender, error } => self.finished(peer, sender, error)?,
            Note::Withdraw { sender } => self.withdraw(peer, sender),
            Note::Withdrawn { sender, granted } => self.withdrawn(peer, sender, granted),
            Note::Reach { read, write } => {
                let wire = self.wire(peer);
                (wire.their_reach, wire.has_told_reach) = ((read, write), true);
                wire.has_had_reach |= read || write;
            }
            Note::Share { region, writable, address, length } => {
                let access = if writable { Access::Write } else { Access::Read };
                self.wire(peer).import(region, access, address, length)?;
                self.region_changed(peer, region);
            }
            Note::Unshare { region } => {
                self.wire(peer).forget(region);
                self.region_changed(peer, region);
            }
            Note::Close => return Ok(Fate::Closes),
        }
        Ok(Fate::Passed)
    }

    /// The receive that takes a message that has arrived, if one is posted. Of one that takes
    /// several, a part is set apart for the message.
    #[inline]
    pub(super) fn met(&mut self, peer: usize, envelope: &Envelope, length: u64) -> Option<Number> {
        match self.matching.arrive(peer, envelope)? {
            (number, false) => Some(number),
            (number, true) => Some(self.set_apart(number, length)),
        }
    }

    #[inline]
    fn deliver_inline(
        &mut self,
        peer: usize,
        envelope: Envelope,
        length: u8,
        payload: &[u64; 6],
    ) -> Result<(), Nonsense> {
        let bytes = payload.as_ptr().cast::<u8>();
        if let Some(number) = self.met(peer, &envelope, length.into()) {
            let Some(receiving) = self.operations.receiving(number) else { return Ok(()) };
            receiving.meet(peer, envelope, length.into());
            let fits = receiving.accepted() as usize;
            // SAFETY: the operation is under way, so its owner vouches for the pieces, and no more
            // is written than they hold; the payload is a local copy of 48 bytes, of which the
            // length was checked.
            unsafe { scatter(receiving.pieces.as_slice(), 0, bytes, fits) };
            self.complete_receive(number);
            return Ok(());
        }
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(bytes, length.into()) }.to_vec();
        self.keep(peer, envelope, Kept::Here { arrived: bytes.len(), bytes }).map(drop)
    }

    fn deliver_eager(
        &mut self,
        peer: usize,
        envelope: Envelope,
        length: u64,
        first: Span,
    ) -> Result<(), Nonsense> {
        if self.connection(peer).assembling != Assembling::Nothing {
            return Err(Nonsense("a message inside another"));
        }
        if let Some(number) = self.met(peer, &envelope, length) {
            if let Some(receiving) = self.operations.receiving(number) {
                receiving.meet(peer, envelope, length);
                if u64::from(first.length) == length {
                    let wire = &mut self.peers[peer].connection.as_mut().expect("it is there").wire;
                    let fits = receiving.accepted() as usize;
                    // SAFETY: the operation is under way, so its owner vouches for the pieces, and
                    // no more is written than they hold; the span lies inside the space.
                    unsafe {
                        scatter(receiving.pieces.as_slice(), 0, wire.incoming(first), fits);
                    }
                    wire.used(first);
                    self.complete_receive(number);
                    return Ok(());
                }
                receiving.arrival = self.matching.number_arrival();
                receiving.stage = ReceiveStage::Arriving { arrived: 0, requested: None };
            }
            self.connection(peer).assembling = Assembling::Operation(number);
        } else {
            if length > LARGEST_EAGER_LIMIT {
                return Err(Nonsense("a message too long to be sent without being asked for"));
            }
            let kept = Kept::Here { bytes: vec![0; length as usize], arrived: 0 };
            let id = self.keep(peer, envelope, kept)?;
            self.connection(peer).assembling = Assembling::Kept(id);
        }
        self.deliver_next(peer, first)
    }

    /// More of the message that a peer is sending at once.
    fn deliver_next(&mut self, peer: usize, data: Span) -> Result<(), Nonsense> {
        match self.connection(peer).assembling {
            Assembling::Nothing => Err(Nonsense("a fragment of no message")),
            Assembling::Operation(number) => {
                if self.arrive(peer, number, data)? {
                    self.connection(peer).assembling = Assembling::Nothing;
                }
                Ok(())
            }
            Assembling::Kept(id) => self.deliver_kept(peer, id, data),
        }
    }

    fn deliver_kept(&mut self, peer: usize, id: u64, data: Span) -> Result<(), Nonsense> {
        let connection = self.peers[peer].connection.as_mut().expect("notes come from connections");
        let length = data.length as usize;
        let source = connection.wire.incoming(data);
        connection.wire.used(data);
        let Some(unexpected) = self.matching.kept(id) else {
            return Err(Nonsense("a fragment of a message that is gone"));
        };
        let Kept::Here { bytes, arrived } = &mut unexpected.message else {
            return Err(Nonsense("a fragment of a message that waits"));
        };
        if length > bytes.len() - *arrived {
            return Err(Nonsense("more fragments than the message has bytes"));
        }
        // SAFETY: the span lies inside the space, and the place behind what has arrived has room.
        unsafe {
            std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr().add(*arrived), length);
        }
        *arrived += length;
        if *arrived == bytes.len() {
            connection.assembling = Assembling::Nothing;
        }
        Ok(())
    }

    /// A fragment that a receive has asked for.
    fn deliver_requested(
        &mut self,
        peer: usize,
        number: Number,
        data: Span,
    ) -> Result<(), Nonsense> {
        let asked = self.operations.receiving(number).is_some_and(|receiving| {
            receiving.peer == peer
                && matches!(receiving.stage, ReceiveStage::Arriving { requested: Some(_), .. })
        });
        if !asked {
            return Err(Nonsense("a fragment that nobody asked for"));
        }
        self.arrive(peer, number, data).map(drop)
    }

    /// Puts a fragment into the memory of a receive. Returns whether the message is complete.
    fn arrive(&mut self, peer: usize, number: Number, data: Span) -> Result<bool, Nonsense> {
        let Self { operations, peers, .. } = self;
        let wire = &mut peers[peer].connection.as_mut().expect("it is connected").wire;
        let Some(receiving) = operations.receiving(number) else {
            return Err(Nonsense("a fragment for no receive"));
        };
        if path::arrive(receiving, data, wire)? != Step::Done {
            return Ok(false);
        }
        match receiving.stage {
            ReceiveStage::Arriving { requested: Some(requested), .. } => {
                if !self.tell_arrived(peer, number, requested.sender)? {
                    self.connection(peer).active.push(number);
                }
            }
            _ => self.complete_receive(number),
        }
        Ok(true)
    }

    /// A receive has all its bytes.
    #[inline]
    pub(super) fn complete_receive(&mut self, number: Number) {
        let Some(receiving) = self.operations.receiving(number) else { return };
        let (peer, tag) = (receiving.peer, receiving.envelope.tag);
        let (message_bytes, buffer_bytes) = (receiving.length, receiving.capacity);
        let outcome = if message_bytes > buffer_bytes {
            Err(Error::Truncated { message_bytes, buffer_bytes })
        } else {
            Ok(self.received(peer, tag, message_bytes))
        };
        self.operations.finish(number, outcome);
    }

    /// Keeps a message that nobody has asked for yet; returns its number. What a peer can have sent
    /// before it could know that there is no more room is kept too, and no more.
    pub(super) fn keep(
        &mut self,
        peer: usize,
        envelope: Envelope,
        kept: Kept,
    ) -> Result<u64, Nonsense> {
        let slot = &mut self.peers[peer];
        let count = slot.kept_count + kept.weight();
        let bytes = slot.kept_bytes + kept.bytes();
        // What comes by the carrier is bounded by the room that the carrier was told of.
        let is_bounded = slot.carried.is_none();
        if is_bounded
            && (count > self.settings.most_kept.saturating_add(2 * CELLS * HEAVIEST)
                || bytes > self.settings.most_kept_bytes.saturating_add(2 * SPACE_BYTES))
        {
            return Err(Nonsense("messages beyond what there is room for"));
        }
        (slot.kept_count, slot.kept_bytes) = (count, bytes);
        self.has_news = true;
        self.tell_fullness(peer);
        Ok(self.matching.keep(peer, envelope, kept))
    }

    /// Kept messages of a peer were taken.
    pub(super) fn let_go_of_kept(&mut self, peer: usize, count: usize, bytes: usize) {
        self.peers[peer].kept_count -= count;
        self.peers[peer].kept_bytes -= bytes;
        self.tell_fullness(peer);
    }

    /// Tells a peer what there is no room for, and again when there is plenty.
    fn tell_fullness(&mut self, peer: usize) {
        let PeerSlot { kept_bytes, kept_count, connection, .. } = &mut self.peers[peer];
        let Some(connection) = connection else { return };
        let said = connection.wire.fullness();
        let level = |used: usize, most: usize, what: u32| match used {
            _ if used >= most.max(1) => what,
            _ if used > most / 4 * 3 => said & what,
            _ => 0,
        };
        let now = level(*kept_bytes, self.settings.most_kept_bytes, NO_PAYLOADS)
            | level(*kept_count, self.settings.most_kept, NO_MESSAGES);
        if now != said {
            connection.wire.set_fullness(now);
        }
    }

    /// The error of a peer that is gone.
    pub(super) fn gone(&self, peer: usize) -> Error {
        Error::PeerGone(self.peers[peer].gone.clone().unwrap_or(Gone::Ended))
    }
}

impl Receiving {
    /// A message has met this receive.
    #[inline]
    pub(super) fn meet(&mut self, peer: usize, envelope: Envelope, length: u64) {
        (self.peer, self.envelope, self.length) = (peer, envelope, length);
    }
}
