//! How long a CPU quota (of a container or systemd unit) has stopped the threads of this process.
//!
//! A throttled thread is runnable and does not run, so the kernel counts the time as waiting for a
//! core. But no other program uses that core: an exhausted quota does not mean that the machine is
//! busy.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The cgroups whose quotas can throttle the calling thread: its own and its ancestors.
#[derive(Debug, Clone, Default)]
pub struct CpuQuota {
    /// The `cpu.stat` file of each cgroup.
    files: Vec<PathBuf>,
}

impl CpuQuota {
    /// Finds the quotas of the calling thread, which also apply to threads that it starts.
    pub fn of_this_thread() -> Self {
        let read = |name: &str| fs::read_to_string(format!("/proc/{name}")).unwrap_or_default();
        Self { files: cpu_stat_files(&read("thread-self/cgroup"), &read("self/mountinfo")) }
    }

    /// How long these cgroups have been throttled in total, summed over cores and cgroups, in
    /// nanoseconds. 0 without a quota, or if the kernel does not report it.
    pub fn throttled_ns(&self) -> u64 {
        let texts = self.files.iter().filter_map(|file| fs::read_to_string(file).ok());
        texts.filter_map(|text| parse_throttled_ns(&text)).sum()
    }

    /// Starts a measurement.
    pub fn monitor(self) -> ThrottleMonitor {
        ThrottleMonitor { started: Instant::now(), before_ns: self.throttled_ns(), quota: self }
    }
}

/// A running measurement of throttling.
#[derive(Debug)]
pub struct ThrottleMonitor {
    quota: CpuQuota,
    started: Instant,
    before_ns: u64,
}

impl ThrottleMonitor {
    /// Starts a measurement for the calling thread.
    pub fn start() -> Self {
        CpuQuota::of_this_thread().monitor()
    }

    /// How long this process has been throttled since the start, summed over cores, in nanoseconds.
    pub fn throttled_ns(&self) -> u64 {
        self.quota.throttled_ns().saturating_sub(self.before_ns)
    }

    /// Upper bound on the share of the time since the start in which threads were throttled. The
    /// kernel reports only the sum over cores, not whether they were throttled at the same time.
    pub fn share(&self) -> f64 {
        share(self.throttled_ns(), self.started.elapsed())
    }
}

fn share(throttled_ns: u64, took: Duration) -> f64 {
    (throttled_ns as f64 / took.as_nanos().max(1) as f64).min(1.0)
}

/// Parses the throttled time of a `cpu.stat`, of cgroup version 2 or 1. `None` if it has none, as
/// that of a root cgroup.
fn parse_throttled_ns(stat: &str) -> Option<u64> {
    let number = |name: &str| -> Option<u64> {
        stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    };
    number("throttled_usec").map(|us| us.saturating_mul(1000)).or_else(|| number("throttled_time"))
}

/// The `cpu.stat` files of a process's cgroup and of its visible ancestors, in the hierarchy of
/// version 2 and in the version 1 hierarchy with the `cpu` controller.
fn cpu_stat_files(cgroups: &str, mountinfo: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in cgroups.lines() {
        // number:controllers:path
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let is_v2 = controllers.is_empty();
        if !is_v2 && !controllers.split(',').any(|name| name == "cpu") {
            continue;
        }
        let mounts = mountinfo.lines().filter_map(|line| CgroupMount::read(line, is_v2));
        if let Some(folders) = mounts.filter_map(|mount| mount.folders(path)).next() {
            files.extend(folders.into_iter().map(|folder| folder.join("cpu.stat")));
        }
    }
    files
}

/// A mount of a cgroup hierarchy.
struct CgroupMount<'a> {
    /// The cgroup at the mount point.
    root: &'a str,
    point: &'a str,
}

impl<'a> CgroupMount<'a> {
    /// Parses a line of `mountinfo`; `None` if it is another kind of mount.
    fn read(line: &'a str, is_v2: bool) -> Option<Self> {
        // number parent device root point options [tags] - type source options
        let (mount, system) = line.split_once(" - ")?;
        let mut system = system.split(' ');
        let (kind, options) = (system.next()?, system.nth(1)?);
        let matches = match is_v2 {
            true => kind == "cgroup2",
            false => kind == "cgroup" && options.split(',').any(|name| name == "cpu"),
        };
        let mut mount = mount.split(' ').skip(3);
        matches.then_some(Self { root: mount.next()?, point: mount.next()? })
    }

    /// The directory of a cgroup and those of its ancestors. `None` if this mount does not show it.
    fn folders(&self, cgroup: &str) -> Option<Vec<PathBuf>> {
        let below = Path::new(cgroup).strip_prefix(self.root).ok()?;
        let is_plain = below.components().all(|part| part.as_os_str() != "..");
        is_plain.then(|| below.ancestors().map(|part| Path::new(self.point).join(part)).collect())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use memferry_testing::{Requirement, skip};

    use super::*;
    use crate::contention::ContentionMeter;

    fn found(cgroups: &str, mountinfo: &str) -> Vec<String> {
        let files = cpu_stat_files(cgroups, mountinfo);
        files.into_iter().map(|file| file.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn both_versions_tell_how_long_they_throttled() {
        let v2 = "usage_usec 9\nnr_periods 6\nnr_throttled 5\nthrottled_usec 395\nnr_bursts 0\n";
        assert_eq!(parse_throttled_ns(v2), Some(395_000));
        let v1 = "nr_periods 6\nnr_throttled 5\nthrottled_time 395266938\n";
        assert_eq!(parse_throttled_ns(v1), Some(395_266_938));
        assert_eq!(parse_throttled_ns("usage_usec 9\nuser_usec 1\n"), None);
    }

    #[test]
    fn cores_that_are_throttled_together_are_not_more_than_all_of_the_time() {
        assert_eq!(share(0, Duration::from_secs(1)), 0.0);
        assert_eq!(share(250_000_000, Duration::from_secs(1)), 0.25);
        assert_eq!(share(9_000_000_000, Duration::from_secs(1)), 1.0);
    }

    #[test]
    fn the_quotas_above_a_cgroup_count_too() {
        let mounts = "30 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
        let files = found("0::/work.slice/job.service\n", mounts);
        let folders = ["/work.slice/job.service", "/work.slice", ""];
        assert_eq!(files, folders.map(|folder| format!("/sys/fs/cgroup{folder}/cpu.stat")));
    }

    #[test]
    fn a_container_sees_its_own_cgroup_at_the_mount_point() {
        let v1 = "33 31 0:30 /docker/77ab /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n\
                  34 31 0:31 /docker/77ab /sys/fs/cgroup/cpuset ro - cgroup cgroup rw,cpuset\n";
        let cgroups = "5:cpuset:/docker/77ab\n4:cpu,cpuacct:/docker/77ab\n0::/\n";
        assert_eq!(found(cgroups, v1), ["/sys/fs/cgroup/cpu,cpuacct/cpu.stat"]);
        let v2 = "30 23 0:28 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        assert_eq!(found("0::/\n", v2), ["/sys/fs/cgroup/cpu.stat"]);
    }

    #[test]
    fn a_cgroup_that_cannot_be_seen_is_left_alone() {
        let mounts = "30 23 0:28 /other /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert!(found("0::/mine\n", mounts).is_empty());
        let mounts = "30 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert!(found("0::/../elsewhere\n", mounts).is_empty());
        assert!(found("0::/mine\n", "").is_empty());
        assert!(found("", mounts).is_empty());
    }

    /// A cgroup of version 1, which a single thread can enter. Removed after its last thread.
    struct Cgroup(PathBuf);

    impl Cgroup {
        /// Creates a cgroup whose threads may use 10 ms of CPU time per 100 ms.
        fn with_quota() -> std::io::Result<Self> {
            let own = CpuQuota::of_this_thread().files.into_iter().next().unwrap_or_default();
            let name = format!("memferry-test-{}", std::process::id());
            let cgroup = Self(own.with_file_name(name));
            fs::create_dir(&cgroup.0)?;
            fs::write(cgroup.0.join("cpu.cfs_period_us"), "100000")?;
            fs::write(cgroup.0.join("cpu.cfs_quota_us"), "10000")?;
            Ok(cgroup)
        }

        fn enter(&self) -> std::io::Result<()> {
            fs::write(self.0.join("tasks"), "0")
        }
    }

    impl Drop for Cgroup {
        fn drop(&mut self) {
            // A joined thread may stay in the cgroup for a short time.
            let deadline = Instant::now() + Duration::from_secs(30);
            while fs::remove_dir(&self.0).is_err() && self.0.exists() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    #[test]
    fn a_real_quota_that_throttles_a_thread_is_seen() {
        let cgroup = match Cgroup::with_quota() {
            Ok(cgroup) => cgroup,
            Err(error) => {
                let why = format!("creating a cgroup of version 1 with a CPU quota: {error}");
                return skip(Requirement::CpuQuota, why);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                cgroup.enter().unwrap();
                let (meter, throttle) = (ContentionMeter::default(), ThrottleMonitor::start());
                let deadline = Instant::now() + Duration::from_secs(60);
                meter.measure(|| {
                    while throttle.throttled_ns() == 0 {
                        assert!(Instant::now() < deadline, "never throttled: {throttle:?}");
                    }
                });
                assert!(throttle.share() > 0.0);
                // The kernel counts throttling as waiting, and `share` must subtract it.
                let (all, others) = (meter.share(0), meter.share(throttle.throttled_ns()));
                assert!(all == 0.0 || others < all, "{others} {all}");
            });
        });
    }
}
