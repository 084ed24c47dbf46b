//! Calibration of the machine: a fifth to a third of a second, through a real channel, so that the
//! values are those of real copies. Every value is the best of several tries, because disturbances
//! only slow a try down. If other processes have the processors most of the time, even the best try
//! is slow, and the result is rejected.

use std::cell::Cell;
use std::time::{Duration, Instant};

use memferry_sys::affinity;
use memferry_sys::contention::{ContentionMeter, CpuTimes, own_waited_ns};
use memferry_sys::copy::stream::Streaming;
use memferry_sys::pages::Pages;
use memferry_sys::throttle::ThrottleMonitor;
use memferry_sys::topology::{self, SiblingPair, Topology};

use super::channel;
use super::profile::{CpuProfile, ProfileOrigin};
use crate::contract::{Channel, ChannelOptions, Descriptor, Kernel, Opcode, OpenError};
use crate::runtime::execute::{self, Operands};
use crate::runtime::profile_store::{MeasureError, check_contention, check_throttling};
use crate::runtime::threaded::ThreadedChannel;
use crate::runtime::wake_chain::ChainedParker;

const MAX_BYTES: usize = 16 << 20;
const BUDGET: Duration = Duration::from_millis(120);
/// The time after which a measurement on a busy machine stops.
const MAX_BUSY_TIME: Duration = Duration::from_millis(360);
/// The time after which a measurement stops if a CPU quota throttles it again and again.
const MAX_THROTTLED_TIME: Duration = Duration::from_millis(1000);

/// How long the channels of a measurement may take to fall asleep before it is given up: longer than any of
/// them polls.
const MAX_POLLING_TIME: Duration = Duration::from_millis(40);
/// How long the channels poll whose gains are measured. They must sleep while others are measured.
const GAIN_SPIN_NS: u64 = 200_000;
/// The size of copies of data that is in no cache.
const COLD_BYTES: usize = 1 << 20;
/// The maximum number of tries of such copies, and the minimum for gains: one that was disturbed would
/// decide for all later processes.
const COLD_TRIES: usize = 6;
const MIN_GAIN_TRIES: usize = 3;

/// Measures the profile. An error if other processes had the processors during the measurement.
pub(super) fn measure() -> Result<CpuProfile, MeasureError> {
    let (meter, before) = (ContentionMeter::default(), CpuTimes::now());
    // The calibrator lives until the meter has read the times of its channel's thread.
    let (profile, calibrator) = meter
        .measure_with_threads(|| {
            let mut calibrator = CpuCalibrator::new()?;
            Some((measure_with(&mut calibrator), calibrator))
        })
        .ok_or(MeasureError::Impossible)?;
    let took = calibrator.start.elapsed();
    let stolen = CpuTimes::stolen_share(before, CpuTimes::now(), took);
    let contention = meter.share(calibrator.quota.throttled_ns()).max(stolen);
    let throttled = calibrator.quota.share();
    tracing::debug!(?profile, ?took, contention, throttled, "calibrated");
    check_contention(contention)?;
    if calibrator.is_incomplete.get() {
        check_throttling(throttled)?;
        return Err(MeasureError::Unreliable("the machine was too busy to measure".into()));
    }
    Ok(profile)
}

/// Measures what this machine allows; the other values are built in.
fn measure_with(calibrator: &mut CpuCalibrator) -> CpuProfile {
    let mut profile = CpuProfile { origin: ProfileOrigin::Measured, ..CpuProfile::built_in() };
    profile.cached_gb_per_s = calibrator.one_core_gb_per_s(Kernel::Cached, 64 << 10);
    profile.handover_ns = calibrator.handover_ns().unwrap_or(profile.handover_ns);
    profile.wake_ns = calibrator.wake_ns().unwrap_or(profile.wake_ns);
    profile.remote_line_ns = calibrator.remote_line_ns().unwrap_or(profile.remote_line_ns);
    profile.inline_bytes = calibrator.inline_bytes(profile.handover_ns);

    let streaming = calibrator.best_streaming();
    let stream = Kernel::Stream(streaming);
    profile.streaming = streaming;
    if let Some(gains) = pair_here().and_then(|pair| calibrator.gains_of_pair(pair, stream)) {
        (profile.sibling_gain, profile.neighbour_gain) = gains;
    }
    profile.stream_gb_per_s = calibrator.one_core_gb_per_s(stream, MAX_BYTES);
    profile.pair_stream_gb_per_s = calibrator.shared_gb_per_s(stream, MAX_BYTES);
    profile.stream_bytes =
        crossover(|kernel, bytes| calibrator.one_core_gb_per_s(kernel, bytes), stream);
    profile.shared_stream_bytes =
        crossover(|kernel, bytes| calibrator.shared_gb_per_s(kernel, bytes), stream);
    profile.split_bytes = calibrator.split_bytes();
    profile.node_query_ns = calibrator.node_query_ns().unwrap_or(profile.node_query_ns);
    profile
}

/// A kernel that bypasses the caches counts as a tenth faster than it is: it leaves the caches to other
/// data.
const STREAM_BONUS: f64 = 1.1;

/// The size from which to use the streaming kernel: the threshold that minimizes the sum of the
/// losses against the better kernel at each size, so that one disturbed measurement moves it
/// little. The bonus is for sizes above half of the second-level cache.
fn crossover(mut gb_per_s: impl FnMut(Kernel, usize) -> f64, stream: Kernel) -> usize {
    const SIZES: [usize; 6] = [512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, MAX_BYTES];
    let l2_bytes = memferry_sys::cpu::info().l2_bytes;
    let losses = SIZES.map(|bytes| {
        let is_beyond = 2 * bytes > l2_bytes && stream.bypasses_caches();
        let bonus = if is_beyond { STREAM_BONUS } else { 1.0 };
        let (cached, streamed) = (gb_per_s(Kernel::Cached, bytes), bonus * gb_per_s(stream, bytes));
        let best = cached.max(streamed);
        (best / cached, best / streamed)
    });
    let loss = |from: usize| -> f64 {
        losses.iter().enumerate().map(|(at, &(c, s))| if at < from { c } else { s }).sum()
    };
    let best = (0..SIZES.len()).min_by(|&a, &b| loss(a).total_cmp(&loss(b)));
    SIZES[best.unwrap_or(SIZES.len() - 1)]
}

/// The buffers and the channel of a calibration.
struct CpuCalibrator {
    source: Pages,
    target: Pages,
    /// `None` on a single core, where sharing cannot be faster.
    channel: Option<ThreadedChannel>,
    start: Instant,
    /// Monitors throttling from `start` on.
    quota: ThrottleMonitor,
    /// The time that this thread had waited for a processor at `start`.
    waited_ns: Option<u64>,
    /// A measurement was skipped: values are missing.
    is_incomplete: Cell<bool>,
}

impl CpuCalibrator {
    fn new() -> Option<Self> {
        let (start, quota, waited_ns) = (Instant::now(), ThrottleMonitor::start(), own_waited_ns());
        let mut source = Pages::new(MAX_BYTES).ok()?;
        let mut target = Pages::new(MAX_BYTES).ok()?;
        source.as_mut_slice().fill(1);
        target.as_mut_slice().fill(2);
        let channel = (affinity::allowed_cores().len() > 1)
            .then(|| open_channel(&ChannelOptions::default(), 64, 5_000_000).ok())
            .flatten();
        Some(Self {
            source,
            target,
            channel,
            start,
            quota,
            waited_ns,
            is_incomplete: Cell::new(false),
        })
    }

    /// The number of tries for a measurement that moves `bytes`; fewer when the time budget is
    /// exceeded, and 0 on a machine that is too busy for a valid result.
    fn tries(&self, bytes: usize) -> usize {
        let throttled_ns = self.quota.throttled_ns();
        match self.start.elapsed() {
            took if took > MAX_BUSY_TIME
                && (self.is_incomplete.get() || self.is_too_busy(took, throttled_ns)) =>
            {
                self.is_incomplete.set(true);
                0
            }
            // An exhausted quota stops one of two tries, but not the other.
            took if took > BUDGET => 1 + usize::from(throttled_ns > 0),
            _ => (MAX_BYTES / bytes).clamp(3, 8),
        }
    }

    /// Whether other processes have the processors, or a quota leaves too little of them.
    fn is_too_busy(&self, took: Duration, throttled_ns: u64) -> bool {
        let waited = self.waited_ns.zip(own_waited_ns());
        let is_busy = waited.is_some_and(|(before, now)| {
            let meter = ContentionMeter::default();
            meter.add(now.saturating_sub(before), took.as_nanos() as u64);
            check_contention(meter.share(throttled_ns)).is_err()
        });
        is_busy || took > MAX_THROTTLED_TIME && check_throttling(self.quota.share()).is_err()
    }

    /// The bandwidth of one core, in GB/s.
    fn one_core_gb_per_s(&mut self, kernel: Kernel, bytes: usize) -> f64 {
        let best = best_ns(self.tries(bytes), || self.run_inline(kernel, 0, bytes));
        bytes as f64 / best
    }

    /// The bandwidth of this core and a channel together in GB/s, submission included.
    fn shared_gb_per_s(&mut self, kernel: Kernel, bytes: usize) -> f64 {
        let channel = self.channel.as_ref();
        let best = best_ns(self.tries(bytes), || self.run_shared(channel, kernel, bytes));
        bytes as f64 / best
    }

    /// Copies one half here and the other in the channel, if there is one.
    fn run_shared(&self, channel: Option<&ThreadedChannel>, kernel: Kernel, bytes: usize) {
        let Some(channel) = channel else {
            return self.run_inline(kernel, 0, bytes);
        };
        let half = bytes / 2;
        // SAFETY: the two halves are distinct and the buffers live until the channel is done, which is
        // awaited below.
        let first_half = unsafe {
            Descriptor::new(Opcode::Copy, self.source_at(0), self.target_at(0), half as u64)
        };
        let Ok(accepted) = channel.submit(&mut [Some(first_half.kernel(kernel))]) else {
            return;
        };
        self.run_inline(kernel, half, bytes);
        while channel.completed() < accepted.last() {
            std::hint::spin_loop();
        }
    }

    /// Hands a descriptor of one byte over, and waits for it.
    fn round_trip(&self, channel: &ThreadedChannel) {
        // SAFETY: one byte inside the target, which lives until the channel is done.
        let fill = unsafe { Descriptor::new(Opcode::Fill, 0, self.target_at(MAX_BYTES - 1), 1) };
        let Ok(accepted) = channel.submit(&mut [Some(fill)]) else {
            return;
        };
        while channel.completed() < accepted.last() {
            std::hint::spin_loop();
        }
    }

    /// The time in nanoseconds of a copy of data that is in no cache, by this core and a channel that is
    /// awake, if one is named.
    fn cold_ns(&self, channel: Option<&ThreadedChannel>, kernel: Kernel) -> f64 {
        memferry_sys::copy::flush(&self.source.as_slice()[..COLD_BYTES]);
        memferry_sys::copy::flush(&self.target.as_slice()[..COLD_BYTES]);
        if let Some(channel) = channel {
            self.round_trip(channel);
        }
        best_of(1, || self.run_shared(channel, kernel, COLD_BYTES))
    }

    /// The bandwidth of this core and a channel together in GB/s, of data that is in no cache.
    fn cold_gb_per_s(&mut self, kernel: Kernel) -> f64 {
        let tries = self.tries(COLD_BYTES).min(COLD_TRIES);
        let times = (0..tries).map(|_| self.cold_ns(self.channel.as_ref(), kernel));
        COLD_BYTES as f64 / times.fold(f64::INFINITY, f64::min)
    }

    /// The gains of sharing a copy with the sibling of a core and with the nearest other core, measured by a
    /// thread that is bound to the first. They have enough tries also when the time budget is exceeded: they
    /// decide for long, and few machines have siblings. `None` on a machine that is too busy.
    fn gains_of_pair(&mut self, pair: SiblingPair, kernel: Kernel) -> Option<(f64, f64)> {
        // Asked here: this thread's time of waiting for a processor is compared with its own at `start`.
        let tries = match self.tries(COLD_BYTES) {
            0 => return None,
            tries => tries.clamp(MIN_GAIN_TRIES, COLD_TRIES),
        };
        std::thread::scope(|scope| {
            let measure = || {
                affinity::bind_to_core(pair.core).ok()?;
                self.gains(pair, kernel, tries)
            };
            let builder = std::thread::Builder::new().name("memferry-measure".into());
            builder.spawn_scoped(scope, measure).ok()?.join().ok()?
        })
    }

    /// The gains, by the best of so many tries of each way. `None` if the machine is too busy.
    fn gains(&mut self, pair: SiblingPair, kernel: Kernel, tries: usize) -> Option<(f64, f64)> {
        let bound = |core| {
            let options = ChannelOptions { core: Some(core), ..ChannelOptions::default() };
            open_channel(&options, 64, GAIN_SPIN_NS)
        };
        let mut ways = vec![None, Some(bound(pair.sibling).ok()?)];
        if let Some(core) = pair.neighbour {
            ways.push(Some(bound(core).ok()?));
        }
        let best = best_in_turn(ways.len(), tries, |way| {
            // One that polls would take time from its sibling.
            let mut channels = ways.iter().flatten().chain(&self.channel);
            let is_quiet = channels.all(falls_asleep) && self.start.elapsed() <= MAX_BUSY_TIME;
            is_quiet.then(|| self.cold_ns(ways[way].as_ref(), kernel))
        })?;
        let gain = |way: usize| best.get(way).map_or(0.0, |ns| best[0] / ns);
        Some((gain(1), gain(2)))
    }

    /// The time in nanoseconds to ask the kernel for the nodes of a source and a target. `None` where there
    /// is only one node.
    fn node_query_ns(&self) -> Option<f64> {
        const PAGES: usize = 64;
        const TRIES: usize = 5;
        let ask = || {
            for page in 0..PAGES {
                let offset = page << 12;
                topology::memory_nodes([self.target_at(offset), self.source_at(offset)]);
            }
        };
        (Topology::of_machine().nodes() > 1).then(|| best_ns(TRIES, ask) / PAGES as f64)
    }

    fn source_at(&self, offset: usize) -> u64 {
        self.source.as_ptr() as u64 + offset as u64
    }

    fn target_at(&self, offset: usize) -> u64 {
        self.target.as_ptr() as u64 + offset as u64
    }

    fn run_inline(&self, kernel: Kernel, from: usize, to: usize) {
        let (source, target) = (self.source_at(from), self.target_at(from));
        // SAFETY: both ranges lie inside the buffers, which are distinct and owned by `self`; a
        // busy channel has another range. Kernels come from the list of supported ones.
        unsafe {
            execute::run(Opcode::Copy, kernel, Operands::new(source, target), (to - from) as u64, 0)
        };
    }

    /// The one-way time in nanoseconds: half of the round trip of a descriptor of one byte.
    fn handover_ns(&mut self) -> Option<f64> {
        const BATCHES: usize = 200;
        const ROUNDS: usize = 10;
        let channel = self.channel.as_ref()?;
        // If other threads want the cores too, every round can take a scheduler time slice.
        let until = Instant::now() + BUDGET / 4;
        let best =
            best_ns_until(until, BATCHES, || (0..ROUNDS).for_each(|_| self.round_trip(channel)));
        Some(best / ROUNDS as f64 / 2.0)
    }

    /// The time that a line takes more to read after the channel has written it, in nanoseconds.
    fn remote_line_ns(&mut self) -> Option<f64> {
        const BYTES: usize = 128 << 10;
        const TRIES: usize = 8;
        const MIN_NS: f64 = 0.1;
        let channel = self.channel.as_ref()?;
        let (mut remote, mut local) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..TRIES {
            // SAFETY: the range lies inside the target, which lives until the channel is done.
            let fill = unsafe { Descriptor::new(Opcode::Fill, 0, self.target_at(0), BYTES as u64) };
            let accepted = channel.submit(&mut [Some(fill)]).ok()?;
            while channel.completed() < accepted.last() {
                std::hint::spin_loop();
            }
            // SAFETY: the channel is done, and has written the bytes.
            let bytes = unsafe { std::slice::from_raw_parts(self.target.as_ptr(), BYTES) };
            let read = || {
                let (words, _) = bytes.as_chunks::<8>();
                let sum = words.iter().map(|word| u64::from_ne_bytes(*word));
                std::hint::black_box(sum.fold(0, u64::wrapping_add));
            };
            (remote, local) = (remote.min(best_of(1, read)), local.min(best_of(1, read)));
        }
        Some(((remote - local) / (BYTES / 64) as f64).max(MIN_NS))
    }

    /// The time in nanoseconds of a submit that finds the channel asleep.
    fn wake_ns(&mut self) -> Option<f64> {
        const TRIES: u32 = 7;
        self.channel.as_ref()?;
        let options = ChannelOptions { spin_ns: Some(0), ..ChannelOptions::default() };
        let sleeper = open_channel(&options, 4, 0).ok()?;
        let mut times = Vec::new();
        for _ in 0..TRIES {
            let deadline = Instant::now() + Duration::from_millis(2);
            while !sleeper.is_asleep() && Instant::now() < deadline {
                std::thread::yield_now();
            }
            // SAFETY: one byte inside the target, which lives until the channel is done.
            let fill = unsafe { Descriptor::new(Opcode::Fill, 0, self.target_at(0), 1) };
            let start = Instant::now();
            let accepted = sleeper.submit(&mut [Some(fill)]).ok()?;
            times.push(start.elapsed().as_nanos() as f64);
            sleeper.park(accepted.last(), Duration::from_millis(10));
        }
        times.sort_by(f64::total_cmp);
        Some(times[times.len() / 2])
    }

    /// The maximum size of a copy that takes no longer than a submission.
    fn inline_bytes(&mut self, handover_ns: f64) -> usize {
        const REPEAT: usize = 64;
        (10..=15)
            .map(|shift| 1usize << shift)
            .take_while(|&bytes| {
                let best = best_ns(5, || {
                    (0..REPEAT).for_each(|_| self.run_inline(Kernel::Cached, 0, bytes));
                });
                best / REPEAT as f64 <= handover_ns
            })
            .last()
            .unwrap_or(1 << 10)
    }

    /// The fastest streaming kernel for large copies on two cores, with the bonus of [`crossover`]
    /// for those that bypass the caches.
    fn best_streaming(&mut self) -> Streaming {
        let mut best = (Streaming::Plain, 0.0);
        for variant in Streaming::supported() {
            let bonus = if variant.bypasses_caches() { STREAM_BONUS } else { 1.0 };
            let speed = bonus * self.cold_gb_per_s(Kernel::Stream(variant));
            if speed > best.1 {
                best = (variant, speed);
            }
        }
        best.0
    }

    /// The minimum size from which every measured size is at least a third faster when shared.
    fn split_bytes(&mut self) -> usize {
        if self.channel.is_none() {
            return usize::MAX;
        }
        let mut from = 2 << 20;
        for bytes in [1 << 20, 512 << 10, 256 << 10, 128 << 10] {
            if self.shared_gb_per_s(Kernel::Cached, bytes)
                < 1.33 * self.one_core_gb_per_s(Kernel::Cached, bytes)
            {
                break;
            }
            from = bytes;
        }
        from
    }
}

/// Opens a channel that belongs to no engine.
fn open_channel(
    options: &ChannelOptions,
    capacity: usize,
    spin_ns: u64,
) -> Result<ThreadedChannel, OpenError> {
    channel::open(options, capacity, spin_ns, None, ChainedParker::alone())
}

/// This core and its sibling, if that is allowed.
fn pair_here() -> Option<SiblingPair> {
    let (here, allowed) = (affinity::current_core(), affinity::allowed_cores());
    Topology::of_machine().sibling_pair(here, &allowed)
}

/// Waits until a channel sleeps; `false` if it does not.
fn falls_asleep(channel: &ThreadedChannel) -> bool {
    let deadline = Instant::now() + MAX_POLLING_TIME;
    while !channel.is_asleep() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// The times of the fastest try of each way. Each try runs all ways one after the other, so that what
/// disturbs the machine for a while disturbs all of them. The first run of each way does not count.
fn best_in_turn(
    ways: usize,
    tries: usize,
    mut run: impl FnMut(usize) -> Option<f64>,
) -> Option<Vec<f64>> {
    let mut best = vec![f64::INFINITY; ways];
    for number in 0..=tries {
        for (way, best) in best.iter_mut().enumerate() {
            let ns = run(way)?;
            if number > 0 {
                *best = best.min(ns);
            }
        }
    }
    Some(best)
}

/// The time of the fastest try in nanoseconds; NaN without a try.
fn best_ns(tries: usize, mut run: impl FnMut()) -> f64 {
    if tries == 0 {
        return f64::NAN;
    }
    run();
    best_of(tries, run)
}

/// Like [`best_ns`], with fewer tries when the time is up.
fn best_ns_until(until: Instant, tries: usize, mut run: impl FnMut()) -> f64 {
    run();
    let mut best = best_of(1, &mut run);
    for _ in 1..tries {
        if Instant::now() >= until {
            break;
        }
        best = best.min(best_of(1, &mut run));
    }
    best
}

fn best_of(tries: usize, mut run: impl FnMut()) -> f64 {
    let times = (0..tries).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_nanos() as f64
    });
    times.fold(f64::INFINITY, f64::min).max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two cores, as a core and its sibling; `None` where there is one.
    fn any_pair() -> Option<SiblingPair> {
        let [core, sibling, ..] = affinity::allowed_cores()[..] else {
            let why = "there is only one core";
            memferry_testing::skip(memferry_testing::Requirement::Cores, why);
            return None;
        };
        Some(SiblingPair { core, sibling, neighbour: Some(sibling) })
    }

    #[test]
    fn gains_are_measured_with_each_core_while_the_usual_channel_sleeps() {
        let Some(pair) = any_pair() else { return };
        let mut calibrator = CpuCalibrator::new().unwrap();
        let mut gains = |pair| {
            // On a machine that is busy with other things they may not be measured at once.
            let mut found = None;
            memferry_testing::until("gains are measured", || {
                calibrator.start = Instant::now();
                calibrator.round_trip(calibrator.channel.as_ref().unwrap());
                let completed = calibrator.channel.as_ref().unwrap().completed();
                found = calibrator.gains(pair, Kernel::Cached, MIN_GAIN_TRIES);
                let channel = calibrator.channel.as_ref().unwrap();
                assert!(found.is_none() || channel.is_asleep());
                assert_eq!(channel.completed(), completed, "it got no work");
                found.is_some()
            });
            found.unwrap()
        };
        let (sibling, neighbour) = gains(pair);
        assert!(sibling > 0.0 && neighbour > 0.0);
        let (sibling, neighbour) = gains(SiblingPair { neighbour: None, ..pair });
        assert!(sibling > 0.0 && neighbour == 0.0);
    }

    #[test]
    fn gains_are_measured_when_the_budget_is_used_up_but_not_when_it_takes_too_long() {
        let Some(pair) = any_pair() else { return };
        let mut calibrator = CpuCalibrator::new().unwrap();
        let ago = |past| Instant::now().checked_sub(past).unwrap();
        memferry_testing::until("gains are measured", || {
            calibrator.start = ago(BUDGET + Duration::from_millis(1));
            assert!(calibrator.tries(COLD_BYTES) < MIN_GAIN_TRIES);
            calibrator.gains_of_pair(pair, Kernel::Cached).is_some()
        });
        calibrator.start = ago(MAX_BUSY_TIME + Duration::from_millis(1));
        assert_eq!(calibrator.gains(pair, Kernel::Cached, MIN_GAIN_TRIES), None);
    }

    #[test]
    fn the_ways_of_a_try_take_turns_and_the_first_run_of_each_does_not_count() {
        let mut runs = Vec::new();
        let best = best_in_turn(3, 3, |way| {
            runs.push(way);
            // What is first is fastest, and then one try is disturbed as a whole.
            let disturbed = if (6..9).contains(&(runs.len() - 1)) { 50.0 } else { 0.0 };
            Some(if runs.len() <= 3 { 1.0 } else { 10.0 * (way + 1) as f64 + disturbed })
        });
        assert_eq!(best, Some(vec![10.0, 20.0, 30.0]));
        assert_eq!(runs, [0, 1, 2].repeat(4));
        let mut runs = 0;
        let stopped = best_in_turn(3, 3, |_| {
            runs += 1;
            (runs < 5).then_some(1.0)
        });
        assert_eq!((stopped, runs), (None, 5));
    }

    #[test]
    fn a_measurement_stops_when_its_time_is_up() {
        let count = |until: Instant| {
            let mut runs = 0;
            best_ns_until(until, 50, || runs += 1);
            runs
        };
        assert_eq!(count(Instant::now()), 2);
        assert_eq!(count(Instant::now() + Duration::from_secs(3600)), 51);
    }
}
