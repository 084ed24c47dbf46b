//! The card's own counters of received frames, which are independent of the driver. The 82574L has
//! them; the model does not.

use memferry_sys::device::DmaDevice;

/// Registers: packets received, and bytes received in two halves. A read clears them.
const TPR: usize = 0x40D0;
const TORL: usize = 0x40C0;
const TORH: usize = 0x40C4;

/// Bytes of a frame besides its payload: the header, and the checksum of Ethernet.
const FRAME_OVERHEAD_BYTES: u64 = 128 + 4;

/// Frames and bytes that passed the card since the last read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FrameCounts {
    pub(super) frames: u64,
    pub(super) payload_bytes: u64,
}

/// Reads and clears the counters of the card.
pub(super) fn read_and_clear(card: &dyn DmaDevice) -> FrameCounts {
    let frames = u64::from(card.read32(TPR));
    // The upper half last: reading it clears both halves.
    let low = u64::from(card.read32(TORL));
    let bytes = u64::from(card.read32(TORH)) << 32 | low;
    FrameCounts { frames, payload_bytes: bytes.saturating_sub(frames * FRAME_OVERHEAD_BYTES) }
}
