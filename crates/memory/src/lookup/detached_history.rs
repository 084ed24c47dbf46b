//! History of detached lines: their last use.
//!
//! Only the classification of misses depends on it. It is bounded: the lines that were detached
//! first are dropped first, and a miss of a dropped line counts as cold.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use super::line::LineKey;
use crate::handle::ProcessHandle;

/// Maximum number of records.
const MAX_RECORDS: usize = 1 << 16;

#[derive(Debug, Default)]
pub(crate) struct DetachedHistory {
    records: BTreeMap<LineKey, DetachedRecord>,
    /// The lines in the order of detachment, with the numbers of their records. A line that was
    /// attached and detached again has a newer number.
    order: VecDeque<(LineKey, u64)>,
    next_number: u64,
}

#[derive(Debug)]
struct DetachedRecord {
    last_use: u64,
    number: u64,
}

impl DetachedHistory {
    pub(crate) fn insert(&mut self, name: LineKey, last_use: u64) {
        while self.order.len() >= MAX_RECORDS {
            self.drop_oldest();
        }
        let number = self.next_number;
        self.next_number += 1;
        self.records.insert(name, DetachedRecord { last_use, number });
        self.order.push_back((name, number));
    }

    fn drop_oldest(&mut self) {
        let Some((name, number)) = self.order.pop_front() else { return };
        if self.records.get(&name).is_some_and(|record| record.number == number) {
            self.records.remove(&name);
        }
    }

    pub(crate) fn last_use(&self, name: LineKey) -> Option<u64> {
        self.records.get(&name).map(|record| record.last_use)
    }

    /// Drops the lines of a range, and returns each with its last use.
    pub(crate) fn drop_range(
        &mut self,
        process: ProcessHandle,
        range: Range<u64>,
    ) -> Vec<(LineKey, u64)> {
        if range.is_empty() {
            return Vec::new();
        }
        let name = |address| LineKey { process, address };
        let names = name(range.start)..name(range.end);
        let records = self.records.range(names);
        let dropped: Vec<_> = records.map(|(&name, record)| (name, record.last_use)).collect();
        dropped.iter().for_each(|&(name, _)| self.drop_line(name));
        dropped
    }

    pub(crate) fn drop_line(&mut self, name: LineKey) {
        // Its element of `order` is dropped when it is the oldest.
        self.records.remove(&name);
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.records.len() * size_of::<(LineKey, DetachedRecord)>()
            + self.order.len() * size_of::<(LineKey, u64)>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(address: u64) -> LineKey {
        LineKey { process: ProcessHandle::new(1, 1).unwrap(), address }
    }

    #[test]
    fn the_lines_that_left_first_are_forgotten_first() {
        let mut history = DetachedHistory::default();
        for line in 0..MAX_RECORDS as u64 + 10 {
            history.insert(name(line), line);
        }
        assert_eq!(history.last_use(name(9)), None);
        assert_eq!(history.last_use(name(10)), Some(10));
        assert_eq!(history.order.len(), MAX_RECORDS);
    }

    #[test]
    fn lines_that_come_and_go_do_not_fill_it() {
        let mut history = DetachedHistory::default();
        history.insert(name(7), 7);
        for step in 1..MAX_RECORDS as u64 {
            history.insert(name(step % 3), step);
            history.drop_line(name(step % 3));
        }
        history.insert(name(0), 5);
        history.insert(name(1), 6);
        assert_eq!(history.order.len(), MAX_RECORDS);
        assert_eq!(history.drop_range(name(0).process, 1..2), [(name(1), 6)]);
        history.insert(name(1), 6);
        let last_uses = [7, 0, 1].map(|line| history.last_use(name(line)));
        assert_eq!(last_uses, [None, Some(5), Some(6)]);
    }
}
