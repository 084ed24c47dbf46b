//! `memferry explain`: which path a copy or a message takes on this machine, why, and the values
//! behind the decision. It asks the planners that real copies and messages ask, and moves nothing.

mod copy;
mod gpu;
mod message;

use memferry::engine::contract::Acquaintance;
use memferry::plan::{Question, REMEMBERED_BYTES};
use memferry::{MemoryKind, Temperature};

use crate::args::{ExplainArgs, Place};

/// Explains what the arguments ask about.
pub(crate) fn run(args: &ExplainArgs) -> anyhow::Result<()> {
    match args.message {
        Some(bytes) => message::run(bytes, args.json),
        None => copy::run(question(args, is_sole_user()), args.gpu, args.json),
    }
}

/// Whether programs of this environment say that nobody else uses CUDA.
fn is_sole_user() -> bool {
    std::env::var("MEMFERRY_CUDA_SOLE_USER").is_ok_and(|value| value.trim() == "1")
}

/// The question to the planner of copies, for a caller that waits.
fn question(args: &ExplainArgs, is_sole_user: bool) -> Question {
    let bytes = args.bytes.unwrap_or_default();
    let kind = |place| match place {
        Some(Place::Device) => MemoryKind::Device,
        Some(Place::Host) | None => MemoryKind::Host,
    };
    let temperature = match (args.hot, args.cold) {
        (true, _) => Temperature::Hot,
        (_, true) => Temperature::Cold,
        _ => Temperature::Unknown,
    };
    // What was copied before is known from a size on from which the sole user of CUDA remembers it.
    let is_remembered =
        is_sole_user && args.gpu.is_some() && !args.fresh && bytes >= REMEMBERED_BYTES;
    let is_known = args.registered || is_remembered;
    Question {
        temperature,
        source_memory: kind(args.from),
        target_memory: kind(args.to),
        acquaintance: if is_known { Acquaintance::Known } else { Acquaintance::New },
        ..Question::copy(bytes, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Task};
    use clap::Parser;

    fn ask(words: &[&str], is_sole_user: bool) -> Question {
        let words = ["memferry", "explain"].iter().chain(words);
        let Task::Explain(args) = Cli::try_parse_from(words).unwrap().command else {
            panic!("not explain")
        };
        question(&args, is_sole_user)
    }

    #[test]
    fn memory_is_known_if_it_was_registered_or_is_worth_remembering() {
        use Acquaintance::{Known, New};
        for (words, beside_others, alone) in [
            (&["64MiB"][..], New, New),
            (&["64MiB", "--gpu"], New, Known),
            (&["64MiB", "--gpu", "--fresh"], New, New),
            (&["64KiB", "--gpu"], New, New),
            (&["64KiB", "--gpu", "--registered"], Known, Known),
        ] {
            assert_eq!(ask(words, false).acquaintance, beside_others, "{words:?}");
            assert_eq!(ask(words, true).acquaintance, alone, "{words:?}");
        }
    }

    #[test]
    fn places_and_temperature_arrive_in_the_question() {
        let words = ["4k", "--cold", "--gpu=1", "--from", "device", "--to", "host"];
        let question = ask(&words, false);
        assert_eq!(question.temperature, Temperature::Cold);
        assert_eq!(question.source_memory, MemoryKind::Device);
        assert_eq!(question.target_memory, MemoryKind::Host);
        assert_eq!(question.bytes, 4096);
    }
}
