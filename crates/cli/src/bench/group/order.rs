//! The words between a bench and a group: one line asks for something to be done so many times, one
//! line answers with what it took. Every contestant understands the same words.

use std::fmt;
use std::str::FromStr;

/// Something that the members of a group do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// A message from the first member to the second and one back.
    Pingpong { bytes: u64 },
    /// A message from every member to every member.
    Alltoall { bytes: u64 },
    /// A bucket sort of 2 to the power of `keys_log2` keys.
    IntegerSort { keys_log2: u64 },
    /// A Fourier transform of a cube with `points` along its edges.
    Fourier { points: u64 },
    /// A window of messages from the first member to the second, and one answer.
    Stream { bytes: u64 },
    /// The first member receives a message, which the second has ready, and computes on it: always
    /// in the same few places, or in places that are `cold`.
    Receive { bytes: u64, cold: bool },
    /// A message from the first member to the second, into memory that was never touched or has
    /// been used before.
    Land { bytes: u64, fresh: bool },
}

/// A task and how often it is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) task: Task,
    pub(crate) iterations: u64,
}

/// What an order took: in all, the part of it that went into messages, and the processor time that
/// the leader's process used for messages, where that was asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Timing {
    pub(crate) total_ns: f64,
    pub(crate) messages_ns: f64,
    pub(crate) processor_ns: f64,
}

/// Ends a group.
pub(super) const QUIT: &str = "quit";
/// What a leader says once its group is complete.
pub(super) const READY: &str = "ready";
const ERROR: &str = "error ";

/// Rounds that are run before the clock starts: they wake who sleeps and warm the caches. The same
/// rule as in the C contestant.
pub(super) fn warm_up_of(iterations: u64) -> u64 {
    1 + iterations / 10
}

impl Task {
    fn word_and_size(self) -> (&'static str, u64) {
        match self {
            Self::Pingpong { bytes } => ("pingpong", bytes),
            Self::Alltoall { bytes } => ("alltoall", bytes),
            Self::IntegerSort { keys_log2 } => ("is", keys_log2),
            Self::Fourier { points } => ("ft", points),
            Self::Stream { bytes } => ("stream", bytes),
            Self::Receive { bytes, cold: false } => ("receive-hot", bytes),
            Self::Receive { bytes, cold: true } => ("receive-cold", bytes),
            Self::Land { bytes, fresh: false } => ("land-reused", bytes),
            Self::Land { bytes, fresh: true } => ("land-fresh", bytes),
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (word, size) = self.word_and_size();
        write!(f, "{word} {size}")
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.task, self.iterations)
    }
}

impl FromStr for Order {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let wrong = || format!("`{line}` is not an order");
        let words: Vec<_> = line.split_whitespace().collect();
        let [word, size, iterations] = words[..] else { return Err(wrong()) };
        let size = size.parse().map_err(|_| wrong())?;
        let task = match word {
            "pingpong" => Task::Pingpong { bytes: size },
            "alltoall" => Task::Alltoall { bytes: size },
            "is" => Task::IntegerSort { keys_log2: size },
            "ft" => Task::Fourier { points: size },
            "stream" => Task::Stream { bytes: size },
            "receive-hot" => Task::Receive { bytes: size, cold: false },
            "receive-cold" => Task::Receive { bytes: size, cold: true },
            "land-reused" => Task::Land { bytes: size, fresh: false },
            "land-fresh" => Task::Land { bytes: size, fresh: true },
            _ => return Err(wrong()),
        };
        Ok(Self { task, iterations: iterations.parse().map_err(|_| wrong())? })
    }
}

impl Timing {
    /// A timing of messages and nothing else.
    pub(crate) fn of_messages(total_ns: f64) -> Self {
        Self::of_parts(total_ns, total_ns)
    }

    /// A timing of a program that uses messages.
    pub(crate) fn of_parts(total_ns: f64, messages_ns: f64) -> Self {
        Self { total_ns, messages_ns, processor_ns: 0.0 }
    }

    /// What one of `iterations` took.
    pub(crate) fn per(self, iterations: u64) -> Self {
        let share = iterations.max(1) as f64;
        Self {
            total_ns: self.total_ns / share,
            messages_ns: self.messages_ns / share,
            processor_ns: self.processor_ns / share,
        }
    }

    /// Reads an answer; an error is what the group says is wrong.
    pub(super) fn parse(answer: &str) -> Result<Self, String> {
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
                Ok(Self { total_ns, messages_ns, processor_ns })
            }
            _ => Err(format!("answered `{}`", answer.trim())),
        }
    }

    /// The answer that a leader writes.
    pub(super) fn answer(result: Result<Self, String>) -> String {
        match result {
            Ok(Self { total_ns, messages_ns, processor_ns }) => {
                format!("{total_ns:.0} {messages_ns:.0} {processor_ns:.0}\n")
            }
            // One answer is one line.
            Err(reason) => format!("{ERROR}{}\n", reason.replace('\n', " ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_survives_the_way_through_a_pipe() {
        for task in [
            Task::Pingpong { bytes: 0 },
            Task::Alltoall { bytes: 65_536 },
            Task::IntegerSort { keys_log2: 22 },
            Task::Fourier { points: 128 },
            Task::Stream { bytes: 4096 },
            Task::Receive { bytes: 4096, cold: false },
            Task::Receive { bytes: 1 << 20, cold: true },
            Task::Land { bytes: 4096, fresh: false },
            Task::Land { bytes: 1 << 20, fresh: true },
        ] {
            let order = Order { task, iterations: 17 };
            assert_eq!(order.to_string().parse::<Order>(), Ok(order));
        }
        assert_eq!(
            Order { task: Task::Fourier { points: 64 }, iterations: 3 }.to_string(),
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
            "is 8 1 1",
        ] {
            assert_eq!(line.parse::<Order>().unwrap_err(), format!("`{line}` is not an order"));
        }
    }

    #[test]
    fn an_answer_is_one_to_three_times_or_an_error() {
        assert_eq!(Timing::parse("1200\n"), Ok(Timing::of_messages(1200.0)));
        let both = Timing::of_parts(1200.0, 300.0);
        assert_eq!(Timing::parse("1200 300"), Ok(both));
        // What is lost to messages is a difference, which chance can make negative.
        let all = Timing { total_ns: 1200.0, messages_ns: -300.0, processor_ns: 20.0 };
        for timing in [both, all] {
            assert_eq!(Timing::parse(&Timing::answer(Ok(timing))), Ok(timing));
        }
        let lost = Timing::answer(Err("a byte\ngot lost".into()));
        assert_eq!(Timing::parse(&lost), Err("a byte got lost".into()));
        for garbage in ["", "ready", "0", "-3", "1 2 3 4", "nan"] {
            assert!(Timing::parse(garbage).is_err(), "{garbage}");
        }
    }
}
