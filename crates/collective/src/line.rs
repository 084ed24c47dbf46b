//! The memory that the ranks of a team share, without its staging: a header, and a line of slots for each rank.
//!
//! The calls of a team are a sequence of phases, numbered from 1, the same on all ranks. In each phase every rank
//! publishes one slot: a payload, and then the number of the phase as the stamp of the slot. A rank publishes a
//! phase when it has read all that it needed of the phases before. So a rank may reuse a slot, [`SLOTS`] phases
//! later, when all ranks have published the phase after the one of the slot, and no call needs a closing barrier.
//!
//! A rank that waits for long arms its line with the phase that it waits for, checks once more, and sleeps. A rank
//! that publishes looks for armed lines afterwards. A full fence separates the two steps on each side, so at least
//! one of them sees the other.
//!
//! All ranks write this memory, and a rank may write nonsense: each value is read once, and bounds nothing here.

use memferry_sys::fault::step;
use memferry_sys::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Slots of a rank. A power of two.
pub(crate) const SLOTS: usize = 8;
/// Words of the payload of a slot.
#[cfg(not(loom))]
pub(crate) const PAYLOAD_WORDS: usize = 62;
#[cfg(loom)]
pub(crate) const PAYLOAD_WORDS: usize = 1;
/// Bytes of the payload of a slot.
pub(crate) const PAYLOAD_BYTES: usize = 8 * PAYLOAD_WORDS;

/// The phase of a rank that has not published anything.
pub(crate) const NO_PHASE: u64 = 0;

/// What is shared by all ranks.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(crate) struct Header {
    /// 0, or why the team is broken.
    pub(crate) broken: AtomicU64,
    padding: [AtomicU64; 15],
    /// How many ranks are asleep, or about to be. A wrong number delays a wakeup until the sleep times out.
    pub(crate) sleepers: AtomicU32,
}

/// One payload of a rank, with the phase that it is of.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Slot {
    stamp: AtomicU64,
    /// What the rank has called: equal on all ranks, or the ranks disagree.
    mark: AtomicU64,
    payload: [AtomicU64; PAYLOAD_WORDS],
}

/// What a rank waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Awaited {
    /// One rank.
    Rank(usize),
    /// All ranks.
    All,
}

const ALL: u32 = u32::MAX;
const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;

/// The memory that one rank writes and all read.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Line {
    /// The state of the rank: see `team`.
    pub(crate) state: AtomicU32,
    /// The process id of the rank, as it sees itself.
    pub(crate) pid: AtomicU32,
    /// Where others may read `probe_value`, to try whether they can read the memory of this rank.
    pub(crate) probe_address: AtomicU64,
    /// The value at that address.
    pub(crate) probe_value: AtomicU64,
    /// The word that the rank sleeps on.
    sleep: AtomicU32,
    awaited: AtomicU32,
    awaited_phase: AtomicU64,
    padding: [AtomicU64; 10],
    slots: [Slot; SLOTS],
}

impl Default for Slot {
    fn default() -> Self {
        let payload = std::array::from_fn(|_| AtomicU64::new(0));
        Self { stamp: AtomicU64::new(NO_PHASE), mark: AtomicU64::new(0), payload }
    }
}

impl Default for Line {
    fn default() -> Self {
        Self {
            state: AtomicU32::new(0),
            pid: AtomicU32::new(0),
            probe_address: AtomicU64::new(0),
            probe_value: AtomicU64::new(0),
            sleep: AtomicU32::new(AWAKE),
            awaited: AtomicU32::new(0),
            awaited_phase: AtomicU64::new(0),
            padding: std::array::from_fn(|_| AtomicU64::new(0)),
            slots: std::array::from_fn(|_| Slot::default()),
        }
    }
}

impl Slot {
    /// Sets the mark and the payload. Called by the owner, before it publishes the slot.
    #[inline]
    pub(crate) fn fill(&self, mark: u64, payload: &[u8]) {
        debug_assert!(payload.len() <= PAYLOAD_BYTES, "a payload fits into its slot");
        self.mark.store(mark, Ordering::Relaxed);
        let mut words = payload.chunks_exact(8);
        let mut slots = self.payload.iter();
        for (word, slot) in words.by_ref().zip(&mut slots) {
            let word = u64::from_ne_bytes(word.try_into().expect("eight bytes"));
            slot.store(word, Ordering::Relaxed);
        }
        let rest = words.remainder();
        if let Some(slot) = slots.next().filter(|_| !rest.is_empty()) {
            let mut word = [0; 8];
            word[..rest.len()].copy_from_slice(rest);
            slot.store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
    }

    /// What the owner has called.
    #[inline]
    pub(crate) fn mark(&self) -> u64 {
        self.mark.load(Ordering::Relaxed)
    }

    /// Copies the payload, from a byte that is a multiple of eight on.
    #[inline]
    pub(crate) fn read(&self, offset: usize, into: &mut [u8]) {
        let mut slots = self.payload.iter().skip(offset / 8);
        let mut words = into.chunks_exact_mut(8);
        for (word, slot) in words.by_ref().zip(&mut slots) {
            word.copy_from_slice(&slot.load(Ordering::Relaxed).to_ne_bytes());
        }
        let rest = words.into_remainder();
        if let Some(slot) = slots.next().filter(|_| !rest.is_empty()) {
            let word = slot.load(Ordering::Relaxed).to_ne_bytes();
            rest.copy_from_slice(&word[..rest.len()]);
        }
    }
}

impl Line {
    /// The slot of a phase.
    #[inline]
    pub(crate) fn slot(&self, phase: u64) -> &Slot {
        &self.slots[phase as usize % SLOTS]
    }

    /// The stamp of the slot of a phase.
    #[inline]
    pub(crate) fn stamp(&self, phase: u64) -> u64 {
        self.slot(phase).stamp.load(Ordering::Acquire)
    }

    /// Whether the rank has published a phase.
    #[inline]
    pub(crate) fn has_published(&self, phase: u64) -> bool {
        self.stamp(phase) >= phase
    }

    /// Publishes a phase. Called by the owner; [`must_look_for_sleepers`] comes after it.
    #[inline]
    pub(crate) fn publish(&self, phase: u64) {
        step();
        self.slot(phase).stamp.store(phase, Ordering::Release);
    }

    /// Arms the line. Called by the owner, which must check once more before it sleeps on the word.
    pub(crate) fn arm(&self, header: &Header, awaited: Awaited, phase: u64) {
        let rank = match awaited {
            Awaited::Rank(rank) => rank as u32,
            Awaited::All => ALL,
        };
        self.awaited.store(rank, Ordering::Relaxed);
        self.awaited_phase.store(phase, Ordering::Relaxed);
        self.sleep.store(ASLEEP, Ordering::Release);
        header.sleepers.fetch_add(1, Ordering::Relaxed);
        step();
        fence(Ordering::SeqCst);
    }

    /// Disarms the line. Called by the owner.
    pub(crate) fn disarm(&self, header: &Header) {
        self.sleep.store(AWAKE, Ordering::Relaxed);
        header.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// The word that an armed rank sleeps on, and its value.
    pub(crate) fn sleep_word(&self) -> (&AtomicU32, u32) {
        (&self.sleep, ASLEEP)
    }

    /// Takes the wakeup of a rank that has all it waits for, or of any sleeping one. The caller must wake it.
    pub(crate) fn take_sleeper(&self, is_there: impl FnOnce(Awaited, u64) -> bool) -> bool {
        if self.sleep.load(Ordering::Acquire) != ASLEEP {
            return false;
        }
        let awaited = match self.awaited.load(Ordering::Relaxed) {
            ALL => Awaited::All,
            rank => Awaited::Rank(rank as usize),
        };
        is_there(awaited, self.awaited_phase.load(Ordering::Relaxed))
            && self.sleep.swap(AWAKE, Ordering::Relaxed) == ASLEEP
    }
}

/// Whether a rank that has just published must look for armed lines.
#[inline]
pub(crate) fn must_look_for_sleepers(header: &Header) -> bool {
    full_fence();
    header.sleepers.load(Ordering::Relaxed) != 0
}

/// A full fence between a store and a later load. On x86 a locked instruction takes less time than the `mfence`
/// of `fence`.
#[inline]
fn full_fence() {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    // SAFETY: the instruction ORs 0 into a word of the stack, which changes nothing.
    unsafe {
        std::arch::asm!("lock or dword ptr [rsp], 0");
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    fence(Ordering::SeqCst);
}
