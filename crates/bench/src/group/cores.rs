//! Assignment of the members of a group to cores. All candidates use the same cores, so the
//! distance between their members is the same.

use std::collections::BTreeSet;
use std::fs;

use memferry::sys::affinity;

/// Cores of the members of groups.
#[derive(Debug, Clone)]
pub(crate) struct MemberCores {
    /// One hardware thread of every core first, then the other hardware threads.
    order: Vec<usize>,
    physical_count: usize,
}

impl MemberCores {
    pub(crate) fn of_this_machine() -> Self {
        Self::ordered(&affinity::allowed_cores(), siblings_of)
    }

    fn ordered(allowed: &[usize], siblings_of: impl Fn(usize) -> String) -> Self {
        let mut seen = BTreeSet::new();
        let (mut order, others): (Vec<_>, Vec<_>) =
            allowed.iter().partition(|&&core| seen.insert(siblings_of(core)));
        let whole = order.len();
        order.extend(others);
        Self { order, physical_count: whole }
    }

    /// Number of cores; the hardware threads of a core count once.
    pub(crate) fn physical_count(&self) -> usize {
        self.physical_count
    }

    /// Core of a member. Members share cores if there are more members than cores.
    pub(crate) fn of_member(&self, rank: usize) -> usize {
        self.order[rank % self.order.len()]
    }

    /// A hardware thread of another core than this one; `None` if there is none.
    pub(crate) fn away_from(&self, core: usize) -> Option<usize> {
        let here = siblings_of(core);
        self.order.iter().copied().find(|&other| other != core && siblings_of(other) != here)
    }
}

/// Hardware threads of a core, as the kernel lists them. A core with unknown siblings forms a list
/// of its own.
fn siblings_of(core: usize) -> String {
    let path = format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
    fs::read_to_string(path).unwrap_or_else(|_| core.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_get_cores_of_their_own_before_they_share_one() {
        let cores = MemberCores::ordered(&[0, 1, 2, 3], |core| (core / 2).to_string());
        assert_eq!(cores.physical_count(), 2);
        let places: Vec<_> = (0..5).map(|rank| cores.of_member(rank)).collect();
        assert_eq!(places, [0, 2, 1, 3, 0]);
    }

    #[test]
    fn this_machine_has_a_core_for_a_member() {
        let cores = MemberCores::of_this_machine();
        assert!(cores.physical_count() >= 1);
        assert!(affinity::allowed_cores().contains(&cores.of_member(7)));
    }
}
