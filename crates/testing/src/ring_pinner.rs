//! A pinner whose pins are page frames: buffers registered with an io_uring.
//!
//! The kernel resolves the frames once, when a buffer is registered, and copies to and from those
//! frames. It does not see other memory that is mapped at the same addresses later, which is what
//! the tests need.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use memferry_memory::pinning::{Access, ForkLocal, PageRange, PinError, PinToken, Pinner};
use memferry_sys::registered_buffers::RegisteredBuffers;

/// The number of buffer slots of a ring.
const SLOTS: u32 = 1024;
/// The number of queue entries; the tests need one at a time.
const ENTRIES: u32 = 4;

const READ_FIXED: u8 = 4;
const WRITE_FIXED: u8 = 5;
const WAIT_FOR_COMPLETION: u32 = 1;
const ENTRIES_OFFSET: i64 = 0x1000_0000;

/// Pins by registering buffers, and copies between them and files. Each process has its own ring.
#[derive(Debug)]
pub struct RingPinner {
    ring: ForkLocal<Mutex<Ring>>,
}

impl RingPinner {
    /// Creates a pinner. `None`, and the test is skipped, if io_uring is not permitted.
    pub fn new() -> Option<Self> {
        if let Err(error) = Ring::new() {
            crate::skip(crate::Requirement::IoUring, error);
            return None;
        }
        let make = || Mutex::new(Ring::new().expect("cannot create another ring"));
        Some(Self { ring: ForkLocal::new(make) })
    }

    /// Writes registered memory to the start of a file.
    pub fn copy_out(&self, token: &PinToken, address: usize, length: usize, file: &File) {
        self.ring.get().lock().unwrap().copy(WRITE_FIXED, token, address, length, file);
    }

    /// Reads the start of a file into registered memory.
    pub fn copy_in(&self, token: &PinToken, address: usize, length: usize, file: &File) {
        self.ring.get().lock().unwrap().copy(READ_FIXED, token, address, length, file);
    }
}

impl Pinner for RingPinner {
    fn name(&self) -> &'static str {
        "ring"
    }

    fn pin(&self, range: PageRange, _access: Access) -> Result<PinToken, PinError> {
        self.ring.get().lock().unwrap().register(range)
    }

    fn unpin(&self, _range: PageRange, token: &PinToken) {
        let mut ring = self.ring.get().lock().unwrap();
        ring.table.clear(token.number() as u32).expect("cannot clear the slot");
        ring.free.push(token.number() as u32);
    }

    fn tracks_mapping(&self) -> bool {
        false
    }
}

#[derive(Debug)]
struct Ring {
    descriptor: OwnedFd,
    parameters: Parameters,
    queues: RingMapping,
    entries: RingMapping,
    table: RegisteredBuffers,
    free: Vec<u32>,
}

impl Ring {
    fn new() -> std::io::Result<Self> {
        let mut parameters = Parameters::default();
        // SAFETY: the parameters have the kernel's layout and live until the call returns.
        let descriptor = unsafe {
            let result = libc::syscall(libc::SYS_io_uring_setup, ENTRIES, &raw mut parameters);
            if result < 0 {
                return Err(std::io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(result as i32)
        };
        // Both queues are in one mapping since Linux 5.4.
        let completions = parameters.completion.entries + parameters.completion_entries * 16;
        let submissions = parameters.submission.array + parameters.submission_entries * 4;
        let queues = RingMapping::new(&descriptor, completions.max(submissions) as usize, 0)?;
        let bytes = parameters.submission_entries as usize * size_of::<SubmissionEntry>();
        let entries = RingMapping::new(&descriptor, bytes, ENTRIES_OFFSET)?;
        let table = RegisteredBuffers::from_ring(descriptor.try_clone()?, SLOTS)?;
        let free = (0..SLOTS).rev().collect();
        Ok(Self { descriptor, parameters, queues, entries, table, free })
    }

    fn register(&mut self, range: PageRange) -> Result<PinToken, PinError> {
        let slot = self.free.pop().expect("no free slot");
        self.table.set(slot, range.start(), range.bytes()).map_err(|error| {
            self.free.push(slot);
            match error.raw_os_error() {
                Some(libc::EFAULT) => PinError::BadMemory { range },
                Some(libc::ENOMEM) => PinError::MemlockLimit {
                    limit_bytes: memferry_sys::residency::lock_limit_bytes().unwrap_or(u64::MAX),
                    locked_bytes: memferry_sys::residency::locked_bytes(),
                    requested_bytes: range.bytes() as u64,
                },
                code => PinError::Refused { what: "registering", code: code.unwrap_or(0) },
            }
        })?;
        Ok(PinToken::new(u64::from(slot)))
    }

    fn copy(&mut self, code: u8, token: &PinToken, address: usize, length: usize, file: &File) {
        let (submission, completion) = (&self.parameters.submission, &self.parameters.completion);
        let tail = self.queues.word(submission.tail);
        let number = tail.load(Ordering::Relaxed);
        let slot = number % self.parameters.submission_entries;
        let entry = SubmissionEntry {
            code,
            file: file.as_raw_fd(),
            address: address as u64,
            length: length as u32,
            buffer: token.number() as u16,
            ..SubmissionEntry::default()
        };
        // SAFETY: the slot is inside the mapping, and free, because every earlier request is
        // complete.
        unsafe { self.entries.start.cast::<SubmissionEntry>().add(slot as usize).write(entry) };
        self.queues.word(submission.array + 4 * slot).store(slot, Ordering::Relaxed);
        tail.store(number + 1, Ordering::Release);
        // SAFETY: the call submits the entry above and waits for it; the memory of the entry is
        // registered.
        let submitted = unsafe {
            let (descriptor, none) = (self.descriptor.as_raw_fd(), ptr::null::<u8>());
            let flags = WAIT_FOR_COMPLETION;
            libc::syscall(libc::SYS_io_uring_enter, descriptor, 1, 1, flags, none, 0)
        };
        assert_eq!(submitted, 1);
        let head = self.queues.word(completion.head);
        let done = head.load(Ordering::Relaxed);
        assert_eq!(self.queues.word(completion.tail).load(Ordering::Acquire), done + 1);
        let at = completion.entries + 16 * (done % self.parameters.completion_entries) + 8;
        let result = self.queues.word(at).load(Ordering::Relaxed) as i32;
        head.store(done + 1, Ordering::Release);
        assert_eq!(result, length as i32, "the copy failed or was short");
    }
}

/// Memory shared with the kernel.
#[derive(Debug)]
struct RingMapping {
    start: *mut u8,
    length: usize,
}

// SAFETY: the ring owns the mapping and uses it under a lock.
unsafe impl Send for RingMapping {}

impl RingMapping {
    fn new(descriptor: &OwnedFd, length: usize, offset: i64) -> std::io::Result<Self> {
        let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let file = descriptor.as_raw_fd();
        // SAFETY: a new mapping overlaps nothing.
        let start = unsafe { libc::mmap(ptr::null_mut(), length, rights, flags, file, offset) };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Self { start: start.cast(), length })
    }

    fn word(&self, offset: u32) -> &AtomicU32 {
        assert!(offset as usize + 4 <= self.length && offset.is_multiple_of(4));
        // SAFETY: the address is inside the mapping, aligned, and shared with the kernel as an
        // atomic word.
        unsafe { &*self.start.add(offset as usize).cast() }
    }
}

impl Drop for RingMapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new` and is unmapped once; no reference outlives this
        // value.
        unsafe { libc::munmap(self.start.cast(), self.length) };
    }
}

#[derive(Debug, Default)]
#[repr(C)]
struct Parameters {
    submission_entries: u32,
    completion_entries: u32,
    unused: [u32; 8],
    submission: SubmissionOffsets,
    completion: CompletionOffsets,
}

#[derive(Debug, Default)]
#[repr(C)]
struct SubmissionOffsets {
    head: u32,
    tail: u32,
    unused: [u32; 4],
    array: u32,
    more_unused: [u32; 3],
}

#[derive(Debug, Default)]
#[repr(C)]
struct CompletionOffsets {
    head: u32,
    tail: u32,
    unused: [u32; 3],
    entries: u32,
    more_unused: [u32; 4],
}

const _: () = assert!(size_of::<Parameters>() == 120);

#[derive(Debug, Default)]
#[repr(C)]
struct SubmissionEntry {
    code: u8,
    flags: u8,
    priority: u16,
    file: i32,
    offset: u64,
    address: u64,
    length: u32,
    more_flags: u32,
    user_data: u64,
    buffer: u16,
    unused: [u16; 11],
}

const _: () = assert!(size_of::<SubmissionEntry>() == 64);
