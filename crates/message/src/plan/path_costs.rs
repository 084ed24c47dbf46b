//! The cost of each path between two cores: start-up time and time per byte.

use memferry_engine::contract::CostLine;

use super::{AccessMethod, PathKind};

/// The cost lines of the paths between two cores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PathCosts {
    /// Transfer of a cache line from core to core: the minimum of every message.
    pub handover_ns: f64,
    /// Through the bounce ring, one side after the other.
    pub eager: CostLine,
    /// One copy by the receiver, by system call.
    pub single_cross: CostLine,
    /// One copy by the receiver, mapped.
    pub single_mapped: CostLine,
    /// Through the bounce ring, both sides at the same time.
    pub pipeline: CostLine,
}

/// The share of a core's bandwidth that remains when a second core copies too.
const COOPERATIVE_EFFICIENCY: f64 = 0.9;

impl PathCosts {
    /// The cost line of one copy by the receiver.
    pub fn single(&self, method: AccessMethod) -> CostLine {
        if method == AccessMethod::Mapped { self.single_mapped } else { self.single_cross }
    }

    /// The cost line of one copy by both sides: one more handover, nearly twice the bandwidth.
    pub fn cooperative(&self, method: AccessMethod) -> CostLine {
        let alone = self.single(method);
        CostLine {
            startup_ns: alone.startup_ns + self.handover_ns,
            ns_per_byte: alone.ns_per_byte / (2.0 * COOPERATIVE_EFFICIENCY),
        }
    }

    /// The expected cost of a path. `None` for offload, which the copy core plans.
    pub fn of(&self, path: PathKind, method: AccessMethod) -> Option<CostLine> {
        match path {
            PathKind::Inline => Some(CostLine { startup_ns: self.handover_ns, ns_per_byte: 0.0 }),
            PathKind::Eager => Some(self.eager),
            PathKind::Single => Some(self.single(method)),
            PathKind::Cooperative => Some(self.cooperative(method)),
            PathKind::Pipeline => Some(self.pipeline),
            PathKind::Offload => None,
        }
    }
}

/// The size at which the second line becomes the cheaper one.
pub fn crossover(first: CostLine, second: CostLine) -> u64 {
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
        assert_eq!(crossover(steep, flat), 2000);
        assert_eq!(crossover(flat, steep), 0);
        let worse = CostLine { startup_ns: 700.0, ns_per_byte: 0.5 };
        assert_eq!(crossover(flat, worse), u64::MAX);
    }
}
