//! Cookies: numbers that stand for transfers, for callers that want no handle.
//!
//! A number is given out once and never again, so a cookie is never ambiguous, and asking about a
//! finished transfer gives the same answer however often it is asked. Nothing is kept for a
//! transfer that ended well: a number that was given out and is not remembered is one of those.
//! Failures are remembered, and when there are too many of them, what is older than the record is
//! reported as forgotten rather than as success.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use memferry_sys::fork;
use memferry_sys::sync::lock;

use crate::error::{CookieError, Error};
use crate::transfer::Transfer;

/// Bits of a cookie that number the transfer; those above name the ferry.
const NUMBER_BITS: u32 = 47;
/// The largest name of a ferry. The sign bit stays free: cookies are not negative.
pub(crate) const LARGEST_FERRY: u64 = (1 << (63 - NUMBER_BITS)) - 1;

const SLOTS: usize = 1024;
const REMEMBERED_FAILURES: usize = 4096;

/// The number of a transfer. Not negative, and never given out twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cookie(i64);

impl Cookie {
    /// The number, for other languages.
    pub fn to_raw(self) -> i64 {
        self.0
    }

    /// A cookie from its number. Any number is allowed here; asking a ferry tells whether it is
    /// one of its own.
    pub fn from_raw(raw: i64) -> Self {
        Self(raw)
    }
}

/// What a table knows of a cookie.
pub(crate) enum Known {
    /// In flight, or finished and not yet replaced.
    Transfer(Transfer),
    /// Over.
    Over(Result<(), Error>),
}

/// The cookies of one ferry.
#[derive(Debug)]
pub(crate) struct CookieTable {
    ferry: u64,
    fork_generation: u64,
    next: AtomicU64,
    /// The newest transfers, at their number modulo the length.
    slots: Box<[Mutex<Option<Entry>>]>,
    /// What was pushed out of its slot.
    archive: Mutex<Archive>,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    transfer: Transfer,
}

#[derive(Debug, Default)]
struct Archive {
    /// Still in flight when their slot was needed.
    unfinished: HashMap<u64, Transfer>,
    failures: BTreeMap<u64, Error>,
    /// Failures below this number may have been forgotten.
    floor: u64,
}

impl CookieTable {
    pub(crate) fn new(ferry: u64) -> Self {
        Self {
            ferry,
            fork_generation: fork::generation(),
            next: AtomicU64::new(0),
            slots: (0..SLOTS).map(|_| Mutex::default()).collect(),
            archive: Mutex::default(),
        }
    }

    /// Gives a transfer its number.
    pub(crate) fn insert(&self, transfer: Transfer) -> Result<Cookie, CookieError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        if number >> NUMBER_BITS != 0 {
            return Err(CookieError::Exhausted);
        }
        let cookie = Cookie((self.ferry << NUMBER_BITS | number).cast_signed());
        if matches!(transfer.check(), Some(Ok(_))) {
            return Ok(cookie);
        }
        // Retired while the slot is locked: a transfer is always in its slot or in the archive.
        let mut slot = self.guard(self.slot(number), cookie)?;
        if let Some(old) = &*slot {
            self.retire(old, cookie)?;
        }
        *slot = Some(Entry { number, transfer });
        drop(slot);
        Ok(cookie)
    }

    /// Locks a part of the table. In a forked child the lock may be held by a thread that exists
    /// only in the parent; then what it guards is out of reach. A child that has threads of its own
    /// may get the same answer when two of them meet here.
    fn guard<'a, T>(
        &self,
        mutex: &'a Mutex<T>,
        cookie: Cookie,
    ) -> Result<MutexGuard<'a, T>, CookieError> {
        if fork::generation() == self.fork_generation {
            return Ok(lock(mutex));
        }
        match mutex.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(CookieError::Forked(cookie.0)),
        }
    }

    fn slot(&self, number: u64) -> &Mutex<Option<Entry>> {
        &self.slots[number as usize % SLOTS]
    }

    /// Whether a retired entry needs the archive at all is seen without its lock: most ended well.
    fn retire(&self, old: &Entry, cookie: Cookie) -> Result<(), CookieError> {
        match old.transfer.check() {
            Some(Ok(_)) => {}
            outcome => {
                let mut archive = self.guard(&self.archive, cookie)?;
                match outcome {
                    Some(Err(error)) => archive.remember(old.number, error),
                    _ => {
                        archive.sweep();
                        archive.unfinished.insert(old.number, old.transfer.clone());
                    }
                }
            }
        }
        Ok(())
    }

    /// What is known of a cookie.
    pub(crate) fn find(&self, cookie: Cookie) -> Result<Known, CookieError> {
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
            return Ok(Known::Transfer(entry.transfer.clone()));
        }
        let archive = self.guard(&self.archive, cookie)?;
        if let Some(transfer) = archive.unfinished.get(&number) {
            Ok(Known::Transfer(transfer.clone()))
        } else if let Some(error) = archive.failures.get(&number) {
            Ok(Known::Over(Err(error.clone())))
        } else if number < archive.floor {
            Err(CookieError::Forgotten(cookie.0))
        } else {
            Ok(Known::Over(Ok(())))
        }
    }
}

impl Archive {
    fn remember(&mut self, number: u64, error: Error) {
        self.failures.insert(number, error);
        if self.failures.len() > REMEMBERED_FAILURES
            && let Some((oldest, _)) = self.failures.pop_first()
        {
            self.floor = self.floor.max(oldest + 1);
        }
    }

    /// Drops what has ended. The number in flight is bounded by the rings, so this stays short.
    fn sweep(&mut self) {
        if self.unfinished.len() < SLOTS {
            return;
        }
        let over: Vec<_> = (self.unfinished.iter())
            .filter_map(|(&number, transfer)| Some((number, transfer.check()?)))
            .collect();
        for (number, outcome) in over {
            self.unfinished.remove(&number);
            if let Err(error) = outcome {
                self.remember(number, error);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use memferry_engine::Completion;

    use super::*;
    use crate::transfer::Waiting;

    /// A transfer that goes on for ever.
    fn endless() -> Transfer {
        let waiting = Waiting {
            spin_ns: 0,
            fork_generation: fork::generation(),
            helped_chunks: AtomicU64::new(0),
        };
        Transfer::shared(Arc::new(Completion::whole()), 1, false, Arc::new(waiting))
    }

    /// What a forked child says that does `work`; a child that hangs is ended.
    fn in_child(work: impl FnOnce() -> bool) -> i32 {
        // SAFETY: the child uses the table and the heap and leaves by `_exit`; the alarm ends it if a
        // lock keeps it.
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

    #[test]
    fn a_child_is_told_of_the_fork_where_the_parent_holds_a_lock() {
        fork::watch();
        let table = CookieTable::new(1);
        // The thread that forks stands for another that held the lock: in the child it is held too,
        // and nobody gives it back.
        let slot = lock(table.slot(0));
        let slot_held = in_child(|| matches!(table.insert(endless()), Err(CookieError::Forked(_))));
        drop(slot);
        assert_eq!(slot_held, 0, "a held slot");

        let first = table.insert(endless()).unwrap();
        table.next.store(SLOTS as u64, Ordering::Relaxed);
        let archive = lock(&table.archive);
        let archive_held = in_child(|| {
            let refused = matches!(table.insert(endless()), Err(CookieError::Forked(_)));
            refused && matches!(table.find(first), Ok(Known::Transfer(_)))
        });
        drop(archive);
        assert_eq!(archive_held, 0, "a held archive");
        assert!(table.insert(endless()).is_ok());
    }
}
