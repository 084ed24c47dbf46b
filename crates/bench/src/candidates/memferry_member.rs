//! Memferry's members: one endpoint each, joined into a job.

use std::hint::black_box;
use std::io;
use std::time::Instant;

use anyhow::{bail, ensure};
use memferry::Ferry;
use memferry::message::plan::Pinning;
use memferry::message::{Endpoint, EndpointBuilder, Error, Job, Peer, ShareableBuffer, TAG_ALL};
use memferry::sys::pages::page_bytes;

use super::team_member::TeamMember;
use crate::apps::fourier::fourier;
use crate::apps::integer_sort::integer_sort;
use crate::group::command::{GroupTask, WorkerCommand};
use crate::group::exchange::Exchange;
use crate::group::plain::{Memory, TouchedPages};
use crate::group::worker::{Member, WorkerArgs};
use crate::harness::{BufferPair, Sample, warm_up_iterations};
use crate::message::collective_task::{CollectiveBuffers, run_collective};
use crate::message::first_touch::{FreshMemory, FreshMessages, Prefaulting, receive_fresh};
use crate::message::matching::{MAX_DEPTH, match_messages};
use crate::message::messages::{Link, MessageBuffers, alltoall, pingpong};

/// Tag of all messages; the order of the messages identifies them.
const TAG: u64 = 1;

struct MemferryMember<M> {
    group: MemberGroup,
    /// What the environment has set, or the default.
    usual_pinning: Pinning,
    /// The team of the group, once a collective has run.
    team: Option<TeamMember>,
    collective_buffers: CollectiveBuffers,
    /// The ferry, once copies were measured.
    ferry: Option<Ferry>,
    buffers: Option<MessageBuffers<M>>,
    /// What the commands with messages into fresh memory have left.
    fresh_messages: FreshMessages,
    checked_points: u64,
}

/// Connections of one member to the group.
pub(crate) struct MemberGroup {
    pub(crate) job: Job,
    pub(crate) peers: Vec<Peer>,
}

/// Link to the other of two members.
struct PeerLink<'a> {
    endpoint: &'a Endpoint,
    peer: Peer,
}

/// Joins the job, with messages in ordinary memory.
pub(crate) fn join(args: &WorkerArgs) -> anyhow::Result<impl Member + use<>> {
    join_with::<TouchedPages<u8>>(args)
}

/// Joins the job, with messages in memory that the peer maps.
pub(crate) fn join_shareable(args: &WorkerArgs) -> anyhow::Result<impl Member + use<>> {
    join_with::<ShareableBuffer>(args)
}

fn join_with<M: FreshMemory>(args: &WorkerArgs) -> anyhow::Result<MemferryMember<M>> {
    // The limits are for messages that wait for their receives, by far.
    let builder = EndpointBuilder::new()
        .max_operations(2 * MAX_DEPTH as usize)
        .max_unexpected_messages(2 * MAX_DEPTH as usize)
        .max_unexpected_bytes(64 << 20);
    let job = builder.join(&args.name, args.rank, args.size)?;
    Ok(MemferryMember {
        usual_pinning: job.endpoint().pinning()?,
        group: MemberGroup::of(job),
        team: None,
        collective_buffers: CollectiveBuffers::default(),
        ferry: None,
        buffers: None,
        fresh_messages: FreshMessages::default(),
        checked_points: 0,
    })
}

impl<M: FreshMemory> Member for MemferryMember<M> {
    fn run(&mut self, order: WorkerCommand) -> anyhow::Result<Sample> {
        let times = order.iterations;
        match order.task {
            GroupTask::Pingpong { bytes } => {
                let first = self.group.rank() == 0;
                let mut wire = self.group.link_to(if first { 1 } else { 0 });
                pingpong(&mut wire, first, &mut self.buffers, usize::try_from(bytes)?, times)
            }
            GroupTask::Alltoall { bytes } => {
                alltoall(&mut self.group, &mut self.buffers, usize::try_from(bytes)?, times)
            }
            GroupTask::Collective { kind, bytes } => {
                let team = match &mut self.team {
                    Some(team) => team,
                    none => none.insert(TeamMember::join(&mut self.group)?),
                };
                let bytes = usize::try_from(bytes)?;
                run_collective(team, &mut self.collective_buffers, kind, bytes, times)
            }
            GroupTask::IntegerSort { keys_log2 } => integer_sort(&mut self.group, keys_log2, times),
            GroupTask::Fourier { points } => {
                fourier(&mut self.group, points, times, &mut self.checked_points)
            }
            GroupTask::FirstTouch { bytes, fresh } => {
                let first = self.group.rank() == 0;
                let mut wire = self.group.link_to(if first { 1 } else { 0 });
                let (endpoint, usual) = (self.group.job.endpoint(), self.usual_pinning);
                let set_policy = |policy| {
                    let pinning = if policy == Prefaulting::Off { Pinning::Off } else { usual };
                    Ok(endpoint.set_pinning(pinning)?)
                };
                let (state, task) = (&mut self.fresh_messages, (usize::try_from(bytes)?, fresh));
                receive_fresh::<M>(&mut wire, first, set_policy, state, task, times)
            }
            GroupTask::Matching { depth, case } => {
                let is_receiver = self.group.rank() == 0;
                let peer = self.group.peers[if is_receiver { 1 } else { 0 }];
                let endpoint = self.group.job.endpoint();
                match_messages(endpoint, peer, is_receiver, (case, depth), times)
            }
            GroupTask::SmallCopies { bytes } if self.group.rank() == 0 => {
                let ferry = match &mut self.ferry {
                    Some(ferry) => ferry,
                    none => none.insert(Ferry::new()?),
                };
                small_copies(ferry, usize::try_from(bytes)?, times)
            }
            // Nobody hears of the times of other members.
            GroupTask::SmallCopies { .. } => Ok(Sample::of_total(1.0)),
            task => bail!("endpoints do not do `{task}`"),
        }
    }
}

/// Starts copies between buffers in the caches, and waits for each. (The smallest blocking copies are
/// a `memcpy` and nothing else, which nobody counts.)
fn small_copies(ferry: &Ferry, bytes: usize, iterations: u64) -> anyhow::Result<Sample> {
    // At the same places in every process, and not at the same place of a page.
    let at = page_bytes() / 2;
    let mut pair = BufferPair::new(at + bytes)?;
    let source = &pair.source.as_slice()[..bytes];
    let target = &mut pair.target.as_mut_slice()[at..];
    let mut copy = || -> anyhow::Result<()> {
        let (source, target) = (black_box(source), black_box(&mut *target));
        // SAFETY: both are borrowed until the wait has returned.
        let transfer = unsafe { ferry.icopy_raw(source.as_ptr(), target.as_mut_ptr(), bytes) }?;
        transfer.wait()?;
        Ok(())
    };
    for _ in 0..warm_up_iterations(iterations) {
        copy()?;
    }
    let begin = Instant::now();
    for _ in 0..iterations {
        copy()?;
    }
    let total_ns = begin.elapsed().as_nanos() as f64;
    ensure!(source == &target[..bytes], "a byte got lost");
    Ok(Sample::of_total(total_ns))
}

impl MemberGroup {
    /// The group of a job.
    pub(crate) fn of(job: Job) -> Self {
        let peers = (0..job.size()).map(|rank| job.peer(rank)).collect();
        Self { job, peers }
    }

    fn link_to(&self, rank: usize) -> PeerLink<'_> {
        PeerLink { endpoint: self.job.endpoint(), peer: self.peers[rank] }
    }
}

impl Link for PeerLink<'_> {
    fn send(&mut self, message: &[u8]) -> anyhow::Result<()> {
        Ok(self.endpoint.send(self.peer, TAG, message)?)
    }

    fn receive(&mut self, message: &mut [u8]) -> anyhow::Result<()> {
        self.endpoint.recv(self.peer, TAG, TAG_ALL, message)?;
        Ok(())
    }
}

impl Exchange for MemberGroup {
    fn rank(&self) -> usize {
        self.job.rank()
    }

    fn size(&self) -> usize {
        self.job.size()
    }

    /// Posts all receives, then all sends, then copies the own part, for which no member waits.
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
            // Each member starts with the next higher rank, so that not all members send to the
            // same one.
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
