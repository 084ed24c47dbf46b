//! The set-associative cache of lines: lookups take no lock, and one thread at a time fills it.
//!
//! The low bits of the line number select the set; the rest of the address and the process are the
//! tag. Only the holder of the [`FillToken`] may change the contents. The token is under the lock
//! of the tables, so that the cache and the tables agree.

use memferry_sys::sync::atomic::{AtomicU64, Ordering};

use super::geometry::Geometry;
use super::line::LineKey;
use super::lru_order::LruOrder;
use super::slot::{AcquireResult, LineSlot};

/// The cache of lines.
#[derive(Debug)]
pub struct LineCache {
    geometry: Geometry,
    line_shift: u32,
    /// All slots, grouped by set.
    slots: Box<[LineSlot]>,
    /// All entries, grouped by slot. Written only while the slot is busy, read only while it is
    /// acquired.
    entries: Box<[AtomicU64]>,
    orders: Box<[LruOrder]>,
    tick: Tick,
}

/// The number of fills. Every hit reads it, so it has a cache line of its own.
#[derive(Debug)]
#[cfg_attr(not(loom), repr(align(128)))]
struct Tick(AtomicU64);

/// The right to change the contents. There is one token for each cache.
#[derive(Debug)]
pub struct FillToken(());

/// A miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineMiss {
    /// Whether the caller must wake the threads that wait for draining slots.
    pub wake: bool,
}

/// The result of a fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FillResult {
    /// The slot of the line.
    pub slot: usize,
    /// The evicted line, and the tick of its last use.
    pub victim: Option<(LineKey, u64)>,
}

impl LineCache {
    /// Creates an empty cache and its fill token.
    pub fn new(geometry: Geometry) -> (Self, FillToken) {
        let cache = Self {
            geometry,
            line_shift: geometry.line_bytes().trailing_zeros(),
            slots: (0..geometry.lines()).map(|_| LineSlot::new()).collect(),
            entries: (0..geometry.entries()).map(|_| AtomicU64::new(0)).collect(),
            orders: (0..geometry.sets()).map(|_| LruOrder::new()).collect(),
            tick: Tick(AtomicU64::new(0)),
        };
        (cache, FillToken(()))
    }

    /// The geometry.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The set of the line at an address.
    #[inline]
    pub fn set_of(&self, address: u64) -> usize {
        (address >> self.line_shift) as usize & (self.orders.len() - 1)
    }

    /// Finds a line and acquires its slot until [`LineSlot::release`].
    #[inline(always)]
    pub fn find(&self, key: LineKey) -> Result<usize, LineMiss> {
        let set = self.set_of(key.address);
        let first = set * self.geometry.ways();
        let owner = key.process.to_word();
        let mut wake = false;
        for (way, slot) in self.slots[first..first + self.geometry.ways()].iter().enumerate() {
            match slot.try_acquire(key.address, owner) {
                AcquireResult::Acquired => {
                    self.orders[set].touch(way);
                    slot.record_use(self.tick.0.load(Ordering::Relaxed));
                    return Ok(first + way);
                }
                AcquireResult::Mismatch => {}
                AcquireResult::MismatchAndWake => wake = true,
            }
        }
        Err(LineMiss { wake })
    }

    /// The slot with an index.
    #[inline]
    pub fn slot(&self, slot: usize) -> &LineSlot {
        &self.slots[slot]
    }

    /// The entries of a slot that the caller has acquired.
    #[inline]
    pub fn entries(&self, slot: usize) -> &[AtomicU64] {
        let first = slot * self.geometry.line_entries();
        &self.entries[first..first + self.geometry.line_entries()]
    }

    /// Inserts a line that is not in the cache, in place of the least recently used one of its set
    /// that is not in use. `None` if all slots of the set are in use.
    pub fn fill(&self, _: &mut FillToken, key: LineKey, entries: &[u64]) -> Option<FillResult> {
        let set = self.set_of(key.address);
        let first = set * self.geometry.ways();
        let empty = |way: &usize| self.slots[first + way].key().is_none();
        let ways = self.geometry.ways();
        // An empty slot may be at any position of the order.
        let vacant = self.orders[set].oldest_first(ways).find(empty);
        let mut candidates = vacant.into_iter().chain(self.orders[set].oldest_first(ways));
        let way = candidates.find(|way| self.slots[first + way].begin_change())?;
        let slot = &self.slots[first + way];
        let victim = slot.key().map(|victim| (victim, slot.last_use()));
        slot.set_key(Some(key));
        for (entry, &value) in self.entries(first + way).iter().zip(entries) {
            entry.store(value, Ordering::Relaxed);
        }
        slot.record_use(self.tick.0.load(Ordering::Relaxed) + 1);
        slot.end_change();
        self.orders[set].touch(way);
        // Only the holder of the fill token writes the tick.
        self.tick.0.store(self.tick.0.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        Some(FillResult { slot: first + way, victim })
    }

    /// Empties a [draining](LineSlot::begin_drain) slot. Returns false if it is still in use.
    pub fn clear(&self, _: &mut FillToken, slot: usize) -> bool {
        let slot = &self.slots[slot];
        if !slot.begin_change() {
            return false;
        }
        slot.set_key(None);
        slot.end_change();
        true
    }

    /// The number of fills.
    pub fn tick(&self) -> u64 {
        self.tick.0.load(Ordering::Relaxed)
    }

    /// The number of lines of a set that were used at `tick` or later.
    pub fn used_since(&self, set: usize, tick: u64) -> usize {
        let first = set * self.geometry.ways();
        let recent = |slot: &&LineSlot| slot.last_use() >= tick && slot.key().is_some();
        self.slots[first..first + self.geometry.ways()].iter().filter(recent).count()
    }

    /// The cached lines, in no particular order. Exact while no thread fills.
    pub fn lines(&self) -> impl Iterator<Item = LineKey> {
        self.slots.iter().filter_map(LineSlot::key)
    }
}
