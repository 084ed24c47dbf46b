//! Collectives as a task of groups, for members made of this program. The data changes from operation
//! to operation, and the operations rotate over several buffers, so that no member finds the data of
//! others in its caches. The C candidate does the same steps.

use std::time::Instant;

use anyhow::ensure;

use crate::group::plain::{TouchedPages, splitmix64};
use crate::harness::{Sample, warm_up_iterations};

/// A collective that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CollectiveKind {
    /// No member continues before all have arrived.
    Barrier,
    /// The bytes of one member to all. The root changes from operation to operation.
    Broadcast,
    /// The sum of the doubles of all members, for all.
    Allreduce,
    /// A block from each member to each.
    Alltoall,
}

impl CollectiveKind {
    pub(crate) const ALL: [Self; 4] =
        [Self::Barrier, Self::Broadcast, Self::Allreduce, Self::Alltoall];

    /// The word in commands of groups.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Barrier => "barrier",
            Self::Broadcast => "bcast",
            Self::Allreduce => "allreduce",
            Self::Alltoall => "alltoall",
        }
    }

    /// The collective of a word.
    pub(crate) fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.word() == word)
    }

    /// Whether no member can leave an operation before all have entered it.
    fn synchronises(self) -> bool {
        self != Self::Broadcast
    }

    /// Bytes of a buffer for blocks of `bytes`.
    pub(crate) fn buffer_bytes(self, bytes: usize, members: usize) -> usize {
        if self == Self::Alltoall { bytes * members } else { bytes }
    }
}

/// The collectives of one member.
pub(crate) trait Collectives {
    /// Rank of this member.
    fn rank(&self) -> usize;
    /// Number of members.
    fn size(&self) -> usize;
    /// Waits for all members.
    fn barrier(&mut self) -> anyhow::Result<()>;
    /// Sends the words of the root to all.
    fn broadcast(&mut self, root: usize, words: &mut [u64]) -> anyhow::Result<()>;
    /// Adds doubles, which are passed as their bits.
    fn sum(&mut self, own: &[u64], sums: &mut [u64]) -> anyhow::Result<()>;
    /// Sends a block to every member and receives one from it.
    fn alltoall(&mut self, sent: &[u64], received: &mut [u64]) -> anyhow::Result<()>;
    /// The largest value of all members.
    fn maximum(&mut self, value: f64) -> anyhow::Result<f64>;
}

/// Sets of buffers; `FEW_SETS` if they are large.
pub(crate) const MAX_SETS: usize = 4;
const FEW_SETS: usize = 2;
/// Buffers with more bytes are large.
const LARGE_BYTES: usize = 4 << 20;
/// Up to this size operations that synchronise all members follow each other without a pause.
const BACK_TO_BACK_BYTES: usize = 1024;

/// Buffers of a member, and the number of operations so far, which is the same at all members.
#[derive(Debug, Default)]
pub(crate) struct CollectiveBuffers {
    sets: Vec<[TouchedPages<u64>; 2]>,
    checked: Option<(CollectiveKind, usize)>,
    turns: u64,
}

/// A collective with its size, its buffers and its member.
struct Run<'a, C> {
    kind: CollectiveKind,
    /// Words of a block.
    block: usize,
    buffers: &'a mut CollectiveBuffers,
    member: &'a mut C,
}

/// Number of sets of buffers of this size.
pub(crate) fn set_count(buffer_bytes: usize) -> usize {
    if buffer_bytes > LARGE_BYTES { FEW_SETS } else { MAX_SETS }
}

/// Runs a collective on blocks of `bytes` and returns the time of the slowest member.
pub(crate) fn run_collective<C: Collectives>(
    member: &mut C,
    buffers: &mut CollectiveBuffers,
    kind: CollectiveKind,
    bytes: usize,
    iterations: u64,
) -> anyhow::Result<Sample> {
    ensure!(bytes.is_multiple_of(8), "blocks are whole words");
    buffers.hold(kind.buffer_bytes(bytes, member.size()))?;
    let is_checked = buffers.checked == Some((kind, bytes));
    let mut run = Run { kind, block: bytes / 8, buffers, member };
    if !is_checked {
        run.check_all_roots()?;
        run.buffers.checked = Some((kind, bytes));
    }
    run.turns(warm_up_iterations(iterations))?;
    let total_ns = run.turns(iterations)?;
    let last = run.buffers.turns - 1;
    ensure!(run.is_right(last), "the result of a timed collective is wrong");
    Ok(Sample::of_messages(run.member.maximum(total_ns)?))
}

impl CollectiveBuffers {
    fn hold(&mut self, bytes: usize) -> anyhow::Result<()> {
        if self.sets.first().is_some_and(|[sent, _]| sent.len() == bytes / 8) {
            return Ok(());
        }
        // The old buffers are dropped first: there may not be enough memory for both.
        self.sets.clear();
        self.checked = None;
        for _ in 0..set_count(bytes) {
            self.sets.push([TouchedPages::new(bytes / 8)?, TouchedPages::new(bytes / 8)?]);
        }
        Ok(())
    }
}

impl<C: Collectives> Run<'_, C> {
    fn set(&mut self, turn: u64) -> &mut [TouchedPages<u64>; 2] {
        let sets = &mut self.buffers.sets;
        let count = sets.len() as u64;
        &mut sets[(turn % count) as usize]
    }

    fn root(&self, turn: u64) -> usize {
        (turn % self.member.size() as u64) as usize
    }

    /// Changes the data for a turn.
    fn change(&mut self, turn: u64) {
        let (kind, block, own, root) = (self.kind, self.block, self.member.rank(), self.root(turn));
        let [sent, _] = self.set(turn);
        match kind {
            CollectiveKind::Barrier => {}
            CollectiveKind::Broadcast if own == root => fill(sent, first_word(root, 0, turn)),
            CollectiveKind::Broadcast => {}
            CollectiveKind::Allreduce => {
                let first = summand(own, turn);
                for (place, word) in sent.iter_mut().enumerate() {
                    *word = (first + (place & 255) as f64).to_bits();
                }
            }
            CollectiveKind::Alltoall => {
                for (to, part) in sent.chunks_exact_mut(block).enumerate() {
                    fill(part, first_word(own, to, turn));
                }
            }
        }
    }

    /// Runs the operation of a turn.
    #[inline]
    fn operate(&mut self, turn: u64) -> anyhow::Result<()> {
        let root = self.root(turn);
        let count = self.buffers.sets.len() as u64;
        let [sent, received] = &mut self.buffers.sets[(turn % count) as usize];
        match self.kind {
            CollectiveKind::Barrier => self.member.barrier(),
            CollectiveKind::Broadcast => {
                let words = if self.member.rank() == root { sent } else { received };
                self.member.broadcast(root, words)
            }
            CollectiveKind::Allreduce => self.member.sum(sent, received),
            CollectiveKind::Alltoall => self.member.alltoall(sent, received),
        }
    }

    /// Whether the result of a turn is right at this member.
    fn is_right(&mut self, turn: u64) -> bool {
        let (kind, block, own, root) = (self.kind, self.block, self.member.rank(), self.root(turn));
        let members = self.member.size();
        let [sent, received] = self.set(turn);
        match kind {
            CollectiveKind::Barrier => true,
            CollectiveKind::Broadcast => {
                let words = if own == root { sent } else { received };
                is_filled(words, first_word(root, 0, turn))
            }
            CollectiveKind::Allreduce => {
                let first: f64 = (0..members).map(|rank| summand(rank, turn)).sum();
                received.iter().enumerate().all(|(place, &word)| {
                    f64::from_bits(word) == first + members as f64 * (place & 255) as f64
                })
            }
            CollectiveKind::Alltoall => received
                .chunks_exact(block)
                .enumerate()
                .all(|(from, part)| is_filled(part, first_word(from, own, turn))),
        }
    }

    /// Verifies one operation for each root.
    fn check_all_roots(&mut self) -> anyhow::Result<()> {
        let mut is_right = true;
        for _ in 0..self.member.size() {
            let turn = self.buffers.turns;
            self.change(turn);
            self.set(turn)[1].fill(0);
            self.operate(turn)?;
            is_right &= self.is_right(turn);
            self.buffers.turns += 1;
        }
        let wrong = self.member.maximum(if is_right { 0.0 } else { 1.0 })?;
        ensure!(wrong == 0.0, "the result of a collective is wrong");
        Ok(())
    }

    /// Runs operations and returns their time at this member.
    fn turns(&mut self, iterations: u64) -> anyhow::Result<f64> {
        let buffer_bytes = self.kind.buffer_bytes(8 * self.block, self.member.size());
        if self.kind.synchronises() && buffer_bytes <= BACK_TO_BACK_BYTES {
            self.member.barrier()?;
            let begin = Instant::now();
            for _ in 0..iterations {
                let turn = self.buffers.turns;
                self.change(turn);
                self.operate(turn)?;
                self.buffers.turns += 1;
            }
            return Ok(begin.elapsed().as_nanos() as f64);
        }
        let mut total_ns = 0.0;
        for _ in 0..iterations {
            let turn = self.buffers.turns;
            self.change(turn);
            self.member.barrier()?;
            let begin = Instant::now();
            self.operate(turn)?;
            total_ns += begin.elapsed().as_nanos() as f64;
            self.buffers.turns += 1;
        }
        Ok(total_ns)
    }
}

fn first_word(from: usize, to: usize, turn: u64) -> u64 {
    splitmix64(turn.wrapping_mul(4096).wrapping_add((from * 64 + to) as u64))
}

fn word(first: u64, place: usize) -> u64 {
    first.wrapping_add((place as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

fn fill(words: &mut [u64], first: u64) {
    for (place, to) in words.iter_mut().enumerate() {
        *to = word(first, place);
    }
}

fn is_filled(words: &[u64], first: u64) -> bool {
    words.iter().enumerate().all(|(place, &found)| found == word(first, place))
}

/// First of the small whole numbers of a member, whose sums are exact.
fn summand(rank: usize, turn: u64) -> f64 {
    (rank as u64 * 1000 + turn % 1000) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::exchange::threads::{ExchangeThread, run_members};
    use crate::group::exchange::{Exchange, exchange_blocks, gather_all};

    /// Collectives out of exchanges, with a broken byte if `breaks` says so.
    struct Plain {
        exchange: ExchangeThread,
        breaks: bool,
    }

    impl Collectives for Plain {
        fn rank(&self) -> usize {
            self.exchange.rank()
        }

        fn size(&self) -> usize {
            self.exchange.size()
        }

        fn barrier(&mut self) -> anyhow::Result<()> {
            self.maximum(0.0).map(drop)
        }

        fn broadcast(&mut self, root: usize, words: &mut [u64]) -> anyhow::Result<()> {
            let mut all = vec![0; words.len() * self.size()];
            gather_all(&mut self.exchange, words, &mut all)?;
            words.copy_from_slice(&all[root * words.len()..][..words.len()]);
            words[0] ^= u64::from(self.breaks && self.rank() != root);
            Ok(())
        }

        fn sum(&mut self, own: &[u64], sums: &mut [u64]) -> anyhow::Result<()> {
            let mut all = vec![0; own.len() * self.size()];
            gather_all(&mut self.exchange, own, &mut all)?;
            for (place, sum) in sums.iter_mut().enumerate() {
                let values = all.iter().skip(place).step_by(own.len());
                *sum = values.map(|&bits| f64::from_bits(bits)).sum::<f64>().to_bits();
            }
            Ok(())
        }

        fn alltoall(&mut self, sent: &[u64], received: &mut [u64]) -> anyhow::Result<()> {
            exchange_blocks(&mut self.exchange, sent, received)
        }

        fn maximum(&mut self, value: f64) -> anyhow::Result<f64> {
            let mut all = vec![0.0; self.size()];
            gather_all(&mut self.exchange, &[value], &mut all)?;
            Ok(all.into_iter().fold(0.0, f64::max))
        }
    }

    #[test]
    fn every_collective_is_checked_and_timed() {
        run_members(3, |exchange| {
            let mut member = Plain { exchange, breaks: false };
            let mut buffers = CollectiveBuffers::default();
            for kind in CollectiveKind::ALL {
                for bytes in [8, 4096] {
                    let bytes = if kind == CollectiveKind::Barrier { 0 } else { bytes };
                    let run = run_collective(&mut member, &mut buffers, kind, bytes, 5);
                    assert!(run.unwrap().total_ns > 0.0, "{kind:?}");
                }
            }
        });
    }

    #[test]
    fn a_broken_word_is_noticed_before_anything_is_timed() {
        run_members(2, |exchange| {
            let mut member = Plain { exchange, breaks: true };
            let kind = CollectiveKind::Broadcast;
            let run = run_collective(&mut member, &mut CollectiveBuffers::default(), kind, 64, 5);
            assert_eq!(run.unwrap_err().to_string(), "the result of a collective is wrong");
        });
    }

    #[test]
    fn large_buffers_have_few_sets() {
        assert_eq!((set_count(4 << 20), set_count(8 << 20)), (MAX_SETS, FEW_SETS));
        assert_eq!(CollectiveKind::Alltoall.buffer_bytes(8, 4), 32);
        assert_eq!(CollectiveKind::from_word("alltoall"), Some(CollectiveKind::Alltoall));
        assert_eq!(CollectiveKind::from_word("scatter"), None);
    }
}
