//! The choice between two kernels for small copies, by the measured speed of both.
//!
//! Small copies of data in the caches are fastest with ordinary stores, those of data in memory
//! with non-temporal ones. Where the data is, only the time of a copy tells. Non-temporal stores
//! leave their target in no cache, so the next copy to the same place finds it in memory, whatever
//! the program does: while they are used, ordinary ones are tried for some hundred copies from time
//! to time, and measured at the end of these.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::contract::GroupKernel;

/// One group in so many is measured.
pub const MEASURE_ONE_IN: u32 = 16;
/// Out of so many groups, the first ones try ordinary stores.
pub const PERIOD: u32 = 1024;
/// The groups of a period that try ordinary stores, while non-temporal ones are used.
pub const TRIED: u32 = 64;

/// How a group of small copies is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Choice {
    /// With non-temporal stores.
    pub(super) streams: bool,
    /// The time is to be [recorded](MeasuredKernel::record).
    pub(super) is_measured: bool,
}

/// The kernel of one kind of thread. Threads that update it at the same time may lose a step.
#[derive(Debug)]
pub(super) struct MeasuredKernel {
    groups: AtomicU32,
    streams: AtomicBool,
    /// The bits of the speeds in GB/s.
    cached: AtomicU32,
    streaming: AtomicU32,
    /// The speed of non-temporal stores that the profile has.
    usual_streaming: f32,
}

impl MeasuredKernel {
    /// A choice that starts with ordinary stores.
    pub(super) fn new(streaming_gb_per_s: f64) -> Self {
        let speed = streaming_gb_per_s as f32;
        Self {
            groups: AtomicU32::new(0),
            streams: AtomicBool::new(false),
            cached: AtomicU32::new(0),
            streaming: AtomicU32::new(speed.to_bits()),
            usual_streaming: speed,
        }
    }

    /// The kernel that is used now, and the speeds of both.
    pub(super) fn learned(&self) -> GroupKernel {
        let speed = |bits: &AtomicU32| f64::from(f32::from_bits(bits.load(Ordering::Relaxed)));
        GroupKernel {
            streams: self.streams.load(Ordering::Relaxed),
            cached_gb_per_s: speed(&self.cached),
            streaming_gb_per_s: speed(&self.streaming),
        }
    }

    /// Decides about the next group.
    #[inline]
    pub(super) fn choose(&self) -> Choice {
        let number = self.groups.load(Ordering::Relaxed);
        self.groups.store(number.wrapping_add(1), Ordering::Relaxed);
        let at = number % PERIOD;
        if self.streams.load(Ordering::Relaxed) && at < TRIED {
            // Once the caches hold the targets again, if they ever do.
            Choice { streams: false, is_measured: at >= TRIED / 2 && at.is_multiple_of(4) }
        } else {
            let streams = self.streams.load(Ordering::Relaxed);
            Choice { streams, is_measured: at.is_multiple_of(MEASURE_ONE_IN) }
        }
    }

    /// Records the time of a measured group.
    #[cold]
    pub(super) fn record(&self, choice: Choice, bytes: u64, time_ns: u64) {
        let speed = bytes as f32 / time_ns.max(1) as f32;
        let (load, store) = (
            |speed: &AtomicU32| f32::from_bits(speed.load(Ordering::Relaxed)),
            |speed: &AtomicU32, value: f32| speed.store(value.to_bits(), Ordering::Relaxed),
        );
        if choice.streams {
            store(&self.streaming, towards(load(&self.streaming), speed, 0.25));
        } else {
            let before = load(&self.cached);
            let is_first = before == 0.0;
            store(&self.cached, if is_first { speed } else { towards(before, speed, 0.25) });
            // A bad measurement of the other kernel is forgotten while that one is not used.
            store(
                &self.streaming,
                towards(load(&self.streaming), self.usual_streaming, 1.0 / 256.0),
            );
        }
        self.streams.store(load(&self.cached) < load(&self.streaming), Ordering::Relaxed);
    }
}

/// The value moved a part of the way, so that a single disturbed measurement changes little.
fn towards(value: f32, measured: f32, part: f32) -> f32 {
    value + part * (measured - value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 16 << 10;

    /// Executes groups of which those with ordinary stores run at one speed and the others at
    /// another; returns how many of the last thousand streamed.
    fn streamed(kernel: &MeasuredKernel, groups: u32, cached: u64, streaming: u64) -> u32 {
        let mut streamed = 0;
        for group in 0..groups {
            let choice = kernel.choose();
            if choice.is_measured {
                let speed = if choice.streams { streaming } else { cached };
                kernel.record(choice, BYTES, BYTES / speed);
            }
            streamed += u32::from(choice.streams && group + 1024 >= groups);
        }
        streamed
    }

    #[test]
    fn what_was_learned_starts_with_the_profile_and_follows_the_measurements() {
        let kernel = MeasuredKernel::new(17.0);
        let start = kernel.learned();
        assert_eq!(
            (start.streams, start.cached_gb_per_s, start.streaming_gb_per_s),
            (false, 0.0, 17.0)
        );
        streamed(&kernel, 1 << 14, 4, 8);
        let later = kernel.learned();
        assert!(later.streams && later.cached_gb_per_s < 5.0, "{later:?}");
    }

    #[test]
    fn copies_of_cached_data_never_stream() {
        let kernel = MeasuredKernel::new(17.0);
        assert_eq!(streamed(&kernel, 1 << 16, 30, 10), 0);
    }

    #[test]
    fn copies_from_memory_stream_and_try_ordinary_stores_now_and_then() {
        let kernel = MeasuredKernel::new(17.0);
        assert_eq!(streamed(&kernel, 1 << 14, 7, 10), 1024 - 64);
    }

    #[test]
    fn data_that_comes_into_the_caches_is_noticed_and_data_that_leaves_them_too() {
        let kernel = MeasuredKernel::new(17.0);
        streamed(&kernel, 1 << 14, 7, 10);
        assert_eq!(streamed(&kernel, 1 << 12, 30, 10), 0);
        assert!(streamed(&kernel, 1 << 12, 7, 10) > 900);
    }

    #[test]
    fn stores_that_stream_slower_than_the_profile_says_are_given_up() {
        let kernel = MeasuredKernel::new(17.0);
        assert!(streamed(&kernel, 1 << 14, 8, 6) < 200);
    }

    #[test]
    fn a_single_disturbed_measurement_does_not_change_the_kernel() {
        let kernel = MeasuredKernel::new(17.0);
        streamed(&kernel, 1 << 12, 30, 10);
        kernel.record(Choice { streams: false, is_measured: true }, BYTES, BYTES / 15);
        assert!(!kernel.choose().streams);
    }
}
