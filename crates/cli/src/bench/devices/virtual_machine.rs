//! The virtual machine with the card, from outside: whether there can be one, and what came of it.

use std::env;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, anyhow};
use memferry_vm::{Availability, End, Machine, VmError};

use super::super::Effort;
use super::report::{self, Report};
use crate::show::Progress;

/// What became of the attempt to try the card.
#[derive(Debug)]
pub(super) enum Tried {
    /// The program in the machine has told everything.
    Told(Box<Told>),
    /// There can be no machine here, for this reason, which says the cure.
    Missing(String),
    /// It went wrong.
    Failed(String),
}

/// What the program in the machine told, and how long the machine took.
#[derive(Debug)]
pub(super) struct Told {
    pub(super) report: Report,
    /// The first line in which the kernel complained.
    pub(super) complaint: Option<String>,
    pub(super) boot: Duration,
    pub(super) total: Duration,
}

/// Starts a machine in which this very program drives the card.
pub(super) fn run(effort: Effort, progress: &Progress) -> Tried {
    match memferry_vm::availability() {
        Ok(Availability::Ready) => progress.step("starting the virtual machine"),
        Ok(_) => progress.step("fetching a kernel for the virtual machine (27 MB, only once)"),
        Err(error) => return outcome_of(&error),
    }
    let machine = match machine(effort) {
        Ok(machine) => machine,
        Err(error) => return Tried::Failed(format!("{error:#}")),
    };
    let told = machine.run(|line| {
        if report::is_step(line) {
            progress.step(line);
        }
    });
    match told {
        Err(error) => outcome_of(&error),
        Ok(outcome) => match judge(&outcome) {
            Err(error) => Tried::Failed(format!("{error:#}")),
            Ok(report) => {
                let complaint = outcome.kernel_trouble().map(str::to_owned);
                let (boot, total) = (outcome.boot, outcome.total);
                Tried::Told(Box::new(Told { report, complaint, boot, total }))
            }
        },
    }
}

fn machine(effort: Effort) -> anyhow::Result<Machine> {
    let myself = env::current_exe().context("this program does not know where it is")?;
    let quick = (effort != Effort::Full).then_some("--quick");
    let arguments = ["device-guest"].into_iter().chain(quick);
    let seconds = if effort == Effort::Full { 600 } else { 110 };
    Ok(Machine::new().program(myself, arguments).limit(Duration::from_secs(seconds)))
}

/// The report of a program that ended well.
fn judge(outcome: &memferry_vm::Outcome) -> anyhow::Result<Report> {
    let program = outcome.programs.first().context("the machine ran no program")?;
    match &program.end {
        End::Exited(0) => Report::find(&program.lines).context("the program in the machine"),
        end => {
            let last = report::last_of(&program.lines);
            Err(anyhow!("the program in the machine {end}; its last lines: {last}"))
        }
    }
}

/// What is not installed is missing; all else is a failure.
fn outcome_of(error: &VmError) -> Tried {
    match error {
        VmError::Platform | VmError::NoQemu | VmError::Kernel(_) => {
            Tried::Missing(error.to_string())
        }
        _ => Tried::Failed(error.to_string()),
    }
}

/// The emulator's own words about its version.
pub(super) fn emulator_version() -> Option<String> {
    let said = Command::new("qemu-system-x86_64").arg("--version").output().ok()?;
    let said = String::from_utf8(said.stdout).ok()?;
    Some(said.lines().next()?.trim_start_matches("QEMU emulator version ").to_owned())
}

#[cfg(test)]
mod tests {
    use memferry_vm::ProgramOutcome;

    use super::*;

    fn outcome(end: End, lines: &[&str]) -> memferry_vm::Outcome {
        let lines = lines.iter().map(|&line| line.into()).collect();
        memferry_vm::Outcome {
            programs: vec![ProgramOutcome { end, lines }],
            console: Vec::new(),
            boot: Duration::from_secs(4),
            total: Duration::from_secs(9),
        }
    }

    #[test]
    fn what_is_not_installed_is_missing_with_its_cure() {
        let Tried::Missing(reason) = outcome_of(&VmError::NoQemu) else { panic!("not missing") };
        assert!(reason.contains("sudo apt install qemu-system-x86"), "{reason}");
        let trouble = VmError::Guest { reason: "no card".into() };
        assert!(matches!(outcome_of(&trouble), Tried::Failed(_)));
    }

    #[test]
    fn a_program_that_ends_badly_is_told_with_its_last_lines() {
        let lines = ["emulated card: notices", "memferry: a copy came out wrong"];
        for end in [End::Exited(1), End::Signalled(11), End::TimedOut, End::Lost] {
            let error = judge(&outcome(end.clone(), &lines)).unwrap_err().to_string();
            assert!(error.contains(&end.to_string()), "{error}");
            assert!(error.ends_with("a copy came out wrong"), "{error}");
        }
        let error = format!("{:#}", judge(&outcome(End::Exited(0), &lines)).unwrap_err());
        assert!(error.contains("gave no report"), "{error}");
    }
}
