//! The measured costs between two cores, from which the cost lines are derived.

use memferry_engine::contract::CostLine;

use super::{Locality, PathCosts};

/// The number of costs.
const COUNT: usize = 6;

/// The costs between two cores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CorePairCosts {
    /// Transfer of a cache line from core to core.
    pub handover_ns: f64,
    /// Copies through the bounce ring, one side after the other.
    pub eager_ns_per_byte: f64,
    /// The system call for cross-memory access, without the bytes.
    pub cross_call_ns: f64,
    /// A copy by that call of data that the other core wrote.
    pub cross_ns_per_byte: f64,
    /// A copy by loads and stores of data that the other core wrote.
    pub near_ns_per_byte: f64,
    /// Copies through the bounce ring, both sides at the same time.
    pub pipeline_ns_per_byte: f64,
}

impl CorePairCosts {
    /// The names, in the order of [`CorePairCosts::values`].
    pub const NAMES: [&'static str; COUNT] = [
        "handover_ns",
        "eager_ns_per_byte",
        "cross_call_ns",
        "cross_ns_per_byte",
        "near_ns_per_byte",
        "pipeline_ns_per_byte",
    ];

    /// The costs, in the order of [`CorePairCosts::NAMES`].
    pub fn values(&self) -> [f64; COUNT] {
        [
            self.handover_ns,
            self.eager_ns_per_byte,
            self.cross_call_ns,
            self.cross_ns_per_byte,
            self.near_ns_per_byte,
            self.pipeline_ns_per_byte,
        ]
    }

    fn from_values(values: [f64; COUNT]) -> Self {
        let [handover_ns, eager, cross_call_ns, cross, near, pipeline] = values;
        Self {
            handover_ns,
            eager_ns_per_byte: eager,
            cross_call_ns,
            cross_ns_per_byte: cross,
            near_ns_per_byte: near,
            pipeline_ns_per_byte: pipeline,
        }
    }

    /// Default costs, as measured on a recent server.
    pub fn built_in(locality: Locality) -> Self {
        match locality {
            Locality::SharedCache => Self::from_values([160.0, 0.165, 500.0, 0.05, 0.04, 0.1]),
            Locality::SeparateCache => Self::from_values([320.0, 0.264, 500.0, 0.08, 0.064, 0.16]),
        }
    }

    /// The cost lines of the paths. The number of handovers of each path is fitted to measured
    /// messages, so it includes the code around the copies.
    pub fn path_costs(&self) -> PathCosts {
        let line = |handovers: f64, call_ns: f64, ns_per_byte: f64| CostLine {
            startup_ns: handovers * self.handover_ns + call_ns,
            ns_per_byte,
        };
        PathCosts {
            handover_ns: self.handover_ns,
            eager: line(1.2, 0.0, self.eager_ns_per_byte),
            single_cross: line(3.5, self.cross_call_ns, self.cross_ns_per_byte),
            single_mapped: line(3.5, 0.0, self.near_ns_per_byte),
            pipeline: line(5.0, 0.0, self.pipeline_ns_per_byte),
        }
    }
}

/// The measured costs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Measurement([Option<f64>; COUNT]);

impl Measurement {
    /// Creates a measurement from costs in the order of [`CorePairCosts::NAMES`]; `None` for those
    /// not measured.
    pub fn new(measured: [Option<f64>; COUNT]) -> Self {
        Self(measured)
    }

    /// The costs, in the order of [`CorePairCosts::NAMES`].
    pub fn values(&self) -> [Option<f64>; COUNT] {
        self.0
    }

    /// Returns whether nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// Returns the measurement if it is plausible. A disturbance only slows things down, so a value
    /// that is much slower than the default was disturbed, while a processor may be many times
    /// faster. The limits are where two lines cross, and one disturbed value would move them far,
    /// so all values count or none. Only the system call may be missing, where it is forbidden.
    pub(super) fn plausible(self, locality: Locality) -> Option<Self> {
        const MAX_SLOWDOWN: f64 = 4.0;
        const MAX_SPEEDUP: f64 = 16.0;
        let default = CorePairCosts::built_in(locality).values();
        let all = self.0.iter().zip(default).zip(CorePairCosts::NAMES).all(
            |((measured, default), name)| match measured {
                Some(ns) => (default / MAX_SPEEDUP..=default * MAX_SLOWDOWN).contains(ns),
                None => name.starts_with("cross"),
            },
        );
        all.then_some(self)
    }

    /// The costs to use: the measured ones, and the defaults for the missing ones.
    pub fn costs(&self, locality: Locality) -> CorePairCosts {
        let mut values = CorePairCosts::built_in(locality).values();
        for (value, measured) in values.iter_mut().zip(self.0) {
            *value = measured.unwrap_or(*value);
        }
        CorePairCosts::from_values(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::path_costs::crossover;

    #[test]
    fn the_built_in_limit_for_eager_messages_is_near_the_papers() {
        let lines = CorePairCosts::built_in(Locality::SharedCache).path_costs();
        let limit = crossover(lines.eager, lines.single_cross);
        assert!((4 << 10..=16 << 10).contains(&limit), "{limit}");
    }

    #[test]
    fn what_was_not_measured_is_built_in() {
        let measured = [Some(100.0), None, Some(450.0), None, None, None];
        let costs = Measurement::new(measured).costs(Locality::SharedCache);
        let built_in = CorePairCosts::built_in(Locality::SharedCache);
        let expected = CorePairCosts { handover_ns: 100.0, cross_call_ns: 450.0, ..built_in };
        assert_eq!(costs, expected);
        assert_eq!(
            Measurement::default().costs(Locality::SeparateCache),
            CorePairCosts::built_in(Locality::SeparateCache)
        );
    }

    #[test]
    fn one_disturbed_value_spoils_the_measurement_and_a_fast_machine_does_not() {
        let built_in = CorePairCosts::built_in(Locality::SeparateCache).values();
        let fast = Measurement::new(built_in.map(|ns| Some(ns / 8.0)));
        assert_eq!(fast.plausible(Locality::SeparateCache), Some(fast));
        for disturbed in [9000.0, -3.0, 0.0, 1e-9, f64::NAN, f64::INFINITY] {
            let mut values = fast.values();
            values[0] = Some(disturbed);
            assert_eq!(
                Measurement::new(values).plausible(Locality::SeparateCache),
                None,
                "{disturbed}"
            );
        }
    }

    #[test]
    fn only_the_forbidden_system_call_may_be_missing() {
        let whole = CorePairCosts::built_in(Locality::SharedCache).values().map(Some);
        for (at, name) in CorePairCosts::NAMES.iter().enumerate() {
            let mut values = whole;
            values[at] = None;
            let plausible = Measurement::new(values).plausible(Locality::SharedCache).is_some();
            assert_eq!(plausible, name.starts_with("cross"), "{name}");
        }
    }

    #[test]
    fn every_cost_changes_a_line() {
        let built_in = CorePairCosts::built_in(Locality::SharedCache);
        for at in 0..COUNT {
            let mut values = built_in.values();
            values[at] *= 2.0;
            let name = CorePairCosts::NAMES[at];
            assert_ne!(
                CorePairCosts::from_values(values).path_costs(),
                built_in.path_costs(),
                "{name}"
            );
        }
    }
}
