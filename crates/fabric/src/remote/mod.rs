//! The transport to peers on other hosts, through an endpoint of another libfabric provider.
//!
//! The transport sends packets of its own over that inner endpoint, and does no matching: short
//! messages are sent whole, longer ones are announced and fetched directly into the buffer of the
//! matching receive. The owner's transport executes reads and writes of registered memory, packet
//! by packet. A peer that violates the protocol is disconnected.

mod abort;
mod fetches;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod gate;
mod in_flight;
mod inner;
mod iov;
mod library;
mod liveness;
mod open;
mod packet;
mod peers;
mod receive;
mod rma;
mod rma_target;
mod sends;
mod teardown;
#[cfg(test)]
mod tests;

use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_message::{
    DisconnectReason, Envelope, Error, RemoteEvent, RemoteRma, RemoteTransport, Segment,
};
use memferry_sys::fork::OwnerProcess;

pub(crate) use gate::UNLOAD_GATE;
use in_flight::{InFlightOp, InFlightOps};
pub(crate) use inner::InnerEndpoint;
use inner::{InnerCompletion, PostError};
pub(crate) use open::{RemoteConfig, Unavailable};
use packet::{MAX_PACKET, PacketBody};
pub(crate) use peers::Directory;
use peers::{QueuedOutput, RemotePeer, RemotePeerState};

use crate::address::{ADDRESS_BYTES, SOCKET_BYTES};
use crate::mr_table::MrTable;

/// An encoded address of the provider.
pub(crate) type RawAddress = [u8; ADDRESS_BYTES];

/// The number of posted packet buffers.
const PACKET_BUFFERS: usize = 64;
/// The number of empty polls after which only every sixteenth poll is made: each is a system call,
/// and messages of this host should not wait for it.
const IDLE_POLLS: u32 = 64;

/// The socket address in an address.
fn socket_of(name: &RawAddress) -> &[u8; SOCKET_BYTES] {
    name.last_chunk().expect("an address ends with a socket address")
}

/// The first bytes of the identifier in an address, enough to detect another endpoint.
fn identifier_of(name: &RawAddress) -> u64 {
    u64::from_le_bytes(name[4..12].try_into().expect("eight bytes"))
}

/// The transport of messages to and from peers on other hosts.
#[derive(Debug)]
pub(crate) struct FabricTransport {
    /// Closed before the other fields, but not in a forked child.
    inner: ManuallyDrop<InnerEndpoint>,
    address: RawAddress,
    directory: Arc<Directory>,
    /// Registered memory of this side.
    mr_table: Arc<MrTable>,
    /// By slot.
    peers: Vec<RemotePeer>,
    in_flight: InFlightOps,
    /// Peers with output that the inner endpoint has not accepted yet.
    peers_with_output: Vec<usize>,
    /// Packet buffers that the inner endpoint has not accepted yet.
    free_packet_buffers: Vec<Vec<u8>>,
    /// Events for the next poll.
    events: Vec<RemoteEvent>,
    completions: Vec<InnerCompletion>,
    /// The last ticket and the last label.
    tickets: u64,
    labels: u64,
    idle: u32,
    /// The number of polls, and the time of the next liveness check.
    polls: u32,
    next_liveness_check: Instant,
    silence_timeout: Duration,
    /// The port should report the awaited peers.
    wants_awaited: bool,
    owner: OwnerProcess,
}

impl FabricTransport {
    /// Creates a transport for the endpoint with this address, which contains that of the inner
    /// endpoint.
    pub(crate) fn new(
        inner: InnerEndpoint,
        address: RawAddress,
        directory: Arc<Directory>,
        regions: Arc<MrTable>,
    ) -> Self {
        let mut transport = Self {
            inner: ManuallyDrop::new(inner),
            address,
            directory,
            mr_table: regions,
            peers: Vec::new(),
            in_flight: InFlightOps::default(),
            peers_with_output: Vec::new(),
            free_packet_buffers: (0..PACKET_BUFFERS).map(|_| vec![0; MAX_PACKET]).collect(),
            events: Vec::new(),
            completions: Vec::new(),
            tickets: 0,
            labels: 0,
            idle: 0,
            polls: 0,
            next_liveness_check: Instant::now(),
            silence_timeout: liveness::SILENCE_TIMEOUT,
            wants_awaited: false,
            owner: OwnerProcess::current(),
        };
        transport.post_packet_buffers();
        transport
    }

    /// The slot of the peer with a number.
    fn peer_of(&mut self, number: u64) -> Option<usize> {
        let peer = peers::slot_of(number);
        while self.peers.len() <= peer {
            let (number, name) = self.directory.at(self.peers.len())?;
            self.peers.push(RemotePeer::new(number, name));
        }
        if self.peers[peer].number != number {
            // The previous peer of the slot is closed, and nothing refers to it.
            self.peers[peer] = RemotePeer::new(number, self.directory.address(number)?);
        }
        Some(peer)
    }

    /// The inner endpoint's number of a peer.
    fn inner_number(&mut self, peer: usize) -> Result<u64, PostError> {
        let remote = &mut self.peers[peer];
        if remote.inner.is_none() {
            remote.inner = self.inner.insert(socket_of(&remote.address));
        }
        remote.inner.ok_or(PostError::Failed(libc::EHOSTUNREACH))
    }

    /// Encodes the header of a packet to a peer.
    fn packet(&self, peer: usize, body: &PacketBody, payload_bytes: usize) -> Vec<u8> {
        packet::encode(&self.address, identifier_of(&self.peers[peer].address), body, payload_bytes)
    }

    fn push_control(&mut self, peer: usize, body: &PacketBody) {
        let packet = self.packet(peer, body, 0);
        self.enqueue(peer, QueuedOutput::Packet(packet));
    }

    /// Appends output for a peer, and sends it if possible.
    fn enqueue(&mut self, peer: usize, outgoing: QueuedOutput) {
        self.idle = 0;
        self.peers[peer].output.push_back(outgoing);
        if !self.peers[peer].has_output {
            self.send_output(peer);
        }
    }

    /// Posts the queued output of a peer to the inner endpoint, until that accepts no more.
    fn send_output(&mut self, peer: usize) {
        while let Some(outgoing) = self.peers[peer].output.pop_front() {
            let posted = match outgoing {
                QueuedOutput::Packet(bytes) => self
                    .send_packet(peer, bytes, false)
                    .map_err(|(b, r)| (QueuedOutput::Packet(b), r)),
                QueuedOutput::Reply(bytes) => self
                    .send_packet(peer, bytes, true)
                    .map_err(|(b, r)| (QueuedOutput::Reply(b), r)),
                QueuedOutput::Data { ticket, label, length } => self
                    .post_data_send(peer, ticket, label, length)
                    .map_err(|r| (QueuedOutput::Data { ticket, label, length }, r)),
                QueuedOutput::Fetch(fetch) => {
                    self.post_receive(peer, fetch).map_err(|(f, r)| (QueuedOutput::Fetch(f), r))
                }
            };
            let Err((outgoing, error)) = posted else { continue };
            self.peers[peer].output.push_front(outgoing);
            if let PostError::Failed(code) = error {
                tracing::debug!(peer, code, "the inner endpoint rejected a packet");
                self.disconnect(peer, DisconnectReason::Exited);
            }
            break;
        }
        let remote = &mut self.peers[peer];
        let has_output = !remote.output.is_empty();
        if has_output && !remote.has_output {
            self.peers_with_output.push(peer);
        }
        remote.has_output = has_output;
    }

    fn send_packet(
        &mut self,
        peer: usize,
        bytes: Vec<u8>,
        is_reply: bool,
    ) -> Result<(), (Vec<u8>, PostError)> {
        let to = match self.inner_number(peer) {
            Ok(to) => to,
            Err(error) => return Err((bytes, error)),
        };
        // SAFETY: the operation in flight owns the bytes until it completes.
        match unsafe { self.inner.send(&bytes, to, self.in_flight.next_context()) } {
            Ok(()) => {
                self.peers[peer].packets_in_flight += 1;
                self.in_flight.insert(InFlightOp::Packet { peer, is_reply, _bytes: bytes });
            }
            Err(error) => return Err((bytes, error)),
        }
        Ok(())
    }

    /// Records that a packet was sent.
    fn on_packet_sent(&mut self, peer: usize, is_reply: bool) {
        let remote = &mut self.peers[peer];
        remote.packets_in_flight -= 1;
        remote.replies -= usize::from(is_reply);
    }

    /// Posts packet buffers to the inner endpoint.
    fn post_packet_buffers(&mut self) {
        while let Some(mut bytes) = self.free_packet_buffers.pop() {
            let (at, length) = (bytes.as_mut_ptr(), bytes.len());
            // SAFETY: the operation in flight owns the memory until it completes.
            match unsafe { self.inner.receive(at, length, self.in_flight.next_context()) } {
                Ok(()) => self.in_flight.insert(InFlightOp::PacketBuffer { bytes }),
                Err(error) => {
                    if let PostError::Failed(code) = error {
                        tracing::debug!(code, "the inner endpoint rejected a packet buffer");
                    }
                    self.free_packet_buffers.push(bytes);
                    break;
                }
            }
        }
    }

    /// Polls the inner endpoint, and makes progress. Returns whether there were completions.
    fn poll_inner(&mut self) -> bool {
        let mut finished = std::mem::take(&mut self.completions);
        while finished.len() < PACKET_BUFFERS && self.inner.read(&mut finished) {}
        let progressed = !finished.is_empty();
        for one in finished.drain(..) {
            self.on_completion(one);
        }
        self.completions = finished;
        self.post_packet_buffers();
        for peer in std::mem::take(&mut self.peers_with_output) {
            self.peers[peer].has_output = false;
            self.send_output(peer);
        }
        self.check_liveness();
        progressed
    }

    fn on_completion(&mut self, finished: InnerCompletion) {
        match self.in_flight.take(finished.context) {
            Some(InFlightOp::PacketBuffer { bytes }) => {
                if finished.outcome.is_ok() {
                    self.on_packet(&bytes[..finished.length.min(bytes.len())], finished.source);
                }
                self.free_packet_buffers.push(bytes);
            }
            Some(InFlightOp::Packet { peer, is_reply, .. }) => {
                self.on_packet_sent(peer, is_reply);
                if let Err(code) = finished.outcome {
                    tracing::debug!(peer, code, "send to another host failed");
                    self.disconnect(peer, DisconnectReason::Exited);
                }
                self.finish_disconnect(peer);
            }
            Some(InFlightOp::DataSend { peer, ticket, .. }) => {
                self.on_data_sent(
                    peer,
                    ticket,
                    finished.outcome.map_err(|_| DisconnectReason::Exited),
                );
            }
            Some(InFlightOp::DataReceive { peer, fetch }) => {
                self.on_received(peer, fetch, finished);
            }
            None => tracing::debug!(?finished, "completion of an unknown operation"),
        }
    }
}

impl RemoteTransport for FabricTransport {
    fn send(
        &mut self,
        peer: u64,
        number: u64,
        envelope: &Envelope,
        segments: &[Segment],
        delivered: bool,
    ) {
        match self.peer_of(peer) {
            Some(peer) => self.start_send(peer, number, envelope, segments, delivered),
            None => {
                let outcome = Err(Error::PeerDisconnected(DisconnectReason::Exited.into()));
                self.events.push(RemoteEvent::Sent { number, outcome });
            }
        }
    }

    fn fetch(&mut self, peer: u64, ticket: u64, number: u64, segments: &[Segment], length: u64) {
        match self.peer_of(peer) {
            Some(peer) => self.start_fetch(peer, ticket, number, segments, length),
            None => {
                self.report_fetched(
                    number,
                    Err(Error::PeerDisconnected(DisconnectReason::Exited.into())),
                );
            }
        }
    }

    fn return_credit(&mut self, peer: u64, bytes: u64) {
        if let Some(peer) = self.peer_of(peer) {
            self.credit_peer(peer, bytes);
        }
    }

    fn start_rma(&mut self, peer: u64, number: u64, access: &RemoteRma) {
        match self.peer_of(peer) {
            Some(peer) => self.begin_rma(peer, number, access),
            None => self
                .report_rma(number, Err(Error::PeerDisconnected(DisconnectReason::Exited.into()))),
        }
    }

    fn wants_awaited_peers(&mut self) -> bool {
        std::mem::take(&mut self.wants_awaited)
    }

    fn set_awaited_peers(&mut self, peers: &[u64]) {
        for remote in &mut self.peers {
            remote.is_awaited = false;
        }
        for peer in peers {
            self.set_awaited(*peer);
        }
    }

    fn poll(&mut self, events: &mut Vec<RemoteEvent>) {
        self.idle += 1;
        let is_due = self.idle < IDLE_POLLS || self.idle == IDLE_POLLS + 16;
        if is_due || !self.peers_with_output.is_empty() {
            let progressed = self.poll_inner();
            self.idle = if progressed { 0 } else { self.idle.min(IDLE_POLLS) };
        }
        events.append(&mut self.events);
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor()
    }

    fn can_block(&mut self) -> bool {
        // The caller is about to wait, and polls when it is woken.
        self.idle = 0;
        // A sleeping caller polls rarely, so every poll reads the clock.
        self.force_clock_check();
        let is_closing = |remote: &RemotePeer| matches!(remote.state, RemotePeerState::Closing(_));
        let is_busy = !self.events.is_empty()
            || !self.peers_with_output.is_empty()
            || !self.free_packet_buffers.is_empty()
            || self.peers.iter().any(is_closing);
        !is_busy && self.inner.can_block()
    }
}
