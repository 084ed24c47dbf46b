//! Frames: what goes around the card at once.
//!
//! A frame is a head of exactly the size of the first receive buffer, so that it stays apart, and
//! behind it up to `MOST_PAYLOAD` bytes, which land at their target itself. The head has a number,
//! by which a lost frame is noticed: receive descriptors are used in order, so behind a lost frame
//! every other lands one place too early.

/// Bytes of the head, and of the first receive buffer.
pub(super) const HEAD_BYTES: usize = 128;
/// Bytes of the second and the third receive buffer: those for payload.
pub(super) const BUFFER_BYTES: u64 = 4096;
/// The most bytes of payload. With the head and the checksum this is within what the cards take
/// (9018 bytes).
const MOST_PAYLOAD: u64 = 2 * BUFFER_BYTES;
const _: () = assert!(HEAD_BYTES as u64 + MOST_PAYLOAD + 4 <= 9018);
/// The most pieces that a payload is gathered from.
pub(super) const MOST_PIECES: usize = 16;

/// For local experiments: no parser takes what follows for a header it knows.
const ETHER_TYPE: u16 = 0x88B5;
/// Addresses that no maker gives.
const ADDRESSES: [u8; 12] = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];

/// The words of a head, of which the rest is zero.
pub(super) const HEAD_WORDS: usize = 5;

/// What the head of a frame says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    /// Which frame it is.
    pub(super) number: u64,
    /// How long the payload is.
    pub(super) payload: u64,
    /// The sum of the payload, or 0 if sums are not made.
    pub(super) sum: u64,
}

impl Head {
    /// The first words of the head in memory.
    pub(super) fn words(&self) -> [u64; HEAD_WORDS] {
        let mut start = [0; 16];
        start[..12].copy_from_slice(&ADDRESSES);
        start[12..14].copy_from_slice(&ETHER_TYPE.to_be_bytes());
        let word = |at: usize| u64::from_le_bytes(start[at..at + 8].try_into().expect("8 bytes"));
        [word(0), word(8), self.number, self.payload, self.sum]
    }
}

/// A stretch of memory as the card calls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) address: u64,
    pub(super) bytes: u16,
}

/// What a frame carries.
#[derive(Debug, Clone)]
pub(super) enum Payload {
    /// Bytes from pieces of memory.
    Pieces(Vec<Piece>),
    /// A value for a notification variable.
    Value(u64),
}

/// A frame that has not arrived yet.
#[derive(Debug, Clone)]
pub(super) struct Frame {
    pub(super) number: u64,
    pub(super) payload: Payload,
    pub(super) bytes: u64,
    /// Where the first [`BUFFER_BYTES`] of the payload go, as the card calls it, and where the rest
    /// does, if there is any.
    pub(super) targets: (u64, Option<u64>),
    /// Where the payload goes in this process.
    pub(super) lands_at: u64,
    /// The sum of the payload, once it was made.
    pub(super) sum: u64,
    /// How often it was found to be lost or damaged.
    pub(super) lost: u32,
}

impl Frame {
    /// How many more bytes it can take that go to this address of the card's. If they begin the second
    /// buffer, that is there from now on.
    pub(super) fn room_at(&mut self, address: u64) -> u64 {
        match self.bytes.checked_sub(BUFFER_BYTES) {
            None if address == self.targets.0 + self.bytes => BUFFER_BYTES - self.bytes,
            Some(0) => {
                self.targets.1 = Some(address);
                BUFFER_BYTES
            }
            Some(behind) if self.targets.1.is_some_and(|second| second + behind == address) => {
                MOST_PAYLOAD - self.bytes
            }
            _ => 0,
        }
    }

    /// Whether another may be under way behind it, and land in its place if it is lost.
    pub(super) fn may_precede(&self, next: &Self) -> bool {
        matches!(self.payload, Payload::Pieces(_)) && next.bytes <= self.bytes
    }

    /// How many transmit descriptors it takes: one for the head, and one for each piece.
    pub(super) fn transmit_descriptors(&self) -> usize {
        1 + match &self.payload {
            Payload::Pieces(pieces) => pieces.len(),
            Payload::Value(_) => 1,
        }
    }
}

/// A sum over bytes that tells most damage: a product and a rotation for each word, so that it
/// depends on the order too. Never 0.
///
/// # Safety
/// The bytes must be readable, and nobody may write to them meanwhile.
pub(super) unsafe fn sum_of(address: u64, bytes: u64, start: u64) -> u64 {
    const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
    // SAFETY: promised by the caller.
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
