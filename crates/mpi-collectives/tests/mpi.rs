//! MPI programs with the library preloaded (`tests/programs`), compiled with the MPIs of this machine and
//! run with their launchers and their own transports: Debian's Open MPI and MPICH, and the MPIs that
//! MEMFERRY_OPENMPI and MEMFERRY_MPICH name (a folder that contains bin/mpicc and bin/mpirun).

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

use memferry_testing::{Requirement, skip};
use tempfile::TempDir;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    OpenMpi,
    Mpich,
}

/// An MPI of this machine.
struct Mpi {
    family: Family,
    compiler: PathBuf,
    launcher: PathBuf,
}

/// An MPI with the programs that were compiled with it. One test has one at a time: ranks of two tests
/// would only wait for each other.
struct MpiFixture {
    mpi: Mpi,
    programs: TempDir,
    library: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

impl Mpi {
    fn at(family: Family, folder: &Path, suffix: &str) -> Option<Self> {
        let [compiler, launcher] =
            ["mpicc", "mpirun"].map(|name| folder.join(format!("{name}{suffix}")));
        let is_there = compiler.is_file() && launcher.is_file();
        is_there.then_some(Self { family, compiler, launcher })
    }

    /// All MPIs of a family that are found.
    fn all(family: Family) -> Vec<Self> {
        let (variable, suffix) = match family {
            Family::OpenMpi => ("MEMFERRY_OPENMPI", ".openmpi"),
            Family::Mpich => ("MEMFERRY_MPICH", ".mpich"),
        };
        let path = env::var_os("PATH").unwrap_or_default();
        let usual = env::split_paths(&path).find_map(|folder| Self::at(family, &folder, suffix));
        let named = env::var_os(variable).map(PathBuf::from).and_then(|named| {
            let folder = if named.is_dir() { named.join("bin") } else { named.parent()?.into() };
            Self::at(family, &folder, "")
        });
        usual.into_iter().chain(named).collect()
    }
}

impl MpiFixture {
    fn new(mpi: Mpi) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let programs = TempDir::new().expect("there is a place for temporary files");
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
        let mut build = Command::new(sources.join("build"));
        let output = build.arg(&mpi.compiler).arg(programs.path()).output().expect("a shell");
        assert!(output.status.success(), "compiling: {}", text(&output));
        // Cargo puts the library beside the tests that depend on it.
        let test = env::current_exe().expect("a test knows where it is");
        let library = test.with_file_name("libmemferry_coll.so");
        assert!(library.exists(), "{} is missing", library.display());
        Self { mpi, programs, library, _turn: turn }
    }

    /// The launcher, with the library preloaded in the ranks.
    fn launcher(&self) -> Command {
        let mut command = Command::new(&self.mpi.launcher);
        // The MPI derives names of shared files from the path, and they must not become too long.
        command.env("TMPDIR", "/tmp");
        if self.mpi.family == Family::OpenMpi {
            command.env("OMPI_ALLOW_RUN_AS_ROOT", "1");
            command.env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
            command.arg("--oversubscribe");
        }
        command
    }

    /// Adds ranks of a program, with variables of their own.
    fn add_ranks(&self, command: &mut Command, ranks: usize, own: &[(&str, &str)], words: &[&str]) {
        command.args(["-n", &ranks.to_string()]);
        let library = self.library.to_string_lossy();
        for (name, value) in own.iter().copied().chain([("LD_PRELOAD", &*library)]) {
            match self.mpi.family {
                Family::OpenMpi => command.arg("-x").arg(format!("{name}={value}")),
                Family::Mpich => command.args(["-env", name, value]),
            };
        }
        command.arg(self.programs.path().join(words[0])).args(&words[1..]);
    }

    fn run(&self, ranks: usize, own: &[(&str, &str)], words: &[&str]) -> Output {
        let mut command = self.launcher();
        self.add_ranks(&mut command, ranks, own, words);
        command.output().expect("the launcher starts")
    }

    fn expect_right(&self, what: &str, output: &Output) {
        let (launcher, said) = (self.mpi.launcher.display(), text(output));
        assert!(
            output.status.success() && said.contains("all right"),
            "{launcher}, {what}: {said}"
        );
    }
}

fn text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{}\n{out}\n{err}", output.status)
}

/// Calls `act` with every MPI of a family, or prints that there is none.
fn with_every(family: Family, act: impl Fn(&MpiFixture)) {
    let found = Mpi::all(family);
    if found.is_empty() {
        match family {
            Family::OpenMpi => skip(Requirement::OpenMpi, "apt install openmpi-bin libopenmpi-dev"),
            Family::Mpich => skip(Requirement::Mpich, "apt install mpich libmpich-dev"),
        }
    }
    for mpi in found {
        act(&MpiFixture::new(mpi));
    }
}

fn check(fixture: &MpiFixture) {
    for ranks in [2, 4, 5] {
        let output = fixture.run(ranks, &[], &["coll-check", "executed"]);
        fixture.expect_right(&format!("{ranks} ranks"), &output);
    }
}

fn pass_on(fixture: &MpiFixture) {
    let off = [("MEMFERRY_COLLECTIVES", "off")];
    let output = fixture.run(2, &off, &["coll-check", "passed-on"]);
    fixture.expect_right("switched off", &output);
    let mut command = fixture.launcher();
    for (index, host) in ["one", "two"].into_iter().enumerate() {
        if index > 0 {
            command.arg(":");
        }
        fixture.add_ranks(
            &mut command,
            1,
            &[("MEMFERRY_HOST_ID", host)],
            &["coll-check", "passed-on"],
        );
    }
    let output = command.output().expect("the launcher starts");
    fixture.expect_right("two hosts", &output);
}

/// The launcher may end the other ranks before they see the error, but no rank waits for ever.
fn kill_one(fixture: &MpiFixture) {
    let output = fixture.run(3, &[], &["coll-victim"]);
    let said = text(&output);
    assert!(said.contains("rank 1 kills itself"), "{said}");
    assert!(!output.status.success() && !said.contains("is wrong"), "{said}");
    if said.contains("fails as it should") {
        assert!(said.contains("the process of rank 1 has exited"), "{said}");
    }
}

#[test]
fn collectives_of_open_mpi_are_executed() {
    with_every(Family::OpenMpi, check);
}

#[test]
fn collectives_of_mpich_are_executed() {
    with_every(Family::Mpich, check);
}

#[test]
fn collectives_of_open_mpi_are_passed_on_between_hosts_and_when_switched_off() {
    with_every(Family::OpenMpi, pass_on);
}

#[test]
fn collectives_of_mpich_are_passed_on_between_hosts_and_when_switched_off() {
    with_every(Family::Mpich, pass_on);
}

#[test]
fn a_killed_rank_leaves_no_rank_of_open_mpi_waiting() {
    with_every(Family::OpenMpi, kill_one);
}

#[test]
fn a_killed_rank_leaves_no_rank_of_mpich_waiting() {
    with_every(Family::Mpich, kill_one);
}
