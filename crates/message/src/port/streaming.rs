//! The kernel by which messages are copied around the caches.

use std::sync::OnceLock;

use memferry_engine::cpu::CpuProfile;
use memferry_sys::affinity;
use memferry_sys::copy::stream::Streaming;
use memferry_sys::settings;

use super::copy_profile;

/// The variable that names the kernel, as for a ferry.
pub(crate) const STREAMING_VARIABLE: &str = "MEMFERRY_STREAMING";

/// Returns the kernel: the configured one, else the fastest measured one.
pub(crate) fn streaming() -> Streaming {
    static STREAMING: OnceLock<Streaming> = OnceLock::new();
    *STREAMING.get_or_init(|| {
        let configured =
            settings::read_variable(STREAMING_VARIABLE, streaming_from_setting).ok().flatten();
        configured.unwrap_or_else(|| {
            for_two_sides(copy_profile().streaming, affinity::allowed_cores().len())
        })
    })
}

/// From this size on, messages are copied by that kernel. What was measured for another one says little.
pub(crate) fn stream_bytes() -> u64 {
    let profile = copy_profile();
    let measured = profile.shared_stream_bytes;
    let bytes = match streaming() == profile.streaming {
        true => measured,
        false => measured.max(CpuProfile::built_in().shared_stream_bytes),
    };
    bytes as u64
}

/// The kernel of a setting, if this processor supports it.
pub(crate) fn streaming_from_setting(text: &str) -> Option<Streaming> {
    Streaming::from_name(text).filter(|kernel| kernel.is_supported())
}

/// Both sides of a message copy at the same time. A process that is bound to one core has measured that core
/// alone: while nobody else copies, stores through a large cache are as fast, and that says nothing about
/// two sides.
fn for_two_sides(measured: Streaming, cores: usize) -> Streaming {
    match measured {
        through_caches if cores == 1 && !through_caches.bypasses_caches() => {
            Streaming::supported().next().unwrap_or(measured)
        }
        measured => measured,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_process_on_one_core_does_not_decide_for_two_sides_that_caches_are_best() {
        let best = Streaming::supported().next().unwrap();
        assert_eq!(for_two_sides(Streaming::Plain, 1), best);
        assert_eq!(for_two_sides(Streaming::Prefetch, 1), best);
        assert_eq!(for_two_sides(Streaming::Plain, 2), Streaming::Plain);
        assert_eq!(for_two_sides(Streaming::Sse2, 1), Streaming::Sse2);
    }
}
