//! Which parts of the heap are used. The heap is cut into granules of 64 KiB; an extent is a run of
//! granules that is free or belongs to one allocation. Everything is kept in a table with an entry for
//! each granule, beside the heap, so that nothing here allocates.

use std::ptr;

/// The unit of allocation.
pub(super) const GRANULE: usize = 64 << 10;
/// The usable bytes of an allocation are whole pages.
const PAGE: usize = 4096;
/// No granule.
const NONE: u32 = u32::MAX;
const BINS: usize = 32;
/// How many free extents of the right order of magnitude are tried before a larger one is cut.
const TRIES: usize = 16;

/// What the table has for a granule. Valid at the first granule of an extent; `start` at the last one.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Entry {
    /// The granules of the extent.
    length: u32,
    /// The first granule of the extent whose last one this is.
    start: u32,
    /// The neighbours in the list of a bin, if the extent is free.
    next: u32,
    previous: u32,
    /// The bytes of the allocation, in whole pages; 0 if the extent is free.
    bytes: usize,
    /// Granules of a free extent that may have pages with old contents.
    dirty: u32,
}

/// The bytes of the table for a heap of so many bytes.
pub(super) const fn table_bytes(heap_bytes: usize) -> usize {
    heap_bytes / GRANULE * size_of::<Entry>()
}

/// The extents of a heap.
#[derive(Debug)]
pub(super) struct Extents {
    table: *mut Entry,
    /// The address of the heap, in granules.
    first: usize,
    granules: u32,
    bins: [u32; BINS],
    /// Granules of free extents that may have old contents.
    dirty: u32,
}

/// An allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Allocation {
    /// The offset in the heap.
    pub(super) offset: usize,
    /// Whether its pages may have old contents.
    pub(super) is_dirty: bool,
}

impl Extents {
    /// Without a heap: every allocation fails.
    pub(super) const fn empty() -> Self {
        Self { table: ptr::null_mut(), first: 0, granules: 0, bins: [NONE; BINS], dirty: 0 }
    }

    /// All of a heap, whose address is whole granules, as one free extent.
    ///
    /// # Safety
    /// The table must be zeroed memory of `table_bytes`, and stay.
    pub(super) unsafe fn new(table: *mut u8, heap: usize, heap_bytes: usize) -> Self {
        let (first, granules) = (heap / GRANULE, (heap_bytes / GRANULE) as u32);
        let mut extents = Self { table: table.cast(), first, granules, ..Self::empty() };
        extents.set(0, granules, 0, 0);
        extents.link(0);
        extents
    }

    /// Allocates. The alignment, which is that of the address, must be a power of two.
    pub(super) fn allocate(&mut self, bytes: usize, alignment: usize) -> Option<Allocation> {
        let length = granules_of(bytes)?;
        let extra = (alignment / GRANULE).saturating_sub(1);
        let start = self.find(length.checked_add(u32::try_from(extra).ok()?)?)?;
        self.unlink(start);
        let step = (alignment / GRANULE).max(1);
        let aligned = (self.first + start as usize).next_multiple_of(step) - self.first;
        let aligned = aligned as u32;
        let Entry { length: whole, dirty, .. } = self.entry(start);
        self.dirty -= dirty;
        // What is cut off keeps as much of the dirt as it may have.
        for (cut, cut_length) in
            [(start, aligned - start), (aligned + length, start + whole - aligned - length)]
        {
            if cut_length > 0 {
                self.set(cut, cut_length, 0, dirty.min(cut_length));
                self.dirty += dirty.min(cut_length);
                self.link(cut);
            }
        }
        self.set(aligned, length, bytes.max(1).next_multiple_of(PAGE), 0);
        Some(Allocation { offset: aligned as usize * GRANULE, is_dirty: dirty > 0 })
    }

    /// The usable bytes of the allocation at an offset; `None` if there is none.
    pub(super) fn usable(&self, offset: usize) -> Option<usize> {
        let index = u32::try_from(offset / GRANULE).ok().filter(|index| *index < self.granules)?;
        let bytes = self.entry(index).bytes;
        (offset.is_multiple_of(GRANULE) && bytes > 0).then_some(bytes)
    }

    /// Changes the size of an allocation where it is. Returns false, with nothing changed, if there is
    /// no space behind it.
    pub(super) fn resize(&mut self, offset: usize, bytes: usize) -> bool {
        let (start, Some(wanted)) = ((offset / GRANULE) as u32, granules_of(bytes)) else {
            return false;
        };
        let Entry { length, .. } = self.entry(start);
        let next = start + length;
        let new_bytes = bytes.max(1).next_multiple_of(PAGE);
        if wanted > length {
            if !self.is_free(next) || length + self.entry(next).length < wanted {
                return false;
            }
            let Entry { length: free, dirty, .. } = self.entry(next);
            self.unlink(next);
            self.dirty -= dirty;
            let left = length + free - wanted;
            if left > 0 {
                self.set(start + wanted, left, 0, dirty.min(left));
                self.dirty += dirty.min(left);
                self.link(start + wanted);
            }
            self.set(start, wanted, new_bytes, 0);
        } else {
            self.set(start, wanted, new_bytes, 0);
            if wanted < length {
                self.add_free(start + wanted, length - wanted, length - wanted);
            }
        }
        true
    }

    /// Frees an allocation. Its pages have old contents unless they are `clean`.
    pub(super) fn free(&mut self, offset: usize, clean: bool) {
        let start = (offset / GRANULE) as u32;
        let Entry { length, bytes, .. } = self.entry(start);
        let dirty = if clean { 0 } else { (bytes.div_ceil(GRANULE) as u32).min(length) };
        self.add_free(start, length, dirty);
    }

    /// The bytes of free extents that may have old contents.
    pub(super) fn dirty_bytes(&self) -> usize {
        self.dirty as usize * GRANULE
    }

    /// Calls `clean` with the range of each free extent that may have old contents. Where it returns
    /// true they have none any more.
    pub(super) fn clean(&mut self, mut clean: impl FnMut(usize, usize) -> bool) {
        for bin in 0..BINS {
            let mut index = self.bins[bin];
            while index != NONE {
                let Entry { length, dirty, next, .. } = self.entry(index);
                if dirty > 0 && clean(index as usize * GRANULE, length as usize * GRANULE) {
                    self.dirty -= dirty;
                    self.set_dirty(index, 0);
                }
                index = next;
            }
        }
    }

    /// Calls a function with offset and bytes of each allocation.
    pub(super) fn for_each_used(&self, mut call: impl FnMut(usize, usize)) {
        let mut index = 0;
        while index < self.granules {
            let Entry { length, bytes, .. } = self.entry(index);
            if bytes > 0 {
                call(index as usize * GRANULE, bytes);
            }
            index += length.max(1);
        }
    }

    fn add_free(&mut self, mut start: u32, mut length: u32, mut dirty: u32) {
        self.dirty += dirty;
        self.change(start, |entry| entry.bytes = 0);
        let next = start + length;
        if self.is_free(next) {
            self.unlink(next);
            length += self.entry(next).length;
            dirty += self.entry(next).dirty;
        }
        if start > 0 {
            let before = self.entry(start - 1).start;
            if self.is_free(before) && before + self.entry(before).length == start {
                self.unlink(before);
                length += self.entry(before).length;
                dirty += self.entry(before).dirty;
                start = before;
            }
        }
        self.set(start, length, 0, dirty);
        self.link(start);
    }

    fn is_free(&self, index: u32) -> bool {
        index < self.granules && {
            let entry = self.entry(index);
            entry.bytes == 0 && entry.length > 0
        }
    }

    /// A free extent of at least this length: one of the same order of magnitude, or a larger one.
    fn find(&self, length: u32) -> Option<u32> {
        let own_bin = length.ilog2() as usize;
        let mut index = self.bins[own_bin];
        for _ in 0..TRIES {
            if index == NONE {
                break;
            }
            if self.entry(index).length >= length {
                return Some(index);
            }
            index = self.entry(index).next;
        }
        self.bins[own_bin + 1..].iter().copied().find(|first| *first != NONE)
    }

    fn link(&mut self, index: u32) {
        let bin = self.entry(index).length.ilog2() as usize;
        let first = self.bins[bin];
        self.change(index, |entry| (entry.next, entry.previous) = (first, NONE));
        if first != NONE {
            self.change(first, |entry| entry.previous = index);
        }
        self.bins[bin] = index;
    }

    fn unlink(&mut self, index: u32) {
        let Entry { length, next, previous, .. } = self.entry(index);
        match previous {
            NONE => self.bins[length.ilog2() as usize] = next,
            previous => self.change(previous, |entry| entry.next = next),
        }
        if next != NONE {
            self.change(next, |entry| entry.previous = previous);
        }
    }

    fn set(&mut self, start: u32, length: u32, bytes: usize, dirty: u32) {
        self.change(start, |entry| {
            (entry.length, entry.bytes, entry.dirty) = (length, bytes, dirty);
        });
        self.change(start + length - 1, |entry| entry.start = start);
    }

    fn set_dirty(&mut self, index: u32, dirty: u32) {
        self.change(index, |entry| entry.dirty = dirty);
    }

    fn entry(&self, index: u32) -> Entry {
        assert!(index < self.granules, "granule outside of the heap");
        // SAFETY: the table has an entry for each granule.
        unsafe { *self.table.add(index as usize) }
    }

    fn change(&mut self, index: u32, change: impl FnOnce(&mut Entry)) {
        assert!(index < self.granules, "granule outside of the heap");
        // SAFETY: as above, and exclusive through `&mut self`.
        change(unsafe { &mut *self.table.add(index as usize) });
    }
}

fn granules_of(bytes: usize) -> Option<u32> {
    u32::try_from(bytes.max(1).div_ceil(GRANULE)).ok().filter(|granules| *granules < 1 << 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const HEAP: usize = 64 * GRANULE;
    /// An address that is aligned for huge pages and for nothing larger.
    const BASE: usize = 0x7000_0020_0000;

    fn extents(memory: &mut Vec<u64>) -> Extents {
        *memory = vec![0; table_bytes(HEAP) / 8];
        // SAFETY: zeroed memory of the right size, which the tests keep.
        unsafe { Extents::new(memory.as_mut_ptr().cast(), BASE, HEAP) }
    }

    #[test]
    fn what_is_freed_becomes_one_extent_again() {
        let mut memory = Vec::new();
        let mut extents = extents(&mut memory);
        let all: Vec<_> = (0..64).map(|_| extents.allocate(GRANULE, 16).unwrap().offset).collect();
        assert_eq!(extents.allocate(1, 16), None);
        for offset in all.iter().step_by(2).chain(all.iter().skip(1).step_by(2)) {
            extents.free(*offset, false);
        }
        assert_eq!(extents.dirty_bytes(), HEAP);
        let whole = extents.allocate(HEAP, 16).unwrap();
        assert_eq!((whole.offset, whole.is_dirty, extents.dirty_bytes()), (0, true, 0));
    }

    #[test]
    fn an_allocation_grows_and_shrinks_where_it_is() {
        let mut memory = Vec::new();
        let mut extents = extents(&mut memory);
        let offset = extents.allocate(3 * GRANULE, 16).unwrap().offset;
        let behind = extents.allocate(GRANULE, 16).unwrap().offset;
        assert!(!extents.resize(offset, 3 * GRANULE + 1));
        extents.free(behind, true);
        assert!(extents.resize(offset, 10 * GRANULE) && !extents.resize(offset, HEAP + 1));
        assert_eq!(extents.usable(offset), Some(10 * GRANULE));
        assert!(extents.resize(offset, 70_000));
        assert_eq!(extents.usable(offset), Some(73_728));
        extents.free(offset, true);
        assert!(extents.allocate(HEAP, 16).is_some());
    }

    #[test]
    fn alignments_are_kept_and_wrong_offsets_are_no_allocations() {
        let mut memory = Vec::new();
        let mut extents = extents(&mut memory);
        let first = extents.allocate(GRANULE, 16).unwrap().offset;
        let aligned = extents.allocate(2 * GRANULE, 32 * GRANULE).unwrap().offset;
        assert_eq!((BASE + aligned) % (32 * GRANULE), 0);
        assert_ne!(first, aligned);
        assert_eq!(extents.usable(aligned + 16), None);
        assert_eq!(extents.usable(aligned + GRANULE), None);
        assert_eq!(extents.usable(HEAP + GRANULE), None);
        for offset in [first, aligned] {
            extents.free(offset, true);
        }
        // Twice the alignment of the heap's address: not at its begin.
        let aligned = extents.allocate(GRANULE, 64 * GRANULE).unwrap().offset;
        assert_eq!(((BASE + aligned) % (64 * GRANULE), aligned), (0, 32 * GRANULE));
        assert_eq!(extents.allocate(GRANULE, 1 << 62), None);
        extents.free(aligned, true);
        assert!(extents.allocate(HEAP, 16).is_some());
    }

    #[test]
    fn cleaned_extents_are_clean() {
        let mut memory = Vec::new();
        let mut extents = extents(&mut memory);
        let offset = extents.allocate(5 * GRANULE, 16).unwrap().offset;
        extents.free(offset, false);
        assert_eq!(extents.dirty_bytes(), 5 * GRANULE);
        extents.clean(|_, _| false);
        assert_eq!(extents.dirty_bytes(), 5 * GRANULE);
        extents.clean(|_, _| true);
        assert_eq!(extents.dirty_bytes(), 0);
        assert!(!extents.allocate(HEAP, 16).unwrap().is_dirty);
    }

    /// A long random sequence against a model: no two allocations overlap, nothing is lost.
    #[test]
    fn random_sequences_agree_with_a_model() {
        let mut memory = Vec::new();
        let mut extents = extents(&mut memory);
        let mut model: BTreeMap<usize, usize> = BTreeMap::new();
        let mut random = 88_172_645_463_325_252u64;
        for _ in 0..50_000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let bytes = (random >> 20) as usize % (9 * GRANULE) + 1;
            let chosen = model.keys().nth((random >> 40) as usize % model.len().max(1)).copied();
            match (random % 4, chosen) {
                (0, Some(offset)) => {
                    extents.free(offset, random & 64 != 0);
                    model.remove(&offset);
                }
                (1, Some(offset)) if extents.resize(offset, bytes) => {
                    model.insert(offset, bytes);
                }
                (1, _) => {}
                _ => {
                    let alignment = 16 << ((random >> 8) % 19);
                    if let Some(new) = extents.allocate(bytes, alignment) {
                        assert_eq!((BASE + new.offset) % alignment, 0);
                        assert_eq!(model.insert(new.offset, bytes), None);
                    }
                }
            }
            let mut end = 0;
            for (offset, bytes) in &model {
                assert!(*offset >= end && extents.usable(*offset).unwrap() >= *bytes);
                end = offset + bytes;
            }
            let mut used = Vec::new();
            extents.for_each_used(|offset, _| used.push(offset));
            assert!(end <= HEAP && used.iter().eq(model.keys()));
        }
    }
}
