//! Measuring the machine: at most 200 ms, through a real channel, so that what is measured is what
//! copies will meet. Every figure is the best of a few tries: disturbances only ever slow things. Where
//! others have the processors most of the time, even the best try is slow, and nothing counts.

use std::cell::Cell;
use std::time::{Duration, Instant};

use memferry_sys::affinity;
use memferry_sys::contention::{Meter, Processors, own_waited_ns};
use memferry_sys::copy::stream::Streaming;
use memferry_sys::pages::Pages;
use memferry_sys::throttle::Watched;

use super::channel;
use super::profile::{Origin, Profile};
use crate::contract::{Channel, ChannelOptions, Descriptor, Kernel, Operation};
use crate::execute;
use crate::saved::{NotMeasured, check_contention, check_throttling};
use crate::threaded::ThreadedChannel;

const LARGEST: usize = 16 << 20;
const BUDGET: Duration = Duration::from_millis(120);
/// After so long nobody goes on measuring on a busy machine.
const LATE: Duration = Duration::from_millis(360);
/// After so long nobody goes on under a quota that is used up again and again.
const HOPELESS: Duration = Duration::from_millis(1000);

/// Measures. An error if others had the processors meanwhile.
pub(super) fn measure() -> Result<Profile, NotMeasured> {
    let (meter, before) = (Meter::default(), Processors::now());
    // The bench lives until the meter has looked at its channel's thread.
    let (profile, bench) = meter
        .during_with_threads(|| {
            let mut bench = Bench::new()?;
            Some((measure_with(&mut bench), bench))
        })
        .ok_or(NotMeasured::Impossible)?;
    let took = bench.start.elapsed();
    let stolen = Processors::stolen_share(before, Processors::now(), took);
    let contention = meter.share(bench.quota.throttled_ns()).max(stolen);
    let throttled = bench.quota.share();
    tracing::debug!(?profile, ?took, contention, throttled, "calibrated");
    check_contention(contention)?;
    if bench.gave_up.get() {
        check_throttling(throttled)?;
        return Err(NotMeasured::Unreliable("the machine was too busy to measure at all".into()));
    }
    Ok(profile)
}

/// Measures what can be measured here; the rest is built in.
fn measure_with(bench: &mut Bench) -> Profile {
    let mut profile = Profile { origin: Origin::Measured, ..Profile::built_in() };
    profile.cached_gb_per_s = bench.alone(Kernel::Cached, 64 << 10);
    profile.handover_ns = bench.handover_ns().unwrap_or(profile.handover_ns);
    profile.wake_ns = bench.wake_ns().unwrap_or(profile.wake_ns);
    profile.inline_bytes = bench.inline_bytes(profile.handover_ns);

    let streaming = bench.best_streaming();
    let stream = Kernel::Stream(streaming);
    profile.streaming = streaming;
    profile.stream_gb_per_s = bench.alone(stream, LARGEST);
    profile.pair_stream_gb_per_s = bench.shared(stream, LARGEST);
    profile.stream_bytes = crossover(|kernel, bytes| bench.alone(kernel, bytes), stream);
    profile.shared_stream_bytes = crossover(|kernel, bytes| bench.shared(kernel, bytes), stream);
    profile.split_bytes = bench.split_bytes();
    profile
}

/// The size from which on to stream: the one with which a copy of each size would, taken together,
/// lose the least against the better kernel for that size. One disturbed measurement so moves the
/// line by little. What does not fit the second-level cache counts a little for streaming, which
/// leaves the caches to others.
fn crossover(mut gb_per_s: impl FnMut(Kernel, usize) -> f64, stream: Kernel) -> usize {
    const SIZES: [usize; 6] = [512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, LARGEST];
    const LEAVES_CACHES_ALONE: f64 = 1.1;
    let l2_bytes = memferry_sys::cpu::facts().l2_bytes;
    let losses = SIZES.map(|bytes| {
        let bonus = if 2 * bytes > l2_bytes { LEAVES_CACHES_ALONE } else { 1.0 };
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

/// Buffers and a channel to measure with.
struct Bench {
    source: Pages,
    target: Pages,
    /// `None` on a single core, where sharing cannot win.
    channel: Option<ThreadedChannel>,
    start: Instant,
    /// Since then.
    quota: Watched,
    /// How long this thread had waited for a processor by then.
    waited_ns: Option<u64>,
    /// Something was not tried at all: figures are missing.
    gave_up: Cell<bool>,
}

impl Bench {
    fn new() -> Option<Self> {
        let (start, quota, waited_ns) = (Instant::now(), Watched::begin(), own_waited_ns());
        let mut source = Pages::new(LARGEST).ok()?;
        let mut target = Pages::new(LARGEST).ok()?;
        source.as_mut_slice().fill(1);
        target.as_mut_slice().fill(2);
        let channel = (affinity::allowed_cores().len() > 1)
            .then(|| channel::open(&ChannelOptions::default(), 64, 5_000_000).ok())
            .flatten();
        Some(Self { source, target, channel, start, quota, waited_ns, gave_up: Cell::new(false) })
    }

    /// How often to repeat something that moves `bytes`; less when the time runs out, and never on a
    /// machine that is so busy that nothing will be kept.
    fn tries(&self, bytes: usize) -> usize {
        let throttled_ns = self.quota.throttled_ns();
        match self.start.elapsed() {
            took if took > LATE && (self.gave_up.get() || self.is_hopeless(took, throttled_ns)) => {
                self.gave_up.set(true);
                0
            }
            // A quota that is used up stops one of two tries, and not the other.
            took if took > BUDGET => 1 + usize::from(throttled_ns > 0),
            _ => (LARGEST / bytes).clamp(3, 8),
        }
    }

    /// Whether others have the processors, or a quota leaves hardly anything of them.
    fn is_hopeless(&self, took: Duration, throttled_ns: u64) -> bool {
        let waited = self.waited_ns.zip(own_waited_ns());
        let is_busy = waited.is_some_and(|(before, now)| {
            let meter = Meter::default();
            meter.add(now.saturating_sub(before), took.as_nanos() as u64);
            check_contention(meter.share(throttled_ns)).is_err()
        });
        is_busy || took > HOPELESS && check_throttling(self.quota.share()).is_err()
    }

    /// Bandwidth of one core, in GB/s.
    fn alone(&mut self, kernel: Kernel, bytes: usize) -> f64 {
        let best = best_ns(self.tries(bytes), || self.run_here(kernel, 0, bytes));
        bytes as f64 / best
    }

    /// Bandwidth of this core and a channel together, hand-over included.
    fn shared(&mut self, kernel: Kernel, bytes: usize) -> f64 {
        let Some(channel) = &self.channel else {
            return self.alone(kernel, bytes);
        };
        let half = bytes / 2;
        let best = best_ns(self.tries(bytes), || {
            // SAFETY: the two halves are distinct and the buffers live until the channel is done,
            // which is awaited below.
            let theirs = unsafe {
                Descriptor::new(Operation::Copy, self.source_at(0), self.target_at(0), half as u64)
            };
            let Ok(taken) = channel.submit(&mut [Some(theirs.kernel(kernel))]) else {
                return;
            };
            self.run_here(kernel, half, bytes);
            while channel.completed() < taken.last() {
                std::hint::spin_loop();
            }
        });
        bytes as f64 / best
    }

    fn source_at(&self, offset: usize) -> u64 {
        self.source.as_ptr() as u64 + offset as u64
    }

    fn target_at(&self, offset: usize) -> u64 {
        self.target.as_ptr() as u64 + offset as u64
    }

    fn run_here(&self, kernel: Kernel, from: usize, to: usize) {
        let (source, target) = (self.source_at(from), self.target_at(from));
        // SAFETY: both ranges lie inside the buffers, which are distinct and owned by `self`; a
        // channel at work has another range. Kernels come from the list of supported ones.
        unsafe { execute::run(Operation::Copy, kernel, source, target, (to - from) as u64, 0) };
    }

    /// One way: half of the time for a descriptor of one byte to come back.
    fn handover_ns(&mut self) -> Option<f64> {
        const BATCHES: usize = 200;
        const ROUNDS: usize = 10;
        let channel = self.channel.as_ref()?;
        let round = || {
            // SAFETY: one byte inside the target, which lives until the channel is done.
            let fill = unsafe { Descriptor::new(Operation::Fill, 0, self.target_at(0), 1) };
            let Ok(taken) = channel.submit(&mut [Some(fill)]) else {
                return;
            };
            while channel.completed() < taken.last() {
                std::hint::spin_loop();
            }
        };
        // Where others want the cores too, every round can take as long as it is their turn.
        let until = Instant::now() + BUDGET / 4;
        let best = best_ns_until(until, BATCHES, || (0..ROUNDS).for_each(|_| round()));
        Some(best / ROUNDS as f64 / 2.0)
    }

    /// The time inside a submit that finds the channel asleep.
    fn wake_ns(&mut self) -> Option<f64> {
        const TRIES: u32 = 7;
        self.channel.as_ref()?;
        let options = ChannelOptions { spin_ns: Some(0), ..ChannelOptions::default() };
        let sleeper = channel::open(&options, 4, 0).ok()?;
        let mut times = Vec::new();
        for _ in 0..TRIES {
            let deadline = Instant::now() + Duration::from_millis(2);
            while !sleeper.is_asleep() && Instant::now() < deadline {
                std::thread::yield_now();
            }
            // SAFETY: one byte inside the target, which lives until the channel is done.
            let fill = unsafe { Descriptor::new(Operation::Fill, 0, self.target_at(0), 1) };
            let start = Instant::now();
            let taken = sleeper.submit(&mut [Some(fill)]).ok()?;
            times.push(start.elapsed().as_nanos() as f64);
            sleeper.park(taken.last(), Duration::from_millis(10));
        }
        times.sort_by(f64::total_cmp);
        Some(times[times.len() / 2])
    }

    /// The largest copy that takes no longer than a hand-over.
    fn inline_bytes(&mut self, handover_ns: f64) -> usize {
        const REPEAT: usize = 64;
        (10..=15)
            .map(|shift| 1usize << shift)
            .take_while(|&bytes| {
                let best = best_ns(5, || {
                    (0..REPEAT).for_each(|_| self.run_here(Kernel::Cached, 0, bytes));
                });
                best / REPEAT as f64 <= handover_ns
            })
            .last()
            .unwrap_or(1 << 10)
    }

    /// The streaming kernel that is fastest where it matters: on large copies, with company.
    fn best_streaming(&mut self) -> Streaming {
        let mut best = (Streaming::Plain, 0.0);
        for variant in Streaming::supported() {
            let speed = self.shared(Kernel::Stream(variant), LARGEST / 2);
            if speed > best.1 {
                best = (variant, speed);
            }
        }
        best.0
    }

    /// The smallest copy that gains at least a third from being shared, and so do all larger ones.
    fn split_bytes(&mut self) -> usize {
        if self.channel.is_none() {
            return usize::MAX;
        }
        let mut from = 2 << 20;
        for bytes in [1 << 20, 512 << 10, 256 << 10, 128 << 10] {
            if self.shared(Kernel::Cached, bytes) < 1.33 * self.alone(Kernel::Cached, bytes) {
                break;
            }
            from = bytes;
        }
        from
    }
}

/// Not a number without a try.
fn best_ns(tries: usize, mut run: impl FnMut()) -> f64 {
    if tries == 0 {
        return f64::NAN;
    }
    run();
    best_of(tries, run)
}

/// As [`best_ns`], with fewer tries when the time is up.
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
