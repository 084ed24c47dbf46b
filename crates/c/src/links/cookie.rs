//! Cookies of reads and writes.
//!
//! A cookie contains the slot of a link and the number of an operation in that slot. The numbers
//! continue when another link uses the slot, and in a forked child they continue from the parent's:
//! so no cookie is ever issued twice, and one that is older than the link of its slot is stale. The
//! counts are atomics without a lock, because a child inherits locks in the state of the fork.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::code::{ADMA_EBADF, ADMA_EINVAL, ADMA_ENOSPC, CallError};

/// The smallest cookie of a read or write. All cookies of copies are below.
pub(crate) const FIRST: i64 = 1 << 62;

/// Bits of the operation's number; those above are the slot.
const NUMBER_BITS: u32 = 48;

/// Maximum number of open links.
pub(super) const SLOTS: usize = 1 << (62 - NUMBER_BITS);

static NEXT: [AtomicU64; SLOTS] = [const { AtomicU64::new(0) }; SLOTS];
/// Slots that were ever used.
static USED: AtomicUsize = AtomicUsize::new(0);

/// A read or write: the slot of its link, and its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LinkCookie {
    pub(super) slot: usize,
    pub(super) number: u64,
}

impl LinkCookie {
    /// Decodes a number of the program, if it can be the cookie of a read or write.
    pub(crate) fn from_raw(raw: i64) -> Result<Self, CallError> {
        if raw < 0 {
            let text = format!("{raw} is no cookie: is it the error code of an earlier call?");
            return Err(CallError::new(ADMA_EBADF, text));
        }
        if raw < FIRST {
            let text = format!(
                "cookie {raw} is not of a read or write: for a copy, use adma_check_copy or \
                 adma_wait_copy"
            );
            return Err(CallError::new(ADMA_EINVAL, text));
        }
        let bits = (raw - FIRST).cast_unsigned();
        let (place, number) = ((bits >> NUMBER_BITS) as usize, bits & ((1 << NUMBER_BITS) - 1));
        Ok(Self { slot: place, number })
    }

    pub(super) fn to_raw(self) -> i64 {
        FIRST | ((self.slot as i64) << NUMBER_BITS) | self.number.cast_signed()
    }

    /// Whether it was issued, by this process or an ancestor.
    pub(crate) fn was_issued(self) -> bool {
        self.number < next(self.slot)
    }
}

/// The number of the next operation in a slot.
pub(super) fn next(place: usize) -> u64 {
    NEXT[place].load(Ordering::Relaxed)
}

/// Whether a slot has a number left for one more operation.
pub(super) fn check_numbers_left(place: usize) -> Result<(), CallError> {
    if next(place) >> NUMBER_BITS == 0 {
        return Ok(());
    }
    Err(CallError::new(ADMA_ENOSPC, "all cookies of this link are used up: close it, open another"))
}

/// Allocates the next number of a slot. Only the link in the slot does so, one at a time.
pub(super) fn take_number(place: usize) -> u64 {
    NEXT[place].fetch_add(1, Ordering::Relaxed)
}

/// Marks a slot as used.
pub(super) fn mark_slot_used(place: usize) {
    USED.fetch_max(place + 1, Ordering::Relaxed);
}

/// The counts of all slots, for a child that has just been forked.
pub(super) fn all_counts() -> Box<[u64]> {
    (0..USED.load(Ordering::Relaxed)).map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_comes_back_as_it_went() {
        for place in [0, 1, 77, SLOTS - 1] {
            for number in [0, 1, (1 << NUMBER_BITS) - 1] {
                let cookie = LinkCookie { slot: place, number };
                assert!(cookie.to_raw() >= FIRST);
                assert_eq!(LinkCookie::from_raw(cookie.to_raw()).unwrap(), cookie);
            }
        }
    }

    #[test]
    fn what_cannot_be_a_cookie_of_a_link_is_refused() {
        assert_eq!(LinkCookie::from_raw(-14).unwrap_err().code, ADMA_EBADF);
        assert_eq!(LinkCookie::from_raw(i64::MIN).unwrap_err().code, ADMA_EBADF);
        for raw in [0, 42, 1 << 47, FIRST - 1] {
            assert_eq!(LinkCookie::from_raw(raw).unwrap_err().code, ADMA_EINVAL);
        }
        assert!(!LinkCookie::from_raw(i64::MAX).unwrap().was_issued());
    }
}
