//! Blocks at random positions of a large window, got and put alternately: the worst case for a
//! translation cache. The other members read one half of the window; the other half is divided
//! among the members that write to it.

use anyhow::ensure;

use super::Workload;
use crate::group::splitmix64;
use crate::memory::lookup::team::{Team, ensure_all};

const SLOT_WORDS: usize = (64 << 10) / 8;
/// Minimum size of a block in words. Blocks are 1, 2, 4, 8 or 16 times as large, up to a slot.
const MIN_WORDS: usize = (4 << 10) / 8;
/// Accesses of one member in one run.
const ACCESSES: u64 = 4096;
/// Difference of two consecutive words.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

pub(super) struct Random {
    /// Slots of each half.
    slots: usize,
    size: usize,
    run: u64,
}

/// One access: position, length and direction.
struct RandomAccess {
    slot: usize,
    words: usize,
    puts: bool,
}

impl Random {
    /// Windows of `megabytes` MiB.
    pub(super) fn new(megabytes: usize, size: usize) -> anyhow::Result<Self> {
        let slots = (megabytes << 20) / 2 / (SLOT_WORDS * 8);
        ensure!(slots >= size, "{megabytes} MiB are too small for {size} members");
        Ok(Self { slots, size, run: 0 })
    }

    /// Accesses of a member in this run, each with the member that it accesses.
    fn accesses(&self, rank: usize) -> impl Iterator<Item = (usize, RandomAccess)> + use<> {
        let (slots, size, run) = (self.slots, self.size, self.run);
        let seed = splitmix64(run << 32 | rank as u64);
        (0..ACCESSES).map(move |number| {
            let chance = splitmix64(seed ^ number);
            // The other members in turn, or this member if it is alone.
            let peer = if size == 1 { 0 } else { 1 + number as usize / 2 % (size - 1) };
            let puts = number % 2 == 1;
            // A put goes to the writer's part.
            let among = if puts { slots / size } else { slots };
            let slot = (chance >> 8) as usize % among;
            let slot = if puts { slots + rank * (slots / size) + slot } else { slot };
            let words = MIN_WORDS << (chance % 5);
            ((rank + peer) % size, RandomAccess { slot, words, puts })
        })
    }

    /// First word of a slot that a member has written in this run.
    fn written_word(&self, writer: usize, slot: usize) -> u64 {
        splitmix64(self.run << 40 ^ (writer as u64) << 32 ^ slot as u64)
    }
}

/// First word of a slot that never changes.
fn constant_word(owner: usize, slot: usize) -> u64 {
    splitmix64((owner as u64) << 48 | slot as u64)
}

fn fill(words: &mut [u64], first: u64) {
    let mut value = first;
    for word in words {
        *word = value;
        value = value.wrapping_add(STEP);
    }
}

fn is_filled(words: &[u64], first: u64) -> bool {
    let mut value = first;
    let mut wrong = 0;
    for word in words {
        wrong |= word ^ value;
        value = value.wrapping_add(STEP);
    }
    wrong == 0
}

impl Workload for Random {
    fn bytes(&self) -> usize {
        2 * self.slots * SLOT_WORDS * 8
    }

    fn prepare(&mut self, team: &mut impl Team) -> anyhow::Result<()> {
        self.run += 1;
        if self.run > 1 {
            return Ok(());
        }
        let (own, slots) = (team.rank(), self.slots);
        team.own(|words: &mut [u64]| {
            for (slot, words) in words.chunks_exact_mut(SLOT_WORDS).take(slots).enumerate() {
                fill(words, constant_word(own, slot));
            }
        });
        Ok(())
    }

    fn run(&mut self, team: &mut impl Team) -> anyhow::Result<()> {
        let own = team.rank();
        let mut block = vec![0; SLOT_WORDS];
        for (peer, access) in self.accesses(own) {
            let (place, block) = (access.slot * SLOT_WORDS, &mut block[..access.words]);
            if access.puts {
                fill(block, self.written_word(own, access.slot));
                team.put(peer, place, block)?;
            } else {
                team.get(peer, place, block)?;
                let right = is_filled(block, constant_word(peer, access.slot));
                ensure!(right, "slot {} of member {peer} holds something else", access.slot);
            }
        }
        team.barrier()
    }

    fn check(&mut self, team: &mut impl Team) -> anyhow::Result<u64> {
        let own = team.rank();
        let mut right = true;
        for writer in 0..self.size {
            for (peer, access) in self.accesses(writer) {
                if access.puts && peer == own {
                    let first = self.written_word(writer, access.slot);
                    right &= team.own(|words: &mut [u64]| {
                        is_filled(&words[access.slot * SLOT_WORDS..][..access.words], first)
                    });
                }
            }
        }
        ensure_all(team, right, "all that was put is there")?;
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::lookup::team::threads::run_members;

    #[test]
    fn a_wrong_word_is_noticed() {
        let bytes = Random::new(1, 1).unwrap().bytes();
        run_members(1, bytes, |mut team| {
            let mut random = Random::new(1, 1).unwrap();
            random.prepare(&mut team).unwrap();
            random.run(&mut team).unwrap();
            random.check(&mut team).unwrap();
            team.own(|words: &mut [u64]| {
                words.iter_mut().skip(SLOT_WORDS * 8).step_by(SLOT_WORDS).for_each(|w| *w += 1);
            });
            assert!(random.check(&mut team).is_err());
        });
    }

    #[test]
    fn no_two_members_write_to_the_same_slot() {
        let random = Random::new(4, 3).unwrap();
        let slots = |rank: usize| {
            let puts = random.accesses(rank).filter(|(_, access)| access.puts);
            puts.map(|(_, access)| access.slot).collect::<std::collections::BTreeSet<_>>()
        };
        assert!(slots(0).is_disjoint(&slots(1)));
        assert!(slots(1).is_disjoint(&slots(2)));
        let most = random.bytes() / 8 / SLOT_WORDS;
        assert!(slots(2).iter().all(|&slot| (random.slots..most).contains(&slot)));
    }
}
