//! Who copies a delivery of medium size: the caller or a channel.
//!
//! A message that was delivered is read by the caller. If a channel delivers it, the caller fetches
//! every cache line from the channel's core; if the caller copies it, it has the lines already. So
//! the caller copies packets that are in its caches, and a channel those that are not. Where packets
//! are is not known before, so the caller copies a few deliveries of each size in a row, now and then,
//! and measures the last ones: by then, the targets are in its caches again if they fit.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use memferry_engine::cpu::CpuProfile;

use crate::plan::MAX_CALLER_BYTES;

/// The measured time of deliveries by callers, for each power of two of their size.
#[derive(Debug)]
pub(crate) struct DeliveryRates {
    /// The time in nanoseconds that a delivery by a channel takes from the caller: submission, then
    /// the fetch of each cache line.
    submit_ns: f64,
    line_ns: f64,
    sizes: [SizeRate; SIZES],
}

/// The caller's time by its time with a channel, from which on a channel delivers: it takes the time of
/// another core, and both times are estimates.
const MIN_GAIN: f64 = 1.5;

const SIZES: usize = MAX_CALLER_BYTES.ilog2() as usize + 1;

#[derive(Debug, Default)]
struct SizeRate {
    deliveries: AtomicU32,
    /// The time of the caller in picoseconds per byte; 0 if not yet measured.
    ps_per_byte: AtomicU64,
    /// Whether a channel would take less of the caller's time.
    by_channel: AtomicBool,
}

/// Who copies a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeliveryBy {
    /// The caller.
    Caller,
    /// The caller, with [`DeliveryRates::record`] of the time.
    MeasuredCaller,
    /// A channel.
    Channel,
}

impl DeliveryRates {
    pub(crate) fn new(profile: &CpuProfile) -> Self {
        Self {
            submit_ns: 2.0 * profile.handover_ns,
            line_ns: profile.remote_line_ns,
            sizes: Default::default(),
        }
    }

    fn size(&self, bytes: u64) -> &SizeRate {
        &self.sizes[bytes.max(1).ilog2() as usize]
    }

    /// Decides about a delivery of at most [`MAX_CALLER_BYTES`].
    pub(crate) fn decide(&self, bytes: u64) -> DeliveryBy {
        const PERIOD: u32 = 64;
        const ROW: u32 = 6;
        const MEASURED: u32 = 2;
        let size = self.size(bytes);
        // Threads that deliver at the same time may lose a count.
        let number = size.deliveries.load(Ordering::Relaxed);
        size.deliveries.store(number.wrapping_add(1), Ordering::Relaxed);
        match number % PERIOD {
            turn if turn >= ROW => {}
            turn if turn >= ROW - MEASURED => return DeliveryBy::MeasuredCaller,
            _ => return DeliveryBy::Caller,
        }
        match size.by_channel.load(Ordering::Relaxed) {
            true => DeliveryBy::Channel,
            false => DeliveryBy::Caller,
        }
    }

    /// Records the time of a delivery that the caller copied.
    pub(crate) fn record(&self, bytes: u64, start: Instant) {
        self.adapt(bytes, 1000 * start.elapsed().as_nanos() as u64 / bytes.max(1));
    }

    /// Moves the rate a part of the way, so that a single disturbed delivery changes little.
    fn adapt(&self, bytes: u64, measured: u64) {
        const LINE: f64 = 64.0;
        let size = self.size(bytes);
        let before = size.ps_per_byte.load(Ordering::Relaxed);
        let after = if before == 0 { measured } else { (3 * before + measured) / 4 };
        size.ps_per_byte.store(after.max(1), Ordering::Relaxed);
        let caller_ns = bytes as f64 * after as f64 / 1000.0;
        let channel_ns = self.submit_ns + bytes as f64 / LINE * self.line_ns;
        size.by_channel.store(caller_ns > MIN_GAIN * channel_ns, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usual(rates: &DeliveryRates, bytes: u64) -> DeliveryBy {
        let decisions: Vec<_> = (0..64).map(|_| rates.decide(bytes)).collect();
        let count = |by| decisions.iter().filter(|decision| **decision == by).count();
        assert_eq!(count(DeliveryBy::MeasuredCaller), 2, "the last of a row by the caller");
        let [caller, channel] = [DeliveryBy::Caller, DeliveryBy::Channel].map(count);
        assert!((caller == 4 && channel == 58) || channel == 0, "{decisions:?}");
        if channel == 0 { DeliveryBy::Caller } else { DeliveryBy::Channel }
    }

    #[test]
    fn a_channel_delivers_what_is_in_no_cache_and_the_caller_the_rest() {
        let rates = DeliveryRates::new(&CpuProfile::built_in());
        for bytes in [16 << 10, 64 << 10, MAX_CALLER_BYTES] {
            (0..20).for_each(|_| rates.adapt(bytes, 25));
            assert_eq!(usual(&rates, bytes), DeliveryBy::Caller);
            (0..20).for_each(|_| rates.adapt(bytes, 250));
            assert_eq!(usual(&rates, bytes), DeliveryBy::Channel);
        }
        assert_eq!(usual(&rates, 32 << 10), DeliveryBy::Caller, "sizes are measured apart");
    }
}
