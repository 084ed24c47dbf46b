//! Peers on other hosts: what the carrier brings is matched like everything else.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;

use super::operations::Deed;
use super::submit::Begun;
use super::{Kept, Peer, PeerSlot, State};
use crate::carrier::{AccessWay, CarriedAccess, Carrier, CarrierEvent};
use crate::envelope::Envelope;
use crate::error::{Error, Gone, ValidationError};
use crate::matching::Want;
use crate::path::{ReceiveStage, SendStage};
use crate::pieces::{Piece, scatter};
use crate::plan::PathKind;
use crate::report::{Ending, ReportKind};
use crate::wire::Number;

/// Looks at everything else between two looks at the carrier, which asks the system and takes as long
/// as hundreds of them.
const LOOKS_BETWEEN: u32 = 32;
/// Looks in vain, one after the other, after the carrier had something to say.
const LOOKS_AFTER: u32 = 64;

/// The carrier of a port.
#[derive(Debug, Default)]
pub(super) struct Carried {
    carrier: Option<Box<dyn Carrier>>,
    /// Its peers' places.
    places: HashMap<u64, usize>,
    events: Vec<CarrierEvent>,
    /// Looks until the next look at the carrier, and looks that follow at once.
    pause: u32,
    expecting: u32,
}

impl Carried {
    /// Whether there is one.
    #[inline]
    pub(super) fn is_used(&self) -> bool {
        self.carrier.is_some()
    }

    /// Whether it is time to look. One that knows nobody is looked at together with the peers.
    #[inline]
    pub(super) fn is_due(&mut self) -> bool {
        if self.places.is_empty() {
            return false;
        }
        self.pause = self.pause.saturating_sub(1);
        self.expecting > 0 || self.pause == 0
    }

    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.carrier.as_ref().and_then(|carrier| carrier.descriptor())
    }

    pub(super) fn drop_carrier(&mut self) {
        self.carrier = None;
    }
}

impl State {
    /// Gives the port a carrier.
    pub(crate) fn carry(&mut self, carrier: Box<dyn Carrier>) -> Result<(), Error> {
        if self.closed {
            return Err(Error::Closed);
        }
        self.carried.carrier = Some(carrier);
        if let (Some(readiness), Some(descriptor)) = (&self.readiness, self.carried.descriptor()) {
            let _ = readiness.add(descriptor, false);
        }
        Ok(())
    }

    /// The peer of a number of the carrier's.
    pub(crate) fn know_carried(&mut self, number: u64) -> Result<Peer, Error> {
        if self.closed {
            return Err(Error::Closed);
        }
        let index = self.place_of_carried(number)?;
        self.peers[index].carried_uses += 1;
        Ok(self.peer(index))
    }

    /// Nobody needs a peer on another host any more, as often as it was asked for. What is under way
    /// with it goes on, and keeps its place.
    pub(super) fn forget_carried(&mut self, peer: usize) {
        let slot = &mut self.peers[peer];
        slot.carried_uses = slot.carried_uses.saturating_sub(1);
        if slot.carried.is_some() && slot.carried_uses == 0 {
            self.free_carried();
        }
    }

    /// Frees the places of peers on other hosts that nobody has asked for, and that nothing refers to:
    /// no operation, no posted receive and no kept message. One that speaks again gets another place.
    /// Returns whether there was any.
    pub(super) fn free_carried(&mut self) -> bool {
        let is_unused = |slot: &PeerSlot| {
            slot.carried.is_some() && slot.carried_uses == 0 && slot.kept_count == 0
        };
        if !self.peers.iter().any(is_unused) {
            return false;
        }
        let mut is_named = vec![false; self.peers.len()];
        for peer in self.operations.peers().chain(self.matching.posted_sources()) {
            is_named[peer] = true;
        }
        let mut any = false;
        for (slot, is_named) in self.peers.iter_mut().zip(is_named) {
            if is_unused(slot) && !is_named {
                any = true;
                slot.gone.get_or_insert(Gone::Closed);
                if let Some(number) = slot.carried.take() {
                    self.carried.places.remove(&number);
                }
            }
        }
        any
    }

    /// Whether anything can still come from whom a probe asks for, which counts as awaiting it.
    pub(super) fn probe_source(&mut self, want: &Want) -> Result<(), Error> {
        if let Some(peer) = want.source {
            self.peers[peer].is_awaited = true;
        }
        self.check_source(want)
    }

    /// Tells the carrier from whom messages are awaited.
    fn tell_awaited(&mut self) {
        for peer in self.matching.posted_sources() {
            self.peers[peer].is_awaited = true;
        }
        let awaited = self.peers.iter_mut().filter_map(|slot| {
            let is_awaited = std::mem::take(&mut slot.is_awaited) && slot.gone.is_none();
            slot.carried.filter(|_| is_awaited)
        });
        let awaited: Vec<_> = awaited.collect();
        if let Some(carrier) = &mut self.carried.carrier {
            carrier.awaited(&awaited);
        }
    }

    /// The carrier's number for a peer.
    pub(crate) fn carried_number(&self, peer: Peer) -> Option<u64> {
        self.find(peer).ok().and_then(|index| self.peers[index].carried)
    }

    fn place_of_carried(&mut self, number: u64) -> Result<usize, Error> {
        if let Some(index) = self.carried.places.get(&number) {
            return Ok(*index);
        }
        let index = self.make_place()?;
        let slot = &mut self.peers[index];
        (slot.carried, slot.carried_uses, slot.is_awaited) = (Some(number), 0, false);
        self.carried.places.insert(number, index);
        Ok(index)
    }

    pub(super) fn send_carried(
        &mut self,
        peer: usize,
        to: u64,
        envelope: Envelope,
        pieces: &[Piece],
        length: u64,
        ending: Option<Ending>,
    ) -> Begun {
        let mut sending = self.sending(peer, envelope, pieces, length, PathKind::Single);
        sending.stage = SendStage::Carried;
        let number = self.operations.insert(Deed::Send(sending), ending);
        let delivered = ending.is_some_and(|ending| ending.delivered);
        match &mut self.carried.carrier {
            Some(carrier) => carrier.send(to, number.0, &envelope, pieces, delivered),
            None => self.operations.finish(number, Err(Error::PeerGone(Gone::Ended))),
        }
        Begun::Underway(number)
    }

    /// An announced message has met a receive.
    pub(super) fn meet_carried(
        &mut self,
        number: Number,
        (peer, arrival): (usize, u64),
        envelope: Envelope,
        length: u64,
        ticket: u64,
    ) {
        let Some(receiving) = self.operations.receiving(number) else { return };
        receiving.meet(peer, envelope, length);
        receiving.arrival = arrival;
        receiving.stage = ReceiveStage::Carried;
        let (from, wanted) = (self.peers[peer].carried, receiving.accepted());
        if let (Some(carrier), Some(from)) = (&mut self.carried.carrier, from) {
            carrier.fetch(from, ticket, number.0, receiving.pieces.as_slice(), wanted);
        }
    }

    /// Begins an access to memory of a peer on another host.
    ///
    /// # Safety
    /// Until it has ended, the memory of this side must stay valid: for a put unchanged, for a get
    /// for writes that nobody else knows of.
    pub(crate) unsafe fn access_carried(
        &mut self,
        peer: Peer,
        access: &CarriedAccess,
        ending: Ending,
    ) -> Result<(), Error> {
        let index = self.find(peer)?;
        let (Some(to), Some(carrier)) = (self.peers[index].carried, &mut self.carried.carrier)
        else {
            return Err(self.gone(index));
        };
        let length = access.local.length;
        if access.local.address.is_null() && length > 0 {
            return Err(ValidationError::NullPointer(length).into());
        }
        if !self.operations.has_room() {
            return Err(ValidationError::TooManyOperations(self.operations.count()).into());
        }
        let kind = match access.way {
            AccessWay::Put => ReportKind::Put,
            AccessWay::Get => ReportKind::Get,
        };
        let number =
            self.operations.insert(Deed::CarriedAccess { kind, peer: index }, Some(ending));
        carrier.access(to, number.0, access);
        Ok(())
    }

    /// A message that had arrived whole was taken.
    pub(super) fn tell_carrier(&mut self, peer: usize, bytes: u64) {
        if let Some(from) = self.peers[peer].carried
            && let Some(carrier) = &mut self.carried.carrier
        {
            carrier.taken(from, bytes);
        }
    }

    /// Whether the carrier needs no look before its descriptor is readable.
    pub(super) fn is_carrier_quiet(&mut self) -> bool {
        self.carried.carrier.as_mut().is_none_or(|carrier| {
            let is_watched = carrier.descriptor().is_some();
            is_watched && carrier.is_quiet()
        })
    }

    /// Deals with what the carrier has to say. Returns whether there was anything.
    pub(super) fn look_at_carrier(&mut self) -> bool {
        let mut events = std::mem::take(&mut self.carried.events);
        if let Some(carrier) = &mut self.carried.carrier {
            carrier.poll(&mut events);
            let wants_awaited = carrier.wants_awaited();
            if wants_awaited {
                self.tell_awaited();
            }
        }
        let moved = !events.is_empty();
        let carried = &mut self.carried;
        carried.pause = LOOKS_BETWEEN;
        carried.expecting = if moved { LOOKS_AFTER } else { carried.expecting.saturating_sub(1) };
        for event in events.drain(..) {
            if let Err(error) = self.deliver_carried(event) {
                tracing::warn!(%error, "a message from another host was lost");
            }
        }
        self.carried.events = events;
        moved
    }

    fn deliver_carried(&mut self, event: CarrierEvent) -> Result<(), Error> {
        match event {
            CarrierEvent::Arrived { peer, envelope, bytes } => {
                let index = self.place_of_carried(peer)?;
                self.deliver_whole(index, envelope, bytes);
            }
            CarrierEvent::Announced { peer, envelope, length, ticket } => {
                let index = self.place_of_carried(peer)?;
                match self.met(index, &envelope, length) {
                    Some(number) => {
                        let arrival = self.matching.number_arrival();
                        self.meet_carried(number, (index, arrival), envelope, length, ticket);
                    }
                    None => {
                        let _ = self.keep(index, envelope, Kept::Elsewhere { length, ticket });
                    }
                }
            }
            CarrierEvent::Sent { number, outcome } => {
                let number = Number(number);
                let Some(sending) = self.operations.sending(number) else { return Ok(()) };
                let (peer, tag, length) = (sending.peer, sending.envelope.tag, sending.length);
                let outcome = outcome.map(|()| self.received(peer, tag, length));
                self.operations.finish(number, outcome);
            }
            CarrierEvent::Fetched { number, outcome } => match outcome {
                Ok(()) => self.complete_receive(Number(number)),
                Err(error) => {
                    let receiving = self.operations.receiving(Number(number));
                    if let (Some(receiving), Error::PeerGone(_)) = (receiving, &error) {
                        let (peer, arrival) = (receiving.peer, receiving.arrival);
                        self.note_lost(peer, arrival);
                    }
                    self.operations.finish(Number(number), Err(error));
                }
            },
            CarrierEvent::Accessed { number, outcome } => {
                let number = Number(number);
                let deed = self.operations.get(number).map(|operation| &operation.deed);
                let Some(Deed::CarriedAccess { peer, .. }) = deed else { return Ok(()) };
                let peer = *peer;
                self.operations.finish(number, outcome.map(|()| self.received(peer, 0, 0)));
            }
            // A carrier whose peers have places is looked at every time.
            CarrierEvent::Moved { peer } => {
                self.place_of_carried(peer)?;
            }
            // Of one that nobody speaks of the carrier tells again when it is awaited.
            CarrierEvent::Gone { peer, how } => {
                if let Some(index) = self.carried.places.get(&peer).copied() {
                    self.lose_carried(index, how);
                }
            }
        }
        Ok(())
    }

    fn deliver_whole(&mut self, peer: usize, envelope: Envelope, bytes: Vec<u8>) {
        let length = bytes.len();
        let Some(number) = self.met(peer, &envelope, length as u64) else {
            let _ = self.keep(peer, envelope, Kept::Here { arrived: length, bytes });
            return;
        };
        if let Some(receiving) = self.operations.receiving(number) {
            receiving.meet(peer, envelope, length as u64);
            let fits = receiving.accepted() as usize;
            // SAFETY: the operation is under way, so its owner vouches for the pieces, and no more
            // is written than they hold; the bytes are this side's own.
            unsafe { scatter(receiving.pieces.as_slice(), 0, bytes.as_ptr(), fits) };
            self.complete_receive(number);
        }
        self.tell_carrier(peer, length as u64);
    }

    /// A peer on another host is gone, and the carrier touches none of its messages any more.
    fn lose_carried(&mut self, peer: usize, how: Gone) {
        let error = Error::PeerGone(how.clone());
        self.peers[peer].gone = Some(how);
        self.tell_change();
        let first_lost = self.first_lost(peer);
        let belongs = |deed: &Deed| match deed {
            Deed::Send(sending) => sending.peer == peer,
            Deed::Receive(receiving) => {
                receiving.peer == peer && !matches!(receiving.stage, ReceiveStage::Posted)
            }
            Deed::CarriedAccess { peer: to, .. } => *to == peer,
            Deed::Access(_) | Deed::Several(_) => false,
        };
        let mut ended = self.operations.numbers(belongs);
        ended.extend(self.matching.unpost_source(peer));
        for number in ended {
            self.operations.finish(number, Err(error.clone()));
        }
        self.cut(peer, first_lost);
        if self.peers[peer].carried_uses == 0 {
            self.free_carried();
        }
    }
}
