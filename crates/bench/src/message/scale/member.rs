//! Members of this bench: one endpoint each, in a job with the default settings, not bound to a
//! core. Between commands they sleep. The C candidate does the same steps.

use std::io::BufRead;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use memferry::message::{Error, Job, Source, TAG_ALL};

use super::task::ScaleTask;
use crate::candidates::memferry_member::MemberGroup;
use crate::group::command::{QUIT, READY};
use crate::group::plain::TouchedPages;
use crate::group::splitmix64;
use crate::group::worker::WorkerArgs;
use crate::harness::{Sample, warm_up_iterations};
use crate::message::messages::{MessageBuffers, alltoall};
use crate::reply::write_line;

/// Tags of the messages along the tree, around the ring and to the ranks that wait. Those of
/// neighbours begin at the last one.
const TREE: u64 = 2;
const RING: u64 = 3;
const IDLE: u64 = 4;
const NEIGHBOURS: u64 = 16;

struct ScaleMember {
    group: MemberGroup,
    buffers: Option<MessageBuffers<TouchedPages<u8>>>,
}

/// Joins, and serves the bench until it receives `quit`.
pub(crate) fn run_member(args: &WorkerArgs) -> anyhow::Result<()> {
    let job = Job::join(&args.name, args.rank, args.size)?;
    let mut member = ScaleMember { group: MemberGroup::of(job), buffers: None };
    // The join has returned at every rank when this has returned at the first.
    member.tree_sum(1)?;
    let leads = args.rank == 0;
    if leads {
        write_line(READY)?;
    }
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if line.trim() == QUIT {
            break;
        }
        let (task, iterations) = ScaleTask::parse(&line).map_err(anyhow::Error::msg)?;
        let result = member.run(task, iterations);
        if leads {
            let reply = result.as_ref().map(|sample| *sample);
            write_line(&Sample::format_reply(reply.map_err(|error| format!("{error:#}"))))?;
        }
        // After an error the members may be in different states.
        result?;
    }
    Ok(())
}

impl ScaleMember {
    fn run(&mut self, task: ScaleTask, iterations: u64) -> anyhow::Result<Sample> {
        match task {
            ScaleTask::Ring => self.ring(iterations),
            ScaleTask::Neighbours(count) => self.neighbours(count, iterations),
            ScaleTask::Alltoall(bytes) => {
                alltoall(&mut self.group, &mut self.buffers, bytes, iterations)
            }
            ScaleTask::Idle => self.idle(Duration::from_millis(iterations)),
            ScaleTask::Connections => {
                // Every connection has two ends. No rank sends to itself.
                let own = self.group.job.endpoint().peers().len() as u64;
                Ok(Sample::of_total(self.tree_sum(own)? as f64 / 2.0))
            }
        }
    }

    fn send(&self, rank: usize, tag: u64, number: u64) -> Result<(), Error> {
        self.group.job.endpoint().send(self.group.peers[rank], tag, &number.to_le_bytes())
    }

    fn receive(&self, source: impl Into<Source>, tag: u64) -> Result<u64, Error> {
        let mut number = [0; 8];
        self.group.job.endpoint().recv(source, tag, TAG_ALL, &mut number)?;
        Ok(u64::from_le_bytes(number))
    }

    fn place(&self) -> (usize, usize) {
        (self.group.job.rank(), self.group.job.size())
    }

    /// The sum of a number of every rank, at the first rank. Its messages go along the connections
    /// that the job has from the beginning.
    fn tree_sum(&self, own: u64) -> Result<u64, Error> {
        let (rank, size) = self.place();
        let mut sum = own;
        for child in (2 * rank + 1..=2 * rank + 2).filter(|child| *child < size) {
            sum += self.receive(self.group.peers[child], TREE)?;
        }
        if rank > 0 {
            self.send((rank - 1) / 2, TREE, sum)?;
        }
        Ok(sum)
    }

    /// Sends a word from the first rank to all.
    fn release(&self, tag: u64, from_any: bool) -> Result<(), Error> {
        let (rank, size) = self.place();
        if rank > 0 && from_any {
            self.receive(Source::Any, tag)?;
        } else if rank > 0 {
            self.receive(self.group.peers[(rank - 1) / 2], tag)?;
        }
        for child in (2 * rank + 1..=2 * rank + 2).filter(|child| *child < size) {
            self.send(child, tag, 1)?;
        }
        Ok(())
    }

    fn barrier(&self) -> Result<(), Error> {
        self.tree_sum(1)?;
        self.release(TREE, false)
    }

    /// Passes a number around all ranks, each of which adds 1.
    fn lap(&self, number: u64) -> anyhow::Result<()> {
        let (rank, size) = self.place();
        let (next, previous) = ((rank + 1) % size, self.group.peers[(rank + size - 1) % size]);
        if rank == 0 {
            self.send(next, RING, number)?;
            let token = self.receive(previous, RING)?;
            ensure!(token == number + size as u64 - 1, "a number came around changed");
        } else {
            let token = self.receive(previous, RING)?;
            self.send(next, RING, token + 1)?;
        }
        Ok(())
    }

    fn ring(&self, laps: u64) -> anyhow::Result<Sample> {
        ensure!(self.group.job.size() > 1, "a ring needs two ranks");
        (0..warm_up_iterations(laps)).try_for_each(|number| self.lap(number))?;
        self.barrier()?;
        let begin = Instant::now();
        (0..laps).try_for_each(|number| self.lap(number))?;
        Ok(Sample::of_messages(begin.elapsed().as_nanos() as f64))
    }

    fn neighbours(&self, count: usize, iterations: u64) -> anyhow::Result<Sample> {
        let (rank, size) = self.place();
        ensure!(size > 1, "one rank has no neighbours");
        let neighbours: Vec<_> = (0..count)
            .map(|neighbour| {
                let cycle = random_cycle(size, neighbour);
                let source = cycle.iter().position(|target| *target == rank);
                (cycle[rank], source.expect("a cycle leads to every rank"))
            })
            .collect();
        for _ in 0..warm_up_iterations(iterations) {
            self.talk(&neighbours)?;
        }
        self.barrier()?;
        let begin = Instant::now();
        for _ in 0..iterations {
            self.talk(&neighbours)?;
        }
        self.barrier()?;
        Ok(Sample::of_messages(begin.elapsed().as_nanos() as f64))
    }

    /// Sends a message to every neighbour, and receives one from each rank that has this one as a
    /// neighbour.
    fn talk(&self, neighbours: &[(usize, usize)]) -> anyhow::Result<()> {
        let own = (self.group.job.rank() as u64).to_le_bytes();
        let mut received = vec![[0u8; 8]; neighbours.len()];
        self.group.job.endpoint().scope(|scope| {
            let mut operations = Vec::with_capacity(2 * neighbours.len());
            let places = received.iter_mut().zip(NEIGHBOURS..);
            for ((place, tag), &(_, source)) in places.zip(neighbours) {
                let source = self.group.peers[source];
                operations.push(scope.irecv(source, tag, TAG_ALL, &mut place[..])?);
            }
            for (&(target, _), tag) in neighbours.iter().zip(NEIGHBOURS..) {
                operations.push(scope.isend(self.group.peers[target], tag, &own[..])?);
            }
            for mut operation in operations {
                operation.wait()?;
            }
            Ok::<_, Error>(())
        })?;
        let is_right = |(bytes, &(_, source)): (&[u8; 8], &(usize, usize))| {
            u64::from_le_bytes(*bytes) == source as u64
        };
        if !received.iter().zip(neighbours).all(is_right) {
            bail!("a neighbour sent something else");
        }
        Ok(())
    }

    /// Every rank but the first waits in a receive from any rank, for this time.
    fn idle(&self, time: Duration) -> anyhow::Result<Sample> {
        self.barrier()?;
        let begin = Instant::now();
        if self.group.job.rank() == 0 {
            std::thread::sleep(time);
        }
        self.release(IDLE, true)?;
        Ok(Sample::of_total(begin.elapsed().as_nanos() as f64))
    }
}

/// A random cycle through all ranks: the next rank of each. No rank is followed by itself.
fn random_cycle(size: usize, number: usize) -> Vec<usize> {
    let mut cycle: Vec<_> = (0..size).collect();
    for place in (1..size).rev() {
        let random = splitmix64(((number as u64) << 32) + place as u64);
        cycle.swap(place, (random % place as u64) as usize);
    }
    cycle
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_random_cycle_visits_every_rank_once() {
        for size in [2, 3, 128] {
            for number in 0..4 {
                let cycle = random_cycle(size, number);
                let (mut rank, mut seen) = (0, vec![false; size]);
                for _ in 0..size {
                    assert!(!std::mem::replace(&mut seen[rank], true));
                    rank = cycle[rank];
                }
                assert_eq!(rank, 0);
            }
        }
    }
}
