//! A stream of tasks: one member sends them, the other receives each task and computes on it. The
//! bench measures how much time receiving takes from computing, for each form of the receive loop.
//! After the benchmark in Ciaccio's paper on a self-connected network card as copy engine.

mod packets;
mod receive_loop;
mod sender;
mod slots;
mod work;

use std::io;

use anyhow::{bail, ensure};
use memferry::message::{Endpoint, Job, Peer};
use memferry::sys::{affinity, clock};
use rustix::thread::{CpuSet, sched_setaffinity};

pub(crate) use packets::{PacketPath, PacketReceiver};
pub(crate) use receive_loop::ReceiveLoop;

use crate::group::command::{GroupTask, WorkerCommand};
use crate::group::worker::{Member, WorkerArgs};
use crate::harness::Sample;
use slots::MessageSlots;
use work::OverheadTimer;

/// Tag of all messages; the order of the messages identifies them.
const TAG: u64 = 1;
/// Number of messages that are verified before the timed ones: more than there are hot slots.
const CHECKED_MESSAGES: u64 = 7;

/// The receiver, which is the leader, or the sender.
struct StreamMember {
    // Dropped before the memory: closing the job ends everything that is in flight.
    job: Job,
    receive_loop: ReceiveLoop,
    slots: Option<MessageSlots>,
}

/// Joins the other member. The receiver computes only on its own core; a progress thread runs on
/// the other cores.
pub(crate) fn join(args: &WorkerArgs, form: ReceiveLoop) -> anyhow::Result<impl Member + use<>> {
    let in_background = form == ReceiveLoop::Background && args.rank == 0;
    if in_background {
        exclude_core(args.core)?;
    }
    let pair = StreamMember::join(&args.name, args.rank, args.size, form)?;
    affinity::bind_to_core(args.core)?;
    Ok(pair)
}

/// Excludes a core from the affinity of this thread and of the threads that it starts, if there are
/// other cores.
fn exclude_core(core: usize) -> io::Result<()> {
    let mut others = CpuSet::new();
    for other in affinity::allowed_cores() {
        if other != core {
            others.set(other);
        }
    }
    if others.count() > 0 {
        sched_setaffinity(None, &others)?;
    }
    Ok(())
}

impl StreamMember {
    fn join(name: &str, rank: usize, size: usize, form: ReceiveLoop) -> anyhow::Result<Self> {
        ensure!(size == 2, "one sends and one receives");
        let background = form == ReceiveLoop::Background && rank == 0;
        let job = Endpoint::builder().background(background).join(name, rank, size)?;
        Ok(Self { job, receive_loop: form, slots: None })
    }

    fn is_receiver(&self) -> bool {
        self.job.rank() == 0
    }

    fn peer(&self) -> Peer {
        self.job.peer(usize::from(self.is_receiver()))
    }

    /// Sends or receives messages in the next slots.
    fn transfer_messages(
        &mut self,
        times: u64,
        task: impl FnMut(&mut [u8], usize),
    ) -> anyhow::Result<()> {
        let (other, receives) = (self.peer(), self.is_receiver());
        let places = self.slots.as_mut().expect("prepared before");
        let endpoint = self.job.endpoint();
        if receives {
            self.receive_loop.receive(endpoint, other, places, times, task)
        } else {
            sender::send(endpoint, other, places, times)
        }
    }

    /// Allocates memory for messages of this kind, and verifies messages in it. Returns at once if
    /// the last command was for the same kind.
    fn prepare(&mut self, bytes: usize, cold: bool) -> anyhow::Result<()> {
        if self.slots.as_ref().is_some_and(|places| places.matches(bytes, cold)) {
            return Ok(());
        }
        let mut places =
            MessageSlots::reuse_or_new(self.slots.take(), bytes, cold, self.is_receiver())?;
        if self.is_receiver() {
            places.clear_first(CHECKED_MESSAGES);
        }
        self.slots = Some(places);
        let mut right = true;
        self.transfer_messages(CHECKED_MESSAGES, |message, start| {
            right &= slots::matches_source_at(message, start);
            // Cleared, so that the next message in this slot must write its own bytes.
            message.fill(0);
        })?;
        ensure!(right, "a byte of a task got lost");
        Ok(())
    }

    /// Returns the time of `iterations` tasks in the middle of a stream, and its difference from
    /// the time of the computation alone.
    fn timed(&mut self, bytes: usize, iterations: u64) -> anyhow::Result<Sample> {
        let mut watch = OverheadTimer::new(bytes, iterations);
        self.transfer_messages(watch.tasks(), |message, _| watch.run_task(message))?;
        let message = self.slots.as_mut().expect("prepared before").first_mut();
        let timing = watch.finish(message, clock::process_cpu_ns);
        // The bench does not use the times of the sender.
        Ok(timing.unwrap_or(Sample::of_messages(1.0)))
    }
}

impl Member for StreamMember {
    fn run(&mut self, order: WorkerCommand) -> anyhow::Result<Sample> {
        let GroupTask::Receive { bytes, cold } = order.task else {
            bail!("can only receive tasks")
        };
        let bytes = usize::try_from(bytes)?;
        self.prepare(bytes, cold)?;
        self.timed(bytes, order.iterations)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_delivers_every_byte() {
        for form in ReceiveLoop::ALL {
            let run = move |rank| {
                let name = format!("receiver-test-{form:?}-{}", std::process::id());
                let mut pair = StreamMember::join(&name, rank, 2, form).unwrap();
                for (bytes, cold) in [(1, false), (5000, false), (300_000, false), (70_001, true)] {
                    for iterations in [1, 12] {
                        let task = GroupTask::Receive { bytes, cold };
                        let timing = pair.run(WorkerCommand { task, iterations }).unwrap();
                        assert!(timing.total_ns > 0.0, "{form:?}");
                    }
                }
            };
            let sender = std::thread::spawn(move || run(1));
            run(0);
            sender.join().unwrap();
        }
    }

    #[test]
    fn a_thread_that_is_kept_off_a_core_runs_elsewhere_if_it_can() {
        let core = affinity::current_core();
        let left = std::thread::spawn(move || {
            exclude_core(core).unwrap();
            affinity::allowed_cores()
        });
        let left = left.join().unwrap();
        assert!(left == [core] || !left.contains(&core));
    }
}
