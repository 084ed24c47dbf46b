//! The shared memory of hints: one page of a process, which its peers map.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use memferry_sys::shared_memory::{Mapping, Protection, SealedMemory};

use super::hints::HintWords;

/// Maps the hints in a memory of their size.
fn map(memory: &SealedMemory) -> io::Result<Mapping> {
    memory.map(Protection::ReadWrite)
}

fn words(mapping: &Mapping) -> &HintWords {
    debug_assert!(mapping.len() >= size_of::<HintWords>());
    // SAFETY: the memory was created or checked with the size of the words, and cannot shrink. It
    // begins on a page, and the words are atomics, for which any bytes are valid.
    unsafe { &*mapping.as_ptr().cast() }
}

/// The size of the memory in bytes.
fn bytes() -> usize {
    size_of::<HintWords>().next_multiple_of(memferry_sys::pages::page_bytes())
}

/// The hints of this process, with the descriptor for its peers.
#[derive(Debug)]
pub struct HintMemory {
    memory: SealedMemory,
    mapping: Mapping,
}

impl HintMemory {
    /// Creates the memory, without a hint.
    pub fn new() -> io::Result<Self> {
        let memory = SealedMemory::new("memferry-hints", bytes())?;
        let mapping = map(&memory)?;
        Ok(Self { memory, mapping })
    }

    /// The words.
    #[inline]
    pub fn words(&self) -> &HintWords {
        words(&self.mapping)
    }
}

impl AsFd for HintMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

/// The hints of a peer, and the number that the peer has given to this side.
#[derive(Debug)]
pub struct PeerHints {
    mapping: Mapping,
    slot: usize,
}

impl PeerHints {
    /// Maps the memory that the peer sent, if it has the right size and seals.
    pub fn from_untrusted_fd(descriptor: OwnedFd, slot: usize) -> io::Result<Self> {
        let memory = SealedMemory::from_untrusted_fd(descriptor, bytes())?;
        Ok(Self { mapping: map(&memory)?, slot })
    }

    /// The words.
    pub fn words(&self) -> &HintWords {
        words(&self.mapping)
    }

    /// Sets this side's hint. Returns the armed flags of the peer's wakeup: the caller must wake it.
    #[must_use]
    pub fn set(&self) -> u32 {
        self.words().set(self.slot)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_hint_of_a_peer_is_seen_by_the_owner() {
        let own = HintMemory::new().unwrap();
        let descriptor = own.as_fd().try_clone_to_owned().unwrap();
        let theirs = PeerHints::from_untrusted_fd(descriptor, 7).unwrap();
        assert_eq!(theirs.set(), 0);
        let mut seen = Vec::new();
        own.words().take(|slot| seen.push(slot));
        assert_eq!(seen, [7]);
    }

    #[test]
    fn memory_of_another_size_is_refused() {
        let memory = SealedMemory::new("short", 4 * bytes()).unwrap();
        let descriptor = memory.as_fd().try_clone_to_owned().unwrap();
        assert!(PeerHints::from_untrusted_fd(descriptor, 0).is_err());
    }
}
