//! Candidates of a bench: found, compiled and started here, each as a group of processes. An
//! unavailable candidate is reported as missing, with the reason.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::GroupTask;
use super::candidate::{GroupCandidate, HalfOfGroup, NamedGroup, TaskRunner};
use super::cores::MemberCores;
use super::lineup::{FIRST_TOUCH_KINDS, MEMFERRY_KINDS, PACKETS, RECEIVERS, TRANSPORTS, UCX};
use super::process_group::{ProcessGroup, REPLY_TIMEOUT};
use super::worker::{WorkerKind, commands};
use super::workspace::TempWorkspace;
use crate::candidates::baseline::CacheLineBaseline;
use crate::candidates::mpi::{self, MpiInstallation, MpiTransport};
use crate::candidates::mpi_over_memferry::{self, MpiOverMemferry};
use crate::candidates::ucx::Perftest;
use crate::harness::{Budget, Harness, Role, Samples};
use crate::host::mpi::{MpiFamily, provider};
use crate::message::receiver::{PacketPath, PacketReceiver};
use crate::results::outcome::Outcome;
use crate::results::series::{
    LOWER_BOUND, MEMFERRY, MPICH_OVER_MEMFERRY, OPEN_MPI, OPEN_MPI_OVER_MEMFERRY, SINGLE_LINE,
};

/// Peers that are libraries linked into this program, by the names of their crates.
#[cfg(feature = "peers")]
const LIBRARIES: [(&str, WorkerKind); 2] =
    [("iceoryx2", WorkerKind::Iceoryx), ("ipc-channel", WorkerKind::IpcChannel)];
/// Lock file of this build.
#[cfg(feature = "peers")]
const LOCK_FILE: &str = include_str!(concat!(env!("OUT_DIR"), "/Cargo.lock"));

/// Candidates that were found on this machine, and those that are missing.
pub(crate) struct BenchEnvironment {
    launcher: GroupLauncher,
    missing: Vec<String>,
    versions: BTreeMap<String, String>,
}

/// What is needed to start groups.
struct GroupLauncher {
    cores: MemberCores,
    mpi: Vec<(MpiFamily, MpiInstallation, PathBuf)>,
    references: Vec<MpiOverMemferry>,
    /// Further settings of Open MPI, by series.
    adjusted: Vec<(String, usize, MpiTransport)>,
    workspace: TempWorkspace,
}

/// A group with its series and role, or why it could not be started.
pub(crate) type StartedGroup = (String, Role, Result<ProcessGroup, String>);

/// Started groups of one size, ready to be measured.
pub(crate) struct CandidateSet<'a> {
    groups: Vec<NamedGroup>,
    missing: &'a mut Vec<String>,
}

impl BenchEnvironment {
    /// Finds the MPI implementations and compiles the MPI candidate for each.
    pub(crate) fn discover() -> anyhow::Result<Self> {
        let scratch = TempWorkspace::new()?;
        let (mut missing, mut versions) = (Vec::new(), BTreeMap::new());
        let mut mpi = Vec::new();
        for family in mpi::FAMILIES {
            let series = mpi::series(family);
            let compiled = mpi::find(family).and_then(|installed| {
                versions.insert(series.to_owned(), installed.launcher.version.clone());
                installed.compile(scratch.folder()).map(|member| (family, installed, member))
            });
            match compiled {
                Ok(ready) => mpi.push(ready),
                Err(reason) => missing.push(with_reason(series, &reason)),
            }
        }
        let (cores, asides) = (MemberCores::of_this_machine(), Vec::new());
        let adjusted = Vec::new();
        let ground = GroupLauncher { cores, mpi, references: asides, adjusted, workspace: scratch };
        Ok(Self { launcher: ground, missing, versions })
    }

    /// Finds the MPI installations that can run over Memferry's provider, to be compared with their
    /// own transport.
    pub(crate) fn discover_mpi_over_memferry(&mut self) {
        let GroupLauncher { mpi, workspace: scratch, references: asides, .. } = &mut self.launcher;
        *asides = mpi_over_memferry::find(mpi, scratch.folder(), &mut self.missing);
        for aside in asides {
            let version = aside.installed.launcher.version.clone();
            self.versions.insert(aside.series.clone(), version);
        }
    }

    /// Finds the further settings of Open MPI for collectives, and Open MPI over Memferry with
    /// Memferry's collectives.
    pub(crate) fn discover_collectives(&mut self) {
        self.discover_mpi_over_memferry();
        let GroupLauncher { mpi, references, adjusted, .. } = &mut self.launcher;
        references.retain(|reference| reference.series == OPEN_MPI_OVER_MEMFERRY);
        self.missing.retain(|missing| !missing.starts_with(MPICH_OVER_MEMFERRY));
        match provider::find_collectives() {
            Ok(library) => {
                for reference in references {
                    reference.transport.preload(&library);
                }
            }
            Err(error) => {
                references.clear();
                self.missing.push(with_reason(OPEN_MPI_OVER_MEMFERRY, &format!("{error:#}")));
            }
        }
        for (index, (_, installed, _)) in mpi.iter().enumerate() {
            for (name, variable) in installed.collective_components() {
                let series = format!("{OPEN_MPI} ({name})");
                adjusted.push((series, index, MpiTransport::Adjusted(vec![variable])));
            }
        }
    }

    /// Environment for benches whose candidates are all part of this program.
    pub(crate) fn in_process() -> anyhow::Result<Self> {
        let (cores, scratch) = (MemberCores::of_this_machine(), TempWorkspace::new()?);
        let (mpi, references, adjusted) = (Vec::new(), Vec::new(), Vec::new());
        let ground = GroupLauncher { cores, mpi, references, adjusted, workspace: scratch };
        Ok(Self { launcher: ground, missing: Vec::new(), versions: BTreeMap::new() })
    }

    /// Number of cores for members.
    pub(crate) fn cores(&self) -> usize {
        self.launcher.cores.physical_count()
    }

    /// Starts a group of members made of this program.
    pub(crate) fn start(
        &self,
        kind: WorkerKind,
        size: usize,
        patience: Duration,
    ) -> Result<ProcessGroup, String> {
        self.launcher.start_within(kind, size, patience)
    }

    /// Starts such a group with a variable of the environment.
    pub(crate) fn start_with(
        &self,
        kind: WorkerKind,
        size: usize,
        variable: Option<(&str, &str)>,
    ) -> Result<ProcessGroup, String> {
        let mut commands = self.launcher.commands(kind, size)?;
        for command in &mut commands {
            command.envs(variable);
        }
        ProcessGroup::start(commands, REPLY_TIMEOUT)
    }

    /// Folder for files of candidates, which is removed at the end.
    pub(crate) fn folder(&self) -> &Path {
        self.launcher.workspace.folder()
    }

    /// Cores of the members of groups.
    pub(crate) fn member_cores(&self) -> &MemberCores {
        &self.launcher.cores
    }

    /// Groups that were started elsewhere.
    pub(crate) fn candidates_of(
        &mut self,
        groups: impl IntoIterator<Item = StartedGroup>,
    ) -> CandidateSet<'_> {
        let mut field = CandidateSet { groups: Vec::new(), missing: &mut self.missing };
        for (series, role, group) in groups {
            field.add(&series, role, group);
        }
        field
    }

    /// The MPI implementations that were found, each with the compiled candidate.
    pub(crate) fn mpi(&self) -> &[(MpiFamily, MpiInstallation, PathBuf)] {
        &self.launcher.mpi
    }

    /// Reports a candidate as missing.
    pub(crate) fn report_missing(&mut self, series: &str, reason: &str) {
        self.missing.push(with_reason(series, reason));
    }

    /// Starts Memferry and MPI in groups of `size`.
    pub(crate) fn candidates(&mut self, size: usize) -> CandidateSet<'_> {
        let mut field = CandidateSet { groups: Vec::new(), missing: &mut self.missing };
        field.add_groups(&self.launcher, size);
        field
    }

    /// Starts Memferry, MPI, and MPI over Memferry in groups of `size`.
    pub(crate) fn candidates_with_references(&mut self, size: usize) -> CandidateSet<'_> {
        let mut field = CandidateSet { groups: Vec::new(), missing: &mut self.missing };
        field.add_groups(&self.launcher, size);
        field.add_references(&self.launcher, size);
        field
    }

    /// Starts the members of collectives in groups of `size`.
    pub(crate) fn collective_candidates(&mut self, size: usize) -> CandidateSet<'_> {
        let mut field = CandidateSet { groups: Vec::new(), missing: &mut self.missing };
        let memferry = self.launcher.start(WorkerKind::Memferry, size);
        field.add(MEMFERRY, Role::Memferry, memferry);
        field.add_mpi(&self.launcher, size);
        for (series, index, transport) in &self.launcher.adjusted {
            let (_, installed, member) = &self.launcher.mpi[*index];
            let group = installed.start(member, size, &self.launcher.cores, transport);
            field.add(series, Role::Peer, group);
        }
        field.add_references(&self.launcher, size);
        field
    }

    /// Starts Memferry, all peers that send messages between two processes, and the lower bound.
    pub(crate) fn pair_candidates(&mut self) -> CandidateSet<'_> {
        let mut field = CandidateSet { groups: Vec::new(), missing: &mut self.missing };
        field.add_groups(&self.launcher, 2);
        field.add_references(&self.launcher, 2);
        let perftest = Perftest::find(&self.launcher.cores);
        if let (Ok(_), Some(version)) = (&perftest, Perftest::version()) {
            self.versions.insert(UCX.to_owned(), version);
        }
        field.add(UCX, Role::Peer, perftest);
        #[cfg(feature = "peers")]
        for (series, kind) in LIBRARIES {
            let version = locked_version(LOCK_FILE, series).unwrap_or("unknown");
            self.versions.insert(series.to_owned(), version.to_owned());
            field.add(series, Role::Peer, self.launcher.start(kind, 2));
        }
        #[cfg(not(feature = "peers"))]
        for series in ["iceoryx2", "ipc-channel"] {
            let reason = "this program was built without the feature `peers`".to_owned();
            field.add(series, Role::Peer, Err::<ProcessGroup, _>(reason));
        }
        for (series, single_line) in [(LOWER_BOUND, false), (SINGLE_LINE, true)] {
            field.add(
                series,
                Role::LowerBound,
                CacheLineBaseline::new(&self.launcher.cores, single_line),
            );
        }
        field
    }

    /// Starts a Memferry link, and the transports that every program has.
    pub(crate) fn transport_candidates(&mut self) -> CandidateSet<'_> {
        self.own_candidates(&TRANSPORTS)
    }

    /// Starts receivers of streams of tasks, each with its sender.
    pub(crate) fn receiver_candidates(&mut self) -> CandidateSet<'_> {
        self.own_candidates(&RECEIVERS)
    }

    /// Opens receivers of packets, in this process.
    pub(crate) fn packet_candidates(&mut self) -> CandidateSet<'_> {
        let mut field = CandidateSet { groups: Vec::new(), missing: &mut self.missing };
        let both =
            PacketReceiver::pair(&self.launcher.cores, [PacketPath::Memcpy, PacketPath::Deliver]);
        for ((series, role), receiver) in
            PACKETS.into_iter().zip([Role::Peer, Role::Memferry]).zip(both)
        {
            field.add(series, role, receiver);
        }
        field
    }

    /// Starts members that receive into memory that may not be resident, with and without prefaulting by
    /// the same members.
    pub(crate) fn first_touch_candidates(&mut self) -> CandidateSet<'_> {
        let mut field = CandidateSet { groups: Vec::new(), missing: &mut self.missing };
        for ([plain, usual], kind) in FIRST_TOUCH_KINDS {
            let (usual_half, plain_half) = match self.launcher.start(kind, 2) {
                Ok(group) => {
                    let [usual, plain] = HalfOfGroup::both(group);
                    (Ok(usual), Ok(plain))
                }
                Err(reason) => (Err(reason.clone()), Err(reason)),
            };
            field.add(plain, Role::Peer, plain_half);
            field.add(usual, Role::Memferry, usual_half);
        }
        field
    }

    fn own_candidates(&mut self, kinds: &[(&str, Role, WorkerKind)]) -> CandidateSet<'_> {
        let mut field = CandidateSet { groups: Vec::new(), missing: &mut self.missing };
        for &(series, role, kind) in kinds {
            field.add(series, role, self.launcher.start(kind, 2));
        }
        field
    }

    /// Records the versions of the measured candidates, and the missing ones.
    pub(crate) fn finish(self, outcome: &mut Outcome) {
        outcome.versions.extend(self.versions);
        outcome.missing.extend(self.missing);
    }
}

impl GroupLauncher {
    /// Starts a group of members made of this program, in a directory of its own.
    fn start(&self, kind: WorkerKind, size: usize) -> Result<ProcessGroup, String> {
        self.start_within(kind, size, REPLY_TIMEOUT)
    }

    /// The same, with another timeout of replies.
    fn start_within(
        &self,
        kind: WorkerKind,
        size: usize,
        patience: Duration,
    ) -> Result<ProcessGroup, String> {
        ProcessGroup::start(self.commands(kind, size)?, patience)
    }

    /// The commands of such a group.
    fn commands(&self, kind: WorkerKind, size: usize) -> Result<Vec<Command>, String> {
        let room = self.workspace.group_dir().map_err(|error| format!("no folder: {error}"))?;
        commands(kind, size, &self.cores, &room)
    }
}

impl CandidateSet<'_> {
    fn add_groups(&mut self, ground: &GroupLauncher, size: usize) {
        for (series, kind) in MEMFERRY_KINDS {
            self.add(series, Role::Memferry, ground.start(kind, size));
        }
        self.add_mpi(ground, size);
    }

    fn add_mpi(&mut self, ground: &GroupLauncher, size: usize) {
        for (family, installed, member) in &ground.mpi {
            let group = installed.start(member, size, &ground.cores, &MpiTransport::Own);
            self.add(mpi::series(*family), Role::Peer, group);
        }
    }

    fn add_references(&mut self, ground: &GroupLauncher, size: usize) {
        for MpiOverMemferry { series, installed, program: member, transport } in &ground.references
        {
            let group = installed.start(member, size, &ground.cores, transport);
            self.add(series, Role::Reference, group);
        }
    }

    fn add(&mut self, series: &str, role: Role, runner: Result<impl TaskRunner + 'static, String>) {
        match runner {
            Ok(runner) => {
                let (series, runner) = (series.to_owned(), Box::new(runner));
                self.groups.push(NamedGroup { series, role, runner });
            }
            Err(reason) => self.missing.push(with_reason(series, &reason)),
        }
    }

    /// Runs a task on the groups that `takes_part` selects, interleaved. A group that fails is
    /// missing from then on.
    pub(crate) fn interleave(
        &mut self,
        task: GroupTask,
        budget: Budget,
        takes_part: impl Fn(&str) -> bool,
    ) -> Samples {
        let selected = self.groups.iter_mut().filter(|group| takes_part(&group.series));
        let mut selected: Vec<_> = selected.map(|group| GroupCandidate { group, task }).collect();
        let samples = Harness::new(budget).interleave(&mut selected);
        for failure in samples.failures() {
            self.missing.push(format!("{} (at {task}: {})", failure.series, failure.reason));
            self.groups.retain(|group| group.series != failure.series);
        }
        samples
    }
}

fn with_reason(series: &str, reason: &str) -> String {
    if reason == "not installed" { series.to_owned() } else { format!("{series} ({reason})") }
}

/// Version of a crate in a lock file.
#[cfg(feature = "peers")]
fn locked_version<'a>(lock_file: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = lock_file.lines();
    lines.find(|line| line.strip_prefix("name = ") == Some(&format!("\"{name}\"")))?;
    Some(lines.next()?.strip_prefix("version = ")?.trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::command::WorkerCommand;
    use crate::harness::Sample;

    #[test]
    #[cfg(feature = "peers")]
    fn the_versions_of_libraries_are_those_they_were_built_with() {
        let lock_file = "[[package]]\nname = \"ipc-channel\"\nversion = \"0.20.0\"\n";
        assert_eq!(locked_version(lock_file, "ipc-channel"), Some("0.20.0"));
        assert_eq!(locked_version(lock_file, "ipc"), None);
        for (series, _) in LIBRARIES {
            assert!(locked_version(LOCK_FILE, series).is_some(), "{series}");
        }
    }

    /// A group that takes `once_ns` per iteration and fails after `runs_left` runs.
    struct FakeGroup {
        once_ns: f64,
        runs_left: usize,
    }

    impl TaskRunner for FakeGroup {
        fn run(&mut self, command: WorkerCommand) -> Result<Sample, String> {
            self.runs_left = self.runs_left.checked_sub(1).ok_or("out of luck")?;
            Ok(Sample::of_messages(self.once_ns * command.iterations as f64))
        }
    }

    const TASK: GroupTask = GroupTask::Pingpong { bytes: 8 };

    #[test]
    fn a_group_that_fails_is_named_with_its_task_and_the_others_continue() {
        let mut missing = Vec::new();
        let mut set = CandidateSet { groups: Vec::new(), missing: &mut missing };
        for (series, once_ns, runs_left) in [("a", 10.0, 99), ("b", 20.0, 3), ("c", 30.0, 99)] {
            set.add(series, Role::Peer, Ok(FakeGroup { once_ns, runs_left }));
        }
        set.add("d", Role::Peer, Err::<FakeGroup, _>("no free port".to_owned()));
        let samples = set.interleave(TASK, Budget::fixed(6, 10), |_| true);
        assert_eq!(samples.ratio("a", "c"), 3.0);
        assert_eq!(samples.median_ns("a"), 10.0);
        assert_eq!(set.groups.len(), 2);
        assert_eq!(missing, ["d (no free port)", "b (at pingpong 8: out of luck)"]);
    }

    #[test]
    fn a_group_that_does_not_take_part_is_there_for_the_next_task() {
        let mut missing = Vec::new();
        let mut set = CandidateSet { groups: Vec::new(), missing: &mut missing };
        set.add("a", Role::Memferry, Ok(FakeGroup { once_ns: 10.0, runs_left: 99 }));
        set.add("floor", Role::LowerBound, Ok(FakeGroup { once_ns: 1.0, runs_left: 99 }));
        let budget = Budget::each(3, 1, 10);
        let samples = set.interleave(TASK, budget, |series| series != "floor");
        assert!(samples.median_ns("floor").is_nan());
        let samples = set.interleave(TASK, budget, |_| true);
        assert_eq!(samples.ratio("floor", "a"), 10.0);
        assert!(samples.ratio_to_best_peer("a").is_nan(), "the lower bound is no peer");
        assert!(missing.is_empty());
    }

    #[test]
    fn what_is_not_installed_needs_no_reason() {
        assert_eq!(with_reason("UCX", "not installed"), "UCX");
        assert_eq!(with_reason("UCX", "no free port"), "UCX (no free port)");
    }
}
