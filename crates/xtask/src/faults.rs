//! `cargo xtask faults` runs the checks that search for faults, and prints one table of their
//! results. Most checks are tests that print rows of the table: see [`ROW_PREFIX`].

mod fuzz;
mod models;
mod mpi;
mod sanitize;
mod scripts;

use std::env;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::json;

use crate::build::build_tests;
use crate::print_line;
use sanitize::SANITIZERS;

/// A check that is not a plain test. With `is_long` it runs only by name or in a long run.
struct SpecialCheck {
    name: &'static str,
    is_long: bool,
    /// Fails, with the fix, if something that the check needs is missing. It runs before all
    /// checks, so that a long run does not fail after hours.
    needs: fn() -> anyhow::Result<()>,
    run: fn(is_long: bool, rows: &mut Vec<FaultRow>) -> anyhow::Result<()>,
}

const SPECIAL_CHECKS: [SpecialCheck; 8] = [
    SpecialCheck { name: "fuzzing", is_long: false, needs: fuzz::needs, run: fuzz::run },
    SpecialCheck { name: "models", is_long: false, needs: || Ok(()), run: models::run },
    // The sanitizers rebuild everything.
    SpecialCheck {
        name: SANITIZERS[0].name,
        is_long: true,
        needs: sanitize::needs,
        run: |is_long, rows| SANITIZERS[0].run(is_long, rows),
    },
    SpecialCheck {
        name: SANITIZERS[1].name,
        is_long: true,
        needs: sanitize::needs,
        run: |is_long, rows| SANITIZERS[1].run(is_long, rows),
    },
    SpecialCheck { name: "MPI programs", is_long: true, needs: || Ok(()), run: scripts::mpi },
    SpecialCheck { name: "packages", is_long: true, needs: || Ok(()), run: scripts::packages },
    SpecialCheck { name: "benches", is_long: true, needs: || Ok(()), run: scripts::benches },
    // The tests of MPICH download sources and take a quarter of an hour.
    SpecialCheck { name: "tests of MPICH", is_long: true, needs: mpi::needs, run: mpi::run },
];

/// The prefix of a test's output line that is a row of the table. A label, a count and a remark
/// follow, separated by tabs.
const ROW_PREFIX: &str = "row\t";

/// Tests that inject faults.
struct FaultCheck {
    name: &'static str,
    package: &'static str,
    /// The program: `faults`, with the features that inject faults, or `it`.
    test: &'static str,
    filter: &'static str,
    /// The expected number of tests, so that a renamed test is not lost unnoticed.
    tests: u64,
    /// A variable that sets the amount of work for the tests, with its values for a short and for a
    /// long run.
    amount: Option<(&'static str, &'static str, &'static str)>,
}

const PLAIN: FaultCheck = FaultCheck {
    name: "calls of messages",
    package: "memferry-message",
    test: "faults",
    filter: "failures",
    tests: 2,
    amount: Some(("MEMFERRY_FAULTS", "some", "all")),
};

const CHECKS: [FaultCheck; 7] = [
    PLAIN,
    FaultCheck { name: "calls of copies", package: "memferry-copy", filter: "", tests: 2, ..PLAIN },
    FaultCheck { name: "deaths", filter: "deaths", tests: 1, ..PLAIN },
    FaultCheck { name: "deaths in a crowd", filter: "crowd", tests: 1, ..PLAIN },
    FaultCheck { name: "forks", filter: "forks", tests: 1, ..PLAIN },
    FaultCheck {
        name: "kills in traffic",
        package: "memferry-c",
        test: "it",
        filter: "traffic",
        tests: 2,
        amount: Some(("MEMFERRY_TRAFFIC_KILLS", "100", "3334")),
    },
    FaultCheck {
        name: "hostile peers",
        test: "it",
        filter: "hostile::random",
        tests: 3,
        amount: Some(("MEMFERRY_HOSTILE_SECONDS", "10", "1200")),
        ..PLAIN
    },
];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run only checks whose name contains this
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Do more, for some hours: every error of every call, 10,000 kills, an hour of hostile peers and of each
    /// target of the fuzzer, all tests under both sanitizers, every MPI, packages, all benches, the tests of MPICH
    #[arg(long)]
    long: bool,
    /// End with one JSON object with the rows
    #[arg(long)]
    json: bool,
}

/// A row of the table.
struct FaultRow {
    what: String,
    count: u64,
    detail: String,
}

impl FaultRow {
    fn parse(line: &str) -> Option<Self> {
        // The test harness writes the names of tests in front of their output.
        let row = &line[line.find(ROW_PREFIX)? + ROW_PREFIX.len()..];
        let mut words = row.split('\t');
        let (what, count) = (words.next()?.to_owned(), words.next()?.parse().ok()?);
        Some(Self { what, count, detail: words.next().unwrap_or_default().to_owned() })
    }
}

fn cargo_test() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["test", "--locked"]);
    command
}

/// The number of passed tests, from the output of the test harness.
fn passed(text: &str) -> u64 {
    let in_line =
        |line: &str| line.strip_prefix("test result: ok. ")?.split(' ').next()?.parse::<u64>().ok();
    text.lines().filter_map(in_line).sum()
}

/// Fails if a program is not installed, and names its package.
fn require_program(program: &str, package: &str, what_for: &str) -> anyhow::Result<()> {
    let folders = env::var_os("PATH").unwrap_or_default();
    if env::split_paths(&folders).any(|folder| folder.join(program).is_file()) {
        return Ok(());
    }
    bail!("{what_for} needs {program}: apt install {package}");
}

/// The root folder of the workspace.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("this crate lies in crates/")
}

/// Runs a command, and prints its output without the rows. Returns the number of passed tests;
/// `None` if a test failed.
fn run_for_rows(mut command: Command, rows: &mut Vec<FaultRow>) -> anyhow::Result<Option<u64>> {
    let mut child = command.stdout(Stdio::piped()).spawn().context("cargo cannot be run")?;
    let output = child.stdout.take().context("the output of cargo")?;
    let mut count = 0;
    for line in BufReader::new(output).lines() {
        let line = line.context("the output of the tests")?;
        count += passed(&line);
        match FaultRow::parse(&line) {
            Some(row) => rows.push(row),
            None => print_line(&line),
        }
    }
    Ok(child.wait()?.success().then_some(count))
}

impl FaultCheck {
    /// Runs the tests of this check.
    fn run(&self, is_long: bool, rows: &mut Vec<FaultRow>) -> anyhow::Result<()> {
        // All packages at once, as other checks and `cargo xtask test` build them: nothing is built twice.
        let selection: &[&str] = match self.test {
            "faults" => &[
                "-pmemferry-message",
                "-pmemferry-copy",
                "--features=memferry-message/faults,memferry-copy/faults",
            ],
            _ => &["--workspace"],
        };
        let programs = build_tests(&[selection, &["--locked", "--test", self.test]].concat())?;
        let mut programs = programs.into_iter();
        let program = programs.find(|program| program.is(self.package, self.test));
        let program = program.with_context(|| format!("{}: cargo built no program", self.name))?;
        let (mut command, before) = (Command::new(&program.path), rows.len());
        command.current_dir(&program.folder).envs(program.environment());
        command.args(["--nocapture", "--test-threads=1"]);
        command.args(Some(self.filter).filter(|filter| !filter.is_empty()));
        let amount =
            self.amount.map(|(name, short, long)| (name, if is_long { long } else { short }));
        command.envs(amount).env_remove("MEMFERRY_FLOW");
        match run_for_rows(command, rows)? {
            None => bail!("{}: something is wrong", self.name),
            Some(count) if count != self.tests => {
                bail!("{}: {count} tests were run, and not {}", self.name, self.tests);
            }
            Some(_) if rows.len() == before || rows[before..].iter().any(|row| row.count == 0) => {
                bail!("{}: nothing was checked", self.name);
            }
            Some(_) => Ok(()),
        }
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let is_wanted = |name: &str| args.only.as_ref().is_none_or(|only| name.contains(only.as_str()));
    let is_asked = args.long || args.only.is_some();
    let is_due =
        |special: &&SpecialCheck| is_wanted(special.name) && (is_asked || !special.is_long);
    let checks: Vec<_> = CHECKS.iter().filter(|check| is_wanted(check.name)).collect();
    let specials: Vec<_> = SPECIAL_CHECKS.iter().filter(is_due).collect();
    if checks.is_empty() && specials.is_empty() {
        let names = CHECKS.iter().map(|check| check.name);
        let names: Vec<_> =
            names.chain(SPECIAL_CHECKS.iter().map(|special| special.name)).collect();
        bail!("no check is called so: there are {}", names.join(", "));
    }
    specials.iter().try_for_each(|special| (special.needs)())?;
    let (mut rows, mut failures, began) = (Vec::new(), Vec::new(), Instant::now());
    let mut note = |outcome: anyhow::Result<()>| {
        // The remaining checks run in any case.
        if let Err(error) = outcome {
            print_line(&format!("{error:#}"));
            failures.push(format!("{error:#}"));
        }
    };
    for check in checks {
        print_line(&format!("== {}", check.name));
        note(check.run(args.long, &mut rows));
    }
    for special in specials {
        print_line(&format!("== {}", special.name));
        note((special.run)(args.long, &mut rows));
    }
    report(&rows, &failures, began.elapsed(), args.json);
    match failures.len() {
        0 => Ok(()),
        count => bail!("{count} checks failed, see above"),
    }
}

fn report(rows: &[FaultRow], failures: &[String], took: Duration, is_json: bool) {
    let seconds = took.as_secs();
    if is_json {
        let row =
            |row: &FaultRow| json!({"what": row.what, "count": row.count, "detail": row.detail});
        let rows: Vec<_> = rows.iter().map(row).collect();
        let success = failures.is_empty();
        let (date, commit) =
            (said_by("date", &["-u", "+%F"]), said_by("git", &["rev-parse", "HEAD"]));
        let all = json!({
            "date": date, "commit": commit, "success": success, "failures": failures,
            "seconds": seconds, "rows": rows,
        });
        return print_line(&all.to_string());
    }
    print_line("");
    for FaultRow { what, count, detail } in rows {
        print_line(&format!("{count:>9}  {what:<40}  {detail}"));
    }
    match failures {
        [] => print_line(&format!("nothing wrong, nothing lost, nothing left, in {seconds} s")),
        failures => failures.iter().for_each(|failure| print_line(&format!("FAILED: {failure}"))),
    }
}

/// The output of a command, or nothing.
fn said_by(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).current_dir(root()).output();
    output.map_or(String::new(), |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_found_behind_the_name_of_a_test() {
        let row =
            FaultRow::parse("test failures::all ... row\tcalls failed\t17\tof 3 kinds").unwrap();
        assert_eq!(
            (row.what.as_str(), row.count, row.detail.as_str()),
            ("calls failed", 17, "of 3 kinds")
        );
        assert!(FaultRow::parse("test result: ok. 3 passed").is_none());
        assert!(FaultRow::parse("row\tcalls failed\tmany").is_none());
    }
}
