//! How long threads wanted to run while others had their processors. What was measured meanwhile says
//! more about the others than about the machine.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::affinity;

/// The unit in which the kernel counts processor time.
const NS_PER_TICK: u64 = 10_000_000;

/// Adds up how long threads waited for a processor, and for how long they were looked at.
#[derive(Debug, Default)]
pub struct Meter {
    waited_ns: AtomicU64,
    watched_ns: AtomicU64,
}

impl Meter {
    /// Does something, and counts how long the calling thread had to wait meanwhile.
    pub fn during<T>(&self, act: impl FnOnce() -> T) -> T {
        let (began, before) = (Instant::now(), own_waited_ns());
        let done = act();
        if let Some((before, now)) = before.zip(own_waited_ns()) {
            self.add(now.saturating_sub(before), began.elapsed().as_nanos() as u64);
        }
        done
    }

    /// Does something that starts threads, and counts how long those that are still there afterwards
    /// had to wait meanwhile.
    pub fn during_with_threads<T>(&self, act: impl FnOnce() -> T) -> T {
        let (began, known) = (Instant::now(), threads());
        let done = self.during(act);
        let watched_ns = began.elapsed().as_nanos() as u64;
        for thread in threads().iter().filter(|thread| !known.contains(thread)) {
            if let Some(waited) = waited_ns(&format!("self/task/{thread}")) {
                self.add(waited, watched_ns);
            }
        }
        done
    }

    /// Counts what was found out in another way.
    pub fn add(&self, waited_ns: u64, watched_ns: u64) {
        self.waited_ns.fetch_add(waited_ns, Ordering::Relaxed);
        self.watched_ns.fetch_add(watched_ns, Ordering::Relaxed);
    }

    /// The share of the time for which threads waited because others had the processors; 0 where the
    /// kernel does not tell. `throttled_ns` is how long a CPU quota kept processors from them meanwhile
    /// ([`crate::throttle`]): the kernel counts that as waiting too, and nobody had those processors.
    pub fn share(&self, throttled_ns: u64) -> f64 {
        let of_others = |ns: &AtomicU64| ns.load(Ordering::Relaxed).saturating_sub(throttled_ns);
        of_others(&self.waited_ns) as f64 / of_others(&self.watched_ns).max(1) as f64
    }
}

/// How long the calling thread has waited for a processor in all; `None` where the kernel does not tell.
pub fn own_waited_ns() -> Option<u64> {
    waited_ns("thread-self")
}

/// How long a thread has waited in all, by its folder in `/proc`.
fn waited_ns(folder: &str) -> Option<u64> {
    waited_in(&fs::read_to_string(format!("/proc/{folder}/schedstat")).ok()?)
}

/// Three numbers: time on a processor, time in the queue before one, turns.
fn waited_in(schedstat: &str) -> Option<u64> {
    schedstat.split_whitespace().nth(1)?.parse().ok()
}

/// The numbers of this process's threads.
fn threads() -> Vec<String> {
    let folder = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    folder.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// What all processors of the machine were used for so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processors {
    /// Anything but idling, by this machine or by others on the same hardware.
    pub busy_ns: u64,
    /// By other virtual machines on the same hardware.
    pub stolen_ns: u64,
}

impl Processors {
    /// As the kernel tells it, in steps of ten milliseconds.
    pub fn now() -> Option<Self> {
        Self::read(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// The same for some cores only; `None` if the kernel does not tell of one of them.
    pub fn of_cores(cores: &[usize]) -> Option<Self> {
        Self::read_cores(&fs::read_to_string("/proc/stat").ok()?, cores)
    }

    /// The share of all cores that other virtual machines had in between; 0 where nothing is known.
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
        let busy = [0, 1, 2, 5, 6, 7].iter().filter_map(|&at| ticks.get(at)).sum::<u64>();
        let stolen = ticks.get(7).copied().unwrap_or(0);
        Some(Self { busy_ns: busy * NS_PER_TICK, stolen_ns: stolen * NS_PER_TICK })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn time_in_the_queue_is_the_second_number() {
        assert_eq!(waited_in("123456 789 12\n"), Some(789));
        assert_eq!(waited_in(""), None);
    }

    #[test]
    fn shares_are_of_all_threads_that_were_watched() {
        let meter = Meter::default();
        assert_eq!(meter.share(0), 0.0);
        meter.add(0, 1_000_000);
        meter.add(500_000, 1_000_000);
        assert_eq!(meter.share(0), 0.25);
    }

    #[test]
    fn time_in_which_a_quota_throttled_is_nobody_elses() {
        let meter = Meter::default();
        meter.add(600_000, 1_000_000);
        assert_eq!(meter.share(500_000), 0.2);
        assert_eq!(meter.share(600_000), 0.0);
        // Others in the same cgroup were throttled too.
        assert_eq!(meter.share(5_000_000), 0.0);
    }

    #[test]
    fn the_threads_that_were_started_are_watched_too() {
        let meter = Meter::default();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let thread = meter.during_with_threads(|| std::thread::spawn(move || stopped.recv()));
        let both = meter.watched_ns.load(Ordering::Relaxed);
        let own = Meter::default();
        own.during(|| ());
        // A kernel without the numbers tells nothing at all.
        assert!(both > 0 || own.watched_ns.load(Ordering::Relaxed) == 0);
        drop(stop);
        let _ = thread.join();
    }

    #[test]
    fn time_that_other_machines_stole_counts_for_all_cores() {
        let at = |stolen_ns| Some(Processors { busy_ns: stolen_ns, stolen_ns });
        let took = Duration::from_millis(100);
        let all_ns = took.as_nanos() as u64 * affinity::online_cores() as u64;
        assert_eq!(Processors::stolen_share(at(7), at(7 + all_ns / 2), took), 0.5);
        assert_eq!(Processors::stolen_share(at(7), at(7), took), 0.0);
        assert_eq!(Processors::stolen_share(None, at(7), took), 0.0);
    }

    #[test]
    fn idle_time_is_not_counted() {
        let read = Processors::read("cpu  1 2 3 400 500 6 7 8 0 0\ncpu0 9\n");
        let expected = Processors { busy_ns: 27 * NS_PER_TICK, stolen_ns: 8 * NS_PER_TICK };
        assert_eq!(read, Some(expected));
        assert_eq!(Processors::read("intr 5"), None);
    }

    #[test]
    fn cores_that_are_not_asked_for_are_not_counted() {
        let stat = "cpu  9 9 9 9\ncpu1 1 0 0 5 0 0 0 2\ncpu10 4 0 0 5\ncpu11 100\n";
        let expected = Processors { busy_ns: 7 * NS_PER_TICK, stolen_ns: 2 * NS_PER_TICK };
        assert_eq!(Processors::read_cores(stat, &[1, 10]), Some(expected));
        assert_eq!(Processors::read_cores(stat, &[1, 2]), None);
    }
}
