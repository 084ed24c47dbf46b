//! A device as its driver sees it: registers, and memory that is mapped for it.
//!
//! Drivers use this trait alone. Its implementations are devices of the machine (`vfio`) and
//! models; a driver cannot distinguish them.

use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::EventFd;

/// Error numbers of [`DmaDevice::map`].
pub mod code {
    /// The memory is not mapped, or not writable.
    pub const EFAULT: i32 = libc::EFAULT;
    /// The limit of locked memory is reached.
    pub const ENOMEM: i32 = libc::ENOMEM;
    /// No IOVA is free.
    pub const ENOSPC: i32 = libc::ENOSPC;
}

/// Direction of a device's access to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmaDirection {
    /// The device reads the memory.
    ToDevice,
    /// The device reads and writes the memory.
    Bidirectional,
}

/// Width of a register access, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// 8 bits.
    Bits8 = 1,
    /// 16 bits.
    Bits16 = 2,
    /// 32 bits.
    Bits32 = 4,
    /// 64 bits.
    Bits64 = 8,
}

/// A device. Registers are addressed by their offset in BAR 0, and each access has the width of the
/// call.
///
/// Register accesses are ordered with memory accesses of the calling thread: what a thread has
/// written to memory before it writes a register is visible to the device.
///
/// The device accesses memory as its registers say, so a register write is as dangerous as a write
/// through a pointer.
pub trait DmaDevice: Send + Sync + Debug {
    /// The name for display: the address on the bus.
    fn name(&self) -> &str;

    /// Reads a register.
    fn read(&self, at: usize, width: Width) -> u64;

    /// Writes a register.
    ///
    /// # Safety
    /// The caller has exclusive use of the device. Whatever the value makes the device do, the
    /// device accesses only memory that is mapped for it and that the caller may read and write.
    unsafe fn write(&self, at: usize, width: Width, value: u64);

    /// Pins the pages from `start` on, which is page-aligned, maps them for the device, and writes
    /// the IOVA of each into `pages`. Pages may be mapped several times; each mapping has its own
    /// addresses, none of them 0.
    ///
    /// # Safety
    /// The device accesses the memory as its driver commands. Until the mapping is removed, the
    /// memory must stay mapped, and a caller that makes the device write to it must have exclusive
    /// access.
    ///
    /// # Errors
    /// Error numbers of the kernel: `EFAULT` if the memory is not mapped or not writable, `ENOMEM`
    /// if the limit of locked memory is reached, `ENOSPC` if no IOVA is free. After an error
    /// nothing is mapped.
    unsafe fn map(
        &self,
        start: usize,
        pages: &mut [u64],
        direction: DmaDirection,
    ) -> io::Result<()>;

    /// Removes a mapping, given by the addresses that [`DmaDevice::map`] returned. When the call
    /// returns, the device cannot access the pages any more.
    ///
    /// # Safety
    /// The caller must have created the mapping. Another caller may still use the addresses of its
    /// own mappings, and addresses are reused.
    unsafe fn unmap(&self, pages: &[u64]);

    /// Whether consecutive pages of a mapping have consecutive IOVAs, as behind an IOMMU.
    fn is_contiguous(&self) -> bool;

    /// The size of the registers in bytes: accesses beyond it panic.
    fn register_bytes(&self) -> usize {
        usize::MAX
    }

    /// How long a driver waits for the end of a command, or for progress: a second for devices, which
    /// need microseconds. The threads of a model wait for a processor like all others, so a model has
    /// more time, unless it is to fail by a timeout.
    fn patience(&self) -> Duration {
        Duration::from_secs(1)
    }

    /// Connects the first interrupt vectors of the device, `count` of them or as many as it has, each
    /// with an eventfd that is signalled when the device raises it. What was connected before is not
    /// any more. A device raises interrupts only as its registers and descriptors say.
    ///
    /// # Errors
    /// The device has no such interrupts, or the kernel refuses them: the driver polls.
    fn connect_interrupts(&self, _count: usize) -> io::Result<Vec<Arc<EventFd>>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Stops all activity of the device and resets it to its power-on state. Mappings remain.
    fn reset(&self) -> io::Result<()>;

    /// Reads a register of 8 bits.
    fn read8(&self, at: usize) -> u8 {
        self.read(at, Width::Bits8) as u8
    }

    /// Writes a register of 8 bits.
    ///
    /// # Safety
    /// As for [`DmaDevice::write`].
    unsafe fn write8(&self, at: usize, value: u8) {
        // SAFETY: the caller's guarantee.
        unsafe { self.write(at, Width::Bits8, value.into()) };
    }

    /// Reads a register of 16 bits.
    fn read16(&self, at: usize) -> u16 {
        self.read(at, Width::Bits16) as u16
    }

    /// Writes a register of 16 bits.
    ///
    /// # Safety
    /// As for [`DmaDevice::write`].
    unsafe fn write16(&self, at: usize, value: u16) {
        // SAFETY: the caller's guarantee.
        unsafe { self.write(at, Width::Bits16, value.into()) };
    }

    /// Reads a register of 32 bits.
    fn read32(&self, at: usize) -> u32 {
        self.read(at, Width::Bits32) as u32
    }

    /// Writes a register of 32 bits.
    ///
    /// # Safety
    /// As for [`DmaDevice::write`].
    unsafe fn write32(&self, at: usize, value: u32) {
        // SAFETY: the caller's guarantee.
        unsafe { self.write(at, Width::Bits32, value.into()) };
    }

    /// Reads a register of 64 bits.
    fn read64(&self, at: usize) -> u64 {
        self.read(at, Width::Bits64)
    }

    /// Writes a register of 64 bits.
    ///
    /// # Safety
    /// As for [`DmaDevice::write`].
    unsafe fn write64(&self, at: usize, value: u64) {
        // SAFETY: the caller's guarantee.
        unsafe { self.write(at, Width::Bits64, value) };
    }
}
