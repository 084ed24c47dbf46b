//! The set-associative cache of lines: lookups take no lock, and one thread at a time fills it.
//!
//! The low bits of the line number select the set; the rest of the address and the process are the
//! tag. Only the holder of the [`FillToken`] may change the contents. The token is under the lock
//! of the tables, so that the cache and the tables agree. A line is a word here, which the tables
//! and the cells of readers give its meaning.

use memferry_sys::fence::AsymmetricFence;
use memferry_sys::sync::atomic::{AtomicU64, Ordering};

use super::geometry::Geometry;
use super::hazard::HazardCell;
use super::line::LineKey;
use super::lru_order::LruOrder;
use super::slot::{LineSlot, ProtectResult};

/// The cache of lines.
#[derive(Debug)]
pub struct LineCache {
    geometry: Geometry,
    line_shift: u32,
    /// All slots, grouped by set.
    slots: Box<[LineSlot]>,
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
    /// Whether the cell named a line for a moment: the caller must check whether a thread waits for
    /// that.
    pub released: bool,
}

impl LineCache {
    /// Creates an empty cache and its fill token.
    pub fn new(geometry: Geometry) -> (Self, FillToken) {
        let cache = Self {
            geometry,
            line_shift: geometry.line_bytes().trailing_zeros(),
            slots: (0..geometry.lines()).map(|_| LineSlot::new()).collect(),
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

    #[inline(always)]
    fn slots_of(&self, set: usize) -> &[LineSlot] {
        let first = set * self.geometry.ways();
        &self.slots[first..first + self.geometry.ways()]
    }

    /// Finds a line by its [`tag_of`] and publishes its use in an empty cell, which keeps the line
    /// attached until the cell is cleared.
    #[inline(always)]
    pub fn find(
        &self,
        tag: (u64, u64),
        cell: &HazardCell,
        ends: AsymmetricFence,
    ) -> Result<u64, LineMiss> {
        let set = self.set_of(tag.0);
        let mut released = false;
        for (way, slot) in self.slots_of(set).iter().enumerate() {
            match slot.try_protect(tag, cell, ends) {
                ProtectResult::Protected(line) => {
                    self.orders[set].touch(way);
                    return Ok(line);
                }
                ProtectResult::Mismatch => {}
                ProtectResult::Released => released = true,
            }
        }
        Err(LineMiss { released })
    }

    /// The line of a key, if it is cached. Exact for the holder of the fill token.
    #[inline]
    pub fn line_of(&self, key: LineKey) -> Option<u64> {
        self.slots_of(self.set_of(key.address)).iter().find_map(|slot| slot.line_of(tag_of(key)))
    }

    /// Makes a cached line the most recently used of its set, as a hit does.
    pub fn touch(&self, key: LineKey) {
        let set = self.set_of(key.address);
        let is_same = |slot: &LineSlot| slot.line_of(tag_of(key)).is_some();
        if let Some(way) = self.slots_of(set).iter().position(is_same) {
            self.orders[set].touch(way);
        }
    }

    /// Inserts a line that is not in the cache, in place of the least recently used one of its set.
    /// Readers may still use the replaced line, which is returned.
    #[inline]
    pub fn fill(&self, _: &mut FillToken, key: LineKey, line: u64) -> Option<(LineKey, u64)> {
        let set = self.set_of(key.address);
        let (slots, order) = (self.slots_of(set), &self.orders[set]);
        // An empty slot may be at any position of the order.
        let vacant = slots.iter().position(|slot| slot.get().is_none());
        let way = vacant.unwrap_or_else(|| order.oldest(slots.len()));
        let victim = slots[way].get();
        slots[way].set(Some((key, line)));
        order.touch(way);
        // Only the holder of the fill token writes the tick.
        self.tick.0.store(self.tick.0.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        victim
    }

    /// Removes a line. Readers may still use it.
    pub fn remove(&self, _: &mut FillToken, key: LineKey) {
        let slots = self.slots_of(self.set_of(key.address));
        if let Some(slot) = slots.iter().find(|slot| slot.line_of(tag_of(key)).is_some()) {
            slot.set(None);
        }
    }

    /// The number of fills.
    #[inline]
    pub fn tick(&self) -> u64 {
        self.tick.0.load(Ordering::Relaxed)
    }

    /// The lines of a set. Exact for the holder of the fill token.
    pub fn lines_of_set(&self, set: usize) -> impl Iterator<Item = u64> {
        self.slots_of(set).iter().filter_map(|slot| slot.get().map(|(_, line)| line))
    }

    /// The keys of the cached lines, in no particular order. Exact while no thread fills.
    pub fn keys(&self) -> impl Iterator<Item = LineKey> {
        self.slots.iter().filter_map(|slot| slot.get().map(|(key, _)| key))
    }
}

/// The address of a line, and the handle of its process as a word.
#[inline(always)]
pub fn tag_of(key: LineKey) -> (u64, u64) {
    (key.address, key.process.to_word())
}
