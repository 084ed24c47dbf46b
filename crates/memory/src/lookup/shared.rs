//! What callers, translations and the miss thread share, apart from the source.
//!
//! The cache and the full table are read without a lock. Everything else lies under one lock, which
//! nobody holds while the source works or while it sleeps.

use std::sync::atomic::AtomicU64;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use memferry_sys::pages::page_bytes;
use memferry_sys::sync::lock;

use super::cache::{Cache, Filler, Missed};
use super::counters::Counters;
use super::error::LookupError;
use super::full::{FULL_LINE_ENTRIES, Full};
use super::line::LineName;
use super::miss::MissQueue;
use super::settings::{Kind, Settings};
use super::slot::{Attempt, Slot};
use super::stripes::HitCounts;
use super::table::Table;
use super::translation::Translation;
use crate::handle::VirtualMemoryHandle;

/// The parts of a lookup that do not depend on its source.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) store: Store,
    pub(crate) page_shift: u32,
    pub(crate) line_entries: usize,
    pub(crate) hits: HitCounts,
    tables: Mutex<Tables>,
    /// Something that somebody may wait for has changed under the lock.
    changed: Condvar,
    /// There is work for the miss thread.
    work: Condvar,
}

// There is one for each lookup, and a hit should not follow one more pointer.
#[expect(clippy::large_enum_variant)]
#[derive(Debug)]
pub(crate) enum Store {
    Dynamic(Cache),
    Full(Full),
}

/// What lies under the lock.
#[derive(Debug)]
pub(crate) struct Tables {
    pub(crate) table: Table,
    /// Only with a cache.
    pub(crate) filler: Option<Filler>,
    pub(crate) queue: MissQueue,
    /// All counters but hits.
    pub(crate) counters: Counters,
    pub(crate) fills_at_last_sweep: u64,
    /// Whether there were more lines than the mark allows when it was last looked at.
    pub(crate) above_mark: bool,
    pub(crate) sweeping: bool,
    pub(crate) stopping: bool,
    pub(crate) thread: MissThread,
}

#[derive(Debug)]
pub(crate) enum MissThread {
    NotStarted,
    Running(JoinHandle<()>),
    /// The system gave none: callers do its work.
    Denied,
}

pub(crate) type Locked<'a> = MutexGuard<'a, Tables>;

/// Where a handle points to: a line, and a page in it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) name: LineName,
    pub(crate) page: usize,
}

/// Addresses above this many bits belong to nobody: no processor translates them for programs.
const ADDRESS_BITS: u32 = 57;

impl Shared {
    pub(crate) fn new(settings: Settings) -> Self {
        let (store, filler, line_entries) = match settings.kind {
            Kind::Dynamic(geometry) => {
                let (cache, filler) = Cache::new(geometry);
                (Store::Dynamic(cache), Some(filler), geometry.line_entries())
            }
            Kind::Full => (Store::Full(Full::new()), None, FULL_LINE_ENTRIES),
        };
        let tables = Tables {
            table: Table::new(match &store {
                Store::Dynamic(cache) => Some(cache),
                Store::Full(_) => None,
            }),
            filler,
            queue: MissQueue::new(settings.queue_length),
            counters: Counters::default(),
            fills_at_last_sweep: 0,
            above_mark: false,
            sweeping: false,
            stopping: false,
            thread: MissThread::NotStarted,
        };
        Self {
            settings,
            store,
            page_shift: page_bytes().trailing_zeros(),
            line_entries,
            hits: HitCounts::new(),
            tables: Mutex::new(tables),
            changed: Condvar::new(),
            work: Condvar::new(),
        }
    }

    /// Finds the line and the page of a handle.
    #[inline(always)]
    pub(crate) fn place(&self, handle: VirtualMemoryHandle) -> Result<Place, LookupError> {
        if handle.address >> ADDRESS_BITS != 0 {
            return Err(LookupError::OutOfRange(handle.address));
        }
        let page_number = handle.address >> self.page_shift;
        let page = page_number as usize & (self.line_entries - 1);
        let address = (page_number - page as u64) << self.page_shift;
        Ok(Place { name: LineName { process: handle.process, address }, page })
    }

    /// How much memory a line covers.
    pub(crate) fn line_bytes(&self) -> u64 {
        (self.line_entries as u64) << self.page_shift
    }

    /// The addresses of the lines that a range touches.
    pub(crate) fn lines_of(&self, address: u64, length: u64) -> std::ops::Range<u64> {
        let end = address.saturating_add(length).min(1 << ADDRESS_BITS);
        let start = address & !(self.line_bytes() - 1);
        if length == 0 || start >= end {
            return 0..0;
        }
        start..end.next_multiple_of(self.line_bytes())
    }

    /// Finds a line in the cache or the full table, without the lock. The caller makes a
    /// translation of what it finds, which gives it back.
    #[inline(always)]
    pub(crate) fn find(&self, name: LineName) -> Option<(&Slot, &[AtomicU64])> {
        let found = match &self.store {
            Store::Dynamic(cache) => match cache.find(name) {
                Ok(slot) => return Some((cache.slot(slot), cache.entries(slot))),
                Err(missed) => missed,
            },
            Store::Full(full) => match full.find(name) {
                Ok(found) => return Some(found),
                Err(missed) => missed,
            },
        };
        if let Missed { wake: true } = found {
            self.wake();
        }
        None
    }

    /// A translation from a slot that is known to hold the line, because the lock is held.
    pub(crate) fn resident(&self, tables: &Tables, place: Place) -> Option<Translation<'_>> {
        let Store::Dynamic(cache) = &self.store else { return None };
        let slot = tables.table.line(place.name)?.slot?;
        match cache.slot(slot).hold() {
            Attempt::Held => {
                let held = (cache.slot(slot), cache.entries(slot));
                Some(Translation::of_slot(self, held, place))
            }
            Attempt::Other => None,
            Attempt::OtherAndWake => {
                self.changed.notify_all();
                None
            }
        }
    }

    pub(crate) fn lock(&self) -> Locked<'_> {
        lock(&self.tables)
    }

    /// Sleeps until something has changed.
    pub(crate) fn wait<'a>(&self, tables: Locked<'a>) -> Locked<'a> {
        self.changed.wait(tables).unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until there is work for the miss thread.
    pub(crate) fn wait_for_work<'a>(&self, tables: Locked<'a>) -> Locked<'a> {
        self.work.wait(tables).unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells all who wait that something has changed. The caller changed it under the lock.
    pub(crate) fn tell(&self) {
        self.changed.notify_all();
    }

    pub(crate) fn tell_miss_thread(&self) {
        self.work.notify_one();
    }

    /// Tells whoever waits for slots to be unused that one is.
    #[cold]
    pub(crate) fn wake(&self) {
        match &self.store {
            Store::Dynamic(_) => {
                // Whoever looked at the slot before it was released, and sleeps or is about to,
                // has given up the lock by now.
                drop(self.lock());
                self.changed.notify_all();
            }
            Store::Full(full) => full.wake(),
        }
    }

    /// Ends a use of a line as [`Shared::end_use`] does, for callers without the lock.
    #[cold]
    pub(crate) fn release_line(&self, name: LineName) {
        self.end_use(&mut self.lock(), name);
    }

    /// Ends a use of a line that did not go through the cache.
    pub(crate) fn end_use(&self, tables: &mut Tables, name: LineName) {
        let Some(line) = tables.table.line_mut(name) else { return };
        line.uses -= 1;
        if line.uses == 0 && line.leaving {
            self.changed.notify_all();
        }
    }
}
