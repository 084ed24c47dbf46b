//! The card's own counts of what it has received, which no driver can embellish. They are part of the
//! 82574L; the model does not have them.

use memferry_sys::device::Device;

/// Packets received, and bytes received in two halves. Reading them sets them to zero.
const TPR: usize = 0x40D0;
const TORL: usize = 0x40C0;
const TORH: usize = 0x40C4;

/// What a frame has beside its payload: the head, and the checksum of Ethernet.
const AROUND_BYTES: u64 = 128 + 4;

/// What went through the card since it was last asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Passed {
    pub(super) frames: u64,
    pub(super) payload_bytes: u64,
}

/// Asks the card, and has it count anew.
pub(super) fn read(card: &dyn Device) -> Passed {
    let frames = u64::from(card.read32(TPR));
    // The upper half last: it is what sets both to zero.
    let low = u64::from(card.read32(TORL));
    let bytes = u64::from(card.read32(TORH)) << 32 | low;
    Passed { frames, payload_bytes: bytes.saturating_sub(frames * AROUND_BYTES) }
}
