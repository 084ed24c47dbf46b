//! A set of mappings, and the devices that share it: what is mapped for one is mapped for all.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::addresses::Addresses;
use super::calls::{Container, Group};
use super::error::{OpenError, refused};
use super::pci;
use crate::device::Direction;
use crate::pages::page_bytes;

/// The mappings. When the last device is gone, all of them are ended.
#[derive(Debug)]
pub(super) struct Space {
    addresses: Mutex<Addresses>,
    groups: Mutex<BTreeMap<u32, Arc<Group>>>,
    container: Container,
}

impl Space {
    /// An empty set, for devices of this group and others.
    pub(super) fn of(facts: &pci::Group) -> Result<Self, OpenError> {
        let container = Container::open().map_err(no_container)?;
        if !container.has_mappings() {
            return Err(OpenError::NoVfio);
        }
        let group = open_group(&container, facts)?;
        container.begin().map_err(|error| match error.raw_os_error() {
            Some(libc::EPERM) => OpenError::UncheckedInterrupts,
            _ => refused("an empty set of mappings")(error),
        })?;
        let usable = container.usable().map_err(refused("the usable addresses"))?;
        let addresses = Mutex::new(Addresses::new(&usable, page_bytes() as u64));
        let groups = Mutex::new(BTreeMap::from([(facts.number, group)]));
        Ok(Self { addresses, groups, container })
    }

    /// A group whose devices share the mappings; opened when it is first asked for.
    pub(super) fn group(&self, facts: &pci::Group) -> Result<Arc<Group>, OpenError> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(group) = groups.get(&facts.number) {
            return Ok(group.clone());
        }
        let group = open_group(&self.container, facts)?;
        groups.insert(facts.number, group.clone());
        Ok(group)
    }

    fn addresses(&self) -> MutexGuard<'_, Addresses> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps memory, and says where.
    pub(super) fn map(&self, start: usize, bytes: u64, direction: Direction) -> io::Result<u64> {
        let taken = self.addresses().take(bytes, start as u64);
        let at = taken.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSPC))?;
        if let Err(error) = self.container.map(at, start, bytes, direction) {
            let mut addresses = self.addresses();
            addresses.end(at);
            addresses.give_back(at, bytes);
            return Err(error);
        }
        Ok(at)
    }

    /// Ends a mapping. Returns whether the kernel did; if not, its addresses are never used again.
    pub(super) fn unmap(&self, start: u64, bytes: u64) -> bool {
        let taken = self.addresses().end(start);
        assert_eq!(taken, Some(bytes), "{start:#x} is not what a mapping was given");
        let is_ended = self.container.unmap(start, bytes).is_ok();
        if is_ended {
            self.addresses().give_back(start, bytes);
        }
        is_ended
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        // The devices are gone. In a forked child the lock may be held for ever, and the number of the
        // container be another file's.
        if !self.container.is_ours() {
            return;
        }
        let taken: Vec<(u64, u64)> = self.addresses().taken().collect();
        for (start, bytes) in taken {
            let _ = self.container.unmap(start, bytes);
        }
    }
}

fn open_group(container: &Container, facts: &pci::Group) -> Result<Arc<Group>, OpenError> {
    let number = facts.number;
    let group = Group::open(number).map_err(|error| no_group(number, error))?;
    if !group.is_viable().map_err(refused("the state of the group"))? {
        let others = facts.companions.clone();
        return Err(OpenError::GroupNotViable { group: number, others });
    }
    group.join(container).map_err(refused("putting the group into a container"))?;
    Ok(Arc::new(group))
}

fn no_container(error: io::Error) -> OpenError {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => OpenError::NoVfio,
        Some(libc::EACCES | libc::EPERM) => {
            OpenError::NoPermission { file: "/dev/vfio/vfio".to_owned() }
        }
        _ => refused("opening /dev/vfio/vfio")(error),
    }
}

fn no_group(group: u32, error: io::Error) -> OpenError {
    match error.raw_os_error() {
        Some(libc::EBUSY) => OpenError::Busy { group },
        Some(libc::EACCES | libc::EPERM) => {
            OpenError::NoPermission { file: format!("/dev/vfio/{group}") }
        }
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => OpenError::NoVfio,
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
