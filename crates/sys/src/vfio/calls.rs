//! The calls of VFIO, one method each, on the three files that they are made on: the container, which
//! is a set of mappings, the group, and the device. Forked children close all three.

use std::ffi::{CString, c_int, c_ulong};
use std::fs::OpenOptions;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::{pread, pwrite};
use rustix::ioctl::opcode;
use vfio_bindings::bindings::vfio as kernel;

use crate::device::Direction;
use crate::fork::ParentOnly;

const CHECK_EXTENSION: u8 = 1;
const SET_IOMMU: u8 = 2;
const GROUP_GET_STATUS: u8 = 3;
const GROUP_SET_CONTAINER: u8 = 4;
const GROUP_GET_DEVICE: u8 = 6;
const DEVICE_GET_INFO: u8 = 7;
const DEVICE_GET_REGION: u8 = 8;
const DEVICE_RESET: u8 = 11;
const IOMMU_GET_INFO: u8 = 12;
const IOMMU_MAP: u8 = 13;
const IOMMU_UNMAP: u8 = 14;

/// A set of mappings.
#[derive(Debug)]
pub(super) struct Container(ParentOnly);

impl Container {
    pub(super) fn open() -> io::Result<Self> {
        open("/dev/vfio/vfio").map(Self)
    }

    /// Whether this process opened it.
    pub(super) fn is_ours(&self) -> bool {
        self.0.is_ours()
    }

    /// Whether the kernel has the kind of mappings that are used here.
    pub(super) fn has_mappings(&self) -> bool {
        let kind = kernel::VFIO_TYPE1v2_IOMMU as usize;
        plain(self.0.as_fd(), CHECK_EXTENSION, kind).is_ok_and(|answer| answer == 1)
    }

    /// Begins with no mappings. A group must be in the container.
    pub(super) fn begin(&self) -> io::Result<()> {
        plain(self.0.as_fd(), SET_IOMMU, kernel::VFIO_TYPE1v2_IOMMU as usize).map(drop)
    }

    /// The addresses that can be used, first and last; none where the kernel does not tell.
    pub(super) fn usable(&self) -> io::Result<Vec<RangeInclusive<u64>>> {
        let mut info = kernel::vfio_iommu_type1_info {
            argsz: size_of::<kernel::vfio_iommu_type1_info>() as u32,
            ..Default::default()
        };
        with(self.0.as_fd(), IOMMU_GET_INFO, &mut info)?;
        // Words, so that the structures in it are aligned.
        let mut words = vec![0u64; (info.argsz as usize).div_ceil(8)];
        let Some(first) = words.first_mut() else { return Ok(Vec::new()) };
        let mut size = [0; 8];
        size[..4].copy_from_slice(&info.argsz.to_ne_bytes());
        *first = u64::from_ne_bytes(size);
        // SAFETY: the kernel writes at most the bytes that the first field says, which the vector has.
        unsafe { call(self.0.as_fd(), IOMMU_GET_INFO, words.as_mut_ptr() as usize) }?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        Ok(usable_in(&bytes).unwrap_or_default())
    }

    /// Pins memory, and shows it to the device at an address. What is there is not changed by that.
    pub(super) fn map(
        &self,
        at: u64,
        memory: usize,
        bytes: u64,
        direction: Direction,
    ) -> io::Result<()> {
        let flags = match direction {
            Direction::Reads => kernel::VFIO_DMA_MAP_FLAG_READ,
            Direction::Writes => kernel::VFIO_DMA_MAP_FLAG_READ | kernel::VFIO_DMA_MAP_FLAG_WRITE,
        };
        let mut map = kernel::vfio_iommu_type1_dma_map {
            argsz: size_of::<kernel::vfio_iommu_type1_dma_map>() as u32,
            flags,
            vaddr: memory as u64,
            iova: at,
            size: bytes,
        };
        with(self.0.as_fd(), IOMMU_MAP, &mut map)
    }

    /// Ends a mapping. Its pages are the device's no more when this has returned.
    pub(super) fn unmap(&self, at: u64, bytes: u64) -> io::Result<()> {
        let mut unmap = kernel::vfio_iommu_type1_dma_unmap {
            argsz: size_of::<kernel::vfio_iommu_type1_dma_unmap>() as u32,
            iova: at,
            size: bytes,
            ..Default::default()
        };
        with(self.0.as_fd(), IOMMU_UNMAP, &mut unmap)?;
        let whole = unmap.size == bytes;
        whole.then_some(()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
    }
}

/// A group of devices.
#[derive(Debug)]
pub(super) struct Group(ParentOnly);

impl Group {
    pub(super) fn open(number: u32) -> io::Result<Self> {
        open(&format!("/dev/vfio/{number}")).map(Self)
    }

    /// Whether no driver of the kernel has a device of the group.
    pub(super) fn is_viable(&self) -> io::Result<bool> {
        let argsz = size_of::<kernel::vfio_group_status>() as u32;
        let mut status = kernel::vfio_group_status { argsz, flags: 0 };
        with(self.0.as_fd(), GROUP_GET_STATUS, &mut status)?;
        Ok(status.flags & kernel::VFIO_GROUP_FLAGS_VIABLE != 0)
    }

    pub(super) fn join(&self, container: &Container) -> io::Result<()> {
        let mut descriptor: c_int = container.0.as_fd().as_raw_fd();
        with(self.0.as_fd(), GROUP_SET_CONTAINER, &mut descriptor)
    }

    /// Opens a device of the group, which the kernel resets.
    pub(super) fn device(&self, address: &str) -> io::Result<DeviceFile> {
        let name = CString::new(address)?;
        // SAFETY: the argument is a text with its end, which the kernel only reads.
        let descriptor = unsafe { call(self.0.as_fd(), GROUP_GET_DEVICE, name.as_ptr() as usize) }?;
        // SAFETY: the kernel just made this descriptor for us, closed on exec.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        ParentOnly::new(descriptor).map(DeviceFile)
    }
}

/// A device.
#[derive(Debug)]
pub(super) struct DeviceFile(ParentOnly);

/// A part of a device: its registers, or its configuration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Region {
    /// Where it begins in the device's file.
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) can_be_mapped: bool,
}

impl DeviceFile {
    /// Whether this process opened it.
    #[inline]
    pub(super) fn is_ours(&self) -> bool {
        self.0.is_ours()
    }

    /// Whether the kernel knows a way to reset it.
    pub(super) fn can_reset(&self) -> io::Result<bool> {
        let argsz = size_of::<kernel::vfio_device_info>() as u32;
        let mut info = kernel::vfio_device_info { argsz, ..Default::default() };
        with(self.0.as_fd(), DEVICE_GET_INFO, &mut info)?;
        Ok(info.flags & kernel::VFIO_DEVICE_FLAGS_RESET != 0)
    }

    pub(super) fn reset(&self) -> io::Result<()> {
        plain(self.0.as_fd(), DEVICE_RESET, 0).map(drop)
    }

    pub(super) fn registers(&self) -> io::Result<Region> {
        self.region(kernel::VFIO_PCI_BAR0_REGION_INDEX)
    }

    pub(super) fn configuration(&self) -> io::Result<Region> {
        self.region(kernel::VFIO_PCI_CONFIG_REGION_INDEX)
    }

    fn region(&self, index: u32) -> io::Result<Region> {
        let argsz = size_of::<kernel::vfio_region_info>() as u32;
        let mut info = kernel::vfio_region_info { argsz, index, ..Default::default() };
        with(self.0.as_fd(), DEVICE_GET_REGION, &mut info)?;
        let can_be_mapped = info.flags & kernel::VFIO_REGION_INFO_FLAG_MMAP != 0;
        Ok(Region { offset: info.offset, bytes: info.size, can_be_mapped })
    }

    /// Reads 16 bits of the configuration.
    pub(super) fn read16(&self, region: Region, at: u64) -> io::Result<u16> {
        let mut bytes = [0; 2];
        match pread(self.0.as_fd(), &mut bytes, region.offset + at)? {
            2 => Ok(u16::from_le_bytes(bytes)),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Writes 16 bits of the configuration.
    pub(super) fn write16(&self, region: Region, at: u64, value: u16) -> io::Result<()> {
        match pwrite(self.0.as_fd(), &value.to_le_bytes(), region.offset + at)? {
            2 => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }
}

impl AsFd for DeviceFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn open(path: &str) -> io::Result<ParentOnly> {
    // Files of the standard library are closed on exec.
    ParentOnly::new(OpenOptions::new().read(true).write(true).open(path)?.into())
}

/// A call whose argument is a number.
fn plain(file: BorrowedFd<'_>, number: u8, argument: usize) -> io::Result<c_int> {
    // SAFETY: the calls made this way take no pointer.
    unsafe { call(file, number, argument) }
}

/// A call whose argument is a structure of the kernel that says its own size, or a descriptor.
fn with<T>(file: BorrowedFd<'_>, number: u8, argument: &mut T) -> io::Result<()> {
    // SAFETY: each number is used with the type that belongs to it; the kernel reads and writes the
    // bytes of that type, or those that the type says it has. None of the calls changes the bytes of
    // memory that the type names: they pin pages and let them go.
    unsafe { call(file, number, std::ptr::from_mut(argument) as usize) }.map(drop)
}

/// # Safety
/// The argument must be what the call takes.
unsafe fn call(file: BorrowedFd<'_>, number: u8, argument: usize) -> io::Result<c_int> {
    let number = opcode::none(kernel::VFIO_TYPE, kernel::VFIO_BASE as u8 + number) as c_ulong;
    // SAFETY: the caller has seen to the argument.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), number as _, argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Looks for the usable addresses in what the kernel tells of an IOMMU.
fn usable_in(info: &[u8]) -> Option<Vec<RangeInclusive<u64>>> {
    const FLAGS_AT: usize = 4;
    const FIRST_AT: usize = 16;
    const WANTED: u16 = kernel::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE as u16;
    const MOST_PARTS: usize = 16;
    let word = |at: usize| Some(u32::from_ne_bytes(info.get(at..at + 4)?.try_into().ok()?));
    let long = |at: usize| Some(u64::from_ne_bytes(info.get(at..at + 8)?.try_into().ok()?));
    if word(FLAGS_AT)? & kernel::VFIO_IOMMU_INFO_CAPS == 0 {
        return None;
    }
    let mut at = word(FIRST_AT)? as usize;
    for _ in 0..MOST_PARTS {
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

    /// What a kernel writes: a structure, a part of another kind, and two ranges.
    fn told() -> Vec<u8> {
        let words: [u32; 20] = [
            80,
            kernel::VFIO_IOMMU_INFO_CAPS,
            0x1000,
            0,
            24,
            0, // the structure
            3,
            36,
            65_535, // another part: kind 3, and where the next one is
            1,
            0,
            2,
            0, // the ranges: kind 1, the last part, two of them
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
        let ranges = usable_in(&told()).unwrap();
        assert_eq!(ranges, [0..=0xFEDF_FFFF, 0xFEF0_0000..=0x7F_FFFF_FFFF]);
    }

    #[test]
    fn what_is_cut_short_or_runs_in_circles_is_not_believed() {
        for bytes in 0..told().len() {
            assert_eq!(usable_in(&told()[..bytes]), None, "{bytes}");
        }
        let mut circle = told();
        circle[28..32].copy_from_slice(&24u32.to_ne_bytes());
        assert_eq!(usable_in(&circle), None);
    }
}
