//! What an unaligned target and a second descriptor in a batch cost, measured when a device is opened.
//!
//! Each round times four submissions one after the other, so that what disturbs the machine for a while
//! disturbs all of them. The medians of the differences count; where they vary too much from round to
//! round, nothing is measured, and the published values stay.

use super::tuning::DsaTuning;
use crate::contract::CostLine;
use crate::pci::{MeasuredChannel, MeasuredCopy};

/// The size of a cache line, to which targets are aligned.
const LINE_BYTES: usize = 64;
/// The length of copies to aligned and unaligned targets: both lie in one page.
const COPY_BYTES: usize = 4096 - LINE_BYTES;
/// The number of copies of a batch, each of a cache line.
const BATCH: usize = 16;
/// The maximum and minimum number of rounds, and the time after which no further one begins.
const MAX_ROUNDS: usize = 31;
const MIN_ROUNDS: usize = 5;
const MAX_TOTAL_NS: f64 = 20e6;
/// The part of a value that its error may be.
const TOLERANCE: f64 = 0.25;
/// The limits of both values.
const UNALIGNED_FACTOR: (f64, f64) = (1.0, 32.0);
const BATCHED_PART: (f64, f64) = (0.01, 1.0);
/// The smallest part of a batch for which the tolerance is relative.
const MIN_EXACT_PART: f64 = 0.1;

/// What is measured beside the cost line; `None` where the measurement is not clear.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct DsaFactors {
    /// How many times as long a byte takes whose descriptor has an unaligned target.
    pub(super) unaligned_factor: Option<f64>,
    /// The part of a descriptor's cost that a further one in a batch has.
    pub(super) batched_part: Option<f64>,
}

/// One submission of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Probe {
    Aligned,
    Unaligned,
    Single,
    Batch,
}

impl Probe {
    fn copies(self) -> Vec<MeasuredCopy> {
        let copy = |source, target, bytes| MeasuredCopy { source, target, bytes };
        match self {
            Self::Aligned => vec![copy(0, LINE_BYTES, COPY_BYTES)],
            Self::Unaligned => vec![copy(0, LINE_BYTES / 2, COPY_BYTES)],
            Self::Single => vec![copy(0, 0, LINE_BYTES)],
            Self::Batch => (0..BATCH)
                .map(|number| copy(number * LINE_BYTES, number * LINE_BYTES, LINE_BYTES))
                .collect(),
        }
    }
}

/// The tuning of a device whose engine splits no descriptors; `None` if its copies do not complete.
pub(super) fn measure(channel: &MeasuredChannel<'_>) -> Option<DsaTuning> {
    let line = channel.line()?;
    let rounds = sample(|probe| channel.time(&probe.copies()));
    let rounds = rounds.filter(|_| !channel.has_failed());
    let factors = rounds.map_or_else(DsaFactors::default, |rounds| rounds.factors(line));
    Some(DsaTuning::measured(line, factors))
}

/// The differences that were measured, one of each for a round, in nanoseconds.
#[derive(Debug, Default)]
struct Rounds {
    /// What an unaligned target costs more than an aligned one.
    unaligned_ns: Vec<f64>,
    /// What each further copy of a batch costs.
    batched_ns: Vec<f64>,
}

/// Takes rounds of samples; `None` if a submission does not complete.
fn sample(mut time: impl FnMut(Probe) -> Option<f64>) -> Option<Rounds> {
    let (mut rounds, mut total_ns) = (Rounds::default(), 0.0);
    while rounds.unaligned_ns.len() < MAX_ROUNDS && total_ns < MAX_TOTAL_NS {
        let aligned = time(Probe::Aligned)?;
        let unaligned = time(Probe::Unaligned)?;
        let single = time(Probe::Single)?;
        let batch = time(Probe::Batch)?;
        total_ns += aligned + unaligned + single + batch;
        rounds.unaligned_ns.push(unaligned - aligned);
        rounds.batched_ns.push((batch - single) / (BATCH - 1) as f64);
    }
    Some(rounds)
}

impl Rounds {
    /// Both values, relative to the line.
    fn factors(self, line: CostLine) -> DsaFactors {
        let CostLine { startup_ns, ns_per_byte } = line;
        let copy_ns = COPY_BYTES as f64 * ns_per_byte;
        let lost = Estimate::of(self.unaligned_ns).and_then(|lost| lost.relative_to(copy_ns));
        let factor = lost.map(|lost| Estimate { value: 1.0 + lost.value, ..lost });
        let part = Estimate::of(self.batched_ns).and_then(|cost| cost.relative_to(startup_ns));
        DsaFactors {
            unaligned_factor: factor.and_then(|factor| factor.clear(UNALIGNED_FACTOR, 1.0)),
            batched_part: part.and_then(|part| part.clear(BATCHED_PART, MIN_EXACT_PART)),
        }
    }
}

/// A median, and how far it may be off.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Estimate {
    value: f64,
    error: f64,
}

impl Estimate {
    /// The median of samples. Its error is about the range of the middle half of them over the root of
    /// their number.
    fn of(mut samples: Vec<f64>) -> Option<Self> {
        let count = samples.len();
        if count < MIN_ROUNDS {
            return None;
        }
        samples.sort_by(f64::total_cmp);
        let range = samples[count * 3 / 4] - samples[count / 4];
        Some(Self { value: samples[count / 2], error: range / (count as f64).sqrt() })
    }

    /// As a multiple of another time, if that is not nothing.
    fn relative_to(self, ns: f64) -> Option<Self> {
        (ns >= 1.0).then(|| Self { value: self.value / ns, error: self.error / ns })
    }

    /// The value within limits, if its error is small: a part of it, or of `exact_from` if that is more. What
    /// is below the minimum by more than such an error is none either.
    fn clear(self, (min, max): (f64, f64), exact_from: f64) -> Option<f64> {
        let tolerated = TOLERANCE * self.value.max(exact_from);
        let rounded = (self.value.clamp(min, max) * 100.0).round() / 100.0;
        (self.error <= tolerated && self.value >= min - tolerated).then_some(rounded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Engine;
    use crate::contract::TuningOrigin;
    use crate::dsa::DsaEngine;
    use crate::testing::dsa_model::{DsaFaults, DsaModel};

    const LINE: CostLine = CostLine { startup_ns: 1000.0, ns_per_byte: 0.05 };

    /// A device by its line, its two values, and what disturbs the submission with a number.
    fn device(factor: f64, part: f64, noise: impl Fn(usize) -> f64) -> Option<Rounds> {
        let mut number = 0;
        sample(|probe| {
            number += 1;
            let copy_ns = COPY_BYTES as f64 * LINE.ns_per_byte;
            let exact = match probe {
                Probe::Aligned => LINE.startup_ns + copy_ns,
                Probe::Unaligned => LINE.startup_ns + factor * copy_ns,
                Probe::Single => LINE.startup_ns,
                Probe::Batch => LINE.startup_ns * (1.0 + (BATCH - 1) as f64 * part),
            };
            Some(exact + noise(number))
        })
    }

    fn factors(factor: f64, part: f64, noise: impl Fn(usize) -> f64) -> DsaFactors {
        device(factor, part, noise).unwrap().factors(LINE)
    }

    #[test]
    fn both_values_follow_the_device() {
        for (factor, part) in [(5.0, 0.04), (1.0, 0.25), (2.5, 1.0)] {
            let expected = DsaFactors { unaligned_factor: Some(factor), batched_part: Some(part) };
            assert_eq!(factors(factor, part, |_| 0.0), expected);
            // Every ninth submission is late by the time slice of another thread.
            let late = |number: usize| if number.is_multiple_of(9) { 100_000.0 } else { 0.0 };
            assert_eq!(factors(factor, part, late), expected);
        }
    }

    #[test]
    fn values_that_no_device_has_are_limited() {
        let found = factors(1000.0, 7.0, |_| 0.0);
        assert_eq!((found.unaligned_factor, found.batched_part), (Some(32.0), Some(1.0)));
        let found = factors(0.9, 0.0, |_| 0.0);
        assert_eq!((found.unaligned_factor, found.batched_part), (Some(1.0), Some(0.01)));
        assert_eq!(factors(0.5, -0.5, |_| 0.0), DsaFactors::default(), "less than nothing");
    }

    #[test]
    fn what_varies_too_much_is_not_measured() {
        // Up to 33 µs, scattered by the number.
        let noise = |number: usize| {
            let mixed = (number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            ((mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 49) as f64
        };
        assert_eq!(factors(5.0, 0.04, noise), DsaFactors::default());
        let nothing = CostLine { startup_ns: 0.0, ns_per_byte: 0.0 };
        assert_eq!(device(5.0, 0.04, |_| 0.0).unwrap().factors(nothing), DsaFactors::default());
    }

    #[test]
    fn a_slow_device_is_not_asked_for_long_and_a_silent_one_not_again() {
        let count = |time: Option<f64>| {
            let mut probes = 0;
            let rounds = sample(|_| {
                probes += 1;
                time
            });
            (probes, rounds.is_some())
        };
        assert_eq!(count(Some(1000.0)), (4 * MAX_ROUNDS, true));
        assert_eq!(count(Some(1e6)), (4 * 5, true));
        assert_eq!(count(Some(1e9)), (4, true));
        assert_eq!(count(None), (1, false));
        let one = Rounds { unaligned_ns: vec![1.0], batched_ns: vec![1.0] };
        assert_eq!(one.factors(LINE), DsaFactors::default(), "one round says nothing");
    }

    #[test]
    fn the_driver_splits_descriptors_from_the_measured_length_on() {
        let unaligned_delay = std::time::Duration::from_millis(2);
        let open = || {
            let faults = DsaFaults { unaligned_delay, ..DsaFaults::default() };
            let model = DsaModel::builder().faults(faults).build();
            DsaEngine::over_model(model).unwrap().measured()
        };
        let fact = |engine: &DsaEngine, name: &str| {
            engine.tuning().into_iter().find(|fact| fact.name == name).unwrap()
        };
        // On a machine that is busy with other things it may not be clear at once.
        let mut engines = (0..50).map(|_| open());
        let engine = engines
            .find(|engine| fact(engine, "unaligned_factor").origin == TuningOrigin::Measured)
            .expect("a measurement that is clear");
        // Much more than any device loses.
        assert_eq!(fact(&engine, "unaligned_factor").value, UNALIGNED_FACTOR.1);
        let aligned_from = fact(&engine, "aligned_from_bytes").value as usize;
        assert_eq!(engine.counters(), Default::default(), "the measurement is no work of a user");
        let channel = MeasuredChannel::open(&engine).unwrap();
        for (bytes, descriptors) in [(aligned_from - 1, 1), (aligned_from, 2)] {
            let before = engine.counters().descriptors;
            channel.time(&[MeasuredCopy { source: 0, target: 1, bytes }]).unwrap();
            assert_eq!(engine.counters().descriptors - before, descriptors, "{bytes}");
        }
    }
}
