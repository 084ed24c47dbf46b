//! Reads and writes of the memory of a peer: cut into parts of one packet each, of which a few are
//! under way at a time. Every part is answered, and the answers are what ends an access.
//!
//! The inner endpoint never has the memory of an access: bytes go into packets, and come from them.

use std::collections::{HashMap, VecDeque};

use memferry_message::{
    AccessWay, CarriedAccess, CarrierEvent, Error, Gone, Rights, ValidationError,
};

use super::RemoteCarrier;
use super::packet::{Note, SMALL};
use super::peers::Outgoing;
use crate::regions::{Denial, Extent};

/// Parts that wait for their answers, at most: what a peer must be able to put by.
pub(super) const MOST_PARTS: usize = 32;

/// The accesses to one peer.
#[derive(Debug, Default)]
pub(super) struct Accesses {
    all: HashMap<u64, Access>,
    /// Those of which not everything has been asked for, in order.
    waiting: VecDeque<u64>,
    /// By ticket.
    parts: HashMap<u64, Part>,
}

#[derive(Debug)]
struct Access {
    what: CarriedAccess,
    /// The bytes that were asked for.
    asked: usize,
    /// The parts that were not answered.
    parts: usize,
    /// Why it does not go on.
    failure: Option<Error>,
}

/// A part that waits for its answer.
#[derive(Debug, Clone, Copy)]
struct Part {
    number: u64,
    offset: usize,
    length: usize,
}

/// The packet that asks for a part, and the bytes in it.
#[derive(Debug)]
struct Request {
    note: Note,
    payload: *const u8,
    length: usize,
}

/// An access that has ended.
type Ended = (u64, Result<(), Error>);

impl Accesses {
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    fn begin(&mut self, number: u64, what: &CarriedAccess) {
        let access = Access { what: *what, asked: 0, parts: 0, failure: None };
        self.all.insert(number, access);
        self.waiting.push_back(number);
    }

    /// The next part to ask for, if another may be under way.
    fn next(&mut self, ticket: u64) -> Option<Request> {
        if self.parts.len() >= MOST_PARTS {
            return None;
        }
        let number = *self.waiting.front()?;
        let access = self.all.get_mut(&number).expect("it waits until it has ended");
        let CarriedAccess { way, key, address, local } = access.what;
        let offset = access.asked;
        let left = local.length - offset;
        let length = left.min(SMALL);
        access.asked += length;
        access.parts += 1;
        if access.asked == local.length {
            self.waiting.pop_front();
        }
        self.parts.insert(ticket, Part { number, offset, length });
        let address = address.wrapping_add(offset as u64);
        let extent = Extent { key, address, length: left as u64 };
        Some(match way {
            AccessWay::Put => {
                let payload = local.address.wrapping_add(offset).cast_const();
                Request { note: Note::Write { ticket, extent }, payload, length }
            }
            AccessWay::Get => {
                let note = Note::Read { ticket, extent, length: length as u64 };
                Request { note, payload: std::ptr::null(), length: 0 }
            }
        })
    }

    /// A part was answered. The access that has ended with it, if one has.
    fn answered(
        &mut self,
        ticket: u64,
        denial: Option<Denial>,
        payload: &[u8],
    ) -> Result<Option<Ended>, Gone> {
        let part = self.parts.remove(&ticket);
        let part = part.ok_or(Gone::Misbehaved("it answered what it was not asked"))?;
        let access = self.all.get_mut(&part.number).expect("it has parts under way");
        let CarriedAccess { way, local, .. } = access.what;
        let awaited = match (way, denial) {
            (AccessWay::Get, None) => part.length,
            _ => 0,
        };
        if payload.len() != awaited {
            return Err(Gone::Misbehaved("it answered with fewer bytes, or more"));
        }
        let at = local.address.wrapping_add(part.offset);
        if awaited > 0 {
            // SAFETY: the access is under way, so its owner vouches for the memory, in which this part
            // lies; the packet is this side's own.
            unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), at, awaited) };
        }
        access.parts -= 1;
        if let Some(denial) = denial
            && access.failure.is_none()
        {
            access.failure = Some(access.error_of(denial));
            self.waiting.retain(|waiting| *waiting != part.number);
        }
        let is_asked = access.failure.is_some() || access.asked == local.length;
        if access.parts > 0 || !is_asked {
            return Ok(None);
        }
        let failure = self.all.remove(&part.number).and_then(|access| access.failure);
        Ok(Some((part.number, failure.map_or(Ok(()), Err))))
    }

    /// Forgets everything. The numbers of what has ended with that.
    fn end(&mut self) -> Vec<u64> {
        let ended = self.all.keys().copied().collect();
        *self = Self::default();
        ended
    }
}

impl Access {
    /// The same words as for memory of this host.
    fn error_of(&self, denial: Denial) -> Error {
        let CarriedAccess { way, address, local, .. } = self.what;
        let (asked, given) = match way {
            AccessWay::Put => (Rights::WRITE, Rights::READ),
            AccessWay::Get => (Rights::READ, Rights::WRITE),
        };
        match denial {
            Denial::NoKey => Error::Withdrawn,
            Denial::NoRight => Error::NotPermitted { asked, given },
            Denial::Outside { region_bytes: window_bytes } => {
                let (offset, bytes) = (address, local.length as u64);
                ValidationError::OutsideWindow { offset, bytes, window_bytes }.into()
            }
        }
    }
}

impl RemoteCarrier {
    pub(super) fn begin_access(&mut self, peer: usize, number: u64, access: &CarriedAccess) {
        if let Some(gone) = self.peers[peer].gone() {
            return self.accessed(number, Err(Error::PeerGone(gone)));
        }
        self.peers[peer].accesses.begin(number, access);
        self.ask_for_parts(peer);
    }

    /// Asks for as many parts as may be under way.
    fn ask_for_parts(&mut self, peer: usize) {
        while let Some(request) = self.peers[peer].accesses.next(self.tickets + 1) {
            self.tickets += 1;
            let mut packet = self.packet(peer, &request.note, request.length);
            if request.length > 0 {
                // SAFETY: the access is under way, so its owner vouches for the bytes.
                packet.extend_from_slice(unsafe {
                    std::slice::from_raw_parts(request.payload, request.length)
                });
            }
            self.push(peer, Outgoing::Packet(packet));
        }
    }

    /// A peer has answered a part.
    pub(super) fn answered(
        &mut self,
        peer: usize,
        ticket: u64,
        denial: Option<Denial>,
        payload: &[u8],
    ) -> Result<(), Gone> {
        match self.peers[peer].accesses.answered(ticket, denial, payload)? {
            Some((number, outcome)) => self.accessed(number, outcome),
            None => self.moved(peer),
        }
        self.ask_for_parts(peer);
        Ok(())
    }

    /// Ends the accesses to a peer that is gone.
    pub(super) fn drop_accesses(&mut self, peer: usize, gone: &Gone) {
        for number in self.peers[peer].accesses.end() {
            self.accessed(number, Err(Error::PeerGone(gone.clone())));
        }
    }

    /// Says once that there was something to do.
    pub(super) fn moved(&mut self, peer: usize) {
        if !matches!(self.events.last(), Some(CarrierEvent::Moved { .. })) {
            self.events.push(CarrierEvent::Moved { peer: self.peers[peer].number });
        }
    }

    pub(super) fn accessed(&mut self, number: u64, outcome: Result<(), Error>) {
        self.events.push(CarrierEvent::Accessed { number, outcome });
    }
}
