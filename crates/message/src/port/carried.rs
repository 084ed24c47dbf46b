//! Peers on other hosts: what the carrier brings is matched like everything else.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;

use super::operations::Deed;
use super::submit::Begun;
use super::{Kept, Peer, State};
use crate::carrier::{AccessWay, CarriedAccess, Carrier, CarrierEvent};
use crate::envelope::Envelope;
use crate::error::{Error, Gone, ValidationError};
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
        let index = self.place_of_carried(number)?;
        Ok(self.peer(index))
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
        self.peers[index].carried = Some(number);
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
        peer: usize,
        envelope: Envelope,
        length: u64,
        ticket: u64,
    ) {
        let Some(receiving) = self.operations.receiving(number) else { return };
        receiving.meet(peer, envelope, length);
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
                    Some(number) => self.meet_carried(number, index, envelope, length, ticket),
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
                Err(error) => self.operations.finish(Number(number), Err(error)),
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
            CarrierEvent::Gone { peer } => {
                // Also one that nobody has spoken of yet: it is gone for whoever speaks of it later.
                let index = self.place_of_carried(peer)?;
                self.lose_carried(index);
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
    fn lose_carried(&mut self, peer: usize) {
        let error = Error::PeerGone(Gone::Ended);
        self.peers[peer].gone = Some(Gone::Ended);
        self.tell_change();
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
        self.forget_incomplete(peer);
    }
}
