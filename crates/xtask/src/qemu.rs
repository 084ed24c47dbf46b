//! `cargo xtask qemu` builds the tests that need a network card and runs them in a virtual machine.
//! It fails unless at least one test ran, all tests passed, and the kernel reported no error.

use std::time::Duration;

use anyhow::bail;
use memferry_vm::{Machine, Outcome};
use serde_json::json;

use crate::build::TestTarget;
use crate::print_line;
use crate::test_counts::{self, TestCounts};

/// The packages and their tests that need a card.
const TESTS: [(&str, &str); 1] = [("memferry-engine", "nic")];

/// Arguments of test programs that change or remove the lines of single tests.
const OTHER_LINES: [&str; 5] = ["--nocapture", "--no-capture", "--quiet", "-q", "--format"];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run only tests whose name contains this
    #[arg(long, value_name = "NAME")]
    filter: Option<String>,
    /// Run these tests instead, with `lib` for those inside a library
    #[arg(long = "test", value_name = "PACKAGE/TARGET")]
    tests: Vec<TestTarget>,
    /// How long the machine may run, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 1200)]
    limit: u64,
    /// How many processors the machine has
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    cpus: u32,
    /// How much memory the machine has, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    memory: u32,
    /// End with one JSON object with the counts
    #[arg(long)]
    json: bool,
    /// More arguments for the test programs
    #[arg(last = true, value_name = "ARGUMENT")]
    arguments: Vec<String>,
}

impl Args {
    fn targets(&self) -> Vec<TestTarget> {
        if !self.tests.is_empty() {
            return self.tests.clone();
        }
        let own = |(package, target): (&str, &str)| TestTarget {
            package: package.into(),
            target: target.into(),
        };
        TESTS.map(own).to_vec()
    }

    fn has_plain_lines(&self) -> bool {
        let is_other = |argument: &String| {
            let name = argument.split('=').next().unwrap_or_default();
            OTHER_LINES.contains(&name)
        };
        !self.arguments.iter().any(is_other)
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    // The check comes before the build, which would be useless without a machine.
    memferry_vm::availability()?;
    let targets = args.targets();
    let mut machine = Machine::new()
        .timeout(Duration::from_secs(args.limit))
        .cpus(args.cpus)
        .memory_mib(args.memory)
        .env("MEMFERRY_NIC", "auto")
        .env("MEMFERRY_REQUIRE", "nic");
    for target in &targets {
        let arguments = args.filter.iter().chain(&args.arguments).cloned();
        let arguments = ["--test-threads=1".to_owned()].into_iter().chain(arguments);
        machine = machine.program(target.build()?, arguments);
    }
    let outcome = machine.run(print_line)?;
    report(args, &targets, &outcome)
}

fn report(args: &Args, targets: &[TestTarget], outcome: &Outcome) -> anyhow::Result<()> {
    let mut tally = TestCounts::default();
    let mut wrongs = Vec::new();
    for (target, program) in targets.iter().zip(&outcome.programs) {
        let (counted, wrong) = test_counts::judge(program, args.has_plain_lines());
        tally.add(counted);
        let told = |wrong| format!("{}/{}: {wrong}", target.package, target.target);
        wrongs.extend(wrong.map(told));
    }
    if wrongs.is_empty() && tally.passed == 0 {
        wrongs.push("no test ran".into());
    }
    // The tests may have passed in spite of a kernel error.
    wrongs.extend(outcome.kernel_error().map(|line| format!("the kernel said: {line}")));
    let TestCounts { passed, failed, ignored } = tally;
    let seconds = |time: Duration| (time.as_secs_f64() * 10.0).round() / 10.0;
    let (boot, total) = (seconds(outcome.boot), seconds(outcome.total));
    let is_good = wrongs.is_empty();
    if is_good {
        print_line(&format!(
            "qemu: {passed} tests passed in the virtual machine ({boot} s to start, {total} s in all)"
        ));
    }
    if args.json {
        let counts = json!({
            "success": is_good,
            "passed": passed,
            "failed": failed,
            "ignored": ignored,
            "programs": outcome.programs.len(),
            "trouble": wrongs,
            "boot_s": boot,
            "total_s": total,
        });
        print_line(&counts.to_string());
    }
    if !is_good {
        bail!("qemu: {passed} tests passed, {failed} failed: {}", wrongs.join("; "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use memferry_vm::{ProgramExit, ProgramOutcome};

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn args(line: &[&str]) -> Args {
        Line::parse_from([["qemu"].as_slice(), line].concat()).args
    }

    fn outcome(lines: &[&str]) -> Outcome {
        let lines = lines.iter().map(|&line| line.into()).collect();
        Outcome {
            programs: vec![ProgramOutcome { exit: ProgramExit::Exited(0), lines }],
            console: Vec::new(),
            boot: Duration::from_secs(3),
            total: Duration::from_secs(4),
        }
    }

    #[test]
    fn the_tests_of_the_card_are_run_unless_others_are_named() {
        assert_eq!(args(&[]).targets()[0], "memferry-engine/nic".parse().unwrap());
        let named = args(&["--test", "a/b", "--test", "c/lib"]).targets();
        assert_eq!(named, ["a/b".parse().unwrap(), "c/lib".parse().unwrap()]);
    }

    #[test]
    fn arguments_that_change_the_lines_are_known() {
        assert!(args(&["--", "--ignored"]).has_plain_lines());
        assert!(!args(&["--", "--format=json"]).has_plain_lines());
        assert!(!args(&["--", "--nocapture"]).has_plain_lines());
    }

    #[test]
    fn trouble_of_the_kernel_is_a_failure_though_all_tests_passed() {
        let result = "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out";
        let mut outcome = outcome(&["test one ... ok", result]);
        let fault = "DMAR: [DMA Write] Request device [00:03.0] fault addr 0x1000";
        outcome.console.push(fault.into());
        let args = args(&[]);
        let error = report(&args, &args.targets(), &outcome).unwrap_err().to_string();
        assert!(error.contains(fault), "{error}");
    }

    #[test]
    fn that_no_test_ran_is_a_failure() {
        let result = "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out";
        let args = args(&["--filter", "nothing"]);
        assert!(report(&args, &args.targets(), &outcome(&[result])).is_err());
        let result = "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out";
        let lines = ["test one ... ok", result];
        assert!(report(&args, &args.targets(), &outcome(&lines)).is_ok());
    }
}
