//! `cargo xtask test` runs the same tests as `cargo test --workspace`, several programs at a time,
//! and reports the skipped tests at the end.

use std::env;
use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::io::Errno;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

use crate::build::{TestProgram, build_tests};
use crate::print_line;
use crate::test_counts::{TestCounts, result_in};

/// The variable that names the log of skipped tests, with one line per test. `memferry-testing`
/// uses the same name.
const SKIP_LOG: &str = "MEMFERRY_SKIP_LOG";

/// Arguments of `cargo test` that select programs. With one of them the documentation examples are
/// left out.
const SELECTION_ARGUMENTS: [&str; 10] = [
    "--lib",
    "--bin",
    "--bins",
    "--test",
    "--tests",
    "--example",
    "--examples",
    "--bench",
    "--benches",
    "--all-targets",
];

/// Arguments of `cargo test` that take a value as the next word.
const VALUE_ARGUMENTS: [&str; 18] = [
    "-p",
    "--package",
    "--exclude",
    "-F",
    "--features",
    "--target",
    "--target-dir",
    "--profile",
    "-j",
    "--jobs",
    "--config",
    "--manifest-path",
    "--color",
    "--bin",
    "--test",
    "--example",
    "--bench",
    "-Z",
];

/// Arguments with which `cargo test` runs no tests, or only examples.
const NO_TEST_ARGUMENTS: [&str; 4] = ["--no-run", "--doc", "--list", "--help"];

/// The slowest programs. They start first, because otherwise one of them would run alone at the
/// end.
const SLOW_TESTS: [&str; 5] = [
    "memferry-c tests/programs.rs",
    "memferry-engine tests/conformance.rs",
    "memferry-fabric tests/mpi.rs",
    "memferry-mpi-collectives tests/mpi.rs",
    "memferry-engine tests/nic/main.rs",
];

/// The interval between polls for the exit of a program, and the interval between reports that it
/// is still running.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(20);
const HANG_REPORT_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How many test programs run at a time (two, and one more for every processor)
    #[arg(long, short)]
    jobs: Option<usize>,
    /// Arguments for `cargo test`, in place of `--workspace`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    arguments: Vec<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let began = Instant::now();
    let temporary = tempfile::NamedTempFile::new().context("a place for the skipped tests")?;
    // A user who names a log file wants to keep the list.
    let named = env::var_os(SKIP_LOG).map(PathBuf::from);
    let log = named.unwrap_or_else(|| temporary.path().to_owned());
    let (for_cargo, for_tests) = split(&args.arguments);
    if let Some(word) = stray_argument(&for_cargo) {
        bail!("tests are named behind two dashes: cargo xtask test … -- {word}");
    }
    if for_cargo.iter().chain(&for_tests).any(|argument| NO_TEST_ARGUMENTS.contains(argument)) {
        return run_cargo(&args.arguments);
    }
    let programs = build_tests(&for_cargo)?;
    let mut jobs: Vec<TestJob> = Vec::new();
    let name = |argument: &&str| argument.split('=').next().unwrap_or_default().to_owned();
    let is_choice = |argument: &&str| SELECTION_ARGUMENTS.contains(&name(argument).as_str());
    // A package without a library has no examples, and cargo would fail.
    if programs.iter().any(|program| program.source == "src/lib.rs")
        && !for_cargo.iter().any(is_choice)
    {
        jobs.push(TestJob::examples(&for_cargo, &for_tests));
    }
    jobs.extend(programs.iter().map(|program| TestJob::program(program, &for_tests)));
    jobs.sort_by_key(|job| !SLOW_TESTS.contains(&job.name.as_str()));
    // Many tests are idle most of the time.
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let most = args.jobs.unwrap_or(2 + processors).max(1);
    let shows_all = for_tests
        .iter()
        .any(|word| ["--nocapture", "--no-capture", "--show-output"].contains(word));
    let (tally, failed) = run_all(jobs, most, &log, shows_all);
    // A named log file does not exist if no test was skipped.
    print_line(&report(&fs::read_to_string(log).unwrap_or_default()));
    let seconds = began.elapsed().as_secs();
    print_line(&format!("{} tests passed, {} failed, in {seconds} s.", tally.passed, tally.failed));
    if !failed.is_empty() {
        bail!("tests failed: {}", failed.join(", "));
    }
    Ok(())
}

/// Splits the arguments at `--` into those for cargo and those for the tests.
fn split(arguments: &[String]) -> (Vec<&str>, Vec<&str>) {
    let mut arguments = arguments.iter().map(String::as_str);
    let mut for_cargo: Vec<&str> =
        arguments.by_ref().take_while(|argument| *argument != "--").collect();
    if for_cargo.is_empty() {
        for_cargo.push("--workspace");
    }
    (for_cargo, arguments.collect())
}

/// An argument for cargo that is neither an option nor the value of one. Cargo would treat it as a
/// test filter.
fn stray_argument<'a>(for_cargo: &[&'a str]) -> Option<&'a str> {
    let mut before = "";
    for &word in for_cargo {
        if !word.starts_with('-') && !VALUE_ARGUMENTS.contains(&before) {
            return Some(word);
        }
        before = word;
    }
    None
}

fn run_cargo(arguments: &[String]) -> anyhow::Result<()> {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let status = command.arg("test").args(arguments).status().context("cargo cannot be run")?;
    anyhow::ensure!(status.success(), "cargo test: {status}");
    Ok(())
}

/// A program that runs tests.
struct TestJob {
    name: String,
    command: Command,
}

impl TestJob {
    /// A test program with the working folder and the environment that cargo would use.
    fn program(program: &TestProgram, arguments: &[&str]) -> Self {
        let mut command = Command::new(&program.path);
        command
            .args(arguments)
            .current_dir(&program.folder)
            .env("CARGO_MANIFEST_DIR", &program.folder)
            .env("CARGO_PKG_NAME", &program.package)
            .env("LD_LIBRARY_PATH", libraries(&program.path));
        Self { name: format!("{} {}", program.package, program.source), command }
    }

    /// The examples in the documentation.
    fn examples(for_cargo: &[&str], for_tests: &[&str]) -> Self {
        let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.args(["test", "--quiet", "--doc"]).args(for_cargo).arg("--").args(for_tests);
        Self { name: "examples in the documentation".into(), command }
    }

    /// Runs the program to its end. Returns whether it succeeded, and its output.
    fn run(&mut self) -> anyhow::Result<(bool, String)> {
        // One file for both outputs preserves the order of the lines.
        let said = tempfile::NamedTempFile::new().context("a place for what tests say")?;
        let parent = getpid();
        let prepare = move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have exited before the signal was set.
            if getppid() == Some(parent) { Ok(()) } else { Err(Errno::SRCH.into()) }
        };
        // SAFETY: between fork and exec, the closure makes two system calls, takes no lock and
        // allocates nothing: errors are numbers. The thread that starts the program waits for its
        // end.
        unsafe { self.command.pre_exec(prepare) };
        let mut child = self
            .command
            .stdin(Stdio::null())
            .stdout(said.as_file().try_clone()?)
            .stderr(said.as_file().try_clone()?)
            .spawn()
            .with_context(|| format!("{} cannot be run", self.command.get_program().display()))?;
        let mut waited = Duration::ZERO;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            thread::sleep(EXIT_POLL_INTERVAL);
            waited += EXIT_POLL_INTERVAL;
            if waited.as_millis().is_multiple_of(HANG_REPORT_AFTER.as_millis()) {
                let text = String::from_utf8_lossy(&fs::read(said.path())?).into_owned();
                let last = text.trim_end().lines().next_back().unwrap_or("nothing said yet");
                print_line(&format!(
                    "      {:4} s  {}, still running: {last}",
                    waited.as_secs(),
                    self.name
                ));
            }
        };
        let mut text = String::from_utf8_lossy(&fs::read(said.path())?).into_owned();
        if !status.success() {
            let _ = writeln!(text, "{}: {status}", self.name);
        }
        Ok((status.success(), text))
    }
}

/// The value of `LD_LIBRARY_PATH` with the libraries that cargo has built for a program.
fn libraries(program: &Path) -> OsString {
    let mut folders: Vec<PathBuf> =
        program.ancestors().skip(1).take(2).map(Path::to_owned).collect();
    folders.extend(env::var_os("LD_LIBRARY_PATH").iter().flat_map(env::split_paths));
    env::join_paths(folders).unwrap_or_default()
}

/// Runs all jobs, at most `most` at a time. Returns the counts of their tests, and the names of the
/// failed jobs.
fn run_all(
    jobs: Vec<TestJob>,
    most: usize,
    log: &Path,
    shows_all: bool,
) -> (TestCounts, Vec<String>) {
    let all = jobs.len();
    let waiting = Mutex::new(jobs.into_iter());
    let ended = Mutex::new((0, TestCounts::default(), Vec::new()));
    thread::scope(|scope| {
        for _ in 0..most.min(all) {
            scope.spawn(|| {
                loop {
                    let job = waiting.lock().unwrap().next();
                    let Some(mut job) = job else { break };
                    job.command.env(SKIP_LOG, log);
                    let began = Instant::now();
                    let (is_good, text) =
                        job.run().unwrap_or_else(|error| (false, format!("{error:#}\n")));
                    let (tally, results) = count(&text);
                    // A program without a result line has not run its tests.
                    let is_good = is_good && results > 0 && tally.failed == 0;
                    let mut ended = ended.lock().unwrap();
                    let (count, sum, failed) = &mut *ended;
                    (*count, *sum) = (*count + 1, sum.plus(tally));
                    let (seconds, name) = (began.elapsed().as_secs_f64(), job.name);
                    let end = if is_good { "" } else { ", FAILED" };
                    print_line(&format!(
                        "{count:>3}/{all} {seconds:6.1} s  {name}: {} passed{end}",
                        tally.passed
                    ));
                    if is_good && !shows_all {
                        // Skipped tests are always shown.
                        text.lines().filter(|line| line.contains("SKIPPED ")).for_each(print_line);
                    } else {
                        print_line(&text);
                    }
                    if !is_good {
                        failed.push(name);
                    }
                }
            });
        }
    });
    let (_, tally, failed) = ended.into_inner().unwrap();
    (tally, failed)
}

/// The sum of all results in a text, and their number.
fn count(text: &str) -> (TestCounts, usize) {
    let results: Vec<TestCounts> = text.lines().filter_map(result_in).collect();
    (results.iter().copied().fold(TestCounts::default(), TestCounts::plus), results.len())
}

/// The skipped tests, grouped by the missing requirement.
fn report(log: &str) -> String {
    let mut skipped: Vec<(&str, Vec<&str>, &str)> = Vec::new();
    for line in log.lines() {
        let mut words = line.splitn(4, '\t');
        let mut word = || words.next().unwrap_or_default();
        let (requirement, _package, test, why) = (word(), word(), word(), word());
        match skipped.iter_mut().find(|(known, ..)| *known == requirement) {
            Some((_, tests, _)) => tests.push(test),
            None => skipped.push((requirement, vec![test], why)),
        }
    }
    if skipped.is_empty() {
        return "No test was skipped.".into();
    }
    skipped.sort_unstable();
    let mut text = format!("{} tests were skipped, wholly or in part:", log.lines().count());
    for (requirement, tests, why) in &skipped {
        let _ = write!(text, "\n  {requirement}: {} ({why})", tests.len());
    }
    let names: Vec<_> = skipped.iter().map(|(requirement, ..)| *requirement).collect();
    let _ = write!(text, "\nMEMFERRY_REQUIRE={} makes each of them a failure.", names.join(","));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_behind_two_dashes_is_for_the_tests() {
        let words = |text: &str| -> Vec<String> { text.split(' ').map(str::to_owned).collect() };
        assert_eq!(split(&[]), (vec!["--workspace"], vec![]));
        assert_eq!(split(&words("-p xtask -- -q name")), (vec!["-p", "xtask"], vec!["-q", "name"]));
        assert_eq!(split(&words("-- name")), (vec!["--workspace"], vec!["name"]));
    }

    #[test]
    fn a_word_that_belongs_to_no_argument_is_told() {
        assert_eq!(
            stray_argument(&["-p", "xtask", "--features", "a b", "--locked", "--test=x"]),
            None
        );
        assert_eq!(stray_argument(&["-p", "xtask", "name"]), Some("name"));
    }

    #[test]
    fn a_program_that_fails_or_runs_no_test_is_told_by_name() {
        let job = |name: &str, script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            TestJob { name: name.into(), command }
        };
        let result = "echo 'test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured'";
        let jobs = vec![
            job("good", result),
            job("dies", &format!("{result}; kill -9 $$")),
            job("silent", "true"),
            TestJob { name: "absent".into(), command: Command::new("/nowhere/program") },
        ];
        let (tally, mut failed) = run_all(jobs, 2, Path::new("unused"), false);
        failed.sort_unstable();
        assert_eq!(tally, TestCounts { passed: 6, failed: 0, ignored: 2 });
        assert_eq!(failed, ["absent", "dies", "silent"]);
    }

    #[test]
    fn skipped_tests_are_counted_by_what_is_missing() {
        let log = "mpich\tmemferry-fabric\tone\tpip install mpich\n\
                   gpu\tmemferry-engine\ttwo\tno driver\n\
                   mpich\tmemferry-fabric\tthree\tpip install mpich\n";
        assert_eq!(
            report(log),
            "3 tests were skipped, wholly or in part:\n  gpu: 1 (no driver)\n  \
             mpich: 2 (pip install mpich)\nMEMFERRY_REQUIRE=gpu,mpich makes each of them a failure."
        );
    }

    #[test]
    fn that_nothing_was_skipped_is_said_too() {
        assert_eq!(report(""), "No test was skipped.");
    }
}
