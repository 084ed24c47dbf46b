//! Which addresses a device uses for which memory: ranges that are given out and come back.
//!
//! Nothing here talks to the kernel. Behind every range one page stays free, so that a device that
//! runs past the end of a buffer is stopped by the IOMMU instead of reaching the next one.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Ranges of this size and more begin at the same place in a huge page as the memory behind them, so
/// that the IOMMU can use huge pages too.
const HUGE_BYTES: u64 = 2 << 20;
/// Drivers take address 0 for none, and mistakes are near it.
const LOWEST: u64 = 1 << 20;
/// Writes of devices to these addresses are interrupts and not memory.
const INTERRUPTS: RangeInclusive<u64> = 0xFEE0_0000..=0xFEEF_FFFF;
/// What every IOMMU of this kind has, where the kernel does not tell (before Linux 5.4).
const USUAL: [RangeInclusive<u64>; 2] = [LOWEST..=0xFEDF_FFFF, (1 << 32)..=((1 << 39) - 1)];
/// How many ranges can be out at a time: as many as the kernel maps for one container by default.
const MOST_RANGES: usize = 65_535;

/// The addresses of a device.
#[derive(Debug)]
pub struct Addresses {
    page_bytes: u64,
    /// First address of each free range, and the address after its last. None touches another.
    free: BTreeMap<u64, u64>,
    /// First address of each range that is out, and its bytes without the page behind it.
    taken: BTreeMap<u64, u64>,
}

impl Addresses {
    /// All addresses in `usable`, as the kernel tells them: first and last. None means that it does
    /// not tell.
    pub fn new(usable: &[RangeInclusive<u64>], page_bytes: u64) -> Self {
        assert!(page_bytes.is_power_of_two());
        let usable = if usable.is_empty() { &USUAL } else { usable };
        let mut addresses = Self { page_bytes, free: BTreeMap::new(), taken: BTreeMap::new() };
        for range in usable {
            // The page of the very last address is left out: the address after it has no number.
            let (start, end) = ((*range.start()).max(LOWEST), range.end().saturating_add(1));
            addresses.offer(start, end.min(*INTERRUPTS.start()));
            addresses.offer(start.max(*INTERRUPTS.end() + 1), end);
        }
        addresses
    }

    /// Takes a range of whole pages for the memory at `memory`, or `None` where no free range is
    /// large enough or too many are out. The lowest that fits is taken.
    pub fn take(&mut self, bytes: u64, memory: u64) -> Option<u64> {
        debug_assert!(bytes > 0 && bytes.is_multiple_of(self.page_bytes));
        if self.taken.len() >= MOST_RANGES {
            return None;
        }
        let with_guard = bytes.checked_add(self.page_bytes)?;
        let (from, until, start) = self.free.iter().find_map(|(&from, &until)| {
            let start = if bytes >= HUGE_BYTES { same_place(from, memory)? } else { from };
            let fits = start.checked_add(with_guard)? <= until;
            fits.then_some((from, until, start))
        })?;
        self.free.remove(&from);
        self.keep(from, start);
        self.keep(start + with_guard, until);
        self.taken.insert(start, bytes);
        Some(start)
    }

    /// Ends the use of the range that begins here, and gives its bytes; `None` if it is not out. It is
    /// not given out again before [`Addresses::give_back`].
    pub fn end(&mut self, start: u64) -> Option<u64> {
        self.taken.remove(&start)
    }

    /// Gives a range back whose use has ended.
    pub fn give_back(&mut self, start: u64, bytes: u64) {
        self.offer(start, start + bytes + self.page_bytes);
    }

    /// All ranges that are out: first address and bytes.
    pub fn taken(&self) -> impl Iterator<Item = (u64, u64)> {
        self.taken.iter().map(|(&start, &bytes)| (start, bytes))
    }

    /// Makes the whole pages of a range free, together with what lies next to it.
    fn offer(&mut self, start: u64, end: u64) {
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
        self.keep(start, end);
    }

    fn keep(&mut self, start: u64, end: u64) {
        if start < end {
            self.free.insert(start, end);
        }
    }
}

/// The first address from `from` on that lies in its huge page where `memory` does.
fn same_place(from: u64, memory: u64) -> Option<u64> {
    from.checked_add(memory.wrapping_sub(from) % HUGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = 4096;

    fn end(addresses: &mut Addresses, start: u64) {
        let bytes = addresses.end(start).unwrap();
        addresses.give_back(start, bytes);
    }

    fn free_bytes(addresses: &Addresses) -> u64 {
        addresses.free.iter().map(|(start, end)| end - start).sum()
    }

    #[test]
    fn neither_address_zero_nor_the_window_of_interrupts_is_given() {
        let usable = [0..=0xFEDF_FFFF, 0xFEF0_0000..=u64::MAX];
        for usable in [&[0..=u64::MAX] as &[_], &usable, &[]] {
            let mut addresses = Addresses::new(usable, PAGE);
            let mut given = Vec::new();
            while let Some(start) = addresses.take(1 << 30, 0) {
                given.push(start);
                assert!(start >= LOWEST);
                let clear = start > *INTERRUPTS.end() || start + (1 << 30) <= *INTERRUPTS.start();
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
        let mut addresses = Addresses::new(&[0x20_0000..=0x20_3FFF], PAGE);
        assert_eq!(addresses.take(4 * PAGE, 0), None, "no room for the page behind it");
        assert_eq!(addresses.take(PAGE, 0), Some(0x20_0000));
        assert_eq!(addresses.take(PAGE, 0), Some(0x20_2000));
        assert_eq!(addresses.take(PAGE, 0), None);
        let bytes = addresses.end(0x20_0000).unwrap();
        assert_eq!(addresses.take(PAGE, 0), None, "still mapped");
        addresses.give_back(0x20_0000, bytes);
        assert_eq!(addresses.take(PAGE, 0), Some(0x20_0000));
    }

    #[test]
    fn ranges_that_are_not_whole_pages_are_made_smaller() {
        let addresses = Addresses::new(&[0x20_0001..=0x20_3FFE], PAGE);
        assert_eq!(addresses.free.iter().collect::<Vec<_>>(), [(&0x20_1000, &0x20_3000)]);
    }

    #[test]
    fn large_ranges_lie_in_their_huge_pages_as_the_memory_does() {
        let mut addresses = Addresses::new(&[], PAGE);
        addresses.take(PAGE, 0x7000).unwrap();
        let start = addresses.take(4 << 20, 0x7F12_3456_7000).unwrap();
        assert_eq!(start % HUGE_BYTES, 0x7F12_3456_7000 % HUGE_BYTES);
    }

    #[test]
    fn there_is_a_last_range() {
        let mut addresses = Addresses::new(&[], PAGE);
        let given = std::iter::from_fn(|| addresses.take(PAGE, 0)).count();
        assert_eq!(given, MOST_RANGES);
    }

    #[test]
    fn a_range_that_is_not_out_cannot_be_ended() {
        let mut addresses = Addresses::new(&[], PAGE);
        let start = addresses.take(2 * PAGE, 0).unwrap();
        assert_eq!(addresses.end(start + PAGE), None);
        assert_eq!((addresses.end(start), addresses.end(start)), (Some(2 * PAGE), None));
    }

    proptest! {
        #[test]
        fn ranges_never_meet_and_all_come_back(
            steps in prop::collection::vec((any::<bool>(), 1u64..1200, any::<u64>()), 1..300)
        ) {
            let usable = [0..=0x80_0FFF, 0x90_0000..=0x1FF_FFFF, 0x200_0000..=0x3FF_FFFF];
            let mut addresses = Addresses::new(&usable, PAGE);
            let all = free_bytes(&addresses);
            let pieces = addresses.free.len();
            for (take, pages, random) in steps {
                if take {
                    let _ = addresses.take(pages * PAGE, random & !(PAGE - 1));
                } else if !addresses.taken.is_empty() {
                    let index = random as usize % addresses.taken.len();
                    let start = *addresses.taken.keys().nth(index).unwrap();
                    end(&mut addresses, start);
                }
                let mut out: Vec<(u64, u64)> =
                    addresses.taken().map(|(start, bytes)| (start, start + bytes + PAGE)).collect();
                let guarded: u64 = out.iter().map(|(start, end)| end - start).sum();
                prop_assert_eq!(guarded + free_bytes(&addresses), all);
                out.extend(addresses.free.iter().map(|(&start, &end)| (start, end)));
                out.sort_unstable();
                prop_assert!(out.windows(2).all(|two| two[0].1 <= two[1].0), "{out:x?}");
                prop_assert!(out.iter().all(|(start, _)| start % PAGE == 0 && *start >= LOWEST));
            }
            for start in addresses.taken.keys().copied().collect::<Vec<_>>() {
                end(&mut addresses, start);
            }
            prop_assert_eq!(addresses.free.len(), pieces, "not one piece again");
            prop_assert_eq!(free_bytes(&addresses), all);
        }
    }
}
