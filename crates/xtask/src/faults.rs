//! `cargo xtask faults`: the checks that look for the next fault before a user finds it, and one table of what
//! they did. Each check is tests that print rows for it: see [`ROW`].

mod sanitize;

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::json;

use crate::say;
use sanitize::SANITIZERS;

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

const CHECKS: [Check; 5] = [
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
];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run only checks whose name contains this
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Do more: every error of every call, 10,000 kills instead of 300, all tests under both sanitizers
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
    // They build everything anew: only for those who ask.
    let is_asked = args.long || args.only.is_some();
    for sanitizer in SANITIZERS.iter().filter(|sanitizer| is_asked && is_wanted(sanitizer.name)) {
        say(&format!("== {}", sanitizer.name));
        sanitizer.run(args.long, &mut rows)?;
    }
    if rows.is_empty() {
        let names = CHECKS.map(|check| check.name).join(", ");
        let sanitizers = SANITIZERS.map(|sanitizer| sanitizer.name).join(", ");
        bail!("no check is called so: there are {names}, {sanitizers}");
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
