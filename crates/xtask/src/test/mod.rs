//! `cargo xtask test` runs the same tests as `cargo test --workspace`, several programs at a time,
//! each test with a time limit, and reports the skipped tests at the end. With `--stress` it searches
//! for tests that fail now and then.

mod backtraces;
mod conditions;
mod job;
mod stress;
mod watch;

use std::env;
use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::iter;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};

use crate::build::{TestProgram, build_tests, programs_in};
use crate::print_line;
use crate::test_counts::TestCounts;
use conditions::Condition;
pub(crate) use conditions::occupy_memory;
use job::{JobOutcome, TestJob};
use stress::Stress;

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
    "memferry-c tests/it/main.rs",
    "memferry-message tests/it/main.rs",
    "memferry-fabric tests/it/main.rs",
    "memferry-mpi-collectives tests/mpi.rs",
    "memferry-engine tests/it/main.rs",
];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How many test programs run at a time (two, and one more for every processor)
    #[arg(long, short)]
    jobs: Option<usize>,
    /// How long one test may take, in seconds; then the backtraces of all threads are printed
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    limit: u64,
    /// Run every test program this many times, in random order, 1 to 8 at a time, under changing load
    #[arg(long, value_name = "ROUNDS")]
    stress: Option<u32>,
    /// The conditions of the rounds of `--stress`, in place of all
    #[arg(long, value_name = "CONDITIONS", value_delimiter = ',', requires = "stress")]
    under: Vec<Condition>,
    /// The seed of `--stress`: it repeats the order, the numbers of programs and the conditions
    #[arg(long, requires = "stress")]
    seed: Option<u64>,
    /// Run the programs that cargo's messages in this file name (`cargo test --no-run
    /// --message-format=json`), and build nothing
    #[arg(long, value_name = "FILE")]
    programs: Option<PathBuf>,
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
    let programs = match &args.programs {
        Some(file) => programs_in(&fs::read_to_string(file).context("the messages of cargo")?),
        None => build_tests(&for_cargo)?,
    };
    let limit = Duration::from_secs(args.limit);
    let job = |program: &TestProgram| program_job(program, &for_tests, &log, limit);
    let mut jobs: Vec<TestJob> = programs.iter().map(job).collect();
    if let Some(rounds) = args.stress {
        let conditions =
            if args.under.is_empty() { Condition::ALL.to_vec() } else { args.under.clone() };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let seed = args.seed.unwrap_or_else(|| now.map_or(1, |now| now.as_secs()));
        return Stress { rounds, seed, conditions, jobs: args.jobs }.run(&jobs);
    }
    let name = |argument: &&str| argument.split('=').next().unwrap_or_default().to_owned();
    let is_choice = |argument: &&str| SELECTION_ARGUMENTS.contains(&name(argument).as_str());
    // A package without a library has no examples, and cargo would fail.
    if args.programs.is_none()
        && programs.iter().any(|program| program.source == "src/lib.rs")
        && !for_cargo.iter().any(is_choice)
    {
        jobs.push(examples_job(&for_cargo, &for_tests, &log, limit));
    }
    jobs.sort_by_key(|job| !SLOW_TESTS.contains(&job.name.as_str()));
    // Many tests are idle most of the time.
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let most = args.jobs.unwrap_or(2 + processors).max(1);
    let shows_all = for_tests
        .iter()
        .any(|word| ["--nocapture", "--no-capture", "--show-output"].contains(word));
    let (mut counts, mut failed) = (TestCounts::default(), Vec::new());
    run_all(&jobs, most, |job, outcome, line| {
        counts.add(outcome.counts);
        print_line(line);
        if outcome.is_good && !shows_all {
            // Skipped tests are always shown.
            outcome.text.lines().filter(|line| line.contains("SKIPPED ")).for_each(print_line);
        } else {
            print_line(&outcome.text);
        }
        if !outcome.is_good {
            failed.push(job.name.clone());
        }
    });
    // A named log file does not exist if no test was skipped.
    print_line(&report(&fs::read_to_string(&log).unwrap_or_default()));
    let seconds = began.elapsed().as_secs();
    print_line(&format!(
        "{} tests passed, {} failed, in {seconds} s.",
        counts.passed, counts.failed
    ));
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

/// A test program with the working folder and the environment that cargo would use.
fn program_job(program: &TestProgram, arguments: &[&str], log: &Path, limit: Duration) -> TestJob {
    let words = iter::once(program.path.clone().into());
    TestJob {
        name: format!("{} {}", program.package, program.source),
        words: words.chain(arguments.iter().map(OsString::from)).collect(),
        folder: Some(program.folder.clone()),
        environment: [(SKIP_LOG, log.into())].into_iter().chain(program.environment()).collect(),
        test_limit: limit,
    }
}

/// The examples in the documentation.
fn examples_job(for_cargo: &[&str], for_tests: &[&str], log: &Path, limit: Duration) -> TestJob {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["test", "--quiet", "--doc"].iter().chain(for_cargo).chain(&["--"]);
    TestJob {
        name: "examples in the documentation".into(),
        words: iter::once(cargo).chain(arguments.chain(for_tests).map(OsString::from)).collect(),
        folder: None,
        environment: vec![(SKIP_LOG, log.into())],
        test_limit: limit,
    }
}

/// Runs all jobs, at most `most` at a time. Calls `ended` with each outcome, and a line about it.
fn run_all(jobs: &[TestJob], most: usize, ended: impl FnMut(&TestJob, &JobOutcome, &str) + Send) {
    let all = jobs.len();
    let waiting = Mutex::new(jobs.iter());
    let ended = Mutex::new((0, ended));
    thread::scope(|scope| {
        for _ in 0..most.min(all) {
            scope.spawn(|| {
                loop {
                    let job = waiting.lock().unwrap().next();
                    let Some(job) = job else { break };
                    let outcome = job.run();
                    let mut ended = ended.lock().unwrap();
                    let (count, ended) = &mut *ended;
                    *count += 1;
                    let (seconds, name) = (outcome.seconds, &job.name);
                    let end = if outcome.is_good { "" } else { ", FAILED" };
                    let passed = outcome.counts.passed;
                    let line =
                        format!("{count:>3}/{all} {seconds:6.1} s  {name}: {passed} passed{end}");
                    ended(job, &outcome, &line);
                }
            });
        }
    });
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
        let job = |name: &str, words: &[&str]| TestJob {
            name: name.into(),
            words: words.iter().map(OsString::from).collect(),
            folder: None,
            environment: Vec::new(),
            test_limit: Duration::from_secs(300),
        };
        let result = "echo 'test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured'";
        let jobs = [
            job("good", &["sh", "-c", result]),
            job("dies", &["sh", "-c", &format!("{result}; kill -9 $$")]),
            job("silent", &["true"]),
            job("absent", &["/nowhere/program"]),
        ];
        let (mut counts, mut failed) = (TestCounts::default(), Vec::new());
        run_all(&jobs, 2, |job, outcome, _| {
            counts.add(outcome.counts);
            if !outcome.is_good {
                failed.push(job.name.clone());
            }
        });
        failed.sort_unstable();
        assert_eq!(counts, TestCounts { passed: 6, failed: 0, ignored: 2 });
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
