//! Fills, moves between overlapping ranges, and compares.

use memferry_engine::DeviceBuffer;
use memferry_engine::{Opcode, TransferOutput};
use memferry_sys::Pages;

use crate::cuda::common::{
    CudaOperation, CudaUnderTest, KIB, MIB, MemoryAddress, OK, check, device, host, pattern,
    patterned, subjects, untouched,
};

#[test]
fn fills_of_device_memory_set_every_byte_and_no_other() {
    for subject in subjects() {
        let subject = subject.with_channels(2);
        for size in [1, 4097, MIB + 1, 33 * MIB + 1] {
            for cut in [None, Some(300_001)] {
                let memory = subject.device(size + 100);
                let job = CudaOperation::fill(device(&memory, 77), size, 0x5A).cut(cut);
                assert_eq!(subject.execute(job), OK);
                let what = format!("a fill of {size} bytes on {}", subject.name);
                check(&subject.download(&memory), 77, &vec![0x5A; size], &what);
            }
        }
    }
}

#[test]
fn fills_of_ordinary_memory_set_every_byte_and_no_other() {
    for subject in subjects() {
        let subject = subject.with_channels(2);
        for size in [1, 4097, MIB + 1, 33 * MIB + 1] {
            for (cut, is_passing) in [(None, false), (None, true), (Some(300_001), false)] {
                let memory = untouched(size + 100);
                let job = CudaOperation::fill(host(&memory, 77), size, 0x5A)
                    .cut(cut)
                    .transient(is_passing);
                assert_eq!(subject.execute(job), OK);
                let what = format!("a fill of {size} bytes on {}", subject.name);
                check(memory.as_slice(), 77, &vec![0x5A; size], &what);
            }
        }
    }
    let subject = CudaUnderTest::modelled(Default::default());
    let memory = untouched(MIB);
    assert_eq!(subject.execute(CudaOperation::fill(host(&memory, 0), MIB, 1)), OK);
    assert!(subject.stats().copies > 0, "the device does it");
}

#[test]
fn overlapping_moves_within_the_device_have_the_result_of_memmove() {
    let lengths = [1, 100, MIB + 3, 16 * MIB, 16 * MIB + 1, 35 * MIB + 7];
    for subject in subjects() {
        for length in lengths {
            for distance in [1, 4097, MIB, 17 * MIB].into_iter().filter(|&d| d <= length) {
                let mut expected = pattern(length as u32, length + distance + 10);
                let memory = subject.upload(&expected);
                let (low, high) = (5, 5 + distance);
                for (from, to) in [(low, high), (high, low)] {
                    let job =
                        CudaOperation::copy(device(&memory, from), device(&memory, to), length);
                    assert_eq!(subject.execute(job.operation(Opcode::Move)), OK);
                    expected.copy_within(from..from + length, to);
                    let what = format!("{length} bytes from {from} to {to} on {}", subject.name);
                    check(&subject.download(&memory), 0, &expected, &what);
                }
            }
        }
    }
}

#[test]
fn overlapping_moves_within_ordinary_memory_have_the_result_of_memmove() {
    for subject in subjects() {
        for (from, to) in [(5, 4102), (4102, 5)] {
            let mut memory = patterned(9, 3 * MIB);
            let mut expected = memory.as_mut_slice().to_vec();
            let job = CudaOperation::copy(host(&memory, from), host(&memory, to), 2 * MIB);
            assert_eq!(subject.execute(job.operation(Opcode::Move)), OK);
            expected.copy_within(from..from + 2 * MIB, to);
            check(memory.as_slice(), 0, &expected, subject.name);
        }
    }
}

/// Two equal buffers of each kind of memory, which can be made to differ.
struct EqualBuffers<'a> {
    subject: &'a CudaUnderTest,
    length: usize,
    ordinary: [Pages; 2],
    inside: [DeviceBuffer; 2],
}

impl<'a> EqualBuffers<'a> {
    fn new(subject: &'a CudaUnderTest, length: usize) -> Self {
        let ordinary = [patterned(4, length), patterned(4, length)];
        let inside = [(); 2].map(|()| subject.upload(ordinary[0].as_slice()));
        Self { subject, length, ordinary, inside }
    }

    /// Pairs with at least one side in the device, except the first, which has none.
    fn pairs(&self) -> [(MemoryAddress, MemoryAddress); 4] {
        let [left, right] = &self.ordinary;
        let [first, second] = &self.inside;
        [
            (host(left, 0), host(right, 0)),
            (host(left, 0), device(second, 0)),
            (device(first, 0), host(right, 0)),
            (device(first, 0), device(second, 0)),
        ]
    }

    /// Makes the second buffer of both kinds differ from the first in one byte, or restores it.
    fn set(&mut self, at: usize, differs: bool) {
        let byte = self.ordinary[0].as_slice()[at];
        let byte = if differs { !byte } else { byte };
        self.ordinary[1].as_mut_slice()[at] = byte;
        let job = CudaOperation::fill(device(&self.inside[1], at), 1, byte);
        assert_eq!(self.subject.execute(job), OK);
    }

    #[track_caller]
    fn check(&self, expected: Option<usize>) {
        let expected = Ok(TransferOutput { difference: expected.map(|at| at as u64), crc: None });
        for (left, right) in self.pairs() {
            for cut in [None, Some(64 * KIB), Some(300_001), Some(5 * MIB)] {
                let job = CudaOperation::copy(left, right, self.length).operation(Opcode::Compare);
                let found = self.subject.execute(job.cut(cut));
                let (kinds, name) = ((left.kind, right.kind), self.subject.name);
                assert_eq!(found, expected, "{kinds:?} in chunks of {cut:?} on {name}");
            }
        }
    }
}

#[test]
fn comparisons_find_the_first_difference_wherever_the_memory_is() {
    for subject in subjects() {
        let subject = subject.with_channels(2);
        for length in [1, 4097, 3 * MIB + 17] {
            let mut twins = EqualBuffers::new(&subject, length);
            twins.check(None);
            twins.set(length - 1, true);
            twins.check(Some(length - 1));
            for at in [2 * MIB + 5, MIB, MIB - 1, 4096, 0] {
                if at < length {
                    twins.set(at, true);
                    twins.check(Some(at));
                }
            }
            // Later differences do not matter, and are found when the first is restored.
            twins.set(0, false);
            let next = [4096, length - 1].into_iter().find(|&at| at > 0 && at < length);
            twins.check(next);
        }
    }
}
