//! Checks of what pinning and windows require of a machine. Each check performs the operation that
//! it reports.

use memferry::message::{Endpoint, Error, Rights, ShareableBuffer};
use memferry_bench::results::size;
use memferry_sys::{residency, userfault};

use super::{Check, Status};

/// The minimum limit of locked memory. The buffers of a device soon exhaust a lower one.
const MIN_LOCKED_BYTES: u64 = 64 << 20;
/// The minimum number of mappings that a process can add to its existing ones.
const MIN_FREE_MAPS: u64 = 10_000;

/// All checks, in the order of display.
pub(super) fn checks() -> Vec<Check> {
    vec![
        populate(residency::can_populate()),
        locked(residency::lock_limit_bytes(), residency::locked_bytes()),
        maps(residency::max_map_count(), residency::map_count()),
        events(userfault::probe()),
        window(try_window()),
    ]
}

fn populate(works: bool) -> Check {
    const NAME: &str = "populate";
    if works {
        let detail = "fresh memory is made ready in one call instead of a fault for each page";
        return Check::new(NAME, Status::Ok, detail);
    }
    Check::new(NAME, Status::Warn, "messages into fresh memory take a fault for each page")
        .fix("run Linux 5.14 or later, with a seccomp filter that allows madvise")
}

fn locked(limit: Option<u64>, now: u64) -> Check {
    const NAME: &str = "locked memory";
    let now = size::format(now);
    match limit {
        None => Check::new(NAME, Status::Ok, format!("no limit; {now} locked now")),
        Some(limit) if limit >= MIN_LOCKED_BYTES => {
            let detail = format!("at most {}; {now} locked now", size::format(limit));
            Check::new(NAME, Status::Ok, detail)
        }
        Some(limit) => {
            let detail = format!("at most {}, little for buffers of devices", size::format(limit));
            Check::new(NAME, Status::Warn, detail)
                .fix("`ulimit -l unlimited` as root, or LimitMEMLOCK=infinity in the service")
        }
    }
}

fn maps(most: u64, now: u64) -> Check {
    const NAME: &str = "mappings";
    let detail = format!("at most {most} for a process; {now} now");
    if most.saturating_sub(now) >= MIN_FREE_MAPS {
        return Check::new(NAME, Status::Ok, detail);
    }
    Check::new(NAME, Status::Warn, detail).fix("sudo sysctl vm.max_map_count=262144")
}

fn events(probed: Result<(), userfault::UserfaultDenied>) -> Check {
    const NAME: &str = "mapping events";
    match probed {
        Ok(()) => {
            let detail = "userfaultfd: memory that is unmapped leaves the pin cache by itself";
            Check::new(NAME, Status::Ok, detail)
        }
        Err(denied) => {
            let detail = "unmapped memory is not reported: pins for devices last for one use, unless the memory is registered";
            Check::new(NAME, Status::Warn, detail).fix(denied.to_string())
        }
    }
}

/// Puts data into a window and gets it back, through the translation cache.
fn try_window() -> Result<(), Error> {
    const PAYLOAD: &[u8] = b"through a window";
    let endpoint = Endpoint::open(&format!("memferry-doctor-window-{}", std::process::id()))?;
    let system = |error: std::io::Error| memferry::message::ConnectError::System {
        what: "making shareable memory",
        error: memferry::message::SystemError(std::sync::Arc::new(error)),
    };
    let buffer = ShareableBuffer::new(1 << 20).map_err(system)?;
    let window = endpoint.expose(buffer, Rights::READ_WRITE).map_err(|failed| failed.error)?;
    let remote = endpoint.attach(endpoint.self_peer()?, window.handle())?;
    remote.put(5000, PAYLOAD)?;
    let mut back = [0; PAYLOAD.len()];
    remote.get(5000, &mut back)?;
    if back == PAYLOAD {
        Ok(())
    } else {
        Err(Error::BadMemory(memferry::message::MemorySide::Local))
    }
}

fn window(tried: Result<(), Error>) -> Check {
    const NAME: &str = "a window";
    match tried {
        Ok(()) => {
            let detail = "put and got back, through the lookup";
            Check::new(NAME, Status::Ok, detail).summary(format!("a window was {detail}"))
        }
        Err(error) => Check::new(NAME, Status::Missing, format!("{error:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_limit_of_locked_memory_comes_with_a_cure() {
        assert_eq!(locked(None, 0).status, Status::Ok);
        assert_eq!(locked(Some(1 << 30), 4096).status, Status::Ok);
        let little = locked(Some(8 << 20), 4096);
        assert_eq!(little.status, Status::Warn);
        assert!(little.detail.contains("8 MiB") && little.fix.is_some(), "{little:?}");
    }

    #[test]
    fn few_mappings_are_noticed() {
        assert_eq!(maps(65_530, 100).status, Status::Ok);
        assert_eq!(maps(65_530, 60_000).status, Status::Warn);
    }

    #[test]
    fn a_window_works_here() {
        assert_eq!(window(try_window()).status, Status::Ok);
    }
}
