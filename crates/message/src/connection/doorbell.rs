//! The doorbell: waking the peer, and being woken by it.

use std::os::fd::{AsFd, OwnedFd};

use memferry_sys::futex::futex_wake_shared;
use memferry_sys::seqpacket::SeqPacketSocket;

use super::Connection;
use crate::control::ControlMessage;
use crate::ring::cells::ProtocolError;
use crate::ring::hint_memory::{HintMemory, PeerHints};
use crate::ring::hints::HintWords;
use crate::ring::layout::ConnectionMemory;
use crate::ring::wakeup::{FD_ARMED, FUTEX_ARMED, HINT_ARMED};

/// The packet that wakes a peer that waits for its socket. Packets of regions are longer.
const WAKE_PACKET: [u8; 1] = [0];
/// Stands for the hints of a process where a packet names the region of its descriptor.
const HINTS_DESCRIPTOR: u32 = u32::MAX;
/// Maximum number of packets taken in one call.
const MAX_PACKETS: usize = 256;
/// Maximum number of descriptors that wait for their control messages.
const MAX_EARLY_DESCRIPTORS: usize = 64;

/// Rings the peer's doorbell, if the peer has armed a wakeup. For events that are not control
/// messages.
pub(crate) fn ring_doorbell(memory: &ConnectionMemory, socket: Option<&SeqPacketSocket>) {
    let armed = memory.peer_wakeup().take_armed();
    if armed != 0 {
        wake(memory, socket, armed);
    }
}

#[cold]
fn wake(memory: &ConnectionMemory, socket: Option<&SeqPacketSocket>, flags: u32) {
    // First: a peer that is woken by a packet finds its hint.
    if flags & HINT_ARMED != 0
        && let Some(hints) = memory.peer_hints().get()
        && hints.set() & FUTEX_ARMED != 0
    {
        futex_wake_shared(hints.words().wakeup().word());
    }
    if flags & FUTEX_ARMED != 0 {
        futex_wake_shared(memory.peer_wakeup().word());
    }
    if flags & FD_ARMED != 0
        && let Some(socket) = socket
    {
        // A full socket has packets in it, so the peer is woken already.
        let _ = socket.send(&WAKE_PACKET, &[]);
    }
}

impl Connection {
    /// Rings the peer's doorbell if cells were written since the last time and the peer has armed a
    /// wakeup.
    #[inline(always)]
    pub(crate) fn ring_doorbell(&mut self) {
        if self.doorbell_pending {
            self.doorbell_pending = false;
            let armed = self.memory.peer_wakeup().take_armed();
            if armed != 0 {
                self.wake(armed);
            }
        }
    }

    /// Makes the next [`Connection::ring_doorbell`] ring, for events that are not control messages.
    pub(crate) fn defer_doorbell(&mut self) {
        self.doorbell_pending = true;
    }

    #[cold]
    fn wake(&self, flags: u32) {
        wake(&self.memory, self.socket.as_ref(), flags);
    }

    /// Arms this side's wakeups in `flags`.
    pub(crate) fn arm_wakeup(&mut self, flags: u32) {
        let before = self.memory.own_wakeup().arm(flags);
        self.count_wake_packet(before);
        self.packet_wakeup_armed = flags & FD_ARMED != 0;
    }

    /// Sends the hints of this process to the peer, which has the number `slot` in them. If they
    /// cannot be sent, this side polls the ring. The ring to the peer, one of many, grows when it is full.
    pub(crate) fn share_hints(&mut self, hints: &HintMemory, slot: usize) {
        self.producer.keep_small();
        self.bounce.keep_small();
        let packet = HINTS_DESCRIPTOR.to_le_bytes();
        let send = |socket: &SeqPacketSocket| socket.send(&packet, &[hints.as_fd()]).is_ok();
        if self.socket.as_ref().is_some_and(send) {
            self.send_control(ControlMessage::ShareHints { slot: slot as u32 });
        }
    }

    /// Maps the hints of the peer. If that fails, the peer polls its ring.
    pub(crate) fn map_peer_hints(&mut self, slot: u32) -> Result<(), ProtocolError> {
        let Some(descriptor) = self.take_descriptor(HINTS_DESCRIPTOR)? else { return Ok(()) };
        let slot = slot as usize % HintWords::SLOTS;
        if let Ok(hints) = PeerHints::from_untrusted_fd(descriptor, slot)
            && self.memory.peer_hints().set(hints).is_ok()
        {
            self.send_control(ControlMessage::HintsMapped);
        }
        Ok(())
    }

    /// Disarms this side's wakeups.
    pub(crate) fn disarm_wakeup(&mut self) {
        let before = self.memory.own_wakeup().disarm();
        self.count_wake_packet(before);
        self.packet_wakeup_armed = false;
    }

    /// Counts the packet that the peer sends if it has taken the flag; the packet may arrive at any
    /// later time.
    fn count_wake_packet(&mut self, before: u32) {
        if self.packet_wakeup_armed && before & FD_ARMED == 0 {
            self.wake_packets_in_flight += 1;
        }
    }

    /// Returns whether exactly `flags` are armed and not yet taken by the peer.
    pub(crate) fn is_armed(&self, flags: u32) -> bool {
        self.memory.own_wakeup().armed() == flags
    }

    /// Returns whether wake packets are in the socket, or in flight, that are no longer needed.
    /// They make the socket readable without reason.
    pub(crate) fn has_stale_packets(&self) -> bool {
        self.wake_packets_in_flight > 0
    }

    /// Takes the stale packets that have arrived out of the socket, and no others.
    pub(crate) fn drop_stale_packets(&mut self) -> Result<(), ProtocolError> {
        while self.wake_packets_in_flight > 0
            && self.early_descriptors.len() < MAX_EARLY_DESCRIPTORS
            && self.take_packet()?
        {}
        Ok(())
    }

    /// Takes wake packets out of the socket, and keeps the descriptors between them. Descriptors
    /// above the limit stay in the socket until the control messages of the earlier ones have come.
    pub(crate) fn drain_socket(&mut self) -> Result<(), ProtocolError> {
        // The loop is bounded, so that the peer cannot keep this side busy.
        for _ in 0..MAX_PACKETS {
            if self.early_descriptors.len() >= MAX_EARLY_DESCRIPTORS || !self.take_packet()? {
                break;
            }
        }
        Ok(())
    }

    /// Takes the descriptor of a region, which was sent before its control message. Returns `None`
    /// if it was lost: this process may have had too many descriptors.
    pub(super) fn take_descriptor(
        &mut self,
        region: u32,
    ) -> Result<Option<OwnedFd>, ProtocolError> {
        for _ in 0..MAX_PACKETS {
            // In order: a region that was shared twice has two descriptors.
            if let Some(index) =
                self.early_descriptors.iter().position(|(number, _)| *number == region)
            {
                return Ok(Some(self.early_descriptors.remove(index).1));
            }
            if self.early_descriptors.len() >= MAX_EARLY_DESCRIPTORS || !self.take_packet()? {
                break;
            }
        }
        Ok(None)
    }

    /// Takes one packet out of the socket. Returns `false` when there is none.
    fn take_packet(&mut self) -> Result<bool, ProtocolError> {
        let Some(socket) = &self.socket else { return Ok(false) };
        let mut packet = [0; 8];
        match socket.receive(&mut packet) {
            Ok((1, descriptors)) if descriptors.is_empty() => {
                // The packet may arrive before this side has seen that the flag was taken.
                self.wake_packets_in_flight = (self.wake_packets_in_flight - 1).max(-1);
                Ok(true)
            }
            Ok((4, mut descriptors)) if descriptors.len() == 1 => {
                let [a, b, c, d, ..] = packet;
                let region = u32::from_le_bytes([a, b, c, d]);
                self.early_descriptors.push((region, descriptors.remove(0)));
                Ok(true)
            }
            // The descriptor was lost on receipt.
            Ok((4, _)) => Ok(true),
            // Closed: `is_alive` detects that too, and by then all control messages are read.
            Ok((0, _)) => Ok(false),
            Ok(_) => Err(ProtocolError("invalid packet")),
            Err(error) => match error.kind() {
                std::io::ErrorKind::InvalidData => Err(ProtocolError("packet too long")),
                _ => Ok(false),
            },
        }
    }
}
