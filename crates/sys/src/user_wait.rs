//! Waiting for a word in memory without an interrupt: UMONITOR and UMWAIT, and TPAUSE, of processors that
//! have them (CPUID: WAITPKG), PAUSE on all others.
//!
//! The processor waits in its light state C0.1, for at most a short time, and goes on when another core or
//! a device writes to the cache line of the word. So a waiter takes neither power nor the execution units
//! that its sibling thread needs, and notices the write as soon as one that polls.

use std::sync::atomic::AtomicU64;

use crate::cpu;
use crate::sync::spin_hint;

/// The longest wait in ticks of the time stamp counter: about half a microsecond. A descriptor takes twice
/// that.
const MAX_TICKS: u64 = 1000;

/// How this processor waits for a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UserWait {
    /// It monitors the word's cache line.
    Monitor,
    /// It only pauses.
    Pause,
}

impl UserWait {
    /// The best way of this processor.
    #[inline]
    pub fn of_processor() -> Self {
        Self::choose(cpu::info().waitpkg)
    }

    const fn choose(has_waitpkg: bool) -> Self {
        if has_waitpkg { Self::Monitor } else { Self::Pause }
    }

    /// Waits for a moment, or until the word may have changed from `seen`.
    #[inline]
    pub fn wait(self, word: &AtomicU64, seen: u64) {
        match self {
            Self::Pause => spin_hint(),
            #[cfg(all(target_arch = "x86_64", not(loom)))]
            Self::Monitor => x86::monitor(word, seen, MAX_TICKS),
            #[cfg(not(all(target_arch = "x86_64", not(loom))))]
            Self::Monitor => {
                let _ = (word, seen, MAX_TICKS);
                spin_hint();
            }
        }
    }

    /// Waits for a moment.
    #[inline]
    pub fn pause(self) {
        match self {
            #[cfg(all(target_arch = "x86_64", not(loom)))]
            Self::Monitor => x86::pause(MAX_TICKS / 4),
            _ => spin_hint(),
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(loom)))]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::_rdtsc;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// The control word of both instructions: state C0.1, which is left fastest.
    const STATE_C0_1: u32 = 1;

    /// The time in so many ticks, as the instructions take it.
    fn deadline(ticks: u64) -> (u32, u32) {
        // SAFETY: every x86-64 processor has the counter, and Linux lets programs read it.
        let at = unsafe { _rdtsc() }.wrapping_add(ticks);
        (at as u32, (at >> 32) as u32)
    }

    /// Waits until the cache line of a word is written, unless the word is not `seen` any more.
    pub(super) fn monitor(word: &AtomicU64, seen: u64, ticks: u64) {
        // SAFETY: called only if CPUID reports WAITPKG. UMONITOR reads one byte at the address, as a load
        // does, and the reference makes that valid; it writes no memory and no register.
        unsafe { asm!("umonitor {}", in(reg) word.as_ptr(), options(nostack, preserves_flags)) };
        // A write before the monitor was armed would not end the wait.
        if word.load(Ordering::Acquire) != seen {
            return;
        }
        let (low, high) = deadline(ticks);
        // SAFETY: as above. UMWAIT changes the flags only, which the block does not preserve, and ends at
        // the deadline, by the limit of the system, at an interrupt or by a write to the line.
        unsafe {
            asm!("umwait {:e}", in(reg) STATE_C0_1, in("eax") low, in("edx") high, options(nostack));
        }
    }

    /// Waits for so many ticks.
    pub(super) fn pause(ticks: u64) {
        let (low, high) = deadline(ticks);
        // SAFETY: called only if CPUID reports WAITPKG. TPAUSE changes the flags only.
        unsafe {
            asm!(
                "tpause {:e}",
                in(reg) STATE_C0_1, in("eax") low, in("edx") high,
                options(nostack, nomem)
            );
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_processor_without_the_instructions_pauses() {
        assert_eq!(UserWait::choose(false), UserWait::Pause);
        assert_eq!(UserWait::choose(true), UserWait::Monitor);
        let word = AtomicU64::new(0);
        UserWait::Pause.wait(&word, 0);
        UserWait::Pause.pause();
    }

    #[test]
    fn the_way_of_this_processor_returns_whether_the_word_changes_or_not() {
        let (wait, word) = (UserWait::of_processor(), AtomicU64::new(7));
        assert_eq!(wait == UserWait::Monitor, cpu::info().waitpkg);
        for seen in [7, 8] {
            wait.wait(&word, seen);
        }
        wait.pause();
    }
}
