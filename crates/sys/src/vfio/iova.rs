//! Allocation of IOVAs: the addresses by which a device accesses memory.
//!
//! This module makes no system call. One page after every range stays unmapped, so that the IOMMU
//! stops a device that runs past the end of a buffer.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Ranges of this size or larger have the same offset in a huge page as the memory that they map,
/// so that the IOMMU can use huge pages too.
const HUGE_BYTES: u64 = 2 << 20;
/// Drivers use address 0 as null, and faulty addresses are often small.
const MIN_IOVA: u64 = 1 << 20;
/// Writes of devices to these addresses are interrupts (MSI).
const MSI_WINDOW: RangeInclusive<u64> = 0xFEE0_0000..=0xFEEF_FFFF;
/// Usable on every IOMMU of this kind; used if the kernel does not report the ranges (before Linux
/// 5.4).
const DEFAULT_RANGES: [RangeInclusive<u64>; 2] =
    [MIN_IOVA..=0xFEDF_FFFF, (1 << 32)..=((1 << 39) - 1)];
/// Maximum number of allocated ranges: the kernel's default limit of mappings per container.
const MAX_RANGES: usize = 65_535;

/// The IOVA allocator of an address space.
#[derive(Debug)]
pub struct IovaAllocator {
    page_bytes: u64,
    /// Free ranges: start and exclusive end. No two are adjacent.
    free: BTreeMap<u64, u64>,
    /// Allocated ranges: start, and bytes without the guard page.
    allocated: BTreeMap<u64, u64>,
}

impl IovaAllocator {
    /// Creates an allocator for the ranges that the kernel reports as usable; an empty list means
    /// that the kernel does not report them.
    pub fn new(usable: &[RangeInclusive<u64>], page_bytes: u64) -> Self {
        assert!(page_bytes.is_power_of_two());
        let usable = if usable.is_empty() { &DEFAULT_RANGES } else { usable };
        let mut addresses = Self { page_bytes, free: BTreeMap::new(), allocated: BTreeMap::new() };
        for range in usable {
            // The page of the last address is excluded: its exclusive end would overflow.
            let (start, end) = ((*range.start()).max(MIN_IOVA), range.end().saturating_add(1));
            addresses.add_free(start, end.min(*MSI_WINDOW.start()));
            addresses.add_free(start.max(*MSI_WINDOW.end() + 1), end);
        }
        addresses
    }

    /// Allocates a range of whole pages for the memory at `memory`: the lowest that fits. `None` if
    /// no free range is large enough or the maximum number of ranges is allocated.
    pub fn allocate(&mut self, bytes: u64, memory: u64) -> Option<u64> {
        debug_assert!(bytes > 0 && bytes.is_multiple_of(self.page_bytes));
        if self.allocated.len() >= MAX_RANGES {
            return None;
        }
        let with_guard = bytes.checked_add(self.page_bytes)?;
        let (from, until, start) = self.free.iter().find_map(|(&from, &until)| {
            let start =
                if bytes >= HUGE_BYTES { align_to_huge_offset(from, memory)? } else { from };
            let fits = start.checked_add(with_guard)? <= until;
            fits.then_some((from, until, start))
        })?;
        self.free.remove(&from);
        self.insert_free(from, start);
        self.insert_free(start + with_guard, until);
        self.allocated.insert(start, bytes);
        Some(start)
    }

    /// Removes the allocated range that begins at `start` and returns its bytes; `None` if it is
    /// not allocated. The range is not reused before [`IovaAllocator::free`].
    pub fn retire(&mut self, start: u64) -> Option<u64> {
        self.allocated.remove(&start)
    }

    /// Frees a retired range.
    pub fn free(&mut self, start: u64, bytes: u64) {
        self.add_free(start, start + bytes + self.page_bytes);
    }

    /// All allocated ranges: start and bytes.
    pub fn allocated(&self) -> impl Iterator<Item = (u64, u64)> {
        self.allocated.iter().map(|(&start, &bytes)| (start, bytes))
    }

    /// Adds the whole pages of a range to the free ranges and merges it with adjacent ones.
    fn add_free(&mut self, start: u64, end: u64) {
        let Some(mut start) = start.checked_next_multiple_of(self.page_bytes) else { return };
        let mut end = end & !(self.page_bytes - 1);
        if start >= end {
            return;
        }
        if let Some((&before, &until)) = self.free.range(..=start).next_back()
            && until >= start
        {
            self.free.remove(&before);
            (start, end) = (before, end.max(until));
        }
        while let Some((&after, &until)) = self.free.range(start..=end).next() {
            self.free.remove(&after);
            end = end.max(until);
        }
        self.insert_free(start, end);
    }

    fn insert_free(&mut self, start: u64, end: u64) {
        if start < end {
            self.free.insert(start, end);
        }
    }
}

/// The first address at or after `from` with the same offset in a huge page as `memory`.
fn align_to_huge_offset(from: u64, memory: u64) -> Option<u64> {
    from.checked_add(memory.wrapping_sub(from) % HUGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = 4096;

    fn retire_and_free(addresses: &mut IovaAllocator, start: u64) {
        let bytes = addresses.retire(start).unwrap();
        addresses.free(start, bytes);
    }

    fn free_bytes(addresses: &IovaAllocator) -> u64 {
        addresses.free.iter().map(|(start, end)| end - start).sum()
    }

    #[test]
    fn neither_address_zero_nor_the_window_of_interrupts_is_given() {
        let usable = [0..=0xFEDF_FFFF, 0xFEF0_0000..=u64::MAX];
        for usable in [&[0..=u64::MAX] as &[_], &usable, &[]] {
            let mut addresses = IovaAllocator::new(usable, PAGE);
            let mut given = Vec::new();
            while let Some(start) = addresses.allocate(1 << 30, 0) {
                given.push(start);
                assert!(start >= MIN_IOVA);
                let clear = start > *MSI_WINDOW.end() || start + (1 << 30) <= *MSI_WINDOW.start();
                assert!(clear, "{start:x}");
                if given.len() == 600 {
                    break;
                }
            }
            assert!(given.len() > 400, "{usable:x?}: {given:x?}");
        }
    }

    #[test]
    fn what_the_kernel_tells_is_used_and_nothing_else() {
        let mut addresses = IovaAllocator::new(&[0x20_0000..=0x20_3FFF], PAGE);
        assert_eq!(addresses.allocate(4 * PAGE, 0), None, "no space for the guard page");
        assert_eq!(addresses.allocate(PAGE, 0), Some(0x20_0000));
        assert_eq!(addresses.allocate(PAGE, 0), Some(0x20_2000));
        assert_eq!(addresses.allocate(PAGE, 0), None);
        let bytes = addresses.retire(0x20_0000).unwrap();
        assert_eq!(addresses.allocate(PAGE, 0), None, "still mapped");
        addresses.free(0x20_0000, bytes);
        assert_eq!(addresses.allocate(PAGE, 0), Some(0x20_0000));
    }

    #[test]
    fn ranges_that_are_not_whole_pages_are_made_smaller() {
        let addresses = IovaAllocator::new(&[0x20_0001..=0x20_3FFE], PAGE);
        assert_eq!(addresses.free.iter().collect::<Vec<_>>(), [(&0x20_1000, &0x20_3000)]);
    }

    #[test]
    fn large_ranges_lie_in_their_huge_pages_as_the_memory_does() {
        let mut addresses = IovaAllocator::new(&[], PAGE);
        addresses.allocate(PAGE, 0x7000).unwrap();
        let start = addresses.allocate(4 << 20, 0x7F12_3456_7000).unwrap();
        assert_eq!(start % HUGE_BYTES, 0x7F12_3456_7000 % HUGE_BYTES);
    }

    #[test]
    fn there_is_a_last_range() {
        let mut addresses = IovaAllocator::new(&[], PAGE);
        let given = std::iter::from_fn(|| addresses.allocate(PAGE, 0)).count();
        assert_eq!(given, MAX_RANGES);
    }

    #[test]
    fn a_range_that_is_not_out_cannot_be_ended() {
        let mut addresses = IovaAllocator::new(&[], PAGE);
        let start = addresses.allocate(2 * PAGE, 0).unwrap();
        assert_eq!(addresses.retire(start + PAGE), None);
        assert_eq!((addresses.retire(start), addresses.retire(start)), (Some(2 * PAGE), None));
    }

    proptest! {
        #[test]
        fn ranges_never_meet_and_all_come_back(
            steps in prop::collection::vec((any::<bool>(), 1u64..1200, any::<u64>()), 1..300)
        ) {
            let usable = [0..=0x80_0FFF, 0x90_0000..=0x1FF_FFFF, 0x200_0000..=0x3FF_FFFF];
            let mut addresses = IovaAllocator::new(&usable, PAGE);
            let all = free_bytes(&addresses);
            let free_ranges = addresses.free.len();
            for (take, pages, random) in steps {
                if take {
                    let _ = addresses.allocate(pages * PAGE, random & !(PAGE - 1));
                } else if !addresses.allocated.is_empty() {
                    let index = random as usize % addresses.allocated.len();
                    let start = *addresses.allocated.keys().nth(index).unwrap();
                    retire_and_free(&mut addresses, start);
                }
                let mut out: Vec<(u64, u64)> =
                    addresses.allocated().map(|(start, bytes)| (start, start + bytes + PAGE)).collect();
                let guarded: u64 = out.iter().map(|(start, end)| end - start).sum();
                prop_assert_eq!(guarded + free_bytes(&addresses), all);
                out.extend(addresses.free.iter().map(|(&start, &end)| (start, end)));
                out.sort_unstable();
                prop_assert!(out.windows(2).all(|two| two[0].1 <= two[1].0), "{out:x?}");
                prop_assert!(out.iter().all(|(start, _)| start % PAGE == 0 && *start >= MIN_IOVA));
            }
            for start in addresses.allocated.keys().copied().collect::<Vec<_>>() {
                retire_and_free(&mut addresses, start);
            }
            prop_assert_eq!(addresses.free.len(), free_ranges, "free ranges are not merged");
            prop_assert_eq!(free_bytes(&addresses), all);
        }
    }
}
