//! Transports of messages from one process to another: Memferry's, and those that every program
//! has. Each is a [`Link`] in a file of its own; all of them copy from the sender's memory to the
//! receiver's memory.

mod byte_stream;
mod cross_memory;
mod memferry_link;
mod peer_socket;
mod shared_ring;
mod two_copies;

use anyhow::{bail, ensure};

pub(crate) use byte_stream::{LoopbackTcp, Pipe, UnixSocket};
pub(crate) use cross_memory::CrossMemory;
pub(crate) use memferry_link::MemferryLink;
pub(crate) use two_copies::TwoCopies;

use crate::group::command::{GroupTask, WorkerCommand};
use crate::group::plain::TouchedPages;
use crate::group::worker::{Member, WorkerArgs};
use crate::harness::Sample;
use crate::message::messages::{Link, MessageBuffers, pingpong};
use crate::message::stream::stream;
use peer_socket::PeerSocket;

/// A transport between two members that are connected by a socket.
pub(crate) trait Connect: Link + Sized {
    /// Connects to the other member, which calls the same function.
    fn connect(meeting: PeerSocket) -> anyhow::Result<Self>;
}

struct TransportMember<L> {
    link: L,
    is_first: bool,
    buffers: Option<MessageBuffers<TouchedPages<u8>>>,
}

/// Joins the other member and connects the transport.
pub(crate) fn join<L: Connect>(args: &WorkerArgs) -> anyhow::Result<impl Member + use<L>> {
    ensure!(args.size == 2, "two members carry messages");
    let is_first = args.rank == 0;
    let meeting = PeerSocket::connect(&args.name, is_first)?;
    Ok(TransportMember { link: L::connect(meeting)?, is_first, buffers: None })
}

impl<L: Link> Member for TransportMember<L> {
    fn run(&mut self, order: WorkerCommand) -> anyhow::Result<Sample> {
        let Self { link, is_first, buffers: held } = self;
        let times = order.iterations;
        match order.task {
            GroupTask::Pingpong { bytes } => {
                pingpong(link, *is_first, held, usize::try_from(bytes)?, times)
            }
            GroupTask::Stream { bytes } => {
                stream(link, *is_first, held, usize::try_from(bytes)?, times)
            }
            task => bail!("carriers do not do `{task}`"),
        }
    }
}

/// Both ends of a transport, in this process, for tests.
#[cfg(test)]
fn ends<L: Connect + Send + 'static>(name: &str) -> (L, L) {
    let name = format!("carrier-test-{name}-{}", std::process::id());
    let second = std::thread::spawn({
        let name = name.clone();
        move || L::connect(PeerSocket::connect(&name, false).unwrap()).unwrap()
    });
    let first = L::connect(PeerSocket::connect(&name, true).unwrap()).unwrap();
    (first, second.join().unwrap())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes below, at and above those of fragments, pipes and rings.
    const SIZES: [usize; 7] = [1, 1000, 16 << 10, (16 << 10) + 1, 300_000, 1 << 20, 3 << 20];

    /// Both tasks verify every byte before they measure.
    fn assert_delivers<L: Connect + Send + 'static>(name: &str) {
        let (first, second) = ends::<L>(name);
        let run = |link: L, is_first: bool| {
            let mut carrier = TransportMember { link, is_first, buffers: None };
            for bytes in SIZES.map(|bytes| bytes as u64) {
                for task in [GroupTask::Pingpong { bytes }, GroupTask::Stream { bytes }] {
                    carrier.run(WorkerCommand { task, iterations: 2 }).unwrap();
                }
            }
        };
        let other = std::thread::spawn(move || run(second, false));
        run(first, true);
        other.join().unwrap();
    }

    #[test]
    fn every_way_carries_every_byte() {
        assert_delivers::<MemferryLink>("ours");
        assert_delivers::<CrossMemory>("cross-memory");
        assert_delivers::<TwoCopies>("two-copies");
        assert_delivers::<LoopbackTcp>("tcp");
        assert_delivers::<UnixSocket>("unix");
        assert_delivers::<Pipe>("pipe");
    }
}
