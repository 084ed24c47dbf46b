//! Pages at random positions of a window that is far larger than the memory behind it. Every page
//! is put once and got once, so the cache rarely has it; only these pages use memory.

use anyhow::ensure;

use super::Workload;
use crate::group::splitmix64;
use crate::memory::lookup::team::{Team, ensure_all};

const PAGE_WORDS: usize = 4096 / 8;
/// Pages that one member writes in one run.
const PAGES: u64 = 8192;

pub(super) struct Sparse {
    bytes: usize,
    size: usize,
}

impl Sparse {
    /// Windows of `gigabytes` GiB.
    pub(super) fn new(gigabytes: usize, size: usize) -> anyhow::Result<Self> {
        let bytes = gigabytes << 30;
        ensure!(bytes / 8 / PAGE_WORDS / size >= PAGES as usize, "too small for so many pages");
        Ok(Self { bytes, size })
    }

    /// Page with a number of a member: every number has a range of its own, so that all pages
    /// differ.
    fn page(&self, rank: usize, number: u64) -> usize {
        let stretch = self.bytes / 8 / PAGE_WORDS / PAGES as usize;
        // The step of 4097 visits all ranges, and never two adjacent ranges in succession.
        let at = (number * 4097 % PAGES) as usize;
        let part = stretch / self.size;
        at * stretch + rank * part + splitmix64(number) as usize % part
    }
}

impl Workload for Sparse {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn prepare(&mut self, _team: &mut impl Team) -> anyhow::Result<()> {
        Ok(())
    }

    fn run(&mut self, team: &mut impl Team) -> anyhow::Result<()> {
        let (own, peer) = (team.rank(), (team.rank() + 1) % self.size);
        let mut words = [0u64; PAGE_WORDS];
        for number in 0..PAGES {
            words.fill(splitmix64(number ^ (own as u64) << 32));
            team.put(peer, self.page(own, number) * PAGE_WORDS, &words)?;
        }
        for number in 0..PAGES {
            team.get(peer, self.page(own, number) * PAGE_WORDS, &mut words)?;
            let expected = splitmix64(number ^ (own as u64) << 32);
            ensure!(words.iter().all(|word| *word == expected), "page {number} was not kept");
        }
        team.barrier()
    }

    fn check(&mut self, team: &mut impl Team) -> anyhow::Result<u64> {
        // Every page was verified when it was got back.
        ensure_all(team, true, "all pages were kept")?;
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pages_of_all_members_differ_and_lie_in_the_window() {
        let sparse = Sparse::new(1, 2).unwrap();
        let mut pages: Vec<_> = (0..2)
            .flat_map(|rank| (0..PAGES).map(move |number| (rank, number)))
            .map(|(rank, number)| sparse.page(rank, number))
            .collect();
        pages.sort_unstable();
        assert!(pages.windows(2).all(|pair| pair[0] < pair[1]));
        assert!((pages[pages.len() - 1] + 1) * 4096 <= sparse.bytes());
    }
}
