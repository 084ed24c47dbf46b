//! Groups of many processes: Memferry's and those of the MPIs, as candidates of the harness.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::task::ScaleTask;
use super::usage::{self, MemoryUsage};
use crate::candidates::mpi;
use crate::group::BenchEnvironment;
use crate::group::process_group::ProcessGroup;
use crate::group::worker::WorkerKind;
use crate::harness::{Candidate, Role, Sample};
use crate::results::series::MEMFERRY;

/// Time before the processor time of waiting members is read, and between the two readings.
const SETTLE: Duration = Duration::from_millis(500);
const IDLE_WINDOW: Duration = Duration::from_millis(1500);
/// Time after the second reading until the members are released, and before the first one until
/// all of them wait.
const IDLE_MARGIN: Duration = Duration::from_millis(1000);

/// What a candidate is started from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Starter {
    /// This program.
    Memferry,
    /// The MPI with this index.
    Mpi(usize),
}

/// A started group.
#[derive(Debug)]
pub(super) struct ScaleGroup {
    pub(super) series: &'static str,
    role: Role,
    processes: ProcessGroup,
    /// Time until all members had joined.
    pub(super) start_ms: f64,
    members: Vec<u32>,
}

impl Starter {
    /// All that this machine has.
    pub(super) fn all(camp: &BenchEnvironment) -> Vec<Self> {
        let peers = (0..camp.mpi().len()).map(Self::Mpi);
        std::iter::once(Self::Memferry).chain(peers).collect()
    }

    pub(super) fn series(self, camp: &BenchEnvironment) -> &'static str {
        match self {
            Self::Memferry => MEMFERRY,
            Self::Mpi(index) => mpi::series(camp.mpi()[index].0),
        }
    }

    /// Starts a group, with timeouts of the start and of each reply.
    pub(super) fn start(
        self,
        camp: &BenchEnvironment,
        size: usize,
        [patience, reply_timeout]: [Duration; 2],
    ) -> Result<ScaleGroup, String> {
        let begin = Instant::now();
        let (mut processes, role, program) = match self {
            Self::Memferry => {
                let group = camp.start(WorkerKind::Scale, size, patience)?;
                let program = std::env::current_exe().map_err(|error| error.to_string())?;
                (group, Role::Memferry, program)
            }
            Self::Mpi(index) => {
                let (_, installed, member) = &camp.mpi()[index];
                (installed.start_many(member, size, patience)?, Role::Peer, member.clone())
            }
        };
        let start_ms = begin.elapsed().as_secs_f64() * 1e3;
        processes.set_timeout(reply_timeout);
        let program: PathBuf = program.canonicalize().unwrap_or(program);
        let members = usage::members(&processes.pids(), &program);
        if members.len() != size {
            return Err(format!("{} processes were found instead of {size}", members.len()));
        }
        Ok(ScaleGroup { series: self.series(camp), role, processes, start_ms, members })
    }
}

impl ScaleGroup {
    fn run(&mut self, task: ScaleTask, iterations: u64) -> Result<Sample, String> {
        Sample::parse(&self.processes.request(&task.line(iterations))?)
    }

    /// The number of connections between the members of this program.
    pub(super) fn connections(&mut self) -> Result<f64, String> {
        Ok(self.run(ScaleTask::Connections, 1)?.total_ns)
    }

    /// The mean memory of a member.
    pub(super) fn memory(&self) -> MemoryUsage {
        usage::memory(&self.members)
    }

    /// The share of the processor time of `cores` cores that the members use while they wait in a
    /// receive.
    pub(super) fn idle_share(&mut self, cores: usize) -> Result<f64, String> {
        let time = SETTLE + IDLE_WINDOW + 2 * IDLE_MARGIN;
        self.processes.tell(&ScaleTask::Idle.line(time.as_millis() as u64))?;
        std::thread::sleep(IDLE_MARGIN + SETTLE);
        let (begin, before) = (Instant::now(), usage::cpu_ns(&self.members));
        std::thread::sleep(IDLE_WINDOW);
        let used = usage::cpu_ns(&self.members) - before;
        let window_ns = begin.elapsed().as_nanos() as f64;
        Sample::parse(&self.processes.reply()?)?;
        Ok(used / window_ns / cores as f64)
    }
}

/// A group that executes one task.
pub(super) struct ScaleCandidate<'a> {
    pub(super) group: &'a mut ScaleGroup,
    pub(super) task: ScaleTask,
}

impl Candidate for ScaleCandidate<'_> {
    fn series(&self) -> &str {
        self.group.series
    }

    fn role(&self) -> Role {
        self.group.role
    }

    fn run(&mut self, iterations: u64) -> Result<Sample, String> {
        Ok(self.group.run(self.task, iterations)?.per_iteration(iterations))
    }
}
