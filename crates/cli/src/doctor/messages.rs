//! What messages need of a machine. A second process is started and messages are exchanged with it:
//! what is reported was tried.

mod alive;

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::{fs, io};

use memferry::engine::saved::{Origin, ProfileError};
use memferry::message::plan::{self, Closeness, Profile};
use memferry::message::{Builder, ShareableBuffer};
use memferry_sys::shared_memory::SealedMemory;
use memferry_sys::{peer_process, wait_word};

use super::copies::{chosen, measured_now, not_kept};
use super::{Check, Status};
use crate::{number, size};

pub(super) use alive::{A_MESSAGE, CROSS_MEMORY};

const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// All checks, in the order in which they are shown.
/// `remeasured` says what came of measuring anew, if that was asked for.
pub(super) fn checks(remeasured: Option<&Origin>) -> Vec<Check> {
    let mut checks = vec![
        settings(set_variables(), Builder::new().facts().map(drop).map_err(|e| e.to_string())),
        profile(Profile::find(), remeasured),
        sealed_memory(try_sealed_memory()),
        huge_pages(try_huge_pages(), fs::read_to_string(HUGE_PAGES).ok().as_deref()),
        waiting(wait_word::try_waiting_on_several()),
        watching(UnixStream::pair()),
    ];
    checks.extend(alive::checks());
    checks
}

/// The variables of messages that are set, as they are.
fn set_variables() -> Vec<String> {
    let set = Builder::VARIABLES.into_iter().filter_map(|name| {
        std::env::var_os(name).map(|value| format!("{name}={}", value.to_string_lossy()))
    });
    set.collect()
}

fn settings(set: Vec<String>, valid: Result<(), String>) -> Check {
    const NAME: &str = "settings";
    match (valid, set.is_empty()) {
        (Err(error), _) => {
            Check::new(NAME, Status::Missing, error).cure("correct or unset the variable")
        }
        (Ok(()), true) => Check::new(NAME, Status::Ok, "no variable of messages is set"),
        (Ok(()), false) => Check::new(NAME, Status::Ok, set.join(" ")),
    }
}

fn profile(found: Result<Profile, ProfileError>, remeasured: Option<&Origin>) -> Check {
    const NAME: &str = "costs";
    let profile = match found {
        Ok(profile) => profile,
        Err(error) => {
            return Check::new(NAME, Status::Warn, format!("built-in values: {error}"))
                .cure("unset MEMFERRY_PROFILE, or let it name another file");
        }
    };
    let near = Closeness::SharedCache;
    let place = match &profile.origin {
        Origin::NotKept(why) => return not_kept(NAME, why, None),
        Origin::Saved(path) => {
            if let Some(Origin::NotKept(why)) = remeasured {
                return not_kept(NAME, why, Some(path));
            }
            format!("saved in {}", path.display())
        }
        Origin::Measured => "measured by this run".to_owned(),
        Origin::BuiltIn => {
            let detail = "built-in values: this machine was not measured";
            return Check::new(NAME, Status::Warn, detail)
                .cure("unset MEMFERRY_PROFILE, and let the process use two cores or more");
        }
    };
    let lines = profile.lines(near);
    let crossing = plan::lines::crossing(lines.eager, lines.single_cross);
    let detail = format!(
        "{} from core to core, two copies cost less than one up to {}; {place}",
        number::duration(lines.handover_ns),
        size::format(crossing)
    );
    match profile.origin {
        Origin::Measured => measured_now::<Profile>(NAME, &detail),
        _ => Check::new(NAME, Status::Ok, detail),
    }
}

fn try_sealed_memory() -> io::Result<()> {
    let memory = SealedMemory::new("memferry-doctor", 4096)?;
    SealedMemory::from_foreign(memory.as_fd().try_clone_to_owned()?, memory.len()).map(drop)
}

fn sealed_memory(tried: io::Result<()>) -> Check {
    const NAME: &str = "sealed memory";
    match tried {
        Ok(()) => Check::new(NAME, Status::Ok, "a peer cannot take shared memory away"),
        Err(error) => Check::new(NAME, Status::Missing, format!("memfd_create: {error}"))
            .cure("allow memfd_create and fcntl in seccomp, or raise the limit of open files"),
    }
}

/// How many bytes of a fresh shareable buffer are on huge pages.
fn try_huge_pages() -> io::Result<u64> {
    const BYTES: usize = 8 << 20;
    let mut buffer = ShareableBuffer::new(BYTES)?;
    buffer.fill(1);
    let maps = fs::read_to_string("/proc/self/smaps")?;
    Ok(huge_bytes(&maps, buffer.as_ptr() as u64).unwrap_or(0))
}

/// The huge pages of the mapping around an address, as `/proc/self/smaps` tells them.
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
    let word = setting.and_then(chosen).unwrap_or("unknown");
    match tried {
        Err(error) => Check::new(NAME, Status::Warn, format!("could not be tried: {error}")),
        Ok(bytes) if bytes > 0 => {
            let detail = format!("{word}: shareable memory gets 2 MiB pages");
            Check::new(NAME, Status::Ok, detail)
        }
        Ok(_) if ["never", "deny"].contains(&word) => {
            let detail = format!("{word}: shareable memory gets ordinary pages, which cost time");
            Check::new(NAME, Status::Warn, detail)
                .cure(format!("echo advise | sudo tee {HUGE_PAGES}"))
        }
        Ok(_) => {
            let detail = format!("{word}: allowed, but a buffer just made got ordinary pages");
            Check::new(NAME, Status::Warn, detail).cure("free some memory: it is in small pieces")
        }
    }
}

fn waiting(tried: io::Result<()>) -> Check {
    const NAME: &str = "futex_waitv";
    match tried {
        Ok(()) => Check::new(NAME, Status::Ok, "a process can sleep until any of its peers writes"),
        Err(error) => {
            let detail = format!("a process with several peers does not sleep well: {error}");
            Check::new(NAME, Status::Warn, detail)
                .cure("run Linux 5.16 or later, with a seccomp filter that allows futex_waitv")
        }
    }
}

fn watching(pair: io::Result<(UnixStream, UnixStream)>) -> Check {
    const NAME: &str = "pidfd";
    let cure = "run Linux 6.5 or later, with a seccomp filter that allows pidfd_open";
    let socket = match pair {
        Ok((socket, _other)) => socket,
        Err(error) => return Check::new(NAME, Status::Warn, format!("no socket: {error}")),
    };
    match (
        peer_process::process_by_socket(socket.as_fd()),
        peer_process::process_by_number(socket.as_fd()),
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
            Check::new(NAME, Status::Warn, detail).cure(cure)
        }
    }
}

#[cfg(test)]
mod tests;
