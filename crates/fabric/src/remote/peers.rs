//! Peers on other hosts: their numbers, which the provider looks up too, and what is kept of each.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use memferry_message::Gone;

use super::accesses::Accesses;
use super::doubt::Doubt;
use super::fetches::Fetch;
use super::sends::{HeldBack, Sending};
use super::{Name, socket_of};
use crate::address::SOCKET_BYTES;

/// The most peers on other hosts that are kept.
const MOST_PEERS: usize = if cfg!(test) { 64 } else { 1 << 16 };

/// What whole messages may cost a receiver before it has said that there is room again.
pub(super) const ROOM: u64 = 1 << 20;
/// What a message costs in addition to its bytes, so that empty ones are not free.
const OVERHEAD: u64 = 64;
/// The most announced messages of one peer that nobody has fetched. A sender holds back what would be
/// more.
pub(super) const MOST_OFFERS: usize = if cfg!(test) { 64 } else { 1 << 20 };

/// What a whole message costs.
pub(super) fn cost(bytes: u64) -> u64 {
    bytes.saturating_add(OVERHEAD)
}

/// The numbers of peers. The carrier and the provider share one.
#[derive(Debug, Default)]
pub(crate) struct Directory(Mutex<Names>);

#[derive(Debug, Default)]
struct Names {
    numbers: HashMap<Name, u64>,
    places: Vec<Entry>,
    /// Places of peers that are over and that nobody claims, in the order in which they became so.
    free: VecDeque<usize>,
}

/// A place in the directory. Its number has the generation in the upper half.
#[derive(Debug)]
struct Entry {
    name: Name,
    generation: u32,
    /// How often the provider holds the number.
    claims: usize,
    /// The peer is gone, and the carrier works on nothing with it.
    is_over: bool,
}

impl Entry {
    fn is_free(&self) -> bool {
        self.is_over && self.claims == 0
    }
}

/// The place of a number.
pub(super) fn place_of(number: u64) -> usize {
    number as u32 as usize
}

impl Names {
    fn number_at(&self, place: usize) -> u64 {
        u64::from(self.places[place].generation) << 32 | place as u64
    }

    fn entry(&mut self, number: u64) -> Option<&mut Entry> {
        let generation = (number >> 32) as u32;
        self.places.get_mut(place_of(number)).filter(|entry| entry.generation == generation)
    }

    fn number(&mut self, name: &Name) -> Option<u64> {
        if let Some(number) = self.numbers.get(name) {
            return Some(*number);
        }
        if !is_reachable(socket_of(name)) {
            return None;
        }
        let place = self.make_place(name)?;
        let number = self.number_at(place);
        self.numbers.insert(*name, number);
        Some(number)
    }

    /// A new place, or that of the peer that has been over for longest. Until then a peer that is over
    /// is remembered, so that nothing more is taken from it.
    fn make_place(&mut self, name: &Name) -> Option<usize> {
        if self.places.len() < MOST_PEERS {
            let (claims, is_over) = (0, false);
            self.places.push(Entry { name: *name, generation: 0, claims, is_over });
            return Some(self.places.len() - 1);
        }
        while let Some(place) = self.free.pop_front() {
            let entry = &mut self.places[place];
            // It may have been claimed meanwhile.
            if entry.is_free() {
                self.numbers.remove(&entry.name);
                let generation = entry.generation.wrapping_add(1);
                *entry = Entry { name: *name, generation, claims: 0, is_over: false };
                return Some(place);
            }
        }
        None
    }
}

impl Directory {
    fn names(&self) -> MutexGuard<'_, Names> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the peer with this address, a new one if it has none. Nothing if the address
    /// cannot be one of another host, or there are too many.
    pub(super) fn number(&self, name: &Name) -> Option<u64> {
        self.names().number(name)
    }

    /// The same. The number stays the peer's until it is released.
    pub(crate) fn claim(&self, name: &Name) -> Option<u64> {
        let mut names = self.names();
        let number = names.number(name)?;
        names.entry(number)?.claims += 1;
        Some(number)
    }

    /// Takes back [`Directory::claim`].
    pub(crate) fn release(&self, number: u64) {
        let mut names = self.names();
        let Some(entry) = names.entry(number) else { return };
        entry.claims -= 1;
        if entry.is_free() {
            names.free.push_back(place_of(number));
        }
    }

    /// The peer is gone, and the carrier works on nothing with it any more.
    pub(super) fn set_over(&self, number: u64) {
        let mut names = self.names();
        let Some(entry) = names.entry(number).filter(|entry| !entry.is_over) else { return };
        entry.is_over = true;
        if entry.is_free() {
            names.free.push_back(place_of(number));
        }
    }

    /// The number of a peer that has one.
    pub(crate) fn find(&self, name: &Name) -> Option<u64> {
        self.names().numbers.get(name).copied()
    }

    /// The address of the peer with this number.
    pub(crate) fn name(&self, number: u64) -> Option<Name> {
        self.names().entry(number).map(|entry| entry.name)
    }

    /// The number and the address at a place.
    pub(super) fn at(&self, place: usize) -> Option<(u64, Name)> {
        let names = self.names();
        let entry = names.places.get(place)?;
        Some((names.number_at(place), entry.name))
    }
}

/// Whether these bytes are the address of a socket that can be connected to.
fn is_reachable(socket: &[u8; SOCKET_BYTES]) -> bool {
    let family = u16::from_ne_bytes([socket[0], socket[1]]);
    let has_port = socket[2..4] != [0, 0];
    has_port && [libc::AF_INET as u16, libc::AF_INET6 as u16].contains(&family)
}

/// What waits until the inner endpoint takes it.
#[derive(Debug)]
pub(super) enum Outgoing {
    Packet(Vec<u8>),
    /// The answer to a part of an access of the peer's.
    Answer(Vec<u8>),
    /// The bytes of an announced message.
    Bytes {
        ticket: u64,
        label: u64,
        length: u64,
    },
    /// A fetch, whose memory is given before the peer is asked.
    Fetch(Fetch),
}

/// How a peer stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Standing {
    Open,
    /// It is gone, but the inner endpoint may still touch memory of messages with it.
    Ending(Gone),
    Gone(Gone),
}

/// An announced message of a peer's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Offer {
    pub(super) length: u64,
    pub(super) acknowledged: bool,
}

/// What is kept of a peer.
#[derive(Debug)]
pub(super) struct Remote {
    /// What the directory calls it.
    pub(super) number: u64,
    pub(super) name: Name,
    /// The inner endpoint's number for it, once it was needed.
    pub(super) inner: Option<u64>,
    /// A packet has come from it of which the inner endpoint knew the sender.
    pub(super) is_confirmed: bool,
    pub(super) standing: Standing,
    /// In the order in which they go out.
    pub(super) outgoing: VecDeque<Outgoing>,
    /// Whether it is in the list of peers with something to send.
    pub(super) is_waiting: bool,
    /// What whole messages cost that went to it, and of which it has not said that they were taken.
    pub(super) spent: u64,
    /// The same for those that came from it.
    pub(super) held: u64,
    /// The part of it that was taken, and that it was not told of yet.
    pub(super) taken: u64,
    /// This side's announced messages, by ticket.
    pub(super) sends: HashMap<u64, Sending>,
    /// Those that are to be announced when others are over, in order.
    pub(super) held_back: VecDeque<HeldBack>,
    /// The peer's, by its tickets.
    pub(super) offers: HashMap<u64, Offer>,
    /// This side's accesses to its memory.
    pub(super) accesses: Accesses,
    /// Answers to its accesses that have not left.
    pub(super) answers: usize,
    /// Operations of the inner endpoint with memory of messages, and with packets.
    pub(super) under_way: usize,
    pub(super) packets: usize,
    /// A receive waits for a message that only it can send.
    pub(super) is_awaited: bool,
    /// The packets that have come from it.
    pub(super) heard: u64,
    pub(super) doubt: Option<Doubt>,
    /// When its connection is cut if it is gone, and the inner endpoint has not let go.
    pub(super) cut_at: Option<Instant>,
    pub(super) is_cut: bool,
}

impl Remote {
    pub(super) fn new(number: u64, name: Name) -> Self {
        Self {
            number,
            name,
            inner: None,
            is_confirmed: false,
            standing: Standing::Open,
            outgoing: VecDeque::new(),
            is_waiting: false,
            spent: 0,
            held: 0,
            taken: 0,
            sends: HashMap::new(),
            held_back: VecDeque::new(),
            offers: HashMap::new(),
            accesses: Accesses::default(),
            answers: 0,
            under_way: 0,
            packets: 0,
            is_awaited: false,
            heard: 0,
            doubt: None,
            cut_at: None,
            is_cut: false,
        }
    }

    /// How it went, if it did.
    pub(super) fn gone(&self) -> Option<Gone> {
        match &self.standing {
            Standing::Open => None,
            Standing::Ending(gone) | Standing::Gone(gone) => Some(gone.clone()),
        }
    }

    /// Whether something of it is awaited: that it lets packets in, asks for bytes or sends them, or
    /// sends a message that a receive waits for.
    pub(super) fn is_expected(&self) -> bool {
        let is_needed = !self.outgoing.is_empty()
            || !self.sends.is_empty()
            || !self.accesses.is_empty()
            || self.under_way > 0
            || self.is_awaited;
        is_needed && self.standing == Standing::Open
    }

    /// Whether anything was ever exchanged with it.
    pub(super) fn is_met(&self) -> bool {
        self.inner.is_some() && self.standing == Standing::Open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(port: u8) -> Name {
        let mut name = [1; 64];
        name[36..].fill(0);
        name[36..38].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
        name[39] = port;
        name
    }

    #[test]
    fn a_peer_has_one_number_and_a_number_one_peer() {
        let directory = Directory::default();
        let (one, two) = (directory.number(&name(1)), directory.number(&name(2)));
        assert_ne!(one, two);
        assert_eq!(directory.number(&name(1)), one);
        assert_eq!(directory.name(two.unwrap()), Some(name(2)));
        assert_eq!((directory.name(9), directory.find(&name(3))), (None, None));
    }

    #[test]
    fn a_number_is_given_to_another_when_its_peer_is_over_and_nobody_claims_it() {
        let directory = Directory::default();
        let names: Vec<_> = (1..=MOST_PEERS as u8).map(name).collect();
        let numbers: Vec<_> = names.iter().map(|name| directory.claim(name).unwrap()).collect();
        let mut newcomers = (MOST_PEERS as u8 + 1..).map(name);
        let mut next = || newcomers.next().unwrap();
        assert_eq!(directory.number(&next()), None, "there are too many");
        directory.set_over(numbers[1]);
        directory.set_over(numbers[0]);
        assert_eq!(directory.number(&next()), None, "they are claimed");
        directory.release(numbers[0]);
        directory.release(numbers[1]);
        directory.release(numbers[2]);
        // Still claimed again, though it is over.
        assert_eq!(directory.claim(&names[0]), Some(numbers[0]));
        let newcomer = next();
        let second = directory.number(&newcomer).unwrap();
        assert_eq!((place_of(second), directory.name(second)), (1, Some(newcomer)));
        assert_ne!(second, numbers[1]);
        assert_eq!((directory.name(numbers[1]), directory.find(&names[1])), (None, None));
        assert_eq!(directory.at(1), Some((second, newcomer)));
        assert_eq!(directory.number(&next()), None, "the third is not over");
        directory.set_over(numbers[1]);
        assert_eq!(directory.number(&next()), None, "a number of the past ends nobody");
        directory.release(numbers[0]);
        assert!(directory.number(&next()).is_some());
    }

    #[test]
    fn an_address_without_a_socket_has_no_number() {
        let directory = Directory::default();
        assert_eq!(directory.number(&[0; 64]), None);
        assert_eq!(directory.number(&name(0)), None);
    }
}
