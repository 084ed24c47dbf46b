//! `cargo xtask faults`: the checks that look for the next fault before a user finds it, and one table of what
//! they did. Most checks are tests that print rows for it: see [`ROW`].

mod fuzz;
mod models;
mod mpi;
mod sanitize;

use std::env;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::json;

use crate::say;
use sanitize::SANITIZERS;

/// A check that is no plain test: what it is called, whether only those get it who ask for it or for a long run,
/// and what it does.
struct Special {
    name: &'static str,
    is_long: bool,
    run: fn(is_long: bool, rows: &mut Vec<Row>) -> anyhow::Result<()>,
}

const SPECIALS: [Special; 5] = [
    Special { name: "fuzzing", is_long: false, run: fuzz::run },
    Special { name: "models", is_long: false, run: models::run },
    // They build everything anew.
    Special {
        name: SANITIZERS[0].name,
        is_long: true,
        run: |is_long, rows| SANITIZERS[0].run(is_long, rows),
    },
    Special {
        name: SANITIZERS[1].name,
        is_long: true,
        run: |is_long, rows| SANITIZERS[1].run(is_long, rows),
    },
    // It fetches sources, and takes a quarter of an hour.
    Special { name: "tests of MPICH", is_long: true, run: mpi::run },
];

/// How a line of a test begins that is a row of the table. What was counted, how often, and anything worth
/// knowing follow, with tabs between them.
const ROW: &str = "row\t";

/// Tests that let something go wrong.
struct Check {
    name: &'static str,
    package: &'static str,
    test: &'static str,
    features: &'static [&'static str],
    filter: &'static str,
    /// A variable by which the tests know how much to do: in a short run, and in a long one.
    amount: Option<(&'static str, &'static str, &'static str)>,
}

const PLAIN: Check = Check {
    name: "calls of messages",
    package: "memferry-message",
    test: "faults",
    features: &["faults"],
    filter: "failures",
    amount: Some(("MEMFERRY_FAULTS", "some", "all")),
};

const CHECKS: [Check; 6] = [
    PLAIN,
    Check { name: "calls of copies", package: "memferry-copy", filter: "", ..PLAIN },
    Check { name: "deaths", filter: "deaths", ..PLAIN },
    Check { name: "deaths in a crowd", filter: "crowd", ..PLAIN },
    Check {
        name: "kills in traffic",
        package: "memferry-c",
        test: "programs",
        features: &[],
        filter: "traffic",
        amount: Some(("MEMFERRY_TRAFFIC_KILLS", "100", "3334")),
    },
    Check {
        name: "hostile peers",
        test: "hostile",
        features: &[],
        filter: "random",
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
    /// target of the fuzzer, all tests under both sanitizers, the tests of MPICH
    #[arg(long)]
    long: bool,
    /// End with one JSON object with the rows
    #[arg(long)]
    json: bool,
}

/// A line of the table.
struct Row {
    what: String,
    count: u64,
    detail: String,
}

impl Row {
    fn parse(line: &str) -> Option<Self> {
        // The test harness writes the names of tests in front of what they print.
        let row = &line[line.find(ROW)? + ROW.len()..];
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

/// How many tests passed, by what the harness writes.
fn passed(text: &str) -> u64 {
    let in_line =
        |line: &str| line.strip_prefix("test result: ok. ")?.split(' ').next()?.parse::<u64>().ok();
    text.lines().filter_map(in_line).sum()
}

/// The folder of the workspace.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("this crate lies in crates/")
}

/// Runs a command; its output passes through, but for the rows.
fn run_for_rows(mut command: Command, rows: &mut Vec<Row>) -> anyhow::Result<bool> {
    let mut child = command.stdout(Stdio::piped()).spawn().context("cargo cannot be run")?;
    let output = child.stdout.take().context("the output of cargo")?;
    for line in BufReader::new(output).lines() {
        let line = line.context("the output of the tests")?;
        match Row::parse(&line) {
            Some(row) => rows.push(row),
            None => say(&line),
        }
    }
    Ok(child.wait()?.success())
}

impl Check {
    /// Runs its tests.
    fn run(&self, is_long: bool, rows: &mut Vec<Row>) -> anyhow::Result<()> {
        let (mut command, before) = (cargo_test(), rows.len());
        command.args(["--package", self.package, "--test", self.test]);
        command.args(["--features", &self.features.join(",")]);
        command.args(["--", "--nocapture", "--test-threads=1"]);
        command.args(Some(self.filter).filter(|filter| !filter.is_empty()));
        let amount =
            self.amount.map(|(name, short, long)| (name, if is_long { long } else { short }));
        command.envs(amount).env_remove("MEMFERRY_FLOW");
        if !run_for_rows(command, rows)? {
            bail!("{}: something is wrong", self.name);
        }
        if rows[before..].iter().all(|row| row.count == 0) {
            bail!("{}: nothing was checked", self.name);
        }
        Ok(())
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let is_wanted = |name: &str| args.only.as_ref().is_none_or(|only| name.contains(only.as_str()));
    let (mut rows, began) = (Vec::new(), Instant::now());
    for check in CHECKS.iter().filter(|check| is_wanted(check.name)) {
        say(&format!("== {}", check.name));
        check.run(args.long, &mut rows)?;
    }
    let is_asked = args.long || args.only.is_some();
    let is_due = |special: &&Special| is_wanted(special.name) && (is_asked || !special.is_long);
    for special in SPECIALS.iter().filter(is_due) {
        say(&format!("== {}", special.name));
        (special.run)(args.long, &mut rows)?;
    }
    if rows.is_empty() {
        let names = CHECKS.iter().map(|check| check.name);
        let names: Vec<_> = names.chain(SPECIALS.iter().map(|special| special.name)).collect();
        bail!("no check is called so: there are {}", names.join(", "));
    }
    report(&rows, began.elapsed(), args.json);
    Ok(())
}

fn report(rows: &[Row], took: Duration, is_json: bool) {
    if is_json {
        let row = |row: &Row| json!({"what": row.what, "count": row.count, "detail": row.detail});
        let rows: Vec<_> = rows.iter().map(row).collect();
        return say(&json!({"success": true, "seconds": took.as_secs(), "rows": rows}).to_string());
    }
    say("");
    for Row { what, count, detail } in rows {
        say(&format!("{count:>9}  {what:<40}  {detail}"));
    }
    say(&format!("nothing wrong, nothing lost, nothing left, in {} s", took.as_secs()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_found_behind_the_name_of_a_test() {
        let row = Row::parse("test failures::all ... row\tcalls failed\t17\tof 3 kinds").unwrap();
        assert_eq!(
            (row.what.as_str(), row.count, row.detail.as_str()),
            ("calls failed", 17, "of 3 kinds")
        );
        assert!(Row::parse("test result: ok. 3 passed").is_none());
        assert!(Row::parse("row\tcalls failed\tmany").is_none());
    }
}
