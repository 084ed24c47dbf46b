//! What the cost lines are made of: the few things that can be measured between two cores.

use memferry_engine::contract::CostLine;

use super::{Closeness, Lines};

/// How many there are.
const COUNT: usize = 6;

/// The costs between two cores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// A cache line from core to core.
    pub handover_ns: f64,
    /// Through the shared space, one side after the other.
    pub eager_ns_per_byte: f64,
    /// The system call for cross-memory access, apart from the bytes.
    pub cross_call_ns: f64,
    /// A copy by that call of what the other core wrote.
    pub cross_ns_per_byte: f64,
    /// A plain copy of what the other core wrote.
    pub near_ns_per_byte: f64,
    /// Through the shared space, both sides at once.
    pub pipeline_ns_per_byte: f64,
}

impl Costs {
    /// The names, in the order of [`Costs::values`].
    pub const NAMES: [&'static str; COUNT] = [
        "handover_ns",
        "eager_ns_per_byte",
        "cross_call_ns",
        "cross_ns_per_byte",
        "near_ns_per_byte",
        "pipeline_ns_per_byte",
    ];

    /// The costs, one after the other.
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

    /// Costs that are sensible for most machines, as measured on a recent server.
    pub fn built_in(closeness: Closeness) -> Self {
        match closeness {
            Closeness::SharedCache => Self::from_values([160.0, 0.165, 500.0, 0.05, 0.04, 0.1]),
            Closeness::Apart => Self::from_values([320.0, 0.264, 500.0, 0.08, 0.064, 0.16]),
        }
    }

    /// The lines of the paths. How often a path hands something over until the receiver has its
    /// message is known from measured messages: what the code around the copies costs is in there.
    pub fn lines(&self) -> Lines {
        let line = |handovers: f64, call_ns: f64, ns_per_byte: f64| CostLine {
            startup_ns: handovers * self.handover_ns + call_ns,
            ns_per_byte,
        };
        Lines {
            handover_ns: self.handover_ns,
            eager: line(1.2, 0.0, self.eager_ns_per_byte),
            single_cross: line(3.5, self.cross_call_ns, self.cross_ns_per_byte),
            single_near: line(3.5, 0.0, self.near_ns_per_byte),
            pipeline: line(5.0, 0.0, self.pipeline_ns_per_byte),
        }
    }
}

/// Which costs were measured, and how they came out.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Measurement([Option<f64>; COUNT]);

impl Measurement {
    /// From costs in the order of [`Costs::NAMES`]; `None` for what was not measured.
    pub fn new(measured: [Option<f64>; COUNT]) -> Self {
        Self(measured)
    }

    /// The costs, in the order of [`Costs::NAMES`].
    pub fn values(&self) -> [Option<f64>; COUNT] {
        self.0
    }

    /// Whether anything was measured.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// If it can be believed. A disturbance only ever slows things, so what is much slower than it
    /// is elsewhere was disturbed, while a processor may well be many times faster. Limits are where
    /// two lines cross: one disturbed cost beside good ones would move them far, so all count or
    /// none. Only the system call may be missing, where it is forbidden.
    pub(super) fn plausible(self, closeness: Closeness) -> Option<Self> {
        const SLOWER: f64 = 4.0;
        const FASTER: f64 = 16.0;
        let usual = Costs::built_in(closeness).values();
        let all = self.0.iter().zip(usual).zip(Costs::NAMES).all(|((measured, usual), name)| {
            match measured {
                Some(ns) => (usual / FASTER..=usual * SLOWER).contains(ns),
                None => name.starts_with("cross"),
            }
        });
        all.then_some(self)
    }

    /// The costs to go by: measured ones, and built-in ones in the gaps.
    pub fn costs(&self, closeness: Closeness) -> Costs {
        let mut values = Costs::built_in(closeness).values();
        for (value, measured) in values.iter_mut().zip(self.0) {
            *value = measured.unwrap_or(*value);
        }
        Costs::from_values(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::lines::crossing;

    #[test]
    fn the_built_in_limit_for_eager_messages_is_near_the_papers() {
        let lines = Costs::built_in(Closeness::SharedCache).lines();
        let limit = crossing(lines.eager, lines.single_cross);
        assert!((4 << 10..=16 << 10).contains(&limit), "{limit}");
    }

    #[test]
    fn what_was_not_measured_is_built_in() {
        let measured = [Some(100.0), None, Some(450.0), None, None, None];
        let costs = Measurement::new(measured).costs(Closeness::SharedCache);
        let built_in = Costs::built_in(Closeness::SharedCache);
        let expected = Costs { handover_ns: 100.0, cross_call_ns: 450.0, ..built_in };
        assert_eq!(costs, expected);
        assert_eq!(
            Measurement::default().costs(Closeness::Apart),
            Costs::built_in(Closeness::Apart)
        );
    }

    #[test]
    fn one_disturbed_value_spoils_the_measurement_and_a_fast_machine_does_not() {
        let built_in = Costs::built_in(Closeness::Apart).values();
        let fast = Measurement::new(built_in.map(|ns| Some(ns / 8.0)));
        assert_eq!(fast.plausible(Closeness::Apart), Some(fast));
        for disturbed in [9000.0, -3.0, 0.0, 1e-9, f64::NAN, f64::INFINITY] {
            let mut values = fast.values();
            values[0] = Some(disturbed);
            assert_eq!(Measurement::new(values).plausible(Closeness::Apart), None, "{disturbed}");
        }
    }

    #[test]
    fn only_the_forbidden_system_call_may_be_missing() {
        let whole = Costs::built_in(Closeness::SharedCache).values().map(Some);
        for (at, name) in Costs::NAMES.iter().enumerate() {
            let mut values = whole;
            values[at] = None;
            let believed = Measurement::new(values).plausible(Closeness::SharedCache).is_some();
            assert_eq!(believed, name.starts_with("cross"), "{name}");
        }
    }

    #[test]
    fn every_cost_changes_a_line() {
        let built_in = Costs::built_in(Closeness::SharedCache);
        for at in 0..COUNT {
            let mut values = built_in.values();
            values[at] *= 2.0;
            let name = Costs::NAMES[at];
            assert_ne!(Costs::from_values(values).lines(), built_in.lines(), "{name}");
        }
    }
}
