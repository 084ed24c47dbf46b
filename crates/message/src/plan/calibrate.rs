//! Calibration of message costs between two cores: two threads, each bound to one core, do what two
//! processes would do. Every time is the median of several rounds, and the minimum of several
//! passes, because disturbances only slow things down. If other processes used the cores during the
//! whole calibration, the contention meter detects it and the result is discarded.

mod core_pair;

use std::time::{Duration, Instant};

use memferry_engine::runtime::profile_store::{MeasureError, check_contention, check_throttling};
use memferry_sys::contention::{ContentionMeter, CpuTimes};
use memferry_sys::cross_memory::{self, IoVec};
use memferry_sys::pages::Pages;
use memferry_sys::shared_memory::{Mapping, Protection, SealedMemory};
use memferry_sys::throttle::ThrottleMonitor;
use memferry_sys::{affinity, copy};

use super::costs::Measurement;
use super::{Locality, fragment_bytes};
use core_pair::CorePairRunner;

/// Time limit of one attempt at a pair of cores: several times what it takes without disturbance.
const BUDGET: Duration = Duration::from_millis(35);
/// Passes within that time.
const PASSES: usize = 5;
/// Attempts until the values are plausible.
const ATTEMPTS: usize = 2;

/// Two sizes, which separate the start-up time from the time per byte.
const SMALL: usize = 4 << 10;
const LARGE: usize = 256 << 10;
/// The sizes for eager messages, near the expected eager limit.
const EAGER_SMALL: usize = 1 << 10;
const EAGER_LARGE: usize = 8 << 10;

/// Measures a pair of cores with a shared cache and one without, in this order; the measurement is
/// empty if there is no such pair. Fails if this process may not use two cores, if other processes
/// used them, or if no value is plausible.
pub(super) fn measure() -> Result<[Measurement; 2], MeasureError> {
    let cores = affinity::allowed_cores();
    if cores.len() < 2 {
        return Err(MeasureError::Impossible);
    }
    let (started, meter, before) = (Instant::now(), ContentionMeter::default(), CpuTimes::now());
    let quota = ThrottleMonitor::start();
    let measured = Locality::ALL.map(|locality| {
        let pair = locality.pair_of(&cores);
        pair.and_then(|pair| measure_pair(pair, locality, &meter)).unwrap_or_default()
    });
    let took = started.elapsed();
    let stolen = CpuTimes::stolen_share(before, CpuTimes::now(), took);
    let contention = meter.share(quota.throttled_ns()).max(stolen);
    let throttled = quota.share();
    tracing::debug!(?measured, ?took, contention, throttled, "calibrated messages");
    check_contention(contention)?;
    if measured.iter().all(Measurement::is_empty) {
        check_throttling(throttled)?;
        return Err(MeasureError::Unreliable("slower than any idle machine".into()));
    }
    Ok(measured)
}

fn measure_pair(
    cores: (usize, usize),
    locality: Locality,
    meter: &ContentionMeter,
) -> Option<Measurement> {
    let try_once = || {
        let until = Instant::now() + BUDGET;
        let calibrator = MessageCalibrator::new(CorePairRunner::new(cores, until, meter))?;
        let passes_in_time = (0..PASSES).take_while(|_| Instant::now() < until);
        let passes: Vec<_> = passes_in_time.map_while(|_| calibrator.pass()).collect();
        let best = |at: usize| {
            let times = passes.iter().filter_map(|pass: &Times| pass[at]);
            times.min_by(f64::total_cmp)
        };
        Measurement::new(costs(std::array::from_fn(best))).plausible(locality)
    };
    (0..ATTEMPTS).find_map(|_| try_once())
}

/// The measured times: a handover, then small and large eager, cross-memory and mapped copies, then
/// the pipeline.
type Times = [Option<f64>; 8];

/// Derives the costs, in their order, from the times.
fn costs(times: Times) -> [Option<f64>; 6] {
    let [
        handover,
        eager_small,
        eager_large,
        cross_small,
        cross_large,
        near_small,
        near_large,
        pipeline,
    ] = times;
    let slope = |small: Option<f64>, large: Option<f64>, bytes: usize| {
        large.zip(small).map(|(large, small)| (large - small) / bytes as f64)
    };
    let cross_ns_per_byte = slope(cross_small, cross_large, LARGE - SMALL);
    // The handover of the first cache line is counted with the lines.
    let call = || Some(cross_small? - SMALL as f64 * cross_ns_per_byte? - handover?);
    [
        handover,
        slope(eager_small, eager_large, EAGER_LARGE - EAGER_SMALL),
        call(),
        cross_ns_per_byte,
        slope(near_small, near_large, LARGE - SMALL),
        pipeline.map(|ns| ns / LARGE as f64),
    ]
}

/// The memory of the measurement, and the pair of threads.
struct MessageCalibrator<'a> {
    runner: CorePairRunner<'a>,
    /// The memory of the sender, and of the receiver.
    source: Pages,
    target: Pages,
    /// The shared memory.
    bounce: Mapping,
}

impl<'a> MessageCalibrator<'a> {
    fn new(runner: CorePairRunner<'a>) -> Option<Self> {
        let bounce = SealedMemory::new("memferry-calibration", LARGE).ok()?;
        let bounce = bounce.map(Protection::ReadWrite).ok()?;
        let (mut source, mut target) = (Pages::new(LARGE).ok()?, Pages::new(LARGE).ok()?);
        source.as_mut_slice().fill(1);
        target.as_mut_slice().fill(2);
        // SAFETY: the mapping has at least this length, and no other thread uses it yet.
        unsafe { std::ptr::write_bytes(bounce.as_ptr(), 3, LARGE) };
        Some(Self { runner, source, target, bounce })
    }

    /// Measures everything once. Returns `None` when the time limit is reached before the first
    /// value.
    fn pass(&self) -> Option<Times> {
        let handover = self.runner.ping_pong(5, 100, || {}, || {})? / 2.0;
        Some([
            Some(handover),
            self.eager(EAGER_SMALL),
            self.eager(EAGER_LARGE),
            self.one_copy(SMALL, Self::cross_copy),
            self.one_copy(LARGE, Self::cross_copy),
            self.one_copy(SMALL, Self::mapped_copy),
            self.one_copy(LARGE, Self::mapped_copy),
            self.pipeline(),
        ])
    }

    /// Times the receiver's copy of a message that the sender has just written.
    fn one_copy(&self, bytes: usize, copy: fn(&Self, usize) -> bool) -> Option<f64> {
        let rounds = if bytes == SMALL { 31 } else { 9 };
        let mut value = 0;
        let write = || {
            value += 1u8;
            // SAFETY: inside the source, which belongs to the sender until the handover.
            unsafe { std::ptr::write_bytes(self.source.as_ptr(), value, bytes) };
        };
        let mut works = true;
        let took = self.runner.time_second(rounds, write, || works &= copy(self, bytes));
        took.filter(|_| works)
    }

    fn cross_copy(&self, bytes: usize) -> bool {
        let iovec = |pages: &Pages| [IoVec { address: pages.as_ptr() as usize, length: bytes }];
        let (remote, local) = (iovec(&self.source), iovec(&self.target));
        // SAFETY: only the receiver uses the target; the sender has handed over the source.
        let read = unsafe { cross_memory::read(std::process::id(), &remote, &local) };
        read.is_ok_and(|read| read == bytes)
    }

    fn mapped_copy(&self, bytes: usize) -> bool {
        // SAFETY: only the receiver uses the target; the sender has handed over the source.
        unsafe { copy::cached(self.target.as_ptr(), self.source.as_ptr(), bytes) };
        true
    }

    /// The sender's copy into the shared memory.
    fn write_bounce(&self, offset: usize, bytes: usize) {
        // SAFETY: inside both; that part of the shared memory belongs to the sender now.
        unsafe {
            let (target, source) = (self.bounce.as_ptr().add(offset), self.source.as_ptr());
            copy::cached(target, source.add(offset), bytes);
        }
    }

    /// The receiver's copy out of the shared memory.
    fn read_bounce(&self, offset: usize, bytes: usize) {
        // SAFETY: inside both; that part of the shared memory belongs to the receiver now.
        unsafe {
            let (target, source) = (self.target.as_ptr(), self.bounce.as_ptr().add(offset));
            copy::cached(target.add(offset), source, bytes);
        }
    }

    fn eager(&self, bytes: usize) -> Option<f64> {
        self.runner.ping_pong(5, 20, || self.write_bounce(0, bytes), || self.read_bounce(0, bytes))
    }

    fn pipeline(&self) -> Option<f64> {
        let fragment = fragment_bytes(LARGE as u64) as usize;
        let offset = |number: usize| number * fragment;
        self.runner.overlap(
            9,
            LARGE / fragment,
            |number| self.write_bounce(offset(number), fragment),
            |number| self.read_bounce(offset(number), fragment),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_come_out_of_times() {
        let line = |startup_ns: f64, ns_per_byte: f64, bytes: usize| {
            Some(startup_ns + ns_per_byte * bytes as f64)
        };
        let times = [
            Some(150.0),
            line(300.0, 0.2, EAGER_SMALL),
            line(300.0, 0.2, EAGER_LARGE),
            line(650.0, 0.05, SMALL),
            line(650.0, 0.05, LARGE),
            line(200.0, 0.04, SMALL),
            line(200.0, 0.04, LARGE),
            line(0.0, 0.1, LARGE),
        ];
        let expected = [150.0, 0.2, 500.0, 0.05, 0.04, 0.1];
        for (cost, expected) in costs(times).into_iter().zip(expected) {
            assert!(cost.is_some_and(|cost| (cost / expected - 1.0).abs() < 1e-9), "{cost:?}");
        }
        let mut forbidden = times;
        forbidden[3] = None;
        let missing = costs(forbidden).map(|cost| cost.is_none());
        assert_eq!(missing, [false, false, true, true, false, false]);
    }

    #[test]
    fn what_is_measured_can_be_believed_or_is_left_out() {
        let measured = match measure() {
            Ok(measured) => measured,
            Err(MeasureError::Unreliable(reason)) => return assert!(!reason.is_empty()),
            Err(MeasureError::Impossible) => {
                let reason = "nothing can be measured with one core";
                return memferry_testing::skip(memferry_testing::Requirement::Cores, reason);
            }
        };
        for (locality, measured) in Locality::ALL.into_iter().zip(measured) {
            assert!(measured.is_empty() || measured.plausible(locality).is_some());
        }
    }

    #[test]
    fn a_process_bound_to_one_core_measures_nothing() {
        std::thread::spawn(|| {
            affinity::bind_to_core(affinity::allowed_cores()[0]).unwrap();
            assert_eq!(measure(), Err(MeasureError::Impossible));
        })
        .join()
        .unwrap();
    }
}
