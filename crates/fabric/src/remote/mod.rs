//! Peers on other hosts, which are reached through an endpoint of another provider of libfabric's.
//!
//! The carrier sends packets of its own over that inner endpoint and knows nothing of matching: small
//! messages travel whole, longer ones are announced and fetched straight into the memory of the
//! receive that has met them. Reads and writes of registered memory are served by its owner's carrier,
//! packet by packet. A peer that says what cannot be right is given up.

mod accesses;
mod arrivals;
mod cutting;
mod doubt;
mod ending;
mod fetches;
mod flights;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod gate;
mod inner;
mod library;
mod memory;
mod open;
mod packet;
mod peers;
mod sends;
mod serving;
#[cfg(test)]
mod tests;

use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_message::{CarriedAccess, Carrier, CarrierEvent, Envelope, Error, Gone, Piece};

use flights::{Flight, Flights};
pub(crate) use gate::GATE;
pub(crate) use inner::Inner;
use inner::{Finished, Refused};
pub(crate) use open::{Settings, Unavailable};
use packet::{MOST_PACKET, Note};
pub(crate) use peers::Directory;
use peers::{Outgoing, Remote, Standing};

use crate::address::{ADDRESS_BYTES, SOCKET_BYTES};
use crate::regions::Regions;

/// An address of the provider's, as its bytes.
pub(crate) type Name = [u8; ADDRESS_BYTES];

/// Packets that can come before anybody looks.
const ROOMS: usize = 64;
/// Fruitless looks after which only every sixteenth is made: each asks the kernel, and messages of
/// this host should not wait for that.
const IDLE_LOOKS: u32 = 64;

/// The socket's address in an address.
fn socket_of(name: &Name) -> &[u8; SOCKET_BYTES] {
    name.last_chunk().expect("an address ends with it")
}

/// Enough of the identifier in an address to notice that it is another's.
fn identifier_of(name: &Name) -> u64 {
    u64::from_le_bytes(name[4..12].try_into().expect("eight bytes"))
}

/// Carries messages to and from peers on other hosts.
#[derive(Debug)]
pub(crate) struct RemoteCarrier {
    /// Closed before everything else, but not by a child of a fork.
    inner: ManuallyDrop<Inner>,
    name: Name,
    directory: Arc<Directory>,
    /// Memory of this side that peers may access.
    regions: Arc<Regions>,
    /// By number.
    peers: Vec<Remote>,
    flights: Flights,
    /// Peers with something that the inner endpoint has not taken yet.
    waiting: Vec<usize>,
    /// Memory for packets that the inner endpoint has not taken yet.
    rooms: Vec<Vec<u8>>,
    /// What the next look has to say.
    events: Vec<CarrierEvent>,
    finished: Vec<Finished>,
    /// The last ticket and the last label that were given out.
    tickets: u64,
    labels: u64,
    idle: u32,
    /// Looks so far, and when peers are asked after next.
    looks: u32,
    doubt_at: Instant,
    patience: Duration,
    /// The port should say whom its receives wait for.
    wants_awaited: bool,
    process: u32,
}

impl RemoteCarrier {
    /// A carrier for the endpoint of this address, which contains that of the inner endpoint.
    pub(crate) fn new(
        inner: Inner,
        name: Name,
        directory: Arc<Directory>,
        regions: Arc<Regions>,
    ) -> Self {
        let mut carrier = Self {
            inner: ManuallyDrop::new(inner),
            name,
            directory,
            regions,
            peers: Vec::new(),
            flights: Flights::default(),
            waiting: Vec::new(),
            rooms: (0..ROOMS).map(|_| vec![0; MOST_PACKET]).collect(),
            events: Vec::new(),
            finished: Vec::new(),
            tickets: 0,
            labels: 0,
            idle: 0,
            looks: 0,
            doubt_at: Instant::now(),
            patience: doubt::PATIENCE,
            wants_awaited: false,
            process: std::process::id(),
        };
        carrier.give_rooms();
        carrier
    }

    /// The place of a peer that has a number.
    fn peer_of(&mut self, number: u64) -> Option<usize> {
        let peer = peers::place_of(number);
        while self.peers.len() <= peer {
            let (number, name) = self.directory.at(self.peers.len())?;
            self.peers.push(Remote::new(number, name));
        }
        if self.peers[peer].number != number {
            // Whoever had the place is over, and nothing here refers to it any more.
            self.peers[peer] = Remote::new(number, self.directory.name(number)?);
        }
        Some(peer)
    }

    /// The inner endpoint's number for a peer.
    fn inner_number(&mut self, peer: usize) -> Result<u64, Refused> {
        let remote = &mut self.peers[peer];
        if remote.inner.is_none() {
            remote.inner = self.inner.insert(socket_of(&remote.name));
        }
        remote.inner.ok_or(Refused::Failed(libc::EHOSTUNREACH))
    }

    /// The beginning of a packet for a peer.
    fn packet(&self, peer: usize, note: &Note, payload_bytes: usize) -> Vec<u8> {
        packet::encode(&self.name, identifier_of(&self.peers[peer].name), note, payload_bytes)
    }

    fn push_note(&mut self, peer: usize, note: &Note) {
        let packet = self.packet(peer, note, 0);
        self.push(peer, Outgoing::Packet(packet));
    }

    /// Sends something behind everything else for the peer.
    fn push(&mut self, peer: usize, outgoing: Outgoing) {
        self.idle = 0;
        self.peers[peer].outgoing.push_back(outgoing);
        if !self.peers[peer].is_waiting {
            self.send_waiting(peer);
        }
    }

    /// Hands what waits for a peer to the inner endpoint, as far as that takes it.
    fn send_waiting(&mut self, peer: usize) {
        while let Some(outgoing) = self.peers[peer].outgoing.pop_front() {
            let taken = match outgoing {
                Outgoing::Packet(bytes) => {
                    self.send_packet(peer, bytes, false).map_err(|(b, r)| (Outgoing::Packet(b), r))
                }
                Outgoing::Answer(bytes) => {
                    self.send_packet(peer, bytes, true).map_err(|(b, r)| (Outgoing::Answer(b), r))
                }
                Outgoing::Bytes { ticket, label, length } => self
                    .depart(peer, ticket, label, length)
                    .map_err(|r| (Outgoing::Bytes { ticket, label, length }, r)),
                Outgoing::Fetch(fetch) => {
                    self.land(peer, fetch).map_err(|(f, r)| (Outgoing::Fetch(f), r))
                }
            };
            let Err((outgoing, refused)) = taken else { continue };
            self.peers[peer].outgoing.push_front(outgoing);
            if let Refused::Failed(code) = refused {
                tracing::debug!(peer, code, "the inner endpoint refused a packet");
                self.end(peer, Gone::Ended);
            }
            break;
        }
        let remote = &mut self.peers[peer];
        let is_waiting = !remote.outgoing.is_empty();
        if is_waiting && !remote.is_waiting {
            self.waiting.push(peer);
        }
        remote.is_waiting = is_waiting;
    }

    fn send_packet(
        &mut self,
        peer: usize,
        bytes: Vec<u8>,
        is_answer: bool,
    ) -> Result<(), (Vec<u8>, Refused)> {
        let to = match self.inner_number(peer) {
            Ok(to) => to,
            Err(refused) => return Err((bytes, refused)),
        };
        // SAFETY: the flight keeps the bytes until the inner endpoint has finished.
        match unsafe { self.inner.send(&bytes, to, self.flights.next()) } {
            Ok(()) => {
                self.peers[peer].packets += 1;
                self.flights.insert(Flight::Packet { peer, is_answer, _bytes: bytes });
            }
            Err(refused) => return Err((bytes, refused)),
        }
        Ok(())
    }

    /// The inner endpoint has let go of a packet.
    fn packet_left(&mut self, peer: usize, is_answer: bool) {
        let remote = &mut self.peers[peer];
        remote.packets -= 1;
        remote.answers -= usize::from(is_answer);
    }

    /// Gives the inner endpoint memory for packets.
    fn give_rooms(&mut self) {
        while let Some(mut bytes) = self.rooms.pop() {
            let (at, length) = (bytes.as_mut_ptr(), bytes.len());
            // SAFETY: the flight keeps the memory until the inner endpoint has finished.
            match unsafe { self.inner.receive(at, length, self.flights.next()) } {
                Ok(()) => self.flights.insert(Flight::Room { bytes }),
                Err(refused) => {
                    if let Refused::Failed(code) = refused {
                        tracing::debug!(code, "the inner endpoint took no memory for packets");
                    }
                    self.rooms.push(bytes);
                    break;
                }
            }
        }
    }

    /// Looks what the inner endpoint has finished, and goes on from there. Whether there was
    /// anything.
    fn look(&mut self) -> bool {
        let mut finished = std::mem::take(&mut self.finished);
        while finished.len() < ROOMS && self.inner.read(&mut finished) {}
        let moved = !finished.is_empty();
        for one in finished.drain(..) {
            self.conclude(one);
        }
        self.finished = finished;
        self.give_rooms();
        for peer in std::mem::take(&mut self.waiting) {
            self.peers[peer].is_waiting = false;
            self.send_waiting(peer);
        }
        self.doubt();
        moved
    }

    fn conclude(&mut self, finished: Finished) {
        match self.flights.take(finished.context) {
            Some(Flight::Room { bytes }) => {
                if finished.outcome.is_ok() {
                    self.arrived(&bytes[..finished.length.min(bytes.len())], finished.source);
                }
                self.rooms.push(bytes);
            }
            Some(Flight::Packet { peer, is_answer, .. }) => {
                self.packet_left(peer, is_answer);
                if let Err(code) = finished.outcome {
                    tracing::debug!(peer, code, "a packet to another host was not sent");
                    self.end(peer, Gone::Ended);
                }
                self.settle(peer);
            }
            Some(Flight::Departure { peer, ticket, .. }) => {
                self.departed(peer, ticket, finished.outcome.map_err(|_| Gone::Ended));
            }
            Some(Flight::Landing { peer, fetch }) => self.landed(peer, fetch, finished),
            None => tracing::debug!(?finished, "an operation that nobody began has finished"),
        }
    }
}

impl Carrier for RemoteCarrier {
    fn send(
        &mut self,
        peer: u64,
        number: u64,
        envelope: &Envelope,
        pieces: &[Piece],
        delivered: bool,
    ) {
        match self.peer_of(peer) {
            Some(peer) => self.begin_send(peer, number, envelope, pieces, delivered),
            None => {
                let outcome = Err(Error::PeerGone(Gone::Ended));
                self.events.push(CarrierEvent::Sent { number, outcome });
            }
        }
    }

    fn fetch(&mut self, peer: u64, ticket: u64, number: u64, pieces: &[Piece], length: u64) {
        match self.peer_of(peer) {
            Some(peer) => self.begin_fetch(peer, ticket, number, pieces, length),
            None => self.fetched(number, Err(Error::PeerGone(Gone::Ended))),
        }
    }

    fn taken(&mut self, peer: u64, bytes: u64) {
        if let Some(peer) = self.peer_of(peer) {
            self.make_room(peer, bytes);
        }
    }

    fn access(&mut self, peer: u64, number: u64, access: &CarriedAccess) {
        match self.peer_of(peer) {
            Some(peer) => self.begin_access(peer, number, access),
            None => self.accessed(number, Err(Error::PeerGone(Gone::Ended))),
        }
    }

    fn wants_awaited(&mut self) -> bool {
        std::mem::take(&mut self.wants_awaited)
    }

    fn awaited(&mut self, peers: &[u64]) {
        for remote in &mut self.peers {
            remote.is_awaited = false;
        }
        for peer in peers {
            self.set_awaited(*peer);
        }
    }

    fn poll(&mut self, events: &mut Vec<CarrierEvent>) {
        self.idle += 1;
        let is_due = self.idle < IDLE_LOOKS || self.idle == IDLE_LOOKS + 16;
        if is_due || !self.waiting.is_empty() {
            let has_moved = self.look();
            self.idle = if has_moved { 0 } else { self.idle.min(IDLE_LOOKS) };
        }
        events.append(&mut self.events);
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor()
    }

    fn is_quiet(&mut self) -> bool {
        // Whoever asks waits, and looks when it was woken.
        self.idle = 0;
        // Whoever sleeps looks seldom: the clock is asked every time.
        self.look_at_clock();
        let is_ending = |remote: &Remote| matches!(remote.standing, Standing::Ending(_));
        let is_busy = !self.events.is_empty()
            || !self.waiting.is_empty()
            || !self.rooms.is_empty()
            || self.peers.iter().any(is_ending);
        !is_busy && self.inner.is_quiet()
    }
}
