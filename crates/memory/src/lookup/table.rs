//! The tables behind the cache: the attached lines of each process.
//!
//! The tables are in ordinary memory, have no limit, and change only under the lock. They record
//! which lines are in the cache, and keep the others in LRU order for sweeps.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use super::cache::{FillResult, FillToken, LineCache};
use super::counters::MissKind;
use super::detached_history::DetachedHistory;
use super::error::LookupError;
use super::line::LineKey;
use super::miss_classifier::MissClassifier;
use super::process_table::ProcessTable;
use crate::handle::ProcessHandle;

/// The tables of all processes.
#[derive(Debug, Default)]
pub(crate) struct AttachmentTable {
    pub(crate) processes: ProcessTable,
    /// Attached lines that are neither in the cache nor draining, by their last use.
    idle: BTreeSet<(u64, LineKey)>,
    history: DetachedHistory,
    /// Only with a cache.
    classifier: Option<MissClassifier>,
    /// The number of lines attached or being attached.
    count: usize,
}

/// A line of a table.
#[derive(Debug)]
pub(crate) struct AttachedLine {
    pub(crate) state: LineState,
    pub(crate) entries: Arc<[u64]>,
    /// The number of uses outside of the cache.
    pub(crate) uses: u32,
    /// Its slot in the cache.
    pub(crate) slot: Option<usize>,
    /// The tick of its last use or eviction; 0 before the first use.
    last_use: u64,
    /// The last fill failed because the set had no free slot.
    is_uncached: bool,
    /// The line is being invalidated: it accepts no new users, and is detached after the last one.
    pub(crate) draining: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LineState {
    /// The backend is attaching it, without the lock.
    Attaching,
    Attached,
    /// The backend is detaching it, without the lock. Requests wait until the line is removed.
    Detaching,
}

/// Lines to detach without the lock.
pub(crate) type DetachBatch = Vec<(LineKey, Arc<[u64]>)>;

/// Maximum number of lines detached at a time without the lock.
const BATCH_LINES: usize = 64;

impl AttachmentTable {
    pub(crate) fn new(cache: Option<&LineCache>) -> Self {
        Self { classifier: cache.map(MissClassifier::new), ..Self::default() }
    }

    pub(crate) fn line(&self, name: LineKey) -> Option<&AttachedLine> {
        self.processes.lines(name.process)?.get(&name.address)
    }

    pub(crate) fn line_mut(&mut self, name: LineKey) -> Option<&mut AttachedLine> {
        self.processes.lines_mut(name.process)?.get_mut(&name.address)
    }

    /// The number of lines, including those being attached.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Inserts a line that the backend is about to attach.
    pub(crate) fn begin_attach(&mut self, name: LineKey) -> Result<(), LookupError> {
        let stale = LookupError::Stale(name.process);
        let lines = self.processes.lines_mut(name.process).ok_or(stale)?;
        let line = AttachedLine {
            state: LineState::Attaching,
            entries: Arc::new([]),
            uses: 0,
            slot: None,
            last_use: 0,
            is_uncached: false,
            draining: false,
        };
        assert!(lines.insert(name.address, line).is_none(), "{name:?} is in the table already");
        self.count += 1;
        Ok(())
    }

    /// Stores the entries that the backend has attached. The line may be draining by now.
    pub(crate) fn end_attach(
        &mut self,
        name: LineKey,
        entries: Arc<[u64]>,
    ) -> Result<Arc<[u64]>, LookupError> {
        let last_use = self.history.last_use(name).unwrap_or(0);
        self.history.drop_line(name);
        let line = self.line_mut(name).ok_or(LookupError::Stale(name.process))?;
        line.state = LineState::Attached;
        line.entries = entries.clone();
        line.last_use = last_use;
        if line.draining {
            return Err(LookupError::Invalidated);
        }
        self.idle.insert((last_use, name));
        Ok(entries)
    }

    /// Removes a line after a failed attach, or after its detach.
    pub(crate) fn remove(&mut self, name: LineKey) {
        let lines = self.processes.lines_mut(name.process);
        let Some(line) = lines.and_then(|lines| lines.remove(&name.address)) else { return };
        self.count -= 1;
        self.idle.remove(&(line.last_use, name));
        // After an invalidation the address may be other memory, so it gets no history.
        if line.last_use > 0 && !line.draining {
            self.history.insert(name, line.last_use);
        }
    }

    /// Fills an attached line into the cache. The line that it replaces becomes idle. If the set
    /// has no free slot, the line stays idle with the current tick.
    pub(crate) fn fill(
        &mut self,
        cache: &LineCache,
        fill_token: &mut FillToken,
        name: LineKey,
    ) -> Option<FillResult> {
        let entries = self.line(name)?.entries.clone();
        let result = cache.fill(fill_token, name, &entries);
        let line = self.line_mut(name)?;
        let before = line.last_use;
        line.last_use = cache.tick();
        line.slot = result.map(|result| result.slot);
        line.is_uncached = result.is_none();
        self.idle.remove(&(before, name));
        self.classifier.iter_mut().for_each(|classifier| classifier.remove(name, before));
        if result.is_none() {
            self.mark_idle(cache, name, cache.tick());
        }
        if let Some((victim, last_use)) = result.and_then(|result| result.victim) {
            self.mark_idle(cache, victim, last_use);
        }
        result
    }

    /// Adds a use of a line that the cache had no space for; the next request tries the cache
    /// again.
    pub(crate) fn use_uncached(&mut self, name: LineKey) -> Option<Arc<[u64]>> {
        let is_usable = |line: &&mut AttachedLine| {
            line.is_uncached && line.state == LineState::Attached && !line.draining
        };
        let line = self.line_mut(name).filter(is_usable)?;
        line.is_uncached = false;
        line.uses += 1;
        Some(line.entries.clone())
    }

    /// Marks a line as idle after its eviction or a failed fill.
    fn mark_idle(&mut self, cache: &LineCache, name: LineKey, last_use: u64) {
        let Some(line) = self.line_mut(name) else { return };
        line.slot = None;
        line.last_use = last_use;
        if !line.draining {
            self.idle.insert((last_use, name));
            self.classifier
                .iter_mut()
                .for_each(|classifier| classifier.insert(cache, name, last_use));
        }
    }

    /// The kind of a miss of this line.
    pub(crate) fn classify(&self, cache: &LineCache, name: LineKey) -> MissKind {
        let last_use = match self.line(name) {
            Some(line) => line.last_use,
            None => self.history.last_use(name).unwrap_or(0),
        };
        if last_use == 0 {
            return MissKind::Cold;
        }
        let classifier = self.classifier.as_ref();
        match classifier.is_some_and(|classifier| classifier.would_hit(cache, name, last_use)) {
            true => MissKind::Conflict,
            false => MissKind::Capacity,
        }
    }

    /// Takes up to [`BATCH_LINES`] of the least recently used idle lines out of use, until at most
    /// `target` lines are left. Lines in use stay.
    pub(crate) fn take_oldest(&mut self, target: usize) -> DetachBatch {
        let max = self.count.saturating_sub(target).min(BATCH_LINES);
        let unused = |&&(_, name): &&(u64, LineKey)| {
            self.line(name).is_some_and(|line| line.uses == 0 && line.state == LineState::Attached)
        };
        let oldest: Vec<_> = self.idle.iter().filter(unused).take(max).copied().collect();
        let mut batch = DetachBatch::new();
        for key in oldest {
            self.idle.remove(&key);
            if let Some(line) = self.line_mut(key.1) {
                line.state = LineState::Detaching;
                batch.push((key.1, line.entries.clone()));
            }
        }
        batch
    }

    /// Makes all lines of a range drain, and drops the history of the range.
    pub(crate) fn begin_drain(
        &mut self,
        cache: &LineCache,
        process: ProcessHandle,
        range: Range<u64>,
    ) {
        for (name, last_use) in self.history.drop_range(process, range.clone()) {
            self.classifier.iter_mut().for_each(|classifier| classifier.remove(name, last_use));
        }
        let Some(lines) = self.processes.lines_mut(process) else { return };
        for (&address, line) in lines.range_mut(range) {
            // A line that a sweep is detaching gets the mark too, which makes the caller wait for
            // it.
            line.draining = true;
            let name = LineKey { process, address };
            self.idle.remove(&(line.last_use, name));
            self.classifier
                .iter_mut()
                .for_each(|classifier| classifier.remove(name, line.last_use));
            if let Some(slot) = line.slot {
                cache.slot(slot).begin_drain();
            }
        }
    }

    /// Takes draining lines of a range that have no users out of use. `None` if no draining line is
    /// left.
    pub(crate) fn take_drained(
        &mut self,
        cache: &LineCache,
        fill_token: &mut FillToken,
        process: ProcessHandle,
        range: Range<u64>,
    ) -> Option<DetachBatch> {
        let lines = self.processes.lines_mut(process)?;
        let mut batch = DetachBatch::new();
        let mut any_left = false;
        for (&address, line) in lines.range_mut(range).filter(|(_, line)| line.draining) {
            any_left = true;
            let unused = line.state == LineState::Attached && line.uses == 0;
            if unused && line.slot.is_none_or(|slot| cache.clear(fill_token, slot)) {
                line.slot = None;
                line.state = LineState::Detaching;
                batch.push((LineKey { process, address }, line.entries.clone()));
            }
            if batch.len() == BATCH_LINES {
                break;
            }
        }
        any_left.then_some(batch)
    }

    /// Takes all attached lines out of the tables, whether or not they are in use.
    pub(crate) fn take_all(&mut self) -> DetachBatch {
        let mut batch = DetachBatch::new();
        self.idle.clear();
        for process in self.processes.all().collect::<Vec<_>>() {
            let Some(lines) = self.processes.lines_mut(process) else { continue };
            let attached = |(address, line): (u64, AttachedLine)| {
                let name = LineKey { process, address };
                (line.state == LineState::Attached).then_some((name, line.entries))
            };
            batch.extend(std::mem::take(lines).into_iter().filter_map(attached));
        }
        self.count = 0;
        batch
    }

    pub(crate) fn memory_bytes(&self, line_entries: usize) -> usize {
        // Key, record, and the entries with the two counts of their `Arc`.
        let line = size_of::<(u64, AttachedLine)>() + 2 * size_of::<usize>() + 8 * line_entries;
        self.count * line
            + self.idle.len() * size_of::<(u64, LineKey)>()
            + self.history.memory_bytes()
            + self.classifier.as_ref().map_or(0, MissClassifier::memory_bytes)
    }
}
