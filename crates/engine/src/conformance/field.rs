//! Memory for one case: a source with known bytes, and a target of which a model says at any time
//! what must be in it.

use std::mem::ManuallyDrop;

use super::{Memory, Subject};

/// Bytes looked at before and after every target.
pub(super) const GUARD: usize = 64;

/// The first place in a target that begins a page.
pub(super) const ALIGNED: usize = 4096;

/// A source, a target, and what must be in the target. Offsets are from the start of either;
/// targets leave [`GUARD`] bytes free at both ends.
pub(super) struct Field {
    source: Area,
    target: Area,
    model: Vec<u8>,
    round: u8,
}

impl Field {
    /// A source and a target with room for so many bytes from [`ALIGNED`] on.
    pub(super) fn new(subject: &Subject, bytes: usize) -> Self {
        let bytes = ALIGNED + bytes + GUARD;
        let mut source = Area::new(subject, bytes);
        let mut target = Area::new(subject, bytes);
        for (at, byte) in source.bytes_mut(0, bytes).iter_mut().enumerate() {
            *byte = pattern(at);
        }
        target.bytes_mut(0, bytes).fill(0xEE);
        Self { source, target, model: vec![0xEE; bytes], round: 0 }
    }

    /// The address of a range of the source.
    pub(super) fn source(&self, at: usize, length: usize) -> u64 {
        self.source.address(at, length)
    }

    /// The address of a range of the target.
    pub(super) fn target(&self, at: usize, length: usize) -> u64 {
        assert!(at >= GUARD && at + length + GUARD <= self.model.len(), "the case is wrong");
        self.target.address(at, length)
    }

    /// Overwrites a range of the target and its guards with a value that differs from round to
    /// round. Only while nothing is in flight there.
    pub(super) fn prepare(&mut self, at: usize, length: usize) {
        self.round = self.round.wrapping_add(0x3D);
        let (from, length) = (at - GUARD, length + 2 * GUARD);
        self.target.bytes_mut(from, length).fill(self.round);
        self.model[from..from + length].fill(self.round);
    }

    /// Writes to the target. Only while nothing is in flight there.
    pub(super) fn write(&mut self, at: usize, bytes: &[u8]) {
        self.target.bytes_mut(at, bytes.len()).copy_from_slice(bytes);
        self.model[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// From now on these bytes of the source must be in the target.
    pub(super) fn expect_copy(&mut self, source_at: usize, at: usize, length: usize) {
        let source = self.source.bytes(source_at, length);
        self.model[at..at + length].copy_from_slice(source);
    }

    /// From now on this value must be in the target.
    pub(super) fn expect_fill(&mut self, at: usize, length: usize, value: u8) {
        self.model[at..at + length].fill(value);
    }

    /// From now on the target must look as if it had been moved within itself.
    pub(super) fn expect_move(&mut self, from: usize, to: usize, length: usize) {
        self.model.copy_within(from..from + length, to);
    }

    /// Compares a range of the target and its guards with the model.
    pub(super) fn check(&self, at: usize, length: usize) {
        self.check_inside(at - GUARD, length + 2 * GUARD);
    }

    /// Compares a range of the target with the model, and nothing around it.
    pub(super) fn check_inside(&self, at: usize, length: usize) {
        let (found, expected) = (self.bytes(at, length), &self.model[at..at + length]);
        if found != expected {
            let wrong = (0..length).filter(|&index| found[index] != expected[index]);
            let (first, count) = (wrong.clone().next().unwrap_or_default(), wrong.count());
            panic!(
                "{count} of {length} bytes at {at} are wrong, the first at {first}: {} for {}",
                found[first], expected[first]
            );
        }
    }

    /// Compares all of the target with the model, and the source with what it was.
    pub(super) fn check_all(&self) {
        self.check_inside(0, self.model.len());
        let source = self.source.bytes(0, self.source.length);
        let changed = source.iter().enumerate().position(|(at, &byte)| byte != pattern(at));
        assert_eq!(changed, None, "the source was written to");
    }

    /// A range of the target. Only while nothing is in flight there.
    pub(super) fn bytes(&self, at: usize, length: usize) -> &[u8] {
        self.target.bytes(at, length)
    }

    /// A range of the source.
    pub(super) fn source_bytes(&self, at: usize, length: usize) -> &[u8] {
        self.source.bytes(at, length)
    }
}

/// Bytes without a period that any copy could hit by accident.
fn pattern(at: usize) -> u8 {
    ((at as u32).wrapping_mul(2_654_435_761) >> 13) as u8
}

/// A piece of memory that a failed case leaks: an engine may still be writing to it.
struct Area {
    memory: ManuallyDrop<Box<dyn Memory>>,
    length: usize,
}

impl Area {
    fn new(subject: &Subject, length: usize) -> Self {
        Self { memory: ManuallyDrop::new((subject.allocate)(length)), length }
    }

    fn address(&self, at: usize, length: usize) -> u64 {
        assert!(at + length <= self.length, "the case is wrong");
        self.memory.start() as u64 + at as u64
    }

    fn bytes(&self, at: usize, length: usize) -> &[u8] {
        let start = self.address(at, length) as *const u8;
        // SAFETY: inside the memory, and cases only look at ranges that are not in flight.
        unsafe { std::slice::from_raw_parts(start, length) }
    }

    fn bytes_mut(&mut self, at: usize, length: usize) -> &mut [u8] {
        let start = self.address(at, length) as *mut u8;
        // SAFETY: as above, and `&mut` keeps other threads of the case away.
        unsafe { std::slice::from_raw_parts_mut(start, length) }
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: dropped here and nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}
