//! Measuring what messages cost between two cores: with two threads, each bound to one of them,
//! that do what two processes would do. Every time is the median of several rounds, and the best
//! of several passes: disturbances only ever slow things. A machine that was busy all the time
//! still shows: others had the cores while the two threads wanted to run, and then nothing of what was
//! measured counts.

mod duet;

use std::time::{Duration, Instant};

use memferry_engine::saved::{NotMeasured, check_contention, check_throttling};
use memferry_sys::contention::{Meter, Processors};
use memferry_sys::cross_memory::{self, Stretch};
use memferry_sys::pages::Pages;
use memferry_sys::shared_memory::{Access, Mapping, SealedMemory};
use memferry_sys::throttle::Watched;
use memferry_sys::{affinity, copy};

use super::costs::Measurement;
use super::{Closeness, fragment_bytes};
use duet::Duet;

/// The time for one try at a pair of cores: several times what it takes undisturbed.
const BUDGET: Duration = Duration::from_millis(35);
/// How often everything is measured in that time, if it suffices.
const PASSES: usize = 5;
/// Tries until the values can be believed.
const TRIES: usize = 2;

/// Two sizes tell the start-up from the time per byte.
const SMALL: usize = 4 << 10;
const LARGE: usize = 256 << 10;
/// The sizes for what is sent at once, where the limit of that will be.
const EAGER_SMALL: usize = 1 << 10;
const EAGER_LARGE: usize = 8 << 10;

/// Measures near cores and far ones, in this order, where there are such: nothing where there are none.
/// An error if this process may not use two cores, if others had them, or if nothing that comes out can be
/// believed.
pub(super) fn measure() -> Result<[Measurement; 2], NotMeasured> {
    let cores = affinity::allowed_cores();
    if cores.len() < 2 {
        return Err(NotMeasured::Impossible);
    }
    let (began, meter, before) = (Instant::now(), Meter::default(), Processors::now());
    let quota = Watched::begin();
    let measured = Closeness::ALL.map(|closeness| {
        let pair = closeness.pair_of(&cores);
        pair.and_then(|pair| measure_pair(pair, closeness, &meter)).unwrap_or_default()
    });
    let took = began.elapsed();
    let stolen = Processors::stolen_share(before, Processors::now(), took);
    let contention = meter.share(quota.throttled_ns()).max(stolen);
    let throttled = quota.share();
    tracing::debug!(?measured, ?took, contention, throttled, "calibrated messages");
    check_contention(contention)?;
    if measured.iter().all(Measurement::is_empty) {
        check_throttling(throttled)?;
        return Err(NotMeasured::Unreliable("no quiet machine is so slow".into()));
    }
    Ok(measured)
}

fn measure_pair(cores: (usize, usize), closeness: Closeness, meter: &Meter) -> Option<Measurement> {
    let try_once = || {
        let until = Instant::now() + BUDGET;
        let bench = Bench::new(Duet::new(cores, until, meter))?;
        let in_time = (0..PASSES).take_while(|_| Instant::now() < until);
        let passes: Vec<_> = in_time.map_while(|_| bench.pass()).collect();
        let best = |at: usize| {
            let times = passes.iter().filter_map(|pass: &Times| pass[at]);
            times.min_by(f64::total_cmp)
        };
        Measurement::new(costs(std::array::from_fn(best))).plausible(closeness)
    };
    (0..TRIES).find_map(|_| try_once())
}

/// What is timed: a hand-over, then small and large of eager, cross-memory and plain copies, then
/// the pipeline.
type Times = [Option<f64>; 8];

/// Costs in their order, out of times.
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
    // The first line has to come over before it can be copied: that is counted with the lines.
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

/// Memory for the two, and the two themselves.
struct Bench<'a> {
    duet: Duet<'a>,
    /// The sender's, and the receiver's.
    source: Pages,
    target: Pages,
    /// What they share.
    space: Mapping,
}

impl<'a> Bench<'a> {
    fn new(duet: Duet<'a>) -> Option<Self> {
        let space = SealedMemory::new("memferry-calibration", LARGE).ok()?;
        let space = space.map(Access::Write).ok()?;
        let (mut source, mut target) = (Pages::new(LARGE).ok()?, Pages::new(LARGE).ok()?);
        source.as_mut_slice().fill(1);
        target.as_mut_slice().fill(2);
        // SAFETY: the mapping is at least so long, and nobody else knows of it yet.
        unsafe { std::ptr::write_bytes(space.as_ptr(), 3, LARGE) };
        Some(Self { duet, source, target, space })
    }

    /// Times everything once. `None` when the time is up before the first figure.
    fn pass(&self) -> Option<Times> {
        let handover = self.duet.take_turns(5, 100, || {}, || {})? / 2.0;
        Some([
            Some(handover),
            self.eager(EAGER_SMALL),
            self.eager(EAGER_LARGE),
            self.one_copy(SMALL, Self::cross_copy),
            self.one_copy(LARGE, Self::cross_copy),
            self.one_copy(SMALL, Self::near_copy),
            self.one_copy(LARGE, Self::near_copy),
            self.pipeline(),
        ])
    }

    /// The sender writes its message; the receiver's copy of it is what counts.
    fn one_copy(&self, bytes: usize, copy: fn(&Self, usize) -> bool) -> Option<f64> {
        let rounds = if bytes == SMALL { 31 } else { 9 };
        let mut value = 0;
        let write = || {
            value += 1u8;
            // SAFETY: inside the source, which is the sender's until it hands over.
            unsafe { std::ptr::write_bytes(self.source.as_ptr(), value, bytes) };
        };
        let mut works = true;
        let took = self.duet.time_second(rounds, write, || works &= copy(self, bytes));
        took.filter(|_| works)
    }

    fn cross_copy(&self, bytes: usize) -> bool {
        let stretch = |pages: &Pages| [Stretch { address: pages.as_ptr() as usize, length: bytes }];
        let (remote, local) = (stretch(&self.source), stretch(&self.target));
        // SAFETY: the target is the receiver's alone; the source has been handed over.
        let read = unsafe { cross_memory::read(std::process::id(), &remote, &local) };
        read.is_ok_and(|read| read == bytes)
    }

    fn near_copy(&self, bytes: usize) -> bool {
        // SAFETY: the target is the receiver's alone; the source has been handed over.
        unsafe { copy::cached(self.target.as_ptr(), self.source.as_ptr(), bytes) };
        true
    }

    /// Into the space at an offset, by the sender.
    fn put(&self, offset: usize, bytes: usize) {
        // SAFETY: inside both; that part of the space is the sender's now.
        unsafe {
            let (target, source) = (self.space.as_ptr().add(offset), self.source.as_ptr());
            copy::cached(target, source.add(offset), bytes);
        }
    }

    /// Out of the space, by the receiver.
    fn take(&self, offset: usize, bytes: usize) {
        // SAFETY: inside both; that part of the space is the receiver's now.
        unsafe {
            let (target, source) = (self.target.as_ptr(), self.space.as_ptr().add(offset));
            copy::cached(target.add(offset), source, bytes);
        }
    }

    fn eager(&self, bytes: usize) -> Option<f64> {
        self.duet.take_turns(5, 20, || self.put(0, bytes), || self.take(0, bytes))
    }

    fn pipeline(&self) -> Option<f64> {
        let fragment = fragment_bytes(LARGE as u64) as usize;
        let offset = |number: usize| number * fragment;
        self.duet.overlap(
            9,
            LARGE / fragment,
            |number| self.put(offset(number), fragment),
            |number| self.take(offset(number), fragment),
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
            Err(NotMeasured::Unreliable(why)) => return assert!(!why.is_empty()),
            Err(NotMeasured::Impossible) => {
                let why = "nothing can be measured with one core";
                return memferry_testing::skip(memferry_testing::Requirement::Cores, why);
            }
        };
        for (closeness, measured) in Closeness::ALL.into_iter().zip(measured) {
            assert!(measured.is_empty() || measured.plausible(closeness).is_some());
        }
    }

    #[test]
    fn a_process_bound_to_one_core_measures_nothing() {
        std::thread::spawn(|| {
            affinity::bind_to_core(affinity::allowed_cores()[0]).unwrap();
            assert_eq!(measure(), Err(NotMeasured::Impossible));
        })
        .join()
        .unwrap();
    }
}
