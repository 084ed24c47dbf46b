//! Who copies a delivery of medium size: the caller or a channel.
//!
//! A message that was delivered is read by the caller. If a channel delivers it, the caller fetches
//! every cache line from the channel's core; if the caller copies it, it has the lines already. So
//! the caller copies packets that are in its caches, and a channel those that are not. Where packets
//! are is not known before, so the caller copies a few deliveries of each size in a row, now and then,
//! and measures the last ones: by then, the targets are in its caches again if they fit. Submissions are
//! measured too, while a channel delivers.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use memferry_engine::cpu::CpuProfile;

use crate::learned::LearnedDelivery;
use crate::plan::MAX_CALLER_BYTES;

/// The measured time of deliveries, for each power of two of their size.
#[derive(Debug)]
pub(crate) struct DeliveryRates {
    /// The time in nanoseconds of a submission, before one was measured.
    submit_ns: u64,
    /// The time in nanoseconds in which the caller fetches a cache line that a channel wrote.
    line_ns: f64,
    /// The time in nanoseconds that the caller loses for each byte that a channel copies beside it.
    beside_ns_per_byte: f64,
    sizes: [SizeRate; SIZES],
}

const SIZES: usize = MAX_CALLER_BYTES.ilog2() as usize + 1;

/// The caller's time by its time with a channel, from which on a channel delivers: it takes the time of
/// another core, and both times are estimates.
pub(crate) const MIN_GAIN: f64 = 1.1;
/// Two cores between which a line takes less have their caches in common: they are threads of one core,
/// and the other waits while one of them copies.
pub(crate) const SAME_CORE_LINE_NS: f64 = 0.5;
/// The deliveries after which the caller copies a row of them again.
pub(crate) const PERIOD: u32 = 64;
/// The deliveries of a row.
pub(crate) const ROW: u32 = 6;
/// The first delivery of a row that is measured.
pub(crate) const FIRST_MEASURED: u32 = 4;

#[derive(Debug)]
struct SizeRate {
    deliveries: AtomicU32,
    /// The time of the caller in picoseconds per byte; 0 if not yet measured.
    ps_per_byte: AtomicU64,
    /// The time of a submission to a channel in nanoseconds.
    submit_ns: AtomicU64,
    /// Whether a channel would take less of the caller's time.
    by_channel: AtomicBool,
}

/// Who copies a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeliveryBy {
    Caller,
    Channel,
}

/// A decision, and whether the time is to be reported by [`DeliveryRates::record`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeliveryChoice {
    pub(crate) by: DeliveryBy,
    pub(crate) is_measured: bool,
}

impl DeliveryChoice {
    /// The caller copies, and nothing is measured.
    pub(crate) const INLINE: Self = Self { by: DeliveryBy::Caller, is_measured: false };
}

impl DeliveryRates {
    pub(crate) fn new(profile: &CpuProfile) -> Self {
        let is_same_core = profile.remote_line_ns < SAME_CORE_LINE_NS;
        let submit_ns = 2 * profile.handover_ns as u64;
        let rate = || SizeRate {
            deliveries: AtomicU32::new(0),
            ps_per_byte: AtomicU64::new(0),
            submit_ns: AtomicU64::new(submit_ns),
            by_channel: AtomicBool::new(false),
        };
        Self {
            submit_ns,
            line_ns: profile.remote_line_ns,
            beside_ns_per_byte: if is_same_core { 1.0 / profile.cached_gb_per_s } else { 0.0 },
            sizes: std::array::from_fn(|_| rate()),
        }
    }

    /// The time of a submission in nanoseconds before one was measured.
    pub(crate) fn first_submit_ns(&self) -> u64 {
        self.submit_ns
    }

    /// The sizes that were measured, with what was learned of each.
    pub(crate) fn learned(&self) -> Vec<LearnedDelivery> {
        let rates = self.sizes.iter().enumerate().filter_map(|(power, size)| {
            let ps_per_byte = size.ps_per_byte.load(Ordering::Relaxed);
            (ps_per_byte > 0).then(|| LearnedDelivery {
                min_bytes: 1 << power,
                caller_ns_per_byte: ps_per_byte as f64 / 1000.0,
                submit_ns: size.submit_ns.load(Ordering::Relaxed),
                by_channel: size.by_channel.load(Ordering::Relaxed),
            })
        });
        rates.collect()
    }

    fn size(&self, bytes: u64) -> &SizeRate {
        &self.sizes[bytes.max(1).ilog2() as usize]
    }

    /// Decides about a delivery of at most [`MAX_CALLER_BYTES`].
    pub(crate) fn decide(&self, bytes: u64) -> DeliveryChoice {
        /// The delivery by a channel that is measured: the first one after the row may have to wake it.
        const CHANNEL_MEASURED: u32 = ROW + 4;
        let size = self.size(bytes);
        // Threads that deliver at the same time may lose a count.
        let number = size.deliveries.load(Ordering::Relaxed);
        size.deliveries.store(number.wrapping_add(1), Ordering::Relaxed);
        let turn = number % PERIOD;
        if turn < ROW {
            let is_measured = turn >= FIRST_MEASURED;
            return DeliveryChoice { by: DeliveryBy::Caller, is_measured };
        }
        match size.by_channel.load(Ordering::Relaxed) {
            true => {
                DeliveryChoice { by: DeliveryBy::Channel, is_measured: turn == CHANNEL_MEASURED }
            }
            false => DeliveryChoice::INLINE,
        }
    }

    /// Records the time that a delivery has taken from the caller.
    #[cold]
    pub(crate) fn record(&self, by: DeliveryBy, bytes: u64, start: Instant) {
        let took_ns = start.elapsed().as_nanos() as u64;
        match by {
            DeliveryBy::Caller => self.adapt(bytes, 1000 * took_ns / bytes.max(1)),
            DeliveryBy::Channel => {
                let submit_ns = &self.size(bytes).submit_ns;
                let before = submit_ns.load(Ordering::Relaxed);
                // One disturbed submission changes little.
                let measured = took_ns.min(4 * before.max(1));
                submit_ns.store((3 * before + measured) / 4, Ordering::Relaxed);
            }
        }
    }

    /// Moves the time of submissions back to its first estimate, in some thousand deliveries: nothing else
    /// would show that they have become faster while the caller delivers.
    fn forget_submissions(&self, size: &SizeRate) {
        let submit_ns = size.submit_ns.load(Ordering::Relaxed);
        let excess = submit_ns.saturating_sub(self.submit_ns);
        size.submit_ns.store(submit_ns - excess / 32, Ordering::Relaxed);
    }

    /// Moves the rate a part of the way, so that a single disturbed delivery changes little.
    fn adapt(&self, bytes: u64, measured: u64) {
        const LINE: f64 = 64.0;
        let size = self.size(bytes);
        let before = size.ps_per_byte.load(Ordering::Relaxed);
        let after = if before == 0 { measured } else { (3 * before + measured) / 4 };
        size.ps_per_byte.store(after.max(1), Ordering::Relaxed);
        self.forget_submissions(size);
        let caller_ns = bytes as f64 * after as f64 / 1000.0;
        let channel_ns = size.submit_ns.load(Ordering::Relaxed) as f64
            + bytes as f64 / LINE * self.line_ns
            + bytes as f64 * self.beside_ns_per_byte;
        size.by_channel.store(caller_ns > MIN_GAIN * channel_ns, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn rates(handover_ns: f64, remote_line_ns: f64) -> DeliveryRates {
        DeliveryRates::new(&CpuProfile { handover_ns, remote_line_ns, ..CpuProfile::built_in() })
    }

    /// Who delivers after the row of the caller.
    fn usual(rates: &DeliveryRates, bytes: u64) -> DeliveryBy {
        let decisions: Vec<_> = (0..16 * 64).map(|_| rates.decide(bytes)).collect();
        let count = |by| decisions.iter().filter(|decision| decision.by == by).count();
        let measured = |by| DeliveryChoice { by, is_measured: true };
        assert!(decisions.contains(&measured(DeliveryBy::Caller)));
        match (count(DeliveryBy::Caller), count(DeliveryBy::Channel)) {
            (1024, 0) => DeliveryBy::Caller,
            (96, 928) => {
                assert!(decisions.contains(&measured(DeliveryBy::Channel)));
                DeliveryBy::Channel
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_channel_delivers_what_is_in_no_cache_and_the_caller_the_rest() {
        let rates = rates(200.0, 5.0);
        for bytes in [16 << 10, 64 << 10, MAX_CALLER_BYTES] {
            (0..20).for_each(|_| rates.adapt(bytes, 25));
            assert_eq!(usual(&rates, bytes), DeliveryBy::Caller);
            (0..20).for_each(|_| rates.adapt(bytes, 250));
            assert_eq!(usual(&rates, bytes), DeliveryBy::Channel);
        }
        assert_eq!(usual(&rates, 32 << 10), DeliveryBy::Caller, "sizes are measured apart");
    }

    #[test]
    fn a_thread_of_the_same_core_must_save_more() {
        let (apart, same) = (rates(200.0, 1.0), rates(200.0, 0.1));
        for rates in [&apart, &same] {
            rates.adapt(64 << 10, 40);
        }
        assert_eq!(usual(&apart, 64 << 10), DeliveryBy::Channel);
        assert_eq!(usual(&same, 64 << 10), DeliveryBy::Caller);
    }

    #[test]
    fn submissions_that_take_long_leave_deliveries_to_the_caller() {
        let (rates, bytes) = (rates(200.0, 1.0), 16 << 10);
        let start =
            Instant::now().checked_sub(Duration::from_secs(1)).expect("it is not that early");
        rates.adapt(bytes, 100);
        assert_eq!(usual(&rates, bytes), DeliveryBy::Channel);
        rates.record(DeliveryBy::Channel, bytes, start);
        rates.adapt(bytes, 100);
        assert_eq!(usual(&rates, bytes), DeliveryBy::Channel, "one changes little");
        (0..5).for_each(|_| rates.record(DeliveryBy::Channel, bytes, start));
        rates.adapt(bytes, 100);
        assert_eq!(usual(&rates, bytes), DeliveryBy::Caller);
        (0..400).for_each(|_| rates.adapt(bytes, 100));
        assert_eq!(usual(&rates, bytes), DeliveryBy::Channel, "they are tried again");
    }
}
