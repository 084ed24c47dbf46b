//! `memferry explain`: which path a copy of a size takes, and why. The planner is not linked into
//! the program yet, so for now this tells where the buffers of such a copy can lie.

use serde::Serialize;

use crate::outcome::Machine;
use crate::show::{self, Paint};
use crate::size;

/// Where the buffers are before the copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Warmth {
    /// Used just before, and in the caches if they fit.
    Hot,
    /// In memory, outside the caches.
    Cold,
}

/// What is known about a copy of a size.
#[derive(Debug, Serialize)]
struct Explanation {
    bytes: u64,
    warmth: Warmth,
    /// The nearest place that holds source and target together.
    place: &'static str,
    reason: String,
}

/// Explains a copy, as text or as JSON.
pub(crate) fn run(bytes: u64, warmth: Warmth, json: bool) -> anyhow::Result<()> {
    let explanation = explain(bytes, warmth, &Machine::look());
    if json {
        return show::print_json(&explanation);
    }
    let title = match warmth {
        Warmth::Hot => format!("a hot copy of {}", size::format(bytes)),
        Warmth::Cold => format!("a cold copy of {}", size::format(bytes)),
    };
    let paint = Paint::for_stdout();
    Ok(show::print(&format!("{}\n  {}\n", paint.bold(&title), explanation.reason))?)
}

fn explain(bytes: u64, warmth: Warmth, machine: &Machine) -> Explanation {
    let both = bytes.saturating_mul(2);
    let levels = [("L1", machine.l1_bytes), ("L2", machine.l2_bytes), ("L3", machine.l3_bytes)];
    let level = levels.into_iter().find(|&(_, room)| both <= room);
    let (place, reason) = match (warmth, level) {
        (Warmth::Cold, _) => {
            ("memory", "Source and target are in memory, outside the caches.".to_owned())
        }
        (Warmth::Hot, Some((name, room))) => (
            name,
            format!(
                "Source and target together are {}, which the {name} cache of {} holds.",
                size::format(both),
                size::format(room)
            ),
        ),
        (Warmth::Hot, None) => (
            "memory",
            format!(
                "Source and target together are {}, more than the last-level cache of {} holds.",
                size::format(both),
                size::format(machine.l3_bytes)
            ),
        ),
    };
    Explanation { bytes, warmth, place, reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    #[test]
    fn a_hot_copy_lies_in_the_nearest_cache_that_holds_both_buffers() {
        let machine = sample::empty("x").machine;
        assert_eq!(explain(4096, Warmth::Hot, &machine).place, "L1");
        assert_eq!(explain(32 << 10, Warmth::Hot, &machine).place, "L2");
        assert_eq!(explain(4 << 20, Warmth::Hot, &machine).place, "L3");
        assert_eq!(explain(1 << 30, Warmth::Hot, &machine).place, "memory");
    }

    #[test]
    fn a_cold_copy_lies_in_memory_whatever_its_size() {
        assert_eq!(explain(64, Warmth::Cold, &sample::empty("x").machine).place, "memory");
    }
}
