//! The table of windows that a process exposes, in memory that its peers can read and not write.
//!
//! A peer reads it before every step of an access, so that a withdrawal takes effect at once and
//! without a message. The owner changes a record only while it is closed, and closes it by one
//! store; each use of a record has a generation, so that handles of earlier uses fail.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use memferry_sys::shared_memory::{Mapping, SealedMemory};
use memferry_sys::sync::lock;

use super::Rights;
use crate::ring::window_gate::WindowGate;

/// The maximum number of records of a table, and the initial number.
const MAX_RECORDS: usize = 1 << 20;
const INITIAL_RECORDS: usize = 1 << 10;
const MAX_TABLE_BYTES: usize = MAX_RECORDS * size_of::<WindowRecord>();

/// Flag in the state of a record: the window can be accessed.
const OPEN: u64 = 1;
const RIGHTS_SHIFT: u32 = 1;
/// Flag: the window can be found by its key.
const KEYED: u64 = 8;

/// A window, as its owner describes it.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct WindowRecord {
    /// Generation in the upper half; rights and flags in the lower.
    state: WindowGate,
    address: AtomicU64,
    length: AtomicU64,
    /// The shareable region that contains the window, 0 for none.
    region: AtomicU64,
    /// The owner's key, if the window is keyed.
    key: AtomicU64,
    reserved: [AtomicU64; 3],
}

/// The record of an open window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WindowInfo {
    /// The address of the first byte in the owner's memory.
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) region: u32,
    pub(crate) rights: Rights,
    /// The owner's key, for peers without a handle.
    pub(crate) key: Option<u64>,
}

/// The number of a window, and the generation of the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WindowId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// The window table of this process. Its memory grows with the windows; the mapping has space for
/// all.
#[derive(Debug)]
pub(crate) struct WindowTable {
    memory: SealedMemory,
    mapping: Mapping,
    ids: Mutex<WindowIdAllocator>,
}

#[derive(Debug)]
struct WindowIdAllocator {
    /// Freed numbers, the one that was freed first in front.
    free: VecDeque<u32>,
    used: u32,
    /// The number of records that exist.
    capacity: usize,
}

/// The cause of a failed open.
#[derive(Debug)]
pub(crate) enum OpenWindowError {
    /// All records are in use.
    Full,
    /// The system has no memory for the record.
    System(io::Error),
}

/// The first records of a table.
///
/// # Safety
/// `existing` records must exist in the memory behind the mapping, and be mapped.
unsafe fn records(mapping: &Mapping, existing: usize) -> &[WindowRecord] {
    debug_assert!(existing * size_of::<WindowRecord>() <= mapping.len());
    // SAFETY: these records exist by the caller's guarantee, and for ever, because the memory cannot
    // shrink. The mapping begins on a page, and a record consists of atomics, for which any bytes are
    // valid.
    unsafe { std::slice::from_raw_parts(mapping.as_ptr().cast(), existing) }
}

fn pack(generation: u32, info: &WindowInfo) -> u64 {
    let keyed = if info.key.is_some() { KEYED } else { 0 };
    u64::from(generation) << 32 | u64::from(info.rights.bits()) << RIGHTS_SHIFT | keyed | OPEN
}

impl WindowTable {
    /// Creates an empty table.
    pub(crate) fn new() -> io::Result<Self> {
        let first_bytes = INITIAL_RECORDS * size_of::<WindowRecord>();
        let (memory, mapping) = SealedMemory::new_growable_read_only_export(
            "memferry-windows",
            first_bytes,
            MAX_TABLE_BYTES,
        )?;
        let ids = WindowIdAllocator { free: VecDeque::new(), used: 0, capacity: INITIAL_RECORDS };
        Ok(Self { memory, mapping, ids: Mutex::new(ids) })
    }

    /// Creates a peer's view of the same table.
    pub(crate) fn view(&self) -> io::Result<WindowTableView> {
        let own = vec![self.memory.as_fd().try_clone_to_owned()?];
        Ok(PeerWindowTable::from_descriptors(own)?.view())
    }

    /// The record of an allocated number.
    fn record(&self, number: u32) -> &WindowRecord {
        let existing = lock(&self.ids).capacity;
        // SAFETY: a number is allocated only when its record exists.
        let records = unsafe { records(&self.mapping, existing) };
        &records[number as usize]
    }

    /// Opens a window.
    pub(crate) fn open(&self, info: WindowInfo) -> Result<WindowId, OpenWindowError> {
        let mut ids = lock(&self.ids);
        let number = match ids.free.pop_front() {
            Some(number) => number,
            None => {
                self.grow(&mut ids)?;
                ids.used += 1;
                ids.used - 1
            }
        };
        // SAFETY: `capacity` records exist, and the number is below that.
        let records = unsafe { records(&self.mapping, ids.capacity) };
        let record = &records[number as usize];
        let last = (record.state.load() >> 32) as u32;
        let generation = last.wrapping_add(1).max(1);
        record.address.store(info.address, Ordering::Relaxed);
        record.length.store(info.length, Ordering::Relaxed);
        record.region.store(info.region.into(), Ordering::Relaxed);
        record.key.store(info.key.unwrap_or(0), Ordering::Relaxed);
        memferry_sys::fault::step();
        record.state.open(pack(generation, &info));
        Ok(WindowId { index: number, generation })
    }

    /// Makes the record of the next unused number exist.
    fn grow(&self, ids: &mut WindowIdAllocator) -> Result<(), OpenWindowError> {
        if (ids.used as usize) < ids.capacity {
            return Ok(());
        }
        if ids.capacity == MAX_RECORDS {
            return Err(OpenWindowError::Full);
        }
        let existing = (2 * ids.capacity).min(MAX_RECORDS);
        self.memory
            .grow_to(existing * size_of::<WindowRecord>())
            .map_err(OpenWindowError::System)?;
        ids.capacity = existing;
        Ok(())
    }

    /// Closes a window. An accessor that starts after this finds it closed; running accesses must
    /// be waited for before [`WindowTable::release`] frees the number.
    pub(crate) fn close(&self, id: WindowId) {
        let record = self.record(id.index);
        memferry_sys::fault::step();
        record.state.close(u64::from(id.generation) << 32);
    }

    /// Closes all windows.
    pub(crate) fn close_all(&self) {
        let used = lock(&self.ids).used as usize;
        // SAFETY: the records of used numbers exist.
        for record in unsafe { records(&self.mapping, used) } {
            record.state.close(record.state.load() >> 32 << 32);
        }
    }

    /// Frees the number of a closed window.
    pub(crate) fn release(&self, id: WindowId) {
        lock(&self.ids).free.push_back(id.index);
    }
}

impl AsFd for WindowTable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

/// The window table of a peer that no window is attached of: its first page is mapped.
#[derive(Debug)]
pub(crate) struct PeerWindowTable {
    first_page: Arc<Mapping>,
}

impl PeerWindowTable {
    /// Maps the first page of the table that came with a handshake, if it is valid.
    pub(crate) fn from_descriptors(mut descriptors: Vec<OwnedFd>) -> io::Result<Self> {
        let descriptor = descriptors.pop().ok_or(io::ErrorKind::InvalidData)?;
        let first_page = SealedMemory::map_first_page_of_untrusted_fd(descriptor)?;
        Ok(Self { first_page: Arc::new(first_page) })
    }

    /// A view of the table.
    pub(crate) fn view(&self) -> WindowTableView {
        let existing = self.first_page.len() / size_of::<WindowRecord>();
        WindowTableView {
            first_page: self.first_page.clone(),
            whole: OnceLock::new(),
            capacity: AtomicUsize::new(existing),
        }
    }
}

/// A view of the window table of a peer.
#[derive(Debug)]
pub(crate) struct WindowTableView {
    first_page: Arc<Mapping>,
    /// All pages, once a record of another page was needed.
    whole: OnceLock<Mapping>,
    /// The number of records that exist and are mapped, as far as this side knows. It is set after
    /// `whole`.
    capacity: AtomicUsize,
}

impl WindowTableView {
    /// The record of a number, if it exists.
    #[inline]
    fn record(&self, number: u32) -> Option<&WindowRecord> {
        // Acquire: the mapping of these records is seen too.
        let mut existing = self.capacity.load(Ordering::Acquire);
        if number as usize >= existing {
            existing = self.refresh_capacity(number)?;
        }
        let mapping = self.whole.get().unwrap_or(&self.first_page);
        // SAFETY: this many were found to exist in the mapping, and they exist for ever.
        unsafe { records(mapping, existing) }.get(number as usize)
    }

    /// Checks in the kernel whether a record exists by now, and returns the number of records. The
    /// owner is not trusted: touching memory that does not exist would kill this process. A process that can
    /// map nothing more has the windows of the first page.
    #[cold]
    fn refresh_capacity(&self, number: u32) -> Option<usize> {
        let offset = (number as usize).checked_mul(size_of::<WindowRecord>())?;
        let whole = match self.whole.get() {
            Some(whole) => whole,
            None => {
                let mapping = self.first_page.extend(MAX_TABLE_BYTES).ok()?;
                self.whole.get_or_init(|| mapping)
            }
        };
        if !whole.exists(offset) {
            return None;
        }
        // The memory consists of whole pages.
        let page = self.first_page.len();
        let existing = (offset / page + 1) * page / size_of::<WindowRecord>();
        Some(self.capacity.fetch_max(existing, Ordering::Release).max(existing))
    }

    /// Reads the record of a window, if the window is open with this generation.
    #[inline]
    pub(crate) fn read(&self, id: WindowId) -> Option<WindowInfo> {
        let record = self.record(id.index)?;
        let state = record.state.load();
        if state & OPEN == 0 || (state >> 32) as u32 != id.generation {
            return None;
        }
        let info = WindowInfo {
            address: record.address.load(Ordering::Relaxed),
            length: record.length.load(Ordering::Relaxed),
            region: record.region.load(Ordering::Relaxed) as u32,
            rights: Rights::from_bits((state >> RIGHTS_SHIFT) as u8),
            key: (state & KEYED != 0).then(|| record.key.load(Ordering::Relaxed)),
        };
        let is_same = record.state.is_unchanged(state);
        (is_same && info.address.checked_add(info.length).is_some()).then_some(info)
    }

    /// Finds the open window with a key.
    pub(crate) fn find(&self, key: u64) -> Option<WindowId> {
        for number in 0.. {
            // No later record exists.
            let Some(record) = self.record(number) else { break };
            let state = record.state.load();
            let id = WindowId { index: number, generation: (state >> 32) as u32 };
            // Numbers are used in order: no window after an unused number is open.
            if id.generation == 0 {
                break;
            }
            if self.read(id).is_some_and(|info| info.key == Some(key)) {
                return Some(id);
            }
        }
        None
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn entry(address: u64) -> WindowInfo {
        WindowInfo { address, length: 4096, region: 3, rights: Rights::READ, key: None }
    }

    #[test]
    fn peers_see_windows_while_they_are_open() {
        let table = WindowTable::new().unwrap();
        let view = table.view().unwrap();
        let id = table.open(entry(1 << 20)).unwrap();
        assert_eq!(view.read(id), Some(entry(1 << 20)));
        assert_eq!(view.read(WindowId { index: id.index + 1, ..id }), None);
        assert_eq!(view.read(WindowId { index: u32::MAX, ..id }), None);
        table.close(id);
        assert_eq!(view.read(id), None);
    }

    #[test]
    fn a_handle_of_an_earlier_use_of_a_number_fails() {
        let table = WindowTable::new().unwrap();
        let view = table.view().unwrap();
        let first = table.open(entry(1 << 20)).unwrap();
        table.close(first);
        table.release(first);
        let second = table.open(entry(2 << 20)).unwrap();
        assert_eq!(second.index, first.index);
        assert_eq!(view.read(first), None);
        assert_eq!(view.read(second), Some(entry(2 << 20)));
    }

    #[test]
    fn a_window_with_a_key_is_found_by_it_while_it_is_open() {
        let table = WindowTable::new().unwrap();
        let view = table.view().unwrap();
        let keyed = |key| WindowInfo { key: Some(key), ..entry(1 << 20) };
        let ids = [entry(1 << 20), keyed(0), keyed(7)].map(|e| table.open(e).unwrap());
        assert_eq!((view.find(7), view.find(0)), (Some(ids[2]), Some(ids[1])));
        assert_eq!(view.find(8), None);
        table.close(ids[2]);
        assert_eq!(view.find(7), None);
        let again = table.open(keyed(7)).unwrap();
        assert_eq!(view.find(7), Some(again));
    }

    #[test]
    fn a_board_grows_with_its_windows_and_a_view_of_before_sees_them() {
        let table = WindowTable::new().unwrap();
        let view = table.view().unwrap();
        let keyed = |key| WindowInfo { key: Some(key), ..entry(1 << 20) };
        assert_eq!(view.read(WindowId { index: 5000, generation: 1 }), None);
        let ids: Vec<WindowId> = (0..5000).map(|key| table.open(keyed(key)).unwrap()).collect();
        assert_eq!(view.find(4999), Some(ids[4999]));
        assert_eq!(view.find(5000), None);
        assert_eq!(view.read(ids[3000]), Some(keyed(3000)));
        table.close(ids[4999]);
        assert_eq!(view.read(ids[4999]), None);
        // None of these exists.
        for index in [8192, MAX_RECORDS as u32 - 1, MAX_RECORDS as u32, u32::MAX] {
            assert_eq!(view.read(WindowId { index, generation: 1 }), None);
        }
        table.close_all();
        assert!(ids.iter().all(|id| view.read(*id).is_none()));
    }

    #[test]
    fn a_window_that_would_wrap_around_is_none() {
        let table = WindowTable::new().unwrap();
        let id = table.open(WindowInfo { length: u64::MAX, ..entry(1 << 20) }).unwrap();
        assert_eq!(table.view().unwrap().read(id), None);
    }
}
