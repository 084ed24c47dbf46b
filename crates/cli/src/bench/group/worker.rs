//! What a member of a group does that is made of this very program: it joins the others, then waits
//! at its standard input for orders. Every member gets every order; the leader answers. The hidden
//! command `memferry worker` ends up here.

use std::io::BufRead;
use std::process::Command;

use clap::{Args, ValueEnum};
use memferry::message::plan::Pinning;
use memferry::sys::affinity;

use super::carrier::{self, CrossMemory, LoopbackTcp, OurLink, Pipe, TwoCopies, UnixSocket};
use super::cores::Cores;
use super::order::{Order, QUIT, READY, Timing};
use super::receiver::{self, Form};
use super::scratch::Room;
use crate::show;

/// What members can be made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// Our endpoints, with ordinary memory.
    Memferry,
    /// Our endpoints, with memory that the other side maps.
    Shareable,
    /// Our endpoints, with ordinary memory that is never brought in before a copy.
    Unpinned,
    /// The same with memory that the other side maps.
    UnpinnedShareable,
    /// Our link.
    Link,
    /// One copy by the receiver, out of the sender's memory.
    CrossMemory,
    /// Two copies, through shared memory.
    TwoCopies,
    /// TCP over the loopback interface.
    LoopbackTcp,
    /// A Unix stream socket.
    UnixSocket,
    /// A pipe for each direction.
    Pipe,
    /// A receiver that does nothing ahead, and its sender.
    ReceiveNaive,
    /// A receiver that begins to receive before it waits.
    ReceiveTwoPhase,
    /// A receiver that moves messages on in between, too.
    ReceiveThreePhase,
    /// A receiver with a thread that moves messages.
    ReceiveBackground,
    /// Workloads over windows, for the bench of their lookup.
    Lookup,
    /// Publish and subscribe of iceoryx2.
    #[cfg(feature = "peers")]
    Iceoryx,
    /// The byte channels of ipc-channel.
    #[cfg(feature = "peers")]
    IpcChannel,
}

/// Arguments of the hidden command `memferry worker`.
#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// What the member is made of
    pub(crate) kind: Kind,
    /// Its number in the group
    #[arg(long)]
    pub(crate) rank: usize,
    /// How many members there are
    #[arg(long)]
    pub(crate) size: usize,
    /// The core it is bound to
    #[arg(long)]
    pub(crate) core: usize,
    /// The name of the group
    #[arg(long)]
    pub(crate) name: String,
}

/// A member that has joined its group.
pub(super) trait Member {
    /// Does its part of an order.
    fn carry_out(&mut self, order: Order) -> anyhow::Result<Timing>;
}

/// The commands that start the members of a group, the leader first. They find each other by the
/// name of their room, and may leave things in it.
pub(super) fn commands(
    kind: Kind,
    size: usize,
    cores: &Cores,
    room: &Room,
) -> Result<Vec<Command>, String> {
    let program = std::env::current_exe().map_err(|error| format!("no program: {error}"))?;
    let kind = kind.to_possible_value().expect("no kind is skipped");
    let command = |rank: usize| {
        let mut command = Command::new(&program);
        command.args(["worker", kind.get_name(), "--name", &room.name]);
        for (option, value) in
            [("--rank", rank), ("--size", size), ("--core", cores.of_member(rank))]
        {
            command.args([option, &value.to_string()]);
        }
        command.env("TMPDIR", &room.folder);
        command
    };
    Ok((0..size).map(command).collect())
}

/// Joins a group and serves until it is told to quit.
pub(crate) fn run(args: &WorkerArgs) -> anyhow::Result<()> {
    // That one first starts a thread on another core.
    if args.kind != Kind::ReceiveBackground {
        affinity::bind_to_core(args.core)?;
    }
    let leads = args.rank == 0;
    match args.kind {
        Kind::Memferry => serve(super::ours::join(args, Pinning::Auto)?, leads),
        Kind::Shareable => serve(super::ours::join_shareable(args, Pinning::Auto)?, leads),
        Kind::Unpinned => serve(super::ours::join(args, Pinning::Off)?, leads),
        Kind::UnpinnedShareable => serve(super::ours::join_shareable(args, Pinning::Off)?, leads),
        Kind::Link => serve(carrier::join::<OurLink>(args)?, leads),
        Kind::CrossMemory => serve(carrier::join::<CrossMemory>(args)?, leads),
        Kind::TwoCopies => serve(carrier::join::<TwoCopies>(args)?, leads),
        Kind::LoopbackTcp => serve(carrier::join::<LoopbackTcp>(args)?, leads),
        Kind::UnixSocket => serve(carrier::join::<UnixSocket>(args)?, leads),
        Kind::Pipe => serve(carrier::join::<Pipe>(args)?, leads),
        Kind::ReceiveNaive => serve(receiver::join(args, Form::Naive)?, leads),
        Kind::ReceiveTwoPhase => serve(receiver::join(args, Form::TwoPhase)?, leads),
        Kind::ReceiveThreePhase => serve(receiver::join(args, Form::ThreePhase)?, leads),
        Kind::ReceiveBackground => serve(receiver::join(args, Form::Background)?, leads),
        Kind::Lookup => crate::bench::lookup::work(args),
        #[cfg(feature = "peers")]
        Kind::Iceoryx => serve(super::iceoryx::join(args)?, leads),
        #[cfg(feature = "peers")]
        Kind::IpcChannel => serve(super::ipc_channel::join(args)?, leads),
    }
}

fn serve(mut member: impl Member, leads: bool) -> anyhow::Result<()> {
    if leads {
        show::print(&format!("{READY}\n"))?;
    }
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if line.trim() == QUIT {
            break;
        }
        let order = line.parse::<Order>().map_err(anyhow::Error::msg)?;
        let result = member.carry_out(order);
        if leads {
            let answer = result.as_ref().map(|&timing| timing);
            show::print(&Timing::answer(answer.map_err(|error| format!("{error:#}"))))?;
        }
        // After an error the members may not agree any more on what comes next.
        result?;
    }
    Ok(())
}
