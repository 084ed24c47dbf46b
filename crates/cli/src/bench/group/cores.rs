//! Which member of a group runs on which core. All contestants get the same places, so that none
//! has the shorter way between its members.

use std::collections::BTreeSet;
use std::fs;

use memferry::sys::affinity;

/// The cores for the members of groups.
#[derive(Debug, Clone)]
pub(super) struct Cores {
    /// One hardware thread of every core first, then the others.
    order: Vec<usize>,
    whole: usize,
}

impl Cores {
    pub(super) fn of_this_machine() -> Self {
        Self::ordered(&affinity::allowed_cores(), siblings_of)
    }

    fn ordered(allowed: &[usize], siblings_of: impl Fn(usize) -> String) -> Self {
        let mut seen = BTreeSet::new();
        let (mut order, others): (Vec<_>, Vec<_>) =
            allowed.iter().partition(|&&core| seen.insert(siblings_of(core)));
        let whole = order.len();
        order.extend(others);
        Self { order, whole }
    }

    /// How many cores there are, hardware threads of the same core counted once.
    pub(super) fn whole(&self) -> usize {
        self.whole
    }

    /// The core of a member; they share when there are more members than cores.
    pub(super) fn of_member(&self, rank: usize) -> usize {
        self.order[rank % self.order.len()]
    }
}

/// The hardware threads of one core, as the kernel lists them; a core whose siblings are unknown
/// stands for itself.
fn siblings_of(core: usize) -> String {
    let path = format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
    fs::read_to_string(path).unwrap_or_else(|_| core.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_get_cores_of_their_own_before_they_share_one() {
        let cores = Cores::ordered(&[0, 1, 2, 3], |core| (core / 2).to_string());
        assert_eq!(cores.whole(), 2);
        let places: Vec<_> = (0..5).map(|rank| cores.of_member(rank)).collect();
        assert_eq!(places, [0, 2, 1, 3, 0]);
    }

    #[test]
    fn this_machine_has_a_core_for_a_member() {
        let cores = Cores::of_this_machine();
        assert!(cores.whole() >= 1);
        assert!(affinity::allowed_cores().contains(&cores.of_member(7)));
    }
}
