//! What becomes of a request that missed: it waits, helps, or is given back.

use std::sync::Arc;

use memferry_sys::clock::now_ns;

use super::counters::Class;
use super::error::LookupError;
use super::line::LineName;
use super::service::Service;
use super::settings::{Policy, Route};
use super::shared::{Locked, MissThread, Place, Store};
use super::source::Source;
use super::translation::Translation;

impl<S: Source> Service<S> {
    /// A look that found nothing in the cache, and does nothing about it.
    #[cold]
    pub(crate) fn not_found(
        &self,
        place: Place,
        route: Route,
    ) -> Result<Option<Translation<'_>>, LookupError> {
        let mut tables = self.shared.lock();
        let found = self.look_again(&mut tables, place, route)?;
        // The end of a translation may need the lock.
        drop(tables);
        found.ok().map(Translation::checked).transpose()
    }

    /// A request that found nothing in the cache.
    #[cold]
    pub(crate) fn missed(
        self: &Arc<Self>,
        place: Place,
        route: Route,
        policy: Policy,
    ) -> Result<Translation<'_>, LookupError> {
        let Store::Dynamic(_) = &self.shared.store else {
            let found = self.not_found(place, route)?;
            return found.ok_or(LookupError::NotPrepared(place.name.address));
        };
        match policy {
            Policy::Park => self.park(place, route),
            Policy::Retry => self.give_back(place, route),
        }
    }

    /// A request for later use.
    pub(crate) fn requested(self: &Arc<Self>, place: Place, route: Route) {
        let Store::Dynamic(cache) = &self.shared.store else { return };
        let mut tables = self.shared.lock();
        let is_stale = tables.table.processes.check(place.name.process).is_err();
        let is_cached = tables.table.line(place.name).is_some_and(|line| line.slot.is_some());
        if !is_stale && !is_cached {
            *tables.counters.requests.of(route) += 1;
            let class = tables.table.classify(cache, place.name);
            self.post(tables, place.name, class, false);
        }
    }

    /// Looks a second time, with the lock, and counts what it finds; or the kind of the miss.
    fn look_again<'a>(
        &'a self,
        tables: &mut Locked<'_>,
        place: Place,
        route: Route,
    ) -> Result<Result<Translation<'a>, Class>, LookupError> {
        tables.table.processes.check(place.name.process)?;
        if let Some(translation) = self.shared.resident(tables, place) {
            self.shared.hits.count(route);
            return Ok(Ok(translation));
        }
        if let Some(refused) = tables.queue.take_refusal(place.name) {
            return Err(refused.into());
        }
        let (class, is_counted) = self.need(tables, place);
        if is_counted {
            tables.counters.retries += 1;
        } else {
            tables.counters.misses.of(route).count(class);
        }
        Ok(Err(class))
    }

    /// The kind of a miss, and whether the line is on its way for somebody who was counted already.
    fn need(&self, tables: &mut Locked<'_>, place: Place) -> (Class, bool) {
        let tables = &mut **tables;
        match (tables.queue.event(place.name), &self.shared.store) {
            (Some(event), _) => (event.class, std::mem::replace(&mut event.is_counted, true)),
            (None, Store::Dynamic(cache)) => (tables.table.classify(cache, place.name), false),
            (None, Store::Full(_)) => (Class::Cold, false),
        }
    }

    fn give_back(
        self: &Arc<Self>,
        place: Place,
        route: Route,
    ) -> Result<Translation<'_>, LookupError> {
        let mut tables = self.shared.lock();
        if let Some(entries) = tables.table.use_unplaced(place.name) {
            // It came once before, and its line is there but for a place in the cache.
            tables.counters.retries += 1;
            drop(tables);
            return Translation::of_table(&self.shared, entries, place).checked();
        }
        match self.look_again(&mut tables, place, route)? {
            Ok(translation) => {
                drop(tables);
                translation.checked()
            }
            Err(class) => {
                self.post(tables, place.name, class, true);
                Err(LookupError::Missed)
            }
        }
    }

    /// Leaves an event for the miss thread, if there is none for the line yet. Without room it is
    /// dropped.
    fn post(self: &Arc<Self>, mut tables: Locked<'_>, name: LineName, class: Class, counted: bool) {
        if tables.queue.event(name).is_some() {
            return;
        }
        if tables.queue.is_full() {
            tables.counters.dropped += 1;
            return;
        }
        tables.queue.post(name, class, counted, now_ns());
        if !self.call_miss_thread(&mut tables) {
            drop(self.handle_next(tables));
        }
    }

    /// Waits until a line is there, and works the queue off meanwhile if that is the setting.
    fn park(self: &Arc<Self>, place: Place, route: Route) -> Result<Translation<'_>, LookupError> {
        let mut tables = self.shared.lock();
        let mut counted = None;
        let answer = loop {
            tables.table.processes.check(place.name.process)?;
            if let Some(translation) = self.shared.resident(&tables, place) {
                if counted.is_none() {
                    self.shared.hits.count(route);
                }
                drop(tables);
                return translation.checked();
            }
            let class = counted.unwrap_or_else(|| {
                let (class, _) = self.need(&mut tables, place);
                tables.counters.misses.of(route).count(class);
                class
            });
            counted = Some(class);
            if tables.queue.event(place.name).is_none() && !tables.queue.is_full() {
                tables.queue.post(place.name, class, true, now_ns());
            }
            if let Some(answer) = tables.queue.join(place.name) {
                break answer;
            }
            tables = self.wait_or_help(tables);
        };
        let entries = loop {
            if let Some(outcome) = answer.get() {
                break outcome.clone()?;
            }
            tables = self.wait_or_help(tables);
        };
        // The answer came with a use of the line in the table. One of its slot is cheaper to end.
        let translation = match self.shared.resident(&tables, place) {
            Some(translation) => {
                self.shared.end_use(&mut tables, place.name);
                translation
            }
            None => Translation::of_table(&self.shared, entries, place),
        };
        drop(tables);
        translation.checked()
    }

    fn wait_or_help<'a>(self: &'a Arc<Self>, mut tables: Locked<'a>) -> Locked<'a> {
        if tables.queue.is_empty() {
            // All events are in somebody's hands.
            return self.shared.wait(tables);
        }
        let helps = self.shared.settings.helping || matches!(tables.thread, MissThread::Denied);
        if helps || !self.call_miss_thread(&mut tables) {
            tables.counters.helped += 1;
            return self.handle_next(tables);
        }
        self.shared.wait(tables)
    }
}
