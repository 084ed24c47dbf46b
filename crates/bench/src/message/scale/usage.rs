//! What processes use, as the kernel counts it: memory, and processor time.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Memory of one process in MiB, or the mean of several.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct MemoryUsage {
    /// Resident memory, as `top` shows it: shared pages count in every process.
    pub(super) rss: f64,
    /// Resident memory, of which each process of `n` that share a page has one `n`th.
    pub(super) pss: f64,
    /// Resident memory of files, such as the program and its libraries.
    pub(super) of_files: f64,
}

/// Processes below the given ones, and these themselves, that run a program.
pub(super) fn members(roots: &[u32], program: &Path) -> Vec<u32> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for pid in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = pid.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some((pid, parent)) = pid.and_then(|pid| Some((pid, parent_of(pid)?))) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let (mut found, mut left) = (Vec::new(), roots.to_vec());
    while let Some(pid) = left.pop() {
        if fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|file| file == program) {
            found.push(pid);
        }
        left.extend(children.remove(&pid).unwrap_or_default());
    }
    found
}

fn parent_of(pid: u32) -> Option<u32> {
    stat_field(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?, 4)
}

/// A field of `/proc/PID/stat`, numbered as in its manual page. The second one may contain spaces
/// and parentheses.
fn stat_field<T: std::str::FromStr>(stat: &str, number: usize) -> Option<T> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(number - 3)?.parse().ok()
}

/// The mean memory of processes. Those that have exited do not count.
pub(super) fn memory(pids: &[u32]) -> MemoryUsage {
    let of_each: Vec<_> = pids.iter().filter_map(|pid| memory_of(*pid)).collect();
    let count = of_each.len() as f64;
    let mean = |field: fn(&MemoryUsage) -> f64| of_each.iter().map(field).sum::<f64>() / count;
    MemoryUsage { rss: mean(|m| m.rss), pss: mean(|m| m.pss), of_files: mean(|m| m.of_files) }
}

fn memory_of(pid: u32) -> Option<MemoryUsage> {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    Some(MemoryUsage {
        rss: mib(&rollup, "Rss:")?,
        pss: mib(&rollup, "Pss:")?,
        of_files: mib(&status, "RssFile:")?,
    })
}

/// The number of a line in KiB, as MiB.
fn mib(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: f64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib / 1024.0)
}

/// Processor time of processes in nanoseconds, over all their threads.
pub(super) fn cpu_ns(pids: &[u32]) -> f64 {
    pids.iter().map(|pid| by_scheduler(*pid).or_else(|| by_ticks(*pid)).unwrap_or(0.0)).sum()
}

/// The time that the scheduler counts, to the nanosecond.
fn by_scheduler(pid: u32) -> Option<f64> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let of_thread = |thread: fs::DirEntry| -> Option<f64> {
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    threads.flatten().map(of_thread).sum()
}

/// The time in ticks, for kernels without the statistics of the scheduler.
fn by_ticks(pid: u32) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let ticks = stat_field::<f64>(&stat, 14)? + stat_field::<f64>(&stat, 15)?;
    Some(ticks * 1e9 / rustix::param::clock_ticks_per_second() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_found_with_its_memory_and_its_time() {
        let (own, program) = (std::process::id(), std::env::current_exe().unwrap());
        let found = members(&[own], &program);
        assert!(found.contains(&own));
        let usage = memory(&[own]);
        assert!(usage.rss > 0.5 && usage.pss <= usage.rss && usage.of_files < usage.rss);
        let before = cpu_ns(&[own]);
        let mut sum = 0u64;
        while cpu_ns(&[own]) <= before {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(by_ticks(own).is_some());
    }

    #[test]
    fn a_name_with_spaces_and_parentheses_moves_no_field() {
        let stat = "12 (a) b (c)) S 7 12 12 0 -1 0 0 0 0 0 31 32 0";
        assert_eq!(stat_field(stat, 4), Some(7));
        assert_eq!(stat_field(stat, 14), Some(31));
        assert_eq!(stat_field(stat, 15), Some(32));
    }
}
