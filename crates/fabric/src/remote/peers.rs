//! Peers on other hosts: their numbers, which the provider looks up too, and what is kept of each.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::time::Instant;

use memferry_message::Gone;

use super::accesses::Accesses;
use super::doubt::Doubt;
use super::fetches::Fetch;
use super::sends::{HeldBack, Sending};
use super::{Name, socket_of};
use crate::address::SOCKET_BYTES;

/// The most peers on other hosts that are kept.
const MOST_PEERS: usize = 1 << 16;

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
    by_number: Vec<Name>,
}

impl Directory {
    /// The number of the peer with this address, a new one if it has none. Nothing if the address
    /// cannot be one of another host, or there are too many.
    pub(crate) fn number(&self, name: &Name) -> Option<u64> {
        let mut names = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(number) = names.numbers.get(name) {
            return Some(*number);
        }
        if !is_reachable(socket_of(name)) || names.by_number.len() >= MOST_PEERS {
            return None;
        }
        let number = names.by_number.len() as u64;
        names.by_number.push(*name);
        names.numbers.insert(*name, number);
        Some(number)
    }

    /// The number of a peer that has one.
    pub(crate) fn find(&self, name: &Name) -> Option<u64> {
        let names = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        names.numbers.get(name).copied()
    }

    /// The address of the peer with this number.
    pub(crate) fn name(&self, number: u64) -> Option<Name> {
        let names = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        names.by_number.get(usize::try_from(number).ok()?).copied()
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
    /// Operations of the inner endpoint with memory of messages.
    pub(super) under_way: usize,
    /// The packets that have come from it.
    pub(super) heard: u64,
    pub(super) doubt: Option<Doubt>,
    /// When its connection is cut if it is gone, and the inner endpoint has not let go.
    pub(super) cut_at: Option<Instant>,
    pub(super) is_cut: bool,
}

impl Remote {
    pub(super) fn new(name: Name) -> Self {
        Self {
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

    /// Whether something of it is awaited: that it lets packets in, asks for bytes or sends them.
    pub(super) fn is_expected(&self) -> bool {
        let is_needed = !self.outgoing.is_empty()
            || !self.sends.is_empty()
            || !self.accesses.is_empty()
            || self.under_way > 0;
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
    fn an_address_without_a_socket_has_no_number() {
        let directory = Directory::default();
        assert_eq!(directory.number(&[0; 64]), None);
        assert_eq!(directory.number(&name(0)), None);
    }
}
