//! What a group of many processes does on command.

use std::fmt;

/// A task. All members execute it together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScaleTask {
    /// A message of 8 bytes around all members.
    Ring,
    /// A message of 8 bytes from each member to this number of random others.
    Neighbours(usize),
    /// A message of this number of bytes from each member to each.
    Alltoall(usize),
    /// Every member but the first waits in a receive, for the number of iterations in milliseconds.
    Idle,
    /// Counts the connections. For members of this program.
    Connections,
}

impl fmt::Display for ScaleTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ring => f.write_str("ring 8"),
            Self::Neighbours(count) => write!(f, "neighbours {count}"),
            Self::Alltoall(bytes) => write!(f, "alltoall {bytes}"),
            Self::Idle => f.write_str("idle 0"),
            Self::Connections => f.write_str("connections 0"),
        }
    }
}

impl ScaleTask {
    /// The line that requests a number of iterations.
    pub(super) fn line(self, iterations: u64) -> String {
        format!("{self} {iterations}")
    }

    /// Reads such a line.
    pub(super) fn parse(line: &str) -> Result<(Self, u64), String> {
        let wrong = || format!("`{line}` is not an order");
        let words: Vec<_> = line.split_whitespace().collect();
        let [word, number, iterations] = words[..] else { return Err(wrong()) };
        let number = number.parse().map_err(|_| wrong())?;
        let task = match word {
            "ring" => Self::Ring,
            "neighbours" => Self::Neighbours(number),
            "alltoall" => Self::Alltoall(number),
            "idle" => Self::Idle,
            "connections" => Self::Connections,
            _ => return Err(wrong()),
        };
        Ok((task, iterations.parse().map_err(|_| wrong())?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_its_task() {
        use ScaleTask::{Alltoall, Connections, Idle, Neighbours, Ring};
        for task in [Ring, Neighbours(8), Alltoall(1024), Idle, Connections] {
            assert_eq!(ScaleTask::parse(&task.line(7)), Ok((task, 7)));
        }
        assert!(ScaleTask::parse("ring").is_err());
        assert!(ScaleTask::parse("spin 1 1").is_err());
    }
}
