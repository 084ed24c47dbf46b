//! A device as its driver sees it: registers, and memory that it was given access to.
//!
//! Drivers are written against this trait alone. Behind it is a device of the machine
//! (`vfio`) or a model of one, and a driver cannot tell which.

use std::fmt::Debug;
use std::io;

/// What the kernel answers when memory cannot be mapped for a device.
pub mod code {
    /// There is no such memory, or not for this.
    pub const EFAULT: i32 = libc::EFAULT;
    /// A limit of memory is reached.
    pub const ENOMEM: i32 = libc::ENOMEM;
    /// Addresses are used up.
    pub const ENOSPC: i32 = libc::ENOSPC;
}

/// What a device does with memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// It reads it.
    Reads,
    /// It reads and writes it.
    Writes,
}

/// A device. Registers are named by their offset in the device's first region (BAR 0), and are read
/// and written in one access of the width that the call says.
///
/// Accesses to registers are ordered with those of the calling thread to memory: what a thread wrote
/// to memory before it writes a register is there for the device to read.
///
/// A device reads and writes memory as its registers say, so a write to one is as dangerous as a
/// write through a pointer.
pub trait Device: Send + Sync + Debug {
    /// What people call it: its address on the bus.
    fn name(&self) -> &str;

    /// Reads a register of 8 bits.
    fn read8(&self, at: usize) -> u8;
    /// Reads a register of 16 bits.
    fn read16(&self, at: usize) -> u16;
    /// Reads a register of 32 bits.
    fn read32(&self, at: usize) -> u32;
    /// Reads a register of 64 bits.
    fn read64(&self, at: usize) -> u64;
    /// Writes a register of 8 bits.
    ///
    /// # Safety
    /// The caller has the device to itself, and whatever the value makes the device do, it reads
    /// and writes only memory that is mapped for it and that the caller may read and write.
    unsafe fn write8(&self, at: usize, value: u8);
    /// Writes a register of 16 bits.
    ///
    /// # Safety
    /// As for [`Device::write8`].
    unsafe fn write16(&self, at: usize, value: u16);
    /// Writes a register of 32 bits.
    ///
    /// # Safety
    /// As for [`Device::write8`].
    unsafe fn write32(&self, at: usize, value: u32);
    /// Writes a register of 64 bits.
    ///
    /// # Safety
    /// As for [`Device::write8`].
    unsafe fn write64(&self, at: usize, value: u64);

    /// Pins the pages from `start` on, which is the first byte of a page, lets the device reach them,
    /// and writes into `pages` under which address it finds each. Pages may be mapped any number of
    /// times; each time they have addresses of their own, none of them 0.
    ///
    /// # Safety
    /// The device reads and writes what its driver tells it to. Until the mapping is ended, the memory
    /// must stay what it is, and whoever has the device write to it must have it to themselves.
    ///
    /// # Errors
    /// As the kernel numbers them: `EFAULT` where nothing is mapped or writing is not allowed,
    /// `ENOMEM` where the limit of locked memory is reached, `ENOSPC` where the device has no
    /// addresses left. Then nothing is mapped.
    unsafe fn map(&self, start: usize, pages: &mut [u64], direction: Direction) -> io::Result<()>;

    /// Ends a mapping, named by the addresses that [`Device::map`] gave. When this returns the device
    /// reaches the pages no more.
    ///
    /// # Safety
    /// The mapping must be one that the caller made: the device is told of the addresses of others by
    /// others, and addresses are given out again.
    unsafe fn unmap(&self, pages: &[u64]);

    /// Whether pages that lie one behind the other in a mapping do so for the device as well, as an
    /// IOMMU makes them.
    fn is_contiguous(&self) -> bool;

    /// Stops everything that the device does, and brings it into the state of power-on. Mappings
    /// stay.
    fn reset(&self) -> io::Result<()>;
}
