//! Telling the other side that something came, and being told.

use std::os::fd::OwnedFd;

use memferry_sys::packet_socket::PacketSocket;
use memferry_sys::wait_word::futex_wake_shared;

use super::Wire;
use crate::ring::attention::{ASLEEP, AWAY};
use crate::ring::cells::Nonsense;
use crate::ring::layout::Memory;

/// The packet that wakes a side which watches its socket. Regions come with longer packets.
const WAKE_PACKET: [u8; 1] = [0];
/// Packets that are taken at a time.
const MOST_PACKETS: usize = 256;
/// Descriptors that may wait for their notes.
const MOST_EARLY: usize = 64;

/// Tells the other side that something came by other means than a note, if it does not look by
/// itself.
pub(crate) fn ring_doorbell(memory: &Memory, socket: Option<&PacketSocket>) {
    let ways = memory.other_attention().take_ways();
    if ways != 0 {
        wake(memory, socket, ways);
    }
}

#[cold]
fn wake(memory: &Memory, socket: Option<&PacketSocket>, ways: u32) {
    if ways & ASLEEP != 0 {
        futex_wake_shared(memory.other_attention().word());
    }
    if ways & AWAY != 0
        && let Some(socket) = socket
    {
        // A full socket has packets in it, so its watcher is awake already.
        let _ = socket.send(&WAKE_PACKET, &[]);
    }
}

impl Wire {
    /// Tells the other side about everything written since the last time, if it does not look by
    /// itself.
    #[inline]
    pub(crate) fn announce(&mut self) {
        if self.unannounced {
            self.unannounced = false;
            let ways = self.memory.other_attention().take_ways();
            if ways != 0 {
                self.wake(ways);
            }
        }
    }

    /// As [`Wire::announce`], for what is told by other means than a note.
    pub(crate) fn announce_later(&mut self) {
        self.unannounced = true;
    }

    #[cold]
    fn wake(&self, ways: u32) {
        wake(&self.memory, self.socket.as_ref(), ways);
    }

    /// From now on this side must be told, in the ways of `flags`.
    pub(crate) fn rest(&mut self, flags: u32) {
        let before = self.memory.own_attention().rest(flags);
        self.count_packet(before);
        self.asked_for_packet = flags & AWAY != 0;
    }

    /// From now on this side looks by itself.
    pub(crate) fn awake(&mut self) {
        let before = self.memory.own_attention().awake();
        self.count_packet(before);
        self.asked_for_packet = false;
    }

    /// Whoever takes the word away sends a packet, which may come at any time after that.
    fn count_packet(&mut self, before: u32) {
        if self.asked_for_packet && before & AWAY == 0 {
            self.packets_owed += 1;
        }
    }

    /// Whether this side still waits to be told in the ways of `flags`.
    pub(crate) fn is_resting(&self, flags: u32) -> bool {
        self.memory.own_attention().resting() == flags
    }

    /// Whether packets are in the socket, or on their way, that have nothing to tell any more. While
    /// they are there, the socket is readable for no reason.
    pub(crate) fn has_stale_packets(&self) -> bool {
        self.packets_owed > 0
    }

    /// Takes those out of the socket that have come, and looks no further.
    pub(crate) fn drop_stale_packets(&mut self) -> Result<(), Nonsense> {
        while self.packets_owed > 0 && self.early.len() < MOST_EARLY && self.take_packet()? {}
        Ok(())
    }

    /// Takes wake-ups out of the socket, and keeps descriptors that came between them. What there is
    /// no place for stays in the socket until the notes of the others come.
    pub(crate) fn drain_socket(&mut self) -> Result<(), Nonsense> {
        // More than this at once is not needed to go on, and nobody may keep this side busy.
        for _ in 0..MOST_PACKETS {
            if self.early.len() >= MOST_EARLY || !self.take_packet()? {
                break;
            }
        }
        Ok(())
    }

    /// The descriptor of a region, which was sent before its note.
    /// `None` if it got lost: this process may have had too many.
    pub(super) fn take_descriptor(&mut self, region: u32) -> Result<Option<OwnedFd>, Nonsense> {
        for _ in 0..MOST_PACKETS {
            // In order: a region that was shared twice has two descriptors.
            if let Some(place) = self.early.iter().position(|(number, _)| *number == region) {
                return Ok(Some(self.early.remove(place).1));
            }
            if self.early.len() >= MOST_EARLY || !self.take_packet()? {
                break;
            }
        }
        Ok(None)
    }

    /// Takes one packet out of the socket. `false` when there is none.
    fn take_packet(&mut self) -> Result<bool, Nonsense> {
        let Some(socket) = &self.socket else { return Ok(false) };
        let mut packet = [0; 8];
        match socket.receive(&mut packet) {
            Ok((1, descriptors)) if descriptors.is_empty() => {
                // One may be seen before this side has noticed that the word was taken.
                self.packets_owed = (self.packets_owed - 1).max(-1);
                Ok(true)
            }
            Ok((4, mut descriptors)) if descriptors.len() == 1 => {
                let [a, b, c, d, ..] = packet;
                let region = u32::from_le_bytes([a, b, c, d]);
                self.early.push((region, descriptors.remove(0)));
                Ok(true)
            }
            // Its descriptor got lost here.
            Ok((4, _)) => Ok(true),
            // Closed: `is_alive` sees that too, and by then all notes have been read.
            Ok((0, _)) => Ok(false),
            Ok(_) => Err(Nonsense("a packet that nobody sends")),
            Err(error) => match error.kind() {
                std::io::ErrorKind::InvalidData => Err(Nonsense("a packet that is too long")),
                _ => Ok(false),
            },
        }
    }
}
