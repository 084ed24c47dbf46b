//! Frames: the units that the card sends.
//!
//! A frame is a header of exactly the size of the first receive buffer, so that it stays separate,
//! followed by up to `MAX_PAYLOAD` bytes, which the card writes directly to their target. The
//! number in the header reveals a lost frame: receive descriptors are used in order, so after a
//! lost frame every other lands one descriptor too early.

/// The size of the header, and of the first receive buffer, in bytes.
pub(super) const HEADER_BYTES: usize = 128;
/// The size of the second and the third receive buffer, those for payload, in bytes.
pub(super) const BUFFER_BYTES: u64 = 4096;
/// The maximum payload in bytes. With the header and the checksum it is within the limit of the
/// cards (9018 bytes).
const MAX_PAYLOAD: u64 = 2 * BUFFER_BYTES;
const _: () = assert!(HEADER_BYTES as u64 + MAX_PAYLOAD + 4 <= 9018);
/// The maximum number of fragments of a payload.
pub(super) const MAX_FRAGMENTS: usize = 16;

/// The type for local experiments, so that no parser takes the payload for a known header.
const ETHER_TYPE: u16 = 0x88B5;
/// Locally administered addresses, which no vendor assigns.
const ADDRESSES: [u8; 12] = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];

/// The number of nonzero words of a header.
pub(super) const HEADER_WORDS: usize = 5;

/// The contents of a frame header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FrameHeader {
    /// The number of the frame.
    pub(super) number: u64,
    /// The length of the payload in bytes.
    pub(super) payload: u64,
    /// The checksum of the payload, or 0 without checksums.
    pub(super) checksum: u64,
}

impl FrameHeader {
    /// The first words of the header in memory.
    pub(super) fn words(&self) -> [u64; HEADER_WORDS] {
        let mut start = [0; 16];
        start[..12].copy_from_slice(&ADDRESSES);
        start[12..14].copy_from_slice(&ETHER_TYPE.to_be_bytes());
        let word = |at: usize| u64::from_le_bytes(start[at..at + 8].try_into().expect("8 bytes"));
        [word(0), word(8), self.number, self.payload, self.checksum]
    }
}

/// A range of memory by its IOVA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TxFragment {
    pub(super) address: u64,
    pub(super) bytes: u16,
}

/// The payload of a frame.
#[derive(Debug, Clone)]
pub(super) enum Payload {
    /// Bytes from several fragments.
    Fragments(Vec<TxFragment>),
    /// A value for a notification variable.
    Value(u64),
}

/// A frame that has not arrived yet.
#[derive(Debug, Clone)]
pub(super) struct Frame {
    pub(super) number: u64,
    pub(super) payload: Payload,
    pub(super) bytes: u64,
    /// The IOVAs of the first [`BUFFER_BYTES`] of the payload and of the rest, if there is any.
    pub(super) targets: (u64, Option<u64>),
    /// The target of the payload in this process.
    pub(super) target_address: u64,
    /// The checksum of the payload so far.
    pub(super) checksum: u64,
    /// The number of times it was lost or corrupted.
    pub(super) losses: u32,
    /// The card raises an interrupt when it is sent.
    pub(super) raises_interrupt: bool,
}

impl Frame {
    /// The number of bytes that the frame can still take for this target IOVA. If they start the
    /// second buffer, its address is set.
    pub(super) fn space_at(&mut self, address: u64) -> u64 {
        match self.bytes.checked_sub(BUFFER_BYTES) {
            None if address == self.targets.0 + self.bytes => BUFFER_BYTES - self.bytes,
            Some(0) => {
                self.targets.1 = Some(address);
                BUFFER_BYTES
            }
            Some(offset) if self.targets.1.is_some_and(|second| second + offset == address) => {
                MAX_PAYLOAD - self.bytes
            }
            _ => 0,
        }
    }

    /// Whether another frame may be in flight after it, and land in its buffers if it is lost.
    pub(super) fn may_precede(&self, next: &Self) -> bool {
        matches!(self.payload, Payload::Fragments(_)) && next.bytes <= self.bytes
    }

    /// The number of transmit descriptors: one for the header, and one for each fragment.
    pub(super) fn transmit_descriptors(&self) -> usize {
        1 + match &self.payload {
            Payload::Fragments(fragments) => fragments.len(),
            Payload::Value(_) => 1,
        }
    }
}

/// A checksum that detects most corruption: a product and a rotation for each word, so that it also
/// depends on the order. Never 0.
///
/// # Safety
/// The bytes must be readable, and no other code may write to them during the call.
pub(super) unsafe fn checksum(address: u64, bytes: u64, start: u64) -> u64 {
    const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
    // SAFETY: the caller's guarantee.
    let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, bytes as usize) };
    let mut words = bytes.chunks_exact(8);
    let mut sum = start;
    for word in &mut words {
        let word = u64::from_le_bytes(word.try_into().expect("8 bytes"));
        sum = (sum.rotate_left(23) ^ word).wrapping_mul(FACTOR);
    }
    for byte in words.remainder() {
        sum = (sum.rotate_left(23) ^ u64::from(*byte)).wrapping_mul(FACTOR);
    }
    sum | 1
}
