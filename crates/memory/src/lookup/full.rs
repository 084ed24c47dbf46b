//! The full table, for comparison: every translation in one place, found by an index.
//!
//! What was prepared lies in extents, one for each stretch of memory; a process has a chain of
//! them, to which extents are only ever added, so that readers need no lock. An extent that has
//! become empty is used again for a later stretch that fits. Slots say whose line they hold and who
//! uses it, exactly as in the cache, so a reader that was led to a slot by old numbers finds out.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use memferry_sys::pages::page_bytes;
use memferry_sys::sync::lock;

use super::cache::Missed;
use super::error::LookupError;
use super::geometry::CacheMemory;
use super::line::LineName;
use super::slot::{Attempt, Slot};
use super::source::Refused;
use crate::handle::ProcessHandle;

/// How many pages share the count of users.
pub(crate) const FULL_LINE_ENTRIES: usize = 64;

/// Processes are found in two steps, so that few of them take little room.
const SEGMENT_PROCESSES: usize = 256;

/// The full table.
#[derive(Debug)]
pub(crate) struct Full {
    segments: Box<[OnceLock<Segment>]>,
    line_bytes: u64,
    /// Held by whoever changes the table.
    writer: Mutex<()>,
    unused: Condvar,
}

type Segment = Box<[Chain]>;

/// The extents of one process.
type Chain = OnceLock<Box<Extent>>;

/// The translations of one stretch of memory.
#[derive(Debug)]
struct Extent {
    /// Where the stretch begins. Together with `lines` a hint for readers, right for the writer.
    first: AtomicU64,
    /// How many lines it has; 0 when the extent is free.
    lines: AtomicU64,
    slots: Box<[Slot]>,
    entries: Box<[AtomicU64]>,
    next: Chain,
}

impl Full {
    pub(crate) fn new() -> Self {
        let segments = (1 << 16) / SEGMENT_PROCESSES;
        Self {
            segments: (0..segments).map(|_| OnceLock::new()).collect(),
            line_bytes: (FULL_LINE_ENTRIES * page_bytes()) as u64,
            writer: Mutex::new(()),
            unused: Condvar::new(),
        }
    }

    /// Finds a line and holds its slot.
    #[inline]
    pub(crate) fn find(&self, name: LineName) -> Result<(&Slot, &[AtomicU64]), Missed> {
        let owner = name.process.to_word();
        let mut wake = false;
        for extent in self.extents(name.process) {
            let Some(line) = extent.index_of(name.address, self.line_bytes) else { continue };
            match extent.slots[line].attempt(name.address, owner) {
                Attempt::Held => return Ok((&extent.slots[line], extent.entries(line))),
                Attempt::Other => {}
                Attempt::OtherAndWake => wake = true,
            }
        }
        Err(Missed { wake })
    }

    /// Attaches what is missing of a range of whole lines; all of it, or nothing. `check` is asked
    /// first whether the process is there. Returns how many lines were attached.
    pub(crate) fn prepare(
        &self,
        process: ProcessHandle,
        range: Range<u64>,
        check: impl Fn() -> Result<(), LookupError>,
        attach: impl Fn(LineName, &mut [u64]) -> Result<(), Refused>,
        detach: impl Fn(LineName, &[u64]),
    ) -> Result<u64, LookupError> {
        let _writer = self.lock();
        // With the lock: whoever removes the process comes for its lines afterwards.
        check()?;
        let missing = self.missing(process, range)?;
        let mut attached: Vec<(LineName, Vec<u64>)> = Vec::new();
        for address in missing {
            let name = LineName { process, address };
            let mut entries = vec![0; FULL_LINE_ENTRIES];
            if let Err(refused) = attach(name, &mut entries) {
                attached.iter().for_each(|(name, entries)| detach(*name, entries));
                return Err(refused.into());
            }
            attached.push((name, entries));
        }
        let joined = |left: &(LineName, Vec<u64>), right: &(LineName, Vec<u64>)| {
            left.0.address + self.line_bytes == right.0.address
        };
        for stretch in attached.chunk_by(joined) {
            self.publish(process, stretch);
        }
        Ok(attached.len() as u64)
    }

    /// The addresses of the lines of a range that are not there.
    fn missing(&self, process: ProcessHandle, range: Range<u64>) -> Result<Vec<u64>, LookupError> {
        let mut missing = Vec::new();
        for address in range.step_by(self.line_bytes as usize) {
            let name = LineName { process, address };
            match self.slot_of(name) {
                None => missing.push(address),
                Some(slot) if slot.is_leaving() => return Err(LookupError::Forgotten),
                Some(_) => {}
            }
        }
        Ok(missing)
    }

    /// The slot that holds a line. For the writer.
    fn slot_of(&self, name: LineName) -> Option<&Slot> {
        self.extents(name.process).find_map(|extent| {
            let line = extent.index_of(name.address, self.line_bytes)?;
            Some(&extent.slots[line]).filter(|slot| slot.name() == Some(name))
        })
    }

    /// Lets readers find a stretch of attached lines.
    fn publish(&self, process: ProcessHandle, stretch: &[(LineName, Vec<u64>)]) {
        let fits = |extent: &&Extent| {
            extent.lines.load(Ordering::Relaxed) == 0 && extent.slots.len() >= stretch.len()
        };
        let extent = match self.extents(process).find(fits) {
            Some(free) => free,
            None => self.append(process, stretch.len()),
        };
        for (line, (name, entries)) in stretch.iter().enumerate() {
            let slot = &extent.slots[line];
            // A reader on its way through an old number may be counted for a moment.
            while !slot.begin_change() {
                std::hint::spin_loop();
            }
            slot.rename(Some(*name));
            for (entry, &value) in extent.entries(line).iter().zip(entries) {
                entry.store(value, Ordering::Relaxed);
            }
            slot.end_change();
        }
        extent.first.store(stretch[0].0.address, Ordering::Relaxed);
        extent.lines.store(stretch.len() as u64, Ordering::Relaxed);
    }

    /// Detaches all lines of a range, waiting for those in use. Returns how many.
    pub(crate) fn forget(
        &self,
        process: ProcessHandle,
        range: Range<u64>,
        detach: impl Fn(LineName, &[u64]),
    ) -> u64 {
        let mut writer = self.lock();
        let concerned = |slot: &&Slot| {
            slot.name().is_some_and(|name| name.process == process && range.contains(&name.address))
        };
        self.slots(process).filter(concerned).for_each(Slot::leave);
        let mut detached = 0;
        loop {
            let mut left = false;
            for extent in self.extents(process) {
                for (line, slot) in extent.slots.iter().enumerate().filter(|(_, s)| concerned(s)) {
                    match extent.take(line, slot) {
                        Some((name, entries)) => {
                            detach(name, &entries);
                            slot.rename(None);
                            slot.end_change();
                            detached += 1;
                        }
                        None => left |= slot.is_leaving(),
                    }
                }
                extent.free_if_empty();
            }
            if !left {
                return detached;
            }
            writer = self.unused.wait(writer).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Detaches everything, whoever uses it: nobody can any more.
    pub(crate) fn take_all(&self, detach: impl Fn(LineName, &[u64])) {
        let chains = self.segments.iter().filter_map(OnceLock::get).flatten();
        for extent in chains.flat_map(chain) {
            for (line, slot) in extent.slots.iter().enumerate() {
                if let Some(name) = slot.name() {
                    detach(name, &extent.copy_of(line));
                }
            }
        }
    }

    /// Tells whoever waits for slots to be unused that one is.
    pub(crate) fn wake(&self) {
        drop(self.lock());
        self.unused.notify_all();
    }

    pub(crate) fn memory(&self) -> CacheMemory {
        let mut memory =
            CacheMemory { tags: size_of_val(&*self.segments), ..CacheMemory::default() };
        for segment in self.segments.iter().filter_map(OnceLock::get) {
            memory.tags += size_of_val(&**segment);
            for extent in segment.iter().flat_map(chain) {
                memory.entries += size_of_val(&*extent.entries);
                memory.tags += size_of_val(&*extent.slots) + size_of::<Extent>();
            }
        }
        memory
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        lock(&self.writer)
    }

    #[inline]
    fn extents(&self, process: ProcessHandle) -> impl Iterator<Item = &Extent> {
        let number = usize::from(process.number());
        let segment = self.segments[number / SEGMENT_PROCESSES].get();
        segment.into_iter().flat_map(move |segment| chain(&segment[number % SEGMENT_PROCESSES]))
    }

    fn slots(&self, process: ProcessHandle) -> impl Iterator<Item = &Slot> {
        self.extents(process).flat_map(|extent| extent.slots.iter())
    }

    /// Adds an empty extent to the chain of a process. For the writer.
    fn append(&self, process: ProcessHandle, lines: usize) -> &Extent {
        let number = usize::from(process.number());
        let segment = self.segments[number / SEGMENT_PROCESSES]
            .get_or_init(|| (0..SEGMENT_PROCESSES).map(|_| Chain::new()).collect());
        let mut end = &segment[number % SEGMENT_PROCESSES];
        while let Some(extent) = end.get() {
            end = &extent.next;
        }
        end.get_or_init(|| Box::new(Extent::new(lines)))
    }
}

#[inline]
fn chain(first: &Chain) -> impl Iterator<Item = &Extent> {
    std::iter::successors(first.get(), |extent| extent.next.get()).map(|extent| &**extent)
}

impl Extent {
    fn new(lines: usize) -> Self {
        Self {
            first: AtomicU64::new(0),
            lines: AtomicU64::new(0),
            slots: (0..lines).map(|_| Slot::new()).collect(),
            entries: (0..lines * FULL_LINE_ENTRIES).map(|_| AtomicU64::new(0)).collect(),
            next: Chain::new(),
        }
    }

    /// The line in this extent that begins at an address, by what the extent says at the moment.
    #[inline]
    fn index_of(&self, address: u64, line_bytes: u64) -> Option<usize> {
        let first = self.first.load(Ordering::Relaxed);
        let line = (address.wrapping_sub(first) / line_bytes) as usize;
        (line < self.lines.load(Ordering::Relaxed) as usize && line < self.slots.len())
            .then_some(line)
    }

    #[inline]
    fn entries(&self, line: usize) -> &[AtomicU64] {
        &self.entries[line * FULL_LINE_ENTRIES..(line + 1) * FULL_LINE_ENTRIES]
    }

    fn copy_of(&self, line: usize) -> Vec<u64> {
        self.entries(line).iter().map(|entry| entry.load(Ordering::Relaxed)).collect()
    }

    /// Takes a leaving line out of use, if nobody holds it. Its slot stays busy.
    fn take(&self, line: usize, slot: &Slot) -> Option<(LineName, Vec<u64>)> {
        let name = slot.name()?;
        (slot.is_leaving() && slot.begin_change()).then(|| (name, self.copy_of(line)))
    }

    fn free_if_empty(&self) {
        if self.slots.iter().all(|slot| slot.name().is_none()) {
            self.lines.store(0, Ordering::Relaxed);
        }
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        // One by one: a long chain would be a deep recursion.
        let mut next = self.next.take();
        while let Some(mut extent) = next {
            next = extent.next.take();
        }
    }
}
