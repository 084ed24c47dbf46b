//! The list of windows that a process exposes, in memory that its peers can read and not write.
//!
//! A peer asks it before every piece of an access, so that a withdrawn window ends at once and
//! without a word between the two. The owner changes a record only while it is closed, and closes
//! it by one store; each use of a record has a generation, so that handles of earlier uses fail.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_sys::shared_memory::{Access, Mapping, SealedMemory};
use memferry_sys::sync::lock;

use super::Rights;
use crate::ring::visit::Gate;

/// Records of a board. Their memory is taken only when they are used.
const RECORDS: usize = 1 << 20;
const BYTES: usize = RECORDS * size_of::<Record>();

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

/// This process's board.
#[derive(Debug)]
pub(crate) struct Board {
    memory: SealedMemory,
    mapping: Mapping,
    numbers: Mutex<Numbers>,
}

#[derive(Debug, Default)]
struct Numbers {
    /// Given back, the one that has rested longest first.
    free: VecDeque<u32>,
    used: u32,
}

fn records(mapping: &Mapping) -> &[Record] {
    // SAFETY: every mapping of a board has the bytes of all records, begins on a page, and a record
    // is all atomics, for which any bytes are valid.
    unsafe { std::slice::from_raw_parts(mapping.as_ptr().cast(), RECORDS) }
}

fn pack(generation: u32, entry: &Entry) -> u64 {
    let keyed = if entry.key.is_some() { KEYED } else { 0 };
    u64::from(generation) << 32 | u64::from(entry.rights.bits()) << RIGHTS_SHIFT | keyed | OPEN
}

impl Board {
    /// An empty board.
    pub(crate) fn new() -> io::Result<Self> {
        let (memory, mapping) = SealedMemory::for_readers("memferry-windows", BYTES)?;
        Ok(Self { memory, mapping, numbers: Mutex::default() })
    }

    /// The same board as a peer sees it.
    pub(crate) fn view(&self) -> io::Result<BoardView> {
        BoardView::from_descriptors(vec![self.memory.as_fd().try_clone_to_owned()?])
    }

    /// Opens a window. `None` when there are a million already.
    pub(crate) fn open(&self, entry: Entry) -> Option<Name> {
        let mut numbers = lock(&self.numbers);
        let number = match numbers.free.pop_front() {
            Some(number) => number,
            None if (numbers.used as usize) < RECORDS => {
                numbers.used += 1;
                numbers.used - 1
            }
            None => return None,
        };
        let record = &records(&self.mapping)[number as usize];
        let last = (record.state.look() >> 32) as u32;
        let generation = last.wrapping_add(1).max(1);
        record.address.store(entry.address, Ordering::Relaxed);
        record.length.store(entry.length, Ordering::Relaxed);
        record.region.store(entry.region.into(), Ordering::Relaxed);
        record.key.store(entry.key.unwrap_or(0), Ordering::Relaxed);
        record.state.open(pack(generation, &entry));
        Some(Name { number, generation })
    }

    /// Closes a window. Whoever begins an access after this finds it closed; those under way are
    /// to be waited for before the number is given back by [`Board::give_back`].
    pub(crate) fn close(&self, name: Name) {
        let record = &records(&self.mapping)[name.number as usize];
        record.state.close(u64::from(name.generation) << 32);
    }

    /// Closes all windows.
    pub(crate) fn close_all(&self) {
        let used = lock(&self.numbers).used as usize;
        for record in &records(&self.mapping)[..used] {
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
}

impl BoardView {
    /// The board that came with a handshake, if it is what it must be.
    pub(crate) fn from_descriptors(mut descriptors: Vec<OwnedFd>) -> io::Result<Self> {
        let descriptor = descriptors.pop().ok_or(io::ErrorKind::InvalidData)?;
        let memory = SealedMemory::from_foreign(descriptor, BYTES)?;
        Ok(Self { mapping: memory.map(Access::Read)? })
    }

    /// What it says of a window, if that is open in the same use of its number.
    #[inline]
    pub(crate) fn read(&self, name: Name) -> Option<Entry> {
        let record = records(&self.mapping).get(name.number as usize)?;
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
        for (number, record) in (0..).zip(records(&self.mapping)) {
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
    fn a_window_that_would_wrap_around_is_none() {
        let board = Board::new().unwrap();
        let name = board.open(Entry { length: u64::MAX, ..entry(1 << 20) }).unwrap();
        assert_eq!(board.view().unwrap().read(name), None);
    }
}
