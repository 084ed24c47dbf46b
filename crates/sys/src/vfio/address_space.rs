//! The DMA address space of devices that share a container: a mapping for one is a mapping for all.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::{VfioError, refused};
use super::ioctl::{ContainerFd, GroupFd};
use super::iova::IovaAllocator;
use super::pci;
use crate::device::DmaDirection;
use crate::pages::page_bytes;

/// The mappings. All are removed after the last device is closed.
#[derive(Debug)]
pub(super) struct DmaAddressSpace {
    iovas: Mutex<IovaAllocator>,
    groups: Mutex<BTreeMap<u32, Arc<GroupFd>>>,
    container: ContainerFd,
}

impl DmaAddressSpace {
    /// Creates an empty address space with one group.
    pub(super) fn new(info: &pci::IommuGroup) -> Result<Self, VfioError> {
        let container = ContainerFd::open().map_err(no_container)?;
        if !container.supports_type1() {
            return Err(VfioError::NoVfio);
        }
        let group = open_group(&container, info)?;
        container.set_iommu().map_err(|error| match error.raw_os_error() {
            Some(libc::EPERM) => VfioError::NoInterruptRemapping,
            _ => refused("setting the IOMMU type")(error),
        })?;
        let usable = container.iova_ranges().map_err(refused("reading the usable IOVA ranges"))?;
        let addresses = Mutex::new(IovaAllocator::new(&usable, page_bytes() as u64));
        let groups = Mutex::new(BTreeMap::from([(info.number, group)]));
        Ok(Self { iovas: addresses, groups, container })
    }

    /// Adds a group to the address space, or returns it if it was added before.
    pub(super) fn group(&self, info: &pci::IommuGroup) -> Result<Arc<GroupFd>, VfioError> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(group) = groups.get(&info.number) {
            return Ok(group.clone());
        }
        let group = open_group(&self.container, info)?;
        groups.insert(info.number, group.clone());
        Ok(group)
    }

    fn iovas(&self) -> MutexGuard<'_, IovaAllocator> {
        self.iovas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps memory and returns its IOVA.
    pub(super) fn map(&self, start: usize, bytes: u64, direction: DmaDirection) -> io::Result<u64> {
        let allocated = self.iovas().allocate(bytes, start as u64);
        let at = allocated.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSPC))?;
        if let Err(error) = self.container.map(at, start, bytes, direction) {
            let mut addresses = self.iovas();
            addresses.retire(at);
            addresses.free(at, bytes);
            return Err(error);
        }
        Ok(at)
    }

    /// Removes a mapping. Returns whether the kernel succeeded; if not, its addresses are never
    /// reused.
    pub(super) fn unmap(&self, start: u64, bytes: u64) -> bool {
        let allocated = self.iovas().retire(start);
        assert_eq!(
            allocated,
            Some(bytes),
            "{start:#x} is not the start of a mapping of {bytes} bytes"
        );
        let is_unmapped = self.container.unmap(start, bytes).is_ok();
        if is_unmapped {
            self.iovas().free(start, bytes);
        }
        is_unmapped
    }
}

impl Drop for DmaAddressSpace {
    fn drop(&mut self) {
        // All devices are closed. In a forked child the lock may be held forever, and the
        // descriptor number may refer to another file.
        if !self.container.is_owner_process() {
            return;
        }
        let allocated: Vec<(u64, u64)> = self.iovas().allocated().collect();
        for (start, bytes) in allocated {
            let _ = self.container.unmap(start, bytes);
        }
    }
}

fn open_group(container: &ContainerFd, info: &pci::IommuGroup) -> Result<Arc<GroupFd>, VfioError> {
    let number = info.number;
    let group = GroupFd::open(number).map_err(|error| no_group(number, error))?;
    if !group.is_viable().map_err(refused("reading the status of the group"))? {
        let others = info.other_members.clone();
        return Err(VfioError::GroupNotViable { group: number, other_members: others });
    }
    group.set_container(container).map_err(refused("adding the group to the container"))?;
    Ok(Arc::new(group))
}

fn no_container(error: io::Error) -> VfioError {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => VfioError::NoVfio,
        Some(libc::EACCES | libc::EPERM) => {
            VfioError::NoPermission { file: "/dev/vfio/vfio".to_owned() }
        }
        _ => refused("opening /dev/vfio/vfio")(error),
    }
}

fn no_group(group: u32, error: io::Error) -> VfioError {
    match error.raw_os_error() {
        Some(libc::EBUSY) => VfioError::Busy { group },
        Some(libc::EACCES | libc::EPERM) => {
            VfioError::NoPermission { file: format!("/dev/vfio/{group}") }
        }
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => VfioError::NoVfio,
        _ => refused("opening the group")(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_of_a_group_becomes_something_to_do() {
        let says = |code| no_group(7, io::Error::from_raw_os_error(code)).to_string();
        assert!(says(libc::EBUSY).contains("fuser -v /dev/vfio/7"));
        assert!(says(libc::EACCES).contains("sudo chown $USER /dev/vfio/7"));
        assert!(says(libc::ENOENT).contains("sudo modprobe vfio-pci"));
        assert!(says(libc::EIO).contains("dmesg"));
    }
}
