//! Cases of the bench: direction, memory, size and candidates.

use std::fmt;

use crate::Effort;

/// Direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GpuCopyDirection {
    HostToHost,
    ToDevice,
    FromDevice,
}

/// Page size of the host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PageSize {
    Small,
    Huge,
}

/// History of the host memory before a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BufferState {
    /// Newly mapped and written; no engine has used it.
    Fresh,
    /// Used before, and registered for the ferry.
    Reused,
}

/// A method to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyMethod {
    /// By the ferry. From host to host, without caller assist.
    Ferry,
    /// By the ferry, with default options.
    FerryHelped,
    Memcpy,
    /// By the driver, with the same kind of memory as the ferry.
    Driver,
    /// By the driver, with memory that it allocated and pinned.
    Pinned,
}

/// Series of Memferry from host to host, without and with caller assist.
pub(super) const CALLER_SLEEPS: &str = "memferry, caller sleeps";
pub(super) const CALLER_HELPS: &str = "memferry, caller helps";
pub(super) const MEMCPY: &str = "memcpy";
/// Series of Memferry, to or from a device.
pub(super) const MEMFERRY: &str = "memferry";
pub(super) const DRIVER: &str = "driver, pageable";
pub(super) const PINNED: &str = "driver, pinned";

impl GpuCopyDirection {
    pub(super) const ALL: [Self; 3] = [Self::HostToHost, Self::ToDevice, Self::FromDevice];

    /// All candidates of this direction, by series.
    fn candidates(self) -> &'static [(&'static str, CopyMethod)] {
        match self {
            Self::HostToHost => &[
                (CALLER_SLEEPS, CopyMethod::Ferry),
                (CALLER_HELPS, CopyMethod::FerryHelped),
                (MEMCPY, CopyMethod::Memcpy),
                ("cuMemcpyAsync", CopyMethod::Driver),
            ],
            Self::ToDevice | Self::FromDevice => &[
                (MEMFERRY, CopyMethod::Ferry),
                (DRIVER, CopyMethod::Driver),
                (PINNED, CopyMethod::Pinned),
            ],
        }
    }
}

impl fmt::Display for GpuCopyDirection {
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

/// One comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) direction: GpuCopyDirection,
    pub(super) pages: PageSize,
    pub(super) buffers: BufferState,
    pub(super) bytes: usize,
}

/// Size of the summary keys.
pub(super) const REFERENCE_BYTES: usize = 256 << 20;
/// Size of the summary key of the overlap.
pub(super) const REFERENCE_OVERLAP_BYTES: usize = 64 << 20;

impl Case {
    /// Returns whether a summary key is taken from this case.
    pub(super) fn is_reference(&self) -> bool {
        let buffers = match self.direction {
            GpuCopyDirection::HostToHost => BufferState::Reused,
            GpuCopyDirection::ToDevice | GpuCopyDirection::FromDevice => BufferState::Fresh,
        };
        self.bytes == REFERENCE_BYTES && self.pages == PageSize::Small && self.buffers == buffers
    }

    /// Figure of the rows.
    pub(super) fn figure(&self) -> String {
        let buffers = match (self.buffers, self.direction) {
            (BufferState::Fresh, _) => "fresh",
            (BufferState::Reused, GpuCopyDirection::HostToHost) => "registered",
            (BufferState::Reused, _) => "reused",
        };
        format!("{}, {buffers} memory of {}", self.direction, self.pages)
    }

    /// Candidates of this case, by series. Fresh memory takes long to prepare, so a short run omits
    /// the candidates that reused memory shows as well.
    pub(super) fn candidates(&self, effort: Effort) -> Vec<(&'static str, CopyMethod)> {
        let is_worth_it = self.buffers == BufferState::Reused || effort == Effort::Full;
        let mut field = self.direction.candidates().to_vec();
        field.retain(|(_, way)| is_worth_it || *way != CopyMethod::FerryHelped);
        field
    }

    /// Number of rounds, and of copies in each round: fewer if the preparation takes long.
    pub(super) fn rounds_and_repeats(&self, effort: Effort) -> (usize, u64) {
        let rounds = match (effort, self.buffers) {
            (Effort::Full, _) if self.bytes > REFERENCE_BYTES => 5,
            (Effort::Full, _) => 9,
            (_, BufferState::Fresh) => 5,
            (_, BufferState::Reused) => 7,
        };
        match self.buffers {
            BufferState::Fresh => (rounds, 1),
            BufferState::Reused => (rounds, (REFERENCE_BYTES / self.bytes).clamp(2, 32) as u64),
        }
    }
}

/// Cases of a run, those of the summary keys first. A brief run has only those.
pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let sizes: &[usize] = match effort {
        Effort::Brief => &[REFERENCE_BYTES],
        Effort::Quick => &[4 << 20, 64 << 20, REFERENCE_BYTES],
        Effort::Full => &[1 << 20, 4 << 20, 16 << 20, 64 << 20, REFERENCE_BYTES, 1 << 30],
    };
    let mut cases = Vec::new();
    for direction in GpuCopyDirection::ALL {
        for buffers in [BufferState::Fresh, BufferState::Reused] {
            for pages in [PageSize::Small, PageSize::Huge] {
                let case = |&bytes| Case { direction, pages, buffers, bytes };
                cases.extend(sizes.iter().map(case));
            }
        }
    }
    if effort == Effort::Brief {
        cases.retain(Case::is_reference);
    }
    cases.sort_by_key(|case| !case.is_reference());
    cases
}

/// Sizes of the overlap measurement.
pub(super) fn overlap_sizes(effort: Effort) -> &'static [usize] {
    match effort {
        Effort::Brief => &[REFERENCE_OVERLAP_BYTES],
        Effort::Quick => &[4 << 20, REFERENCE_OVERLAP_BYTES],
        Effort::Full => &[1 << 20, 4 << 20, 16 << 20, REFERENCE_OVERLAP_BYTES, 256 << 20],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_effort_measures_what_the_keys_need() {
        for effort in [Effort::Brief, Effort::Quick, Effort::Full] {
            let first: Vec<_> = cases(effort).into_iter().take(3).collect();
            assert!(first.iter().all(Case::is_reference), "{effort:?}");
            let directions: Vec<_> = first.iter().map(|case| case.direction).collect();
            assert_eq!(directions, GpuCopyDirection::ALL, "{effort:?}");
            assert!(overlap_sizes(effort).contains(&REFERENCE_OVERLAP_BYTES));
            assert!(cases(effort).iter().all(|case| case.rounds_and_repeats(effort).0 >= 5));
        }
        assert_eq!(cases(Effort::Brief).len(), 3);
    }

    #[test]
    fn the_keys_compare_series_that_are_measured() {
        let telling = cases(Effort::Brief).into_iter();
        let needed = [
            &[CALLER_SLEEPS, CALLER_HELPS, MEMCPY][..],
            &[MEMFERRY, DRIVER, PINNED],
            &[MEMFERRY, DRIVER],
        ];
        for (case, needed) in telling.zip(needed) {
            let field = case.candidates(Effort::Brief);
            let has = |series: &&str| field.iter().any(|(known, _)| known == series);
            assert!(needed.iter().all(has), "{}", case.figure());
        }
    }
}
