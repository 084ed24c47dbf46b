//! The flat table, for comparison: every translation in one table, found by index.
//!
//! Preloaded lines are in extents, one for each contiguous run of lines. Each process has a chain
//! of extents, which only grows, so that readers need no lock. An empty extent is reused for a
//! later run that fits. Slots contain the key and users of their line, as in the cache, so a reader
//! with an outdated index detects it.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use memferry_sys::pages::page_bytes;
use memferry_sys::sync::lock;

use super::backend::AttachError;
use super::cache::LineMiss;
use super::error::LookupError;
use super::geometry::CacheFootprint;
use super::line::LineKey;
use super::slot::{AcquireResult, LineSlot};
use crate::handle::ProcessHandle;

/// Number of pages that share a user count.
pub(crate) const FLAT_LINE_ENTRIES: usize = 64;

/// Processes per block. Lookup has two levels, so that few processes need little memory.
const BLOCK_PROCESSES: usize = 256;

/// The flat table.
#[derive(Debug)]
pub(crate) struct FlatTable {
    blocks: Box<[OnceLock<ProcessBlock>]>,
    line_bytes: u64,
    /// Held by the thread that changes the table.
    writer: Mutex<()>,
    released: Condvar,
}

type ProcessBlock = Box<[ExtentChain]>;

/// The extents of one process.
type ExtentChain = OnceLock<Box<FlatExtent>>;

/// The translations of a contiguous run of lines.
#[derive(Debug)]
struct FlatExtent {
    /// Address of the first line. With `lines` a hint for readers; exact for the writer.
    first: AtomicU64,
    /// Number of lines; 0 if the extent is free.
    lines: AtomicU64,
    slots: Box<[LineSlot]>,
    entries: Box<[AtomicU64]>,
    next: ExtentChain,
}

impl FlatTable {
    pub(crate) fn new() -> Self {
        let blocks = (1 << 16) / BLOCK_PROCESSES;
        Self {
            blocks: (0..blocks).map(|_| OnceLock::new()).collect(),
            line_bytes: (FLAT_LINE_ENTRIES * page_bytes()) as u64,
            writer: Mutex::new(()),
            released: Condvar::new(),
        }
    }

    /// Finds a line and acquires its slot.
    #[inline]
    pub(crate) fn find(&self, name: LineKey) -> Result<(&LineSlot, &[AtomicU64]), LineMiss> {
        let owner = name.process.to_word();
        let mut wake = false;
        for extent in self.extents(name.process) {
            let Some(line) = extent.index_of(name.address, self.line_bytes) else { continue };
            match extent.slots[line].try_acquire(name.address, owner) {
                AcquireResult::Acquired => return Ok((&extent.slots[line], extent.entries(line))),
                AcquireResult::Mismatch => {}
                AcquireResult::MismatchAndWake => wake = true,
            }
        }
        Err(LineMiss { wake })
    }

    /// Attaches the missing lines of a range of whole lines: all, or none after an error. `check`
    /// verifies first that the process exists. Returns the number of attached lines.
    pub(crate) fn preload(
        &self,
        process: ProcessHandle,
        range: Range<u64>,
        check: impl Fn() -> Result<(), LookupError>,
        attach: impl Fn(LineKey, &mut [u64]) -> Result<(), AttachError>,
        detach: impl Fn(LineKey, &[u64]),
    ) -> Result<u64, LookupError> {
        let _writer = self.lock();
        // Under the lock: a thread that removes the process detaches its lines afterwards.
        check()?;
        let missing = self.missing(process, range)?;
        let mut attached: Vec<(LineKey, Vec<u64>)> = Vec::new();
        for address in missing {
            let name = LineKey { process, address };
            let mut entries = vec![0; FLAT_LINE_ENTRIES];
            if let Err(error) = attach(name, &mut entries) {
                attached.iter().for_each(|(name, entries)| detach(*name, entries));
                return Err(error.into());
            }
            attached.push((name, entries));
        }
        let joined = |is_left: &(LineKey, Vec<u64>), right: &(LineKey, Vec<u64>)| {
            is_left.0.address + self.line_bytes == right.0.address
        };
        for run in attached.chunk_by(joined) {
            self.publish(process, run);
        }
        Ok(attached.len() as u64)
    }

    /// The addresses of the missing lines of a range.
    fn missing(&self, process: ProcessHandle, range: Range<u64>) -> Result<Vec<u64>, LookupError> {
        let mut missing = Vec::new();
        for address in range.step_by(self.line_bytes as usize) {
            let name = LineKey { process, address };
            match self.slot_of(name) {
                None => missing.push(address),
                Some(slot) if slot.is_draining() => return Err(LookupError::Invalidated),
                Some(_) => {}
            }
        }
        Ok(missing)
    }

    /// The slot of a line. Only for the writer.
    fn slot_of(&self, name: LineKey) -> Option<&LineSlot> {
        self.extents(name.process).find_map(|extent| {
            let line = extent.index_of(name.address, self.line_bytes)?;
            Some(&extent.slots[line]).filter(|slot| slot.key() == Some(name))
        })
    }

    /// Publishes a run of attached lines to readers.
    fn publish(&self, process: ProcessHandle, run: &[(LineKey, Vec<u64>)]) {
        let fits = |extent: &&FlatExtent| {
            extent.lines.load(Ordering::Relaxed) == 0 && extent.slots.len() >= run.len()
        };
        let extent = match self.extents(process).find(fits) {
            Some(free) => free,
            None => self.append(process, run.len()),
        };
        for (line, (name, entries)) in run.iter().enumerate() {
            let slot = &extent.slots[line];
            // A reader with an outdated index may add itself for a short time.
            while !slot.begin_change() {
                std::hint::spin_loop();
            }
            slot.set_key(Some(*name));
            for (entry, &value) in extent.entries(line).iter().zip(entries) {
                entry.store(value, Ordering::Relaxed);
            }
            slot.end_change();
        }
        extent.first.store(run[0].0.address, Ordering::Relaxed);
        extent.lines.store(run.len() as u64, Ordering::Relaxed);
    }

    /// Detaches all lines of a range, and waits for those in use. Returns the number of detached
    /// lines.
    pub(crate) fn invalidate(
        &self,
        process: ProcessHandle,
        range: Range<u64>,
        detach: impl Fn(LineKey, &[u64]),
    ) -> u64 {
        let mut writer = self.lock();
        let is_affected = |slot: &&LineSlot| {
            slot.key().is_some_and(|name| name.process == process && range.contains(&name.address))
        };
        self.slots(process).filter(is_affected).for_each(LineSlot::begin_drain);
        let mut detached = 0;
        loop {
            let mut is_left = false;
            for extent in self.extents(process) {
                for (line, slot) in extent.slots.iter().enumerate().filter(|(_, s)| is_affected(s))
                {
                    match extent.take(line, slot) {
                        Some((name, entries)) => {
                            detach(name, &entries);
                            slot.set_key(None);
                            slot.end_change();
                            detached += 1;
                        }
                        None => is_left |= slot.is_draining(),
                    }
                }
                extent.free_if_empty();
            }
            if !is_left {
                return detached;
            }
            writer = self.released.wait(writer).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Detaches all lines. No thread can use them any more.
    pub(crate) fn take_all(&self, detach: impl Fn(LineKey, &[u64])) {
        let chains = self.blocks.iter().filter_map(OnceLock::get).flatten();
        for extent in chains.flat_map(iter_chain) {
            for (line, slot) in extent.slots.iter().enumerate() {
                if let Some(name) = slot.key() {
                    detach(name, &extent.copy_of(line));
                }
            }
        }
    }

    /// Wakes the threads that wait for draining slots.
    pub(crate) fn wake(&self) {
        drop(self.lock());
        self.released.notify_all();
    }

    pub(crate) fn footprint(&self) -> CacheFootprint {
        let mut memory =
            CacheFootprint { tags: size_of_val(&*self.blocks), ..CacheFootprint::default() };
        for block in self.blocks.iter().filter_map(OnceLock::get) {
            memory.tags += size_of_val(&**block);
            for extent in block.iter().flat_map(iter_chain) {
                memory.entries += size_of_val(&*extent.entries);
                memory.tags += size_of_val(&*extent.slots) + size_of::<FlatExtent>();
            }
        }
        memory
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        lock(&self.writer)
    }

    #[inline]
    fn extents(&self, process: ProcessHandle) -> impl Iterator<Item = &FlatExtent> {
        let number = usize::from(process.number());
        let block = self.blocks[number / BLOCK_PROCESSES].get();
        block.into_iter().flat_map(move |block| iter_chain(&block[number % BLOCK_PROCESSES]))
    }

    fn slots(&self, process: ProcessHandle) -> impl Iterator<Item = &LineSlot> {
        self.extents(process).flat_map(|extent| extent.slots.iter())
    }

    /// Adds an empty extent to the chain of a process. Only for the writer.
    fn append(&self, process: ProcessHandle, lines: usize) -> &FlatExtent {
        let number = usize::from(process.number());
        let block = self.blocks[number / BLOCK_PROCESSES]
            .get_or_init(|| (0..BLOCK_PROCESSES).map(|_| ExtentChain::new()).collect());
        let mut end = &block[number % BLOCK_PROCESSES];
        while let Some(extent) = end.get() {
            end = &extent.next;
        }
        end.get_or_init(|| Box::new(FlatExtent::new(lines)))
    }
}

#[inline]
fn iter_chain(first: &ExtentChain) -> impl Iterator<Item = &FlatExtent> {
    std::iter::successors(first.get(), |extent| extent.next.get()).map(|extent| &**extent)
}

impl FlatExtent {
    fn new(lines: usize) -> Self {
        Self {
            first: AtomicU64::new(0),
            lines: AtomicU64::new(0),
            slots: (0..lines).map(|_| LineSlot::new()).collect(),
            entries: (0..lines * FLAT_LINE_ENTRIES).map(|_| AtomicU64::new(0)).collect(),
            next: ExtentChain::new(),
        }
    }

    /// The index of the line at an address, by the current hints.
    #[inline]
    fn index_of(&self, address: u64, line_bytes: u64) -> Option<usize> {
        let first = self.first.load(Ordering::Relaxed);
        let line = (address.wrapping_sub(first) / line_bytes) as usize;
        (line < self.lines.load(Ordering::Relaxed) as usize && line < self.slots.len())
            .then_some(line)
    }

    #[inline]
    fn entries(&self, line: usize) -> &[AtomicU64] {
        &self.entries[line * FLAT_LINE_ENTRIES..(line + 1) * FLAT_LINE_ENTRIES]
    }

    fn copy_of(&self, line: usize) -> Vec<u64> {
        self.entries(line).iter().map(|entry| entry.load(Ordering::Relaxed)).collect()
    }

    /// Takes a draining line out of use, if it has no users. Its slot stays busy.
    fn take(&self, line: usize, slot: &LineSlot) -> Option<(LineKey, Vec<u64>)> {
        let name = slot.key()?;
        (slot.is_draining() && slot.begin_change()).then(|| (name, self.copy_of(line)))
    }

    fn free_if_empty(&self) {
        if self.slots.iter().all(|slot| slot.key().is_none()) {
            self.lines.store(0, Ordering::Relaxed);
        }
    }
}

impl Drop for FlatExtent {
    fn drop(&mut self) {
        // Iteratively: the recursion over a long chain would be deep.
        let mut next = self.next.take();
        while let Some(mut extent) = next {
            next = extent.next.take();
        }
    }
}
