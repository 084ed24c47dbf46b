//! The kernel by which messages are copied around the caches.

use memferry_engine::cpu::CpuProfile;
use memferry_sys::affinity;
use memferry_sys::copy::stream::Streaming;
use memferry_sys::fork::ForkSafe;
use memferry_sys::settings;

use super::copy_profile;

/// The variable that names the kernel, as for a ferry.
pub(crate) const STREAMING_VARIABLE: &str = "MEMFERRY_STREAMING";

/// How large messages are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LargeCopies {
    kernel: Streaming,
    /// From this size on, messages are copied by that kernel.
    from_bytes: usize,
}

/// Returns the kernel: the configured one, else the fastest measured one.
pub(crate) fn streaming() -> Streaming {
    large_copies().kernel
}

/// From this size on, messages are copied by that kernel.
pub(crate) fn stream_bytes() -> u64 {
    large_copies().from_bytes as u64
}

fn large_copies() -> LargeCopies {
    static CHOSEN: ForkSafe<LargeCopies> = ForkSafe::new();
    *CHOSEN.get_or_init(|| {
        let configured =
            settings::read_variable(STREAMING_VARIABLE, streaming_from_setting).ok().flatten();
        let cores = affinity::allowed_cores().len();
        let is_bound = cores < affinity::online_cores();
        let all = if is_bound { CpuProfile::saved_for_all_cores() } else { None };
        choose(configured, copy_profile(), all.as_ref(), cores)
    })
}

/// Chooses the kernel. `own` was measured by processes on `cores` cores, `all` on all of the machine.
///
/// Both sides of a message copy at the same time, so the profile of all cores counts. A process that is
/// bound to one core has measured that core alone: while nobody else copies, stores through a large cache
/// are as fast, and that says nothing about two sides.
fn choose(
    configured: Option<Streaming>,
    own: &CpuProfile,
    all: Option<&CpuProfile>,
    cores: usize,
) -> LargeCopies {
    let profile = all.unwrap_or(own);
    let is_alone = all.is_none() && cores == 1 && !profile.streaming.bypasses_caches();
    let streamed = Streaming::supported().next().filter(|_| is_alone);
    let kernel = configured.or(streamed).unwrap_or(profile.streaming);
    let measured = profile.shared_stream_bytes;
    // What was measured for another kernel says little.
    let from_bytes = match kernel == profile.streaming {
        true => measured,
        false => measured.max(CpuProfile::built_in().shared_stream_bytes),
    };
    LargeCopies { kernel, from_bytes }
}

/// The kernel of a setting, if this processor supports it.
pub(crate) fn streaming_from_setting(text: &str) -> Option<Streaming> {
    Streaming::from_name(text).filter(|kernel| kernel.is_supported())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn profile(streaming: Streaming) -> CpuProfile {
        CpuProfile { streaming, shared_stream_bytes: 1 << 16, ..CpuProfile::built_in() }
    }

    #[test]
    fn a_process_on_one_core_does_not_decide_for_two_sides_that_caches_are_best() {
        let best = Streaming::supported().next().unwrap();
        let kernel = |own, cores| choose(None, &profile(own), None, cores).kernel;
        assert_eq!(kernel(Streaming::Plain, 1), best);
        assert_eq!(kernel(Streaming::Prefetch, 1), best);
        assert_eq!(kernel(Streaming::Plain, 2), Streaming::Plain);
        assert_eq!(kernel(Streaming::Sse2, 1), Streaming::Sse2);
    }

    #[test]
    fn what_was_measured_on_all_cores_counts_for_a_process_on_one() {
        let all = profile(Streaming::Prefetch);
        let chosen = choose(None, &profile(Streaming::Sse2), Some(&all), 1);
        assert_eq!(chosen, LargeCopies { kernel: Streaming::Prefetch, from_bytes: 1 << 16 });
    }

    #[test]
    fn a_configured_kernel_counts_before_all_and_from_no_size_that_was_measured_for_another() {
        let all = profile(Streaming::Prefetch);
        let chosen = choose(Some(Streaming::Sse2), &all, Some(&all), 1);
        let from_bytes = CpuProfile::built_in().shared_stream_bytes;
        assert_eq!(chosen, LargeCopies { kernel: Streaming::Sse2, from_bytes });
    }
}
