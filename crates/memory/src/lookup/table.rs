//! The tables behind the cache: for each process, what is attached of its memory.
//!
//! Ordinary memory without a limit, changed only under the lock. The table knows which of its lines
//! are in the cache, and keeps the others in the order of their last use, for sweeps.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use super::cache::{Cache, Filled, Filler};
use super::counters::Class;
use super::departed::Departed;
use super::error::LookupError;
use super::line::LineName;
use super::processes::Processes;
use super::recency::Recency;
use crate::handle::ProcessHandle;

/// The tables of all processes.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) processes: Processes,
    /// Attached lines that are not in the cache and not to leave, by their last use.
    idle: BTreeSet<(u64, LineName)>,
    departed: Departed,
    /// Only with a cache.
    recency: Option<Recency>,
    /// How many lines are attached, or about to be.
    count: usize,
}

/// One line of a table.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) stage: Stage,
    pub(crate) entries: Arc<[u64]>,
    /// How many use it other than through the cache.
    pub(crate) uses: u32,
    /// Where in the cache it is.
    pub(crate) slot: Option<usize>,
    /// The tick at which it was last used, or left the cache. 0 before the first use.
    last_use: u64,
    /// The cache had no room for it when it was last brought there.
    unplaced: bool,
    /// It is being forgotten: no new users, and it goes when the last one is gone.
    pub(crate) leaving: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The source is at work, without the lock.
    Attaching,
    Attached,
    /// As above. Whoever wants the line waits until it is gone.
    Detaching,
}

/// Lines that are to be detached, without the lock.
pub(crate) type Batch = Vec<(LineName, Arc<[u64]>)>;

/// How many lines are detached between two looks at the table.
const BATCH_LINES: usize = 64;

impl Table {
    pub(crate) fn new(cache: Option<&Cache>) -> Self {
        Self { recency: cache.map(Recency::new), ..Self::default() }
    }

    pub(crate) fn line(&self, name: LineName) -> Option<&Line> {
        self.processes.lines(name.process)?.get(&name.address)
    }

    pub(crate) fn line_mut(&mut self, name: LineName) -> Option<&mut Line> {
        self.processes.lines_mut(name.process)?.get_mut(&name.address)
    }

    /// Attached lines, those about to be included.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Makes room for a line that the source is about to attach.
    pub(crate) fn begin_attach(&mut self, name: LineName) -> Result<(), LookupError> {
        let stale = LookupError::Stale(name.process);
        let lines = self.processes.lines_mut(name.process).ok_or(stale)?;
        let line = Line {
            stage: Stage::Attaching,
            entries: Arc::new([]),
            uses: 0,
            slot: None,
            last_use: 0,
            unplaced: false,
            leaving: false,
        };
        assert!(lines.insert(name.address, line).is_none(), "{name:?} is there already");
        self.count += 1;
        Ok(())
    }

    /// Keeps what the source attached. It may have been told to leave meanwhile.
    pub(crate) fn end_attach(
        &mut self,
        name: LineName,
        entries: Arc<[u64]>,
    ) -> Result<Arc<[u64]>, LookupError> {
        let last_use = self.departed.last_use(name).unwrap_or(0);
        self.departed.drop_line(name);
        let line = self.line_mut(name).ok_or(LookupError::Stale(name.process))?;
        line.stage = Stage::Attached;
        line.entries = entries.clone();
        line.last_use = last_use;
        if line.leaving {
            return Err(LookupError::Forgotten);
        }
        self.idle.insert((last_use, name));
        Ok(entries)
    }

    /// Takes a line out whose attaching failed, or whose detaching is over.
    pub(crate) fn remove(&mut self, name: LineName) {
        let lines = self.processes.lines_mut(name.process);
        let Some(line) = lines.and_then(|lines| lines.remove(&name.address)) else { return };
        self.count -= 1;
        self.idle.remove(&(line.last_use, name));
        // What was forgotten may be other memory when it is seen next.
        if line.last_use > 0 && !line.leaving {
            self.departed.remember(name, line.last_use);
        }
    }

    /// Brings an attached line into the cache. The line whose place it takes becomes idle. Without
    /// a place the line counts as used now.
    pub(crate) fn fill(
        &mut self,
        cache: &Cache,
        filler: &mut Filler,
        name: LineName,
    ) -> Option<Filled> {
        let entries = self.line(name)?.entries.clone();
        let filled = cache.fill(filler, name, &entries);
        let line = self.line_mut(name)?;
        let before = line.last_use;
        line.last_use = cache.tick();
        line.slot = filled.map(|filled| filled.slot);
        line.unplaced = filled.is_none();
        self.idle.remove(&(before, name));
        self.recency.iter_mut().for_each(|recency| recency.remove(name, before));
        if filled.is_none() {
            self.lie_idle(cache, name, cache.tick());
        }
        if let Some((victim, last_use)) = filled.and_then(|filled| filled.victim) {
            self.lie_idle(cache, victim, last_use);
        }
        filled
    }

    /// Begins a use of a line that the cache had no room for; the next use tries the cache again.
    pub(crate) fn use_unplaced(&mut self, name: LineName) -> Option<Arc<[u64]>> {
        let is_usable =
            |line: &&mut Line| line.unplaced && line.stage == Stage::Attached && !line.leaving;
        let line = self.line_mut(name).filter(is_usable)?;
        line.unplaced = false;
        line.uses += 1;
        Some(line.entries.clone())
    }

    /// A line is not in the cache any more, or did not get there.
    fn lie_idle(&mut self, cache: &Cache, name: LineName, last_use: u64) {
        let Some(line) = self.line_mut(name) else { return };
        line.slot = None;
        line.last_use = last_use;
        if !line.leaving {
            self.idle.insert((last_use, name));
            self.recency.iter_mut().for_each(|recency| recency.insert(cache, name, last_use));
        }
    }

    /// Why a line that is not in the cache is not there.
    pub(crate) fn classify(&self, cache: &Cache, name: LineName) -> Class {
        let last_use = match self.line(name) {
            Some(line) => line.last_use,
            None => self.departed.last_use(name).unwrap_or(0),
        };
        if last_use == 0 {
            return Class::Cold;
        }
        let recency = self.recency.as_ref();
        match recency.is_some_and(|recency| recency.would_hold(cache, name, last_use)) {
            true => Class::Conflict,
            false => Class::Capacity,
        }
    }

    /// Takes some of the least recently used idle lines out of use, until no more than `target`
    /// are left. Those in use stay.
    pub(crate) fn take_oldest(&mut self, target: usize) -> Batch {
        let most = self.count.saturating_sub(target).min(BATCH_LINES);
        let unused = |&&(_, name): &&(u64, LineName)| {
            self.line(name).is_some_and(|line| line.uses == 0 && line.stage == Stage::Attached)
        };
        let oldest: Vec<_> = self.idle.iter().filter(unused).take(most).copied().collect();
        let mut batch = Batch::new();
        for key in oldest {
            self.idle.remove(&key);
            if let Some(line) = self.line_mut(key.1) {
                line.stage = Stage::Detaching;
                batch.push((key.1, line.entries.clone()));
            }
        }
        batch
    }

    /// Tells all lines of a range to leave, and forgets those that have left.
    pub(crate) fn leave(&mut self, cache: &Cache, process: ProcessHandle, range: Range<u64>) {
        for (name, last_use) in self.departed.drop_range(process, range.clone()) {
            self.recency.iter_mut().for_each(|recency| recency.remove(name, last_use));
        }
        let Some(lines) = self.processes.lines_mut(process) else { return };
        for (&address, line) in lines.range_mut(range) {
            // What a sweep is detaching goes anyway; the mark makes the caller wait for it.
            line.leaving = true;
            let name = LineName { process, address };
            self.idle.remove(&(line.last_use, name));
            self.recency.iter_mut().for_each(|recency| recency.remove(name, line.last_use));
            if let Some(slot) = line.slot {
                cache.slot(slot).leave();
            }
        }
    }

    /// Takes those leaving lines of a range out of use that nobody holds. Nothing when none is left.
    pub(crate) fn take_leaving(
        &mut self,
        cache: &Cache,
        filler: &mut Filler,
        process: ProcessHandle,
        range: Range<u64>,
    ) -> Option<Batch> {
        let lines = self.processes.lines_mut(process)?;
        let mut batch = Batch::new();
        let mut left = false;
        for (&address, line) in lines.range_mut(range).filter(|(_, line)| line.leaving) {
            left = true;
            let unused = line.stage == Stage::Attached && line.uses == 0;
            if unused && line.slot.is_none_or(|slot| cache.empty(filler, slot)) {
                line.slot = None;
                line.stage = Stage::Detaching;
                batch.push((LineName { process, address }, line.entries.clone()));
            }
            if batch.len() == BATCH_LINES {
                break;
            }
        }
        left.then_some(batch)
    }

    /// Takes everything out that is attached, whoever uses it.
    pub(crate) fn take_all(&mut self) -> Batch {
        let mut batch = Batch::new();
        self.idle.clear();
        for process in self.processes.all().collect::<Vec<_>>() {
            let Some(lines) = self.processes.lines_mut(process) else { continue };
            let attached = |(address, line): (u64, Line)| {
                let name = LineName { process, address };
                (line.stage == Stage::Attached).then_some((name, line.entries))
            };
            batch.extend(std::mem::take(lines).into_iter().filter_map(attached));
        }
        self.count = 0;
        batch
    }

    pub(crate) fn memory_bytes(&self, line_entries: usize) -> usize {
        // Key, record, and the entries behind the two counts of their owner.
        let line = size_of::<(u64, Line)>() + 2 * size_of::<usize>() + 8 * line_entries;
        self.count * line
            + self.idle.len() * size_of::<(u64, LineName)>()
            + self.departed.memory_bytes()
            + self.recency.as_ref().map_or(0, Recency::memory_bytes)
    }
}
