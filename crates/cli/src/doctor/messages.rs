//! Checks of what messages require of a machine. They start a second process and exchange messages
//! with it.

mod echo;

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::{fs, io};

use memferry::engine::runtime::profile_store::{ProfileError, ProfileOrigin};
use memferry::message::plan::{self, Locality, MessageProfile};
use memferry::message::{EndpointBuilder, ShareableBuffer};
use memferry_bench::results::{number, size};
use memferry_sys::shared_memory::SealedMemory;
use memferry_sys::{futex, peer_process};

use super::copies::{measured_now, not_saved, selected_setting};
use super::{Check, Status};

pub(super) use echo::{A_MESSAGE, CROSS_MEMORY};

const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// All checks, in the order of display. `remeasured` is the result of a new measurement, if one was
/// requested.
pub(super) fn checks(remeasured: Option<&ProfileOrigin>) -> Vec<Check> {
    let mut checks = vec![
        settings(
            set_variables(),
            EndpointBuilder::new().plan_context().map(drop).map_err(|e| e.to_string()),
        ),
        profile(MessageProfile::find(), remeasured),
        sealed_memory(try_sealed_memory()),
        huge_pages(try_huge_pages(), fs::read_to_string(HUGE_PAGES).ok().as_deref()),
        futex_waitv(futex::probe_waitv()),
        pidfd(UnixStream::pair()),
    ];
    checks.extend(echo::checks());
    checks
}

/// The variables for messages that are set, with their values.
fn set_variables() -> Vec<String> {
    let set = EndpointBuilder::VARIABLES.into_iter().filter_map(|name| {
        memferry_sys::settings::value_of(name)
            .map(|value| format!("{name}={}", value.to_string_lossy()))
    });
    set.collect()
}

fn settings(set: Vec<String>, valid: Result<(), String>) -> Check {
    const NAME: &str = "settings";
    match (valid, set.is_empty()) {
        (Err(error), _) => {
            Check::new(NAME, Status::Missing, error).fix("correct or unset the variable")
        }
        (Ok(()), true) => Check::new(NAME, Status::Ok, "no variable of messages is set"),
        (Ok(()), false) => Check::new(NAME, Status::Ok, set.join(" ")),
    }
}

fn profile(
    found: Result<MessageProfile, ProfileError>,
    remeasured: Option<&ProfileOrigin>,
) -> Check {
    const NAME: &str = "costs";
    let profile = match found {
        Ok(profile) => profile,
        Err(error) => {
            return Check::new(NAME, Status::Warn, format!("built-in values: {error}"))
                .fix("unset MEMFERRY_PROFILE, or let it name another file");
        }
    };
    let near = Locality::SharedCache;
    let place = match &profile.origin {
        ProfileOrigin::Rejected(why) => return not_saved(NAME, why, None),
        ProfileOrigin::Saved(path) => {
            if let Some(ProfileOrigin::Rejected(why)) = remeasured {
                return not_saved(NAME, why, Some(path));
            }
            format!("saved in {}", path.display())
        }
        ProfileOrigin::Measured => "measured by this run".to_owned(),
        ProfileOrigin::BuiltIn => {
            let detail = "built-in values: this machine was not measured";
            return Check::new(NAME, Status::Warn, detail)
                .fix("unset MEMFERRY_PROFILE, and let the process use two cores or more");
        }
    };
    let lines = profile.path_costs(near);
    let crossing = plan::path_costs::crossover(lines.eager, lines.single_cross);
    let detail = format!(
        "{} from core to core, two copies cost less than one up to {}; {place}",
        number::duration(lines.handover_ns),
        size::format(crossing)
    );
    match profile.origin {
        ProfileOrigin::Measured => measured_now::<MessageProfile>(NAME, &detail),
        _ => Check::new(NAME, Status::Ok, detail),
    }
}

fn try_sealed_memory() -> io::Result<()> {
    let memory = SealedMemory::new("memferry-doctor", 4096)?;
    SealedMemory::from_untrusted_fd(memory.as_fd().try_clone_to_owned()?, memory.len()).map(drop)
}

fn sealed_memory(tried: io::Result<()>) -> Check {
    const NAME: &str = "sealed memory";
    match tried {
        Ok(()) => Check::new(NAME, Status::Ok, "a peer cannot take shared memory away"),
        Err(error) => Check::new(NAME, Status::Missing, format!("memfd_create: {error}"))
            .fix("allow memfd_create and fcntl in seccomp, or raise the limit of open files"),
    }
}

/// The number of bytes of a new shareable buffer that are on huge pages.
fn try_huge_pages() -> io::Result<u64> {
    const BYTES: usize = 8 << 20;
    let mut buffer = ShareableBuffer::new(BYTES)?;
    buffer.fill(1);
    let maps = fs::read_to_string("/proc/self/smaps")?;
    Ok(huge_bytes(&maps, buffer.as_ptr() as u64).unwrap_or(0))
}

/// The number of bytes on huge pages in the mapping at an address, from `/proc/self/smaps`.
fn huge_bytes(maps: &str, address: u64) -> Option<u64> {
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let range = |line: &str| {
        let (first, last) = line.split_whitespace().next()?.split_once('-')?;
        Some(hex(first)?..hex(last)?)
    };
    let mut lines = maps.lines();
    lines.find(|line| range(line).is_some_and(|range| range.contains(&address)))?;
    let mut own = lines.take_while(|line| range(line).is_none());
    let value = own.find_map(|line| line.strip_prefix("ShmemPmdMapped:"))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

fn huge_pages(tried: io::Result<u64>, setting: Option<&str>) -> Check {
    const NAME: &str = "huge shared pages";
    let word = setting.and_then(selected_setting).unwrap_or("unknown");
    match tried {
        Err(error) => Check::new(NAME, Status::Warn, format!("could not be tried: {error}")),
        Ok(bytes) if bytes > 0 => {
            let detail = format!("{word}: shareable memory gets 2 MiB pages");
            Check::new(NAME, Status::Ok, detail)
        }
        Ok(_) if ["never", "deny"].contains(&word) => {
            let detail = format!("{word}: shareable memory gets ordinary pages, which cost time");
            Check::new(NAME, Status::Warn, detail)
                .fix(format!("echo advise | sudo tee {HUGE_PAGES}"))
        }
        Ok(_) => {
            let detail = format!("{word}: allowed, but a buffer just made got ordinary pages");
            Check::new(NAME, Status::Warn, detail).fix("free some memory: it is in small pieces")
        }
    }
}

fn futex_waitv(tried: io::Result<()>) -> Check {
    const NAME: &str = "futex_waitv";
    match tried {
        Ok(()) => Check::new(NAME, Status::Ok, "a process can sleep until any of its peers writes"),
        Err(error) => {
            let detail = format!("a process with several peers does not sleep well: {error}");
            Check::new(NAME, Status::Warn, detail)
                .fix("run Linux 5.16 or later, with a seccomp filter that allows futex_waitv")
        }
    }
}

fn pidfd(pair: io::Result<(UnixStream, UnixStream)>) -> Check {
    const NAME: &str = "pidfd";
    let cure = "run Linux 6.5 or later, with a seccomp filter that allows pidfd_open";
    let socket = match pair {
        Ok((socket, _other)) => socket,
        Err(error) => return Check::new(NAME, Status::Warn, format!("no socket: {error}")),
    };
    match (
        peer_process::pidfd_from_socket(socket.as_fd()),
        peer_process::pidfd_from_pid(socket.as_fd()),
    ) {
        (Ok(_), _) => {
            Check::new(NAME, Status::Ok, "SO_PEERPIDFD: the end of a peer is noticed within 20 ms")
        }
        (Err(_), Ok(_)) => {
            let detail = "pidfd_open: the end of a peer is noticed, its number could be reused";
            Check::new(NAME, Status::Ok, detail)
        }
        (Err(_), Err(error)) => {
            let detail = format!("the end of a peer is seen by its socket alone: {error}");
            Check::new(NAME, Status::Warn, detail).fix(cure)
        }
    }
}

#[cfg(test)]
mod tests;
