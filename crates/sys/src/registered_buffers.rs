//! Buffers registered with the kernel: their page frames are looked up once and kept, as a device's
//! driver keeps them, however the mapping changes.
//!
//! The table is that of an io_uring, which is used for nothing else here.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::fault::{Call, call};

/// A table of registered buffers. Closing it lets go of all of them.
#[derive(Debug)]
pub struct BufferTable {
    ring: OwnedFd,
    slots: u32,
}

/// The largest buffer that a slot takes.
pub const MOST_BUFFER_BYTES: usize = 1 << 30;

/// What the kernel says of a table without an empty slot.
pub const NO_EMPTY_SLOT: i32 = libc::ENOSPC;

const REGISTER_BUFFERS: u32 = 15;
const UPDATE_BUFFERS: u32 = 16;
const EMPTY_TABLE: u32 = 1;
const BYTES_OF_PARAMETERS: usize = 120;

impl BufferTable {
    /// A table with empty slots. An error where io_uring is not there or not permitted.
    pub fn new(slots: u32) -> io::Result<Self> {
        let mut parameters = [0u64; BYTES_OF_PARAMETERS / 8];
        // SAFETY: the parameters have the size and alignment of the kernel's, ask for nothing, and
        // live until the call returns.
        let mut setup =
            || unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
        let ring = call(Call::IoUringSetup, || match setup() {
            ring @ 0.. => Ok(ring as i32),
            _ => Err(io::Error::last_os_error()),
        })?;
        // SAFETY: the kernel just made this descriptor for us.
        Self::over(unsafe { OwnedFd::from_raw_fd(ring) }, slots)
    }

    /// A table with empty slots in an io_uring that has none.
    pub fn over(ring: OwnedFd, slots: u32) -> io::Result<Self> {
        let table = Self { ring, slots };
        let empty = Registration { count: slots, flags: EMPTY_TABLE, ..Registration::default() };
        call(Call::IoUringRegister, || table.register_with(REGISTER_BUFFERS, &empty))?;
        Ok(table)
    }

    /// How many slots there are.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Puts a buffer into a slot, in place of what is there.
    pub fn set(&self, slot: u32, address: usize, length: usize) -> io::Result<()> {
        call(Call::IoUringRegister, || self.update(slot, address, length))
    }

    /// Empties a slot.
    pub fn clear(&self, slot: u32) -> io::Result<()> {
        self.update(slot, 0, 0)
    }

    fn update(&self, slot: u32, address: usize, length: usize) -> io::Result<()> {
        let buffer = libc::iovec { iov_base: address as *mut _, iov_len: length };
        let data = &raw const buffer as u64;
        let update = Update { offset: slot, data, count: 1, ..Update::default() };
        self.register_with(UPDATE_BUFFERS, &update)
    }

    fn register_with<T>(&self, what: u32, argument: &T) -> io::Result<()> {
        let (ring, bytes) = (self.ring.as_raw_fd(), size_of::<T>() as u32);
        // SAFETY: each argument has the kernel's layout for its call, and it and what it points to
        // live until the call returns. Registering changes no byte of a buffer.
        let result = unsafe {
            let argument = std::ptr::from_ref(argument);
            libc::syscall(libc::SYS_io_uring_register, ring, what, argument, bytes)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// The kernel's `io_uring_rsrc_register`.
#[derive(Debug, Default)]
#[repr(C)]
struct Registration {
    count: u32,
    flags: u32,
    reserved: u64,
    data: u64,
    tags: u64,
}

const _: () = assert!(size_of::<Registration>() == 32);

/// The kernel's `io_uring_rsrc_update2`.
#[derive(Debug, Default)]
#[repr(C)]
struct Update {
    offset: u32,
    reserved: u32,
    data: u64,
    tags: u64,
    count: u32,
    reserved_too: u32,
}

const _: () = assert!(size_of::<Update>() == 32);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Pages;
    use crate::pages::page_bytes;
    use crate::residency::resident_pages;

    #[test]
    fn a_registered_buffer_is_brought_in_and_a_slot_is_used_again() {
        let table = match BufferTable::new(2) {
            Ok(table) => table,
            Err(error) => {
                return memferry_testing::skip(memferry_testing::Requirement::IoUring, error);
            }
        };
        let pages = Pages::new(16 * page_bytes()).unwrap();
        let at = pages.as_ptr() as usize;
        for slot in [0, 1, 0] {
            table.set(slot, at, 8 * page_bytes()).unwrap();
            assert!(resident_pages(at, pages.len()).unwrap() >= 8);
            table.clear(slot).unwrap();
        }
        assert!(table.set(2, at, page_bytes()).is_err(), "there is no such slot");
        assert!(table.set(0, page_bytes(), page_bytes()).is_err(), "nothing is mapped there");
        table.clear(0).unwrap();
    }
}
