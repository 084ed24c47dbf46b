//! `memferry explain` prints which path a copy or a message takes on this machine, why, and the
//! values behind the decision. It calls the planners of real copies and messages, and copies
//! nothing.

mod copy;
mod devices;
mod gpu;
mod message;
mod unused;

use memferry::engine::contract::ReuseHint;
use memferry::plan::{CopyQuery, MIN_TRACKED_BYTES};
use memferry::{CacheHint, MemoryKind};
use memferry_sys::settings::{self, switch};

use crate::args::{ExplainArgs, MemoryLocation};

/// Explains the copy or the message of the arguments.
pub(crate) fn run(args: &ExplainArgs) -> anyhow::Result<()> {
    match args.message {
        Some(bytes) => message::run(bytes, args.json),
        None => {
            let variable = |name: &str| std::env::var(name).ok();
            let gpu = args.gpu.map(|number| number.to_string());
            let (ioat, nic, dsa) = (args.ioat.clone(), args.nic.clone(), args.dsa.clone());
            let named = [("cuda", gpu), ("ioat", ioat), ("nic", nic), ("dsa", dsa)];
            let devices = devices::RequestedDevices::new(&named, variable);
            let query = copy_query(args, is_sole_user());
            copy::run(query, args.gpu, &devices, copy::Output { json: args.json, all: args.all })
        }
    }
}

/// Whether the environment declares this process the sole user of CUDA (`MEMFERRY_CUDA_SOLE_USER`).
fn is_sole_user() -> bool {
    settings::read_variable("MEMFERRY_CUDA_SOLE_USER", switch::parse) == Ok(Some(true))
}

/// The query to the copy planner, for a blocking copy.
fn copy_query(args: &ExplainArgs, is_sole_user: bool) -> CopyQuery {
    let bytes = args.bytes.unwrap_or_default();
    let kind = |place| match place {
        Some(MemoryLocation::Device) => MemoryKind::Device,
        Some(MemoryLocation::Host) | None => MemoryKind::Host,
    };
    let temperature = match (args.hot, args.cold) {
        (true, _) => CacheHint::Hot,
        (_, true) => CacheHint::Cold,
        _ => CacheHint::Unknown,
    };
    // The sole user of CUDA tracks the use of ranges from a minimum size on.
    let is_remembered =
        is_sole_user && args.gpu.is_some() && !args.fresh && bytes >= MIN_TRACKED_BYTES;
    let is_known = args.registered || is_remembered;
    CopyQuery {
        cache_hint: temperature,
        source_memory: kind(args.from),
        target_memory: kind(args.to),
        reuse: if is_known { ReuseHint::Reused } else { ReuseHint::FirstUse },
        ..CopyQuery::copy(bytes, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, CliCommand};
    use clap::Parser;

    fn parse_query(words: &[&str], is_sole_user: bool) -> CopyQuery {
        let words = ["memferry", "explain"].iter().chain(words);
        let CliCommand::Explain(args) = Cli::try_parse_from(words).unwrap().command else {
            panic!("not explain")
        };
        copy_query(&args, is_sole_user)
    }

    #[test]
    fn memory_is_known_if_it_was_registered_or_is_worth_remembering() {
        use ReuseHint::{FirstUse, Reused};
        for (words, beside_others, alone) in [
            (&["64MiB"][..], FirstUse, FirstUse),
            (&["64MiB", "--gpu"], FirstUse, Reused),
            (&["64MiB", "--gpu", "--fresh"], FirstUse, FirstUse),
            (&["64KiB", "--gpu"], FirstUse, FirstUse),
            (&["64KiB", "--gpu", "--registered"], Reused, Reused),
        ] {
            assert_eq!(parse_query(words, false).reuse, beside_others, "{words:?}");
            assert_eq!(parse_query(words, true).reuse, alone, "{words:?}");
        }
    }

    #[test]
    fn devices_are_named_or_found() {
        let words = ["memferry", "explain", "4k", "--dsa", "--ioat=00:04.0,00:04.1"];
        let CliCommand::Explain(args) = Cli::try_parse_from(words).unwrap().command else {
            panic!("not explain")
        };
        assert_eq!((args.dsa.as_deref(), args.nic), (Some("auto"), None));
        assert_eq!(args.ioat.as_deref(), Some("00:04.0,00:04.1"));
    }

    #[test]
    fn places_and_temperature_arrive_in_the_question() {
        let words = ["4k", "--cold", "--gpu=1", "--from", "device", "--to", "host"];
        let question = parse_query(&words, false);
        assert_eq!(question.cache_hint, CacheHint::Cold);
        assert_eq!(question.source_memory, MemoryKind::Device);
        assert_eq!(question.target_memory, MemoryKind::Host);
        assert_eq!(question.bytes, 4096);
    }
}
