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
}
