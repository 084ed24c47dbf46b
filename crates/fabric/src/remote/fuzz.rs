//! What a fuzzer needs of the carrier: one that is told packets which no host has sent, and the memory that it
//! may and may not touch meanwhile.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_message::{AccessWay, CarriedAccess, Carrier, CarrierEvent, Envelope, Piece, Rights};

use super::packet::{self, Note};
use super::{Directory, Inner, Name, Regions, RemoteCarrier, Settings, identifier_of, library};
use crate::abi::FI_ADDR_NOTAVAIL;
use crate::memory::Region;

/// Long enough for anything that ends at all.
const PATIENCE: Duration = Duration::from_secs(60);
/// Around the memory that others may use.
const GUARD: usize = 4096;
const GUARD_BYTE: u8 = 0xA5;

/// Memory between guards.
#[derive(Debug)]
struct Guarded(Vec<u8>);

impl Guarded {
    fn new(length: usize, byte: u8) -> Self {
        let mut bytes = vec![byte; length + 2 * GUARD];
        bytes[..GUARD].fill(GUARD_BYTE);
        bytes[GUARD + length..].fill(GUARD_BYTE);
        Self(bytes)
    }

    fn piece(&mut self) -> Piece {
        let length = self.0.len() - 2 * GUARD;
        Piece::target(self.0[GUARD..].as_mut_ptr(), length)
    }

    fn check(&self) {
        let (before, rest) = self.0.split_at(GUARD);
        let behind = &rest[rest.len() - GUARD..];
        let is_whole = before.iter().chain(behind).all(|byte| *byte == GUARD_BYTE);
        assert!(is_whole, "bytes beside the memory were written");
    }
}

/// A carrier, and peers that do not exist. What goes to them is thrown away.
#[derive(Debug)]
pub struct Prey {
    carrier: RemoteCarrier,
    sink: RemoteCarrier,
    directory: Arc<Directory>,
    regions: Arc<Regions>,
    peers: Vec<Name>,
    names: u64,
    events: Vec<CarrierEvent>,
    /// Messages that were announced and not fetched: the peer, the ticket, the length.
    announced: Vec<(u64, u64, u64)>,
    /// What is under way, by number.
    under_way: HashMap<u64, Guarded>,
    numbers: u64,
    readable: Guarded,
    writable: Guarded,
}

/// The keys of registered memory: it may be read, or written.
const READABLE: u64 = 1;
const WRITABLE: u64 = 2;
const REGION: usize = 100_000;

impl Prey {
    /// `None` where there is no libfabric.
    pub fn new() -> Option<Self> {
        if !library::load() {
            return None;
        }
        let settings = Settings { interface: Some("127.0.0.1".into()), ..Settings::default() };
        let side = |number: u64| {
            let inner = Inner::open(&settings).expect("libfabric reaches the loopback interface");
            let name = name_at(&inner, number);
            let (directory, regions) = (Arc::default(), Arc::new(Regions::default()));
            let carrier =
                RemoteCarrier::new(inner, name, Arc::clone(&directory), Arc::clone(&regions));
            (carrier, directory, regions)
        };
        let ((carrier, directory, regions), (sink, ..)) = (side(1), side(2));
        let mut readable = Guarded::new(REGION, 1);
        let mut writable = Guarded::new(REGION, 2);
        let register = |key, memory: &mut Guarded, rights| {
            let region = Region { piece: memory.piece(), rights: Some(rights) };
            // SAFETY: the memory lives as long as the carrier, and is declared behind it.
            unsafe { regions.insert(key, region) };
        };
        register(READABLE, &mut readable, Rights::READ);
        register(WRITABLE, &mut writable, Rights::WRITE);
        Some(Self {
            carrier,
            sink,
            directory,
            regions,
            peers: Vec::new(),
            names: 2,
            events: Vec::new(),
            announced: Vec::new(),
            under_way: HashMap::new(),
            numbers: 0,
            readable,
            writable,
        })
    }

    /// New peers, in place of those before.
    pub fn meet(&mut self, count: usize) {
        self.peers.clear();
        for _ in 0..count {
            self.names += 1;
            self.peers.push(name_at(&self.sink.inner, self.names));
        }
    }

    /// A packet comes that a peer has sent, as far as anybody can tell. The numbers are its tag, data, ticket,
    /// label and length.
    pub fn hear(&mut self, peer: usize, kind: u8, flags: u8, numbers: [u64; 5], payload: &[u8]) {
        let from = self.peers[peer % self.peers.len()];
        let to = identifier_of(&self.carrier.name);
        let mut bytes = packet::encode(&from, to, &Note::Bye, payload.len());
        (bytes[4], bytes[5]) = (kind, flags);
        for (at, number) in numbers.into_iter().enumerate() {
            bytes[80 + 8 * at..][..8].copy_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(payload);
        self.hear_bytes(&bytes);
    }

    /// Any bytes come from nobody knows whom.
    pub fn hear_bytes(&mut self, bytes: &[u8]) {
        self.carrier.arrived(bytes, FI_ADDR_NOTAVAIL);
    }

    fn number_of(&self, peer: usize) -> Option<u64> {
        self.directory.number(&self.peers[peer % self.peers.len()])
    }

    fn begin(&mut self, length: usize) -> (u64, Piece) {
        self.numbers += 1;
        let mut memory = Guarded::new(length, 7);
        let piece = memory.piece();
        self.under_way.insert(self.numbers, memory);
        (self.numbers, piece)
    }

    /// This side sends.
    pub fn send(&mut self, peer: usize, length: usize, delivered: bool) {
        let Some(to) = self.number_of(peer) else { return };
        let (number, piece) = self.begin(length);
        self.carrier.send(to, number, &Envelope::tagged(5), &[piece], delivered);
    }

    /// This side fetches a message that was announced, into so much memory at most.
    pub fn fetch(&mut self, which: usize, most: usize) {
        if self.announced.is_empty() {
            return;
        }
        let (peer, ticket, length) = self.announced.swap_remove(which % self.announced.len());
        let (number, piece) = self.begin(most.min(length.try_into().unwrap_or(most)));
        self.carrier.fetch(peer, ticket, number, &[piece], piece.length as u64);
    }

    /// This side reads or writes the memory of a peer.
    pub fn access(&mut self, peer: usize, is_put: bool, place: (u64, u64), length: usize) {
        let Some(to) = self.number_of(peer) else { return };
        let (number, local) = self.begin(length);
        let way = if is_put { AccessWay::Put } else { AccessWay::Get };
        let access = CarriedAccess { way, key: place.0, address: place.1, local };
        self.carrier.access(to, number, &access);
    }

    /// Lets the carrier work. What has ended is checked.
    pub fn poll(&mut self) {
        self.carrier.poll(&mut self.events);
        self.sink.poll(&mut Vec::new());
        for event in std::mem::take(&mut self.events) {
            match event {
                CarrierEvent::Arrived { peer, bytes, .. } => {
                    self.carrier.taken(peer, bytes.len() as u64);
                }
                CarrierEvent::Announced { peer, ticket, length, .. } => {
                    self.announced.push((peer, ticket, length));
                }
                CarrierEvent::Sent { number, .. }
                | CarrierEvent::Fetched { number, .. }
                | CarrierEvent::Accessed { number, .. } => {
                    let memory = self.under_way.remove(&number);
                    memory.expect("each ends once, and was begun").check();
                }
                CarrierEvent::Gone { peer, .. } => {
                    self.announced.retain(|(of, ..)| *of != peer);
                }
                _ => {}
            }
        }
    }

    /// All peers say goodbye. Fails if something does not end with that, or if memory was touched that they have
    /// no right to.
    pub fn part(&mut self) {
        for peer in 0..self.peers.len() {
            self.hear(peer, 6, 0, [0; 5], &[]);
        }
        let deadline = Instant::now() + PATIENCE;
        while !self.under_way.is_empty() {
            self.poll();
            assert!(Instant::now() < deadline, "{} have not ended", self.under_way.len());
        }
        self.readable.check();
        self.writable.check();
        let read_only = &self.readable.0[GUARD..GUARD + REGION];
        assert!(
            read_only.iter().all(|byte| *byte == 1),
            "memory was written that may only be read"
        );
        assert_eq!(self.regions.list().len(), 2);
    }
}

/// The address of an endpoint on some other host, with the socket of this one.
fn name_at(inner: &Inner, number: u64) -> Name {
    let mut name = [0; 64];
    name[..4].copy_from_slice(b"mfy1");
    let id = number << 32 | u64::from(std::process::id());
    name[4..12].copy_from_slice(&id.to_le_bytes());
    name[36..].copy_from_slice(&inner.address().0);
    name
}
