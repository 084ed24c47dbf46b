//! The results of a machine and of its programs.

use std::fmt;
use std::time::Duration;

/// How a program ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProgramExit {
    /// The program exited with this status.
    Exited(i32),
    /// This signal terminated the program.
    Signalled(i32),
    /// The program could not be started; the text is the error.
    NotStarted(String),
    /// The program was still running at the timeout of the machine.
    TimedOut,
    /// The machine stopped while the program was running.
    Lost,
    /// The machine stopped before the program was started.
    NotReached,
}

impl ProgramExit {
    /// Whether the program exited with status 0.
    pub fn is_success(&self) -> bool {
        *self == Self::Exited(0)
    }
}

impl fmt::Display for ProgramExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(status) => write!(f, "exited with status {status}"),
            Self::Signalled(signal) => write!(f, "died of signal {signal}"),
            Self::NotStarted(reason) => write!(f, "could not be started: {reason}"),
            Self::TimedOut => write!(f, "still ran when the time was up"),
            Self::Lost => write!(f, "was running when the virtual machine stopped"),
            Self::NotReached => write!(f, "never had its turn"),
        }
    }
}

/// The result of one program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramOutcome {
    /// How the program ended.
    pub exit: ProgramExit,
    /// The lines that the program wrote to standard output and standard error, in order.
    pub lines: Vec<String>,
}

/// The result of a machine.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The results of the programs, in the order in which they were added.
    pub programs: Vec<ProgramOutcome>,
    /// The lines of QEMU and of the kernel.
    pub console: Vec<String>,
    /// The time from the start of QEMU until the machine was ready for the first program.
    pub boot: Duration,
    /// The time from the start of QEMU to its exit.
    pub total: Duration,
}

impl Outcome {
    /// Whether every program exited with status 0.
    pub fn is_success(&self) -> bool {
        self.programs.iter().all(|program| program.exit.is_success())
    }

    /// The first console line in which the kernel reports an error of its own, or a DMA fault: a
    /// device accessed memory that is not mapped for it. The programs may not have noticed it.
    pub fn kernel_error(&self) -> Option<&str> {
        self.console.iter().map(String::as_str).find(|line| is_kernel_error(line))
    }
}

/// Markers of kernel errors.
const KERNEL_ERRORS: [&str; 4] = ["BUG:", "Oops", "WARNING:", "Call Trace"];

fn is_kernel_error(line: &str) -> bool {
    // "Default" domains are removed first, because "default" contains "fault".
    let lower = line.to_lowercase().replace("default", "");
    lower.contains("dmar") && lower.contains("fault")
        || KERNEL_ERRORS.iter().any(|word| line.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_of_the_iommu_and_of_the_kernel_are_trouble() {
        for line in [
            "[    1.0] DMAR: DRHD: handling fault status reg 2",
            "DMAR: [DMA Write NO_PASID] Request device [00:03.0] Fault addr 0x1000",
            "[    2.0] BUG: kernel NULL pointer dereference",
            "[    2.0] Oops: 0002 [#1] PREEMPT SMP",
            "[    2.0] WARNING: CPU: 0 PID: 1 at drivers/vfio/vfio_main.c:1",
            "[    2.0] Call Trace:",
        ] {
            assert!(is_kernel_error(line), "{line}");
        }
        for line in ["DMAR: the default domain", "qemu: warning: no peer", "a page fault"] {
            assert!(!is_kernel_error(line), "{line}");
        }
    }

    #[test]
    fn the_first_line_of_trouble_is_told() {
        let console = ["hello", "BUG: one", "Call Trace:"].map(str::to_owned).to_vec();
        let time = Duration::from_secs(1);
        let mut outcome = Outcome { programs: Vec::new(), console, boot: time, total: time };
        assert_eq!(outcome.kernel_error(), Some("BUG: one"));
        outcome.console.truncate(1);
        assert_eq!(outcome.kernel_error(), None);
    }
}
