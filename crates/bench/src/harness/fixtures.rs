//! What the benches of this process share: buffers, the peer memcpy, computation, keys.

use std::hint::black_box;

use memferry::sys::pages::Pages;

use crate::results::outcome::Summary;

/// A source and a target in ordinary memory, resident, with different contents.
pub(crate) struct BufferPair {
    pub(crate) source: Pages,
    pub(crate) target: Pages,
}

impl BufferPair {
    pub(crate) fn new(bytes: usize) -> anyhow::Result<Self> {
        let mut pair = Self { source: Pages::new(bytes)?, target: Pages::new(bytes)? };
        pair.source.as_mut_slice().fill(0x5A);
        pair.target.as_mut_slice().fill(0xA5);
        Ok(pair)
    }
}

/// The peer: libc's memcpy, called as from C.
pub(crate) fn memcpy(target: &mut [u8], source: &[u8]) {
    assert_eq!(source.len(), target.len());
    // SAFETY: the slices are distinct and of equal length.
    unsafe { libc::memcpy(target.as_mut_ptr().cast(), source.as_ptr().cast(), source.len()) };
}

/// A position that moves through large buffers, so that every copy uses memory that is not in a
/// cache.
pub(crate) struct ColdCursor {
    length: usize,
    position: usize,
}

impl ColdCursor {
    pub(crate) fn over(length: usize) -> Self {
        Self { length, position: 0 }
    }

    /// Returns the next `bytes`; wraps to the start at the end of the buffers.
    pub(crate) fn next(&mut self, bytes: usize) -> std::ops::Range<usize> {
        if self.position + bytes > self.length {
            self.position = 0;
        }
        let start = self.position;
        self.position += bytes;
        start..start + bytes
    }
}

/// Computation in registers: `steps` dependent multiplications.
pub(crate) fn compute(steps: u64) -> u64 {
    let mut value = black_box(0x9E37_79B9_7F4A_7C15u64);
    for _ in 0..steps {
        value = black_box(value.wrapping_mul(0xBF58_476D_1CE4_E5B9) ^ (value >> 29));
    }
    value
}

/// Sets a summary key if the value is finite.
pub(crate) fn set(summary: &mut Summary, key: &str, value: f64) {
    if value.is_finite() {
        summary.set(key, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_wraps_before_it_would_run_over() {
        let mut walk = ColdCursor::over(10);
        let steps: Vec<_> = (0..4).map(|_| walk.next(4)).collect();
        assert_eq!(steps, [0..4, 4..8, 0..4, 4..8]);
    }
}
