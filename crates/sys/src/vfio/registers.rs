//! The registers of a device, mapped into the address space of the process.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::fork::OwnerProcess;
use crate::pages::page_bytes;
use crate::portal::Portal;

/// Registers, unmapped on drop. They are not mapped in forked children, where reads return all
/// ones, as from a removed device, and writes have no effect.
#[derive(Debug)]
pub(super) struct Registers {
    start: NonNull<u8>,
    bytes: usize,
    owner: OwnerProcess,
}

// SAFETY: this value owns the mapping, and any thread may access registers: each access is one
// instruction, and its meaning is defined by the driver and the device.
unsafe impl Send for Registers {}
// SAFETY: as above.
unsafe impl Sync for Registers {}

impl Registers {
    /// The size in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Maps `bytes` of a device's file. The kernel maps device memory uncached.
    pub(super) fn map(file: BorrowedFd<'_>, offset: u64, bytes: usize) -> io::Result<Self> {
        let (rights, mapped) = (ProtFlags::READ | ProtFlags::WRITE, whole_pages(bytes));
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let start =
            unsafe { mmap(std::ptr::null_mut(), mapped, rights, MapFlags::SHARED, file, offset) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let registers = Self { start, bytes, owner: OwnerProcess::current() };
        // SAFETY: the mapping was created above, and the advice changes nothing in it.
        unsafe { madvise(start.as_ptr().cast(), mapped, Advice::LinuxDontFork) }?;
        Ok(registers)
    }

    /// The region as submission portals, of dedicated queues: shared ones need the address space of a
    /// process. The caller has checked that the processor has the instruction.
    pub(super) fn into_portals(self) -> Portal {
        // SAFETY: the region is mapped for writing, from the start of a page on, as long as this value
        // exists.
        unsafe { Portal::mapped(self.start, self.bytes, true, Box::new(self)) }
    }

    /// The address of a register, or `None` in a forked child.
    ///
    /// # Panics
    /// If the register is outside of the region or not aligned to its size.
    #[inline]
    fn at<T>(&self, at: usize) -> Option<NonNull<T>> {
        let fits = at.checked_add(size_of::<T>()).is_some_and(|end| end <= self.bytes);
        assert!(
            fits && at.is_multiple_of(size_of::<T>()),
            "no register of {} bytes at {at:#x}: the device has {:#x} bytes of registers",
            size_of::<T>(),
            self.bytes
        );
        // SAFETY: the result is inside the mapping, as asserted.
        (self.owner.is_current()).then(|| unsafe { self.start.add(at).cast() })
    }
}

macro_rules! accesses {
    ($($width:ty, $read:ident, $write:ident;)+) => {
        impl Registers {$(
            #[inline]
            pub(super) fn $read(&self, at: usize) -> $width {
                let Some(register) = self.at::<$width>(at) else { return <$width>::MAX };
                // SAFETY: `at` returns aligned addresses inside the mapping, where any bytes are a
                // valid number.
                let value = unsafe { register.read_volatile() };
                after_reading();
                <$width>::from_le(value)
            }

            #[inline]
            pub(super) fn $write(&self, at: usize, value: $width) {
                let Some(register) = self.at::<$width>(at) else { return };
                before_writing();
                // SAFETY: as for reading; registers contain no Rust values.
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

/// Makes this thread's earlier memory writes visible to the device before a register is written.
/// The instructions order ordinary memory with registers, which fences between threads need not do;
/// on x86 that concerns non-temporal stores only.
#[inline]
fn before_writing() {
    fence(Ordering::Release);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction, and it accesses no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier accesses no memory.
    unsafe {
        std::arch::asm!("dmb osh", options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fence(Ordering::SeqCst);
}

/// Orders the register read before later memory reads.
#[inline]
fn after_reading() {
    fence(Ordering::Acquire);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier accesses no memory.
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
        if self.owner.is_current() {
            // SAFETY: this value owns the mapping, and no pointer into it exists.
            let _ = unsafe { munmap(self.start.as_ptr().cast(), whole_pages(self.bytes)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    const BYTES: usize = 5000;

    /// Registers in a temporary file.
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
        // SAFETY: the child accesses the registers and exits without using the heap.
        let child = unsafe { libc::fork() };
        if child == 0 {
            registers.write32(0, 6);
            let gone = registers.read32(0) == u32::MAX;
            // SAFETY: exits the child without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!gone)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child created above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!((status, registers.read32(0)), (0, 5));
    }
}
