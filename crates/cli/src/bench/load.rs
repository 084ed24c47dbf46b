//! Whether others used the processors while a bench ran, or a quota kept them from it: then its numbers
//! say little, the reader must know, and no bar is judged.

use std::time::{Duration, Instant};

use memferry::sys::{affinity, clock};
use memferry_sys::contention::Processors;

use crate::outcome::Disturbance;

/// The unit in which the kernel counts processor time.
const NS_PER_TICK: u64 = 10_000_000;
/// In a shorter time a few of these units are everything that there is.
const SHORTEST: Duration = Duration::from_millis(200);

/// What the cores that this process may use, and this process, with the processes it had started, had used at one moment.
pub(super) struct Load {
    at: Instant,
    all_ns: u64,
    ours_ns: u64,
}

impl Load {
    /// The load up to now; `None` where the kernel does not tell.
    pub(super) fn now() -> Option<Self> {
        let all_ns = Processors::of_cores(&affinity::allowed_cores())?.busy_ns;
        let children_ns = children_ns(&std::fs::read_to_string("/proc/self/stat").ok()?)?;
        Some(Self { at: Instant::now(), all_ns, ours_ns: clock::process_cpu_ns() + children_ns })
    }

    /// The share of the processors that others used since then. `None` if that cannot be told.
    pub(super) fn others_since(self) -> Option<f64> {
        self.others_until(&Self::now()?, affinity::allowed_cores().len())
    }

    fn others_until(&self, now: &Self, cores: usize) -> Option<f64> {
        let took = now.at - self.at;
        // What the kernel counts may step back, where a core went off line or another machine had it.
        let all_ns = now.all_ns.saturating_sub(self.all_ns);
        let others = all_ns.saturating_sub(now.ours_ns.saturating_sub(self.ours_ns));
        let room = took.as_nanos() as f64 * cores as f64;
        (took >= SHORTEST).then(|| others as f64 / room)
    }
}

/// A sentence for the reader.
pub(super) fn warning(disturbance: Disturbance) -> String {
    match disturbance {
        Disturbance::Busy(share) => format!(
            "Other programs or machines used {:.0} % of the processors meanwhile: no bar is judged. \
             Close them and run this again before you believe the numbers.",
            100.0 * share
        ),
        Disturbance::Throttled(share) => format!(
            "A CPU quota throttled this run for up to {:.0} % of the time: no bar is judged. Raise the \
             quota of the container or cgroup, or run this outside of it, before you believe the \
             numbers.",
            100.0 * share
        ),
    }
}

/// Time of all processes that were started here and have ended, and of those that they started.
fn children_ns(stat: &str) -> Option<u64> {
    // Behind the name, which may contain anything: state and twelve numbers, then the two.
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks = fields.split_whitespace().skip(13).take(2).map(|word| word.parse::<u64>().ok());
    Some(ticks.sum::<Option<u64>>()? * NS_PER_TICK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_program_used_itself_does_not_make_the_machine_busy() {
        let at = Instant::now();
        let before = Load { at, all_ns: 100, ours_ns: 50 };
        let after = |ms, all_ns: u64, ours_ns: u64| Load {
            at: at + Duration::from_millis(ms),
            all_ns: 100 + all_ns,
            ours_ns: 50 + ours_ns,
        };
        let second = 1_000_000_000;
        assert_eq!(before.others_until(&after(1000, second, second), 2), Some(0.0));
        assert_eq!(before.others_until(&after(1000, 2 * second, second), 2), Some(0.5));
        // Our time is counted more finely than that of all.
        assert_eq!(before.others_until(&after(1000, second, second + 5), 2), Some(0.0));
        let stepped_back = Load { all_ns: 10, ..after(1000, 0, 0) };
        assert_eq!(before.others_until(&stepped_back, 2), Some(0.0));
        assert_eq!(before.others_until(&after(50, second, 0), 2), None, "too short to tell");
    }

    #[test]
    fn the_time_of_ended_children_is_found_behind_any_name() {
        let stat = "7 (a) b) S 1 7 7 0 -1 0 1 2 3 4 50 60 70 80 20 0 1 0 99";
        assert_eq!(children_ns(stat), Some(150 * 10_000_000));
        assert_eq!(children_ns("7 (a"), None);
    }

    #[test]
    fn a_warning_says_what_disturbed_and_how_much() {
        let busy = warning(Disturbance::Busy(0.4));
        assert!(busy.contains("40 %") && busy.contains("Other programs"), "{busy}");
        let throttled = warning(Disturbance::Throttled(0.3));
        assert!(throttled.contains("30 %") && throttled.contains("CPU quota"), "{throttled}");
        assert!(!throttled.contains("Other programs"), "{throttled}");
    }
}
