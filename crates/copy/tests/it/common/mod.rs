//! Shared by the tests of the copy core.

pub(crate) mod frames;
pub(crate) mod gated;
pub(crate) mod gpu_fixture;
pub(crate) mod models;
pub(crate) mod packets;
pub(crate) mod pinned;

use memferry_copy::{Ferry, FerryBuilder};
use memferry_engine::cpu::ProfileSource;

/// A builder with fixed settings, so that a test does the same on every machine.
pub(crate) fn builder() -> FerryBuilder {
    Ferry::builder()
        .profile(ProfileSource::BuiltIn)
        .channels(2)
        .inline_bytes(1 << 10)
        .split_bytes(64 << 10)
        .stream_bytes(512 << 10)
        .chunk_bytes(64 << 10)
}

pub(crate) fn ferry() -> Ferry {
    builder().build().expect("the settings are valid")
}

/// Bytes that differ from their neighbours and from other seeds.
pub(crate) fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..length).map(|_| next()).collect()
}

/// Sizes on all sides of every threshold of [`builder`].
pub(crate) const SIZES: [usize; 14] = [
    0,
    1,
    63,
    64,
    1 << 10,
    1025,
    16 << 10,
    16_385,
    65_535,
    64 << 10,
    100_000,
    512 << 10,
    1 << 20,
    3_000_001,
];
