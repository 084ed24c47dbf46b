//! What each path costs: a start-up and a time per byte, measured for near and far cores.

use memferry_engine::contract::CostLine;

use super::{Closeness, PathKind, Way};

/// The cost lines of the paths between two cores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lines {
    /// A cache line from core to core: the floor of everything.
    pub handover_ns: f64,
    /// Through the shared space, one side after the other.
    pub eager: CostLine,
    /// One copy by the receiver, with the system call.
    pub single_cross: CostLine,
    /// One copy by the receiver, mapped.
    pub single_near: CostLine,
    /// Through the shared space, both at once.
    pub pipeline: CostLine,
}

/// How much of a core's bandwidth is left when a second one copies beside it.
const TOGETHER: f64 = 0.9;

impl Lines {
    /// The line of one copy by the receiver.
    pub fn single(&self, way: Way) -> CostLine {
        if way == Way::Near { self.single_near } else { self.single_cross }
    }

    /// The line of one copy by both: one more hand-over, nearly twice the bandwidth.
    pub fn together(&self, way: Way) -> CostLine {
        let alone = self.single(way);
        CostLine {
            startup_ns: alone.startup_ns + self.handover_ns,
            ns_per_byte: alone.ns_per_byte / (2.0 * TOGETHER),
        }
    }

    /// What a path is expected to cost. `None` for inline messages, which are one hand-over, and
    /// for offload, which the copy core knows.
    pub fn of(&self, path: PathKind, way: Way) -> Option<CostLine> {
        match path {
            PathKind::Inline => Some(CostLine { startup_ns: self.handover_ns, ns_per_byte: 0.0 }),
            PathKind::Eager => Some(self.eager),
            PathKind::Single => Some(self.single(way)),
            PathKind::Cooperative => Some(self.together(way)),
            PathKind::Pipeline => Some(self.pipeline),
            PathKind::Offload => None,
        }
    }
}

/// Where the second line becomes the cheaper one.
pub fn crossing(first: CostLine, second: CostLine) -> u64 {
    let per_byte = first.ns_per_byte - second.ns_per_byte;
    let startup = second.startup_ns - first.startup_ns;
    match (startup <= 0.0, per_byte <= 0.0) {
        (true, _) => 0,
        (false, true) => u64::MAX,
        (false, false) => (startup / per_byte) as u64,
    }
}

/// The lines of a machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// Whether they were measured here.
    pub measured: bool,
    shared_cache: Lines,
    apart: Lines,
}

impl Profile {
    /// From lines for both kinds of pairs.
    pub fn new(measured: bool, shared_cache: Lines, apart: Lines) -> Self {
        Self { measured, shared_cache, apart }
    }

    /// The lines between two cores.
    pub fn lines(&self, closeness: Closeness) -> &Lines {
        match closeness {
            Closeness::SharedCache => &self.shared_cache,
            Closeness::Apart => &self.apart,
        }
    }

    /// Values that are sensible for most machines, as measured on a recent server.
    pub fn built_in() -> Self {
        let lines = |handover_ns: f64, slower: f64| Lines {
            handover_ns,
            eager: CostLine { startup_ns: 1.2 * handover_ns, ns_per_byte: 0.165 * slower },
            single_cross: CostLine {
                startup_ns: 3.5 * handover_ns + 500.0,
                ns_per_byte: 0.05 * slower,
            },
            single_near: CostLine { startup_ns: 3.5 * handover_ns, ns_per_byte: 0.04 * slower },
            pipeline: CostLine { startup_ns: 5.0 * handover_ns, ns_per_byte: 0.1 * slower },
        };
        Self::new(false, lines(160.0, 1.0), lines(320.0, 1.6))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn lines_cross_where_both_cost_the_same() {
        let (steep, flat) = (
            CostLine { startup_ns: 100.0, ns_per_byte: 0.5 },
            CostLine { startup_ns: 600.0, ns_per_byte: 0.25 },
        );
        assert_eq!(crossing(steep, flat), 2000);
        assert_eq!(crossing(flat, steep), 0);
        let worse = CostLine { startup_ns: 700.0, ns_per_byte: 0.5 };
        assert_eq!(crossing(flat, worse), u64::MAX);
    }

    #[test]
    fn the_built_in_limit_for_eager_messages_is_near_the_papers() {
        let lines = *Profile::built_in().lines(Closeness::SharedCache);
        let limit = crossing(lines.eager, lines.single_cross);
        assert!((4 << 10..=16 << 10).contains(&limit), "{limit}");
    }
}
