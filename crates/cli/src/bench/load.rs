//! Whether others used the processors while a bench ran: then its numbers say little, and the
//! reader must know.

use std::time::{Duration, Instant};

use memferry::sys::{affinity, clock};

/// The unit in which the kernel counts processor time.
const NS_PER_TICK: u64 = 10_000_000;
/// In a shorter time a few of these units are everything that there is.
const SHORTEST: Duration = Duration::from_millis(200);

/// What the machine and this process, with the processes it had started, had used at one moment.
pub(super) struct Load {
    at: Instant,
    all_ns: u64,
    ours_ns: u64,
}

impl Load {
    /// The load up to now; `None` where the kernel does not tell.
    pub(super) fn now() -> Option<Self> {
        let all_ns = busy_ns(&std::fs::read_to_string("/proc/stat").ok()?)?;
        let children_ns = children_ns(&std::fs::read_to_string("/proc/self/stat").ok()?)?;
        Some(Self { at: Instant::now(), all_ns, ours_ns: clock::process_cpu_ns() + children_ns })
    }

    /// A sentence if others used much of the machine since then.
    pub(super) fn disturbance(self) -> Option<String> {
        let now = Self::now()?;
        if now.at - self.at < SHORTEST {
            return None;
        }
        let others = (now.all_ns - self.all_ns).saturating_sub(now.ours_ns - self.ours_ns);
        let cores = affinity::allowed_cores().len() as f64;
        let room = self.at.elapsed().as_nanos() as f64 * cores;
        warning(others as f64 / room)
    }
}

fn warning(share: f64) -> Option<String> {
    const MUCH: f64 = 0.1;
    (share > MUCH).then(|| {
        format!(
            "Other programs or machines used {:.0} % of the processors meanwhile: close them and \
             run this again before you believe the numbers.",
            100.0 * share
        )
    })
}

/// Time of all processes that were started here and have ended, and of those that they started.
fn children_ns(stat: &str) -> Option<u64> {
    // Behind the name, which may contain anything: state and twelve numbers, then the two.
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks = fields.split_whitespace().skip(13).take(2).map(|word| word.parse::<u64>().ok());
    Some(ticks.sum::<Option<u64>>()? * NS_PER_TICK)
}

/// Time that all processors have spent on anything but idling, stolen time included.
fn busy_ns(stat: &str) -> Option<u64> {
    let ticks = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<u64> = ticks.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal
    let busy = [0, 1, 2, 5, 6, 7].iter().filter_map(|&at| ticks.get(at)).sum::<u64>();
    Some(busy * NS_PER_TICK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_not_counted() {
        assert_eq!(busy_ns("cpu  1 2 3 400 500 6 7 8 0 0\ncpu0 9\n"), Some(27 * 10_000_000));
        assert_eq!(busy_ns("intr 5"), None);
    }

    #[test]
    fn the_time_of_ended_children_is_found_behind_any_name() {
        let stat = "7 (a) b) S 1 7 7 0 -1 0 1 2 3 4 50 60 70 80 20 0 1 0 99";
        assert_eq!(children_ns(stat), Some(150 * 10_000_000));
        assert_eq!(children_ns("7 (a"), None);
    }

    #[test]
    fn a_quiet_machine_gives_no_warning() {
        assert_eq!(warning(0.03), None);
        assert!(warning(0.4).unwrap().contains("40 %"));
    }
}
