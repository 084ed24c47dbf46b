//! The memory that the device reaches: pages under addresses of its own.
//!
//! Every page has an address that is nobody's neighbour and comes back only when all others were
//! given out, so that whoever goes past the end of a page, or keeps an address for too long, meets
//! nothing. In contiguous memory this holds for mappings instead of pages.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, PoisonError};

use memferry_sys::device::Direction;
use memferry_sys::pages::page_bytes;
use memferry_sys::sync::lock;

/// The older devices know 40 bits of addresses, so that is what these have. One bit keeps neighbours
/// apart, and the rest is what there is to give out.
const ADDRESS_BITS: u32 = 40;

/// The memory of a device.
#[derive(Debug)]
pub(super) struct Memory {
    /// Whether the pages of a mapping lie one behind the other.
    pub(super) is_contiguous: bool,
    table: Mutex<Table>,
    /// Rung when the device lets go of memory.
    released: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    /// Where each page really is, by the number of its page of addresses.
    pages: HashMap<u64, Page>,
    /// Addresses that the device is working on: first and end.
    held: Vec<(u64, u64)>,
    /// How many addresses were given out so far.
    given: u64,
}

#[derive(Debug, Clone, Copy)]
struct Page {
    host: usize,
    may_write: bool,
}

/// Why the device cannot use an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Miss {
    NotMapped,
    ReadOnly,
}

/// Memory that the device is working on. No unmapping of it ends before this is dropped.
#[derive(Debug)]
pub(super) struct Hold<'a> {
    memory: &'a Memory,
    range: (u64, u64),
    /// Where the memory really is.
    pub(super) host: usize,
}

impl Memory {
    pub(super) fn new(is_contiguous: bool) -> Self {
        Self { is_contiguous, table: Mutex::default(), released: Condvar::new() }
    }

    /// Gives addresses to the pages from `start` on, and says whether that is within the limit.
    pub(super) fn map(
        &self,
        start: usize,
        addresses: &mut [u64],
        direction: Direction,
        most_pages: usize,
    ) -> bool {
        let mut table = lock(&self.table);
        if table.pages.len() + addresses.len() > most_pages {
            return false;
        }
        let may_write = direction == Direction::Writes;
        let first = if self.is_contiguous { Some(table.free_run(addresses.len())) } else { None };
        for (index, address) in addresses.iter_mut().enumerate() {
            let number = first.map_or_else(|| table.free_page(), |first| first + index as u64);
            let host = start + index * page_bytes();
            table.pages.insert(number, Page { host, may_write });
            *address = number * page_bytes() as u64;
        }
        true
    }

    /// Takes addresses away, waits until the device has let go of them, and says which were none.
    pub(super) fn unmap(&self, addresses: &[u64]) -> Vec<u64> {
        let page = page_bytes() as u64;
        let mut table = lock(&self.table);
        let mut unknown = Vec::new();
        for &address in addresses {
            if address % page != 0 || table.pages.remove(&(address / page)).is_none() {
                unknown.push(address);
            }
        }
        let is_held = |table: &Table| {
            let within = |&address: &u64| table.held.iter().any(|held| overlap(*held, address));
            addresses.iter().any(within)
        };
        while is_held(&table) {
            table = self.released.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
        unknown
    }

    /// How many pages are mapped.
    pub(super) fn mapped_pages(&self) -> usize {
        lock(&self.table).pages.len()
    }

    /// Finds memory by its addresses and holds it.
    pub(super) fn hold(&self, address: u64, bytes: u64, writes: bool) -> Result<Hold<'_>, Miss> {
        let page = page_bytes() as u64;
        let end = address.checked_add(bytes).ok_or(Miss::NotMapped)?;
        let mut table = lock(&self.table);
        let mut host = None;
        for number in address / page..end.div_ceil(page) {
            let found = *table.pages.get(&number).ok_or(Miss::NotMapped)?;
            if writes && !found.may_write {
                return Err(Miss::ReadOnly);
            }
            // Neighbours are of one mapping, so memory is one piece if its addresses are.
            host = host.or(Some(found.host + (address % page) as usize));
        }
        let host = host.ok_or(Miss::NotMapped)?;
        table.held.push((address, end));
        Ok(Hold { memory: self, range: (address, end), host })
    }
}

fn overlap((start, end): (u64, u64), page: u64) -> bool {
    start < page + page_bytes() as u64 && page < end
}

impl Table {
    /// The number of a page of addresses that nobody has, with nobody beside it.
    fn free_page(&mut self) -> u64 {
        loop {
            let number = 2 * shuffled(self.given) + 1;
            self.given += 1;
            if !self.pages.contains_key(&number) {
                return number;
            }
        }
    }

    /// The same for pages one behind the other.
    fn free_run(&mut self, pages: usize) -> u64 {
        let pages = pages as u64;
        let most = 2 << index_bits();
        loop {
            let first = 1 + self.given % (most - pages - 1);
            self.given = first + pages;
            if !(first - 1..=first + pages).any(|number| self.pages.contains_key(&number)) {
                return first;
            }
        }
    }
}

fn index_bits() -> u32 {
    ADDRESS_BITS - 1 - page_bytes().trailing_zeros()
}

/// Numbers in an order that looks like none, each once until all were there.
fn shuffled(given: u64) -> u64 {
    let mask = (1 << index_bits()) - 1;
    let mut number = given & mask;
    // Each step can be undone, so no two numbers become one.
    for _ in 0..2 {
        number = number.wrapping_mul(0x9E37_79B1) & mask;
        number ^= number >> 11;
    }
    number.wrapping_add(0x0123_4567) & mask
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        let mut table = lock(&self.memory.table);
        if let Some(at) = table.held.iter().position(|held| *held == self.range) {
            table.held.swap_remove(at);
        }
        drop(table);
        self.memory.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn map(memory: &Memory, pages: usize) -> Vec<u64> {
        let mut addresses = vec![0; pages];
        assert!(memory.map(page_bytes(), &mut addresses, Direction::Writes, usize::MAX));
        addresses
    }

    #[test]
    fn no_page_has_a_neighbour_and_no_address_comes_back_soon() {
        let (memory, page) = (Memory::new(false), page_bytes() as u64);
        let mut seen = HashSet::new();
        for _ in 0..100 {
            let addresses = map(&memory, 100);
            for &address in &addresses {
                assert!(address != 0 && address < 1 << ADDRESS_BITS && address % page == 0);
                assert!(seen.insert(address), "{address:#x} came back");
            }
            assert!(memory.unmap(&addresses).is_empty());
        }
        assert!(seen.iter().all(|address| !seen.contains(&(address + page))));
        assert_eq!(memory.mapped_pages(), 0);
    }

    #[test]
    fn pages_of_a_contiguous_mapping_are_neighbours_and_mappings_are_not() {
        let (memory, page) = (Memory::new(true), page_bytes() as u64);
        let (one, other) = (map(&memory, 3), map(&memory, 2));
        assert_eq!(one, [one[0], one[0] + page, one[0] + 2 * page]);
        assert!(memory.hold(one[0] + 5, 3 * page - 5, true).is_ok());
        assert!(memory.hold(one[0] + 5, 3 * page - 4, true).is_err());
        assert!(!other.contains(&(one[2] + page)));
    }

    #[test]
    fn memory_is_found_inside_a_page_and_not_past_its_end() {
        let (memory, page) = (Memory::new(false), page_bytes() as u64);
        let addresses = map(&memory, 2);
        assert_eq!(memory.hold(addresses[1] + 7, 9, true).unwrap().host, 2 * page_bytes() + 7);
        assert_eq!(memory.hold(addresses[0], page + 1, false).unwrap_err(), Miss::NotMapped);
        assert_eq!(memory.hold(addresses[0] + page - 1, 2, false).unwrap_err(), Miss::NotMapped);
        assert_eq!(memory.hold(u64::MAX, 2, false).unwrap_err(), Miss::NotMapped);
        memory.unmap(&addresses);
        assert_eq!(memory.hold(addresses[0], 1, false).unwrap_err(), Miss::NotMapped);
    }

    #[test]
    fn memory_for_reading_is_not_written() {
        let memory = Memory::new(false);
        let mut addresses = [0];
        assert!(memory.map(page_bytes(), &mut addresses, Direction::Reads, 1));
        assert!(memory.hold(addresses[0], 1, false).is_ok());
        assert_eq!(memory.hold(addresses[0], 1, true).unwrap_err(), Miss::ReadOnly);
        assert!(!memory.map(page_bytes(), &mut [0], Direction::Reads, 1));
    }

    #[test]
    fn unmapping_waits_until_the_device_lets_go() {
        let memory = Memory::new(false);
        let addresses = map(&memory, 1);
        let hold = memory.hold(addresses[0] + 100, 10, true).unwrap();
        std::thread::scope(|scope| {
            let unmapping = scope.spawn(|| memory.unmap(&addresses));
            while memory.mapped_pages() > 0 {
                std::thread::yield_now();
            }
            // From here on nobody finds the page, and the one who has it keeps it.
            assert!(memory.hold(addresses[0], 1, false).is_err());
            assert!(!unmapping.is_finished());
            drop(hold);
            assert!(unmapping.join().unwrap().is_empty());
        });
    }

    #[test]
    fn what_is_not_mapped_is_told() {
        let memory = Memory::new(false);
        let addresses = map(&memory, 1);
        let wrong = [addresses[0] + 1, addresses[0], 0x1000];
        assert_eq!(memory.unmap(&wrong), [addresses[0] + 1, 0x1000]);
    }
}
