//! How long a CPU quota (of a container, of a systemd unit) has stopped the threads of this process.
//!
//! A throttled thread is runnable and does not run, so the kernel counts the time as waiting for a
//! processor. But nobody else has that processor: a machine is not busy because a quota is used up.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The cgroups whose quotas can throttle the calling thread: its own and those above it.
#[derive(Debug, Clone, Default)]
pub struct Quota {
    /// `cpu.stat` of each.
    files: Vec<PathBuf>,
}

impl Quota {
    /// The quotas of the calling thread, and of the threads that it starts.
    pub fn of_this_thread() -> Self {
        let read = |name: &str| fs::read_to_string(format!("/proc/{name}")).unwrap_or_default();
        Self { files: files_of(&read("thread-self/cgroup"), &read("self/mountinfo")) }
    }

    /// How long cores were kept from these cgroups so far, all cores and all cgroups added up. 0 where
    /// there is no quota, or the kernel does not tell.
    pub fn throttled_ns(&self) -> u64 {
        let texts = self.files.iter().filter_map(|file| fs::read_to_string(file).ok());
        texts.filter_map(|text| throttled_in(&text)).sum()
    }

    /// Begins to watch.
    pub fn watch(self) -> Watched {
        Watched { at: Instant::now(), before_ns: self.throttled_ns(), quota: self }
    }
}

/// A time in which quotas are watched.
#[derive(Debug)]
pub struct Watched {
    quota: Quota,
    at: Instant,
    before_ns: u64,
}

impl Watched {
    /// Watches the quotas of the calling thread from now on.
    pub fn begin() -> Self {
        Quota::of_this_thread().watch()
    }

    /// How long cores were kept from this process since then, all cores added up.
    pub fn throttled_ns(&self) -> u64 {
        self.quota.throttled_ns().saturating_sub(self.before_ns)
    }

    /// The largest share of the time in which threads can have been throttled since then. Cores are
    /// throttled at different times or together; the kernel tells only their sum.
    pub fn share(&self) -> f64 {
        share(self.throttled_ns(), self.at.elapsed())
    }
}

fn share(throttled_ns: u64, took: Duration) -> f64 {
    (throttled_ns as f64 / took.as_nanos().max(1) as f64).min(1.0)
}

/// The throttled time in a `cpu.stat`, of version 2 or 1. `None` if it has none: that of a root does not.
fn throttled_in(stat: &str) -> Option<u64> {
    let number = |name: &str| -> Option<u64> {
        stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    };
    number("throttled_usec").map(|us| us.saturating_mul(1000)).or_else(|| number("throttled_time"))
}

/// The `cpu.stat` of a process's cgroup and of all above it that can be seen from here, in the
/// hierarchy of version 2 and in that of version 1 that has the controller of processors.
fn files_of(cgroups: &str, mountinfo: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in cgroups.lines() {
        // number:controllers:path
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let is_v2 = controllers.is_empty();
        if !is_v2 && !controllers.split(',').any(|name| name == "cpu") {
            continue;
        }
        let mounts = mountinfo.lines().filter_map(|line| Mount::read(line, is_v2));
        if let Some(folders) = mounts.filter_map(|mount| mount.folders(path)).next() {
            files.extend(folders.into_iter().map(|folder| folder.join("cpu.stat")));
        }
    }
    files
}

/// Where a hierarchy of cgroups can be seen.
struct Mount<'a> {
    /// The cgroup that is seen at the mount point.
    root: &'a str,
    point: &'a str,
}

impl<'a> Mount<'a> {
    /// A line of `mountinfo`, if it is such a mount.
    fn read(line: &'a str, is_v2: bool) -> Option<Self> {
        // number parent device root point options [tags] - type source options
        let (mount, system) = line.split_once(" - ")?;
        let mut system = system.split(' ');
        let (kind, options) = (system.next()?, system.nth(1)?);
        let is_it = match is_v2 {
            true => kind == "cgroup2",
            false => kind == "cgroup" && options.split(',').any(|name| name == "cpu"),
        };
        let mut mount = mount.split(' ').skip(3);
        is_it.then_some(Self { root: mount.next()?, point: mount.next()? })
    }

    /// The folder of a cgroup and of all above it. `None` if it cannot be seen through this mount.
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
    use crate::contention::Meter;

    fn found(cgroups: &str, mountinfo: &str) -> Vec<String> {
        let files = files_of(cgroups, mountinfo);
        files.into_iter().map(|file| file.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn both_versions_tell_how_long_they_throttled() {
        let v2 = "usage_usec 9\nnr_periods 6\nnr_throttled 5\nthrottled_usec 395\nnr_bursts 0\n";
        assert_eq!(throttled_in(v2), Some(395_000));
        let v1 = "nr_periods 6\nnr_throttled 5\nthrottled_time 395266938\n";
        assert_eq!(throttled_in(v1), Some(395_266_938));
        assert_eq!(throttled_in("usage_usec 9\nuser_usec 1\n"), None);
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

    /// A cgroup of version 1, which a single thread can enter. Goes with its last thread.
    struct Cgroup(PathBuf);

    impl Cgroup {
        /// One whose threads may have a core for a tenth of the time.
        fn with_quota() -> std::io::Result<Self> {
            let own = Quota::of_this_thread().files.into_iter().next().unwrap_or_default();
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
            // A thread that was joined may still be there for a moment.
            let until = Instant::now() + Duration::from_secs(30);
            while fs::remove_dir(&self.0).is_err() && self.0.exists() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    #[test]
    fn a_real_quota_that_throttles_a_thread_is_seen() {
        let cgroup = match Cgroup::with_quota() {
            Ok(cgroup) => cgroup,
            Err(error) => {
                let why = format!("making a cgroup of version 1 with a CPU quota: {error}");
                return skip(Requirement::CpuQuota, why);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                cgroup.enter().unwrap();
                let (meter, watched) = (Meter::default(), Watched::begin());
                let until = Instant::now() + Duration::from_secs(60);
                meter.during(|| {
                    while watched.throttled_ns() == 0 {
                        assert!(Instant::now() < until, "never throttled: {watched:?}");
                    }
                });
                assert!(watched.share() > 0.0);
                // The kernel counts it as waiting: that is what must be left out.
                let (all, others) = (meter.share(0), meter.share(watched.throttled_ns()));
                assert!(all == 0.0 || others < all, "{others} {all}");
            });
        });
    }
}
