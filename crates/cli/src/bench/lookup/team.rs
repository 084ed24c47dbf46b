//! The members of a workload as one of them sees them: memory of its own, that of the others by
//! put and get, and barriers. Workloads know nothing else, so that tests can run them on threads.

use anyhow::ensure;

use crate::bench::group::Plain;

/// Some members, each with memory of the same length.
///
/// Between two barriers no member puts to what another member looks at: whoever writes a workload
/// sees to it.
pub(super) trait Team {
    /// The number of this member.
    fn rank(&self) -> usize;

    /// How many members there are.
    fn size(&self) -> usize;

    /// Lets `work` use this member's memory.
    fn own<T: Plain, R>(&mut self, work: impl FnOnce(&mut [T]) -> R) -> R;

    /// Copies out of a member's memory, one's own included.
    fn get<T: Plain>(&mut self, rank: usize, place: usize, buffer: &mut [T]) -> anyhow::Result<()>;

    /// Copies into a member's memory. Places of both are counted in values.
    fn put<T: Plain>(&mut self, rank: usize, place: usize, data: &[T]) -> anyhow::Result<()>;

    /// Waits until all members are here.
    fn barrier(&mut self) -> anyhow::Result<()>;

    /// Hands some words to all members, and back what each of them has handed over. By messages:
    /// only for checks.
    fn gather(&mut self, words: &[u64]) -> anyhow::Result<Vec<Vec<u64>>>;
}

/// Adds up numbers over all members, in the order of their ranks.
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

/// Fails at every member when the claim is wrong at one of them.
pub(super) fn agree(team: &mut impl Team, right: bool, claim: &str) -> anyhow::Result<()> {
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
    use crate::bench::group::{Plain, bytes_of, bytes_of_mut};

    /// A member that is a thread.
    pub(in super::super) struct ThreadMember {
        rank: usize,
        shared: Arc<Shared>,
    }

    struct Shared {
        memories: Vec<Mutex<Vec<u64>>>,
        words: Vec<Mutex<Vec<u64>>>,
        barrier: Barrier,
    }

    /// Runs a member on each of `size` threads and hands back what they say.
    pub(in super::super) fn together<R: Send>(
        size: usize,
        bytes: usize,
        member: impl Fn(ThreadMember) -> R + Sync,
    ) -> Vec<R> {
        let shared = Arc::new(Shared {
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
            // any plain type here, and every pattern of bytes is a value of it.
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
