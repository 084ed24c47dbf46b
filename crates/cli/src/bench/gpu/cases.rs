//! What is measured: which way the bytes go, in which memory, how many, and by whom.

use std::fmt;

use crate::bench::Effort;

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    HostToHost,
    ToDevice,
    FromDevice,
}

/// Which pages ordinary memory is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PageSize {
    Small,
    Huge,
}

/// What happened to ordinary memory before a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Buffers {
    /// Newly mapped and written; no engine has seen it.
    Fresh,
    /// Used before, and registered for the ferry.
    Reused,
}

/// One of the ways to make a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// By the ferry. Between ordinary memory, the caller's core is spared.
    Ferry,
    /// By the ferry, without any wish.
    FerryHelped,
    Memcpy,
    /// By the driver, which is given the same kind of memory.
    Driver,
    /// By the driver, with memory that it allocated and pinned itself.
    Pinned,
}

/// Ours between ordinary memory, with the caller's core spared or not.
pub(super) const SPARING: &str = "memferry, caller sleeps";
pub(super) const SPLIT: &str = "memferry, caller helps";
pub(super) const MEMCPY: &str = "memcpy";
/// Ours, to a device or from it.
pub(super) const OURS: &str = "memferry";
pub(super) const DRIVER: &str = "driver, pageable";
pub(super) const PINNED: &str = "driver, pinned";

impl Direction {
    pub(super) const ALL: [Self; 3] = [Self::HostToHost, Self::ToDevice, Self::FromDevice];

    /// Everybody who can take part, by series.
    fn field(self) -> &'static [(&'static str, Way)] {
        match self {
            Self::HostToHost => &[
                (SPARING, Way::Ferry),
                (SPLIT, Way::FerryHelped),
                (MEMCPY, Way::Memcpy),
                ("cuMemcpyAsync", Way::Driver),
            ],
            Self::ToDevice | Self::FromDevice => {
                &[(OURS, Way::Ferry), (DRIVER, Way::Driver), (PINNED, Way::Pinned)]
            }
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HostToHost => "host to host",
            Self::ToDevice => "host to device",
            Self::FromDevice => "device to host",
        })
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Small => "4 KiB pages",
            Self::Huge => "huge pages",
        })
    }
}

/// One contest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) direction: Direction,
    pub(super) pages: PageSize,
    pub(super) buffers: Buffers,
    pub(super) bytes: usize,
}

/// The size that the keys are taken from.
pub(super) const TELLING: usize = 256 << 20;
/// The size that the key on overlap is taken from.
pub(super) const TELLING_OVERLAP: usize = 64 << 20;

impl Case {
    /// Whether a key is taken from it.
    pub(super) fn is_telling(&self) -> bool {
        let buffers = match self.direction {
            Direction::HostToHost => Buffers::Reused,
            Direction::ToDevice | Direction::FromDevice => Buffers::Fresh,
        };
        self.bytes == TELLING && self.pages == PageSize::Small && self.buffers == buffers
    }

    /// The figure of its rows.
    pub(super) fn figure(&self) -> String {
        let buffers = match (self.buffers, self.direction) {
            (Buffers::Fresh, _) => "fresh",
            (Buffers::Reused, Direction::HostToHost) => "registered",
            (Buffers::Reused, _) => "reused",
        };
        format!("{}, {buffers} memory of {}", self.direction, self.pages)
    }

    /// Everybody who takes part, by series. Fresh memory is expensive: in a short run it is not
    /// spent on what registered memory shows as well.
    pub(super) fn field(&self, effort: Effort) -> Vec<(&'static str, Way)> {
        let is_worth_it = self.buffers == Buffers::Reused || effort == Effort::Full;
        let mut field = self.direction.field().to_vec();
        field.retain(|(_, way)| is_worth_it || *way != Way::FerryHelped);
        field
    }

    /// How many rounds, and how many copies in each: few of what takes long to make ready.
    pub(super) fn pace(&self, effort: Effort) -> (usize, usize) {
        let rounds = match (effort, self.buffers) {
            (Effort::Full, _) if self.bytes > TELLING => 5,
            (Effort::Full, _) => 9,
            (_, Buffers::Fresh) => 5,
            (_, Buffers::Reused) => 7,
        };
        match self.buffers {
            Buffers::Fresh => (rounds, 1),
            Buffers::Reused => (rounds, (TELLING / self.bytes).clamp(2, 32)),
        }
    }
}

/// The contests of a run, those first that the keys need. A brief one has no others.
pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let sizes: &[usize] = match effort {
        Effort::Brief => &[TELLING],
        Effort::Quick => &[4 << 20, 64 << 20, TELLING],
        Effort::Full => &[1 << 20, 4 << 20, 16 << 20, 64 << 20, TELLING, 1 << 30],
    };
    let mut cases = Vec::new();
    for direction in Direction::ALL {
        for buffers in [Buffers::Fresh, Buffers::Reused] {
            for pages in [PageSize::Small, PageSize::Huge] {
                let case = |&bytes| Case { direction, pages, buffers, bytes };
                cases.extend(sizes.iter().map(case));
            }
        }
    }
    if effort == Effort::Brief {
        cases.retain(Case::is_telling);
    }
    cases.sort_by_key(|case| !case.is_telling());
    cases
}

/// The sizes whose overlap is measured.
pub(super) fn overlap_sizes(effort: Effort) -> &'static [usize] {
    match effort {
        Effort::Brief => &[TELLING_OVERLAP],
        Effort::Quick => &[4 << 20, TELLING_OVERLAP],
        Effort::Full => &[1 << 20, 4 << 20, 16 << 20, TELLING_OVERLAP, 256 << 20],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_effort_measures_what_the_keys_need() {
        for effort in [Effort::Brief, Effort::Quick, Effort::Full] {
            let first: Vec<_> = cases(effort).into_iter().take(3).collect();
            assert!(first.iter().all(Case::is_telling), "{effort:?}");
            let directions: Vec<_> = first.iter().map(|case| case.direction).collect();
            assert_eq!(directions, Direction::ALL, "{effort:?}");
            assert!(overlap_sizes(effort).contains(&TELLING_OVERLAP));
            assert!(cases(effort).iter().all(|case| case.pace(effort).0 >= 5));
        }
        assert_eq!(cases(Effort::Brief).len(), 3);
    }

    #[test]
    fn the_keys_compare_series_that_are_measured() {
        let telling = cases(Effort::Brief).into_iter();
        let needed = [&[SPARING, SPLIT, MEMCPY][..], &[OURS, DRIVER, PINNED], &[OURS, DRIVER]];
        for (case, needed) in telling.zip(needed) {
            let field = case.field(Effort::Brief);
            let has = |series: &&str| field.iter().any(|(known, _)| known == series);
            assert!(needed.iter().all(has), "{}", case.figure());
        }
    }
}
