//! The contestants of a bench: found, compiled and started here, each as a group of so many
//! processes. One that cannot be had is named as missing, with the reason.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::carried::{self, Aside};
use super::contest::{Entry, Patience, Rounds, contest};
use super::cores::Cores;
use super::floor::{FLOOR, Floor, SINGLE_LINE};
use super::members::{Group, PATIENCE};
use super::mpi::{self, Installed, Transport};
use super::receiver::{PacketReceiver, Way};
use super::scratch::Scratch;
use super::ucx::Perftest;
use super::worker::{Kind, commands};
use super::{Contender, Role, Task};
use crate::mpi::Family;
use crate::outcome::Outcome;

/// Ours, with memory of any kind.
pub(in crate::bench) const MEMFERRY: &str = "memferry";
/// Ours, with memory that the other side maps.
pub(in crate::bench) const SHAREABLE: &str = "memferry (shareable)";
/// UCX by its own measuring program, which a bench may leave out where time is short.
pub(in crate::bench) const UCX: &str = "UCX";

/// One copy by the receiver alone.
pub(in crate::bench) const CROSS_MEMORY: &str = "cross-memory read";
/// Two copies through shared memory.
pub(in crate::bench) const TWO_COPIES: &str = "shared memory, two copies";
/// TCP over the loopback interface.
pub(in crate::bench) const LOOPBACK: &str = "loopback TCP";

/// A receiver that does nothing ahead.
pub(in crate::bench) const RECEIVE_NAIVE: &str = "naive";
/// Receivers that begin to receive before they need the message.
pub(in crate::bench) const RECEIVE_AHEAD: [&str; 3] =
    ["memferry (two phases)", "memferry (three phases)", "memferry (background)"];

/// Receivers of packets: one that copies them, and one that has them delivered.
pub(in crate::bench) const PACKETS: [&str; 2] = ["packets, memcpy", "packets, deliver"];

/// Messages into memory that may not be there: without bringing it in, and as usual; with ordinary
/// memory, then with shareable memory.
pub(in crate::bench) const LANDINGS: [[&str; 2]; 2] =
    [["plain", MEMFERRY], ["plain (shareable)", SHAREABLE]];

/// Members of ours, by series.
const OURS: [(&str, Kind); 2] = [(MEMFERRY, Kind::Memferry), (SHAREABLE, Kind::Shareable)];

/// Ways from one process to another: ours, and those that every program has.
const CARRIERS: [(&str, Role, Kind); 6] = [
    (MEMFERRY, Role::Ours, Kind::Link),
    (CROSS_MEMORY, Role::Peer, Kind::CrossMemory),
    (TWO_COPIES, Role::Peer, Kind::TwoCopies),
    (LOOPBACK, Role::Peer, Kind::LoopbackTcp),
    ("Unix socket", Role::Peer, Kind::UnixSocket),
    ("pipe", Role::Peer, Kind::Pipe),
];

/// Receivers of ours, which differ in how their loops are written.
const RECEIVERS: [(&str, Role, Kind); 4] = [
    (RECEIVE_NAIVE, Role::Peer, Kind::ReceiveNaive),
    (RECEIVE_AHEAD[0], Role::Ours, Kind::ReceiveTwoPhase),
    (RECEIVE_AHEAD[1], Role::Ours, Kind::ReceiveThreePhase),
    (RECEIVE_AHEAD[2], Role::Ours, Kind::ReceiveBackground),
];

/// Those that land messages.
const LANDERS: [(&str, Role, Kind); 4] = [
    (LANDINGS[0][0], Role::Peer, Kind::Unpinned),
    (LANDINGS[0][1], Role::Ours, Kind::Memferry),
    (LANDINGS[1][0], Role::Peer, Kind::UnpinnedShareable),
    (LANDINGS[1][1], Role::Ours, Kind::Shareable),
];

/// Peers that are libraries inside this program, by the name of their crate.
#[cfg(feature = "peers")]
const LIBRARIES: [(&str, Kind); 2] =
    [("iceoryx2", Kind::Iceoryx), ("ipc-channel", Kind::IpcChannel)];
/// What this program was built with.
#[cfg(feature = "peers")]
const LOCK_FILE: &str = include_str!("../../../../../Cargo.lock");

/// What was found on this machine, and what was not.
pub(in crate::bench) struct Camp {
    ground: Ground,
    missing: Vec<String>,
    versions: BTreeMap<String, String>,
}

/// What groups are started with.
struct Ground {
    cores: Cores,
    mpi: Vec<(Family, Installed, PathBuf)>,
    asides: Vec<Aside>,
    scratch: Scratch,
}

/// Groups of one size, ready for contests.
pub(in crate::bench) struct Field<'a> {
    entries: Vec<Entry>,
    missing: &'a mut Vec<String>,
}

impl Camp {
    /// Looks for the implementations of MPI and compiles our program for each.
    pub(in crate::bench) fn pitch() -> anyhow::Result<Self> {
        let scratch = Scratch::new()?;
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
                Err(reason) => missing.push(because(series, &reason)),
            }
        }
        let (cores, asides) = (Cores::of_this_machine(), Vec::new());
        let ground = Ground { cores, mpi, asides, scratch };
        Ok(Self { ground, missing, versions })
    }

    /// Looks for what can run over Memferry's provider, to be measured beside its own transport.
    pub(in crate::bench) fn invite_mpi_over_memferry(&mut self) {
        let Ground { mpi, scratch, asides, .. } = &mut self.ground;
        *asides = carried::find(mpi, scratch.folder(), &mut self.missing);
        for aside in asides {
            let version = aside.installed.launcher.version.clone();
            self.versions.insert(aside.series.clone(), version);
        }
    }

    /// For contestants that are all in this program.
    pub(in crate::bench) fn pitch_for_own() -> anyhow::Result<Self> {
        let (cores, scratch) = (Cores::of_this_machine(), Scratch::new()?);
        let ground = Ground { cores, mpi: Vec::new(), asides: Vec::new(), scratch };
        Ok(Self { ground, missing: Vec::new(), versions: BTreeMap::new() })
    }

    /// How many cores there are for members.
    pub(in crate::bench) fn cores(&self) -> usize {
        self.ground.cores.whole()
    }

    /// Ours and MPI in groups of `size`.
    pub(in crate::bench) fn field(&mut self, size: usize) -> Field<'_> {
        let mut field = Field { entries: Vec::new(), missing: &mut self.missing };
        field.enter_groups(&self.ground, size);
        field
    }

    /// The same, and MPI over Memferry.
    pub(in crate::bench) fn field_with_asides(&mut self, size: usize) -> Field<'_> {
        let mut field = Field { entries: Vec::new(), missing: &mut self.missing };
        field.enter_groups(&self.ground, size);
        field.enter_asides(&self.ground, size);
        field
    }

    /// Ours and everybody else who can send a message to and fro, and the floor.
    pub(in crate::bench) fn field_of_pairs(&mut self) -> Field<'_> {
        let mut field = Field { entries: Vec::new(), missing: &mut self.missing };
        field.enter_groups(&self.ground, 2);
        field.enter_asides(&self.ground, 2);
        let perftest = Perftest::find(&self.ground.cores);
        if let (Ok(_), Some(version)) = (&perftest, Perftest::version()) {
            self.versions.insert(UCX.to_owned(), version);
        }
        field.enter(UCX, Role::Peer, perftest);
        #[cfg(feature = "peers")]
        for (series, kind) in LIBRARIES {
            let version = locked_version(LOCK_FILE, series).unwrap_or("unknown");
            self.versions.insert(series.to_owned(), version.to_owned());
            field.enter(series, Role::Peer, self.ground.start(kind, 2));
        }
        #[cfg(not(feature = "peers"))]
        for series in ["iceoryx2", "ipc-channel"] {
            let reason = "this program was built without the feature `peers`".to_owned();
            field.enter(series, Role::Peer, Err::<Group, _>(reason));
        }
        for (series, single_line) in [(FLOOR, false), (SINGLE_LINE, true)] {
            field.enter(series, Role::Floor, Floor::between(&self.ground.cores, single_line));
        }
        field
    }

    /// A link of ours, and the ways that every program has.
    pub(in crate::bench) fn field_of_carriers(&mut self) -> Field<'_> {
        self.field_of_own(&CARRIERS)
    }

    /// Receivers of streams of tasks, each with its sender.
    pub(in crate::bench) fn field_of_receivers(&mut self) -> Field<'_> {
        self.field_of_own(&RECEIVERS)
    }

    /// Receivers of packets, in this process.
    pub(in crate::bench) fn field_of_packets(&mut self) -> Field<'_> {
        let mut field = Field { entries: Vec::new(), missing: &mut self.missing };
        let both = PacketReceiver::pair(&self.ground.cores, [Way::Memcpy, Way::Deliver]);
        for ((series, role), receiver) in
            PACKETS.into_iter().zip([Role::Peer, Role::Ours]).zip(both)
        {
            field.enter(series, role, receiver);
        }
        field
    }

    /// Members that receive into memory that may not be there.
    pub(in crate::bench) fn field_of_landings(&mut self) -> Field<'_> {
        self.field_of_own(&LANDERS)
    }

    fn field_of_own(&mut self, kinds: &[(&str, Role, Kind)]) -> Field<'_> {
        let mut field = Field { entries: Vec::new(), missing: &mut self.missing };
        for &(series, role, kind) in kinds {
            field.enter(series, role, self.ground.start(kind, 2));
        }
        field
    }

    /// Writes down who was measured, and who was not.
    pub(in crate::bench) fn strike(self, outcome: &mut Outcome) {
        outcome.versions.extend(self.versions);
        outcome.missing.extend(self.missing);
    }
}

impl Ground {
    /// Starts a group of members made of this program, in a room of its own.
    fn start(&self, kind: Kind, size: usize) -> Result<Group, String> {
        let room = self.scratch.room().map_err(|error| format!("no folder: {error}"))?;
        Group::start(commands(kind, size, &self.cores, &room)?, PATIENCE)
    }
}

impl Field<'_> {
    fn enter_groups(&mut self, ground: &Ground, size: usize) {
        for (series, kind) in OURS {
            self.enter(series, Role::Ours, ground.start(kind, size));
        }
        for (family, installed, member) in &ground.mpi {
            let group = installed.start(member, size, &ground.cores, &Transport::Own);
            self.enter(mpi::series(*family), Role::Peer, group);
        }
    }

    fn enter_asides(&mut self, ground: &Ground, size: usize) {
        for Aside { series, installed, member, transport } in &ground.asides {
            let group = installed.start(member, size, &ground.cores, transport);
            self.enter(series, Role::Aside, group);
        }
    }

    fn enter(
        &mut self,
        series: &str,
        role: Role,
        contender: Result<impl Contender + 'static, String>,
    ) {
        match contender {
            Ok(contender) => {
                let (series, contender) = (series.to_owned(), Box::new(contender));
                self.entries.push(Entry { series, role, contender });
            }
            Err(reason) => self.missing.push(because(series, &reason)),
        }
    }

    /// Lets those that `takes_part` names do a task in turn.
    pub(in crate::bench) fn contest(
        &mut self,
        task: Task,
        patience: Patience,
        takes_part: impl Fn(&str) -> bool,
    ) -> Rounds {
        contest(&mut self.entries, self.missing, takes_part, task, patience)
    }
}

fn because(series: &str, reason: &str) -> String {
    if reason == "not installed" { series.to_owned() } else { format!("{series} ({reason})") }
}

/// The version of a crate in a lock file.
#[cfg(feature = "peers")]
fn locked_version<'a>(lock_file: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = lock_file.lines();
    lines.find(|line| line.strip_prefix("name = ") == Some(&format!("\"{name}\"")))?;
    Some(lines.next()?.strip_prefix("version = ")?.trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn what_is_not_installed_needs_no_reason() {
        assert_eq!(because("UCX", "not installed"), "UCX");
        assert_eq!(because("UCX", "no free port"), "UCX (no free port)");
    }
}
