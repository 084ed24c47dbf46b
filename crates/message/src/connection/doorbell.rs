//! Telling the other side that something came, and being told.

use memferry_sys::wait_word::futex_wake_shared;

use super::Wire;
use crate::ring::attention::{ASLEEP, AWAY};
use crate::ring::cells::Nonsense;

/// The packet that wakes a side which watches its socket. Regions come with longer packets.
const WAKE_PACKET: [u8; 1] = [0];
/// Descriptors that may wait for their notes.
const MOST_EARLY: usize = 16;

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
        if ways & ASLEEP != 0 {
            futex_wake_shared(self.memory.other_attention().word());
        }
        if ways & AWAY != 0
            && let Some(socket) = &self.socket
        {
            // A full socket has packets in it, so its watcher is awake already.
            let _ = socket.send(&WAKE_PACKET, &[]);
        }
    }

    /// Takes wake-ups out of the socket, and keeps descriptors that came between them.
    pub(crate) fn drain_socket(&mut self) -> Result<(), Nonsense> {
        let Some(socket) = &self.socket else { return Ok(()) };
        let mut packet = [0; 8];
        loop {
            match socket.receive(&mut packet) {
                Ok((1, descriptors)) if descriptors.is_empty() => {}
                Ok((4, mut descriptors)) if descriptors.len() == 1 => {
                    let [a, b, c, d, ..] = packet;
                    let region = u32::from_le_bytes([a, b, c, d]);
                    if self.early.len() >= MOST_EARLY {
                        return Err(Nonsense("more descriptors than notes"));
                    }
                    self.early.push((region, descriptors.remove(0)));
                }
                // Closed: `is_alive` sees that too, and by then all notes have been read.
                Ok((0, _)) => return Ok(()),
                Ok(_) => return Err(Nonsense("a packet that nobody sends")),
                Err(error) => match error.kind() {
                    std::io::ErrorKind::InvalidData => {
                        return Err(Nonsense("a packet that is too long"));
                    }
                    _ => return Ok(()),
                },
            }
        }
    }
}
