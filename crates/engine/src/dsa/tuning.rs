//! The values by which the driver is tuned: those that are measured when devices are opened, and
//! published ones where none are.
//!
//! The published ones are the raw data of LightDSA (one device, a shared queue): a descriptor costs
//! about 1.15 µs by itself, copies reach 28 GB/s, and those of 4 KiB to targets that are not aligned to
//! 64 bytes a fifth of that; in a batch of 32 a descriptor costs a small part of one by itself.

use super::calibration::DsaFactors;
use crate::completion::polling::MAX_POLLED_NS;
use crate::contract::{CostLine, TuningFact, TuningOrigin};

/// The published line.
pub(super) const PUBLISHED: CostLine = CostLine { startup_ns: 1150.0, ns_per_byte: 1.0 / 28.0 };
/// How many times as long a copy takes whose target is not aligned.
const UNALIGNED_FACTOR: f64 = 5.0;
/// The part of a descriptor's cost that a second one in the same batch is taken to have. An upper bound of
/// ours: by the published data (batches of 32, 64 bytes each, 1.4 GB/s) it is 0.04.
const BATCHED_PART: f64 = 0.25;
/// The limits of what is computed: a line that is measured on a busy machine may be far off.
const ALIGNED_FROM: (u64, u64) = (512, 64 << 10);

/// What published measurements say of a device: the values by which the driver is tuned before it has
/// measured one.
pub fn published_tuning() -> Vec<TuningFact> {
    let device = DsaProperties {
        queues: 1,
        max_batch: 1,
        cache_control: false,
        populated_bytes: Some(super::idxd::MAX_TOUCH_BYTES),
        has_interrupts: false,
    };
    let mut facts = DsaTuning::published().facts(device);
    facts.retain(|fact| fact.origin == TuningOrigin::Literature);
    facts
}

/// The tuning of an engine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct DsaTuning {
    pub(super) line: CostLine,
    line_origin: TuningOrigin,
    /// How many times as long a copy takes whose target is not aligned.
    unaligned_factor: TunedValue,
    /// The part of a descriptor's cost that a second one in the same batch has.
    batched_part: TunedValue,
    /// Whether descriptors with unaligned targets are split at all.
    splits: bool,
}

/// A value, and where it is from.
#[derive(Debug, Clone, Copy, PartialEq)]
struct TunedValue {
    value: f64,
    origin: TuningOrigin,
}

impl TunedValue {
    const fn published(value: f64) -> Self {
        Self { value, origin: TuningOrigin::Literature }
    }

    /// What was measured, if that was clear.
    fn or_published(measured: Option<f64>, published: f64) -> Self {
        let measured = measured.map(|value| Self { value, origin: TuningOrigin::Measured });
        measured.unwrap_or(Self::published(published))
    }

    /// The reason of a value that is measured or published.
    fn reason(self, measured: &'static str, published: &'static str) -> &'static str {
        if self.origin == TuningOrigin::Measured { measured } else { published }
    }
}

/// What the devices and the driver are.
#[derive(Debug, Clone, Copy)]
pub(super) struct DsaProperties {
    pub(super) queues: usize,
    pub(super) max_batch: usize,
    pub(super) cache_control: bool,
    /// The bytes that are populated after a page fault; `None` if memory is pinned.
    pub(super) populated_bytes: Option<usize>,
    pub(super) has_interrupts: bool,
}

impl DsaTuning {
    /// By published measurements.
    pub(super) const fn published() -> Self {
        Self {
            line: PUBLISHED,
            line_origin: TuningOrigin::Literature,
            unaligned_factor: TunedValue::published(UNALIGNED_FACTOR),
            batched_part: TunedValue::published(BATCHED_PART),
            splits: true,
        }
    }

    /// For measurements: every descriptor goes to the device as it is.
    pub(super) const fn unsplit() -> Self {
        Self { splits: false, ..Self::published() }
    }

    /// By what was measured on the device.
    pub(super) fn measured(line: CostLine, factors: DsaFactors) -> Self {
        let DsaFactors { unaligned_factor, batched_part } = factors;
        Self {
            line,
            line_origin: TuningOrigin::Measured,
            unaligned_factor: TunedValue::or_published(unaligned_factor, UNALIGNED_FACTOR),
            batched_part: TunedValue::or_published(batched_part, BATCHED_PART),
            splits: true,
        }
    }

    /// The length from which the bytes before the first whole cache line of a target are a descriptor
    /// of their own: where what an unaligned copy takes longer exceeds the second descriptor. The largest
    /// number stands for never.
    pub(super) fn aligned_from_bytes(&self) -> u64 {
        if !self.splits || self.unaligned_factor.value <= 1.0 {
            return u64::MAX;
        }
        let CostLine { startup_ns, ns_per_byte } = self.line;
        let lost_ns_per_byte = (self.unaligned_factor.value - 1.0) * ns_per_byte;
        let bytes = self.batched_part.value * startup_ns / lost_ns_per_byte.max(f64::MIN_POSITIVE);
        let (min, max) = ALIGNED_FROM;
        (bytes as u64).clamp(min, max).next_power_of_two()
    }

    /// Where that length is from: it is measured if all is from which it is computed.
    fn aligned_from_origin(&self) -> TuningOrigin {
        let factor = self.unaligned_factor;
        let others = [self.line_origin, self.batched_part.origin];
        // Without a gain only the factor counts.
        let are_measured =
            factor.value <= 1.0 || others.iter().all(|origin| *origin == TuningOrigin::Measured);
        if are_measured { factor.origin } else { TuningOrigin::Literature }
    }

    /// All values, with their reasons.
    pub(super) fn facts(&self, device: DsaProperties) -> Vec<TuningFact> {
        let origin = self.line_origin;
        let (factor, part) = (self.unaligned_factor, self.batched_part);
        let fact = |name, value: f64, text: String, origin, reason| TuningFact {
            name,
            value,
            text,
            origin,
            reason,
        };
        let bytes = |name, value: u64, origin, reason| {
            fact(name, value as f64, binary_size(value), origin, reason)
        };
        let CostLine { startup_ns, ns_per_byte } = self.line;
        let aligned_from = self.aligned_from_bytes();
        let aligned_reason = "from here on a target is aligned to 64 bytes first, by the four values before \
                              (at least 512 B, at most 64 KiB; never if no target gains by that)";
        let gb_per_s = 1.0 / ns_per_byte.max(f64::MIN_POSITIVE);
        let reported = TuningOrigin::Reported;
        let mut facts = vec![
            fact(
                "descriptor_ns",
                startup_ns,
                format!("{startup_ns:.0} ns"),
                origin,
                "a descriptor by itself: what is shorter stays with the processor, or goes in batches",
            ),
            fact(
                "gb_per_s",
                gb_per_s,
                format!("{gb_per_s:.1} GB/s"),
                origin,
                "one queue, long copies between aligned addresses",
            ),
            fact(
                "unaligned_factor",
                factor.value,
                factor.value.to_string(),
                factor.origin,
                factor.reason(
                    "how many times as long each byte of a copy takes if its target is not aligned to 64 \
                     bytes, by copies of 4032 bytes (from 1 to 32)",
                    "how many times as long a copy takes if its target is not aligned to 64 bytes: 4 KiB \
                     at 5.5 GB/s, and not at 28.3",
                ),
            ),
            fact(
                "batched_part",
                part.value,
                part.value.to_string(),
                part.origin,
                part.reason(
                    "the part of descriptor_ns that each further descriptor costs, by 16 that are \
                     submitted together, in batches of up to max_batch (from 0.01 to 1)",
                    "the part of descriptor_ns that a second descriptor in a batch is taken to cost: an \
                     upper bound of ours, 0.04 is published for batches of 32",
                ),
            ),
            fact(
                "aligned_from_bytes",
                if aligned_from == u64::MAX { f64::INFINITY } else { aligned_from as f64 },
                if aligned_from == u64::MAX { "never".into() } else { binary_size(aligned_from) },
                self.aligned_from_origin(),
                aligned_reason,
            ),
            fact(
                "max_batch",
                device.max_batch as f64,
                device.max_batch.to_string(),
                reported,
                "what is posted together is one submission of up to so many descriptors",
            ),
            fact(
                "queues",
                device.queues as f64,
                device.queues.to_string(),
                reported,
                "each is a channel, and a transfer goes to one of them: by the default policy to the one \
                 used last, until too much is in flight there",
            ),
        ];
        facts.push(match device.populated_bytes {
            Some(populated) => bytes(
                "populated_bytes",
                populated as u64,
                TuningOrigin::Literature,
                "bytes made resident after a page fault, before the copy goes on: blocking on faults \
                 takes three times as long",
            ),
            None => fact(
                "populated_bytes",
                f64::INFINITY,
                "all".into(),
                reported,
                "memory is pinned, so all pages are resident",
            ),
        });
        facts.push(fact(
            "cache_control",
            f64::from(u8::from(device.cache_control)),
            if device.cache_control { "by kernel" } else { "none" }.into(),
            reported,
            "a target goes to the caches if the plan's kernel is cached: it is read soon; else to memory",
        ));
        if device.has_interrupts {
            let polled_ns = (MAX_POLLED_NS as f64 - startup_ns).max(0.0);
            facts.push(fact(
                "polled_ns",
                MAX_POLLED_NS as f64,
                format!("{} µs", MAX_POLLED_NS / 1000),
                reported,
                "the longest estimate through which waiters poll: a thread that sleeps needs about so \
                 long to notice",
            ));
            facts.push(bytes(
                "interrupt_bytes",
                (polled_ns / ns_per_byte.max(f64::MIN_POSITIVE)) as u64,
                origin,
                "waiters poll for less, and sleep until an interrupt for more",
            ));
        }
        facts
    }
}

/// A size with a unit of powers of 1024.
fn binary_size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{} KiB", bytes >> 10),
        _ => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: DsaProperties = DsaProperties {
        queues: 4,
        max_batch: 64,
        cache_control: true,
        populated_bytes: Some(256 << 10),
        has_interrupts: true,
    };

    #[test]
    fn a_device_that_is_not_measured_is_tuned_by_the_literature_and_says_so() {
        let tuning = DsaTuning::published();
        assert_eq!(tuning.aligned_from_bytes(), 2048);
        let facts = tuning.facts(DEVICE);
        let of = |name: &str| facts.iter().find(|fact| fact.name == name).unwrap();
        assert_eq!(of("descriptor_ns").origin, TuningOrigin::Literature);
        assert_eq!(of("aligned_from_bytes").origin, TuningOrigin::Literature);
        assert_eq!(of("queues").origin, TuningOrigin::Reported);
        assert_eq!(of("populated_bytes").text, "256 KiB");
    }

    #[test]
    fn every_constant_of_a_threshold_is_a_fact_with_its_number() {
        let line = CostLine::from_bandwidth(800.0, 20.0);
        let factors = DsaFactors { unaligned_factor: Some(2.5), batched_part: Some(0.5) };
        let measured = DsaTuning::measured(line, factors);
        let facts = measured.facts(DEVICE);
        let of = |name: &str| facts.iter().find(|fact| fact.name == name).unwrap();
        // From what the facts show, the threshold can be computed.
        let lost_ns_per_byte = (of("unaligned_factor").value - 1.0) / of("gb_per_s").value;
        let bytes = of("batched_part").value * of("descriptor_ns").value / lost_ns_per_byte;
        let threshold = (bytes as u64).clamp(512, 64 << 10).next_power_of_two();
        assert_eq!(of("aligned_from_bytes").value, threshold as f64);
        let polled = (of("polled_ns").value - 800.0) * 20.0;
        assert!((of("interrupt_bytes").value - polled).abs() < 1.0, "{facts:?}");
        let shown = |facts: &[TuningFact], name: &str| {
            let fact = facts.iter().find(|fact| fact.name == name).unwrap();
            (fact.text.clone(), fact.origin)
        };
        assert_eq!(shown(&facts, "unaligned_factor"), ("2.5".into(), TuningOrigin::Measured));
        assert_eq!(shown(&facts, "batched_part"), ("0.5".into(), TuningOrigin::Measured));
        // What was not clear stays as it is published, and says so.
        let facts = DsaTuning::measured(line, DsaFactors::default()).facts(DEVICE);
        assert_eq!(shown(&facts, "unaligned_factor"), ("5".into(), TuningOrigin::Literature));
        assert_eq!(shown(&facts, "batched_part"), ("0.25".into(), TuningOrigin::Literature));
        assert_eq!(shown(&facts, "descriptor_ns"), ("800 ns".into(), TuningOrigin::Measured));
        let published = published_tuning();
        assert!(published.iter().any(|fact| fact.name == "batched_part"), "{published:?}");
    }

    #[test]
    fn a_threshold_is_measured_only_if_all_is_by_which_it_is_computed() {
        let line = CostLine::from_bandwidth(1000.0, 20.0);
        let shown = |unaligned_factor, batched_part| {
            let tuning = DsaTuning::measured(line, DsaFactors { unaligned_factor, batched_part });
            let facts = tuning.facts(DEVICE);
            let found = facts.into_iter().find(|fact| fact.name == "aligned_from_bytes").unwrap();
            (found.value, found.text, found.origin)
        };
        use TuningOrigin::{Literature, Measured};
        assert_eq!(shown(Some(5.0), Some(0.5)), (4096.0, "4 KiB".into(), Measured));
        assert_eq!(shown(Some(5.0), None), (2048.0, "2 KiB".into(), Literature));
        assert_eq!(shown(None, Some(0.5)), (4096.0, "4 KiB".into(), Literature));
        assert_eq!(shown(None, None), (2048.0, "2 KiB".into(), Literature));
        // A device that gains nothing is never given a second descriptor, whatever that costs.
        assert_eq!(shown(Some(1.0), None), (f64::INFINITY, "never".into(), Measured));
    }

    #[test]
    fn thresholds_follow_what_is_measured_within_limits() {
        let measured = |startup_ns, gb_per_s, factors| {
            DsaTuning::measured(CostLine::from_bandwidth(startup_ns, gb_per_s), factors)
        };
        let line = |startup_ns, gb_per_s| measured(startup_ns, gb_per_s, DsaFactors::default());
        assert!(line(4000.0, 28.0).aligned_from_bytes() > 2048);
        assert!(line(1150.0, 7.0).aligned_from_bytes() < 2048);
        assert_eq!(line(0.0, 28.0).aligned_from_bytes(), 512);
        assert_eq!(line(1e9, 28.0).aligned_from_bytes(), 64 << 10);
        let nothing = CostLine { startup_ns: 1.0, ns_per_byte: 0.0 };
        let zero = DsaTuning::measured(nothing, DsaFactors::default());
        assert_eq!(zero.aligned_from_bytes(), 64 << 10);
        let with = |unaligned_factor, batched_part| {
            measured(1150.0, 28.0, DsaFactors { unaligned_factor, batched_part })
                .aligned_from_bytes()
        };
        assert_eq!([with(None, None), with(Some(5.0), Some(0.25))], [2048; 2]);
        assert!(with(Some(1.5), None) > 2048 && with(Some(20.0), None) < 2048);
        assert!(with(None, Some(0.9)) > 2048 && with(None, Some(0.04)) < 2048);
        assert_eq!(with(Some(1.01), None), 64 << 10);
        for nothing in [1.0, 0.5] {
            assert_eq!(with(Some(nothing), None), u64::MAX, "alignment gains nothing");
        }
        assert_eq!(DsaTuning::unsplit().aligned_from_bytes(), u64::MAX);
        assert!(line(500.0, 20.0).facts(DEVICE).iter().all(|fact| !fact.reason.is_empty()));
    }
}
