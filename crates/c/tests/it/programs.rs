//! C programs against the header and both libraries. What they check is in `tests/c`; this finds
//! the libraries that cargo built along with this test, compiles the programs and runs them.

use std::collections::HashMap;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;

use memferry_testing::{Requirement, skip};
use tempfile::TempDir;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Linkage {
    Static,
    Shared,
}

const BOTH: [Linkage; 2] = [Linkage::Static, Linkage::Shared];

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Cargo puts the libraries beside the tests that depend on them.
fn library(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows where it is");
    let path = test.with_file_name(name);
    assert!(path.exists(), "{} is missing: run `cargo test -p memferry-c`", path.display());
    path
}

/// The program of a source. It is compiled by the first test that asks for it.
fn program(source: &'static str, linkage: Linkage) -> PathBuf {
    type Slot = Arc<OnceLock<PathBuf>>;
    static PROGRAMS: Mutex<Option<HashMap<(&str, Linkage), Slot>>> = Mutex::new(None);
    let mut programs = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
    let slot = programs.get_or_insert_default().entry((source, linkage)).or_default().clone();
    drop(programs);
    slot.get_or_init(|| compile(source, linkage)).clone()
}

/// Compiles a program, with every warning an error.
fn compile(source: &str, linkage: Linkage) -> PathBuf {
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let name = source.trim_end_matches(".c").replace('/', "-");
    let into = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{linkage:?}"));
    std::fs::create_dir_all(&into).expect("a folder for programs");
    // Another run of these tests may have the program of the same name in use.
    let unfinished = TempDir::new_in(&into).expect("a folder for a program");
    let program = unfinished.path().join(&name);
    let mut command = Command::new(&compiler);
    command.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O1", "-g"]);
    command.arg("-I").arg(folder().join("include"));
    command.arg("-o").arg(&program).arg(folder().join(source)).arg("-pthread");
    match linkage {
        Linkage::Static => {
            // What Rust's standard library needs of the system; see the README.
            command.arg(library("libadma.a")).args(["-lgcc_s", "-lutil", "-lrt", "-lm", "-ldl"]);
            // The linker spends most of its time on what only a debugger reads.
            command.arg("-Wl,--strip-debug");
        }
        Linkage::Shared => {
            let beside = library("libadma.so").with_file_name("");
            command.arg("-L").arg(&beside).arg("-ladma");
            command.arg(format!("-Wl,-rpath,{}", beside.display()));
        }
    }
    let output = command.output().unwrap_or_else(|error| {
        panic!("no C compiler ({compiler:?}: {error}): install gcc or clang, or set CC")
    });
    expect_success(&format!("compiling {source} ({linkage:?})"), &output);
    let finished = into.join(name);
    std::fs::rename(program, &finished).expect("a program can be renamed");
    finished
}

fn expect_success(what: &str, output: &Output) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{what}: {}\n{text}", output.status);
}

/// A program that sees none of this process's settings, and measures nothing.
fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    let ours = std::env::vars_os().map(|(name, _)| name);
    for name in ours.filter(|name| name.to_string_lossy().starts_with("MEMFERRY_")) {
        command.env_remove(name);
    }
    command.env("MEMFERRY_PROFILE", "off");
    // Cargo's own setting names a folder first in which an older build may lie.
    command.env("LD_LIBRARY_PATH", library("libadma.so").with_file_name(""));
    command
}

/// A run of a program: its source, its library, its arguments and its settings.
struct Run<'a> {
    source: &'static str,
    linkage: Linkage,
    arguments: &'a [&'a str],
    settings: Vec<(&'a str, &'a str)>,
}

/// Runs all at once, for the programs sleep most of their time. Gives the outputs in order.
fn run_at_once(runs: &[Run]) -> Vec<Output> {
    let one = |run: &Run| {
        let Run { source, linkage, arguments, settings } = run;
        let mut command = command(&program(source, *linkage));
        let output = command.args(*arguments).envs(settings.iter().copied()).output();
        let output = output.expect("what was compiled can be run");
        expect_success(&format!("{source} ({linkage:?}, {settings:?})"), &output);
        output
    };
    thread::scope(|scope| {
        let threads: Vec<_> = runs.iter().map(|run| scope.spawn(move || one(run))).collect();
        let outcomes: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
        // The first panic is passed on when all are over.
        outcomes
            .into_iter()
            .map(|outcome| outcome.unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    })
}

/// Runs a program once for each count of channels, linked as asked.
fn run_with(source: &'static str, linkages: &[Linkage], channels: &[&str]) -> Vec<Output> {
    let runs = linkages.iter().flat_map(|&linkage| {
        let settings = channels.iter().map(|count| vec![("MEMFERRY_CHANNELS", *count)]);
        settings.map(move |settings| Run { source, linkage, arguments: &[], settings })
    });
    run_at_once(&runs.collect::<Vec<_>>())
}

/// With the archive and with the shared library: programs that together use everything in which the
/// two could differ (threads, forks, the settings, processes that talk).
fn run_with_both_libraries(source: &'static str, channels: &[&str]) -> Vec<Output> {
    run_with(source, &BOTH, channels)
}

/// With the shared library alone.
fn run_shared(source: &'static str, channels: &[&str]) {
    run_with(source, &[Linkage::Shared], channels);
}

/// Runs every program with every setting.
fn run_with_settings(sources: &[&'static str], settings: &[(&str, &str)]) {
    let runs = sources.iter().flat_map(|source| {
        settings.iter().map(|setting| Run {
            source,
            linkage: Linkage::Shared,
            arguments: &[],
            settings: vec![*setting],
        })
    });
    run_at_once(&runs.collect::<Vec<_>>());
}

/// `MEMFERRY_TRAFFIC_KILLS` says how many, in each of three settings.
#[test]
fn traffic_is_right_while_one_process_after_the_other_is_killed() {
    let settings =
        [("MEMFERRY_BACKGROUND", "off"), ("MEMFERRY_BACKGROUND", "on"), ("MEMFERRY_CMA", "off")];
    run_traffic(&settings, &[]);
}

#[test]
fn traffic_is_right_beside_two_processes_that_scribble_over_their_rings() {
    // Any seed, six processes, of which two lie.
    let seed = std::process::id().to_string();
    run_traffic(
        &[("MEMFERRY_BACKGROUND", "on"), ("MEMFERRY_BACKGROUND", "off")],
        &[&seed, "6", "2"],
    );
}

#[allow(clippy::print_stdout, reason = "rows of the table of `cargo xtask faults`")]
fn run_traffic(settings: &[(&'static str, &'static str)], more: &[&str]) {
    let kills = std::env::var("MEMFERRY_TRAFFIC_KILLS").unwrap_or_else(|_| "20".into());
    let arguments = [&[kills.as_str()], more].concat();
    let runs: Vec<_> = settings
        .iter()
        .map(|setting| Run {
            source: "tests/c/traffic.c",
            linkage: Linkage::Shared,
            arguments: &arguments,
            settings: vec![*setting],
        })
        .collect();
    for ((name, value), output) in settings.iter().zip(run_at_once(&runs)) {
        let text = String::from_utf8_lossy(&output.stdout);
        let rows: Vec<_> = text.lines().filter(|line| line.starts_with("row")).collect();
        assert!(!rows.is_empty(), "no row");
        for row in rows {
            println!("{}", row.replace("in traffic", &format!("in traffic, {name}={value}")));
        }
    }
}

#[test]
fn every_call_does_what_the_header_says() {
    run_with_both_libraries("tests/c/calls.c", &["1", "3"]);
}

#[test]
fn packets_are_delivered_as_one_message() {
    run_shared("tests/c/deliver.c", &["1", "3"]);
}

#[test]
fn many_copies_and_fills_are_started_by_one_call() {
    run_shared("tests/c/batch.c", &["1", "3"]);
}

#[test]
fn the_library_can_be_closed_and_opened_anew_under_many_threads() {
    run_shared("tests/c/lifetime.c", &["1", "3"]);
}

#[test]
fn forked_children_copy_by_themselves() {
    run_with_both_libraries("tests/c/forked.c", &["2"]);
}

#[test]
fn messages_arrive_whichever_side_comes_first() {
    run_shared("tests/c/link_messages.c", &["1"]);
}

#[test]
fn links_fit_into_event_loops() {
    run_shared("tests/c/link_events.c", &["1"]);
}

#[test]
fn links_end_well_whatever_happens_to_them() {
    run_shared("tests/c/link_ends.c", &["1"]);
}

#[test]
fn windows_are_put_to_and_got_from_without_a_word_from_their_owner() {
    run_shared("tests/c/window_access.c", &["1"]);
}

#[test]
fn windows_end_well_whatever_happens_to_them() {
    run_shared("tests/c/window_ends.c", &["1"]);
}

#[test]
fn teams_call_collective_operations_and_name_who_dies() {
    run_with_settings(&["tests/c/team.c"], &[("MEMFERRY_CHANNELS", "1"), ("MEMFERRY_CMA", "off")]);
}

#[test]
fn memory_that_a_stopped_process_may_write_is_busy_and_nothing_stays_behind() {
    run_shared("tests/c/frozen.c", &["1"]);
}

#[test]
fn links_work_with_a_thread_behind_them_and_without_access_to_memory() {
    run_with_settings(
        &["tests/c/link_messages.c", "tests/c/link_events.c", "tests/c/link_ends.c"],
        &[("MEMFERRY_BACKGROUND", "on"), ("MEMFERRY_CMA", "off")],
    );
}

#[test]
fn windows_work_with_a_thread_behind_their_links() {
    run_with_settings(
        &["tests/c/window_access.c", "tests/c/window_ends.c"],
        &[("MEMFERRY_BACKGROUND", "on")],
    );
}

#[test]
fn copies_reach_the_memory_of_a_gpu_or_say_that_there_is_none() {
    let ways: [(&[&str], _); 2] =
        [(&["call"], vec![]), (&["environment"], vec![("MEMFERRY_GPU", "auto")])];
    for linkage in BOTH {
        for (arguments, settings) in ways.clone() {
            // One after another: a GPU may have room for one program alone.
            let run = Run { source: "tests/c/gpu.c", linkage, arguments, settings };
            for output in run_at_once(&[run]) {
                if output.stdout.starts_with(b"skipped") {
                    skip(Requirement::Gpu, String::from_utf8_lossy(&output.stdout).trim_end());
                }
            }
        }
    }
}

#[test]
fn the_examples_say_that_all_went_well() {
    let examples =
        ["examples-c/overlap.c", "examples-c/link.c", "examples-c/window.c", "examples-c/team.c"];
    for example in examples {
        for output in run_with_both_libraries(example, &["1"]) {
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(text.trim_end().ends_with(": equal"), "{example} says: {text}");
        }
    }
}

#[test]
fn a_library_that_cannot_be_opened_says_why_in_every_call() {
    let into = TempDir::new().expect("a folder for programs");
    let malformed = into.path().join("malformed");
    std::fs::write(&malformed, "this is no profile\n").expect("a file can be written");
    let (malformed, a_folder) =
        (malformed.display().to_string(), into.path().display().to_string());
    // A setting, what it holds, and the arguments of the program.
    let cases: [(&str, &str, &[&str]); 9] = [
        ("MEMFERRY_CHANNELS", "none", &["-33", "MEMFERRY_CHANNELS=\"none\" is not valid"]),
        ("MEMFERRY_CHANNELS", "0", &["-33", "from 1 to 256"]),
        ("MEMFERRY_POLICY", "\u{1f6a2}", &["-33", "MEMFERRY_POLICY"]),
        ("MEMFERRY_PROFILE", &a_folder, &["-13", &a_folder]),
        ("MEMFERRY_PROFILE", &malformed, &["-74", &malformed]),
        ("MEMFERRY_GPU", "fast", &["-33", "off, auto or the number of a GPU"]),
        ("MEMFERRY_GPU", "4000", &["-19", "engine cuda"]),
        ("MEMFERRY_CUDA_SOLE_USER", "perhaps", &["-33", "on or off"]),
        ("MEMFERRY_CHANNELS", "256", &["-11", "no thread could be started", "64"]),
    ];
    let runs = BOTH.into_iter().flat_map(|linkage| {
        cases.iter().map(move |&(name, value, arguments)| Run {
            source: "tests/c/environment.c",
            linkage,
            arguments,
            settings: vec![(name, value)],
        })
    });
    run_at_once(&runs.collect::<Vec<_>>());
}

#[test]
fn a_program_names_an_unknown_variable_once() {
    let settings = vec![("MEMFERRY_EAGR_BYTES", "1")];
    let (source, arguments) = ("examples-c/overlap.c", &[][..]);
    let runs = BOTH.map(|linkage| Run { source, linkage, arguments, settings: settings.clone() });
    for output in run_at_once(&runs) {
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(said.matches("did you mean MEMFERRY_EAGER_BYTES?").count(), 1, "{said}");
    }
}

#[test]
fn the_header_is_good_cplusplus_where_there_is_a_compiler_for_it() {
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let mut command = Command::new(&compiler);
    command.args(["-fsyntax-only", "-std=c++11", "-Wall", "-Wextra", "-Werror", "-pedantic"]);
    command.arg("-I").arg(folder().join("include"));
    match command.arg(folder().join("tests/c/header.cpp")).output() {
        Ok(output) => expect_success("compiling tests/c/header.cpp", &output),
        Err(error) => {
            let why = format!("{compiler:?}: {error}: install g++ or clang, or set CXX");
            skip(Requirement::CPlusPlus, why);
        }
    }
}
