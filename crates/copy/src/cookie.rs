//! Cookies: the numbers of transfers, for callers without a handle.
//!
//! Each number is used once, so a cookie is never ambiguous, and repeated queries for a finished
//! transfer return the same result. The table keeps nothing for a transfer that succeeded: an
//! issued number without an entry means success. The table records up to `MAX_FAILURES` failures
//! and then drops the oldest; numbers up to a dropped failure are reported as expired, not as
//! success.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use memferry_sys::fork::OwnerProcess;
use memferry_sys::sync::lock;

use crate::error::{CookieError, Error};
use crate::transfer::Transfer;

/// Number of the low bits of a cookie that hold the transfer number; the bits above hold the ferry
/// number.
const NUMBER_BITS: u32 = 47;
/// Maximum ferry number. The sign bit stays clear because cookies are not negative.
pub(crate) const MAX_FERRY: u64 = (1 << (63 - NUMBER_BITS)) - 1;

const SLOTS: usize = 1024;
const MAX_FAILURES: usize = 4096;

/// The number of a transfer: not negative, and unique.
///
/// ```
/// use memferry::{Cookie, Ferry};
///
/// let ferry = Ferry::new()?;
/// let (source, mut target) = ([1u8; 64], [0u8; 64]);
/// // SAFETY: both arrays live until the wait is over, and nothing else touches them.
/// let cookie = unsafe { ferry.icopy_cookie_raw(source.as_ptr(), target.as_mut_ptr(), 64) }?;
/// ferry.wait(Cookie::from_raw(cookie.to_raw()))?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cookie(i64);

impl Cookie {
    /// Returns the number, for other languages.
    pub fn to_raw(self) -> i64 {
        self.0
    }

    /// Creates a cookie from a number. Any number is accepted here; the calls of the ferry check
    /// whether the cookie is one of its own.
    pub fn from_raw(raw: i64) -> Self {
        Self(raw)
    }
}

/// The state of a cookie in the table.
pub(crate) enum CookieStatus {
    /// The transfer is in flight, or finished and not yet replaced in its slot.
    Transfer(Transfer),
    /// The transfer is complete.
    Done(Result<(), Error>),
}

/// The cookie table of one ferry.
#[derive(Debug)]
pub(crate) struct CookieTable {
    ferry: u64,
    owner: OwnerProcess,
    next: AtomicU64,
    /// The newest transfers, at their number modulo the length.
    slots: Box<[Mutex<Option<CookieSlot>>]>,
    /// Transfers that were evicted from their slot.
    retired: Mutex<RetiredTransfers>,
}

#[derive(Debug)]
struct CookieSlot {
    number: u64,
    transfer: Transfer,
}

#[derive(Debug, Default)]
struct RetiredTransfers {
    /// Transfers that were in flight when their slot was reused.
    unfinished: HashMap<u64, Transfer>,
    failures: BTreeMap<u64, Error>,
    /// Failures below this number may have been dropped.
    floor: u64,
}

impl CookieTable {
    pub(crate) fn new(ferry: u64) -> Self {
        Self {
            ferry,
            owner: OwnerProcess::current(),
            next: AtomicU64::new(0),
            slots: (0..SLOTS).map(|_| Mutex::default()).collect(),
            retired: Mutex::default(),
        }
    }

    /// Takes the numbers of as many transfers, for [`CookieTable::insert`].
    pub(crate) fn reserve(&self, count: usize) -> Result<Range<u64>, CookieError> {
        let first = self.next.fetch_add(count as u64, Ordering::Relaxed);
        let end = first.saturating_add(count as u64);
        if end > 1 << NUMBER_BITS { Err(CookieError::Exhausted) } else { Ok(first..end) }
    }

    /// Gives a transfer its number. `Err` returns it.
    pub(crate) fn insert(
        &self,
        number: u64,
        transfer: Transfer,
    ) -> Result<Cookie, (CookieError, Transfer)> {
        let cookie = Cookie((self.ferry << NUMBER_BITS | number).cast_signed());
        if matches!(transfer.outcome(), Some(Ok(_))) {
            return Ok(cookie);
        }
        match self.vacate(number, cookie) {
            Ok(mut slot) => {
                *slot = Some(CookieSlot { number, transfer });
                Ok(cookie)
            }
            Err(error) => Err((error, transfer)),
        }
    }

    /// Locks the slot of a number, whose entry may be replaced then.
    fn vacate(
        &self,
        number: u64,
        cookie: Cookie,
    ) -> Result<MutexGuard<'_, Option<CookieSlot>>, CookieError> {
        // The caller retires the old entry while it holds the lock of the slot, so that a transfer
        // is always in its slot or among the retired ones.
        let slot = self.guard(self.slot(number), cookie)?;
        if let Some(old) = &*slot {
            self.retire(old, cookie)?;
        }
        Ok(slot)
    }

    /// Locks a part of the table. In a forked child, a thread that exists only in the parent may
    /// hold the lock, and the part is then inaccessible. A child with several threads may get the
    /// same error when two of them contend for the lock.
    fn guard<'a, T>(
        &self,
        mutex: &'a Mutex<T>,
        cookie: Cookie,
    ) -> Result<MutexGuard<'a, T>, CookieError> {
        if self.owner.is_current() {
            return Ok(lock(mutex));
        }
        match mutex.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(CookieError::Forked(cookie.0)),
        }
    }

    fn slot(&self, number: u64) -> &Mutex<Option<CookieSlot>> {
        &self.slots[number as usize % SLOTS]
    }

    /// Moves an evicted entry to the retired transfers. An entry that succeeded, the usual case, is
    /// dropped without taking the lock.
    fn retire(&self, old: &CookieSlot, cookie: Cookie) -> Result<(), CookieError> {
        match old.transfer.outcome() {
            Some(Ok(_)) => {}
            outcome => {
                let mut archive = self.guard(&self.retired, cookie)?;
                match outcome {
                    Some(Err(error)) => archive.record_failure(old.number, error),
                    _ => {
                        archive.sweep();
                        archive.unfinished.insert(old.number, old.transfer.clone());
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the state of a cookie.
    pub(crate) fn find(&self, cookie: Cookie) -> Result<CookieStatus, CookieError> {
        let raw = cookie.0.cast_unsigned();
        let number = raw & ((1 << NUMBER_BITS) - 1);
        if cookie.0 < 0 || raw >> NUMBER_BITS != self.ferry {
            return Err(CookieError::Foreign(cookie.0));
        }
        if number >= self.next.load(Ordering::Relaxed) {
            return Err(CookieError::Unknown(cookie.0));
        }
        if let Some(entry) = &*self.guard(self.slot(number), cookie)?
            && entry.number == number
        {
            return Ok(CookieStatus::Transfer(entry.transfer.clone()));
        }
        let archive = self.guard(&self.retired, cookie)?;
        if let Some(transfer) = archive.unfinished.get(&number) {
            Ok(CookieStatus::Transfer(transfer.clone()))
        } else if let Some(error) = archive.failures.get(&number) {
            Ok(CookieStatus::Done(Err(error.clone())))
        } else if number < archive.floor {
            Err(CookieError::Expired(cookie.0))
        } else {
            Ok(CookieStatus::Done(Ok(())))
        }
    }
}

impl RetiredTransfers {
    fn record_failure(&mut self, number: u64, error: Error) {
        self.failures.insert(number, error);
        if self.failures.len() > MAX_FAILURES
            && let Some((oldest, _)) = self.failures.pop_first()
        {
            self.floor = self.floor.max(oldest + 1);
        }
    }

    /// Drops finished transfers. The capacity of the channels bounds the number in flight, so the
    /// scan stays short.
    fn sweep(&mut self) {
        if self.unfinished.len() < SLOTS {
            return;
        }
        let over: Vec<_> = (self.unfinished.iter())
            .filter_map(|(&number, transfer)| Some((number, transfer.outcome()?)))
            .collect();
        for (number, outcome) in over {
            self.unfinished.remove(&number);
            if let Err(error) = outcome {
                self.record_failure(number, error);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use memferry_engine::Completion;

    use super::*;
    use crate::transfer::WaitConfig;

    /// Returns a transfer that never completes.
    fn endless() -> Transfer {
        let waiting = WaitConfig {
            spin_ns: 0,
            owner: OwnerProcess::current(),
            caller_chunks: AtomicU64::new(0),
        };
        Transfer::with_completion(Arc::new(Completion::whole()), 1, false, Arc::new(waiting))
    }

    /// Returns the exit status of a forked child that runs `work`; an alarm ends a child that
    /// hangs.
    fn in_child(work: impl FnOnce() -> bool) -> i32 {
        // SAFETY: the child uses only the table and the heap and exits by `_exit`; the alarm ends
        // the child if it blocks on a lock.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::alarm(30);
                libc::_exit(i32::from(!work()));
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            status
        }
    }

    fn insert(table: &CookieTable) -> Result<Cookie, CookieError> {
        let number = table.reserve(1)?.start;
        table.insert(number, endless()).map_err(|(error, _)| error)
    }

    #[test]
    fn numbers_of_a_batch_are_in_a_row_and_run_out() {
        let table = CookieTable::new(1);
        assert_eq!((table.reserve(3), table.reserve(0)), (Ok(0..3), Ok(3..3)));
        table.next.store((1 << NUMBER_BITS) - 2, Ordering::Relaxed);
        assert_eq!(table.reserve(3), Err(CookieError::Exhausted));
        assert_eq!(table.reserve(1), Err(CookieError::Exhausted));
    }

    #[test]
    fn a_child_is_told_of_the_fork_where_the_parent_holds_a_lock() {
        let table = CookieTable::new(1);
        // The forking thread stands for another thread of the parent that holds the lock: in the
        // child the lock stays locked for ever.
        let slot = lock(table.slot(0));
        let slot_held = in_child(|| matches!(insert(&table), Err(CookieError::Forked(_))));
        drop(slot);
        assert_eq!(slot_held, 0, "a held slot");

        let first = insert(&table).unwrap();
        table.next.store(SLOTS as u64, Ordering::Relaxed);
        let archive = lock(&table.retired);
        let archive_held = in_child(|| {
            let refused = matches!(insert(&table), Err(CookieError::Forked(_)));
            refused && matches!(table.find(first), Ok(CookieStatus::Transfer(_)))
        });
        drop(archive);
        assert_eq!(archive_held, 0, "a held archive");
        assert!(insert(&table).is_ok());
    }
}
