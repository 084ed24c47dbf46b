//! Members made of this program: a member joins the others, then waits for commands on its standard
//! input. Every member gets every command; the leader replies. The hidden command `memferry worker`
//! calls `run`.

use std::io::BufRead;
use std::process::Command;

use clap::{Args, ValueEnum};
use memferry::sys::affinity;

use super::command::{QUIT, READY, WorkerCommand};
use super::cores::MemberCores;
use super::workspace::GroupDir;
use crate::candidates::transport::{
    self, CrossMemory, LoopbackTcp, MemferryLink, Pipe, TwoCopies, UnixSocket,
};
use crate::harness::Sample;
use crate::message::receiver::{self, ReceiveLoop};
use crate::reply::write_line;

/// What members can be made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WorkerKind {
    /// Our endpoints, with ordinary memory.
    Memferry,
    /// Our endpoints, with memory that the other side maps.
    Shareable,
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
    /// Our endpoints with the default settings, in a job of many processes.
    Scale,
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
pub struct WorkerArgs {
    /// What the member is made of
    pub kind: WorkerKind,
    /// Its number in the group
    #[arg(long)]
    pub rank: usize,
    /// How many members there are
    #[arg(long)]
    pub size: usize,
    /// The core it is bound to
    #[arg(long)]
    pub core: usize,
    /// The name of the group
    #[arg(long)]
    pub name: String,
}

impl WorkerArgs {
    /// Reads the words of the command line that a bench gives its members, from `worker` on. The
    /// parser of all commands would take most of the memory and of the start of a small process.
    /// `None`: it is another command line.
    pub fn from_words(mut words: impl Iterator<Item = String>) -> Option<Self> {
        if words.next()? != "worker" {
            return None;
        }
        let kind = words.next()?;
        let is_kind = |known: &&WorkerKind| {
            known.to_possible_value().is_some_and(|value| value.get_name() == kind)
        };
        let kind = *WorkerKind::value_variants().iter().find(is_kind)?;
        let (mut rank, mut size, mut core, mut name) = (None, None, None, None);
        while let Some(option) = words.next() {
            let value = words.next()?;
            match option.as_str() {
                "--rank" => rank = Some(value.parse().ok()?),
                "--size" => size = Some(value.parse().ok()?),
                "--core" => core = Some(value.parse().ok()?),
                "--name" => name = Some(value),
                _ => return None,
            }
        }
        Some(Self { kind, rank: rank?, size: size?, core: core?, name: name? })
    }
}

/// A member that has joined its group.
pub(crate) trait Member {
    /// Executes this member's part of a command.
    fn run(&mut self, order: WorkerCommand) -> anyhow::Result<Sample>;
}

/// Commands that start the members of a group, the leader first. The members connect by the name of
/// their directory, and may create files in it.
pub(crate) fn commands(
    kind: WorkerKind,
    size: usize,
    cores: &MemberCores,
    room: &GroupDir,
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

/// Joins a group and serves until it receives `quit`.
pub fn run(args: &WorkerArgs) -> anyhow::Result<()> {
    // `ReceiveBackground` first starts a thread on another core. Of many processes, each runs where
    // there is room.
    if ![WorkerKind::ReceiveBackground, WorkerKind::Scale].contains(&args.kind) {
        affinity::bind_to_core(args.core)?;
    }
    let leads = args.rank == 0;
    match args.kind {
        WorkerKind::Memferry => serve(crate::candidates::memferry_member::join(args)?, leads),
        WorkerKind::Shareable => {
            serve(crate::candidates::memferry_member::join_shareable(args)?, leads)
        }
        WorkerKind::Link => serve(transport::join::<MemferryLink>(args)?, leads),
        WorkerKind::CrossMemory => serve(transport::join::<CrossMemory>(args)?, leads),
        WorkerKind::TwoCopies => serve(transport::join::<TwoCopies>(args)?, leads),
        WorkerKind::LoopbackTcp => serve(transport::join::<LoopbackTcp>(args)?, leads),
        WorkerKind::UnixSocket => serve(transport::join::<UnixSocket>(args)?, leads),
        WorkerKind::Pipe => serve(transport::join::<Pipe>(args)?, leads),
        WorkerKind::ReceiveNaive => serve(receiver::join(args, ReceiveLoop::Naive)?, leads),
        WorkerKind::ReceiveTwoPhase => serve(receiver::join(args, ReceiveLoop::TwoPhase)?, leads),
        WorkerKind::ReceiveThreePhase => {
            serve(receiver::join(args, ReceiveLoop::ThreePhase)?, leads)
        }
        WorkerKind::ReceiveBackground => {
            serve(receiver::join(args, ReceiveLoop::Background)?, leads)
        }
        WorkerKind::Scale => crate::message::scale::run_member(args),
        WorkerKind::Lookup => crate::memory::lookup::run_worker(args),
        #[cfg(feature = "peers")]
        WorkerKind::Iceoryx => serve(crate::candidates::iceoryx::join(args)?, leads),
        #[cfg(feature = "peers")]
        WorkerKind::IpcChannel => serve(crate::candidates::ipc_channel::join(args)?, leads),
    }
}

fn serve(mut member: impl Member, leads: bool) -> anyhow::Result<()> {
    if leads {
        write_line(READY)?;
    }
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if line.trim() == QUIT {
            break;
        }
        let order = line.parse::<WorkerCommand>().map_err(anyhow::Error::msg)?;
        let result = member.run(order);
        if leads {
            let answer = result.as_ref().map(|&timing| timing);
            write_line(&Sample::format_reply(answer.map_err(|error| format!("{error:#}"))))?;
        }
        // After an error the members may be in different states.
        result?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_reads_the_command_line_that_a_bench_writes() {
        let read = |line: &str| WorkerArgs::from_words(line.split(' ').map(str::to_owned));
        let args = read("worker cross-memory --name a --rank 1 --size 2 --core 3").unwrap();
        assert_eq!(args.kind, WorkerKind::CrossMemory);
        assert_eq!((args.rank, args.size, args.core, args.name.as_str()), (1, 2, 3, "a"));
        for wrong in
            ["bench", "worker spoon --rank 1", "worker pipe --rank 1", "worker pipe --help"]
        {
            assert!(read(wrong).is_none(), "{wrong}");
        }
    }
}
