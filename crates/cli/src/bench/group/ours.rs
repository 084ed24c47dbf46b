//! Our own members: an endpoint each, joined into a job.

use std::io;

use anyhow::bail;
use memferry::message::plan::Pinning;
use memferry::message::{Builder, Endpoint, Error, Job, Peer, ShareableBuffer, TAG_ALL};

use super::exchange::Exchange;
use super::fourier::fourier;
use super::integer_sort::integer_sort;
use super::landing::{Untouched, land};
use super::messages::{Buffers, Link, alltoall, pingpong};
use super::order::{Order, Task, Timing};
use super::plain::{Memory, Touched};
use super::worker::{Member, WorkerArgs};

/// Every message of the benches has the same tag: order tells them apart.
const TAG: u64 = 1;

struct Ours<M> {
    team: Team,
    held: Option<Buffers<M>>,
    /// The size of messages into fresh memory that was last checked.
    landed: usize,
    checked_points: u64,
}

/// The members as one of them sees them.
struct Team {
    job: Job,
    peers: Vec<Peer>,
}

/// A way to the other of two members.
struct Wire<'a> {
    endpoint: &'a Endpoint,
    peer: Peer,
}

/// Joins the job, with messages from and to ordinary memory.
pub(super) fn join(args: &WorkerArgs, pinning: Pinning) -> anyhow::Result<impl Member + use<>> {
    join_with::<Touched<u8>>(args, pinning)
}

/// The same with memory that the other side maps.
pub(super) fn join_shareable(
    args: &WorkerArgs,
    pinning: Pinning,
) -> anyhow::Result<impl Member + use<>> {
    join_with::<ShareableBuffer>(args, pinning)
}

fn join_with<M: Untouched>(args: &WorkerArgs, pinning: Pinning) -> anyhow::Result<Ours<M>> {
    let mut builder = Builder::new();
    // Usual is what the environment says.
    if pinning != Pinning::Auto {
        builder = builder.pinning(pinning);
    }
    let job = builder.join(&args.name, args.rank, args.size)?;
    let peers = (0..job.size()).map(|rank| job.peer(rank)).collect();
    Ok(Ours { team: Team { job, peers }, held: None, landed: 0, checked_points: 0 })
}

impl<M: Untouched> Member for Ours<M> {
    fn carry_out(&mut self, order: Order) -> anyhow::Result<Timing> {
        let times = order.iterations;
        match order.task {
            Task::Pingpong { bytes } => {
                let first = self.team.rank() == 0;
                let mut wire = self.team.wire(if first { 1 } else { 0 });
                pingpong(&mut wire, first, &mut self.held, usize::try_from(bytes)?, times)
            }
            Task::Alltoall { bytes } => {
                alltoall(&mut self.team, &mut self.held, usize::try_from(bytes)?, times)
            }
            Task::IntegerSort { keys_log2 } => integer_sort(&mut self.team, keys_log2, times),
            Task::Fourier { points } => {
                fourier(&mut self.team, points, times, &mut self.checked_points)
            }
            Task::Land { bytes, fresh } => {
                let first = self.team.rank() == 0;
                let mut wire = self.team.wire(if first { 1 } else { 0 });
                let task = (usize::try_from(bytes)?, fresh);
                land::<M>(&mut wire, first, &mut self.landed, task, times)
            }
            task => bail!("endpoints do not do `{task}`"),
        }
    }
}

impl Team {
    fn wire(&self, rank: usize) -> Wire<'_> {
        Wire { endpoint: self.job.endpoint(), peer: self.peers[rank] }
    }
}

impl Link for Wire<'_> {
    fn send(&mut self, message: &[u8]) -> anyhow::Result<()> {
        Ok(self.endpoint.send(self.peer, TAG, message)?)
    }

    fn receive(&mut self, message: &mut [u8]) -> anyhow::Result<()> {
        self.endpoint.recv(self.peer, TAG, TAG_ALL, message)?;
        Ok(())
    }
}

impl Exchange for Team {
    fn rank(&self) -> usize {
        self.job.rank()
    }

    fn size(&self) -> usize {
        self.job.size()
    }

    /// All receives, then all sends, then the own part, which nobody has to wait for.
    fn exchange(&mut self, sent: &[&[u8]], received: &mut [&mut [u8]]) -> anyhow::Result<()> {
        let (own, size) = (self.rank(), self.size());
        let (before, rest) = received.split_at_mut(own);
        let (own_place, after) = rest.split_first_mut().expect("every member has a part");
        let places = (0..own).zip(before).chain((own + 1..size).zip(after));
        self.job.endpoint().scope(|scope| {
            let mut operations = Vec::with_capacity(2 * size);
            for (rank, place) in places {
                operations.push(scope.irecv(self.peers[rank], TAG, TAG_ALL, &mut **place)?);
            }
            // Everybody begins with the one behind it, so that not all turn to the same one.
            for rank in (own + 1..size).chain(0..own) {
                operations.push(scope.isend(self.peers[rank], TAG, sent[rank])?);
            }
            own_place.copy_from_slice(sent[own]);
            for mut operation in operations {
                operation.wait()?;
            }
            Ok::<_, Error>(())
        })?;
        Ok(())
    }
}

impl Memory for ShareableBuffer {
    fn touched(bytes: usize) -> io::Result<Self> {
        let mut buffer = Self::new(bytes)?;
        buffer.fill(0x5A);
        Ok(buffer)
    }
}
