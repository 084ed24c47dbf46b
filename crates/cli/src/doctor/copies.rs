//! Checks of what copies require of a machine.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use memferry::engine::cpu::{CpuProfile, ProfileError, ProfileOrigin, ProfileSource};
use memferry::engine::runtime::profile_store::{StoredProfile, default_path};
use memferry::{BuildError, Ferry};
use memferry_bench::host::machine::{Machine, memory_bytes};
use memferry_bench::results::size;
use memferry_sys::EventFd;
use memferry_sys::settings;
use rustix::thread::{MembarrierCommand, membarrier_query};

use super::{Check, DO_AS_SAID, Need, Status};

const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

pub(super) const PROFILE: &str = "profile";
pub(super) const A_COPY: &str = "a copy";

/// All checks, in the order of display. `remeasured` is the result of a new measurement, if one was
/// requested.
pub(super) fn checks(machine: &Machine, remeasured: Option<&ProfileOrigin>) -> Vec<Check> {
    vec![
        cores(machine.cores, online_cores().as_deref()),
        streaming(&machine.streaming),
        huge_pages(fs::read_to_string(HUGE_PAGES).ok().as_deref()),
        memory(memory_bytes("MemAvailable")),
        membarrier(membarrier_query().contains_command(MembarrierCommand::PrivateExpedited)),
        eventfd(EventFd::new().map(drop)),
        profile(CpuProfile::load(&ProfileSource::Automatic), remeasured),
        a_copy(Ferry::new()),
    ]
}

fn cores(usable: usize, online: Option<&str>) -> Check {
    const NAME: &str = "cores";
    let total = online.and_then(count_cores).unwrap_or(usable);
    let (status, detail) = match usable {
        0 | 1 => (
            Status::Warn,
            "1 core: a channel shares it with the program, so copies cannot overlap work"
                .to_owned(),
        ),
        2 => (Status::Ok, "2 cores: one channel runs beside the program".to_owned()),
        many => (
            Status::Ok,
            format!("{many} cores: up to {} channels run beside the program", many - 1),
        ),
    };
    if let Some(online) = online.filter(|_| usable < total) {
        let detail = format!("{detail}; {total} are online, this process may not use them all");
        return Check::new(NAME, Status::Warn, detail)
            .fix(format!("taskset --cpu-list {} memferry doctor", online.trim()));
    }
    let check = Check::new(NAME, status, detail);
    if usable > 1 {
        return check;
    }
    check.fix("give the machine or the container a second core (docker run --cpuset-cpus 0-1)")
}

fn streaming(kernels: &[String]) -> Check {
    const NAME: &str = "streaming stores";
    let best = kernels.first().map_or("plain", String::as_str);
    let all = kernels.join(", ");
    match best {
        "movdir64b" => {
            Check::new(NAME, Status::Ok, format!("{all}: large copies can go around the caches"))
        }
        "plain" => Check::new(
            NAME,
            Status::Missing,
            "none: every copy goes through the caches on this processor",
        )
        .need(Need::OptionalHardware),
        _ => Check::new(NAME, Status::Warn, format!("{all}: no 64-byte direct stores (movdir64b)"))
            .fix("in a virtual machine, pass the host's processor through (qemu: -cpu host)"),
    }
}

pub(super) fn huge_pages(setting: Option<&str>) -> Check {
    const NAME: &str = "huge pages";
    match setting.and_then(selected_setting) {
        Some(word @ ("always" | "madvise")) => Check::new(
            NAME,
            Status::Ok,
            format!("{word}: buffers of Memferry get 2 MiB pages when they ask for them"),
        ),
        Some(word) => Check::new(
            NAME,
            Status::Warn,
            format!("{word}: first touch of fresh memory costs more than it must"),
        )
        .fix(format!("echo madvise | sudo tee {HUGE_PAGES}")),
        None => Check::new(NAME, Status::Missing, "the kernel does not offer them")
            .fix("run a kernel built with CONFIG_TRANSPARENT_HUGEPAGE=y"),
    }
}

fn memory(available: Option<u64>) -> Check {
    const NAME: &str = "free memory";
    // Two buffers of the largest benched size, and the same amount again to evict them from the
    // caches.
    const MIN_FREE_BYTES: u64 = 1 << 30;
    match available {
        None => Check::new(NAME, Status::Warn, "/proc/meminfo does not tell"),
        Some(bytes) if bytes < MIN_FREE_BYTES => {
            let detail = format!("{}: the largest benches need 1 GiB", size::format(bytes));
            Check::new(NAME, Status::Warn, detail)
                .fix("close other programs, or bench with --quick")
        }
        Some(bytes) => Check::new(NAME, Status::Ok, size::format(bytes)),
    }
}

pub(super) fn membarrier(available: bool) -> Check {
    const NAME: &str = "membarrier";
    if available {
        return Check::new(NAME, Status::Ok, "submitting a copy needs no fence");
    }
    Check::new(NAME, Status::Missing, "every submission pays for a full fence instead")
        .fix("run Linux 4.14 or later, with a seccomp filter that allows membarrier")
}

fn eventfd(made: std::io::Result<()>) -> Check {
    const NAME: &str = "eventfd";
    match made {
        Ok(()) => Check::new(NAME, Status::Ok, "event loops can wait for copies"),
        Err(error) => Check::new(
            NAME,
            Status::Missing,
            format!("event loops cannot wait for copies: {error}"),
        )
        .fix("raise the limit of open files (ulimit -n 4096), or allow eventfd2 in seccomp"),
    }
}

/// The check of values that this run measured. It passes if the values are saved for later runs.
pub(super) fn measured_now<S: StoredProfile>(name: &'static str, detail: &str) -> Check {
    let place = default_path::<S>();
    let is_saved = place.as_ref().is_some_and(|path| path.exists());
    let named = settings::value_of("MEMFERRY_PROFILE");
    if let Some(folder) = named.as_ref().and_then(|file| missing_parent(Path::new(file))) {
        let detail = format!(
            "{detail}, and by every other process: MEMFERRY_PROFILE names a folder that does not \
             exist"
        );
        return Check::new(name, Status::Warn, detail)
            .fix(format!("mkdir -p {}", folder.display()));
    }
    if is_saved || named.is_some() {
        return Check::new(name, Status::Ok, detail);
    }
    let reason = match place {
        Some(path) => format!("{} cannot be written", path.display()),
        None => "neither XDG_CACHE_HOME nor HOME names a folder".to_owned(),
    };
    let detail = format!("{detail}, and by every other process: {reason}");
    Check::new(name, Status::Warn, detail)
        .fix("let MEMFERRY_PROFILE name a file that can be written, or XDG_CACHE_HOME a folder")
}

/// The folder of a file, if that folder does not exist.
fn missing_parent(file: &Path) -> Option<&Path> {
    file.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir())
}

/// The check of values that were measured and not saved. Previously saved values, if any, stay in
/// use.
pub(super) fn not_saved(name: &'static str, why: &str, saved: Option<&Path>) -> Check {
    let used = match saved {
        Some(path) => format!("the values in {} stay in use", path.display()),
        None => "built-in values are in use".into(),
    };
    let detail = format!("measured and not kept, because {why}; {used}");
    Check::new(name, Status::Warn, detail).fix("memferry doctor --measure, when nothing else runs")
}

fn profile(
    loaded: Result<Arc<CpuProfile>, ProfileError>,
    remeasured: Option<&ProfileOrigin>,
) -> Check {
    const NAME: &str = PROFILE;
    match loaded {
        Err(error) => Check::new(NAME, Status::Missing, error.to_string())
            .fix("unset MEMFERRY_PROFILE, or let it name another file"),
        Ok(profile) => {
            let kernel = profile.streaming.name();
            match &profile.origin {
                ProfileOrigin::Saved(path) => {
                    if let Some(ProfileOrigin::Rejected(why)) = remeasured {
                        return not_saved(NAME, why, Some(path));
                    }
                    Check::new(NAME, Status::Ok, format!("{kernel}, saved in {}", path.display()))
                }
                ProfileOrigin::Measured => {
                    measured_now::<CpuProfile>(NAME, &format!("{kernel}, measured by this run"))
                }
                ProfileOrigin::BuiltIn => {
                    let detail = "built-in values: this machine was not measured";
                    Check::new(NAME, Status::Warn, detail).fix("unset MEMFERRY_PROFILE")
                }
                ProfileOrigin::Rejected(why) => not_saved(NAME, why, None),
            }
        }
    }
}

/// The check that copies 4 MiB through a channel and compares every byte.
fn a_copy(ferry: Result<Ferry, BuildError>) -> Check {
    const NAME: &str = A_COPY;
    const BYTES: usize = 4 << 20;
    let ferry = match ferry {
        Ok(ferry) => ferry,
        Err(error) => {
            let fix = match &error {
                BuildError::Environment { name, .. } => format!("correct or unset {name}"),
                _ => DO_AS_SAID.to_owned(),
            };
            let with_causes = format!("{:#}", anyhow::Error::from(error));
            return Check::new(NAME, Status::Missing, with_causes).fix(fix);
        }
    };
    let source: Vec<u8> = (0..BYTES).map(|at| (at ^ (at >> 8)) as u8).collect();
    let copied = ferry.icopy(source, vec![0; BYTES]);
    match copied.and_then(memferry::OwnedTransfer::wait) {
        Ok((source, target)) if source == target => {
            // The check names the engine that copied the most bytes.
            let statistics = ferry.statistics();
            let moved = |index: &usize| -> u64 {
                statistics.engines[*index].1.iter().map(|channel| channel.bytes).sum()
            };
            let engines = &ferry.plan_context().engines;
            let engine = (0..engines.len()).rev().max_by_key(moved).unwrap_or(0);
            let engine = &engines[engine];
            let detail = format!(
                "{} through engine {} with {} channel(s), policy {}",
                size::format(BYTES as u64),
                engine.name,
                engine.channels,
                ferry.policy().name()
            );
            Check::new(NAME, Status::Ok, detail.clone()).summary(detail)
        }
        Ok(_) => Check::new(NAME, Status::Missing, "arrived with wrong bytes")
            .fix("test the memory of this machine, then report this"),
        Err(failed) => Check::new(NAME, Status::Missing, failed.to_string()),
    }
}

/// The selected value of a kernel setting, which the kernel marks by brackets: `always [madvise]
/// never`.
pub(super) fn selected_setting(setting: &str) -> Option<&str> {
    Some(setting.split_once('[')?.1.split_once(']')?.0)
}

/// The online cores in the kernel's list format: `0-3,8`.
fn online_cores() -> Option<String> {
    fs::read_to_string("/sys/devices/system/cpu/online").ok()
}

fn count_cores(list: &str) -> Option<usize> {
    let ranges = list.trim().split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        Some(last.checked_sub(first)? + 1)
    });
    ranges.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cure_for_huge_pages_is_a_command() {
        let never = huge_pages(Some("always madvise [never]\n"));
        assert_eq!(never.status, Status::Warn);
        assert_eq!(never.fix.unwrap(), format!("echo madvise | sudo tee {HUGE_PAGES}"));
        assert_eq!(huge_pages(Some("always [madvise] never\n")).status, Status::Ok);
        assert_eq!(huge_pages(None).status, Status::Missing);
    }

    #[test]
    fn cores_that_may_not_be_used_are_noticed() {
        let check = cores(2, Some("0-3,8\n"));
        assert_eq!(check.status, Status::Warn);
        assert_eq!(check.fix.unwrap(), "taskset --cpu-list 0-3,8 memferry doctor");
        assert_eq!(cores(4, Some("0-3\n")).status, Status::Ok);
        assert_eq!(cores(1, None).status, Status::Warn);
    }

    #[test]
    fn a_ferry_that_cannot_be_built_is_reported_with_its_reason() {
        let check = a_copy(Ferry::builder().channels(0).build());
        assert_eq!(check.status, Status::Missing);
        assert!(check.detail.contains("1 to 256"), "{}", check.detail);
    }

    #[test]
    fn a_variable_that_is_not_valid_is_named_in_the_cure() {
        let (name, value, expected) = ("MEMFERRY_DSA", "nonsense".to_owned(), "off or auto");
        let check = a_copy(Err(BuildError::Environment { name, value, expected }));
        assert_eq!(check.fix.unwrap(), "correct or unset MEMFERRY_DSA");
    }

    #[test]
    fn a_profile_of_a_busy_machine_is_not_ticked() {
        let origin = ProfileOrigin::Rejected("the machine was busy".into());
        let with = |origin: &ProfileOrigin| {
            Ok(Arc::new(CpuProfile { origin: origin.clone(), ..CpuProfile::built_in() }))
        };
        let check = profile(with(&origin), None);
        assert_eq!(check.status, Status::Warn);
        assert!(check.detail.contains("built-in values are in use"), "{}", check.detail);
        assert!(check.fix.unwrap().contains("memferry doctor --measure"));
        let saved = ProfileOrigin::Saved("there".into());
        assert_eq!(profile(with(&saved), Some(&ProfileOrigin::Measured)).status, Status::Ok);
        let check = profile(with(&saved), Some(&origin));
        assert_eq!(check.status, Status::Warn);
        assert!(check.detail.contains("there stay in use"), "{}", check.detail);
    }

    #[test]
    fn the_kernel_lists_cores_as_ranges() {
        assert_eq!(count_cores("0-3,8\n"), Some(5));
        assert_eq!(count_cores("0"), Some(1));
        assert_eq!(count_cores("many"), None);
    }
}
