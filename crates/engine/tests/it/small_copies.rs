//! Windows of small copies, which channels and waiting threads execute in groups.

use std::sync::Arc;
use std::time::Duration;

use memferry_engine::cpu::{CpuEngine, CpuProfile};
use memferry_engine::{Channel, ChannelOptions, Descriptor, Engine, Opcode};

const COPIES: usize = 256;
/// The room for each copy, in bytes.
const ROOM: usize = 40 << 10;
const GUARD: u8 = 0xEE;

/// A channel that takes non-temporal stores for faster than ordinary ones, or for slower.
fn channel(stream_gb_per_s: f64) -> Arc<dyn Channel> {
    let profile = CpuProfile { stream_gb_per_s, ..CpuProfile::built_in() };
    CpuEngine::new(Arc::new(profile)).open_channel(&ChannelOptions::default()).unwrap()
}

struct Windows {
    source: Vec<u8>,
    target: Vec<u8>,
}

impl Windows {
    fn new() -> Self {
        let source = (0..COPIES * ROOM).map(|at| (at * 131 + at / 251) as u8).collect();
        Self { source, target: vec![GUARD; COPIES * ROOM] }
    }

    /// Copies a window in which each copy has the length and the alignment that `shape` returns for
    /// it, with this thread as a helper, and checks every byte.
    fn check(&mut self, channel: &dyn Channel, shape: impl Fn(usize) -> (usize, usize)) {
        self.target.fill(GUARD);
        let before = channel.completed();
        let mut window: Vec<_> = (0..COPIES)
            .map(|copy| {
                let (length, shift) = shape(copy);
                let at = copy * ROOM + shift;
                let source = self.source[at..].as_ptr() as u64;
                let target = self.target[at..].as_mut_ptr() as u64;
                // SAFETY: the ranges lie in buffers that live until the window is complete, no two
                // of them overlap, and nobody else uses them.
                let copy = unsafe { Descriptor::new(Opcode::Copy, source, target, length as u64) };
                Some(copy.any_thread())
            })
            .collect();
        assert_eq!(channel.submit(&mut window).unwrap().count, COPIES);
        let last = before + COPIES as u64;
        while channel.help(last) > 0 {}
        assert!(channel.park(last, Duration::from_secs(200)), "the window is stuck");
        for copy in 0..COPIES {
            let (length, shift) = shape(copy);
            let room = copy * ROOM..(copy + 1) * ROOM;
            let (source, target) = (&self.source[room.clone()], &self.target[room]);
            let copied = shift..shift + length;
            assert!(target[copied.clone()] == source[copied.clone()], "copy {copy} of {length}");
            let rest = target[..shift].iter().chain(&target[copied.end..]);
            assert!(rest.into_iter().all(|&byte| byte == GUARD), "around copy {copy} of {length}");
        }
    }
}

#[test]
fn every_byte_of_a_window_arrives_whichever_kernel_its_groups_have() {
    let mut windows = Windows::new();
    for speed in [0.001, 1e6] {
        let channel = channel(speed);
        for length in [2048, 4096, 8192 + 63, 32 << 10] {
            for shift in [0, 1, 63] {
                windows.check(&*channel, |_| (length, shift));
            }
        }
    }
}

#[test]
fn copies_of_one_group_may_differ_in_length_and_alignment() {
    let mut windows = Windows::new();
    let channel = channel(1e6);
    for step in [1, 37, 1000, 4097] {
        windows.check(&*channel, |copy| (1 + copy * step % (36 << 10), copy * 7 % 130));
    }
}

#[test]
fn copies_that_others_may_not_execute_stay_with_the_worker_among_groups() {
    let channel = channel(1e6);
    let (source, mut target) = (vec![5u8; 64 * 4096], vec![0u8; 64 * 4096]);
    let mut window: Vec<_> = (0..64)
        .map(|copy| {
            let (from, to) = (source[copy * 4096..].as_ptr(), target[copy * 4096..].as_mut_ptr());
            // SAFETY: as above.
            let copied = unsafe { Descriptor::new(Opcode::Copy, from as u64, to as u64, 4096) };
            Some(if copy % 5 == 0 { copied } else { copied.any_thread() })
        })
        .collect();
    assert_eq!(channel.submit(&mut window).unwrap().count, 64);
    assert!(channel.park(64, Duration::from_secs(200)), "the window is stuck");
    assert_eq!(target, source);
    assert_eq!(channel.statistics().bytes, 64 * 4096);
}
