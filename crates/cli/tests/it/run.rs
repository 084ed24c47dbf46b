//! Tests of `memferry run` from outside: what it reports, what it passes on, and what it refuses.

#![cfg(all(target_arch = "x86_64", target_env = "gnu"))]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use memferry_testing::{Requirement, skip};
use serde_json::Value;

/// Copies 3 MiB and compares small words, and ends with the status of its first word.
const PROGRAM: &str = r#"
#include <stdlib.h>
#include <string.h>
static char memory[6 << 20];
__attribute__((noinline)) void copy_much(long bytes)
{
    for (int turn = 0; turn < 10; turn++)
        memcpy(memory + (3 << 20), memory, (size_t)bytes);
}
int main(int count, char **words)
{
    copy_much(count * (1 << 20));
    return atoi(words[1]);
}
"#;

struct Folder {
    folder: tempfile::TempDir,
}

impl Folder {
    fn new() -> Self {
        let folder = Self { folder: tempfile::tempdir().expect("there is a temporary folder") };
        fs::write(folder.path("program.c"), PROGRAM).unwrap();
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Compiles the program. Returns whether the compiler can do that.
    fn compile(&self, name: &str, options: &[&str]) -> bool {
        let mut compiler = std::process::Command::new("cc");
        compiler.args(["-O1", "-g", "-fno-builtin", "-o"]).arg(self.path(name));
        let output = compiler.arg(self.path("program.c")).args(options).output();
        output.expect("there is a C compiler").status.success()
    }

    fn word(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }
}

fn memferry(words: &[&str]) -> Command {
    let mut command = Command::cargo_bin("memferry").expect("the program is built");
    // Cargo puts the library beside the tests.
    let tests = std::env::current_exe().expect("a test knows where it is");
    let libraries = tests.parent().unwrap_or(Path::new("/"));
    command.args(words).env("MEMFERRY_PROFILE", "off").env("MEMFERRY_PROVIDER_DIR", libraries);
    command
}

fn refusal(words: &[&str]) -> String {
    let assert = memferry(words).assert().code(1);
    String::from_utf8(assert.get_output().stderr.clone()).unwrap()
}

/// What the program says to wrong arguments.
fn wrong_arguments(words: &[&str]) -> String {
    let assert = memferry(words).assert().code(2);
    String::from_utf8(assert.get_output().stderr.clone()).unwrap()
}

#[test]
fn a_program_is_profiled_by_size_and_caller_and_keeps_its_status() {
    let folder = Folder::new();
    assert!(folder.compile("program", &[]));
    let (json, page) = (folder.word("profile.json"), folder.word("profile.html"));
    let program = folder.word("program");
    let words = [
        "run",
        "--profile",
        "--json",
        "--output",
        &json,
        "--report",
        &page,
        &program,
        "7",
        "--json",
    ];
    memferry(&words).assert().code(7).stdout("");
    let profile: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    let sizes = profile["sizes"].as_array().unwrap();
    let large = sizes.iter().find(|size| size["from_bytes"] == 2 << 20).expect("the copies");
    assert_eq!((&large["function"], &large["calls"]), (&"memcpy".into(), &10.into()));
    assert_eq!(large["bytes"], 30 << 20);
    assert!(large["seconds"].as_f64().unwrap() > 0.0);
    let callers = profile["callers"].as_array().unwrap();
    let caller = callers.iter().find(|it| it["symbol"] == "copy_much").expect("the caller");
    assert!(caller["module"].as_str().unwrap().ends_with("/program"), "{caller}");
    assert_eq!(profile["processes"], 1);
    assert!(fs::read_to_string(page).unwrap().contains("calls by size"));
}

#[test]
fn the_text_comes_after_the_program_and_names_what_could_be_saved() {
    let folder = Folder::new();
    assert!(folder.compile("program", &[]));
    let output = memferry(&["run", "--profile", &folder.word("program"), "0"]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    for part in
        ["calls of ", "in 1 process", "size from", "2 MiB", "program: copy_much", "--copies"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn a_script_runs_with_its_interpreter_and_all_children_count() {
    let folder = Folder::new();
    assert!(folder.compile("program", &[]));
    let script = folder.path("script");
    let text = format!("#!/usr/bin/env -S bash\n{0} 3; {0} 4; exit 5\n", folder.word("program"));
    memferry_testing::write_program(&script, &text);
    let json = folder.word("profile.json");
    let words = ["run", "--profile", "--json", "--output", &json, &folder.word("script")];
    memferry(&words).assert().code(5);
    let profile: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    assert!(profile["processes"].as_u64().unwrap() >= 3, "{}", profile["processes"]);
}

#[test]
fn programs_into_which_nothing_can_be_preloaded_are_refused_with_the_reason() {
    let folder = Folder::new();
    let cases: [(&str, &[&str], &str); 3] = [
        ("static", &["-static"], "is linked statically"),
        ("musl", &["-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1"], "is linked with musl"),
        ("asan", &["-fsanitize=address"], "is built with AddressSanitizer"),
    ];
    for (name, options, reason) in cases {
        if !folder.compile(name, options) {
            skip(Requirement::Programs, format!("the C compiler cannot link with {options:?}"));
            continue;
        }
        let said = refusal(&["run", "--profile", &folder.word(name), "0"]);
        assert!(said.contains(reason), "{name}: {said}");
    }
    memferry_testing::write_program(&folder.path("valgrind"), "#!/bin/sh\n");
    let said = refusal(&["run", "--profile", &folder.word("valgrind"), "true"]);
    assert!(said.contains("valgrind replaces memcpy and malloc itself"), "{said}");
    fs::write(folder.path("text"), "no program").unwrap();
    let said = refusal(&["run", "--profile", &folder.word("text")]);
    assert!(said.contains("is no program for 64-bit x86"), "{said}");
    let said = refusal(&["run", "--profile", "no-such-command-anywhere"]);
    assert!(said.contains("there is no command no-such-command-anywhere"), "{said}");
}

#[test]
fn copies_are_shared_with_the_measured_sizes() {
    let mut command = memferry(&["run", "--copies", "sh", "-c", "echo $MEMFERRY_COPIES; exit 6"]);
    let assert = command.env("MEMFERRY_SPLIT_BYTES", "768k").assert().code(6);
    let said = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    let words: Vec<_> = said.trim().split(',').collect();
    assert!(words.len() == 5 && words[0] == "786432", "{said}");
    assert!(words[1..4].iter().all(|word| word.parse::<usize>().is_ok()), "{said}");
}

#[test]
fn a_set_uid_program_of_another_user_is_refused() {
    let folder = Folder::new();
    assert!(folder.compile("program", &[]));
    let file = folder.path("program");
    if std::os::unix::fs::chown(&file, Some(12345), Some(12345)).is_err() {
        return skip(Requirement::Root, "only root gives files to other users");
    }
    fs::set_permissions(&file, fs::Permissions::from_mode(0o4755)).unwrap();
    let said = refusal(&["run", "--profile", &folder.word("program"), "0"]);
    assert!(said.contains("is a set-uid or set-gid program"), "{said}");
}

#[test]
fn without_a_switch_there_is_nothing_to_do() {
    let said = wrong_arguments(&["run", "true"]);
    assert!(said.contains("nothing to do; add --profile, --copies or --shared-heap"), "{said}");
}

#[test]
fn a_mistyped_option_is_named_and_not_taken_for_the_command() {
    for option in ["--profil", "-copies", "--copeis"] {
        let said = wrong_arguments(&["run", "--shared-heap", option, "true"]);
        assert!(said.contains(&format!("there is no option {option}")), "{said}");
    }
    for option in ["--json", "--output=x", "--report=x"] {
        wrong_arguments(&["run", "--copies", option, "true"]);
    }
    // The command's own options are its own.
    memferry(&["run", "--shared-heap", "true", "--profil"]).assert().code(0);
}

#[test]
fn one_large_fill_is_timed_and_large_enough() {
    let folder = Folder::new();
    let source = "#include <stdlib.h>\n#include <string.h>\n\
        int main(int n, char **v) { char *p = malloc(64 << 20); memset(p, n, 64 << 20); return p[n] != n; }";
    fs::write(folder.path("fill.c"), source).unwrap();
    let compiled = std::process::Command::new("cc")
        .args(["-O1", "-fno-builtin", "-o"])
        .args([folder.path("fill"), folder.path("fill.c")])
        .status();
    assert!(compiled.unwrap().success());
    let output = memferry(&["run", "--profile", "--json", &folder.word("fill")]).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    let sizes = report["sizes"].as_array().unwrap();
    let fill = sizes.iter().find(|size| size["from_bytes"] == 64 << 20).unwrap();
    assert_eq!((&fill["function"], &fill["calls"]), (&"memset".into(), &1.into()));
    assert!(fill["seconds"].as_f64().unwrap() > 0.0, "{fill}");
}

#[test]
fn a_library_that_is_not_there_is_named_with_the_command_that_builds_it() {
    let folder = Folder::new();
    let mut command = memferry(&["run", "--profile", "true"]);
    let assert = command.env("MEMFERRY_PROVIDER_DIR", folder.folder.path()).assert().code(1);
    let said = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(said.contains("libmemferry-preload.so"), "{said}");
}
