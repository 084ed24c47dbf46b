//! What is remembered of lines that were detached: that they were there, and when they were used.
//!
//! Only the kind of a miss depends on it. It is bounded: the lines that left first are forgotten
//! first, and a miss of such a line counts as a first use again.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use super::line::LineName;
use crate::handle::ProcessHandle;

/// How many detached lines are remembered.
const MOST_REMEMBERED: usize = 1 << 16;

#[derive(Debug, Default)]
pub(crate) struct Departed {
    records: BTreeMap<LineName, Record>,
    /// In the order in which they left, with their numbers. A line that came back and left again
    /// has another number by then.
    order: VecDeque<(LineName, u64)>,
    next_number: u64,
}

#[derive(Debug)]
struct Record {
    last_use: u64,
    number: u64,
}

impl Departed {
    pub(crate) fn remember(&mut self, name: LineName, last_use: u64) {
        while self.order.len() >= MOST_REMEMBERED {
            self.drop_oldest();
        }
        let number = self.next_number;
        self.next_number += 1;
        self.records.insert(name, Record { last_use, number });
        self.order.push_back((name, number));
    }

    fn drop_oldest(&mut self) {
        let Some((name, number)) = self.order.pop_front() else { return };
        if self.records.get(&name).is_some_and(|record| record.number == number) {
            self.records.remove(&name);
        }
    }

    pub(crate) fn last_use(&self, name: LineName) -> Option<u64> {
        self.records.get(&name).map(|record| record.last_use)
    }

    /// Forgets the lines of a range, and tells of each when it was last used.
    pub(crate) fn drop_range(
        &mut self,
        process: ProcessHandle,
        range: Range<u64>,
    ) -> Vec<(LineName, u64)> {
        if range.is_empty() {
            return Vec::new();
        }
        let name = |address| LineName { process, address };
        let names = name(range.start)..name(range.end);
        let records = self.records.range(names);
        let gone: Vec<_> = records.map(|(&name, record)| (name, record.last_use)).collect();
        gone.iter().for_each(|&(name, _)| self.drop_line(name));
        gone
    }

    pub(crate) fn drop_line(&mut self, name: LineName) {
        // Its place in the order goes when its turn comes.
        self.records.remove(&name);
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.records.len() * size_of::<(LineName, Record)>()
            + self.order.len() * size_of::<(LineName, u64)>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(address: u64) -> LineName {
        LineName { process: ProcessHandle::new(1, 1).unwrap(), address }
    }

    #[test]
    fn the_lines_that_left_first_are_forgotten_first() {
        let mut departed = Departed::default();
        for line in 0..MOST_REMEMBERED as u64 + 10 {
            departed.remember(name(line), line);
        }
        assert_eq!(departed.last_use(name(9)), None);
        assert_eq!(departed.last_use(name(10)), Some(10));
        assert_eq!(departed.order.len(), MOST_REMEMBERED);
    }

    #[test]
    fn lines_that_come_and_go_do_not_fill_it() {
        let mut departed = Departed::default();
        departed.remember(name(7), 7);
        for turn in 1..MOST_REMEMBERED as u64 {
            departed.remember(name(turn % 3), turn);
            departed.drop_line(name(turn % 3));
        }
        departed.remember(name(0), 5);
        departed.remember(name(1), 6);
        assert_eq!(departed.order.len(), MOST_REMEMBERED);
        assert_eq!(departed.drop_range(name(0).process, 1..2), [(name(1), 6)]);
        departed.remember(name(1), 6);
        let last_uses = [7, 0, 1].map(|line| departed.last_use(name(line)));
        assert_eq!(last_uses, [None, Some(5), Some(6)]);
    }
}
