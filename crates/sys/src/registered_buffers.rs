//! Buffers that are registered with the kernel (io_uring). The kernel resolves their page frames
//! once and keeps them, like the driver of a device, even if the mapping changes.
//!
//! The io_uring is used for nothing else.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::fault::{Call, call};

/// A table of registered buffers. Closing it unregisters all of them.
#[derive(Debug)]
pub struct RegisteredBuffers {
    ring: OwnedFd,
    slots: u32,
}

/// Error number of an update if the table has no free slot.
pub const NO_FREE_SLOT: i32 = libc::ENOSPC;

const REGISTER_BUFFERS: u32 = 15;
const UPDATE_BUFFERS: u32 = 16;
const RSRC_REGISTER_SPARSE: u32 = 1;
const PARAMS_BYTES: usize = 120;

impl RegisteredBuffers {
    /// Creates a table with empty slots. Fails if io_uring does not exist or is not permitted.
    pub fn new(slots: u32) -> io::Result<Self> {
        let mut parameters = [0u64; PARAMS_BYTES / 8];
        // SAFETY: the parameters have the size and alignment of the kernel's structure, set no
        // option, and live until the call returns.
        let mut setup =
            || unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
        let ring = call(Call::IoUringSetup, || match setup() {
            ring @ 0.. => Ok(ring as i32),
            _ => Err(io::Error::last_os_error()),
        })?;
        // SAFETY: the kernel has created this descriptor for this call, and no other code owns it.
        Self::from_ring(unsafe { OwnedFd::from_raw_fd(ring) }, slots)
    }

    /// Creates a table with empty slots in an io_uring that has none.
    pub fn from_ring(ring: OwnedFd, slots: u32) -> io::Result<Self> {
        let table = Self { ring, slots };
        let empty =
            RsrcRegister { count: slots, flags: RSRC_REGISTER_SPARSE, ..RsrcRegister::default() };
        call(Call::IoUringRegister, || table.io_uring_register(REGISTER_BUFFERS, &empty))?;
        Ok(table)
    }

    /// The number of slots.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Registers a buffer in a slot and replaces the previous one.
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
        let update = RsrcUpdate { offset: slot, data, count: 1, ..RsrcUpdate::default() };
        self.io_uring_register(UPDATE_BUFFERS, &update)
    }

    fn io_uring_register<T>(&self, operation: u32, argument: &T) -> io::Result<()> {
        let (ring, bytes) = (self.ring.as_raw_fd(), size_of::<T>() as u32);
        // SAFETY: each argument has the kernel's layout for its operation; the argument and the
        // memory that it points to live until the call returns. Registration changes no byte of a
        // buffer.
        let result = unsafe {
            let argument = std::ptr::from_ref(argument);
            libc::syscall(libc::SYS_io_uring_register, ring, operation, argument, bytes)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// The kernel's `io_uring_rsrc_register`.
#[derive(Debug, Default)]
#[repr(C)]
struct RsrcRegister {
    count: u32,
    flags: u32,
    reserved: u64,
    data: u64,
    tags: u64,
}

const _: () = assert!(size_of::<RsrcRegister>() == 32);

/// The kernel's `io_uring_rsrc_update2`.
#[derive(Debug, Default)]
#[repr(C)]
struct RsrcUpdate {
    offset: u32,
    reserved: u32,
    data: u64,
    tags: u64,
    count: u32,
    reserved2: u32,
}

const _: () = assert!(size_of::<RsrcUpdate>() == 32);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Pages;
    use crate::pages::page_bytes;
    use crate::residency::resident_pages;

    #[test]
    fn a_registered_buffer_is_brought_in_and_a_slot_is_used_again() {
        let table = match RegisteredBuffers::new(2) {
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
        assert!(table.set(2, at, page_bytes()).is_err(), "slot 2 does not exist");
        assert!(table.set(0, page_bytes(), page_bytes()).is_err(), "the address is not mapped");
        table.clear(0).unwrap();
    }
}
