//! Shared by the tests of the copy core.

pub(crate) mod frames;
pub(crate) mod gated;
pub(crate) mod gpu_fixture;
pub(crate) mod models;
pub(crate) mod packets;
pub(crate) mod pinned;

use memferry_copy::{Ferry, FerryBuilder};
use memferry_engine::cpu::ProfileSource;
pub(crate) use memferry_testing::pattern::pattern;

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
