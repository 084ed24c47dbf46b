//! A stream of tasks: one member sends them, the other receives each and computes on it. How much of
//! its time does receiving take away from computing, with each way to write that loop? After the
//! benchmark in Ciaccio's paper on a self-connected network card as copy engine.

mod form;
mod packets;
mod places;
mod sender;
mod work;

use std::io;

use anyhow::{bail, ensure};
use memferry::message::{Endpoint, Job, Peer};
use memferry::sys::{affinity, clock};
use rustix::thread::{CpuSet, sched_setaffinity};

pub(super) use form::Form;
pub(super) use packets::{PacketReceiver, Way};

use super::order::{Order, Task, Timing};
use super::worker::{Member, WorkerArgs};
use places::Places;
use work::Watch;

/// All messages have the same tag: order tells them apart.
const TAG: u64 = 1;
/// Tasks whose every byte is looked at before any are timed: more than there are hot places.
const CHECKED: u64 = 7;

/// The receiver, which leads, or the sender.
struct Pair {
    // Before the memory: its end is the end of everything that is in flight.
    job: Job,
    form: Form,
    places: Option<Places>,
}

/// Joins the other member. The receiver computes on its own core alone; what moves messages in the
/// background does so on the others.
pub(super) fn join(args: &WorkerArgs, form: Form) -> anyhow::Result<impl Member + use<>> {
    let in_background = form == Form::Background && args.rank == 0;
    if in_background {
        keep_off(args.core)?;
    }
    let pair = Pair::join(&args.name, args.rank, args.size, form)?;
    affinity::bind_to_core(args.core)?;
    Ok(pair)
}

/// Keeps this thread and those that it starts off a core, if there are others.
fn keep_off(core: usize) -> io::Result<()> {
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

impl Pair {
    fn join(name: &str, rank: usize, size: usize, form: Form) -> anyhow::Result<Self> {
        ensure!(size == 2, "one sends and one receives");
        let background = form == Form::Background && rank == 0;
        let job = Endpoint::builder().background(background).join(name, rank, size)?;
        Ok(Self { job, form, places: None })
    }

    fn receives(&self) -> bool {
        self.job.rank() == 0
    }

    fn other(&self) -> Peer {
        self.job.peer(usize::from(self.receives()))
    }

    /// Sends or receives tasks in the next places.
    fn pass_on(&mut self, times: u64, task: impl FnMut(&mut [u8], usize)) -> anyhow::Result<()> {
        let (other, receives) = (self.other(), self.receives());
        let places = self.places.as_mut().expect("prepared before");
        let endpoint = self.job.endpoint();
        if receives {
            self.form.receive(endpoint, other, places, times, task)
        } else {
            sender::send(endpoint, other, places, times)
        }
    }

    /// Memory for messages of this kind, and a look at what arrives in it. Returns at once if the
    /// last order was for the same kind.
    fn prepare(&mut self, bytes: usize, cold: bool) -> anyhow::Result<()> {
        if self.places.as_ref().is_some_and(|places| places.are_for(bytes, cold)) {
            return Ok(());
        }
        let mut places = Places::make(self.places.take(), bytes, cold, self.receives())?;
        if self.receives() {
            places.clear_first(CHECKED);
        }
        self.places = Some(places);
        let mut right = true;
        self.pass_on(CHECKED, |message, start| {
            right &= places::holds_what_lies_at(message, start);
            // The next one here must bring its own.
            message.fill(0);
        })?;
        ensure!(right, "a byte of a task got lost");
        Ok(())
    }

    /// The time of `iterations` tasks in the middle of a stream, and how much more it is than that
    /// of the computation alone.
    fn timed(&mut self, bytes: usize, iterations: u64) -> anyhow::Result<Timing> {
        let mut watch = Watch::new(bytes, iterations);
        self.pass_on(watch.tasks(), |message, _| watch.task(message))?;
        let message = self.places.as_mut().expect("prepared before").first();
        let timing = watch.timing(message, clock::process_cpu_ns);
        // Nobody asks the sender what it took.
        Ok(timing.unwrap_or(Timing::of_messages(1.0)))
    }
}

impl Member for Pair {
    fn carry_out(&mut self, order: Order) -> anyhow::Result<Timing> {
        let Task::Receive { bytes, cold } = order.task else { bail!("can only receive tasks") };
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
        for form in Form::ALL {
            let run = move |rank| {
                let name = format!("receiver-test-{form:?}-{}", std::process::id());
                let mut pair = Pair::join(&name, rank, 2, form).unwrap();
                for (bytes, cold) in [(1, false), (5000, false), (300_000, false), (70_001, true)] {
                    for iterations in [1, 12] {
                        let task = Task::Receive { bytes, cold };
                        let timing = pair.carry_out(Order { task, iterations }).unwrap();
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
            keep_off(core).unwrap();
            affinity::allowed_cores()
        });
        let left = left.join().unwrap();
        assert!(left == [core] || !left.contains(&core));
    }
}
