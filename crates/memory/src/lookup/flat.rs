//! The flat table, for comparison: every translation in one table, found by index.
//!
//! Preloaded lines are in extents, one for each contiguous run of lines. Each process has a chain
//! of extents, which only grows, so that readers need no lock. An empty extent is reused for a
//! later run that fits. Slots contain the key of their line and are read as those of the cache, so a
//! reader with an outdated index detects it.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use memferry_sys::pages::page_bytes;
use memferry_sys::sync::lock;

use super::backend::AttachError;
use super::cache::LineMiss;
use super::error::LookupError;
use super::geometry::CacheFootprint;
use super::hazard::HazardCell;
use super::line::LineKey;
use super::readers::Readers;
use super::slot::{LineSlot, ProtectResult};
use crate::handle::ProcessHandle;
use memferry_sys::fence::AsymmetricFence;

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
    writer: Mutex<FlatWriter>,
    released: Condvar,
}

/// The state of the threads that change the table.
#[derive(Debug, Default)]
struct FlatWriter {
    /// Lines that are out of the table and still in use, with the words of their slots.
    draining: HashMap<LineKey, u64>,
    /// Uses that no cell of a reader names.
    uses: HashMap<LineKey, usize>,
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
            writer: Mutex::default(),
            released: Condvar::new(),
        }
    }

    /// Finds a line by its tag and publishes its use in an empty cell. Returns its first entry.
    #[inline(always)]
    pub(crate) fn find(
        &self,
        tag: (u64, u64),
        cell: &HazardCell,
        ends: AsymmetricFence,
    ) -> Result<NonNull<AtomicU64>, LineMiss> {
        let mut released = false;
        // The number of the process is in the lowest bits of its word.
        for extent in self.extents_of(tag.1 as u16) {
            let Some(line) = extent.index_of(tag.0, self.line_bytes) else { continue };
            match extent.slots[line].try_protect(tag, cell, ends) {
                ProtectResult::Protected(_) => return Ok(first_of(extent.entries(line))),
                ProtectResult::Mismatch => {}
                ProtectResult::Released => released = true,
            }
        }
        Err(LineMiss { released })
    }

    /// Finds the first entry of a line and counts the use, until [`FlatTable::end_use`].
    pub(crate) fn find_locked(&self, name: LineKey) -> Option<NonNull<AtomicU64>> {
        let mut writer = self.lock();
        let (extent, line) = self.place_of(name)?;
        *writer.uses.entry(name).or_default() += 1;
        Some(first_of(extent.entries(line)))
    }

    /// Ends a use that is counted.
    pub(crate) fn end_use(&self, name: LineKey) {
        let mut writer = self.lock();
        let Some(uses) = writer.uses.get_mut(&name) else { return };
        *uses -= 1;
        if *uses == 0 {
            writer.uses.remove(&name);
            self.released.notify_all();
        }
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
        let writer = self.lock();
        // Under the lock: a thread that removes the process detaches its lines afterwards.
        check()?;
        let missing = self.missing(&writer, process, range)?;
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
            self.publish(&writer, process, run);
        }
        Ok(attached.len() as u64)
    }

    /// The addresses of the missing lines of a range.
    fn missing(
        &self,
        writer: &FlatWriter,
        process: ProcessHandle,
        range: Range<u64>,
    ) -> Result<Vec<u64>, LookupError> {
        let mut missing = Vec::new();
        for address in range.step_by(self.line_bytes as usize) {
            let name = LineKey { process, address };
            if writer.draining.contains_key(&name) {
                return Err(LookupError::Invalidated);
            }
            if self.place_of(name).is_none() {
                missing.push(address);
            }
        }
        Ok(missing)
    }

    /// The extent of a line, and its index there. Only for the writer.
    fn place_of(&self, name: LineKey) -> Option<(&FlatExtent, usize)> {
        self.extents(name.process).find_map(|extent| {
            let line = extent.index_of(name.address, self.line_bytes)?;
            extent.slots[line].get().filter(|(key, _)| *key == name).map(|_| (extent, line))
        })
    }

    /// Publishes a run of attached lines to readers.
    fn publish(&self, writer: &FlatWriter, process: ProcessHandle, run: &[(LineKey, Vec<u64>)]) {
        let draining: HashSet<u64> = writer.draining.values().copied().collect();
        let fits = |extent: &&FlatExtent| {
            extent.lines.load(Ordering::Relaxed) == 0
                && extent.slots.len() >= run.len()
                && !extent.slots.iter().any(|slot| draining.contains(&word_of(slot)))
        };
        let extent = match self.extents(process).find(fits) {
            Some(free) => free,
            None => self.append(process, run.len()),
        };
        for (line, (name, entries)) in run.iter().enumerate() {
            // No reader has the entries: the slot is empty, and its last line is not draining.
            for (entry, &value) in extent.entries(line).iter().zip(entries) {
                entry.store(value, Ordering::Relaxed);
            }
            let slot = &extent.slots[line];
            slot.set(Some((*name, word_of(slot))));
        }
        extent.first.store(run[0].0.address, Ordering::Relaxed);
        extent.lines.store(run.len() as u64, Ordering::Relaxed);
    }

    /// Detaches all lines of a range, and waits for those in use. Returns the number of detached
    /// lines.
    pub(crate) fn invalidate(
        &self,
        readers: &Readers,
        process: ProcessHandle,
        range: Range<u64>,
        detach: impl Fn(LineKey, &[u64]),
    ) -> u64 {
        let mut writer = self.lock();
        let mut taken = self.take_out(&mut writer, process, range.clone());
        let is_affected = |name: &LineKey| name.process == process && range.contains(&name.address);
        readers.drains.begin(readers.fence);
        let mut detached = 0;
        loop {
            let in_use = readers.lines_in_use();
            taken.retain(|(name, word, entries)| {
                let is_used = writer.uses.contains_key(name) || in_use.binary_search(word).is_ok();
                if !is_used {
                    detach(*name, entries);
                    writer.draining.remove(name);
                    detached += 1;
                }
                is_used
            });
            // Another thread may be waiting for lines of the same range.
            if !writer.draining.keys().any(is_affected) {
                break;
            }
            writer = self.released.wait(writer).unwrap_or_else(PoisonError::into_inner);
        }
        readers.drains.end();
        self.released.notify_all();
        detached
    }

    /// Takes the lines of a range out of the table. Readers may still use them.
    fn take_out(
        &self,
        writer: &mut FlatWriter,
        process: ProcessHandle,
        range: Range<u64>,
    ) -> Vec<(LineKey, u64, Vec<u64>)> {
        let mut taken = Vec::new();
        for extent in self.extents(process) {
            for (line, slot) in extent.slots.iter().enumerate() {
                let Some((name, word)) = slot.get() else { continue };
                if name.process == process && range.contains(&name.address) {
                    slot.set(None);
                    writer.draining.insert(name, word);
                    taken.push((name, word, extent.copy_of(line)));
                }
            }
            extent.free_if_empty();
        }
        taken
    }

    /// Detaches all lines. No thread can use them any more.
    pub(crate) fn take_all(&self, detach: impl Fn(LineKey, &[u64])) {
        let chains = self.blocks.iter().filter_map(OnceLock::get).flatten();
        for extent in chains.flat_map(iter_chain) {
            for (line, slot) in extent.slots.iter().enumerate() {
                if let Some((name, _)) = slot.get() {
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

    fn lock(&self) -> MutexGuard<'_, FlatWriter> {
        lock(&self.writer)
    }

    fn extents(&self, process: ProcessHandle) -> impl Iterator<Item = &FlatExtent> {
        self.extents_of(process.number())
    }

    #[inline]
    fn extents_of(&self, number: u16) -> impl Iterator<Item = &FlatExtent> {
        let number = usize::from(number);
        let block = self.blocks[number / BLOCK_PROCESSES].get();
        block.into_iter().flat_map(move |block| iter_chain(&block[number % BLOCK_PROCESSES]))
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

/// The first entry of a line, whose entries all are allocated.
#[inline(always)]
fn first_of(entries: &[AtomicU64]) -> NonNull<AtomicU64> {
    NonNull::from(entries).cast()
}

/// The word that names the line of a slot in cells: the address of the slot.
fn word_of(slot: &LineSlot) -> u64 {
    std::ptr::from_ref(slot).addr() as u64
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

    fn free_if_empty(&self) {
        if self.slots.iter().all(|slot| slot.get().is_none()) {
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
