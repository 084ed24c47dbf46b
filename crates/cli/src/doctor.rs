//! `memferry doctor`: what this machine can do for copies, what is missing, and the exact command
//! that mends it. Each check looks at one thing. Nothing is changed, but for the saved profile when
//! `--measure` asks for it.

use std::fs;
use std::sync::Arc;

use memferry::engine::cpu::{Origin, Profile, ProfileError, ProfileSource};
use memferry::{BuildError, Ferry};
use memferry_sys::EventFd;
use rustix::thread::{MembarrierCommand, membarrier_query};
use serde::Serialize;

use crate::machine::memory_bytes;
use crate::outcome::Machine;
use crate::show::{self, Paint};
use crate::size;

const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Status {
    /// As good as it can be.
    Ok,
    /// It works, and could work better.
    Warn,
    /// It is not there.
    Missing,
}

/// One thing looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Check {
    /// What was looked at.
    pub(crate) name: &'static str,
    /// How it came out.
    pub(crate) status: Status,
    /// What was found and what it means.
    pub(crate) detail: String,
    /// The command or change that mends it.
    pub(crate) cure: Option<String>,
}

impl Check {
    fn new(name: &'static str, status: Status, detail: impl Into<String>) -> Self {
        Self { name, status, detail: detail.into(), cure: None }
    }

    fn cure(mut self, cure: impl Into<String>) -> Self {
        self.cure = Some(cure.into());
        self
    }
}

/// Everything `memferry doctor --json` prints.
#[derive(Debug, Serialize)]
struct Diagnosis {
    machine: Machine,
    checks: Vec<Check>,
}

/// Looks at everything and prints it, as text or as JSON.
pub(crate) fn run(measure: bool, json: bool) -> anyhow::Result<()> {
    if measure {
        Profile::remeasure();
    }
    let machine = Machine::look();
    let checks = vec![
        cores(machine.cores, online_cores().as_deref()),
        streaming(&machine.streaming),
        huge_pages(fs::read_to_string(HUGE_PAGES).ok().as_deref()),
        memory(memory_bytes("MemAvailable")),
        membarrier(membarrier_query().contains_command(MembarrierCommand::PrivateExpedited)),
        eventfd(EventFd::new().map(drop)),
        profile(Profile::load(&ProfileSource::Automatic)),
        a_copy(Ferry::new()),
    ];
    let diagnosis = Diagnosis { machine, checks };
    if json {
        show::print_json(&diagnosis)?;
    } else {
        show::print(&render(&diagnosis, Paint::for_stdout()))?;
    }
    // The last two are what every program needs: a script can go by the exit status.
    let broken: Vec<_> = (diagnosis.checks.iter())
        .filter(|check| [PROFILE, A_COPY].contains(&check.name) && check.status == Status::Missing)
        .map(|check| check.name)
        .collect();
    anyhow::ensure!(broken.is_empty(), "not working: {}", broken.join(", "));
    Ok(())
}

const PROFILE: &str = "profile";
const A_COPY: &str = "a copy";

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
            .cure(format!("taskset --cpu-list {} memferry doctor", online.trim()));
    }
    let check = Check::new(NAME, status, detail);
    if usable > 1 {
        return check;
    }
    check.cure("give the machine or the container a second core (docker run --cpuset-cpus 0-1)")
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
        ),
        _ => Check::new(NAME, Status::Warn, format!("{all}: no 64-byte direct stores (movdir64b)"))
            .cure("in a virtual machine, pass the host's processor through (qemu: -cpu host)"),
    }
}

fn huge_pages(setting: Option<&str>) -> Check {
    const NAME: &str = "huge pages";
    let chosen = setting.and_then(|text| text.split_once('[')?.1.split_once(']'));
    match chosen.map(|(word, _)| word) {
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
        .cure(format!("echo madvise | sudo tee {HUGE_PAGES}")),
        None => Check::new(NAME, Status::Missing, "the kernel does not offer them")
            .cure("run a kernel built with CONFIG_TRANSPARENT_HUGEPAGE=y"),
    }
}

fn memory(available: Option<u64>) -> Check {
    const NAME: &str = "free memory";
    // Two buffers of the largest benched size, and as much again to push them out of the caches.
    const ENOUGH: u64 = 1 << 30;
    match available {
        None => Check::new(NAME, Status::Warn, "/proc/meminfo does not tell"),
        Some(bytes) if bytes < ENOUGH => {
            let detail = format!("{}: the largest benches need 1 GiB", size::format(bytes));
            Check::new(NAME, Status::Warn, detail)
                .cure("close other programs, or bench with --quick")
        }
        Some(bytes) => Check::new(NAME, Status::Ok, size::format(bytes)),
    }
}

fn membarrier(available: bool) -> Check {
    const NAME: &str = "membarrier";
    if available {
        return Check::new(NAME, Status::Ok, "submitting a copy needs no fence");
    }
    Check::new(NAME, Status::Missing, "every submission pays for a full fence instead")
        .cure("run Linux 4.14 or later, with a seccomp filter that allows membarrier")
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
        .cure("raise the limit of open files (ulimit -n 4096), or allow eventfd2 in seccomp"),
    }
}

fn profile(loaded: Result<Arc<Profile>, ProfileError>) -> Check {
    const NAME: &str = PROFILE;
    match loaded {
        Err(error) => Check::new(NAME, Status::Missing, error.to_string())
            .cure("unset MEMFERRY_PROFILE, or let it name another file"),
        Ok(profile) => {
            let kernel = profile.streaming.name();
            match &profile.origin {
                Origin::Saved(path) => {
                    Check::new(NAME, Status::Ok, format!("{kernel}, saved in {}", path.display()))
                }
                Origin::Measured => {
                    Check::new(NAME, Status::Ok, format!("{kernel}, measured by this run"))
                }
                Origin::BuiltIn => {
                    let detail = "built-in values: this machine was not measured";
                    Check::new(NAME, Status::Warn, detail).cure("unset MEMFERRY_PROFILE")
                }
            }
        }
    }
}

/// A real copy through a channel, every byte checked.
fn a_copy(ferry: Result<Ferry, BuildError>) -> Check {
    const NAME: &str = A_COPY;
    const BYTES: usize = 4 << 20;
    let ferry = match ferry {
        Ok(ferry) => ferry,
        Err(error) => {
            return Check::new(NAME, Status::Missing, error.to_string())
                .cure("do what the message says");
        }
    };
    let source: Vec<u8> = (0..BYTES).map(|at| (at ^ (at >> 8)) as u8).collect();
    let copied = ferry.icopy_owned(source, vec![0; BYTES]);
    match copied.and_then(memferry::OwnedTransfer::wait) {
        Ok((source, target)) if source == target => {
            let engine = &ferry.facts().engines[0];
            let detail = format!(
                "{} through engine {} with {} channel(s), {}",
                size::format(BYTES as u64),
                engine.name,
                engine.channels,
                ferry.policy().name()
            );
            Check::new(NAME, Status::Ok, detail)
        }
        Ok(_) => Check::new(NAME, Status::Missing, "arrived with wrong bytes")
            .cure("test the memory of this machine, then report this"),
        Err(failed) => Check::new(NAME, Status::Missing, failed.to_string()),
    }
}

/// The cores that are online, as the kernel lists them: `0-3,8`.
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

fn render(diagnosis: &Diagnosis, paint: Paint) -> String {
    let facts = diagnosis.machine.facts();
    let names = facts.iter().map(|(name, _)| *name);
    let width = names.chain(diagnosis.checks.iter().map(|check| check.name)).map(str::len).max();
    let width = width.unwrap_or(0);
    let mut text = format!("{}\n", paint.bold("this machine"));
    for (name, fact) in &facts {
        text.push_str(&format!("    {}  {fact}\n", paint.dim(&format!("{name:<width$}"))));
    }
    text.push_str(&format!("\n{}\n", paint.bold("checks")));
    for check in &diagnosis.checks {
        let sign = match check.status {
            Status::Ok => paint.good("✓"),
            Status::Warn => paint.bad("!"),
            Status::Missing => paint.bad("✗"),
        };
        text.push_str(&format!("  {sign} {:<width$}  {}\n", check.name, check.detail));
        if let Some(cure) = &check.cure {
            text.push_str(&format!("    {:<width$}  to mend: {}\n", "", paint.bold(cure)));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    #[test]
    fn the_cure_for_huge_pages_is_a_command() {
        let never = huge_pages(Some("always madvise [never]\n"));
        assert_eq!(never.status, Status::Warn);
        assert_eq!(never.cure.unwrap(), format!("echo madvise | sudo tee {HUGE_PAGES}"));
        assert_eq!(huge_pages(Some("always [madvise] never\n")).status, Status::Ok);
        assert_eq!(huge_pages(None).status, Status::Missing);
    }

    #[test]
    fn cores_that_may_not_be_used_are_noticed() {
        let check = cores(2, Some("0-3,8\n"));
        assert_eq!(check.status, Status::Warn);
        assert_eq!(check.cure.unwrap(), "taskset --cpu-list 0-3,8 memferry doctor");
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
    fn the_kernel_lists_cores_as_ranges() {
        assert_eq!(count_cores("0-3,8\n"), Some(5));
        assert_eq!(count_cores("0"), Some(1));
        assert_eq!(count_cores("many"), None);
    }

    #[test]
    fn a_check_is_rendered_with_its_cure() {
        let checks = vec![membarrier(false), huge_pages(Some("[always]"))];
        let diagnosis = Diagnosis { machine: sample::empty("x").machine, checks };
        let text = render(&diagnosis, Paint::plain());
        assert!(text.contains("  ✗ membarrier "), "{text}");
        assert!(text.contains("to mend: run Linux 4.14"), "{text}");
        assert!(text.contains("  ✓ huge pages "), "{text}");
    }

    #[test]
    fn a_check_has_the_fields_scripts_read() {
        let json = serde_json::to_value(huge_pages(Some("[never]"))).unwrap();
        assert_eq!(json["status"], "warn");
        assert!(json["cure"].as_str().unwrap().starts_with("echo madvise"));
        assert!(json["name"].is_string() && json["detail"].is_string());
    }
}
