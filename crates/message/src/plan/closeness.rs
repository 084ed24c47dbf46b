//! What two cores share.

use std::fs;
use std::sync::OnceLock;

/// How near two cores are to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Closeness {
    /// They share a cache.
    SharedCache,
    /// They share none: data goes through memory or between chips.
    Apart,
}

impl Closeness {
    /// Both kinds.
    pub const ALL: [Self; 2] = [Self::SharedCache, Self::Apart];

    /// For people and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::SharedCache => "shared-cache",
            Self::Apart => "apart",
        }
    }

    /// Of two cores, by number.
    pub fn of(one: usize, other: usize) -> Self {
        let groups = cache_groups();
        match (groups.get(one), groups.get(other)) {
            (Some(one), Some(other)) if one != other => Self::Apart,
            _ => Self::SharedCache,
        }
    }
}

/// For each core, the first of those that share its last cache.
fn cache_groups() -> &'static [usize] {
    static GROUPS: OnceLock<Vec<usize>> = OnceLock::new();
    GROUPS.get_or_init(|| {
        (0..)
            .map_while(|core| {
                let folder = format!("/sys/devices/system/cpu/cpu{core}");
                fs::exists(&folder).unwrap_or(false).then(|| first_sharer(&folder).unwrap_or(0))
            })
            .collect()
    })
}

/// The first core in the list of the largest cache that is shared at all.
fn first_sharer(folder: &str) -> Option<usize> {
    let list = |index| fs::read_to_string(format!("{folder}/cache/index{index}/shared_cpu_list"));
    let last = (0..8).rev().find_map(|index| list(index).ok())?;
    last.split([',', '-']).next()?.trim().parse().ok()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_core_shares_with_itself_and_an_unknown_one_is_taken_as_near() {
        assert_eq!(Closeness::of(0, 0), Closeness::SharedCache);
        assert_eq!(Closeness::of(0, 1 << 20), Closeness::SharedCache);
    }
}
