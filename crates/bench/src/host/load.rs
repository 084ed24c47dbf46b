//! Disturbance of a bench: processor time that other processes used while it ran, and time in which
//! a CPU quota throttled it. A disturbed outcome carries a warning, and its targets are not judged.

use std::time::{Duration, Instant};

use memferry::sys::{affinity, clock};
use memferry_sys::contention::CpuTimes;

use crate::results::outcome::Disturbance;

/// Nanoseconds of one tick, the unit in which the kernel counts processor time.
const NS_PER_TICK: u64 = 10_000_000;
/// Minimum interval for a measurement of the load: in a shorter one, a few ticks dominate the
/// result.
const MIN_INTERVAL: Duration = Duration::from_millis(200);

/// Processor time used up to one point in time: on the cores that this process may use, and by this
/// process with its children.
pub(crate) struct CpuLoad {
    at: Instant,
    all_ns: u64,
    ours_ns: u64,
}

impl CpuLoad {
    /// Returns the load up to now; `None` if the kernel does not report it.
    pub(crate) fn now() -> Option<Self> {
        let all_ns = CpuTimes::of_cores(&affinity::allowed_cores())?.busy_ns;
        let children_ns = children_ns(&std::fs::read_to_string("/proc/self/stat").ok()?)?;
        Some(Self { at: Instant::now(), all_ns, ours_ns: clock::process_cpu_ns() + children_ns })
    }

    /// Returns the share of the processor time that other processes used since `self`. `None` if it
    /// is unknown.
    pub(crate) fn others_share_since(self) -> Option<f64> {
        self.others_share_until(&Self::now()?, affinity::allowed_cores().len())
    }

    fn others_share_until(&self, now: &Self, cores: usize) -> Option<f64> {
        let took = now.at - self.at;
        // The kernel's counters may decrease after a core went offline or the host of a virtual
        // machine ran another guest.
        let all_ns = now.all_ns.saturating_sub(self.all_ns);
        let others = all_ns.saturating_sub(now.ours_ns.saturating_sub(self.ours_ns));
        let room = took.as_nanos() as f64 * cores as f64;
        (took >= MIN_INTERVAL).then(|| others as f64 / room)
    }
}

/// Warning for the report.
pub(crate) fn warning(disturbance: Disturbance) -> String {
    match disturbance {
        Disturbance::Busy(share) => format!(
            "Other programs or machines used {:.0} % of the processors meanwhile, so the values say \
             little: close them and run this again.",
            100.0 * share
        ),
        Disturbance::Throttled(share) => format!(
            "A CPU quota throttled this run for up to {:.0} % of the time, so the values say little: \
             raise the quota of the container or cgroup, or run this outside of it.",
            100.0 * share
        ),
    }
}

/// Processor time of all children that have exited, and of their descendants.
fn children_ns(stat: &str) -> Option<u64> {
    // After the process name, which may contain any character: the state, twelve numbers, then the
    // two times.
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
        let before = CpuLoad { at, all_ns: 100, ours_ns: 50 };
        let after = |ms, all_ns: u64, ours_ns: u64| CpuLoad {
            at: at + Duration::from_millis(ms),
            all_ns: 100 + all_ns,
            ours_ns: 50 + ours_ns,
        };
        let second = 1_000_000_000;
        assert_eq!(before.others_share_until(&after(1000, second, second), 2), Some(0.0));
        assert_eq!(before.others_share_until(&after(1000, 2 * second, second), 2), Some(0.5));
        // The kernel counts this process's time more finely than the time of a core.
        assert_eq!(before.others_share_until(&after(1000, second, second + 5), 2), Some(0.0));
        let stepped_back = CpuLoad { all_ns: 10, ..after(1000, 0, 0) };
        assert_eq!(before.others_share_until(&stepped_back, 2), Some(0.0));
        assert_eq!(before.others_share_until(&after(50, second, 0), 2), None, "too short to tell");
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
