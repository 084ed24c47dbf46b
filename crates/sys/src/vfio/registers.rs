//! The registers of a device in the addresses of the process.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::fork;
use crate::pages::page_bytes;

/// Registers that are mapped until this is dropped. They are not mapped in forked children, where
/// reads give ones, as from a device that is gone, and writes do nothing.
#[derive(Debug)]
pub(super) struct Registers {
    start: NonNull<u8>,
    bytes: usize,
    generation: u64,
}

// SAFETY: the mapping belongs to this value, and registers may be touched by any thread: each access
// is one instruction, and what it means is between the driver and the device.
unsafe impl Send for Registers {}
// SAFETY: as above.
unsafe impl Sync for Registers {}

impl Registers {
    /// Maps `bytes` of a device's file. The kernel makes the mapping of a device uncached.
    pub(super) fn map(file: BorrowedFd<'_>, offset: u64, bytes: usize) -> io::Result<Self> {
        fork::watch();
        let (rights, mapped) = (ProtFlags::READ | ProtFlags::WRITE, whole_pages(bytes));
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let start =
            unsafe { mmap(std::ptr::null_mut(), mapped, rights, MapFlags::SHARED, file, offset) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let registers = Self { start, bytes, generation: fork::generation() };
        // SAFETY: the mapping is the one made above, and nothing in it changes by this.
        unsafe { madvise(start.as_ptr().cast(), mapped, Advice::LinuxDontFork) }?;
        Ok(registers)
    }

    /// Where a register is, or `None` in a forked child.
    ///
    /// # Panics
    /// If the register is not in the region, or not aligned to its size.
    #[inline]
    fn at<T>(&self, at: usize) -> Option<NonNull<T>> {
        let fits = at.checked_add(size_of::<T>()).is_some_and(|end| end <= self.bytes);
        assert!(
            fits && at.is_multiple_of(size_of::<T>()),
            "no register of {} bytes at {at:#x}: the device has {:#x} bytes of them",
            size_of::<T>(),
            self.bytes
        );
        // SAFETY: the result is inside of the mapping, as asserted.
        (fork::generation() == self.generation).then(|| unsafe { self.start.add(at).cast() })
    }
}

macro_rules! accesses {
    ($($width:ty, $read:ident, $write:ident;)+) => {
        impl Registers {$(
            #[inline]
            pub(super) fn $read(&self, at: usize) -> $width {
                let Some(register) = self.at::<$width>(at) else { return <$width>::MAX };
                // SAFETY: `at` gives aligned addresses inside of the mapping, for which any bytes
                // are a valid number.
                let value = unsafe { register.read_volatile() };
                after_reading();
                <$width>::from_le(value)
            }

            #[inline]
            pub(super) fn $write(&self, at: usize, value: $width) {
                let Some(register) = self.at::<$width>(at) else { return };
                before_writing();
                // SAFETY: as for reading; nothing of Rust's lives in registers.
                unsafe { register.write_volatile(value.to_le()) };
            }
        )+}
    };
}

accesses! {
    u8, read8, write8;
    u16, read16, write16;
    u32, read32, write32;
    u64, read64, write64;
}

/// Lets what this thread wrote to memory be there for the device before a register is written. The
/// instructions order ordinary memory with registers, which fences between threads need not do; on
/// x86 that concerns writes around the caches only.
#[inline]
fn before_writing() {
    fence(Ordering::Release);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this kind has the instruction, and it touches no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier touches no memory.
    unsafe {
        std::arch::asm!("dmb osh", options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fence(Ordering::SeqCst);
}

/// Lets no later read of memory see what was there before the register was read.
#[inline]
fn after_reading() {
    fence(Ordering::Acquire);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier touches no memory.
    unsafe {
        std::arch::asm!("dmb oshld", options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fence(Ordering::SeqCst);
}

fn whole_pages(bytes: usize) -> usize {
    bytes.next_multiple_of(page_bytes())
}

impl Drop for Registers {
    fn drop(&mut self) {
        if fork::generation() == self.generation {
            // SAFETY: the mapping is ours and nobody has a pointer into it.
            let _ = unsafe { munmap(self.start.as_ptr().cast(), whole_pages(self.bytes)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    const BYTES: usize = 5000;

    /// A file in place of a device.
    fn registers() -> Registers {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * page_bytes() as u64).unwrap();
        Registers::map(file.as_fd(), 0, BYTES).unwrap()
    }

    #[test]
    fn registers_have_the_width_that_they_are_accessed_with() {
        let registers = registers();
        registers.write64(8, 0x1122_3344_5566_7788);
        assert_eq!((registers.read32(8), registers.read32(12)), (0x5566_7788, 0x1122_3344));
        registers.write8(9, 0xAA);
        registers.write16(10, 0xBBCC);
        assert_eq!(registers.read64(8), 0x1122_3344_BBCC_AA88);
        assert_eq!((registers.read16(8), registers.read8(11)), (0xAA88, 0xBB));
        registers.write32(BYTES - 4, 7);
        assert_eq!(registers.read8(BYTES - 4), 7);
    }

    #[test]
    #[should_panic(expected = "no register of 4 bytes at 0x1388")]
    fn a_register_behind_the_last_is_not_read() {
        registers().read32(BYTES);
    }

    #[test]
    #[should_panic(expected = "no register of 8 bytes")]
    fn an_address_at_the_end_of_all_numbers_is_not_written() {
        registers().write64(usize::MAX - 3, 0);
    }

    #[test]
    #[should_panic(expected = "no register of 4 bytes at 0x2")]
    fn a_register_that_is_not_aligned_is_not_read() {
        registers().read32(2);
    }

    #[test]
    fn a_child_reads_ones_and_writes_nothing() {
        let registers = registers();
        registers.write32(0, 5);
        // SAFETY: the child touches the registers, the heap not at all, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            registers.write32(0, 6);
            let gone = registers.read32(0) == u32::MAX;
            // SAFETY: ends the child without running what the parent wants to run.
            unsafe { libc::_exit(i32::from(!gone)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!((status, registers.read32(0)), (0, 5));
    }
}
