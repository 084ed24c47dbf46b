//! The fuzzer's view of the transport: it receives packets that no host has sent, and the memory
//! that it may access lies between guards.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_message::{
    Envelope, RemoteEvent, RemoteRma, RemoteRmaOp, RemoteTransport, Rights, Segment,
};

use super::packet::{self, PacketBody};
use super::{
    Directory, FabricTransport, InnerEndpoint, MrTable, RawAddress, RemoteConfig, identifier_of,
    library,
};
use crate::abi::FI_ADDR_NOTAVAIL;
use crate::mr::MrRange;

/// A timeout that only a hang reaches.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Guard bytes around the memory that peers may use.
const GUARD: usize = 4096;
const GUARD_BYTE: u8 = 0xA5;

/// Memory between guards.
#[derive(Debug)]
struct GuardedBuffer(Vec<u8>);

impl GuardedBuffer {
    fn new(length: usize, byte: u8) -> Self {
        let mut bytes = vec![byte; length + 2 * GUARD];
        bytes[..GUARD].fill(GUARD_BYTE);
        bytes[GUARD + length..].fill(GUARD_BYTE);
        Self(bytes)
    }

    fn segment(&mut self) -> Segment {
        let length = self.0.len() - 2 * GUARD;
        Segment::target(self.0[GUARD..].as_mut_ptr(), length)
    }

    fn check(&self) {
        let (before, rest) = self.0.split_at(GUARD);
        let behind = &rest[rest.len() - GUARD..];
        let is_whole = before.iter().chain(behind).all(|byte| *byte == GUARD_BYTE);
        assert!(is_whole, "bytes beside the memory were written");
    }
}

/// A transport, and peers that do not exist. Packets to them are dropped.
#[derive(Debug)]
pub struct FuzzedTransport {
    transport: FabricTransport,
    sink: FabricTransport,
    directory: Arc<Directory>,
    mr_table: Arc<MrTable>,
    peers: Vec<RawAddress>,
    names: u64,
    events: Vec<RemoteEvent>,
    /// Messages that were announced and not fetched: the peer, the ticket, the length.
    pending_rts: Vec<(u64, u64, u64)>,
    /// Operations in flight, by number.
    in_flight: HashMap<u64, GuardedBuffer>,
    numbers: u64,
    readable: GuardedBuffer,
    writable: GuardedBuffer,
}

/// The keys of registered memory: one may be read, one written.
const READABLE: u64 = 1;
const WRITABLE: u64 = 2;
const REGION: usize = 100_000;

impl FuzzedTransport {
    /// Returns `None` without libfabric.
    pub fn new() -> Option<Self> {
        if !library::load() {
            return None;
        }
        let settings =
            RemoteConfig { interface: Some("127.0.0.1".into()), ..RemoteConfig::default() };
        let side = |number: u64| {
            let inner =
                InnerEndpoint::open(&settings).expect("libfabric reaches the loopback interface");
            let name = address_at(&inner, number);
            let (directory, regions) = (Arc::default(), Arc::new(MrTable::default()));
            let transport =
                FabricTransport::new(inner, name, Arc::clone(&directory), Arc::clone(&regions));
            (transport, directory, regions)
        };
        let ((transport, directory, regions), (sink, ..)) = (side(1), side(2));
        let mut readable = GuardedBuffer::new(REGION, 1);
        let mut writable = GuardedBuffer::new(REGION, 2);
        let register = |key, memory: &mut GuardedBuffer, rights| {
            let region = MrRange { segment: memory.segment(), rights: Some(rights) };
            // SAFETY: the memory lives as long as the transport, and is declared after it.
            unsafe { regions.insert(key, region) };
        };
        register(READABLE, &mut readable, Rights::READ);
        register(WRITABLE, &mut writable, Rights::WRITE);
        Some(Self {
            transport,
            sink,
            directory,
            mr_table: regions,
            peers: Vec::new(),
            names: 2,
            events: Vec::new(),
            pending_rts: Vec::new(),
            in_flight: HashMap::new(),
            numbers: 0,
            readable,
            writable,
        })
    }

    /// Creates new peers, in place of the previous ones.
    pub fn replace_peers(&mut self, count: usize) {
        self.peers.clear();
        for _ in 0..count {
            self.names += 1;
            self.peers.push(address_at(&self.sink.inner, self.names));
        }
    }

    /// Receives a packet of a peer. The numbers are its tag, data, ticket, label and length.
    pub fn inject_packet(
        &mut self,
        peer: usize,
        kind: u8,
        flags: u8,
        numbers: [u64; 5],
        payload: &[u8],
    ) {
        let from = self.peers[peer % self.peers.len()];
        let to = identifier_of(&self.transport.address);
        let mut bytes = packet::encode(&from, to, &PacketBody::Close, payload.len());
        (bytes[4], bytes[5]) = (kind, flags);
        for (at, number) in numbers.into_iter().enumerate() {
            bytes[80 + 8 * at..][..8].copy_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(payload);
        self.inject_bytes(&bytes);
    }

    /// Receives any bytes from an unknown sender.
    pub fn inject_bytes(&mut self, bytes: &[u8]) {
        self.transport.on_packet(bytes, FI_ADDR_NOTAVAIL);
    }

    fn number_of(&self, peer: usize) -> Option<u64> {
        self.directory.number(&self.peers[peer % self.peers.len()])
    }

    fn begin(&mut self, length: usize) -> (u64, Segment) {
        self.numbers += 1;
        let mut memory = GuardedBuffer::new(length, 7);
        let segment = memory.segment();
        self.in_flight.insert(self.numbers, memory);
        (self.numbers, segment)
    }

    /// Sends a message.
    pub fn send(&mut self, peer: usize, length: usize, delivered: bool) {
        let Some(to) = self.number_of(peer) else { return };
        let (number, segment) = self.begin(length);
        self.transport.send(to, number, &Envelope::tagged(5), &[segment], delivered);
    }

    /// Fetches an announced message, into at most this much memory.
    pub fn fetch(&mut self, which: usize, most: usize) {
        if self.pending_rts.is_empty() {
            return;
        }
        let (peer, ticket, length) = self.pending_rts.swap_remove(which % self.pending_rts.len());
        let (number, segment) = self.begin(most.min(length.try_into().unwrap_or(most)));
        self.transport.fetch(peer, ticket, number, &[segment], segment.length as u64);
    }

    /// Reads or writes the memory of a peer.
    pub fn access(&mut self, peer: usize, is_put: bool, place: (u64, u64), length: usize) {
        let Some(to) = self.number_of(peer) else { return };
        let (number, local) = self.begin(length);
        let way = if is_put { RemoteRmaOp::Put } else { RemoteRmaOp::Get };
        let access = RemoteRma { op: way, key: place.0, address: place.1, local };
        self.transport.start_rma(to, number, &access);
    }

    /// Makes progress, and checks completed operations.
    pub fn poll(&mut self) {
        self.transport.poll(&mut self.events);
        self.sink.poll(&mut Vec::new());
        for event in std::mem::take(&mut self.events) {
            match event {
                RemoteEvent::Arrived { peer, bytes, .. } => {
                    self.transport.return_credit(peer, bytes.len() as u64);
                }
                RemoteEvent::Rts { peer, ticket, length, .. } => {
                    self.pending_rts.push((peer, ticket, length));
                }
                RemoteEvent::Sent { number, .. }
                | RemoteEvent::Fetched { number, .. }
                | RemoteEvent::RmaCompleted { number, .. } => {
                    let memory = self.in_flight.remove(&number);
                    memory.expect("each operation completes once").check();
                }
                RemoteEvent::Disconnected { peer, .. } => {
                    self.pending_rts.retain(|(of, ..)| *of != peer);
                }
                _ => {}
            }
        }
    }

    /// Closes all peers. Panics if an operation does not complete, or if memory was accessed
    /// without a right.
    pub fn close_peers(&mut self) {
        for peer in 0..self.peers.len() {
            self.inject_packet(peer, 6, 0, [0; 5], &[]);
        }
        let deadline = Instant::now() + TIMEOUT;
        while !self.in_flight.is_empty() {
            self.poll();
            assert!(Instant::now() < deadline, "{} have not ended", self.in_flight.len());
        }
        self.readable.check();
        self.writable.check();
        let read_only = &self.readable.0[GUARD..GUARD + REGION];
        assert!(
            read_only.iter().all(|byte| *byte == 1),
            "memory was written that may only be read"
        );
        assert_eq!(self.mr_table.list().len(), 2);
    }
}

/// The address of an endpoint on another host, with the socket of this one.
fn address_at(inner: &InnerEndpoint, number: u64) -> RawAddress {
    let mut name = [0; 64];
    name[..4].copy_from_slice(b"mfy1");
    let id = number << 32 | u64::from(std::process::id());
    name[4..12].copy_from_slice(&id.to_le_bytes());
    name[36..].copy_from_slice(&inner.address().0);
    name
}
