//! `cargo xtask test`: runs `cargo test --workspace`, and tells at the end what was skipped.

use std::env;
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, bail};

use crate::say;

/// Where tests write down that they were skipped, a line each. `memferry-testing` reads the same name.
const LOG: &str = "MEMFERRY_SKIP_LOG";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Arguments for `cargo test`, in place of `--workspace`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    arguments: Vec<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let temporary = tempfile::NamedTempFile::new().context("a place for the skipped tests")?;
    // Whoever names a file wants to have the list.
    let named = env::var_os(LOG).map(PathBuf::from);
    let log = named.unwrap_or_else(|| temporary.path().to_owned());
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.arg("test").env(LOG, &log);
    match args.arguments.as_slice() {
        [] => command.arg("--workspace"),
        arguments => command.args(arguments),
    };
    let status = command.status().context("cargo cannot be run")?;
    // A named file is not there if nothing was skipped.
    say(&report(&fs::read_to_string(log).unwrap_or_default()));
    if !status.success() {
        bail!("tests failed: {status}");
    }
    Ok(())
}

/// What was skipped, by what was missing.
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
