//! Integer bucket sort after the IS kernel of the NAS benchmarks: count the keys by bucket, assign
//! the buckets to members, exchange the keys, rank them. The C candidate does the same steps in the
//! same order.

use std::time::Instant;

use anyhow::ensure;

use crate::group::exchange::{
    Exchange, all_agree, exchange_blocks, exchange_parts, gather_all, sum_all,
};
use crate::group::plain::{TouchedPages, splitmix64};
use crate::harness::{Sample, warm_up_iterations};

const BUCKETS_LOG2: u32 = 10;
const BUCKETS: usize = 1 << BUCKETS_LOG2;

/// One member's part of a sort.
struct Sort<'a, E> {
    members: &'a mut E,
    all_keys: usize,
    /// Number of low bits of a key that are removed to get the index of its bucket.
    shift: u32,
    unsorted: TouchedPages<u32>,
    by_bucket: TouchedPages<u32>,
    arrived: TouchedPages<u32>,
    arrived_keys: usize,
    /// For every value of this member, the number of its keys that are at most this value.
    ranks: TouchedPages<u32>,
    counts: Vec<u32>,
    gathered_counts: Vec<u32>,
    totals: Vec<u32>,
    /// Range of values that this member ranks.
    values: std::ops::Range<u32>,
    messages_ns: f64,
}

/// Sorts 2^`keys_log2` keys repeatedly, and checks the last result.
pub(crate) fn integer_sort(
    members: &mut impl Exchange,
    keys_log2: u64,
    iterations: u64,
) -> anyhow::Result<Sample> {
    let fits = (u64::from(BUCKETS_LOG2) + 4..=30).contains(&keys_log2);
    let dealt = fits && (1usize << keys_log2).is_multiple_of(members.size());
    ensure!(dealt, "the keys cannot be dealt");
    let mut sort = Sort::new(members, keys_log2 as u32)?;
    for _ in 0..warm_up_iterations(iterations) {
        sort.sort_once()?;
    }
    all_agree(sort.members, true)?;
    sort.messages_ns = 0.0;
    let begin = Instant::now();
    for _ in 0..iterations {
        sort.sort_once()?;
    }
    let total_ns = begin.elapsed().as_nanos() as f64;
    let messages_ns = sort.messages_ns;
    ensure!(sort.is_sorted()?, "the keys are not sorted, or some were lost");
    Ok(Sample::of_parts(total_ns, messages_ns))
}

/// Approximately normally distributed key, as in IS: the mean of four numbers.
fn key_value(place: u64, range_log2: u32) -> u32 {
    let halves = |value: u64| (value >> 32) + (value & 0xFFFF_FFFF);
    let sum = halves(splitmix64(2 * place)) + halves(splitmix64(2 * place + 1));
    ((sum << range_log2) >> 34) as u32
}

impl<'a, E: Exchange> Sort<'a, E> {
    fn new(members: &'a mut E, keys_log2: u32) -> anyhow::Result<Self> {
        let (all_keys, range_log2) = (1usize << keys_log2, keys_log2 - 4);
        let keys = all_keys / members.size();
        let mut unsorted = TouchedPages::new(keys)?;
        let first = (members.rank() * keys) as u64;
        for (key, place) in unsorted.iter_mut().zip(first..) {
            *key = key_value(place, range_log2);
        }
        Ok(Self {
            all_keys,
            shift: range_log2 - BUCKETS_LOG2,
            unsorted,
            by_bucket: TouchedPages::new(keys)?,
            arrived: TouchedPages::new(all_keys)?,
            arrived_keys: 0,
            ranks: TouchedPages::new((1 << range_log2) + 1)?,
            counts: vec![0; BUCKETS],
            gathered_counts: vec![0; BUCKETS * members.size()],
            totals: vec![0; BUCKETS],
            values: 0..0,
            messages_ns: 0.0,
            members,
        })
    }

    fn sort_once(&mut self) -> anyhow::Result<()> {
        self.count_buckets();
        let begin = Instant::now();
        sum_all(self.members, &self.counts, &mut self.gathered_counts, &mut self.totals)?;
        self.messages_ns += begin.elapsed().as_nanos() as f64;
        let outgoing = self.assign_buckets();
        self.scatter_to_buckets();
        let begin = Instant::now();
        let mut incoming = vec![0u64; outgoing.len()];
        exchange_blocks(self.members, &outgoing, &mut incoming)?;
        let lengths = |counts: &[u64]| counts.iter().map(|&count| count as usize).collect();
        let (outgoing, incoming): (Vec<_>, Vec<_>) = (lengths(&outgoing), lengths(&incoming));
        self.arrived_keys = incoming.iter().sum();
        let places = (&mut self.arrived[..], &incoming[..]);
        exchange_parts(self.members, (&self.by_bucket, &outgoing), places)?;
        self.messages_ns += begin.elapsed().as_nanos() as f64;
        self.rank_keys();
        Ok(())
    }

    fn count_buckets(&mut self) {
        self.counts.fill(0);
        let counts = &mut self.counts[..BUCKETS];
        for &key in &*self.unsorted {
            counts[(key >> self.shift) as usize] += 1;
        }
    }

    /// Assigns consecutive buckets to a member until it has its share. Returns the number of keys
    /// for each member.
    fn assign_buckets(&mut self) -> Vec<u64> {
        let (size, own) = (self.members.size(), self.members.rank());
        let mut outgoing = vec![0; size];
        let (mut dealt, mut owner) = (0, 0);
        self.values = 0..0;
        for bucket in 0..BUCKETS {
            while owner < size - 1 && dealt * size >= self.all_keys * (owner + 1) {
                owner += 1;
            }
            let beyond = (bucket as u32 + 1) << self.shift;
            if owner < own {
                self.values.start = beyond;
            }
            if owner <= own {
                self.values.end = beyond;
            }
            outgoing[owner] += u64::from(self.counts[bucket]);
            dealt += self.totals[bucket] as usize;
        }
        outgoing
    }

    fn scatter_to_buckets(&mut self) {
        let mut starts = [0u32; BUCKETS];
        let mut start = 0;
        for (place, count) in starts.iter_mut().zip(&self.counts) {
            *place = start;
            start += count;
        }
        let by_bucket = &mut *self.by_bucket;
        for &key in &*self.unsorted {
            let place = &mut starts[(key >> self.shift) as usize];
            by_bucket[*place as usize] = key;
            *place += 1;
        }
    }

    fn rank_keys(&mut self) {
        let places = &mut self.ranks[..self.values.len() + 1];
        places.fill(0);
        for key in &self.arrived[..self.arrived_keys] {
            places[(key - self.values.start) as usize] += 1;
        }
        let mut sum = 0;
        for place in places {
            sum += *place;
            *place = sum;
        }
    }

    /// Moves every key to its sorted position, and returns whether no key is lost and the keys are
    /// in order over all members.
    fn is_sorted(&mut self) -> anyhow::Result<bool> {
        let arrived = &self.arrived[..self.arrived_keys];
        let mut sorted = vec![0; arrived.len()];
        let mut right = true;
        for &key in arrived {
            right &= self.values.contains(&key);
            if right {
                let place = &mut self.ranks[(key - self.values.start) as usize];
                *place -= 1;
                sorted[*place as usize] = key;
            }
        }
        right &= sorted.is_sorted();
        let own = [arrived.len() as u64, checksum(&sorted), checksum(&self.unsorted)];
        let mut all = vec![0; own.len() * self.members.size()];
        gather_all(self.members, &own, &mut all)?;
        let sum = |of: usize| all.iter().skip(of).step_by(3).fold(0u64, |a, &b| a.wrapping_add(b));
        right &= sum(0) == self.all_keys as u64 && sum(1) == sum(2);
        let mut ranges = vec![0; 2 * self.members.size()];
        gather_all(self.members, &[self.values.start, self.values.end], &mut ranges)?;
        right &= ranges.is_sorted();
        all_agree(self.members, right)
    }
}

fn checksum(keys: &[u32]) -> u64 {
    keys.iter().fold(0, |sum, &key| sum.wrapping_add(splitmix64(u64::from(key))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::exchange::threads::run_members;

    #[test]
    fn keys_are_sorted_over_any_number_of_members() {
        for size in [1, 2, 4] {
            run_members(size, |mut member| {
                integer_sort(&mut member, 16, 2).unwrap();
            });
        }
    }

    #[test]
    fn a_key_that_changed_on_its_way_is_noticed() {
        run_members(2, |mut member| {
            let mut sort = Sort::new(&mut member, 16).unwrap();
            sort.sort_once().unwrap();
            if sort.members.rank() == 1 {
                sort.arrived[0] = if sort.arrived[0] == sort.values.start {
                    sort.values.start + 1
                } else {
                    sort.values.start
                };
                sort.rank_keys();
            }
            assert!(!sort.is_sorted().unwrap());
        });
    }

    #[test]
    fn keys_that_cannot_be_dealt_are_refused() {
        run_members(3, |mut member| assert!(integer_sort(&mut member, 16, 1).is_err()));
        run_members(1, |mut member| assert!(integer_sort(&mut member, 8, 1).is_err()));
    }

    #[test]
    fn keys_crowd_in_the_middle_of_their_range() {
        let keys: Vec<_> = (0..10_000).map(|place| key_value(place, 12)).collect();
        assert!(keys.iter().all(|&key| key < 1 << 12));
        let middle = keys.iter().filter(|&&key| (1 << 10..3 << 10).contains(&key)).count();
        assert!(middle > 8_000, "{middle}");
    }
}
