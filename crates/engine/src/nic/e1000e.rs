//! The driver of the card: its rings, and its loopback mode.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use memferry_memory::dma_mappings::DmaMappings;
use memferry_sys::device::DmaDevice;
use memferry_sys::pages::page_bytes;

use super::frame::{BUFFER_BYTES, Frame, FrameHeader, HEADER_BYTES, Payload};
use super::registers::{self as r, receive, transmit};
use crate::pci::{CoherentMemory, DmaArray, poll_until};

/// The number of transmit descriptors: a page of them.
const TX_RING: usize = 256;
/// The number of receive descriptors, headers and values: the maximum number of frames in flight
/// plus one.
const RX_RING: usize = 128;

/// The maximum time of a reset.
const RESET_TIMEOUT: Duration = Duration::from_secs(1);

/// A card in loopback, and the memory that it shares with its driver. In order in memory: transmit
/// ring, receive ring, values, a page for discarded data, headers to send, received headers.
#[derive(Debug)]
pub(super) struct E1000e {
    device: Arc<dyn DmaDevice>,
    /// The memory that is mapped for the card.
    pages: Arc<DmaMappings>,
    memory: CoherentMemory,
    /// Whether the first MSI-X vector is connected.
    has_interrupt: bool,
    transmit: DmaArray,
    receive: DmaArray,
    values: DmaArray,
    discard_page: usize,
    tx_headers: DmaArray,
    rx_headers: DmaArray,
    /// The next descriptor of each ring to be written.
    transmit_tail: usize,
    receive_tail: usize,
    /// The next receive descriptor that the card uses.
    receive_head: usize,
    /// Transmit descriptors of frames that have not arrived.
    transmit_used: usize,
}

/// The state of a receive descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RxStatus {
    /// No frame yet.
    Empty,
    /// The expected frame.
    Expected,
    /// Another frame.
    Mismatch,
}

impl E1000e {
    /// Resets a card and puts it into loopback mode.
    pub(super) fn new(
        device: Arc<dyn DmaDevice>,
        pages: Arc<DmaMappings>,
        has_interrupt: bool,
    ) -> io::Result<Self> {
        // Stopped before any memory is mapped: the previous user may have left the card running, on
        // addresses that are allocated again.
        stop(&*device)?;
        let page = page_bytes();
        let header_bytes = (RX_RING * HEADER_BYTES).next_multiple_of(page);
        let memory = CoherentMemory::new(device.clone(), 4 * page + 2 * header_bytes)?;
        let mut card = Self {
            device,
            pages,
            memory,
            has_interrupt,
            transmit: DmaArray::new(0, transmit::BYTES),
            receive: DmaArray::new(page, receive::BYTES),
            values: DmaArray::new(2 * page, size_of::<u64>()),
            discard_page: 3 * page,
            tx_headers: DmaArray::new(4 * page, HEADER_BYTES),
            rx_headers: DmaArray::new(4 * page + header_bytes, HEADER_BYTES),
            transmit_tail: 0,
            receive_tail: 0,
            receive_head: 0,
            transmit_used: 0,
        };
        card.set_up();
        Ok(card)
    }

    /// Stops the card: frames in flight do not arrive any more. The rings do not change.
    pub(super) fn stop(&self) -> io::Result<()> {
        stop(&*self.device)
    }

    /// How long a driver waits; see [`DmaDevice::patience`].
    pub(super) fn patience(&self) -> Duration {
        self.device.patience()
    }

    /// Restarts with empty rings. The card must have been stopped.
    pub(super) fn set_up(&mut self) {
        (self.transmit_tail, self.receive_tail) = (0, 0);
        (self.receive_head, self.transmit_used) = (0, 0);
        self.memory.clear(0..2 * page_bytes());
        let device = &*self.device;
        // SAFETY: the card is this value's alone (guaranteed to `NicEngine::over`) and was stopped;
        // its rings name only memory that is mapped for it: their own, and that of frames in
        // flight.
        let write = |at, value| unsafe { device.write32(at, value) };
        write(r::CTRL, r::CTRL_FULL_DUPLEX | r::CTRL_LINK_UP | r::CTRL_SPEED_1000 | r::CTRL_FORCE);
        let ring = |low: usize, length: usize, array: DmaArray, bytes: usize| {
            let address = self.memory.address(array.offset(0));
            write(low, address as u32);
            write(low + 4, (address >> 32) as u32);
            write(length, bytes as u32);
        };
        ring(r::RDBAL, r::RDLEN, self.receive, RX_RING * receive::BYTES);
        ring(r::TDBAL, r::TDLEN, self.transmit, TX_RING * transmit::BYTES);
        for at in [r::RDH, r::RDT, r::TDH, r::TDT, r::RXCSUM] {
            write(at, 0);
        }
        write(r::RFCTL, r::RFCTL_EXTENDED);
        let kib = BUFFER_BYTES as u32 >> 10;
        // The last buffer has the minimum size, because no payload reaches it.
        write(r::PSRCTL, (HEADER_BYTES as u32 / 128) | (kib << 8) | (kib << 16) | (1 << 24));
        write(r::TXDCTL, device.read32(r::TXDCTL) | r::TXDCTL_COUNT_DESCRIPTORS);
        write(r::TIPG, r::TIPG_USUAL);
        if self.has_interrupt {
            let control = device.read32(r::CTRL_EXT) & !r::CTRL_EXT_MASK_BY_READ;
            write(r::CTRL_EXT, control | r::CTRL_EXT_AUTO_MASK | r::CTRL_EXT_MSIX_PENDING);
            write(r::IVAR, r::IVAR_TRANSMIT_VECTOR_0);
            write(r::EIAC, r::INTERRUPT_TRANSMITTED);
        }
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

    /// Lets the card raise the next interrupt that a frame requests.
    pub(super) fn arm_interrupt(&self) {
        if self.has_interrupt {
            // SAFETY: as in `set_up`; an interrupt accesses no memory of this process.
            unsafe { self.device.write32(r::IMS, r::INTERRUPT_TRANSMITTED) };
        }
    }

    /// Puts a frame into both rings, if there is space. The card is not notified yet.
    pub(super) fn put(&mut self, frame: &Frame) -> bool {
        let needed = frame.transmit_descriptors();
        let next = (self.receive_tail + 1) % RX_RING;
        if next == self.receive_head || self.transmit_used + needed >= TX_RING {
            return false;
        }
        let slot = self.receive_tail;
        let header =
            FrameHeader { number: frame.number, payload: frame.bytes, checksum: frame.checksum };
        self.memory.store64(self.tx_headers.offset(slot), &header.words());
        let rx_header = self.rx_headers.offset(slot);
        self.memory.clear(rx_header..rx_header + HEADER_BYTES);
        let discard = self.memory.address(self.discard_page);
        let (first, second) = frame.targets;
        debug_assert_eq!(first & 1, 0, "an odd address would read as a received frame");
        let buffers = [self.memory.address(rx_header), first, second.unwrap_or(discard), discard];
        self.memory.store64(self.receive.offset(slot), &buffers);

        self.send(self.memory.address(self.tx_headers.offset(slot)), HEADER_BYTES as u16, 0);
        let report = if frame.raises_interrupt { transmit::REPORT } else { 0 };
        let end = transmit::END | report;
        match &frame.payload {
            Payload::Fragments(fragments) => {
                for (index, fragment) in fragments.iter().enumerate() {
                    let is_last = index + 1 == fragments.len();
                    self.send(fragment.address, fragment.bytes, if is_last { end } else { 0 });
                }
            }
            Payload::Value(value) => {
                let at = self.values.offset(slot);
                self.memory.store64(at, &[*value]);
                self.send(self.memory.address(at), size_of::<u64>() as u16, end);
            }
        }
        self.transmit_used += needed;
        self.receive_tail = next;
        true
    }

    /// Writes the next transmit descriptor, with the flags of the end of a frame if it is that.
    fn send(&mut self, address: u64, bytes: u16, end: u64) {
        let flags = transmit::CHECKSUM | end;
        let at = self.transmit.offset(self.transmit_tail);
        self.memory.store64(at, &transmit::words(address, bytes, flags));
        self.transmit_tail = (self.transmit_tail + 1) % TX_RING;
    }

    /// Notifies the card of all frames in the rings: first of their receive buffers, then of the
    /// frames.
    pub(super) fn ring_doorbell(&self) {
        let halves = receive::BYTES / 16;
        // SAFETY: as in `set_up`; everything up to both tails is written.
        unsafe {
            self.device.write32(r::RDT, (self.receive_tail * halves) as u32);
            self.device.write32(r::TDT, self.transmit_tail as u32);
        }
    }

    /// The state of the oldest frame in the rings.
    pub(super) fn rx_status(&self, frame: &Frame) -> RxStatus {
        let at = self.receive.offset(self.receive_head);
        let status = self.memory.load32(at + receive::STATUS_AT);
        if status & receive::DONE == 0 {
            return RxStatus::Empty;
        }
        let rx_header = self.rx_headers.offset(self.receive_head);
        let header =
            FrameHeader { number: frame.number, payload: frame.bytes, checksum: frame.checksum };
        let words = header.words();
        let is_header =
            (0..words.len()).all(|at| self.memory.load64(rx_header + 8 * at) == words[at]);
        let payload_lengths = self.memory.load64(at + receive::OTHER_LENGTHS_AT) >> 16;
        let first = frame.bytes.min(BUFFER_BYTES);
        let payload = first | (frame.bytes - first) << 16;
        let header_bytes = self.memory.load64(at + receive::FIRST_LENGTH_AT) >> 32 & 0xFFFF;
        let is_whole = status & (receive::END | receive::ERRORS) == receive::END
            && header_bytes == HEADER_BYTES as u64
            && payload_lengths == payload;
        if is_header && is_whole { RxStatus::Expected } else { RxStatus::Mismatch }
    }

    /// Frees the slots of the oldest frame, which has arrived.
    pub(super) fn take(&mut self, frame: &Frame) {
        self.receive_head = (self.receive_head + 1) % RX_RING;
        self.transmit_used -= frame.transmit_descriptors();
    }
}

impl Drop for E1000e {
    fn drop(&mut self) {
        if stop(&*self.device).is_err() {
            tracing::warn!(card = self.device.name(), "the network card could not be stopped");
            // It must not write to memory that its owner gets back.
            self.pages.revoke_access();
        }
    }
}

/// Stops a card: it neither accesses memory nor raises interrupts any more.
fn stop(device: &dyn DmaDevice) -> io::Result<()> {
    // SAFETY: a card that stops accesses no memory.
    let write = |at, value| unsafe { device.write32(at, value) };
    write(r::IMC, u32::MAX);
    write(r::RCTL, 0);
    write(r::TCTL, 0);
    write(r::CTRL, device.read32(r::CTRL) | r::CTRL_STOP_BUS);
    let is_off_bus = || device.read32(r::STATUS) & r::STATUS_ON_BUS == 0;
    // A card that does not leave the bus is reset all the same.
    let _ = poll_until(RESET_TIMEOUT, is_off_bus);
    write(r::CTRL, device.read32(r::CTRL) | r::CTRL_RESET);
    let is_reset_done = || device.read32(r::CTRL) & r::CTRL_RESET == 0;
    if !poll_until(RESET_TIMEOUT, is_reset_done) || device.read32(r::STATUS) == r::GONE {
        device.reset()?;
        if device.read32(r::STATUS) == r::GONE {
            return Err(io::Error::other("the card does not respond"));
        }
    }
    write(r::IMC, u32::MAX);
    let _ = device.read32(r::ICR);
    Ok(())
}
