//! The virtual machine with the card, from the host's side: its availability, and its results.

use std::env;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, anyhow};
use memferry_vm::{Availability, Machine, ProgramExit, VmError};

use super::super::Effort;
use super::report::{self, GuestReport};
use crate::Progress;

/// Outcome of a run of the virtual machine.
#[derive(Debug)]
pub(super) enum VmRun {
    /// The program in the machine printed its report.
    Reported(Box<VmReport>),
    /// No machine can be started; the reason contains the fix.
    Missing(String),
    /// The machine or its program failed.
    Failed(String),
}

/// Report of the program in the machine, and times of the machine.
#[derive(Debug)]
pub(super) struct VmReport {
    pub(super) report: GuestReport,
    /// First warning of the guest's kernel.
    pub(super) kernel_warning: Option<String>,
    pub(super) boot: Duration,
    pub(super) total: Duration,
}

/// Starts a machine in which this program drives the card.
pub(super) fn run(effort: Effort, progress: &dyn Progress) -> VmRun {
    match memferry_vm::availability() {
        Ok(Availability::Ready) => progress.step("starting the virtual machine"),
        Ok(_) => progress.step("fetching a kernel for the virtual machine (27 MB, only once)"),
        Err(error) => return from_error(&error),
    }
    let machine = match machine(effort) {
        Ok(machine) => machine,
        Err(error) => return VmRun::Failed(format!("{error:#}")),
    };
    let told = machine.run(|line| {
        if report::is_step(line) {
            progress.step(line);
        }
    });
    match told {
        Err(error) => from_error(&error),
        Ok(outcome) => match parse_report(&outcome) {
            Err(error) => VmRun::Failed(format!("{error:#}")),
            Ok(report) => {
                let complaint = outcome.kernel_error().map(str::to_owned);
                let (boot, total) = (outcome.boot, outcome.total);
                VmRun::Reported(Box::new(VmReport {
                    report,
                    kernel_warning: complaint,
                    boot,
                    total,
                }))
            }
        },
    }
}

fn machine(effort: Effort) -> anyhow::Result<Machine> {
    let myself = env::current_exe().context("this program does not know where it is")?;
    let quick = (effort != Effort::Full).then_some("--quick");
    let arguments = ["device-guest"].into_iter().chain(quick);
    let seconds = if effort == Effort::Full { 600 } else { 110 };
    Ok(Machine::new().program(myself, arguments).timeout(Duration::from_secs(seconds)))
}

/// Parses the report of a program that succeeded.
fn parse_report(outcome: &memferry_vm::Outcome) -> anyhow::Result<GuestReport> {
    let program = outcome.programs.first().context("the machine ran no program")?;
    match &program.exit {
        ProgramExit::Exited(0) => {
            GuestReport::find(&program.lines).context("the program in the machine")
        }
        end => {
            let last = report::last_lines(&program.lines);
            Err(anyhow!("the program in the machine {end}; its last lines: {last}"))
        }
    }
}

/// Maps an error to an outcome: software that is not installed is missing; everything else is a
/// failure.
fn from_error(error: &VmError) -> VmRun {
    match error {
        VmError::Platform | VmError::NoQemu | VmError::Kernel(_) => {
            VmRun::Missing(error.to_string())
        }
        _ => VmRun::Failed(error.to_string()),
    }
}

/// Version that the emulator prints.
pub(super) fn emulator_version() -> Option<String> {
    let said = Command::new("qemu-system-x86_64").arg("--version").output().ok()?;
    let said = String::from_utf8(said.stdout).ok()?;
    Some(said.lines().next()?.trim_start_matches("QEMU emulator version ").to_owned())
}

#[cfg(test)]
mod tests {
    use memferry_vm::ProgramOutcome;

    use super::*;

    fn outcome(exit: ProgramExit, lines: &[&str]) -> memferry_vm::Outcome {
        let lines = lines.iter().map(|&line| line.into()).collect();
        memferry_vm::Outcome {
            programs: vec![ProgramOutcome { exit, lines }],
            console: Vec::new(),
            boot: Duration::from_secs(4),
            total: Duration::from_secs(9),
        }
    }

    #[test]
    fn what_is_not_installed_is_missing_with_its_cure() {
        let VmRun::Missing(reason) = from_error(&VmError::NoQemu) else { panic!("not missing") };
        assert!(reason.contains("sudo apt install qemu-system-x86"), "{reason}");
        let trouble = VmError::Guest { reason: "no card".into() };
        assert!(matches!(from_error(&trouble), VmRun::Failed(_)));
    }

    #[test]
    fn a_program_that_ends_badly_is_told_with_its_last_lines() {
        let lines = ["emulated card: notices", "memferry: a copy came out wrong"];
        for end in [
            ProgramExit::Exited(1),
            ProgramExit::Signalled(11),
            ProgramExit::TimedOut,
            ProgramExit::Lost,
        ] {
            let error = parse_report(&outcome(end.clone(), &lines)).unwrap_err().to_string();
            assert!(error.contains(&end.to_string()), "{error}");
            assert!(error.ends_with("a copy came out wrong"), "{error}");
        }
        let error =
            format!("{:#}", parse_report(&outcome(ProgramExit::Exited(0), &lines)).unwrap_err());
        assert!(error.contains("gave no report"), "{error}");
    }
}
