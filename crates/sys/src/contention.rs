//! How long threads were runnable while other programs used their cores. A measurement made during
//! that time describes the other programs more than the machine.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::affinity;

/// The unit of `/proc/stat`: 10 ms, in nanoseconds.
const NS_PER_TICK: u64 = 10_000_000;

/// Adds up how long threads waited for a core, and how long they were observed.
#[derive(Debug, Default)]
pub struct ContentionMeter {
    waited_ns: AtomicU64,
    observed_ns: AtomicU64,
}

impl ContentionMeter {
    /// Runs `act`, and adds the time that the calling thread waited for a core.
    pub fn measure<T>(&self, act: impl FnOnce() -> T) -> T {
        let (start, before) = (Instant::now(), own_waited_ns());
        let result = act();
        if let Some((before, now)) = before.zip(own_waited_ns()) {
            self.add(now.saturating_sub(before), start.elapsed().as_nanos() as u64);
        }
        result
    }

    /// Runs `act`, which starts threads, and adds the time that the calling thread and those of the
    /// new threads that still exist afterwards waited for a core.
    pub fn measure_with_threads<T>(&self, act: impl FnOnce() -> T) -> T {
        let (start, before) = (Instant::now(), threads());
        let result = self.measure(act);
        let observed_ns = start.elapsed().as_nanos() as u64;
        for thread in threads().iter().filter(|thread| !before.contains(thread)) {
            if let Some(waited) = waited_ns(&format!("self/task/{thread}")) {
                self.add(waited, observed_ns);
            }
        }
        result
    }

    /// Adds times that were measured by other means.
    pub fn add(&self, waited_ns: u64, observed_ns: u64) {
        self.waited_ns.fetch_add(waited_ns, Ordering::Relaxed);
        self.observed_ns.fetch_add(observed_ns, Ordering::Relaxed);
    }

    /// The share of the observed time that threads waited because other programs used the cores; 0
    /// if the kernel does not report it. `throttled_ns` is how long a CPU quota stopped the threads
    /// ([`crate::throttle`]): the kernel counts that as waiting too, but no other program used the
    /// cores.
    pub fn share(&self, throttled_ns: u64) -> f64 {
        let of_others = |ns: &AtomicU64| ns.load(Ordering::Relaxed).saturating_sub(throttled_ns);
        of_others(&self.waited_ns) as f64 / of_others(&self.observed_ns).max(1) as f64
    }
}

/// How long the calling thread has waited for a core since it started; `None` if the kernel does
/// not report it.
pub fn own_waited_ns() -> Option<u64> {
    waited_ns("thread-self")
}

/// How long a thread has waited since it started, by its folder in `/proc`.
fn waited_ns(folder: &str) -> Option<u64> {
    parse_waited_ns(&fs::read_to_string(format!("/proc/{folder}/schedstat")).ok()?)
}

/// Parses the second of three numbers: time on a core, time in the run queue, number of time
/// slices.
fn parse_waited_ns(schedstat: &str) -> Option<u64> {
    schedstat.split_whitespace().nth(1)?.parse().ok()
}

/// The ids of this process's threads.
fn threads() -> Vec<String> {
    let folder = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    folder.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Accumulated use of cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuTimes {
    /// Time not idle, including time stolen by other virtual machines.
    pub busy_ns: u64,
    /// Time that other virtual machines on the same hardware used.
    pub stolen_ns: u64,
}

impl CpuTimes {
    /// Reads the use of all cores, in steps of 10 ms.
    pub fn now() -> Option<Self> {
        Self::read(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// Reads the use of some cores; `None` if the kernel does not report one of them.
    pub fn of_cores(cores: &[usize]) -> Option<Self> {
        Self::read_cores(&fs::read_to_string("/proc/stat").ok()?, cores)
    }

    /// The share of all cores that other virtual machines used between two readings; 0 if unknown.
    pub fn stolen_share(before: Option<Self>, after: Option<Self>, took: Duration) -> f64 {
        let Some((before, after)) = before.zip(after) else { return 0.0 };
        let stolen = after.stolen_ns.saturating_sub(before.stolen_ns) as f64;
        stolen / (took.as_nanos().max(1) as f64 * affinity::online_cores() as f64)
    }

    fn read(stat: &str) -> Option<Self> {
        Self::read_line(stat, "cpu ")
    }

    fn read_cores(stat: &str, cores: &[usize]) -> Option<Self> {
        cores.iter().try_fold(Self { busy_ns: 0, stolen_ns: 0 }, |all, core| {
            let one = Self::read_line(stat, &format!("cpu{core} "))?;
            let (busy_ns, stolen_ns) = (all.busy_ns + one.busy_ns, all.stolen_ns + one.stolen_ns);
            Some(Self { busy_ns, stolen_ns })
        })
    }

    fn read_line(stat: &str, name: &str) -> Option<Self> {
        let ticks = stat.lines().find_map(|line| line.strip_prefix(name))?;
        let ticks: Vec<u64> =
            ticks.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        // user nice system idle iowait irq softirq steal
        let busy = [0, 1, 2, 5, 6, 7].iter().filter_map(|&index| ticks.get(index)).sum::<u64>();
        let stolen = ticks.get(7).copied().unwrap_or(0);
        Some(Self { busy_ns: busy * NS_PER_TICK, stolen_ns: stolen * NS_PER_TICK })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn time_in_the_queue_is_the_second_number() {
        assert_eq!(parse_waited_ns("123456 789 12\n"), Some(789));
        assert_eq!(parse_waited_ns(""), None);
    }

    #[test]
    fn shares_are_of_all_threads_that_were_watched() {
        let meter = ContentionMeter::default();
        assert_eq!(meter.share(0), 0.0);
        meter.add(0, 1_000_000);
        meter.add(500_000, 1_000_000);
        assert_eq!(meter.share(0), 0.25);
    }

    #[test]
    fn time_in_which_a_quota_throttled_is_nobody_elses() {
        let meter = ContentionMeter::default();
        meter.add(600_000, 1_000_000);
        assert_eq!(meter.share(500_000), 0.2);
        assert_eq!(meter.share(600_000), 0.0);
        // Other processes in the same cgroup were throttled too.
        assert_eq!(meter.share(5_000_000), 0.0);
    }

    #[test]
    fn the_threads_that_were_started_are_watched_too() {
        let meter = ContentionMeter::default();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let thread = meter.measure_with_threads(|| std::thread::spawn(move || stopped.recv()));
        let both = meter.observed_ns.load(Ordering::Relaxed);
        let own = ContentionMeter::default();
        own.measure(|| ());
        // A kernel without `schedstat` reports nothing.
        assert!(both > 0 || own.observed_ns.load(Ordering::Relaxed) == 0);
        drop(stop);
        let _ = thread.join();
    }

    #[test]
    fn time_that_other_machines_stole_counts_for_all_cores() {
        let times = |stolen_ns| Some(CpuTimes { busy_ns: stolen_ns, stolen_ns });
        let took = Duration::from_millis(100);
        let all_ns = took.as_nanos() as u64 * affinity::online_cores() as u64;
        assert_eq!(CpuTimes::stolen_share(times(7), times(7 + all_ns / 2), took), 0.5);
        assert_eq!(CpuTimes::stolen_share(times(7), times(7), took), 0.0);
        assert_eq!(CpuTimes::stolen_share(None, times(7), took), 0.0);
    }

    #[test]
    fn idle_time_is_not_counted() {
        let read = CpuTimes::read("cpu  1 2 3 400 500 6 7 8 0 0\ncpu0 9\n");
        let expected = CpuTimes { busy_ns: 27 * NS_PER_TICK, stolen_ns: 8 * NS_PER_TICK };
        assert_eq!(read, Some(expected));
        assert_eq!(CpuTimes::read("intr 5"), None);
    }

    #[test]
    fn cores_that_are_not_asked_for_are_not_counted() {
        let stat = "cpu  9 9 9 9\ncpu1 1 0 0 5 0 0 0 2\ncpu10 4 0 0 5\ncpu11 100\n";
        let expected = CpuTimes { busy_ns: 7 * NS_PER_TICK, stolen_ns: 2 * NS_PER_TICK };
        assert_eq!(CpuTimes::read_cores(stat, &[1, 10]), Some(expected));
        assert_eq!(CpuTimes::read_cores(stat, &[1, 2]), None);
    }
}
