//! The ways in which a message gets from one process to another: ours, and those that every program
//! has without us. Each is a [`Link`] in a file of its own; all carry from the sender's own memory
//! to the receiver's own memory.

mod byte_stream;
mod cross_memory;
mod meeting;
mod our_link;
mod shared_ring;
mod two_copies;

use anyhow::{bail, ensure};

pub(super) use byte_stream::{LoopbackTcp, Pipe, UnixSocket};
pub(super) use cross_memory::CrossMemory;
pub(super) use our_link::OurLink;
pub(super) use two_copies::TwoCopies;

use super::messages::{Buffers, Link, pingpong};
use super::order::{Order, Task, Timing};
use super::plain::Touched;
use super::stream::stream;
use super::worker::{Member, WorkerArgs};
use meeting::Meeting;

/// A way between two members that have met.
pub(super) trait Connect: Link + Sized {
    /// Connects with the other member, who does the same.
    fn connect(meeting: Meeting) -> anyhow::Result<Self>;
}

struct Carrier<L> {
    link: L,
    is_first: bool,
    held: Option<Buffers<Touched<u8>>>,
}

/// Meets the other member and connects with it.
pub(super) fn join<L: Connect>(args: &WorkerArgs) -> anyhow::Result<impl Member + use<L>> {
    ensure!(args.size == 2, "two members carry messages");
    let is_first = args.rank == 0;
    let meeting = Meeting::attend(&args.name, is_first)?;
    Ok(Carrier { link: L::connect(meeting)?, is_first, held: None })
}

impl<L: Link> Member for Carrier<L> {
    fn carry_out(&mut self, order: Order) -> anyhow::Result<Timing> {
        let Self { link, is_first, held } = self;
        let times = order.iterations;
        match order.task {
            Task::Pingpong { bytes } => {
                pingpong(link, *is_first, held, usize::try_from(bytes)?, times)
            }
            Task::Stream { bytes } => stream(link, *is_first, held, usize::try_from(bytes)?, times),
            task => bail!("carriers do not do `{task}`"),
        }
    }
}

/// Both ends of a way, in this process, for tests.
#[cfg(test)]
fn ends<L: Connect + Send + 'static>(name: &str) -> (L, L) {
    let name = format!("carrier-test-{name}-{}", std::process::id());
    let second = std::thread::spawn({
        let name = name.clone();
        move || L::connect(Meeting::attend(&name, false).unwrap()).unwrap()
    });
    let first = L::connect(Meeting::attend(&name, true).unwrap()).unwrap();
    (first, second.join().unwrap())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes below, at and above those of fragments, pipes and rings.
    const SIZES: [usize; 7] = [1, 1000, 16 << 10, (16 << 10) + 1, 300_000, 1 << 20, 3 << 20];

    /// Both tasks look at every byte before they time anything.
    fn carries<L: Connect + Send + 'static>(name: &str) {
        let (first, second) = ends::<L>(name);
        let run = |link: L, is_first: bool| {
            let mut carrier = Carrier { link, is_first, held: None };
            for bytes in SIZES.map(|bytes| bytes as u64) {
                for task in [Task::Pingpong { bytes }, Task::Stream { bytes }] {
                    carrier.carry_out(Order { task, iterations: 2 }).unwrap();
                }
            }
        };
        let other = std::thread::spawn(move || run(second, false));
        run(first, true);
        other.join().unwrap();
    }

    #[test]
    fn every_way_carries_every_byte() {
        carries::<OurLink>("ours");
        carries::<CrossMemory>("cross-memory");
        carries::<TwoCopies>("two-copies");
        carries::<LoopbackTcp>("tcp");
        carries::<UnixSocket>("unix");
        carries::<Pipe>("pipe");
    }
}
