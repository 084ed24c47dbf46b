//! Locality: what two cores share.

use std::fs;

use memferry_sys::fork::ForkSafe;

/// The locality of two cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Locality {
    /// They share a cache.
    SharedCache,
    /// They share no cache: data goes through memory or between chips.
    SeparateCache,
}

impl Locality {
    /// All values.
    pub const ALL: [Self; 2] = [Self::SharedCache, Self::SeparateCache];

    /// The name, for display and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::SharedCache => "shared-cache",
            Self::SeparateCache => "apart",
        }
    }

    /// The locality of two cores, by number.
    pub fn of(one: usize, other: usize) -> Self {
        let groups = cache_groups();
        match (groups.get(one), groups.get(other)) {
            (Some(one), Some(other)) if one != other => Self::SeparateCache,
            _ => Self::SharedCache,
        }
    }

    /// Two of these cores with this locality. Hardware threads of one core, which share all caches,
    /// are used only if there is no other pair.
    pub fn pair_of(self, cores: &[usize]) -> Option<(usize, usize)> {
        let pairs = || {
            let others = |at: usize| cores[at + 1..].iter().map(move |&other| (cores[at], other));
            (0..cores.len()).flat_map(others).filter(|&(a, b)| Self::of(a, b) == self)
        };
        pairs().find(|&(a, b)| first_sibling(a) != first_sibling(b)).or_else(|| pairs().next())
    }
}

/// The first hardware thread of a core.
fn first_sibling(core: usize) -> usize {
    let path = format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
    fs::read_to_string(path).ok().and_then(|list| first_of(&list)).unwrap_or(core)
}

/// For each core, the first of those that share its last-level cache.
fn cache_groups() -> &'static [usize] {
    static GROUPS: ForkSafe<Vec<usize>> = ForkSafe::new();
    GROUPS.get_or_init(|| {
        (0..)
            .map_while(|core| {
                let dir = format!("/sys/devices/system/cpu/cpu{core}");
                fs::exists(&dir).unwrap_or(false).then(|| first_sharer(&dir).unwrap_or(0))
            })
            .collect()
    })
}

/// The first core in the list of the last-level cache.
fn first_sharer(dir: &str) -> Option<usize> {
    let list = |index| fs::read_to_string(format!("{dir}/cache/index{index}/shared_cpu_list"));
    let last = (0..8).rev().find_map(|index| list(index).ok())?;
    first_of(&last)
}

/// The first number of a list in the kernel's format: `0-3,8`.
fn first_of(list: &str) -> Option<usize> {
    list.split([',', '-']).next()?.trim().parse().ok()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_core_shares_with_itself_and_an_unknown_one_is_taken_as_near() {
        assert_eq!(Locality::of(0, 0), Locality::SharedCache);
        assert_eq!(Locality::of(0, 1 << 20), Locality::SharedCache);
    }

    #[test]
    fn a_pair_is_as_near_as_was_asked_and_one_core_is_none() {
        let cores: Vec<_> = (0..memferry_sys::affinity::online_cores()).collect();
        for locality in Locality::ALL {
            if let Some((a, b)) = locality.pair_of(&cores) {
                assert!(a != b && Locality::of(a, b) == locality);
            }
            assert_eq!(locality.pair_of(&cores[..1]), None);
        }
    }

    #[test]
    fn the_first_of_a_list_is_found_in_every_way_of_writing() {
        assert_eq!(first_of("4-7,12\n"), Some(4));
        assert_eq!(first_of("3,5"), Some(3));
        assert_eq!(first_of("0\n"), Some(0));
        assert_eq!(first_of("none"), None);
    }
}
