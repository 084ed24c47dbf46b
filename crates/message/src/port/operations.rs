//! Operations under way, by number. A number is used once: it names a place and the place's use.

use std::any::Any;
use std::sync::Arc;
use std::task::Waker;

use memferry_sys::EventFd;

use super::Received;
use crate::connection::Leftover;
use crate::error::Error;
use crate::path::{Receiving, Sending};
use crate::pieces::Piece;
use crate::report::{Ending, Report, ReportKind};
use crate::wire::Number;

/// What is under way.
#[derive(Debug)]
pub(crate) enum Deed {
    Send(Sending),
    Receive(Receiving),
    /// A receive that takes several messages, each of them in a receive that is a part of it.
    Several(Several),
    /// An access to a window, which is carried out elsewhere and ends there: a put or a get.
    Access(ReportKind),
    /// The same on another host, which the carrier ends.
    CarriedAccess {
        kind: ReportKind,
        peer: usize,
    },
}

/// A receive that takes several messages, one behind the other.
#[derive(Debug)]
pub(crate) struct Several {
    /// What is left of its memory.
    pub(crate) left: Piece,
    /// It takes no more when fewer bytes than this are left.
    pub(crate) least: u64,
    /// Messages that are still coming in.
    pub(crate) parts: usize,
    /// It takes no more: it is full, was cancelled, or has failed. It stays here until its last part has
    /// ended, because that part's report is the one that frees the memory.
    pub(crate) is_full: bool,
}

/// An operation.
pub(crate) struct Operation {
    pub(crate) deed: Deed,
    pub(crate) outcome: Option<Result<Received, Error>>,
    /// To be woken at the end.
    waker: Option<Waker>,
    /// To be signalled at the end.
    event: Option<Arc<EventFd>>,
    /// Nobody will ask for the outcome: whatever this is can be dropped at the end.
    detached: Option<Box<dyn Any + Send>>,
    /// Nobody will ask for the outcome: it is told in a report.
    ending: Option<Ending>,
}

impl std::fmt::Debug for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Operation");
        shown.field("deed", &self.deed).field("outcome", &self.outcome).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    operation: Option<Operation>,
}

/// All operations of a port.
#[derive(Debug)]
pub(crate) struct Operations {
    slots: Vec<Slot>,
    free: Vec<u32>,
    most: usize,
    /// Outcomes that nobody has taken yet.
    untaken: usize,
    /// Those under way that nobody will ask for.
    detached: usize,
    /// Ends since this was last set to zero.
    pub(crate) ended: usize,
    /// Ends in all, which only grows.
    ends: u64,
    /// Ends that were to be told, in order.
    pub(crate) reports: Vec<Report>,
    /// To be dealt with when nobody holds the lock any more: foreign code may call back.
    pub(crate) leavings: Vec<Leaving>,
}

/// What is left to do for an operation that has ended.
pub(crate) enum Leaving {
    /// Wake.
    Wake(Waker),
    /// Drop.
    Drop { _operation: Box<Operation> },
    /// Remove a file.
    CleanUp(Leftover),
    /// Forget how memory of a peer is reached, which may wait for whoever copies it.
    Forget(Box<dyn FnOnce() + Send>),
    /// Drop something of the application's.
    Kept(#[allow(dead_code, reason = "kept to be dropped")] Box<dyn Any + Send>),
}

impl std::fmt::Debug for Leaving {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Leaving")
    }
}

fn split(number: Number) -> (u32, usize) {
    ((number.0 >> 32) as u32, (number.0 & 0xFFFF_FFFF) as usize)
}

impl Operations {
    pub(crate) fn new(most: usize) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            most,
            untaken: 0,
            detached: 0,
            ended: 0,
            ends: 0,
            reports: Vec::new(),
            leavings: Vec::new(),
        }
    }

    /// How many are under way or not yet asked for.
    pub(crate) fn count(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether outcomes wait to be taken.
    pub(crate) fn has_untaken(&self) -> bool {
        self.untaken > 0 || !self.reports.is_empty()
    }

    /// Whether some are under way that nobody will ask for.
    pub(crate) fn has_detached(&self) -> bool {
        self.detached > 0
    }

    /// Whether one more may be begun.
    pub(crate) fn has_room(&self) -> bool {
        self.count() < self.most
    }

    /// Keeps an operation and gives it a number.
    #[inline(always)]
    pub(crate) fn insert(&mut self, deed: Deed, ending: Option<Ending>) -> Number {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.operation.is_none());
        slot.operation = Some(Operation {
            deed,
            outcome: None,
            waker: None,
            event: None,
            detached: None,
            ending,
        });
        Number(u64::from(slot.generation) << 32 | u64::from(index))
    }

    /// The operation of a number, if the number is current.
    #[inline]
    pub(crate) fn get(&mut self, number: Number) -> Option<&mut Operation> {
        let (generation, index) = split(number);
        let slot = self.slots.get_mut(index)?;
        if slot.generation == generation { slot.operation.as_mut() } else { None }
    }

    /// The sending of a number, if it is one that is under way.
    pub(crate) fn sending(&mut self, number: Number) -> Option<&mut Sending> {
        match self.get(number)? {
            Operation { deed: Deed::Send(sending), outcome: None, .. } => Some(sending),
            _ => None,
        }
    }

    /// The receiving of a number, if it is one that is under way.
    #[inline]
    pub(crate) fn receiving(&mut self, number: Number) -> Option<&mut Receiving> {
        match self.get(number)? {
            Operation { deed: Deed::Receive(receiving), outcome: None, .. } => Some(receiving),
            _ => None,
        }
    }

    /// Forgets an operation.
    pub(crate) fn remove(&mut self, number: Number) -> Option<Operation> {
        let (generation, index) = split(number);
        let slot = self.slots.get_mut(index)?;
        if slot.generation != generation {
            return None;
        }
        let operation = slot.operation.take()?;
        self.untaken -= usize::from(operation.outcome.is_some());
        self.detached -= usize::from(operation.detached.is_some());
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index as u32);
        Some(operation)
    }

    /// Ends an operation: whoever waits for it is told, and a detached one is forgotten.
    pub(crate) fn finish(&mut self, number: Number, outcome: Result<Received, Error>) {
        let Some(operation) = self.get(number) else { return };
        if operation.outcome.is_some() {
            return;
        }
        if let Some(ending) = operation.ending {
            // One that takes no more has nothing to tell but the ends of its parts.
            let is_waiting_for_parts =
                matches!(&operation.deed, Deed::Several(several) if several.is_full);
            if !is_waiting_for_parts {
                self.report(number, ending, outcome.map(drop));
            }
            return;
        }
        operation.outcome = Some(outcome);
        self.untaken += 1;
        self.count_end();
        let operation = self.get(number).expect("it was there");
        if let Some(event) = operation.event.take() {
            event.signal();
        }
        let (waker, is_detached) = (operation.waker.take(), operation.detached.is_some());
        self.leavings.extend(waker.map(Leaving::Wake));
        if is_detached && let Some(operation) = self.remove(number) {
            self.leavings.push(Leaving::Drop { _operation: Box::new(operation) });
        }
    }

    fn count_end(&mut self) {
        self.ended += 1;
        self.ends += 1;
    }

    /// How many operations have ended so far.
    pub(crate) fn ends(&self) -> u64 {
        self.ends
    }

    /// Forgets an operation that is over and tells how it ended.
    fn report(&mut self, number: Number, ending: Ending, outcome: Result<(), Error>) {
        self.count_end();
        if ending.quiet && outcome.is_ok() {
            return self.discard(number);
        }
        let Some(operation) = self.get(number) else { return };
        let mut report = Report::new(ReportKind::Receive, ending.context, outcome);
        let (mut part_of, mut stays) = (None, false);
        match &operation.deed {
            Deed::Send(sending) => {
                report.kind = ReportKind::Send;
                (report.envelope, report.length) = (sending.envelope, sending.length);
                report.place = sending.peer;
            }
            Deed::Receive(receiving) => {
                (report.envelope, report.length) = (receiving.envelope, receiving.length);
                let first = receiving.pieces.as_slice().first();
                report.address = first.map_or(std::ptr::null_mut(), |piece| piece.address);
                report.place = receiving.peer;
                part_of = receiving.part_of;
            }
            Deed::Several(several) => {
                report.address = several.left.address;
                report.is_last = several.parts == 0;
                stays = several.parts > 0;
            }
            Deed::CarriedAccess { kind, peer } => (report.kind, report.place) = (*kind, *peer),
            Deed::Access(kind) => report.kind = *kind,
        }
        match self.several(number).filter(|_| stays) {
            // Messages still come in, or a peer still writes: the end of the last part frees the memory.
            Some(several) => several.is_full = true,
            None => self.discard(number),
        }
        if let Some(whole) = part_of {
            report.is_last = self.end_part(whole);
        }
        self.reports.push(report);
    }

    /// Forgets an operation of which nothing is needed any more, without moving it.
    #[inline]
    fn discard(&mut self, number: Number) {
        let (generation, index) = split(number);
        let Some(slot) = self.slots.get_mut(index) else { return };
        if slot.generation != generation {
            return;
        }
        let Some(operation) = &slot.operation else { return };
        debug_assert!(operation.outcome.is_none());
        self.detached -= usize::from(operation.detached.is_some());
        slot.operation = None;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index as u32);
    }

    /// A part of a receive of several messages is over. Returns whether all of it is.
    fn end_part(&mut self, whole: Number) -> bool {
        let Some(several) = self.several(whole) else { return false };
        several.parts -= 1;
        let is_last = several.is_full && several.parts == 0;
        if is_last {
            self.remove(whole);
        }
        is_last
    }

    /// The receive of several messages of a number, if it is one that is under way.
    pub(crate) fn several(&mut self, number: Number) -> Option<&mut Several> {
        match self.get(number)? {
            Operation { deed: Deed::Several(several), .. } => Some(several),
            _ => None,
        }
    }

    /// How an operation was to be told of.
    pub(crate) fn ending_of(&mut self, number: Number) -> Option<Ending> {
        self.get(number)?.ending
    }

    /// The operation under way that is to be told of with this context.
    pub(crate) fn find_context(
        &self,
        context: u64,
        choose: impl Fn(&Deed) -> bool,
    ) -> Option<Number> {
        self.slots.iter().enumerate().find_map(|(index, slot)| {
            let operation = slot.operation.as_ref()?;
            let is_it = operation.ending.is_some_and(|ending| ending.context == context)
                && choose(&operation.deed);
            is_it.then_some(Number(u64::from(slot.generation) << 32 | index as u64))
        })
    }

    /// Whether an operation is over or forgotten.
    pub(crate) fn is_over(&mut self, number: Number) -> bool {
        self.get(number).is_none_or(|operation| operation.outcome.is_some())
    }

    /// The outcome, if it is over; the operation is then forgotten.
    #[inline]
    pub(crate) fn take_outcome(&mut self, number: Number) -> Option<Result<Received, Error>> {
        self.get(number)?.outcome.as_ref()?;
        self.remove(number)?.outcome
    }

    /// Nobody will ask any more: drops `kept` at the end, or gives it back if that is now.
    pub(crate) fn detach(&mut self, number: Number, kept: Box<dyn Any + Send>) {
        match self.get(number) {
            Some(operation) if operation.outcome.is_none() => {
                // Whatever was left here before stays as long: its memory may be in use.
                let before = operation.detached.take();
                let is_new = before.is_none();
                operation.detached = Some(match before {
                    None => kept,
                    Some(before) => Box::new((before, kept)),
                });
                self.detached += usize::from(is_new);
            }
            _ => {
                let gone = self.remove(number).map(Box::new);
                self.leavings.extend(gone.map(|operation| Leaving::Drop { _operation: operation }));
                self.leavings.push(Leaving::Kept(kept));
            }
        }
    }

    /// What was left here to be dropped at the end, of an operation that nobody will ask for.
    pub(crate) fn take_detached(&mut self, number: Number) -> Option<Box<dyn Any + Send>> {
        let detached = self.get(number)?.detached.as_mut()?;
        Some(std::mem::replace(detached, Box::new(())))
    }

    /// Wakes a waker at the end. `false` if it is over.
    pub(crate) fn wake_at_end(&mut self, number: Number, waker: Waker) -> bool {
        match self.get(number) {
            Some(operation) if operation.outcome.is_none() => {
                let before = operation.waker.replace(waker);
                self.leavings.extend(before.map(|waker| Leaving::Kept(Box::new(waker))));
                true
            }
            _ => {
                self.leavings.push(Leaving::Kept(Box::new(waker)));
                false
            }
        }
    }

    /// Wakes whoever awaits an operation, though it is not over.
    pub(crate) fn wake_now(&mut self, number: Number) {
        let waker = self.get(number).and_then(|operation| operation.waker.take());
        self.leavings.extend(waker.map(Leaving::Wake));
    }

    /// Signals a descriptor at the end, or now if it is over.
    pub(crate) fn signal_at_end(&mut self, number: Number, event: &Arc<EventFd>) {
        match self.get(number) {
            Some(operation) if operation.outcome.is_none() => operation.event = Some(event.clone()),
            _ => event.signal(),
        }
    }

    /// The places of the peers that operations under way are with, as far as they have one.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> {
        let deeds = self.slots.iter().filter_map(|slot| slot.operation.as_ref());
        let places = deeds.filter_map(|operation| match &operation.deed {
            Deed::Send(sending) => Some(sending.peer),
            Deed::Receive(receiving) => Some(receiving.peer),
            Deed::CarriedAccess { peer, .. } => Some(*peer),
            Deed::Access(_) | Deed::Several(_) => None,
        });
        // A receive that no message has met has no place.
        places.filter(|place| *place != usize::MAX)
    }

    /// Numbers of all operations under way that `choose` picks.
    pub(crate) fn numbers(&self, choose: impl Fn(&Deed) -> bool) -> Vec<Number> {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(index, slot)| {
                let operation = slot.operation.as_ref()?;
                (operation.outcome.is_none() && choose(&operation.deed))
                    .then_some(Number(u64::from(slot.generation) << 32 | index as u64))
            })
            .collect()
    }
}
