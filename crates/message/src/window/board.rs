//! The list of windows that a process exposes, in memory that its peers can read and not write.
//!
//! A peer asks it before every piece of an access, so that a withdrawn window ends at once and
//! without a word between the two. The owner changes a record only while it is closed, and closes
//! it by one store; each use of a record has a generation, so that handles of earlier uses fail.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use memferry_sys::shared_memory::{Mapping, SealedMemory};
use memferry_sys::sync::lock;

use super::Rights;
use crate::ring::visit::Gate;

/// The most records of a board, and those that it begins with.
const MOST_RECORDS: usize = 1 << 20;
const FIRST_RECORDS: usize = 1 << 10;
const MOST_BYTES: usize = MOST_RECORDS * size_of::<Record>();

/// In the state of a record: the window can be accessed.
const OPEN: u64 = 1;
const RIGHTS_SHIFT: u32 = 1;
/// It can be found by its key.
const KEYED: u64 = 8;

/// A window as its owner describes it.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Record {
    /// Generation in the upper half, rights and whether it is open in the lower.
    state: Gate,
    address: AtomicU64,
    length: AtomicU64,
    /// The shareable region that it lies in, 0 for none.
    region: AtomicU64,
    /// What its owner calls it, if it is keyed.
    key: AtomicU64,
    spare: [AtomicU64; 3],
}

/// What a board says of an open window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Where it begins in the owner.
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) region: u32,
    pub(crate) rights: Rights,
    /// What its owner calls it, for those who have no handle.
    pub(crate) key: Option<u64>,
}

/// The number of a window, and which use of the number it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) number: u32,
    pub(crate) generation: u32,
}

/// This process's board. Its memory grows with the windows; it is mapped with room for all.
#[derive(Debug)]
pub(crate) struct Board {
    memory: SealedMemory,
    mapping: Mapping,
    numbers: Mutex<Numbers>,
}

#[derive(Debug)]
struct Numbers {
    /// Given back, the one that has rested longest first.
    free: VecDeque<u32>,
    used: u32,
    /// Records that exist.
    existing: usize,
}

/// Why there is no window more.
#[derive(Debug)]
pub(crate) enum NoRecord {
    /// There are a million already.
    Full,
    /// The system gives no memory for the record.
    System(io::Error),
}

/// The first records of a board.
///
/// # Safety
/// So many must exist in the memory behind the mapping.
unsafe fn records(mapping: &Mapping, existing: usize) -> &[Record] {
    debug_assert!(existing <= MOST_RECORDS && mapping.len() == MOST_BYTES);
    // SAFETY: every mapping of a board has the bytes of all records, of which these exist by the
    // caller's promise and for ever, because the memory cannot shrink. It begins on a page, and a
    // record is all atomics, for which any bytes are valid.
    unsafe { std::slice::from_raw_parts(mapping.as_ptr().cast(), existing) }
}

fn pack(generation: u32, entry: &Entry) -> u64 {
    let keyed = if entry.key.is_some() { KEYED } else { 0 };
    u64::from(generation) << 32 | u64::from(entry.rights.bits()) << RIGHTS_SHIFT | keyed | OPEN
}

impl Board {
    /// An empty board.
    pub(crate) fn new() -> io::Result<Self> {
        let first_bytes = FIRST_RECORDS * size_of::<Record>();
        let (memory, mapping) =
            SealedMemory::growing_for_readers("memferry-windows", first_bytes, MOST_BYTES)?;
        let numbers = Numbers { free: VecDeque::new(), used: 0, existing: FIRST_RECORDS };
        Ok(Self { memory, mapping, numbers: Mutex::new(numbers) })
    }

    /// The same board as a peer sees it.
    pub(crate) fn view(&self) -> io::Result<BoardView> {
        BoardView::from_descriptors(vec![self.memory.as_fd().try_clone_to_owned()?])
    }

    /// The record of a number that was given out.
    fn record(&self, number: u32) -> &Record {
        let existing = lock(&self.numbers).existing;
        // SAFETY: numbers are given out when their records exist.
        let records = unsafe { records(&self.mapping, existing) };
        &records[number as usize]
    }

    /// Opens a window.
    pub(crate) fn open(&self, entry: Entry) -> Result<Name, NoRecord> {
        let mut numbers = lock(&self.numbers);
        let number = match numbers.free.pop_front() {
            Some(number) => number,
            None => {
                self.make_room(&mut numbers)?;
                numbers.used += 1;
                numbers.used - 1
            }
        };
        // SAFETY: as many exist, and the number is below that.
        let records = unsafe { records(&self.mapping, numbers.existing) };
        let record = &records[number as usize];
        let last = (record.state.look() >> 32) as u32;
        let generation = last.wrapping_add(1).max(1);
        record.address.store(entry.address, Ordering::Relaxed);
        record.length.store(entry.length, Ordering::Relaxed);
        record.region.store(entry.region.into(), Ordering::Relaxed);
        record.key.store(entry.key.unwrap_or(0), Ordering::Relaxed);
        memferry_sys::fault::step();
        record.state.open(pack(generation, &entry));
        Ok(Name { number, generation })
    }

    /// Sees to it that the record of a number exists that was never used.
    fn make_room(&self, numbers: &mut Numbers) -> Result<(), NoRecord> {
        if (numbers.used as usize) < numbers.existing {
            return Ok(());
        }
        if numbers.existing == MOST_RECORDS {
            return Err(NoRecord::Full);
        }
        let existing = (2 * numbers.existing).min(MOST_RECORDS);
        self.memory.grow_to(existing * size_of::<Record>()).map_err(NoRecord::System)?;
        numbers.existing = existing;
        Ok(())
    }

    /// Closes a window. Whoever begins an access after this finds it closed; those under way are
    /// to be waited for before the number is given back by [`Board::give_back`].
    pub(crate) fn close(&self, name: Name) {
        let record = self.record(name.number);
        memferry_sys::fault::step();
        record.state.close(u64::from(name.generation) << 32);
    }

    /// Closes all windows.
    pub(crate) fn close_all(&self) {
        let used = lock(&self.numbers).used as usize;
        // SAFETY: the records of used numbers exist.
        for record in unsafe { records(&self.mapping, used) } {
            record.state.close(record.state.look() >> 32 << 32);
        }
    }

    /// The number of a closed window may be used again.
    pub(crate) fn give_back(&self, name: Name) {
        lock(&self.numbers).free.push_back(name.number);
    }
}

impl AsFd for Board {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

/// The board of another process, as it is seen here.
#[derive(Debug)]
pub(crate) struct BoardView {
    mapping: Mapping,
    /// Records that exist, as far as this side knows.
    existing: AtomicUsize,
}

impl BoardView {
    /// The board that came with a handshake, if it is what it must be.
    pub(crate) fn from_descriptors(mut descriptors: Vec<OwnedFd>) -> io::Result<Self> {
        let descriptor = descriptors.pop().ok_or(io::ErrorKind::InvalidData)?;
        let (mapping, bytes) = SealedMemory::map_growing_foreign(descriptor, MOST_BYTES)?;
        Ok(Self { mapping, existing: AtomicUsize::new(bytes / size_of::<Record>()) })
    }

    /// The record of a number, if it exists.
    #[inline]
    fn record(&self, number: u32) -> Option<&Record> {
        let mut existing = self.existing.load(Ordering::Relaxed);
        if number as usize >= existing {
            existing = self.look_for(number)?;
        }
        // SAFETY: so many were found to exist, and they do so for ever.
        unsafe { records(&self.mapping, existing) }.get(number as usize)
    }

    /// Asks the kernel whether a record exists by now. What its owner says of that is not believed:
    /// touching what does not exist would end this process. Returns how many there are.
    #[cold]
    fn look_for(&self, number: u32) -> Option<usize> {
        let offset = (number as usize).checked_mul(size_of::<Record>())?;
        if !self.mapping.exists(offset) {
            return None;
        }
        let existing = number as usize + 1;
        Some(self.existing.fetch_max(existing, Ordering::Relaxed).max(existing))
    }

    /// What it says of a window, if that is open in the same use of its number.
    #[inline]
    pub(crate) fn read(&self, name: Name) -> Option<Entry> {
        let record = self.record(name.number)?;
        let state = record.state.look();
        if state & OPEN == 0 || (state >> 32) as u32 != name.generation {
            return None;
        }
        let entry = Entry {
            address: record.address.load(Ordering::Relaxed),
            length: record.length.load(Ordering::Relaxed),
            region: record.region.load(Ordering::Relaxed) as u32,
            rights: Rights::from_bits((state >> RIGHTS_SHIFT) as u8),
            key: (state & KEYED != 0).then(|| record.key.load(Ordering::Relaxed)),
        };
        let is_same = record.state.is_still(state);
        (is_same && entry.address.checked_add(entry.length).is_some()).then_some(entry)
    }

    /// The open window that its owner calls by a key.
    pub(crate) fn find(&self, key: u64) -> Option<Name> {
        for number in 0.. {
            // Behind the last that exists there is none.
            let Some(record) = self.record(number) else { break };
            let state = record.state.look();
            let name = Name { number, generation: (state >> 32) as u32 };
            // Numbers are used in order: behind one that was never used there is none.
            if name.generation == 0 {
                break;
            }
            if self.read(name).is_some_and(|entry| entry.key == Some(key)) {
                return Some(name);
            }
        }
        None
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn entry(address: u64) -> Entry {
        Entry { address, length: 4096, region: 3, rights: Rights::READ, key: None }
    }

    #[test]
    fn peers_see_windows_while_they_are_open() {
        let board = Board::new().unwrap();
        let view = board.view().unwrap();
        let name = board.open(entry(1 << 20)).unwrap();
        assert_eq!(view.read(name), Some(entry(1 << 20)));
        assert_eq!(view.read(Name { number: name.number + 1, ..name }), None);
        assert_eq!(view.read(Name { number: u32::MAX, ..name }), None);
        board.close(name);
        assert_eq!(view.read(name), None);
    }

    #[test]
    fn a_handle_of_an_earlier_use_of_a_number_fails() {
        let board = Board::new().unwrap();
        let view = board.view().unwrap();
        let first = board.open(entry(1 << 20)).unwrap();
        board.close(first);
        board.give_back(first);
        let second = board.open(entry(2 << 20)).unwrap();
        assert_eq!(second.number, first.number);
        assert_eq!(view.read(first), None);
        assert_eq!(view.read(second), Some(entry(2 << 20)));
    }

    #[test]
    fn a_window_with_a_key_is_found_by_it_while_it_is_open() {
        let board = Board::new().unwrap();
        let view = board.view().unwrap();
        let keyed = |key| Entry { key: Some(key), ..entry(1 << 20) };
        let names = [entry(1 << 20), keyed(0), keyed(7)].map(|e| board.open(e).unwrap());
        assert_eq!((view.find(7), view.find(0)), (Some(names[2]), Some(names[1])));
        assert_eq!(view.find(8), None);
        board.close(names[2]);
        assert_eq!(view.find(7), None);
        let again = board.open(keyed(7)).unwrap();
        assert_eq!(view.find(7), Some(again));
    }

    #[test]
    fn a_board_grows_with_its_windows_and_a_view_of_before_sees_them() {
        let board = Board::new().unwrap();
        let view = board.view().unwrap();
        let keyed = |key| Entry { key: Some(key), ..entry(1 << 20) };
        assert_eq!(view.read(Name { number: 5000, generation: 1 }), None);
        let names: Vec<Name> = (0..5000).map(|key| board.open(keyed(key)).unwrap()).collect();
        assert_eq!(view.find(4999), Some(names[4999]));
        assert_eq!(view.find(5000), None);
        assert_eq!(view.read(names[3000]), Some(keyed(3000)));
        board.close(names[4999]);
        assert_eq!(view.read(names[4999]), None);
        // None of these exists.
        for number in [8192, MOST_RECORDS as u32 - 1, MOST_RECORDS as u32, u32::MAX] {
            assert_eq!(view.read(Name { number, generation: 1 }), None);
        }
        board.close_all();
        assert!(names.iter().all(|name| view.read(*name).is_none()));
    }

    #[test]
    fn a_window_that_would_wrap_around_is_none() {
        let board = Board::new().unwrap();
        let name = board.open(Entry { length: u64::MAX, ..entry(1 << 20) }).unwrap();
        assert_eq!(board.view().unwrap().read(name), None);
    }
}
