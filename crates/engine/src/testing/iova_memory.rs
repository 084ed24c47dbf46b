//! The memory that the device can access: pages at IOVAs of their own.
//!
//! No two pages have adjacent addresses, and an address is reused only after all others were
//! allocated, so that an access past the end of a page, or to a stale address, finds nothing. In
//! contiguous memory this holds for mappings instead of pages.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, PoisonError};

use memferry_sys::device::DmaDirection;
use memferry_sys::pages::page_bytes;
use memferry_sys::sync::lock;

/// Older devices have 40-bit addresses, and so has the model. One bit keeps pages apart, and the
/// others are allocated.
const ADDRESS_BITS: u32 = 40;

/// The memory of a device.
#[derive(Debug)]
pub(in crate::testing) struct IovaMemory {
    /// Whether the pages of a mapping are contiguous.
    pub(in crate::testing) is_contiguous: bool,
    table: Mutex<DmaPageTable>,
    /// Notified when the device releases memory.
    released: Condvar,
}

#[derive(Debug, Default)]
struct DmaPageTable {
    /// The host address of each page, by its page number.
    pages: HashMap<u64, Page>,
    /// Addresses that the device accesses now: start and end.
    in_use: Vec<(u64, u64)>,
    /// The number of threads that wait for the device to release memory.
    waiting: usize,
    /// The number of addresses allocated so far.
    allocated: u64,
}

#[derive(Debug, Clone, Copy)]
struct Page {
    host: usize,
    may_write: bool,
}

/// The reason why the device cannot use an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::testing) enum DmaFault {
    NotMapped,
    ReadOnly,
}

/// Memory that the device accesses now. `unmap` waits until this is dropped.
#[derive(Debug)]
pub(in crate::testing) struct DmaHold<'a> {
    memory: &'a IovaMemory,
    range: (u64, u64),
    /// The host address.
    pub(in crate::testing) host: usize,
}

impl IovaMemory {
    pub(in crate::testing) fn new(is_contiguous: bool) -> Self {
        Self { is_contiguous, table: Mutex::default(), released: Condvar::new() }
    }

    /// Allocates addresses for the pages from `start` on; returns whether that is within the limit.
    pub(in crate::testing) fn map(
        &self,
        start: usize,
        addresses: &mut [u64],
        direction: DmaDirection,
        max_pages: usize,
    ) -> bool {
        let mut table = lock(&self.table);
        if table.pages.len() + addresses.len() > max_pages {
            return false;
        }
        let may_write = direction == DmaDirection::Bidirectional;
        let first = if self.is_contiguous { Some(table.free_run(addresses.len())) } else { None };
        for (index, address) in addresses.iter_mut().enumerate() {
            let number = first.map_or_else(|| table.free_page(), |first| first + index as u64);
            let host = start + index * page_bytes();
            table.pages.insert(number, Page { host, may_write });
            *address = number * page_bytes() as u64;
        }
        true
    }

    /// Frees addresses, waits until the device has released them, and returns those that were not
    /// mapped.
    pub(in crate::testing) fn unmap(&self, addresses: &[u64]) -> Vec<u64> {
        let page = page_bytes() as u64;
        let mut table = lock(&self.table);
        let mut unknown = Vec::new();
        for &address in addresses {
            if address % page != 0 || table.pages.remove(&(address / page)).is_none() {
                unknown.push(address);
            }
        }
        let is_held = |table: &DmaPageTable| {
            let within =
                |&address: &u64| table.in_use.iter().any(|in_use| overlap(*in_use, address));
            addresses.iter().any(within)
        };
        while is_held(&table) {
            table.waiting += 1;
            table = self.released.wait(table).unwrap_or_else(PoisonError::into_inner);
            table.waiting -= 1;
        }
        unknown
    }

    /// The number of mapped pages.
    pub(in crate::testing) fn mapped_pages(&self) -> usize {
        lock(&self.table).pages.len()
    }

    /// Finds memory by its addresses and holds it.
    pub(in crate::testing) fn hold(
        &self,
        address: u64,
        bytes: u64,
        writes: bool,
    ) -> Result<DmaHold<'_>, DmaFault> {
        let page = page_bytes() as u64;
        let end = address.checked_add(bytes).ok_or(DmaFault::NotMapped)?;
        let mut table = lock(&self.table);
        let mut host = None;
        for number in address / page..end.div_ceil(page) {
            let mapped = *table.pages.get(&number).ok_or(DmaFault::NotMapped)?;
            if writes && !mapped.may_write {
                return Err(DmaFault::ReadOnly);
            }
            // Adjacent pages belong to one mapping, so memory is contiguous if its addresses are.
            host = host.or(Some(mapped.host + (address % page) as usize));
        }
        let host = host.ok_or(DmaFault::NotMapped)?;
        table.in_use.push((address, end));
        Ok(DmaHold { memory: self, range: (address, end), host })
    }
}

fn overlap((start, end): (u64, u64), page: u64) -> bool {
    start < page + page_bytes() as u64 && page < end
}

impl DmaPageTable {
    /// Allocates a free page number without a neighbour.
    fn free_page(&mut self) -> u64 {
        loop {
            let number = 2 * shuffled(self.allocated) + 1;
            self.allocated += 1;
            if !self.pages.contains_key(&number) {
                return number;
            }
        }
    }

    /// Allocates a run of contiguous free page numbers without neighbours.
    fn free_run(&mut self, pages: usize) -> u64 {
        let pages = pages as u64;
        let max = 2 << index_bits();
        loop {
            let first = 1 + self.allocated % (max - pages - 1);
            self.allocated = first + pages;
            if !(first - 1..=first + pages).any(|number| self.pages.contains_key(&number)) {
                return first;
            }
        }
    }
}

fn index_bits() -> u32 {
    ADDRESS_BITS - 1 - page_bytes().trailing_zeros()
}

/// A permutation of the numbers that looks random.
fn shuffled(index: u64) -> u64 {
    let mask = (1 << index_bits()) - 1;
    let mut number = index & mask;
    // Each step is invertible, so the result is a permutation.
    for _ in 0..2 {
        number = number.wrapping_mul(0x9E37_79B1) & mask;
        number ^= number >> 11;
    }
    number.wrapping_add(0x0123_4567) & mask
}

impl Drop for DmaHold<'_> {
    fn drop(&mut self) {
        let mut table = lock(&self.memory.table);
        if let Some(at) = table.in_use.iter().position(|range| *range == self.range) {
            table.in_use.swap_remove(at);
        }
        // The notification is a system call, whoever waits.
        let is_awaited = table.waiting > 0;
        drop(table);
        if is_awaited {
            self.memory.released.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn map(memory: &IovaMemory, pages: usize) -> Vec<u64> {
        let mut addresses = vec![0; pages];
        assert!(memory.map(page_bytes(), &mut addresses, DmaDirection::Bidirectional, usize::MAX));
        addresses
    }

    #[test]
    fn no_page_has_a_neighbour_and_no_address_comes_back_soon() {
        let (memory, page) = (IovaMemory::new(false), page_bytes() as u64);
        let mut seen = HashSet::new();
        for _ in 0..100 {
            let addresses = map(&memory, 100);
            for &address in &addresses {
                assert!(address != 0 && address < 1 << ADDRESS_BITS && address % page == 0);
                assert!(seen.insert(address), "{address:#x} was reused");
            }
            assert!(memory.unmap(&addresses).is_empty());
        }
        assert!(seen.iter().all(|address| !seen.contains(&(address + page))));
        assert_eq!(memory.mapped_pages(), 0);
    }

    #[test]
    fn pages_of_a_contiguous_mapping_are_neighbours_and_mappings_are_not() {
        let (memory, page) = (IovaMemory::new(true), page_bytes() as u64);
        let (one, other) = (map(&memory, 3), map(&memory, 2));
        assert_eq!(one, [one[0], one[0] + page, one[0] + 2 * page]);
        assert!(memory.hold(one[0] + 5, 3 * page - 5, true).is_ok());
        assert!(memory.hold(one[0] + 5, 3 * page - 4, true).is_err());
        assert!(!other.contains(&(one[2] + page)));
    }

    #[test]
    fn memory_is_found_inside_a_page_and_not_past_its_end() {
        let (memory, page) = (IovaMemory::new(false), page_bytes() as u64);
        let addresses = map(&memory, 2);
        assert_eq!(memory.hold(addresses[1] + 7, 9, true).unwrap().host, 2 * page_bytes() + 7);
        assert_eq!(memory.hold(addresses[0], page + 1, false).unwrap_err(), DmaFault::NotMapped);
        assert_eq!(
            memory.hold(addresses[0] + page - 1, 2, false).unwrap_err(),
            DmaFault::NotMapped
        );
        assert_eq!(memory.hold(u64::MAX, 2, false).unwrap_err(), DmaFault::NotMapped);
        memory.unmap(&addresses);
        assert_eq!(memory.hold(addresses[0], 1, false).unwrap_err(), DmaFault::NotMapped);
    }

    #[test]
    fn memory_for_reading_is_not_written() {
        let memory = IovaMemory::new(false);
        let mut addresses = [0];
        assert!(memory.map(page_bytes(), &mut addresses, DmaDirection::ToDevice, 1));
        assert!(memory.hold(addresses[0], 1, false).is_ok());
        assert_eq!(memory.hold(addresses[0], 1, true).unwrap_err(), DmaFault::ReadOnly);
        assert!(!memory.map(page_bytes(), &mut [0], DmaDirection::ToDevice, 1));
    }

    #[test]
    fn unmapping_waits_until_the_device_lets_go() {
        let memory = IovaMemory::new(false);
        let addresses = map(&memory, 1);
        let hold = memory.hold(addresses[0] + 100, 10, true).unwrap();
        std::thread::scope(|scope| {
            let unmapping = scope.spawn(|| memory.unmap(&addresses));
            while memory.mapped_pages() > 0 {
                std::thread::yield_now();
            }
            // From here on the page cannot be found, and the holder keeps it.
            assert!(memory.hold(addresses[0], 1, false).is_err());
            assert!(!unmapping.is_finished());
            drop(hold);
            assert!(unmapping.join().unwrap().is_empty());
        });
    }

    #[test]
    fn what_is_not_mapped_is_told() {
        let memory = IovaMemory::new(false);
        let addresses = map(&memory, 1);
        let wrong = [addresses[0] + 1, addresses[0], 0x1000];
        assert_eq!(memory.unmap(&wrong), [addresses[0] + 1, 0x1000]);
    }
}
