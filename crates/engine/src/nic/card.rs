//! The card itself: its rings, and bringing it into the state in which it talks to itself.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use memferry_sys::device::Device;
use memferry_sys::pages::page_bytes;

use super::frame::{BUFFER_BYTES, Frame, HEAD_BYTES, Head, Payload};
use super::registers::{self as r, receive, transmit};
use crate::device::{Region, SharedMemory, until};

/// Transmit descriptors: a page of them.
const TRANSMIT: usize = 256;
/// Receive descriptors, heads and values: as many as frames can be under way, and one more.
const RECEIVE: usize = 128;

/// How long the card may take to begin anew.
const RESET_LIMIT: Duration = Duration::from_secs(1);

/// A card that talks to itself, and the memory that it shares with its driver. In order in memory:
/// transmit ring, receive ring, values, a page that takes what goes nowhere, heads to send, heads
/// that came.
#[derive(Debug)]
pub(super) struct Card {
    device: Arc<dyn Device>,
    memory: SharedMemory,
    transmit: Region,
    receive: Region,
    values: Region,
    nowhere: usize,
    heads_out: Region,
    heads_in: Region,
    /// The next descriptor of each ring to be written.
    transmit_tail: usize,
    receive_tail: usize,
    /// The receive descriptor that is used next by the card.
    receive_head: usize,
    /// Transmit descriptors of frames that have not arrived.
    transmit_used: usize,
}

/// What came in a receive descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrival {
    /// Nothing yet.
    None,
    /// The frame that was expected.
    Right,
    /// Something else.
    Wrong,
}

impl Card {
    /// Brings a card into the state in which it talks to itself.
    pub(super) fn new(device: Arc<dyn Device>) -> io::Result<Self> {
        // Before any memory is mapped: whoever had the card before may have left it at work, on
        // addresses that are given out again.
        stop(&*device)?;
        let page = page_bytes();
        let heads = (RECEIVE * HEAD_BYTES).next_multiple_of(page);
        let memory = SharedMemory::new(device.clone(), 4 * page + 2 * heads)?;
        let mut card = Self {
            device,
            memory,
            transmit: Region::new(0, transmit::BYTES),
            receive: Region::new(page, receive::BYTES),
            values: Region::new(2 * page, size_of::<u64>()),
            nowhere: 3 * page,
            heads_out: Region::new(4 * page, HEAD_BYTES),
            heads_in: Region::new(4 * page + heads, HEAD_BYTES),
            transmit_tail: 0,
            receive_tail: 0,
            receive_head: 0,
            transmit_used: 0,
        };
        card.set_up();
        Ok(card)
    }

    /// Stops the card: whatever was under way does not land any more. The rings are as they were.
    pub(super) fn stop(&self) -> io::Result<()> {
        stop(&*self.device)
    }

    /// Begins anew with empty rings. The card must have been stopped.
    pub(super) fn set_up(&mut self) {
        (self.transmit_tail, self.receive_tail) = (0, 0);
        (self.receive_head, self.transmit_used) = (0, 0);
        self.memory.clear(0..2 * page_bytes());
        let device = &*self.device;
        // SAFETY: the card is this value's alone (promised to `NicEngine::over`) and was stopped; its
        // rings name only memory that is mapped for it: their own, and that of frames in flight.
        let write = |at, value| unsafe { device.write32(at, value) };
        write(r::CTRL, r::CTRL_FULL_DUPLEX | r::CTRL_LINK_UP | r::CTRL_SPEED_1000 | r::CTRL_FORCE);
        let ring = |low: usize, length: usize, region: Region, bytes: usize| {
            let address = self.memory.address(region.offset(0));
            write(low, address as u32);
            write(low + 4, (address >> 32) as u32);
            write(length, bytes as u32);
        };
        ring(r::RDBAL, r::RDLEN, self.receive, RECEIVE * receive::BYTES);
        ring(r::TDBAL, r::TDLEN, self.transmit, TRANSMIT * transmit::BYTES);
        for at in [r::RDH, r::RDT, r::TDH, r::TDT, r::RXCSUM] {
            write(at, 0);
        }
        write(r::RFCTL, r::RFCTL_EXTENDED);
        let kib = BUFFER_BYTES as u32 >> 10;
        // The last buffer is as small as can be: nothing is to get there.
        write(r::PSRCTL, (HEAD_BYTES as u32 / 128) | (kib << 8) | (kib << 16) | (1 << 24));
        write(r::TXDCTL, device.read32(r::TXDCTL) | r::TXDCTL_COUNT_DESCRIPTORS);
        write(r::TIPG, r::TIPG_USUAL);
        write(
            r::RCTL,
            r::RCTL_ENABLE
                | r::RCTL_PROMISCUOUS
                | r::RCTL_LONG_FRAMES
                | r::RCTL_LOOPBACK
                | r::RCTL_PACKET_SPLIT
                | r::RCTL_STRIP_CHECKSUM,
        );
        write(r::TCTL, r::TCTL_ENABLE | r::TCTL_PAD | r::TCTL_COLLISIONS);
    }

    /// Puts a frame into both rings, if there is room. The card does not know of it yet.
    pub(super) fn put(&mut self, frame: &Frame) -> bool {
        let needed = frame.transmit_descriptors();
        let next = (self.receive_tail + 1) % RECEIVE;
        if next == self.receive_head || self.transmit_used + needed >= TRANSMIT {
            return false;
        }
        let slot = self.receive_tail;
        let head = Head { number: frame.number, payload: frame.bytes, sum: frame.sum };
        self.memory.store64(self.heads_out.offset(slot), &head.words());
        let came = self.heads_in.offset(slot);
        self.memory.clear(came..came + HEAD_BYTES);
        let nowhere = self.memory.address(self.nowhere);
        let (first, second) = frame.targets;
        debug_assert_eq!(first & 1, 0, "an odd address looks like a frame that has come");
        let buffers = [self.memory.address(came), first, second.unwrap_or(nowhere), nowhere];
        self.memory.store64(self.receive.offset(slot), &buffers);

        self.send(self.memory.address(self.heads_out.offset(slot)), HEAD_BYTES as u16, false);
        match &frame.payload {
            Payload::Pieces(pieces) => {
                for (index, piece) in pieces.iter().enumerate() {
                    self.send(piece.address, piece.bytes, index + 1 == pieces.len());
                }
            }
            Payload::Value(value) => {
                let at = self.values.offset(slot);
                self.memory.store64(at, &[*value]);
                self.send(self.memory.address(at), size_of::<u64>() as u16, true);
            }
        }
        self.transmit_used += needed;
        self.receive_tail = next;
        true
    }

    /// Writes the next transmit descriptor.
    fn send(&mut self, address: u64, bytes: u16, is_last: bool) {
        let flags = transmit::CHECKSUM | if is_last { transmit::END } else { 0 };
        let at = self.transmit.offset(self.transmit_tail);
        self.memory.store64(at, &transmit::words(address, bytes, flags));
        self.transmit_tail = (self.transmit_tail + 1) % TRANSMIT;
    }

    /// Tells the card of all frames in the rings: first where they go, then that they are there.
    pub(super) fn ring(&self) {
        let halves = receive::BYTES / 16;
        // SAFETY: as in `set_up`; everything up to both tails is written.
        unsafe {
            self.device.write32(r::RDT, (self.receive_tail * halves) as u32);
            self.device.write32(r::TDT, self.transmit_tail as u32);
        }
    }

    /// Whether the oldest frame in the rings has arrived.
    pub(super) fn arrival(&self, frame: &Frame) -> Arrival {
        let at = self.receive.offset(self.receive_head);
        let status = self.memory.load32(at + receive::STATUS_AT);
        if status & receive::DONE == 0 {
            return Arrival::None;
        }
        let came = self.heads_in.offset(self.receive_head);
        let head = Head { number: frame.number, payload: frame.bytes, sum: frame.sum };
        let words = head.words();
        let is_head = (0..words.len()).all(|at| self.memory.load64(came + 8 * at) == words[at]);
        let others = self.memory.load64(at + receive::OTHER_LENGTHS_AT) >> 16;
        let first = frame.bytes.min(BUFFER_BYTES);
        let payload = first | (frame.bytes - first) << 16;
        let head = self.memory.load64(at + receive::FIRST_LENGTH_AT) >> 32 & 0xFFFF;
        let is_whole = status & (receive::END | receive::ERRORS) == receive::END
            && head == HEAD_BYTES as u64
            && others == payload;
        if is_head && is_whole { Arrival::Right } else { Arrival::Wrong }
    }

    /// Frees the places of the oldest frame, which has arrived.
    pub(super) fn take(&mut self, frame: &Frame) {
        self.receive_head = (self.receive_head + 1) % RECEIVE;
        self.transmit_used -= frame.transmit_descriptors();
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        if stop(&*self.device).is_err() {
            // It does not answer, and its memory is unmapped next.
            tracing::warn!(card = self.device.name(), "the card could not be stopped");
        }
    }
}

/// Stops a card: it neither reads nor writes memory any more, and raises no interrupts.
fn stop(device: &dyn Device) -> io::Result<()> {
    // SAFETY: a card that stops touches no memory.
    let write = |at, value| unsafe { device.write32(at, value) };
    write(r::IMC, u32::MAX);
    write(r::RCTL, 0);
    write(r::TCTL, 0);
    write(r::CTRL, device.read32(r::CTRL) | r::CTRL_STOP_BUS);
    let is_off_bus = || device.read32(r::STATUS) & r::STATUS_ON_BUS == 0;
    // A card that does not let go of the bus is reset all the same.
    let _ = until(RESET_LIMIT, is_off_bus);
    write(r::CTRL, device.read32(r::CTRL) | r::CTRL_RESET);
    let is_over = || device.read32(r::CTRL) & r::CTRL_RESET == 0;
    if !until(RESET_LIMIT, is_over) || device.read32(r::STATUS) == r::GONE {
        device.reset()?;
        if device.read32(r::STATUS) == r::GONE {
            return Err(io::Error::other("the card does not answer"));
        }
    }
    write(r::IMC, u32::MAX);
    let _ = device.read32(r::ICR);
    Ok(())
}
