//! The work behind a miss: attaching lines, filling the cache, sweeping, forgetting.
//!
//! Done by the miss thread, and by callers that would otherwise only wait. The source is always
//! called without the lock; what it is doing meanwhile is marked in the table.

use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use memferry_sys::clock::now_ns;

use super::cache::Cache;
use super::error::LookupError;
use super::line::LineName;
use super::processes::Removal;
use super::settings::Settings;
use super::shared::{Locked, MissThread, Shared, Store};
use super::source::{Refused, Source};
use super::table::{Batch, Stage};
use crate::handle::ProcessHandle;

/// A lookup with its source, shared with the miss thread.
#[derive(Debug)]
pub(crate) struct Service<S> {
    pub(crate) shared: Shared,
    pub(crate) source: S,
}

/// All addresses.
const EVERYTHING: Range<u64> = 0..u64::MAX;

impl<S: Source> Service<S> {
    pub(crate) fn new(settings: Settings, source: S) -> Self {
        Self { shared: Shared::new(settings), source }
    }

    /// Wakes the miss thread, or starts it. False if there is none to be had.
    pub(crate) fn call_miss_thread(self: &Arc<Self>, tables: &mut Locked<'_>) -> bool {
        if let MissThread::NotStarted = tables.thread {
            let service = self.clone();
            let serve = move || service.serve();
            tables.thread = match memferry_sys::thread::spawn("memferry-miss", serve) {
                Ok(thread) => MissThread::Running(thread),
                Err(error) => {
                    tracing::warn!(%error, "no miss thread: callers handle misses themselves");
                    MissThread::Denied
                }
            };
        }
        self.shared.tell_miss_thread();
        !matches!(tables.thread, MissThread::Denied)
    }

    /// The miss thread.
    fn serve(&self) {
        let mut tables = self.shared.lock();
        while !tables.stopping {
            tables = if tables.queue.is_empty() {
                self.shared.wait_for_work(tables)
            } else {
                self.handle_next(tables)
            };
        }
    }

    /// Handles the first event of the queue, if there is one.
    pub(crate) fn handle_next<'a>(&'a self, mut tables: Locked<'a>) -> Locked<'a> {
        let Some((name, posted_ns)) = tables.queue.begin() else { return tables };
        let begun_ns = now_ns();
        tables.counters.delay_ns.record(begun_ns.saturating_sub(posted_ns));
        let (mut tables, attached) = self.attach(tables, name);
        if attached.is_ok() {
            self.fill(&mut tables, name);
        }
        tables.counters.processing_ns.record(now_ns().saturating_sub(begun_ns));
        self.answer(&mut tables, name, attached);
        self.sweep_if_due(tables)
    }

    fn answer(
        &self,
        tables: &mut Locked<'_>,
        name: LineName,
        attached: Result<Arc<[u64]>, LookupError>,
    ) {
        let Some(event) = tables.queue.end(name) else { return };
        match (&attached, tables.table.line_mut(name)) {
            // Each waiter finds its use of the line counted when it wakes up.
            (Ok(_), Some(line)) => line.uses += event.waiters,
            (Err(LookupError::Refused(refused)), _) if event.waiters == 0 => {
                tables.queue.keep_refusal(name, *refused);
            }
            _ => {}
        }
        // It was empty: this is the only place that answers, once for each event.
        let _ = event.answer.set(attached);
        self.shared.tell();
    }

    /// Brings an attached line into the cache, if it is not there.
    fn fill(&self, tables: &mut Locked<'_>, name: LineName) {
        let Store::Dynamic(cache) = &self.shared.store else { return };
        let tables = &mut **tables;
        let is_cached = tables.table.line(name).is_none_or(|line| line.slot.is_some());
        let Some(filler) = tables.filler.as_mut().filter(|_| !is_cached) else { return };
        match tables.table.fill(cache, filler, name) {
            Some(filled) => {
                tables.counters.fills += 1;
                tables.counters.evictions += u64::from(filled.victim.is_some());
            }
            None => tables.counters.uncached += 1,
        }
    }

    /// Finds a line in the table, or has the source attach it.
    pub(crate) fn attach<'a>(
        &'a self,
        mut tables: Locked<'a>,
        name: LineName,
    ) -> (Locked<'a>, Result<Arc<[u64]>, LookupError>) {
        loop {
            if let Err(stale) = tables.table.processes.check(name.process) {
                return (tables, Err(stale));
            }
            match tables.table.line(name) {
                None => return self.attach_new(tables, name),
                // Its users may be waiting for this very answer, so it must not wait for them.
                Some(line) if line.leaving && line.stage == Stage::Attached => {
                    return (tables, Err(LookupError::Forgotten));
                }
                Some(line) if line.stage == Stage::Attached => {
                    let entries = line.entries.clone();
                    return (tables, Ok(entries));
                }
                // The source is at work on it, on behalf of another thread.
                Some(_) => tables = self.shared.wait(tables),
            }
        }
    }

    fn attach_new<'a>(
        &'a self,
        mut tables: Locked<'a>,
        name: LineName,
    ) -> (Locked<'a>, Result<Arc<[u64]>, LookupError>) {
        if let Err(stale) = tables.table.begin_attach(name) {
            return (tables, Err(stale));
        }
        drop(tables);
        let mut entries = vec![0; self.shared.line_entries];
        let outcome = self.ask_to_attach(name, &mut entries);
        let mut tables = self.shared.lock();
        let attached = match outcome {
            Ok(()) => {
                tables.counters.attached += 1;
                tables.table.end_attach(name, entries.into())
            }
            Err(refused) => {
                tables.counters.refused += 1;
                tables.table.remove(name);
                Err(refused.into())
            }
        };
        self.shared.tell();
        (tables, attached)
    }

    /// Calls the source. One that panics has refused.
    pub(crate) fn ask_to_attach(&self, name: LineName, entries: &mut [u64]) -> Result<(), Refused> {
        let call = AssertUnwindSafe(|| self.source.attach(name, entries));
        catch_unwind(call).unwrap_or_else(|_| {
            tracing::error!(?name, "the source of translations panicked while attaching");
            Err(io::ErrorKind::Other.into())
        })
    }

    /// Calls the source. One that panics has done what it could.
    pub(crate) fn ask_to_detach(&self, name: LineName, entries: &[u64]) {
        let call = AssertUnwindSafe(|| self.source.detach(name, entries));
        if catch_unwind(call).is_err() {
            tracing::error!(?name, "the source of translations panicked while detaching");
        }
    }

    fn detach<'a>(&'a self, tables: Locked<'a>, batch: Batch) -> Locked<'a> {
        drop(tables);
        for (name, entries) in &batch {
            self.ask_to_detach(*name, entries);
        }
        let mut tables = self.shared.lock();
        for (name, _) in &batch {
            tables.table.remove(*name);
        }
        tables.counters.detached += batch.len() as u64;
        self.shared.tell();
        tables
    }

    /// Detaches idle lines, the least recently used first, if there are too many and it is time:
    /// when the mark is passed, and from then on periodically.
    fn sweep_if_due<'a>(&'a self, mut tables: Locked<'a>) -> Locked<'a> {
        let Settings { high_water_lines, sweep_every, .. } = self.shared.settings;
        let count = tables.table.count();
        let since = tables.counters.fills - tables.fills_at_last_sweep;
        let passed = count > high_water_lines && !tables.above_mark;
        tables.above_mark = count > high_water_lines;
        if !tables.above_mark || tables.sweeping || !(passed || since >= sweep_every) {
            return tables;
        }
        tables.sweeping = true;
        tables.fills_at_last_sweep = tables.counters.fills;
        let target = high_water_lines - high_water_lines / 4;
        // Each batch makes the table smaller, and others add at most a queue full meanwhile.
        for _ in 0..=count {
            let batch = tables.table.take_oldest(target);
            if batch.is_empty() {
                break;
            }
            tables = self.detach(tables, batch);
        }
        tables.sweeping = false;
        tables.above_mark = tables.table.count() > high_water_lines;
        tables
    }

    /// Detaches all lines of a range, and waits for those that are in use.
    pub(crate) fn forget<'a>(
        &'a self,
        mut tables: Locked<'a>,
        cache: &Cache,
        process: ProcessHandle,
        range: Range<u64>,
    ) -> Locked<'a> {
        tables.table.leave(cache, process, range.clone());
        loop {
            let inner = &mut *tables;
            let Some(filler) = inner.filler.as_mut() else { return tables };
            match inner.table.take_leaving(cache, filler, process, range.clone()) {
                None => return tables,
                Some(batch) if batch.is_empty() => tables = self.shared.wait(tables),
                Some(batch) => tables = self.detach(tables, batch),
            }
        }
    }

    /// Removes a process with all its lines, and waits for those that are in use.
    pub(crate) fn remove_process(&self, process: ProcessHandle) {
        let mut tables = self.shared.lock();
        match tables.table.processes.begin_removal(process) {
            Removal::Gone => return,
            Removal::UnderWay => {
                while tables.table.processes.lines(process).is_some() {
                    tables = self.shared.wait(tables);
                }
                return;
            }
            Removal::Begun => {}
        }
        tables = match &self.shared.store {
            Store::Dynamic(cache) => self.forget(tables, cache, process, EVERYTHING),
            Store::Full(full) => {
                drop(tables);
                let detached = full.forget(process, EVERYTHING, |name, entries| {
                    self.ask_to_detach(name, entries);
                });
                let mut tables = self.shared.lock();
                tables.counters.detached += detached;
                tables
            }
        };
        tables.table.processes.end_removal(process);
        self.shared.tell();
    }

    /// Ends the miss thread and detaches everything. No translation can be used any more: the few
    /// that may still be counted were leaked.
    pub(crate) fn shut_down(&self) {
        let mut tables = self.shared.lock();
        tables.stopping = true;
        self.shared.tell_miss_thread();
        let thread = std::mem::replace(&mut tables.thread, MissThread::Denied);
        drop(tables);
        if let MissThread::Running(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the miss thread panicked");
        }
        let batch = self.shared.lock().table.take_all();
        for (name, entries) in &batch {
            self.ask_to_detach(*name, entries);
        }
        if let Store::Full(full) = &self.shared.store {
            full.take_all(|name, entries| self.ask_to_detach(name, entries));
        }
    }
}
