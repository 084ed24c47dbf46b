//! The ioctls of VFIO, one method each, on its three kinds of files: the container, which is a set
//! of mappings, the group, and the device. Forked children close all three.

use std::ffi::{CString, c_int, c_ulong};
use std::fs::OpenOptions;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::{pread, pwrite};
use rustix::ioctl::opcode;
use vfio_bindings::bindings::vfio as kernel;

use crate::device::DmaDirection;
use crate::fork::CloseOnFork;

const CHECK_EXTENSION: u8 = 1;
const SET_IOMMU: u8 = 2;
const GROUP_GET_STATUS: u8 = 3;
const GROUP_SET_CONTAINER: u8 = 4;
const GROUP_GET_DEVICE: u8 = 6;
const DEVICE_GET_INFO: u8 = 7;
const DEVICE_GET_REGION: u8 = 8;
const DEVICE_GET_IRQ_INFO: u8 = 9;
const DEVICE_SET_IRQS: u8 = 10;
const DEVICE_RESET: u8 = 11;
const IOMMU_GET_INFO: u8 = 12;
const IOMMU_MAP: u8 = 13;
const IOMMU_UNMAP: u8 = 14;

/// A container: a set of DMA mappings.
#[derive(Debug)]
pub(super) struct ContainerFd(CloseOnFork);

impl ContainerFd {
    pub(super) fn open() -> io::Result<Self> {
        open("/dev/vfio/vfio").map(Self)
    }

    /// Whether this process opened the container.
    pub(super) fn is_owner_process(&self) -> bool {
        self.0.is_owner_process()
    }

    /// Whether the kernel supports type 1 IOMMU mappings, version 2.
    pub(super) fn supports_type1(&self) -> bool {
        let kind = kernel::VFIO_TYPE1v2_IOMMU as usize;
        ioctl_value(self.0.as_fd(), CHECK_EXTENSION, kind).is_ok_and(|answer| answer == 1)
    }

    /// Initialises the empty set of mappings. A group must be in the container.
    pub(super) fn set_iommu(&self) -> io::Result<()> {
        ioctl_value(self.0.as_fd(), SET_IOMMU, kernel::VFIO_TYPE1v2_IOMMU as usize).map(drop)
    }

    /// The usable IOVA ranges; empty if the kernel does not report them.
    pub(super) fn iova_ranges(&self) -> io::Result<Vec<RangeInclusive<u64>>> {
        let mut info = kernel::vfio_iommu_type1_info {
            argsz: size_of::<kernel::vfio_iommu_type1_info>() as u32,
            ..Default::default()
        };
        ioctl_struct(self.0.as_fd(), IOMMU_GET_INFO, &mut info)?;
        // An array of words, so that the structures in it are aligned.
        let mut words = vec![0u64; (info.argsz as usize).div_ceil(8)];
        let Some(first) = words.first_mut() else { return Ok(Vec::new()) };
        let mut size = [0; 8];
        size[..4].copy_from_slice(&info.argsz.to_ne_bytes());
        *first = u64::from_ne_bytes(size);
        // SAFETY: the kernel writes at most the number of bytes in the first field, which the
        // vector has.
        unsafe { ioctl(self.0.as_fd(), IOMMU_GET_INFO, words.as_mut_ptr() as usize) }?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        Ok(parse_iova_ranges(&bytes).unwrap_or_default())
    }

    /// Pins memory and maps it at an IOVA. Changes no byte of it.
    pub(super) fn map(
        &self,
        at: u64,
        memory: usize,
        bytes: u64,
        direction: DmaDirection,
    ) -> io::Result<()> {
        let flags = match direction {
            DmaDirection::ToDevice => kernel::VFIO_DMA_MAP_FLAG_READ,
            DmaDirection::Bidirectional => {
                kernel::VFIO_DMA_MAP_FLAG_READ | kernel::VFIO_DMA_MAP_FLAG_WRITE
            }
        };
        let mut map = kernel::vfio_iommu_type1_dma_map {
            argsz: size_of::<kernel::vfio_iommu_type1_dma_map>() as u32,
            flags,
            vaddr: memory as u64,
            iova: at,
            size: bytes,
        };
        ioctl_struct(self.0.as_fd(), IOMMU_MAP, &mut map)
    }

    /// Removes a mapping and unpins its pages. When the call returns, the device cannot access
    /// them.
    pub(super) fn unmap(&self, at: u64, bytes: u64) -> io::Result<()> {
        let mut unmap = kernel::vfio_iommu_type1_dma_unmap {
            argsz: size_of::<kernel::vfio_iommu_type1_dma_unmap>() as u32,
            iova: at,
            size: bytes,
            ..Default::default()
        };
        ioctl_struct(self.0.as_fd(), IOMMU_UNMAP, &mut unmap)?;
        let whole = unmap.size == bytes;
        whole.then_some(()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
    }
}

/// An IOMMU group.
#[derive(Debug)]
pub(super) struct GroupFd(CloseOnFork);

impl GroupFd {
    pub(super) fn open(number: u32) -> io::Result<Self> {
        open(&format!("/dev/vfio/{number}")).map(Self)
    }

    /// Whether no kernel driver uses a device of the group.
    pub(super) fn is_viable(&self) -> io::Result<bool> {
        let argsz = size_of::<kernel::vfio_group_status>() as u32;
        let mut status = kernel::vfio_group_status { argsz, flags: 0 };
        ioctl_struct(self.0.as_fd(), GROUP_GET_STATUS, &mut status)?;
        Ok(status.flags & kernel::VFIO_GROUP_FLAGS_VIABLE != 0)
    }

    pub(super) fn set_container(&self, container: &ContainerFd) -> io::Result<()> {
        let mut descriptor: c_int = container.0.as_fd().as_raw_fd();
        ioctl_struct(self.0.as_fd(), GROUP_SET_CONTAINER, &mut descriptor)
    }

    /// Opens a device of the group; the kernel resets the device.
    pub(super) fn device(&self, address: &str) -> io::Result<DeviceFd> {
        let name = CString::new(address)?;
        // SAFETY: the argument is a string with a zero byte at its end, which the kernel only
        // reads.
        let descriptor =
            unsafe { ioctl(self.0.as_fd(), GROUP_GET_DEVICE, name.as_ptr() as usize) }?;
        // SAFETY: the kernel has created this descriptor (close-on-exec) for this call, and no
        // other code owns it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        CloseOnFork::new(descriptor).map(DeviceFd)
    }
}

/// An open device.
#[derive(Debug)]
pub(super) struct DeviceFd(CloseOnFork);

/// A region of a device: its registers or its configuration space.
#[derive(Debug, Clone, Copy)]
pub(super) struct VfioRegion {
    /// Offset in the device's file.
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) can_mmap: bool,
}

impl DeviceFd {
    /// Whether this process opened the device.
    #[inline]
    pub(super) fn is_owner_process(&self) -> bool {
        self.0.is_owner_process()
    }

    /// Whether the kernel can reset the device.
    pub(super) fn can_reset(&self) -> io::Result<bool> {
        let argsz = size_of::<kernel::vfio_device_info>() as u32;
        let mut info = kernel::vfio_device_info { argsz, ..Default::default() };
        ioctl_struct(self.0.as_fd(), DEVICE_GET_INFO, &mut info)?;
        Ok(info.flags & kernel::VFIO_DEVICE_FLAGS_RESET != 0)
    }

    pub(super) fn reset(&self) -> io::Result<()> {
        ioctl_value(self.0.as_fd(), DEVICE_RESET, 0).map(drop)
    }

    /// The number of MSI-X vectors that the kernel can connect with eventfds; 0 if it cannot.
    pub(super) fn msix_vectors(&self) -> io::Result<usize> {
        let mut info = kernel::vfio_irq_info {
            argsz: size_of::<kernel::vfio_irq_info>() as u32,
            index: kernel::VFIO_PCI_MSIX_IRQ_INDEX,
            ..Default::default()
        };
        ioctl_struct(self.0.as_fd(), DEVICE_GET_IRQ_INFO, &mut info)?;
        let has_eventfd = info.flags & kernel::VFIO_IRQ_INFO_EVENTFD != 0;
        Ok(if has_eventfd { info.count as usize } else { 0 })
    }

    /// Connects the first MSI-X vectors with eventfds, one for each.
    pub(super) fn connect_msix(&self, events: &[BorrowedFd<'_>]) -> io::Result<()> {
        let flags = kernel::VFIO_IRQ_SET_DATA_EVENTFD | kernel::VFIO_IRQ_SET_ACTION_TRIGGER;
        let descriptors = events.iter().map(|event| event.as_raw_fd() as u32);
        self.set_irqs(irq_set(flags, events.len(), descriptors))
    }

    /// Disconnects all MSI-X vectors. Fails if none is connected.
    pub(super) fn disconnect_msix(&self) -> io::Result<()> {
        let flags = kernel::VFIO_IRQ_SET_DATA_NONE | kernel::VFIO_IRQ_SET_ACTION_TRIGGER;
        self.set_irqs(irq_set(flags, 0, std::iter::empty()))
    }

    fn set_irqs(&self, mut words: Vec<u32>) -> io::Result<()> {
        // SAFETY: the words are the structure and its array; its first field is their size.
        unsafe { ioctl(self.0.as_fd(), DEVICE_SET_IRQS, words.as_mut_ptr() as usize) }.map(drop)
    }

    pub(super) fn bar0(&self) -> io::Result<VfioRegion> {
        self.region(kernel::VFIO_PCI_BAR0_REGION_INDEX)
    }

    pub(super) fn bar2(&self) -> io::Result<VfioRegion> {
        self.region(kernel::VFIO_PCI_BAR2_REGION_INDEX)
    }

    pub(super) fn config_space(&self) -> io::Result<VfioRegion> {
        self.region(kernel::VFIO_PCI_CONFIG_REGION_INDEX)
    }

    fn region(&self, index: u32) -> io::Result<VfioRegion> {
        let argsz = size_of::<kernel::vfio_region_info>() as u32;
        let mut info = kernel::vfio_region_info { argsz, index, ..Default::default() };
        ioctl_struct(self.0.as_fd(), DEVICE_GET_REGION, &mut info)?;
        let can_mmap = info.flags & kernel::VFIO_REGION_INFO_FLAG_MMAP != 0;
        Ok(VfioRegion { offset: info.offset, bytes: info.size, can_mmap })
    }

    /// Reads 16 bits of the configuration space.
    pub(super) fn read16(&self, region: VfioRegion, at: u64) -> io::Result<u16> {
        let mut bytes = [0; 2];
        match pread(self.0.as_fd(), &mut bytes, region.offset + at)? {
            2 => Ok(u16::from_le_bytes(bytes)),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Writes 16 bits of the configuration space.
    pub(super) fn write16(&self, region: VfioRegion, at: u64, value: u16) -> io::Result<()> {
        match pwrite(self.0.as_fd(), &value.to_le_bytes(), region.offset + at)? {
            2 => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }
}

impl AsFd for DeviceFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn open(path: &str) -> io::Result<CloseOnFork> {
    // `std` opens files close-on-exec.
    CloseOnFork::new(OpenOptions::new().read(true).write(true).open(path)?.into())
}

/// An ioctl whose argument is a number.
fn ioctl_value(file: BorrowedFd<'_>, number: u8, argument: usize) -> io::Result<c_int> {
    // SAFETY: none of these ioctls takes a pointer.
    unsafe { ioctl(file, number, argument) }
}

/// An ioctl whose argument is a kernel structure that contains its size, or a descriptor.
fn ioctl_struct<T>(file: BorrowedFd<'_>, number: u8, argument: &mut T) -> io::Result<()> {
    // SAFETY: each number is used with its type; the kernel reads and writes the bytes of that
    // type, or as many as the structure's size field says. None of the ioctls changes a byte of the
    // memory that the structure refers to: they only pin and unpin its pages.
    unsafe { ioctl(file, number, std::ptr::from_mut(argument) as usize) }.map(drop)
}

/// # Safety
/// The argument must be of the type that the ioctl takes.
unsafe fn ioctl(file: BorrowedFd<'_>, number: u8, argument: usize) -> io::Result<c_int> {
    let number = opcode::none(kernel::VFIO_TYPE, kernel::VFIO_BASE as u8 + number) as c_ulong;
    // SAFETY: the caller guarantees the argument.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), number as _, argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The kernel's `vfio_irq_set` for the first `count` MSI-X vectors, with its array: five words, and
/// one for each descriptor.
fn irq_set(flags: u32, count: usize, descriptors: impl Iterator<Item = u32>) -> Vec<u32> {
    const HEADER_WORDS: usize = size_of::<kernel::vfio_irq_set>() / size_of::<u32>();
    const _: () = assert!(HEADER_WORDS == 5);
    let index = kernel::VFIO_PCI_MSIX_IRQ_INDEX;
    let mut words = vec![0, flags, index, 0, count as u32];
    words.extend(descriptors);
    words[0] = size_of_val(&words[..]) as u32;
    words
}

/// Finds the usable IOVA ranges in the kernel's description of an IOMMU.
fn parse_iova_ranges(info: &[u8]) -> Option<Vec<RangeInclusive<u64>>> {
    const FLAGS_AT: usize = 4;
    const FIRST_AT: usize = 16;
    const WANTED: u16 = kernel::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE as u16;
    const MAX_CAPABILITIES: usize = 16;
    let word = |at: usize| Some(u32::from_ne_bytes(info.get(at..at + 4)?.try_into().ok()?));
    let long = |at: usize| Some(u64::from_ne_bytes(info.get(at..at + 8)?.try_into().ok()?));
    if word(FLAGS_AT)? & kernel::VFIO_IOMMU_INFO_CAPS == 0 {
        return None;
    }
    let mut at = word(FIRST_AT)? as usize;
    for _ in 0..MAX_CAPABILITIES {
        if at == 0 {
            break;
        }
        let kind = u16::from_ne_bytes(info.get(at..at + 2)?.try_into().ok()?);
        if kind == WANTED {
            let (count, ranges) = (word(at + 8)? as usize, at + 16);
            let range = |index| {
                let at = ranges + 16 * index;
                Some(long(at)?..=long(at + 8)?)
            };
            return (0..count).map(range).collect();
        }
        at = word(at + 4)? as usize;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A description as the kernel writes it: the structure, a capability of another kind, and two
    /// ranges.
    fn iommu_info() -> Vec<u8> {
        let words: [u32; 20] = [
            80,
            kernel::VFIO_IOMMU_INFO_CAPS,
            0x1000,
            0,
            24,
            0, // end of the structure
            3,
            36,
            65_535, // another capability: kind 3 and the offset of the next
            1,
            0,
            2,
            0, // the ranges: kind 1, last capability, two ranges
            0,
            0,
            0xFEDF_FFFF,
            0,
            0xFEF0_0000,
            0,
            0xFFFF_FFFF,
        ];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.extend(0x7Fu32.to_ne_bytes());
        bytes
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn the_usable_addresses_are_found_behind_other_parts() {
        let ranges = parse_iova_ranges(&iommu_info()).unwrap();
        assert_eq!(ranges, [0..=0xFEDF_FFFF, 0xFEF0_0000..=0x7F_FFFF_FFFF]);
    }

    #[test]
    fn vectors_are_connected_by_the_structure_of_the_kernel() {
        let flags = kernel::VFIO_IRQ_SET_DATA_EVENTFD | kernel::VFIO_IRQ_SET_ACTION_TRIGGER;
        let words = irq_set(flags, 2, [7, 9].into_iter());
        // Size, flags, the index of MSI-X, the first vector, the number, and the descriptors.
        assert_eq!(words, [28, 0x24, 2, 0, 2, 7, 9]);
        assert_eq!(irq_set(0x21, 0, std::iter::empty()), [20, 0x21, 2, 0, 0]);
    }

    #[test]
    fn what_is_cut_short_or_runs_in_circles_is_not_believed() {
        for bytes in 0..iommu_info().len() {
            assert_eq!(parse_iova_ranges(&iommu_info()[..bytes]), None, "{bytes}");
        }
        let mut circle = iommu_info();
        circle[28..32].copy_from_slice(&24u32.to_ne_bytes());
        assert_eq!(parse_iova_ranges(&circle), None);
    }
}
