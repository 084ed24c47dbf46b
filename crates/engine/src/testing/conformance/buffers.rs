//! Test buffers of one case: a source with known bytes, and a target with a model of its expected
//! contents.

use std::mem::ManuallyDrop;

use super::{EngineUnderTest, TestMemory};

/// The number of bytes that are checked before and after every target.
pub(super) const GUARD: usize = 64;

/// The first page-aligned offset of a target.
pub(super) const ALIGNED: usize = 4096;

/// A source, a target, and the expected contents of the target. Offsets are from the start of
/// either; targets leave [`GUARD`] bytes free at both ends.
pub(super) struct TestBuffers {
    source: GuardedBuffer,
    target: GuardedBuffer,
    expected: Vec<u8>,
    round: u8,
}

impl TestBuffers {
    /// Creates a source and a target with space for `bytes` from [`ALIGNED`] on.
    pub(super) fn new(subject: &EngineUnderTest, bytes: usize) -> Self {
        let bytes = ALIGNED + bytes + GUARD;
        let mut source = GuardedBuffer::new(subject, bytes);
        let mut target = GuardedBuffer::new(subject, bytes);
        for (at, byte) in source.bytes_mut(0, bytes).iter_mut().enumerate() {
            *byte = pattern(at);
        }
        target.bytes_mut(0, bytes).fill(0xEE);
        Self { source, target, expected: vec![0xEE; bytes], round: 0 }
    }

    /// The address of a range of the source.
    pub(super) fn source(&self, at: usize, length: usize) -> u64 {
        self.source.address(at, length)
    }

    /// The address of a range of the target.
    pub(super) fn target(&self, at: usize, length: usize) -> u64 {
        assert!(
            at >= GUARD && at + length + GUARD <= self.expected.len(),
            "the range is outside the buffer"
        );
        self.target.address(at, length)
    }

    /// Overwrites a range of the target and its guards with a value that differs from round to
    /// round. Nothing may be in flight there.
    pub(super) fn prepare(&mut self, at: usize, length: usize) {
        self.round = self.round.wrapping_add(0x3D);
        let (from, length) = (at - GUARD, length + 2 * GUARD);
        self.target.bytes_mut(from, length).fill(self.round);
        self.expected[from..from + length].fill(self.round);
    }

    /// Writes to the target. Nothing may be in flight there.
    pub(super) fn write(&mut self, at: usize, bytes: &[u8]) {
        self.target.bytes_mut(at, bytes.len()).copy_from_slice(bytes);
        self.expected[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Expects these bytes of the source in the target from now on.
    pub(super) fn expect_copy(&mut self, source_at: usize, at: usize, length: usize) {
        let source = self.source.bytes(source_at, length);
        self.expected[at..at + length].copy_from_slice(source);
    }

    /// Expects this value in the target from now on.
    pub(super) fn expect_fill(&mut self, at: usize, length: usize, value: u8) {
        self.expected[at..at + length].fill(value);
    }

    /// Expects a move within the target from now on.
    pub(super) fn expect_move(&mut self, from: usize, to: usize, length: usize) {
        self.expected.copy_within(from..from + length, to);
    }

    /// Compares a range of the target and its guards with the model.
    pub(super) fn check(&self, at: usize, length: usize) {
        self.check_inside(at - GUARD, length + 2 * GUARD);
    }

    /// Compares a range of the target with the model, without its guards.
    pub(super) fn check_inside(&self, at: usize, length: usize) {
        let (found, expected) = (self.bytes(at, length), &self.expected[at..at + length]);
        if found != expected {
            let wrong = (0..length).filter(|&index| found[index] != expected[index]);
            let (first, count) = (wrong.clone().next().unwrap_or_default(), wrong.count());
            panic!(
                "{count} of {length} bytes at {at} are wrong, the first at {first}: {}, not {}",
                found[first], expected[first]
            );
        }
    }

    /// Compares all of the target with the model, and the source with its pattern.
    pub(super) fn check_all(&self) {
        self.check_inside(0, self.expected.len());
        let source = self.source.bytes(0, self.source.length);
        let changed = source.iter().enumerate().position(|(at, &byte)| byte != pattern(at));
        assert_eq!(changed, None, "the source was written to");
    }

    /// A range of the target. Nothing may be in flight there.
    pub(super) fn bytes(&self, at: usize, length: usize) -> &[u8] {
        self.target.bytes(at, length)
    }

    /// A range of the source.
    pub(super) fn source_bytes(&self, at: usize, length: usize) -> &[u8] {
        self.source.bytes(at, length)
    }
}

/// A byte pattern whose period no copy hits by accident.
fn pattern(at: usize) -> u8 {
    ((at as u32).wrapping_mul(2_654_435_761) >> 13) as u8
}

/// Memory that a failed case leaks, because an engine may still write to it.
struct GuardedBuffer {
    memory: ManuallyDrop<Box<dyn TestMemory>>,
    length: usize,
}

impl GuardedBuffer {
    fn new(subject: &EngineUnderTest, length: usize) -> Self {
        Self { memory: ManuallyDrop::new((subject.allocate)(length)), length }
    }

    fn address(&self, at: usize, length: usize) -> u64 {
        assert!(at + length <= self.length, "the range is outside the buffer");
        self.memory.start() as u64 + at as u64
    }

    fn bytes(&self, at: usize, length: usize) -> &[u8] {
        let start = self.address(at, length) as *const u8;
        // SAFETY: inside the memory, and cases only read ranges that are not in flight.
        unsafe { std::slice::from_raw_parts(start, length) }
    }

    fn bytes_mut(&mut self, at: usize, length: usize) -> &mut [u8] {
        let start = self.address(at, length) as *mut u8;
        // SAFETY: as above, and `&mut` excludes other threads of the case.
        unsafe { std::slice::from_raw_parts_mut(start, length) }
    }
}

impl Drop for GuardedBuffer {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: dropped here and nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}
