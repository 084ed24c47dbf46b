//! The set-associative cache of lines: found and held without a lock, filled by one at a time.
//!
//! The low bits of the line's number choose the set, the rest of the address and the process are
//! the tag. Whoever has the [`Filler`] may change what the cache holds; it lies under the lock of
//! the tables, so that the cache and the tables agree.

use memferry_sys::sync::atomic::{AtomicU64, Ordering};

use super::geometry::Geometry;
use super::line::LineName;
use super::order::Order;
use super::slot::{Attempt, Slot};

/// The cache of lines.
#[derive(Debug)]
pub struct Cache {
    geometry: Geometry,
    line_shift: u32,
    /// Set by set.
    slots: Box<[Slot]>,
    /// Slot by slot. Changed only while the slot is busy, read only while it is held.
    entries: Box<[AtomicU64]>,
    orders: Box<[Order]>,
    tick: Tick,
}

/// How many fills there were. Every hit reads it, so it has its cache line for itself.
#[derive(Debug)]
#[cfg_attr(not(loom), repr(align(128)))]
struct Tick(AtomicU64);

/// The right to change what the cache holds. There is one for each cache.
#[derive(Debug)]
pub struct Filler(());

/// Why nothing was found; whether somebody has to be told that a leaving slot has lost its last user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Missed {
    /// Whether to wake whoever waits for slots to be unused.
    pub wake: bool,
}

/// What a fill did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Filled {
    /// Where the line is now.
    pub slot: usize,
    /// Which line had to go for it, and the tick of its last use.
    pub victim: Option<(LineName, u64)>,
}

impl Cache {
    /// An empty cache, and the right to fill it.
    pub fn new(geometry: Geometry) -> (Self, Filler) {
        let cache = Self {
            geometry,
            line_shift: geometry.line_bytes().trailing_zeros(),
            slots: (0..geometry.lines()).map(|_| Slot::new()).collect(),
            entries: (0..geometry.entries()).map(|_| AtomicU64::new(0)).collect(),
            orders: (0..geometry.sets()).map(|_| Order::new()).collect(),
            tick: Tick(AtomicU64::new(0)),
        };
        (cache, Filler(()))
    }

    /// The shape of the cache.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The set that the line at an address belongs to.
    #[inline]
    pub fn set_of(&self, address: u64) -> usize {
        (address >> self.line_shift) as usize & (self.orders.len() - 1)
    }

    /// Finds a line and holds its slot until [`Cache::release`].
    #[inline(always)]
    pub fn find(&self, name: LineName) -> Result<usize, Missed> {
        let set = self.set_of(name.address);
        let first = set * self.geometry.ways();
        let owner = name.process.to_word();
        let mut wake = false;
        for (way, slot) in self.slots[first..first + self.geometry.ways()].iter().enumerate() {
            match slot.attempt(name.address, owner) {
                Attempt::Held => {
                    self.orders[set].touch(way);
                    slot.note_use(self.tick.0.load(Ordering::Relaxed));
                    return Ok(first + way);
                }
                Attempt::Other => {}
                Attempt::OtherAndWake => wake = true,
            }
        }
        Err(Missed { wake })
    }

    /// The slot of a number.
    #[inline]
    pub fn slot(&self, slot: usize) -> &Slot {
        &self.slots[slot]
    }

    /// The entries of a slot that the caller holds.
    #[inline]
    pub fn entries(&self, slot: usize) -> &[AtomicU64] {
        let first = slot * self.geometry.line_entries();
        &self.entries[first..first + self.geometry.line_entries()]
    }

    /// Brings a line in that the cache does not hold, in place of the one that was not used for
    /// longest; those in use are passed over. Nothing happens when all of the set are in use.
    pub fn fill(&self, _: &mut Filler, name: LineName, entries: &[u64]) -> Option<Filled> {
        let set = self.set_of(name.address);
        let first = set * self.geometry.ways();
        let empty = |way: &usize| self.slots[first + way].name().is_none();
        let ways = self.geometry.ways();
        // A slot that lost its line may be anywhere in the order of use.
        let vacant = self.orders[set].oldest_first(ways).find(empty);
        let mut candidates = vacant.into_iter().chain(self.orders[set].oldest_first(ways));
        let way = candidates.find(|way| self.slots[first + way].begin_change())?;
        let slot = &self.slots[first + way];
        let victim = slot.name().map(|victim| (victim, slot.last_use()));
        slot.rename(Some(name));
        for (entry, &value) in self.entries(first + way).iter().zip(entries) {
            entry.store(value, Ordering::Relaxed);
        }
        slot.note_use(self.tick.0.load(Ordering::Relaxed) + 1);
        slot.end_change();
        self.orders[set].touch(way);
        // Only the holder of the filler changes the tick.
        self.tick.0.store(self.tick.0.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        Some(Filled { slot: first + way, victim })
    }

    /// Empties a slot that was told to [leave](Slot::leave), once nobody uses it.
    pub fn empty(&self, _: &mut Filler, slot: usize) -> bool {
        let slot = &self.slots[slot];
        if !slot.begin_change() {
            return false;
        }
        slot.rename(None);
        slot.end_change();
        true
    }

    /// How many fills there were.
    pub fn tick(&self) -> u64 {
        self.tick.0.load(Ordering::Relaxed)
    }

    /// How many lines of a set were used at `tick` or later.
    pub fn used_since(&self, set: usize, tick: u64) -> usize {
        let first = set * self.geometry.ways();
        let recent = |slot: &&Slot| slot.last_use() >= tick && slot.name().is_some();
        self.slots[first..first + self.geometry.ways()].iter().filter(recent).count()
    }

    /// The lines it holds, in no particular order. Exact while nobody fills.
    pub fn lines(&self) -> impl Iterator<Item = LineName> {
        self.slots.iter().filter_map(Slot::name)
    }
}
