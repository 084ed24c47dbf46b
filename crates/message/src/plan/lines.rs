//! What each path costs: a start-up and a time per byte, for two cores.

use memferry_engine::contract::CostLine;

use super::{PathKind, Way};

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
}
