//! What became of the programs of a machine.

use std::fmt;
use std::time::Duration;

/// How a program ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// It returned, with this status.
    Exited(i32),
    /// A signal ended it.
    Signalled(i32),
    /// It could not be started.
    NotStarted(String),
    /// It still ran when the machine's time was up.
    TimedOut,
    /// The machine ended under it.
    Lost,
    /// Its turn never came.
    NotReached,
}

impl End {
    /// Whether the program returned and was content.
    pub fn is_success(&self) -> bool {
        *self == Self::Exited(0)
    }
}

impl fmt::Display for End {
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

/// One program's end, and what it wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramOutcome {
    /// How it ended.
    pub end: End,
    /// What it wrote to its output and to its error output, in order.
    pub lines: Vec<String>,
}

/// What a machine did.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The programs, in the order in which they were asked for.
    pub programs: Vec<ProgramOutcome>,
    /// What QEMU and the kernel said.
    pub console: Vec<String>,
    /// From the start of QEMU to the moment at which the first program could start.
    pub boot: Duration,
    /// From the start of QEMU to its end.
    pub total: Duration,
}

impl Outcome {
    /// Whether every program returned and was content.
    pub fn is_success(&self) -> bool {
        self.programs.iter().all(|program| program.end.is_success())
    }

    /// The first line in which the kernel says that something is wrong with it, or that a device
    /// reached for memory that is not its own. Programs may not have noticed.
    pub fn kernel_trouble(&self) -> Option<&str> {
        self.console.iter().map(String::as_str).find(|line| is_trouble(line))
    }
}

/// Words of a kernel that found a fault in itself.
const TROUBLE: [&str; 4] = ["BUG:", "Oops", "WARNING:", "Call Trace"];

fn is_trouble(line: &str) -> bool {
    // A domain may be a default one, which is no fault.
    let lower = line.to_lowercase().replace("default", "");
    lower.contains("dmar") && lower.contains("fault")
        || TROUBLE.iter().any(|word| line.contains(word))
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
            assert!(is_trouble(line), "{line}");
        }
        for line in ["DMAR: the default domain", "qemu: warning: no peer", "a page fault"] {
            assert!(!is_trouble(line), "{line}");
        }
    }

    #[test]
    fn the_first_line_of_trouble_is_told() {
        let console = ["hello", "BUG: one", "Call Trace:"].map(str::to_owned).to_vec();
        let time = Duration::from_secs(1);
        let mut outcome = Outcome { programs: Vec::new(), console, boot: time, total: time };
        assert_eq!(outcome.kernel_trouble(), Some("BUG: one"));
        outcome.console.truncate(1);
        assert_eq!(outcome.kernel_trouble(), None);
    }
}
