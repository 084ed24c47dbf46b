//! Text protocol between a bench and a group: one line requests a number of iterations of a task,
//! one line replies with the times. All candidates use the same protocol.

use std::fmt;
use std::str::FromStr;

use crate::harness::Sample;
use crate::message::collective_task::CollectiveKind;
use crate::message::matching::MatchCase;

/// A task that the members of a group execute together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GroupTask {
    /// A message from the first member to the second, and one back.
    Pingpong { bytes: u64 },
    /// A message from every member to every member.
    Alltoall { bytes: u64 },
    /// A collective of all members, with data that changes.
    Collective { kind: CollectiveKind, bytes: u64 },
    /// A bucket sort of 2^`keys_log2` keys.
    IntegerSort { keys_log2: u64 },
    /// A Fourier transform of a cube with `points` along its edges.
    Fourier { points: u64 },
    /// A window of messages from the first member to the second, and one reply.
    Stream { bytes: u64 },
    /// The first member receives `depth` messages of the second, while as many receives or messages
    /// wait.
    Matching { depth: u64, case: MatchCase },
    /// The first member receives a message that the second already has, and computes on it: always
    /// in the same few slots, or in `cold` slots.
    Receive { bytes: u64, cold: bool },
    /// Messages from the first member to the second, into memory that was never touched (`fresh`) or
    /// has been used before, in turn as usual and without prefaulting.
    FirstTouch { bytes: u64, fresh: bool },
    /// The first member copies its own memory, one copy after the other.
    SmallCopies { bytes: u64 },
}

/// A task and its number of iterations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkerCommand {
    pub(crate) task: GroupTask,
    pub(crate) iterations: u64,
}

/// Line that ends a group.
pub(crate) const QUIT: &str = "quit";
/// Line that a leader writes once its group is complete.
pub(crate) const READY: &str = "ready";
const ERROR: &str = "error ";

/// What comes before the word of a case.
const MATCHING: &str = "match-";
/// What comes before the word of a collective.
const COLLECTIVE: &str = "coll-";

impl GroupTask {
    fn keyword_and_size(self) -> (&'static str, u64) {
        match self {
            Self::Matching { depth, case } => (case.word(), depth),
            Self::Pingpong { bytes } => ("pingpong", bytes),
            Self::Alltoall { bytes } => ("alltoall", bytes),
            Self::Collective { kind, bytes } => (kind.word(), bytes),
            Self::IntegerSort { keys_log2 } => ("is", keys_log2),
            Self::Fourier { points } => ("ft", points),
            Self::Stream { bytes } => ("stream", bytes),
            Self::SmallCopies { bytes } => ("copies", bytes),
            Self::Receive { bytes, cold: false } => ("receive-hot", bytes),
            Self::Receive { bytes, cold: true } => ("receive-cold", bytes),
            Self::FirstTouch { bytes, fresh: false } => ("land-reused", bytes),
            Self::FirstTouch { bytes, fresh: true } => ("land-fresh", bytes),
        }
    }
}

impl fmt::Display for GroupTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (word, size) = self.keyword_and_size();
        let prefix = match self {
            Self::Matching { .. } => MATCHING,
            Self::Collective { .. } => COLLECTIVE,
            _ => "",
        };
        write!(f, "{prefix}{word} {size}")
    }
}

impl fmt::Display for WorkerCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.task, self.iterations)
    }
}

impl FromStr for WorkerCommand {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let wrong = || format!("`{line}` is not an order");
        let words: Vec<_> = line.split_whitespace().collect();
        let [word, size, iterations] = words[..] else { return Err(wrong()) };
        let size = size.parse().map_err(|_| wrong())?;
        let task = match word {
            "pingpong" => GroupTask::Pingpong { bytes: size },
            "alltoall" => GroupTask::Alltoall { bytes: size },
            "is" => GroupTask::IntegerSort { keys_log2: size },
            "ft" => GroupTask::Fourier { points: size },
            "stream" => GroupTask::Stream { bytes: size },
            "copies" => GroupTask::SmallCopies { bytes: size },
            "land-reused" => GroupTask::FirstTouch { bytes: size, fresh: false },
            "land-fresh" => GroupTask::FirstTouch { bytes: size, fresh: true },
            "receive-hot" => GroupTask::Receive { bytes: size, cold: false },
            "receive-cold" => GroupTask::Receive { bytes: size, cold: true },
            _ if word.starts_with(COLLECTIVE) => {
                let kind = CollectiveKind::from_word(&word[COLLECTIVE.len()..]);
                GroupTask::Collective { kind: kind.ok_or_else(wrong)?, bytes: size }
            }
            _ => {
                let case = word.strip_prefix(MATCHING).and_then(MatchCase::from_word);
                GroupTask::Matching { depth: size, case: case.ok_or_else(wrong)? }
            }
        };
        Ok(Self { task, iterations: iterations.parse().map_err(|_| wrong())? })
    }
}

impl Sample {
    /// Parses a reply; the error is the one that the group reports.
    pub(crate) fn parse(answer: &str) -> Result<Self, String> {
        if let Some(reason) = answer.strip_prefix(ERROR) {
            return Err(reason.trim().to_owned());
        }
        let numbers: Option<Vec<f64>> =
            answer.split_whitespace().map(|word| word.parse().ok()).collect();
        match numbers.as_deref() {
            Some(&[total_ns]) if total_ns > 0.0 => Ok(Self::of_messages(total_ns)),
            Some(&[total_ns, messages_ns]) if total_ns > 0.0 => {
                Ok(Self::of_parts(total_ns, messages_ns))
            }
            Some(&[total_ns, messages_ns, processor_ns]) if total_ns > 0.0 => {
                Ok(Self { total_ns, messages_ns, cpu_ns: processor_ns })
            }
            _ => Err(format!("answered `{}`", answer.trim())),
        }
    }

    /// Formats the reply of a leader.
    pub(crate) fn format_reply(result: Result<Self, String>) -> String {
        match result {
            Ok(Self { total_ns, messages_ns, cpu_ns: processor_ns }) => {
                format!("{total_ns:.0} {messages_ns:.0} {processor_ns:.0}")
            }
            // A reply is one line.
            Err(reason) => format!("{ERROR}{}", reason.replace('\n', " ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_survives_the_way_through_a_pipe() {
        for task in [
            GroupTask::Pingpong { bytes: 0 },
            GroupTask::Alltoall { bytes: 65_536 },
            GroupTask::Collective { kind: CollectiveKind::Barrier, bytes: 0 },
            GroupTask::Collective { kind: CollectiveKind::Alltoall, bytes: 65_536 },
            GroupTask::IntegerSort { keys_log2: 22 },
            GroupTask::Fourier { points: 128 },
            GroupTask::Stream { bytes: 4096 },
            GroupTask::Matching { depth: 100, case: MatchCase::PostedMixed },
            GroupTask::Receive { bytes: 4096, cold: false },
            GroupTask::Receive { bytes: 1 << 20, cold: true },
            GroupTask::SmallCopies { bytes: 64 },
            GroupTask::FirstTouch { bytes: 4096, fresh: false },
            GroupTask::FirstTouch { bytes: 1 << 20, fresh: true },
        ] {
            let order = WorkerCommand { task, iterations: 17 };
            assert_eq!(order.to_string().parse::<WorkerCommand>(), Ok(order));
        }
        assert_eq!(
            WorkerCommand { task: GroupTask::Fourier { points: 64 }, iterations: 3 }.to_string(),
            "ft 64 3"
        );
    }

    #[test]
    fn what_is_not_an_order_is_said() {
        for line in [
            "",
            "pingpong",
            "pingpong 8",
            "pingpong 8 many",
            "pongping 8 1",
            "receive 8 1",
            "coll-scatter 8 1",
            "land-hot 8 1",
            "is 8 1 1",
        ] {
            assert_eq!(
                line.parse::<WorkerCommand>().unwrap_err(),
                format!("`{line}` is not an order")
            );
        }
    }

    #[test]
    fn an_answer_is_one_to_three_times_or_an_error() {
        assert_eq!(Sample::parse("1200\n"), Ok(Sample::of_messages(1200.0)));
        let both = Sample::of_parts(1200.0, 300.0);
        assert_eq!(Sample::parse("1200 300"), Ok(both));
        // The time lost to messages is a difference, which noise can make negative.
        let all = Sample { total_ns: 1200.0, messages_ns: -300.0, cpu_ns: 20.0 };
        for timing in [both, all] {
            assert_eq!(Sample::parse(&Sample::format_reply(Ok(timing))), Ok(timing));
        }
        let lost = Sample::format_reply(Err("a byte\ngot lost".into()));
        assert_eq!(Sample::parse(&lost), Err("a byte got lost".into()));
        for garbage in ["", "ready", "0", "-3", "1 2 3 4", "nan"] {
            assert!(Sample::parse(garbage).is_err(), "{garbage}");
        }
    }
}
