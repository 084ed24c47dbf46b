//! The tables behind the cache: the attached lines of each process.
//!
//! The tables are in ordinary memory, have no limit, and change only under the lock. Which lines are
//! in the cache is known by the cache alone, so that a fill touches no line but its own.

use std::ops::Range;
use std::sync::Arc;

use super::cache::{FillToken, LineCache};
use super::counters::MissKind;
use super::detached_history::DetachedHistory;
use super::entries::{LineEntries, SharedLine};
use super::error::LookupError;
use super::line::LineKey;
use super::line_map::addresses_in;
use super::miss_classifier::MissClassifier;
use super::process_table::ProcessTable;
use crate::handle::ProcessHandle;

/// The tables of all processes.
#[derive(Debug, Default)]
pub(crate) struct AttachmentTable {
    pub(crate) processes: ProcessTable,
    history: DetachedHistory,
    /// Only with a cache.
    classifier: Option<MissClassifier>,
    line_bytes: u64,
    /// The number of lines attached or being attached.
    count: usize,
    /// The memory of their entries.
    entry_bytes: usize,
}

/// A line of a table.
#[derive(Debug)]
pub(crate) struct AttachedLine {
    pub(crate) state: LineState,
    /// `None` while it is being attached.
    shared: Option<Arc<SharedLine>>,
    /// The number of uses that no cell of a reader names.
    pub(crate) uses: u32,
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
pub(crate) type DetachBatch = Vec<(LineKey, Arc<SharedLine>)>;

/// Maximum number of lines detached at a time without the lock.
pub(crate) const BATCH_LINES: usize = 64;

impl AttachedLine {
    pub(crate) fn new() -> Self {
        Self { state: LineState::Attaching, shared: None, uses: 0, draining: false }
    }

    /// What readers see of the line.
    pub(crate) fn shared(&self) -> Option<&Arc<SharedLine>> {
        self.shared.as_ref()
    }

    /// What readers see of the line, if new users are accepted.
    #[inline]
    pub(crate) fn usable(&self) -> Option<&Arc<SharedLine>> {
        let is_usable = self.state == LineState::Attached && !self.draining;
        self.shared.as_ref().filter(|_| is_usable)
    }

    /// Takes the line out of use if it has no users. `in_use` are the lines in cells, sorted.
    fn take_unused(&mut self, in_use: &[u64]) -> Option<Arc<SharedLine>> {
        let shared = self.shared.as_ref()?;
        let is_unused = self.state == LineState::Attached
            && self.uses == 0
            && in_use.binary_search(&word_of(shared)).is_err();
        is_unused.then(|| {
            self.state = LineState::Detaching;
            shared.clone()
        })
    }
}

/// The word that names a line in slots and cells: its address.
#[inline]
pub(crate) fn word_of(line: &Arc<SharedLine>) -> u64 {
    Arc::as_ptr(line).expose_provenance() as u64
}

/// The last use of a line by its word.
///
/// # Safety
/// The line must be attached, and stay so until this returns.
#[inline]
unsafe fn last_use_of(line: u64) -> u64 {
    let line = std::ptr::with_exposed_provenance::<SharedLine>(line as usize);
    // SAFETY: words are addresses of attached lines, and the caller keeps this one attached.
    unsafe { (*line).last_use() }
}

impl AttachmentTable {
    pub(crate) fn new(cache: Option<&LineCache>, line_bytes: u64) -> Self {
        Self { classifier: cache.map(MissClassifier::new), line_bytes, ..Self::default() }
    }

    #[inline]
    pub(crate) fn line(&self, name: LineKey) -> Option<&AttachedLine> {
        self.processes.lines(name.process)?.get(&name.address)
    }

    #[inline]
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
        let before = lines.insert(name.address, AttachedLine::new());
        assert!(before.is_none(), "{name:?} is in the table already");
        self.count += 1;
        Ok(())
    }

    /// Stores the entries that the backend has attached. The line may be draining by now.
    pub(crate) fn end_attach(
        &mut self,
        name: LineKey,
        entries: LineEntries,
    ) -> Result<(), LookupError> {
        let last_use = self.history.last_use(name).unwrap_or(0);
        self.history.drop_line(name);
        self.entry_bytes += entries.memory_bytes();
        let line = self.line_mut(name).ok_or(LookupError::Stale(name.process))?;
        line.state = LineState::Attached;
        line.shared = Some(Arc::new(SharedLine::new(entries, last_use)));
        if line.draining { Err(LookupError::Invalidated) } else { Ok(()) }
    }

    /// Removes a line after a failed attach, or after its detach.
    pub(crate) fn remove(&mut self, name: LineKey) {
        let lines = self.processes.lines_mut(name.process);
        let Some(line) = lines.and_then(|lines| lines.remove(&name.address)) else { return };
        self.count -= 1;
        let Some(shared) = line.shared else { return };
        self.entry_bytes -= shared.entries.memory_bytes();
        // After an invalidation the address may be other memory, so it gets no history.
        if shared.last_use() > 0 && !line.draining {
            self.history.insert(name, shared.last_use());
        }
    }

    /// Fills a usable line that is not in the cache into it. Returns whether another one was
    /// evicted.
    #[inline]
    pub(crate) fn fill(
        &mut self,
        cache: &LineCache,
        fill_token: &mut FillToken,
        name: LineKey,
    ) -> Option<bool> {
        let line = self.processes.lines(name.process)?.get(&name.address)?.usable()?;
        let before = line.last_use();
        let victim = cache.fill(fill_token, name, word_of(line));
        line.record_use(cache.tick());
        let classifier = self.classifier.as_mut();
        if let Some(classifier) = classifier.filter(|classifier| classifier.samples(cache, name)) {
            classifier.remove(name, before);
            if let Some((victim, line)) = victim {
                // SAFETY: lines in the cache are attached, and the caller holds the lock, without
                // which none is detached.
                classifier.insert(victim, unsafe { last_use_of(line) });
            }
        }
        Some(victim.is_some())
    }

    /// The tick of the last use of a line; 0 if it is not known to have been used.
    #[inline]
    pub(crate) fn last_use(&self, name: LineKey) -> u64 {
        match self.line(name).and_then(|line| line.shared.as_ref()) {
            Some(line) => line.last_use(),
            None => self.history.last_use(name).unwrap_or(0),
        }
    }

    /// The kind of a miss of a line that was used before.
    pub(crate) fn classify(&self, cache: &LineCache, name: LineKey, last_use: u64) -> MissKind {
        // SAFETY: as in `fill`.
        let last_use_of = |line| unsafe { last_use_of(line) };
        match &self.classifier {
            Some(classifier) if classifier.would_hit(cache, (name, last_use), last_use_of) => {
                MissKind::Conflict
            }
            _ => MissKind::Capacity,
        }
    }

    /// The `count` least recently used lines outside of the cache, the oldest first.
    pub(crate) fn oldest_idle(&self, cache: &LineCache, count: usize) -> Vec<LineKey> {
        let mut idle: Vec<(u64, LineKey)> = Vec::new();
        for process in self.processes.all() {
            let lines = self.processes.lines(process).into_iter().flatten();
            let idle_lines = lines.filter_map(|(&address, line)| {
                let name = LineKey { process, address };
                let last_use = line.usable().filter(|_| line.uses == 0)?.last_use();
                cache.line_of(name).is_none().then_some((last_use, name))
            });
            idle.extend(idle_lines);
        }
        let count = count.min(idle.len());
        if count > 0 && count < idle.len() {
            idle.select_nth_unstable(count - 1);
            idle.truncate(count);
        }
        idle.sort_unstable();
        idle.into_iter().map(|(_, name)| name).collect()
    }

    /// Takes lines that are neither in the cache nor in use out of use. `in_use` are the lines in
    /// cells, read after the lock was taken.
    pub(crate) fn take_idle(
        &mut self,
        cache: &LineCache,
        names: &[LineKey],
        in_use: &[u64],
    ) -> DetachBatch {
        let take = |&name: &LineKey| {
            let is_idle = cache.line_of(name).is_none();
            let line = self.line_mut(name).filter(|line| is_idle && !line.draining)?;
            Some((name, line.take_unused(in_use)?))
        };
        names.iter().filter_map(take).collect()
    }

    /// Makes all lines of a range drain, takes them out of the cache, and drops the history of the
    /// range. Returns the lines.
    pub(crate) fn begin_drain(
        &mut self,
        cache: &LineCache,
        fill_token: &mut FillToken,
        process: ProcessHandle,
        range: Range<u64>,
    ) -> Vec<LineKey> {
        for (name, last_use) in self.history.drop_range(process, range.clone()) {
            self.classifier.iter_mut().for_each(|classifier| classifier.remove(name, last_use));
        }
        let Some(lines) = self.processes.lines_mut(process) else { return Vec::new() };
        let mut names = Vec::new();
        for address in addresses_in(lines, range, self.line_bytes) {
            let Some(line) = lines.get_mut(&address) else { continue };
            let name = LineKey { process, address };
            // A line that a sweep is detaching gets the mark too, which makes the caller wait for
            // it.
            line.draining = true;
            cache.remove(fill_token, name);
            if let (Some(classifier), Some(shared)) = (&mut self.classifier, &line.shared) {
                classifier.remove(name, shared.last_use());
            }
            names.push(name);
        }
        names
    }

    /// Takes draining lines that have no users out of use, and drops those from `names` that have
    /// been detached. `in_use` are the lines in cells, read after the lock was taken.
    pub(crate) fn take_drained(&mut self, names: &mut Vec<LineKey>, in_use: &[u64]) -> DetachBatch {
        let mut batch = DetachBatch::new();
        names.retain(|&name| {
            let Some(line) = self.line_mut(name).filter(|line| line.draining) else { return false };
            if batch.len() < BATCH_LINES
                && let Some(shared) = line.take_unused(in_use)
            {
                batch.push((name, shared));
            }
            true
        });
        batch
    }

    /// Takes all attached lines out of the tables, whether or not they are in use.
    pub(crate) fn take_all(&mut self) -> DetachBatch {
        let mut batch = DetachBatch::new();
        for process in self.processes.all().collect::<Vec<_>>() {
            let Some(lines) = self.processes.lines_mut(process) else { continue };
            let attached = |(address, line): (u64, AttachedLine)| {
                let shared = line.shared.filter(|_| line.state == LineState::Attached)?;
                Some((LineKey { process, address }, shared))
            };
            batch.extend(std::mem::take(lines).into_iter().filter_map(attached));
        }
        (self.count, self.entry_bytes) = (0, 0);
        batch
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        // Key and record, and what readers see with the two counts of its `Arc`.
        let line = size_of::<(u64, AttachedLine)>() + 2 * size_of::<usize>();
        self.count * (line + size_of::<SharedLine>())
            + self.entry_bytes
            + self.history.memory_bytes()
            + self.classifier.as_ref().map_or(0, MissClassifier::memory_bytes)
    }
}
