//! The lines of one process, by address.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;

use super::table::AttachedLine;

/// The lines of one process, by address.
pub(crate) type LineMap = HashMap<u64, AttachedLine, BuildHasherDefault<AddressHasher>>;

/// A hash of one word: the halves of its product with a large odd number, combined. Every miss
/// computes it, and addresses of lines differ in their middle bits only.
#[derive(Debug, Default)]
pub(crate) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(self.0 ^ u64::from(byte));
        }
    }

    #[inline]
    fn write_u64(&mut self, word: u64) {
        let product = u128::from(word) * u128::from(0x9e37_79b9_7f4a_7c15_u64);
        self.0 = product as u64 ^ (product >> 64) as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The addresses in a range that have a line, in ascending order.
pub(crate) fn addresses_in(lines: &LineMap, range: Range<u64>, line_bytes: u64) -> Vec<u64> {
    if range.is_empty() {
        return Vec::new();
    }
    if (range.end - range.start) / line_bytes <= lines.len() as u64 {
        let first = range.start.next_multiple_of(line_bytes);
        let addresses = (first..range.end).step_by(line_bytes as usize);
        return addresses.filter(|address| lines.contains_key(address)).collect();
    }
    let mut found: Vec<u64> =
        lines.keys().copied().filter(|address| range.contains(address)).collect();
    found.sort_unstable();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(word: u64) -> u64 {
        let mut hasher = AddressHasher::default();
        hasher.write_u64(word);
        hasher.finish()
    }

    #[test]
    fn neighbouring_lines_differ_in_the_bits_that_tables_use() {
        // The table takes its bucket from the low bits, and tells lines apart by the upper seven.
        for line_shift in [12, 15, 18, 21] {
            let hashes: Vec<u64> = (0..4096).map(|line| hash(line << line_shift)).collect();
            for bits in [|hash: u64| hash % 4096, |hash: u64| hash >> 57] {
                let mut counts = HashMap::<u64, u32>::new();
                hashes.iter().for_each(|&hash| *counts.entry(bits(hash)).or_default() += 1);
                let even = 4096 / counts.len().max(1) as u32;
                assert!(counts.values().all(|&count| count <= 12 * even.max(1)), "{line_shift}");
                assert!(counts.len() > 100, "{line_shift}");
            }
        }
    }

    #[test]
    fn short_and_long_ranges_find_the_same_lines() {
        let mut lines = LineMap::default();
        for line in [3, 5, 8, 1000] {
            lines.insert(line * 4096, AttachedLine::new());
        }
        let found = |range: Range<u64>| addresses_in(&lines, range, 4096);
        assert_eq!(found(5 * 4096..9 * 4096), [5 * 4096, 8 * 4096]);
        assert_eq!(found(5 * 4096..u64::MAX), [5 * 4096, 8 * 4096, 1000 * 4096]);
        assert_eq!(found(0..4 * 4096), [3 * 4096]);
        assert_eq!(found(9..9), []);
    }
}
