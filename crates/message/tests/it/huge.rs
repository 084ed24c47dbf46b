//! Lengths beyond 32 bits.

use std::os::fd::AsRawFd;

use memferry_message::{EndpointBuilder, Error, TAG_ALL};
use memferry_testing::message::pair;
use memferry_testing::pattern::pattern;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const HUGE: usize = 5 << 30;

/// Where a message is looked at: around the limits of signed and unsigned numbers of 32 bits.
const MARKS: [usize; 5] = [0, 1 << 31, (1 << 32) - 1, 1 << 32, HUGE - 1];

/// Zeroes that use no memory until they are written, and little then: blocks without marks are all the same
/// memory.
struct HugeMapping(*mut u8);

const BLOCK: usize = 64 << 20;

impl HugeMapping {
    fn new() -> Self {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), HUGE, access, kind, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        let start: *mut u8 = start.cast();
        let block = memfd_create(c"huge", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&block, BLOCK as u64).unwrap();
        let is_marked = |at: &usize| MARKS.iter().any(|mark| mark / BLOCK == at / BLOCK);
        for at in (0..HUGE).step_by(BLOCK).filter(|at| !is_marked(at)) {
            let kind = libc::MAP_SHARED | libc::MAP_FIXED;
            // SAFETY: it replaces a part of the mapping above, which nothing uses yet.
            let mapped = unsafe {
                libc::mmap(start.add(at).cast(), BLOCK, access, kind, block.as_raw_fd(), 0)
            };
            assert_ne!(mapped, libc::MAP_FAILED);
        }
        Self(start)
    }
}

impl Drop for HugeMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, and no message is in flight.
        unsafe { libc::munmap(self.0.cast(), HUGE) };
    }
}

#[test]
fn a_huge_message_into_a_small_buffer_is_cut_off() {
    for builder in [EndpointBuilder::new(), EndpointBuilder::new().cross_memory(false)] {
        let (sides, source) = (pair(&builder), HugeMapping::new());
        // SAFETY: the memory stays unchanged until the operation completes.
        let mut send = unsafe { sides.here.isend_raw(sides.to_there, 1, source.0, HUGE) }.unwrap();
        let mut receive = sides.there.irecv(sides.to_here, 1, TAG_ALL, vec![7u8; 10]).unwrap();
        sides.finish(&mut [&mut send, receive.operation()]);
        assert_eq!(send.wait().unwrap().length, HUGE as u64);
        let failed = receive.wait().unwrap_err();
        let (message_bytes, buffer_bytes) = (HUGE as u64, 10);
        assert_eq!(failed.error, Error::Truncated { message_bytes, buffer_bytes });
        assert_eq!(failed.buffer.unwrap(), [0; 10]);
    }
}

#[test]
fn a_small_message_into_a_huge_buffer_fills_its_beginning() {
    for size in [5, 5000, 1 << 20] {
        let (sides, target) = (pair(&EndpointBuilder::new()), HugeMapping::new());
        let mut send = sides.here.isend(sides.to_there, 1, pattern(size, 3)).unwrap();
        // SAFETY: only this operation uses the memory until it completes.
        let mut receive =
            unsafe { sides.there.irecv_raw(sides.to_here, 1, TAG_ALL, target.0, HUGE) }.unwrap();
        sides.finish(&mut [send.operation(), &mut receive]);
        assert_eq!(receive.wait().unwrap().length, size as u64);
        // SAFETY: the operation is complete, and this many bytes are mapped.
        let start = unsafe { std::slice::from_raw_parts(target.0, size + 1) };
        assert!(start[..size] == pattern(size, 3) && start[size] == 0);
    }
}

#[test]
fn a_huge_message_arrives_whole() {
    let (sides, source, target) =
        (pair(&EndpointBuilder::new()), HugeMapping::new(), HugeMapping::new());
    for mark in MARKS {
        // SAFETY: inside the mapping, which no other thread uses yet.
        unsafe { source.0.add(mark).write(mark as u8 | 1) };
    }
    // SAFETY: both mappings are not accessed until the operations complete.
    let (mut send, mut receive) = unsafe {
        let send = sides.here.isend_raw(sides.to_there, 1, source.0, HUGE).unwrap();
        (send, sides.there.irecv_raw(sides.to_here, 1, TAG_ALL, target.0, HUGE).unwrap())
    };
    sides.finish(&mut [&mut send, &mut receive]);
    assert_eq!(receive.wait().unwrap().length, HUGE as u64);
    send.wait().unwrap();
    // SAFETY: the operations are complete, and this many bytes are mapped.
    let bytes = unsafe { std::slice::from_raw_parts(target.0, HUGE) };
    for mark in MARKS {
        assert_eq!(bytes[mark], mark as u8 | 1, "at {mark}");
    }
    let zeroes = vec![0; 1 << 20];
    let mut written = bytes.chunks(1 << 20).filter(|chunk| **chunk != zeroes);
    assert!(written.by_ref().take(MARKS.len()).count() <= MARKS.len() && written.next().is_none());
}
