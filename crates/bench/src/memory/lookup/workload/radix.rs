//! Radix sort of integers. Every pass moves each key to its position among the keys of all members;
//! consecutive keys of one digit are put in small bursts, so that puts are spread over the whole
//! array.

use anyhow::ensure;

use super::Workload;
use crate::group::splitmix64;
use crate::memory::lookup::team::{Team, ensure_all};

const DIGIT_BITS: u32 = 11;
const DIGITS: usize = 1 << DIGIT_BITS;
const PASSES: u32 = u32::BITS.div_ceil(DIGIT_BITS);
/// Keys of one digit that are put together.
const BURST_KEYS: usize = 256;
/// Keys that are fetched from the window at a time.
const CHUNK_KEYS: usize = 4096;

pub(super) struct Radix {
    /// Keys of one member.
    keys: usize,
    size: usize,
}

impl Radix {
    pub(super) fn new(keys: usize, size: usize) -> anyhow::Result<Self> {
        ensure!(keys.is_multiple_of(size) && keys > 0, "{keys} keys cannot be dealt among {size}");
        ensure!(u32::try_from(keys).is_ok(), "places of {keys} keys do not fit a word");
        Ok(Self { keys: keys / size, size })
    }

    /// Offset of the array of a pass; a pass writes its result to the array of the next.
    fn array(&self, pass: u32) -> usize {
        pass as usize % 2 * self.keys
    }

    /// Offset of the counts of a member, in the memory of every member.
    fn counts(&self, rank: usize) -> usize {
        2 * self.keys + rank * DIGITS
    }

    /// Calls `look` with all own keys, in order.
    fn each_chunk<T: Team>(
        &self,
        team: &mut T,
        pass: u32,
        mut look: impl FnMut(&mut T, &[u32]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let (own, array) = (team.rank(), self.array(pass));
        let mut chunk = [0u32; CHUNK_KEYS];
        for first in (0..self.keys).step_by(CHUNK_KEYS) {
            let chunk = &mut chunk[..CHUNK_KEYS.min(self.keys - first)];
            team.get(own, array + first, chunk)?;
            look(team, chunk)?;
        }
        Ok(())
    }

    /// Position of the next key of each digit.
    fn digit_offsets(&self, team: &mut impl Team, pass: u32) -> anyhow::Result<Vec<u32>> {
        let mut counts = vec![0u32; DIGITS];
        self.each_chunk(team, pass, |_, keys| {
            keys.iter().for_each(|&key| counts[digit(key, pass)] += 1);
            Ok(())
        })?;
        for peer in 0..self.size {
            team.put(peer, self.counts(team.rank()), &counts)?;
        }
        team.barrier()?;
        let (own, size, first) = (team.rank(), self.size, self.counts(0));
        Ok(team.own(|words: &mut [u32]| {
            let all = &words[first..][..size * DIGITS];
            let mut next = 0;
            let mut places = vec![0; DIGITS];
            for (digit, place) in places.iter_mut().enumerate() {
                for rank in 0..size {
                    if rank == own {
                        *place = next;
                    }
                    next += all[rank * DIGITS + digit];
                }
            }
            places
        }))
    }

    /// Puts keys to their positions, which may be at two members.
    fn put(
        &self,
        team: &mut impl Team,
        array: usize,
        place: u32,
        keys: &[u32],
    ) -> anyhow::Result<()> {
        let (mut place, mut keys) = (place as usize, keys);
        while !keys.is_empty() {
            let (rank, at) = (place / self.keys, place % self.keys);
            let (now, later) = keys.split_at(keys.len().min(self.keys - at));
            team.put(rank, array + at, now)?;
            (place, keys) = (place + now.len(), later);
        }
        Ok(())
    }

    fn permute(&self, team: &mut impl Team, pass: u32) -> anyhow::Result<()> {
        let mut places = self.digit_offsets(team, pass)?;
        let array = self.array(pass + 1);
        let mut bursts = vec![0u32; DIGITS * BURST_KEYS];
        let mut waiting = vec![0u16; DIGITS];
        self.each_chunk(team, pass, |team, keys| {
            for &key in keys {
                let digit = digit(key, pass);
                let burst = &mut bursts[digit * BURST_KEYS..][..BURST_KEYS];
                burst[usize::from(waiting[digit])] = key;
                waiting[digit] += 1;
                if usize::from(waiting[digit]) == BURST_KEYS {
                    self.put(team, array, places[digit], burst)?;
                    places[digit] += BURST_KEYS as u32;
                    waiting[digit] = 0;
                }
            }
            Ok(())
        })?;
        for (digit, &count) in waiting.iter().enumerate() {
            let rest = &bursts[digit * BURST_KEYS..][..usize::from(count)];
            self.put(team, array, places[digit], rest)?;
        }
        team.barrier()
    }
}

impl Workload for Radix {
    fn bytes(&self) -> usize {
        self.counts(self.size) * size_of::<u32>()
    }

    fn prepare(&mut self, team: &mut impl Team) -> anyhow::Result<()> {
        let (first, count) = ((team.rank() * self.keys) as u64, self.keys);
        team.own(|keys: &mut [u32]| {
            for (key, place) in keys[..count].iter_mut().zip(first..) {
                *key = splitmix64(place) as u32;
            }
        });
        Ok(())
    }

    fn run(&mut self, team: &mut impl Team) -> anyhow::Result<()> {
        (0..PASSES).try_for_each(|pass| self.permute(team, pass))
    }

    fn check(&mut self, team: &mut impl Team) -> anyhow::Result<u64> {
        let (array, count) = (self.array(PASSES), self.keys);
        let first = (team.rank() * count) as u64;
        let before =
            (first..).take(count).map(|place| splitmix64(u64::from(splitmix64(place) as u32)));
        let before = before.fold(0, u64::wrapping_add);
        let (sorted, edges, after) = team.own(|keys: &mut [u32]| {
            let keys = &keys[array..][..count];
            let after = keys.iter().map(|&key| splitmix64(key.into())).fold(0, u64::wrapping_add);
            (keys.is_sorted(), [keys[0], keys[count - 1]], after)
        });
        let [low, high] = edges.map(u64::from);
        let all = team.gather(&[low, high, before, after])?;
        let in_order = all.windows(2).all(|pair| pair[0][1] <= pair[1][0]);
        ensure_all(team, sorted && in_order, "the keys are in order")?;
        let total = |word: usize| all.iter().map(|words| words[word]).fold(0, u64::wrapping_add);
        ensure_all(team, total(2) == total(3), "no key is lost")?;
        Ok(total(3))
    }
}

fn digit(key: u32, pass: u32) -> usize {
    (key >> (pass * DIGIT_BITS)) as usize % DIGITS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::lookup::team::threads::run_members;

    #[test]
    fn a_lost_key_is_noticed() {
        let bytes = Radix::new(1 << 10, 1).unwrap().bytes();
        run_members(1, bytes, |mut team| {
            let mut radix = Radix::new(1 << 10, 1).unwrap();
            radix.prepare(&mut team).unwrap();
            radix.run(&mut team).unwrap();
            let array = radix.array(PASSES);
            team.own(|keys: &mut [u32]| keys[array] = keys[array + 1]);
            let error = radix.check(&mut team).unwrap_err().to_string();
            assert!(error.contains("no key is lost"), "{error}");
        });
    }
}
