//! Peers on other hosts: the directory of their numbers, which the provider uses too, and their
//! state.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use memferry_message::DisconnectReason;

use super::fetches::RemoteFetch;
use super::liveness::LivenessProbe;
use super::rma::OutgoingRma;
use super::sends::{QueuedSend, RtsSend};
use super::{RawAddress, socket_of};
use crate::address::SOCKET_BYTES;

/// The maximum number of peers on other hosts.
const MAX_PEERS: usize = if cfg!(test) { 64 } else { 1 << 16 };

/// The maximum cost of whole messages for which a receiver has not returned the credit.
pub(super) const CREDIT_LIMIT: u64 = 1 << 20;
/// The cost of a message in addition to its bytes, so that empty messages are not free.
const OVERHEAD: u64 = 64;
/// The maximum number of announced messages of one peer that are not fetched. A sender queues
/// further ones.
pub(super) const MAX_PENDING_RTS: usize = if cfg!(test) { 64 } else { 1 << 20 };

/// The cost of a whole message.
pub(super) fn cost(bytes: u64) -> u64 {
    bytes.saturating_add(OVERHEAD)
}

/// The numbers of peers, shared by the transport and the provider.
#[derive(Debug, Default)]
pub(crate) struct Directory(Mutex<DirectoryTable>);

#[derive(Debug, Default)]
struct DirectoryTable {
    numbers: HashMap<RawAddress, u64>,
    slots: Vec<DirectoryEntry>,
    /// Slots of closed peers without claims, in the order in which they became free.
    free: VecDeque<usize>,
}

/// A slot of the directory. The upper half of its number is the generation.
#[derive(Debug)]
struct DirectoryEntry {
    address: RawAddress,
    generation: u32,
    /// The number of claims of the provider.
    claims: usize,
    /// The peer is disconnected, and the transport has no operation with it.
    is_closed: bool,
}

impl DirectoryEntry {
    fn is_free(&self) -> bool {
        self.is_closed && self.claims == 0
    }
}

/// The slot of a number.
pub(super) fn slot_of(number: u64) -> usize {
    number as u32 as usize
}

impl DirectoryTable {
    fn number_of_slot(&self, slot: usize) -> u64 {
        u64::from(self.slots[slot].generation) << 32 | slot as u64
    }

    fn entry(&mut self, number: u64) -> Option<&mut DirectoryEntry> {
        let generation = (number >> 32) as u32;
        self.slots.get_mut(slot_of(number)).filter(|entry| entry.generation == generation)
    }

    fn number(&mut self, address: &RawAddress) -> Option<u64> {
        if let Some(number) = self.numbers.get(address) {
            return Some(*number);
        }
        if !is_reachable(socket_of(address)) {
            return None;
        }
        let slot = self.allocate_slot(address)?;
        let number = self.number_of_slot(slot);
        self.numbers.insert(*address, number);
        Some(number)
    }

    /// Allocates a new slot, or reuses that of the peer that was closed first. Until then a closed
    /// peer is remembered, so that its packets are dropped.
    fn allocate_slot(&mut self, address: &RawAddress) -> Option<usize> {
        if self.slots.len() < MAX_PEERS {
            let (claims, is_closed) = (0, false);
            self.slots.push(DirectoryEntry { address: *address, generation: 0, claims, is_closed });
            return Some(self.slots.len() - 1);
        }
        while let Some(slot) = self.free.pop_front() {
            let entry = &mut self.slots[slot];
            // It may have been claimed since.
            if entry.is_free() {
                self.numbers.remove(&entry.address);
                let generation = entry.generation.wrapping_add(1);
                *entry =
                    DirectoryEntry { address: *address, generation, claims: 0, is_closed: false };
                return Some(slot);
            }
        }
        None
    }
}

impl Directory {
    fn lock(&self) -> MutexGuard<'_, DirectoryTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the peer with this address, a new one if it has none. `None` if the address
    /// cannot belong to another host, or there are too many peers.
    pub(super) fn number(&self, address: &RawAddress) -> Option<u64> {
        self.lock().number(address)
    }

    /// As [`Directory::number`]. The number belongs to the peer until it is released.
    pub(crate) fn claim(&self, address: &RawAddress) -> Option<u64> {
        let mut table = self.lock();
        let number = table.number(address)?;
        table.entry(number)?.claims += 1;
        Some(number)
    }

    /// Releases a [`Directory::claim`].
    pub(crate) fn release(&self, number: u64) {
        let mut table = self.lock();
        let Some(entry) = table.entry(number) else { return };
        entry.claims -= 1;
        if entry.is_free() {
            table.free.push_back(slot_of(number));
        }
    }

    /// Records that a peer is disconnected and the transport has no operation with it.
    pub(super) fn set_closed(&self, number: u64) {
        let mut table = self.lock();
        let Some(entry) = table.entry(number).filter(|entry| !entry.is_closed) else { return };
        entry.is_closed = true;
        if entry.is_free() {
            table.free.push_back(slot_of(number));
        }
    }

    /// The number of a peer, if it has one.
    pub(crate) fn find(&self, address: &RawAddress) -> Option<u64> {
        self.lock().numbers.get(address).copied()
    }

    /// The address of the peer with this number.
    pub(crate) fn address(&self, number: u64) -> Option<RawAddress> {
        self.lock().entry(number).map(|entry| entry.address)
    }

    /// The number and the address in a slot.
    pub(super) fn at(&self, slot: usize) -> Option<(u64, RawAddress)> {
        let table = self.lock();
        let entry = table.slots.get(slot)?;
        Some((table.number_of_slot(slot), entry.address))
    }
}

/// Returns whether these bytes are a socket address that can be connected to.
fn is_reachable(socket: &[u8; SOCKET_BYTES]) -> bool {
    let family = u16::from_ne_bytes([socket[0], socket[1]]);
    let has_port = socket[2..4] != [0, 0];
    has_port && [libc::AF_INET as u16, libc::AF_INET6 as u16].contains(&family)
}

/// Output that waits until the inner endpoint accepts it.
#[derive(Debug)]
pub(super) enum QueuedOutput {
    Packet(Vec<u8>),
    /// The reply to a fragment of the peer's RMA.
    Reply(Vec<u8>),
    /// The bytes of an announced message.
    Data {
        ticket: u64,
        label: u64,
        length: u64,
    },
    /// A fetch, whose buffer is posted before the request is sent.
    Fetch(RemoteFetch),
}

/// The state of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RemotePeerState {
    Open,
    /// Disconnected, but the inner endpoint may still access memory of messages with it.
    Closing(DisconnectReason),
    Disconnected(DisconnectReason),
}

/// An announced message of a peer.
#[derive(Debug, Clone, Copy)]
pub(super) struct PeerRts {
    pub(super) length: u64,
    pub(super) acknowledged: bool,
}

/// A peer on another host.
#[derive(Debug)]
pub(super) struct RemotePeer {
    /// The number in the directory.
    pub(super) number: u64,
    pub(super) address: RawAddress,
    /// The inner endpoint's number, once it was needed.
    pub(super) inner: Option<u64>,
    /// A packet with a known sender has arrived from it.
    pub(super) is_confirmed: bool,
    pub(super) state: RemotePeerState,
    /// In sending order.
    pub(super) output: VecDeque<QueuedOutput>,
    /// Whether it is in the list of peers with output.
    pub(super) has_output: bool,
    /// The cost of whole messages sent to it whose credit it has not returned.
    pub(super) credits_used: u64,
    /// The cost of whole messages received from it whose credit is not returned.
    pub(super) credits_granted: u64,
    /// The part of it that was taken, and whose credit is not yet sent.
    pub(super) credits_to_return: u64,
    /// This side's announced messages, by ticket.
    pub(super) sends: HashMap<u64, RtsSend>,
    /// Messages that wait to be announced, in order.
    pub(super) queued_sends: VecDeque<QueuedSend>,
    /// The peer's announced messages, by its tickets.
    pub(super) pending_rts: HashMap<u64, PeerRts>,
    /// This side's RMA on its memory.
    pub(super) rma: OutgoingRma,
    /// Replies to its RMA that are not sent.
    pub(super) replies: usize,
    /// Operations of the inner endpoint with memory of messages, and with packets.
    pub(super) data_in_flight: usize,
    pub(super) packets_in_flight: usize,
    /// A receive waits for a message that only it can send.
    pub(super) is_awaited: bool,
    /// The number of packets received from it.
    pub(super) packets_received: u64,
    pub(super) liveness: Option<LivenessProbe>,
    /// When its connection is shut down, if it is disconnected and the inner endpoint is still busy
    /// with it.
    pub(super) abort_at: Option<Instant>,
    pub(super) is_aborted: bool,
}

impl RemotePeer {
    pub(super) fn new(number: u64, address: RawAddress) -> Self {
        Self {
            number,
            address,
            inner: None,
            is_confirmed: false,
            state: RemotePeerState::Open,
            output: VecDeque::new(),
            has_output: false,
            credits_used: 0,
            credits_granted: 0,
            credits_to_return: 0,
            sends: HashMap::new(),
            queued_sends: VecDeque::new(),
            pending_rts: HashMap::new(),
            rma: OutgoingRma::default(),
            replies: 0,
            data_in_flight: 0,
            packets_in_flight: 0,
            is_awaited: false,
            packets_received: 0,
            liveness: None,
            abort_at: None,
            is_aborted: false,
        }
    }

    /// The reason of the disconnect, if it is disconnected.
    pub(super) fn disconnect_reason(&self) -> Option<DisconnectReason> {
        match &self.state {
            RemotePeerState::Open => None,
            RemotePeerState::Closing(reason) | RemotePeerState::Disconnected(reason) => {
                Some(reason.clone())
            }
        }
    }

    /// Returns whether anything is expected from it: that it accepts packets, requests or sends
    /// bytes, or sends a message that a receive waits for.
    pub(super) fn is_expected(&self) -> bool {
        let is_needed = !self.output.is_empty()
            || !self.sends.is_empty()
            || !self.rma.is_empty()
            || self.data_in_flight > 0
            || self.is_awaited;
        is_needed && self.state == RemotePeerState::Open
    }

    /// Returns whether packets were exchanged with it.
    pub(super) fn is_connected(&self) -> bool {
        self.inner.is_some() && self.state == RemotePeerState::Open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(port: u8) -> RawAddress {
        let mut address = [1; 64];
        address[36..].fill(0);
        address[36..38].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
        address[39] = port;
        address
    }

    #[test]
    fn a_peer_has_one_number_and_a_number_one_peer() {
        let directory = Directory::default();
        let (one, two) = (directory.number(&address(1)), directory.number(&address(2)));
        assert_ne!(one, two);
        assert_eq!(directory.number(&address(1)), one);
        assert_eq!(directory.address(two.unwrap()), Some(address(2)));
        assert_eq!((directory.address(9), directory.find(&address(3))), (None, None));
    }

    #[test]
    fn a_number_is_given_to_another_when_its_peer_is_over_and_nobody_claims_it() {
        let directory = Directory::default();
        let names: Vec<_> = (1..=MAX_PEERS as u8).map(address).collect();
        let numbers: Vec<_> =
            names.iter().map(|address| directory.claim(address).unwrap()).collect();
        let mut newcomers = (MAX_PEERS as u8 + 1..).map(address);
        let mut next = || newcomers.next().unwrap();
        assert_eq!(directory.number(&next()), None, "there are too many peers");
        directory.set_closed(numbers[1]);
        directory.set_closed(numbers[0]);
        assert_eq!(directory.number(&next()), None, "all numbers are claimed");
        directory.release(numbers[0]);
        directory.release(numbers[1]);
        directory.release(numbers[2]);
        // Claimed again, though it is closed.
        assert_eq!(directory.claim(&names[0]), Some(numbers[0]));
        let newcomer = next();
        let second = directory.number(&newcomer).unwrap();
        assert_eq!((slot_of(second), directory.address(second)), (1, Some(newcomer)));
        assert_ne!(second, numbers[1]);
        assert_eq!((directory.address(numbers[1]), directory.find(&names[1])), (None, None));
        assert_eq!(directory.at(1), Some((second, newcomer)));
        assert_eq!(directory.number(&next()), None, "the third peer is not closed");
        directory.set_closed(numbers[1]);
        assert_eq!(directory.number(&next()), None, "a stale number closes no peer");
        directory.release(numbers[0]);
        assert!(directory.number(&next()).is_some());
    }

    #[test]
    fn an_address_without_a_socket_has_no_number() {
        let directory = Directory::default();
        assert_eq!(directory.number(&[0; 64]), None);
        assert_eq!(directory.number(&address(0)), None);
    }
}
