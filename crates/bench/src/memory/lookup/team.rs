//! Members of a workload, from the side of one of them: its own memory, that of the others by put
//! and get, and barriers. Workloads use only this trait, so tests can run them on threads.

use anyhow::ensure;

use crate::group::Plain;

/// Members, each with memory of the same length.
///
/// Between two barriers no member puts to what another member reads: the workload guarantees it.
pub(super) trait Team {
    /// Rank of this member.
    fn rank(&self) -> usize;

    /// Number of members.
    fn size(&self) -> usize;

    /// Calls `work` with this member's memory.
    fn own<T: Plain, R>(&mut self, work: impl FnOnce(&mut [T]) -> R) -> R;

    /// Copies from a member's memory, including this member's own. `place` counts values.
    fn get<T: Plain>(&mut self, rank: usize, place: usize, buffer: &mut [T]) -> anyhow::Result<()>;

    /// Copies into a member's memory. `place` counts values.
    fn put<T: Plain>(&mut self, rank: usize, place: usize, data: &[T]) -> anyhow::Result<()>;

    /// Waits until all members have reached the barrier.
    fn barrier(&mut self) -> anyhow::Result<()>;

    /// Sends words to all members, and returns the words of each member. It uses messages, so it is
    /// only for checks.
    fn gather(&mut self, words: &[u64]) -> anyhow::Result<Vec<Vec<u64>>>;
}

/// Adds numbers over all members, in the order of their ranks.
pub(super) fn sum(team: &mut impl Team, numbers: &[f64]) -> anyhow::Result<Vec<f64>> {
    let words: Vec<u64> = numbers.iter().map(|number| number.to_bits()).collect();
    let mut total = vec![0.0; numbers.len()];
    for part in team.gather(&words)? {
        for (total, word) in total.iter_mut().zip(part) {
            *total += f64::from_bits(word);
        }
    }
    Ok(total)
}

/// Fails at every member if the claim is false at one of them.
pub(super) fn ensure_all(team: &mut impl Team, right: bool, claim: &str) -> anyhow::Result<()> {
    let answers = team.gather(&[u64::from(right)])?;
    let wrong: Vec<usize> = (0..answers.len()).filter(|&rank| answers[rank] != [1]).collect();
    ensure!(wrong.is_empty(), "{claim}: not so at member {wrong:?}");
    Ok(())
}

/// Members that are threads of a test.
#[cfg(test)]
pub(super) mod threads {
    use std::sync::{Arc, Barrier, Mutex};

    use super::Team;
    use crate::group::{Plain, bytes_of, bytes_of_mut};

    /// A member that is a thread.
    pub(in super::super) struct ThreadMember {
        rank: usize,
        shared: Arc<ThreadMembersShared>,
    }

    struct ThreadMembersShared {
        memories: Vec<Mutex<Vec<u64>>>,
        words: Vec<Mutex<Vec<u64>>>,
        barrier: Barrier,
    }

    /// Runs a member on each of `size` threads and returns their results.
    pub(in super::super) fn run_members<R: Send>(
        size: usize,
        bytes: usize,
        member: impl Fn(ThreadMember) -> R + Sync,
    ) -> Vec<R> {
        let shared = Arc::new(ThreadMembersShared {
            memories: (0..size).map(|_| Mutex::new(vec![0; bytes.div_ceil(8)])).collect(),
            words: (0..size).map(|_| Mutex::default()).collect(),
            barrier: Barrier::new(size),
        });
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..size)
                .map(|rank| {
                    let (shared, member) = (shared.clone(), &member);
                    scope.spawn(move || member(ThreadMember { rank, shared }))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    impl Team for ThreadMember {
        fn rank(&self) -> usize {
            self.rank
        }

        fn size(&self) -> usize {
            self.shared.memories.len()
        }

        fn own<T: Plain, R>(&mut self, work: impl FnOnce(&mut [T]) -> R) -> R {
            let mut memory = self.shared.memories[self.rank].lock().unwrap();
            let count = size_of_val(&**memory) / size_of::<T>();
            // SAFETY: the vector's memory, borrowed by the lock; words are at least as aligned as
            // any plain type here, and every bit pattern is a value of it.
            work(unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), count) })
        }

        fn get<T: Plain>(
            &mut self,
            rank: usize,
            place: usize,
            buffer: &mut [T],
        ) -> anyhow::Result<()> {
            let memory = self.shared.memories[rank].lock().unwrap();
            let buffer = bytes_of_mut(buffer);
            buffer.copy_from_slice(&bytes_of(&memory)[place * size_of::<T>()..][..buffer.len()]);
            Ok(())
        }

        fn put<T: Plain>(&mut self, rank: usize, place: usize, data: &[T]) -> anyhow::Result<()> {
            let mut memory = self.shared.memories[rank].lock().unwrap();
            let data = bytes_of(data);
            bytes_of_mut(&mut memory)[place * size_of::<T>()..][..data.len()].copy_from_slice(data);
            Ok(())
        }

        fn barrier(&mut self) -> anyhow::Result<()> {
            self.shared.barrier.wait();
            Ok(())
        }

        fn gather(&mut self, words: &[u64]) -> anyhow::Result<Vec<Vec<u64>>> {
            *self.shared.words[self.rank].lock().unwrap() = words.to_vec();
            self.shared.barrier.wait();
            let all = self.shared.words.iter().map(|words| words.lock().unwrap().clone()).collect();
            self.shared.barrier.wait();
            Ok(all)
        }
    }
}
