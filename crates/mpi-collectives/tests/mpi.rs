//! MPI programs with the library preloaded (`tests/programs`), compiled with the MPIs of this machine and
//! run with their launchers and their own transports: Debian's Open MPI and MPICH, and those that
//! MEMFERRY_OPENMPI and MEMFERRY_MPICH name.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

use memferry_testing::mpi::{Mpi, MpiFamily, SharedFiles, output_text};
use tempfile::TempDir;

/// An MPI with the programs that were compiled with it. One test has one at a time: ranks of two tests
/// would only wait for each other.
struct MpiFixture {
    mpi: Mpi,
    programs: TempDir,
    library: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

impl MpiFixture {
    fn new(mpi: Mpi) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let programs = TempDir::new().expect("there is a place for temporary files");
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
        let mut build = Command::new(sources.join("build"));
        let output = build.arg(&mpi.compiler).arg(programs.path()).output().expect("a shell");
        assert!(output.status.success(), "compiling: {}", output_text(&output));
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
        if self.mpi.family == MpiFamily::OpenMpi {
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
                MpiFamily::OpenMpi => command.arg("-x").arg(format!("{name}={value}")),
                MpiFamily::Mpich => command.args(["-env", name, value]),
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
        let (launcher, said) = (self.mpi.launcher.display(), output_text(output));
        assert!(
            output.status.success() && said.contains("all right"),
            "{launcher}, {what}: {said}"
        );
    }
}

/// Calls `act` with every MPI of a family, or prints that there is none.
fn with_every(family: MpiFamily, act: impl Fn(&MpiFixture)) {
    let found = [Mpi::of_debian(family), Mpi::named(family)];
    if found.iter().all(Option::is_none) {
        family.skip(match family {
            MpiFamily::OpenMpi => "apt install openmpi-bin libopenmpi-dev",
            MpiFamily::Mpich => "apt install mpich libmpich-dev",
        });
    }
    for mpi in found.into_iter().flatten() {
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
    let _files = SharedFiles::guard();
    let output = fixture.run(3, &[], &["coll-victim"]);
    let said = output_text(&output);
    assert!(said.contains("rank 1 kills itself"), "{said}");
    assert!(!output.status.success() && !said.contains("is wrong"), "{said}");
    if said.contains("fails as it should") {
        assert!(said.contains("the process of rank 1 has exited"), "{said}");
    }
}

#[test]
fn collectives_of_open_mpi_are_executed() {
    with_every(MpiFamily::OpenMpi, check);
}

#[test]
fn collectives_of_mpich_are_executed() {
    with_every(MpiFamily::Mpich, check);
}

#[test]
fn collectives_of_open_mpi_are_passed_on_between_hosts_and_when_switched_off() {
    with_every(MpiFamily::OpenMpi, pass_on);
}

#[test]
fn collectives_of_mpich_are_passed_on_between_hosts_and_when_switched_off() {
    with_every(MpiFamily::Mpich, pass_on);
}

#[test]
fn a_killed_rank_leaves_no_rank_of_open_mpi_waiting() {
    with_every(MpiFamily::OpenMpi, kill_one);
}

#[test]
fn a_killed_rank_leaves_no_rank_of_mpich_waiting() {
    with_every(MpiFamily::Mpich, kill_one);
}
