//! The ordinary memory of a copy: mapped on the pages that are asked for, and written.

use memferry::Ferry;
use memferry::sys::affinity;
use memferry::sys::pages::Pages;
use rustix::mm::{Advice, madvise};

use super::cases::{Direction, PageSize};

/// What targets hold before a copy.
pub(super) const SPOILT: u8 = 0xA5;

/// The ordinary memory of a copy, which the direction follows from.
pub(super) enum Host {
    Pair { source: Pages, target: Pages },
    Source(Pages),
    Target(Pages),
}

impl Host {
    /// Maps and writes: the source with the pattern, as much of it as there is, the target with
    /// something else.
    pub(super) fn new(
        direction: Direction,
        pages: PageSize,
        pattern: &[u8],
    ) -> anyhow::Result<Self> {
        let mut host = Self::untouched(direction, pages, pattern.len())?;
        if let Self::Pair { source, .. } | Self::Source(source) = &mut host {
            write(source.as_mut_slice(), Some(pattern));
        }
        if let Self::Pair { target, .. } | Self::Target(target) = &mut host {
            write(target.as_mut_slice(), None);
        }
        Ok(host)
    }

    /// Maps only.
    pub(super) fn untouched(
        direction: Direction,
        pages: PageSize,
        bytes: usize,
    ) -> anyhow::Result<Self> {
        Ok(match direction {
            Direction::HostToHost => {
                Self::Pair { source: map(pages, bytes)?, target: map(pages, bytes)? }
            }
            Direction::ToDevice => Self::Source(map(pages, bytes)?),
            Direction::FromDevice => Self::Target(map(pages, bytes)?),
        })
    }

    pub(super) fn bytes(&self) -> usize {
        let (Self::Pair { source: any, .. } | Self::Source(any) | Self::Target(any)) = self;
        any.len()
    }

    /// All of its memory.
    pub(super) fn all(&self) -> impl Iterator<Item = &Pages> {
        let (first, second) = match self {
            Self::Pair { source, target } => (source, Some(target)),
            Self::Source(only) | Self::Target(only) => (only, None),
        };
        std::iter::once(first).chain(second)
    }

    /// Unmaps it, and lets the ferry know nothing of it any more: other memory may get the same
    /// addresses, and must be as new to the ferry as it is.
    pub(super) fn retire(self, ferry: &Ferry) {
        for pages in self.all() {
            ferry.forget(pages.as_ptr(), pages.len());
        }
    }
}

fn map(size: PageSize, bytes: usize) -> anyhow::Result<Pages> {
    match size {
        PageSize::Huge => Ok(Pages::huge(bytes)?),
        PageSize::Small => {
            let pages = Pages::new(bytes)?;
            // SAFETY: advice on a mapping of our own that nobody has touched. A kernel without huge
            // pages refuses, and has none to give.
            let _ = unsafe { madvise(pages.as_ptr().cast(), pages.len(), Advice::LinuxNoHugepage) };
            Ok(pages)
        }
    }
}

/// Writes all of `target`: the pattern, or something else. Several threads share large ones, whose
/// pages would take one thread long to come.
pub(super) fn write(target: &mut [u8], pattern: Option<&[u8]>) {
    const SHARED_BYTES: usize = 16 << 20;
    const MOST_THREADS: usize = 8;
    let put = |target: &mut [u8], at: usize| match pattern {
        Some(pattern) => target.copy_from_slice(&pattern[at..at + target.len()]),
        None => target.fill(SPOILT),
    };
    let threads = affinity::allowed_cores().len().clamp(1, MOST_THREADS);
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

/// Bytes of which no two stretches are alike.
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
                let host = Host::new(Direction::HostToHost, pages, pattern.as_slice()).unwrap();
                assert_eq!(host.bytes(), bytes);
                let Host::Pair { source, target } = host else { panic!("no pair") };
                assert!(source.as_slice() == pattern.as_slice());
                assert!(target.as_slice().iter().all(|&byte| byte == SPOILT));
            }
        }
    }
}
