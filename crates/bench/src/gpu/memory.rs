//! Host memory of a copy: mapped with the requested page size, and written.

use memferry::Ferry;
use memferry::sys::affinity;
use memferry::sys::pages::Pages;
use rustix::mm::{Advice, madvise};

use super::cases::{GpuCopyDirection, PageSize};

/// Value of the bytes of targets before a copy.
pub(super) const POISON: u8 = 0xA5;

/// Host memory of a copy; the variant determines the direction.
pub(super) enum HostBuffers {
    Pair { source: Pages, target: Pages },
    Source(Pages),
    Target(Pages),
}

impl HostBuffers {
    /// Maps and writes memory: the source with the pattern, the target with [`POISON`].
    pub(super) fn new(
        direction: GpuCopyDirection,
        pages: PageSize,
        pattern: &[u8],
    ) -> anyhow::Result<Self> {
        let mut host = Self::unpopulated(direction, pages, pattern.len())?;
        if let Self::Pair { source, .. } | Self::Source(source) = &mut host {
            write(source.as_mut_slice(), Some(pattern));
        }
        if let Self::Pair { target, .. } | Self::Target(target) = &mut host {
            write(target.as_mut_slice(), None);
        }
        Ok(host)
    }

    /// Maps memory without writing it.
    pub(super) fn unpopulated(
        direction: GpuCopyDirection,
        pages: PageSize,
        bytes: usize,
    ) -> anyhow::Result<Self> {
        Ok(match direction {
            GpuCopyDirection::HostToHost => {
                Self::Pair { source: map(pages, bytes)?, target: map(pages, bytes)? }
            }
            GpuCopyDirection::ToDevice => Self::Source(map(pages, bytes)?),
            GpuCopyDirection::FromDevice => Self::Target(map(pages, bytes)?),
        })
    }

    pub(super) fn bytes(&self) -> usize {
        let (Self::Pair { source: any, .. } | Self::Source(any) | Self::Target(any)) = self;
        any.len()
    }

    /// All ranges of the memory.
    pub(super) fn all(&self) -> impl Iterator<Item = &Pages> {
        let (first, second) = match self {
            Self::Pair { source, target } => (source, Some(target)),
            Self::Source(only) | Self::Target(only) => (only, None),
        };
        std::iter::once(first).chain(second)
    }

    /// Invalidates the memory in the ferry and unmaps it: later memory may get the same addresses,
    /// and must be a first use for the ferry.
    pub(super) fn unmap(self, ferry: &Ferry) {
        for pages in self.all() {
            ferry.invalidate(pages.as_ptr(), pages.len());
        }
    }
}

fn map(size: PageSize, bytes: usize) -> anyhow::Result<Pages> {
    match size {
        PageSize::Huge => Ok(Pages::huge(bytes)?),
        PageSize::Small => {
            let pages = Pages::new(bytes)?;
            // SAFETY: advice on a mapping of this function that was never accessed. A kernel
            // without huge pages returns an error, and has no huge pages to avoid.
            let _ = unsafe { madvise(pages.as_ptr().cast(), pages.len(), Advice::LinuxNoHugepage) };
            Ok(pages)
        }
    }
}

/// Writes all of `target`: the pattern, or [`POISON`]. Several threads share targets of 16 MiB and
/// more, because the page faults of a single thread would take long.
pub(super) fn write(target: &mut [u8], pattern: Option<&[u8]>) {
    const SHARED_BYTES: usize = 16 << 20;
    const MAX_THREADS: usize = 8;
    let put = |target: &mut [u8], at: usize| match pattern {
        Some(pattern) => target.copy_from_slice(&pattern[at..at + target.len()]),
        None => target.fill(POISON),
    };
    let threads = affinity::allowed_cores().len().clamp(1, MAX_THREADS);
    if target.len() < SHARED_BYTES || threads == 1 {
        return put(target, 0);
    }
    let part = target.len().div_ceil(threads).next_multiple_of(2 << 20);
    std::thread::scope(|scope| {
        for (index, target) in target.chunks_mut(part).enumerate() {
            scope.spawn(move || put(target, index * part));
        }
    });
}

/// Returns bytes without repeated ranges.
pub(super) fn pattern(bytes: usize) -> anyhow::Result<Pages> {
    let mut pages = Pages::huge(bytes)?;
    for (place, word) in pages.as_mut_slice().chunks_mut(8).enumerate() {
        let value = (place as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
        word.copy_from_slice(&value[..word.len()]);
    }
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_hold_the_pattern_and_targets_do_not() {
        for bytes in [100, (33 << 20) + 5] {
            let pattern = pattern(bytes).unwrap();
            for pages in [PageSize::Small, PageSize::Huge] {
                let host =
                    HostBuffers::new(GpuCopyDirection::HostToHost, pages, pattern.as_slice())
                        .unwrap();
                assert_eq!(host.bytes(), bytes);
                let HostBuffers::Pair { source, target } = host else { panic!("no pair") };
                assert!(source.as_slice() == pattern.as_slice());
                assert!(target.as_slice().iter().all(|&byte| byte == POISON));
            }
        }
    }
}
