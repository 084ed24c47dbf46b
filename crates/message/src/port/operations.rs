//! Operations in flight, by number. A number consists of a slot and the slot's generation, and is used once.

use std::any::Any;
use std::sync::{Arc, Weak};
use std::task::Waker;

use memferry_sys::EventFd;

use super::{MessageStatus, Port};
use crate::completion::{CompletionEntry, CompletionKind, CompletionOptions};
use crate::connection::StaleSocketFile;
use crate::control::OperationId;
use crate::error::Error;
use crate::path::{Receiving, Sending};
use crate::segments::Segment;

/// What an operation does.
#[derive(Debug)]
pub(crate) enum OperationKind {
    Send(Sending),
    Receive(Receiving),
    /// A receive that takes several messages. Each of them is received by an operation that is a part of this
    /// one.
    MultiReceive(MultiReceive),
    /// A put to a window or a get from one. The RMA engine executes and completes it.
    Rma(CompletionKind),
    /// A put or get on another host, which the remote transport completes.
    RemoteRma {
        kind: CompletionKind,
        peer: usize,
    },
}

/// A receive that takes several messages into contiguous memory.
#[derive(Debug)]
pub(crate) struct MultiReceive {
    /// Free rest of the memory.
    pub(crate) remaining: Segment,
    /// The receive takes no more messages when fewer than this many bytes are free.
    pub(crate) min_free: u64,
    /// Number of messages in flight.
    pub(crate) parts: usize,
    /// The receive takes no more messages: it is full, was cancelled, or has failed. It stays until its last
    /// part has completed, because the completion entry of that part frees the memory.
    pub(crate) is_full: bool,
}

/// An operation.
pub(crate) struct OperationEntry {
    pub(crate) kind: OperationKind,
    pub(crate) outcome: Option<Result<MessageStatus, Error>>,
    /// Woken at completion.
    waker: Option<Waker>,
    /// Signalled at completion.
    event: Option<Arc<EventFd>>,
    /// Set when the handle is dropped: the value is dropped at completion.
    detached: Option<Box<dyn Any + Send>>,
    /// Set if the operation ends in a completion entry.
    options: Option<CompletionOptions>,
}

impl std::fmt::Debug for OperationEntry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Operation");
        shown.field("deed", &self.kind).field("outcome", &self.outcome).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct OperationSlot {
    generation: u32,
    operation: Option<OperationEntry>,
}

/// All operations of a port.
#[derive(Debug)]
pub(crate) struct OperationTable {
    slots: Vec<OperationSlot>,
    free: Vec<u32>,
    max: usize,
    /// Number of posted buffers, which are no operations yet.
    pub(super) buffers: usize,
    /// Number of outcomes that are not collected yet.
    uncollected: usize,
    /// Number of operations in flight whose handles were dropped.
    detached: usize,
    /// Number of completions since the last notification of waiting threads.
    pub(crate) newly_completed: usize,
    /// Number of all completions.
    completed_total: u64,
    /// Completion entries that are not collected yet, in order.
    pub(crate) completions: Vec<CompletionEntry>,
    /// Actions that run after the unlock, because code of the application may call the port.
    pub(crate) deferred: Vec<DeferredAction>,
    /// Operations that have ended except that a peer or a thread may still access their memory.
    pub(super) quiescing: Vec<OperationId>,
    /// The port, for threads that copy for operations.
    pub(super) weak_port: Weak<Port>,
}

/// An action that runs without the lock.
pub(crate) enum DeferredAction {
    /// Wake a waker.
    Wake(Waker),
    /// Drop an operation.
    Drop { _operation: Box<OperationEntry> },
    /// Remove a socket file.
    RemoveSocketFile(StaleSocketFile),
    /// Invalidate translations of a peer's memory, which may wait for a thread that copies.
    Invalidate(Box<dyn FnOnce() + Send>),
    /// Drop a value of the application.
    DropUserData(#[allow(dead_code, reason = "kept to be dropped")] Box<dyn Any + Send>),
}

impl std::fmt::Debug for DeferredAction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Leaving")
    }
}

fn split_id(number: OperationId) -> (u32, usize) {
    ((number.0 >> 32) as u32, (number.0 & 0xFFFF_FFFF) as usize)
}

impl OperationTable {
    pub(crate) fn new(most: usize) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            max: most,
            buffers: 0,
            uncollected: 0,
            detached: 0,
            newly_completed: 0,
            completed_total: 0,
            completions: Vec::new(),
            deferred: Vec::new(),
            quiescing: Vec::new(),
            weak_port: Weak::new(),
        }
    }

    /// Number of operations in flight or not collected, with the posted buffers.
    pub(crate) fn count(&self) -> usize {
        self.slots.len() - self.free.len() + self.buffers
    }

    /// Whether outcomes or completion entries are to be collected.
    pub(crate) fn has_uncollected(&self) -> bool {
        self.uncollected > 0 || !self.completions.is_empty()
    }

    /// Whether operations are in flight whose handles were dropped.
    pub(crate) fn has_detached(&self) -> bool {
        self.detached > 0
    }

    /// Whether there is space for one more operation.
    pub(crate) fn has_capacity(&self) -> bool {
        self.count() < self.max
    }

    /// Inserts an operation, and returns its number.
    #[inline(always)]
    pub(crate) fn insert(
        &mut self,
        deed: OperationKind,
        ending: Option<CompletionOptions>,
    ) -> OperationId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(OperationSlot::default());
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.operation.is_none());
        slot.operation = Some(OperationEntry {
            kind: deed,
            outcome: None,
            waker: None,
            event: None,
            detached: None,
            options: ending,
        });
        OperationId(u64::from(slot.generation) << 32 | u64::from(index))
    }

    /// The operation with a number, if the number is current.
    #[inline]
    pub(crate) fn peek(&self, number: OperationId) -> Option<&OperationEntry> {
        let (generation, index) = split_id(number);
        let slot = self.slots.get(index).filter(|slot| slot.generation == generation)?;
        slot.operation.as_ref()
    }

    #[inline]
    pub(crate) fn get(&mut self, number: OperationId) -> Option<&mut OperationEntry> {
        let (generation, index) = split_id(number);
        let slot = self.slots.get_mut(index)?;
        if slot.generation == generation { slot.operation.as_mut() } else { None }
    }

    /// The send with a number, if it is in flight.
    pub(crate) fn sending(&mut self, number: OperationId) -> Option<&mut Sending> {
        match self.get(number)? {
            OperationEntry { kind: OperationKind::Send(sending), outcome: None, .. } => {
                Some(sending)
            }
            _ => None,
        }
    }

    /// The receive with a number, if it is in flight.
    #[inline]
    pub(crate) fn receiving(&mut self, number: OperationId) -> Option<&mut Receiving> {
        match self.get(number)? {
            OperationEntry { kind: OperationKind::Receive(receiving), outcome: None, .. } => {
                Some(receiving)
            }
            _ => None,
        }
    }

    /// Removes an operation.
    pub(crate) fn remove(&mut self, number: OperationId) -> Option<OperationEntry> {
        let (generation, index) = split_id(number);
        let slot = self.slots.get_mut(index)?;
        if slot.generation != generation {
            return None;
        }
        let operation = slot.operation.take()?;
        self.uncollected -= usize::from(operation.outcome.is_some());
        self.detached -= usize::from(operation.detached.is_some());
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index as u32);
        Some(operation)
    }

    /// Completes an operation: its waker and event are notified, and a detached one is removed.
    pub(crate) fn finish(&mut self, number: OperationId, outcome: Result<MessageStatus, Error>) {
        let Some(operation) = self.get(number) else { return };
        if operation.outcome.is_some() {
            return;
        }
        if let Some(ending) = operation.options {
            // A full receive reports only the completions of its parts.
            let is_waiting_for_parts =
                matches!(&operation.kind, OperationKind::MultiReceive(several) if several.is_full);
            if !is_waiting_for_parts {
                self.push_completion(number, ending, outcome.map(drop));
            }
            return;
        }
        operation.outcome = Some(outcome);
        self.uncollected += 1;
        self.count_completion();
        let operation = self.get(number).expect("it was there");
        if let Some(event) = operation.event.take() {
            event.signal();
        }
        let (waker, is_detached) = (operation.waker.take(), operation.detached.is_some());
        self.deferred.extend(waker.map(DeferredAction::Wake));
        if is_detached && let Some(operation) = self.remove(number) {
            self.deferred.push(DeferredAction::Drop { _operation: Box::new(operation) });
        }
    }

    pub(super) fn count_completion(&mut self) {
        self.newly_completed += 1;
        self.completed_total += 1;
    }

    /// Number of operations that have completed so far.
    pub(crate) fn completed_total(&self) -> u64 {
        self.completed_total
    }

    /// Removes a completed operation, and adds its completion entry.
    fn push_completion(
        &mut self,
        number: OperationId,
        ending: CompletionOptions,
        outcome: Result<(), Error>,
    ) {
        self.count_completion();
        if ending.silent_on_success && outcome.is_ok() {
            return self.discard(number);
        }
        let Some(operation) = self.get(number) else { return };
        let mut report = CompletionEntry::new(CompletionKind::Receive, ending.context, outcome);
        let (mut part_of, mut stays) = (None, false);
        match &operation.kind {
            OperationKind::Send(sending) => {
                report.kind = CompletionKind::Send;
                (report.envelope, report.length) = (sending.envelope, sending.length);
                report.peer_index = sending.peer;
            }
            OperationKind::Receive(receiving) => {
                (report.envelope, report.length) = (receiving.envelope, receiving.length);
                let first = receiving.segments.as_slice().first();
                report.address = first.map_or(std::ptr::null_mut(), |piece| piece.address);
                report.peer_index = receiving.peer;
                part_of = receiving.multi_receive;
            }
            OperationKind::MultiReceive(several) => {
                report.address = several.remaining.address;
                report.is_last = several.parts == 0;
                stays = several.parts > 0;
            }
            OperationKind::RemoteRma { kind, peer } => {
                (report.kind, report.peer_index) = (*kind, *peer);
            }
            OperationKind::Rma(kind) => report.kind = *kind,
        }
        match self.multi_receive(number).filter(|_| stays) {
            // Parts are in flight: the completion of the last one frees the memory.
            Some(several) => several.is_full = true,
            None => self.discard(number),
        }
        if let Some(whole) = part_of {
            report.is_last = self.finish_part(whole);
        }
        self.completions.push(report);
    }

    /// Drops an operation and frees its slot.
    #[inline]
    fn discard(&mut self, number: OperationId) {
        let (generation, index) = split_id(number);
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

    /// Completes a part of a receive of several messages. Returns whether it was the last one.
    fn finish_part(&mut self, whole: OperationId) -> bool {
        let Some(several) = self.multi_receive(whole) else { return false };
        several.parts -= 1;
        let is_last = several.is_full && several.parts == 0;
        if is_last {
            self.remove(whole);
        }
        is_last
    }

    /// The receive of several messages with a number, if it is in flight.
    pub(crate) fn multi_receive(&mut self, number: OperationId) -> Option<&mut MultiReceive> {
        match self.get(number)? {
            OperationEntry { kind: OperationKind::MultiReceive(several), .. } => Some(several),
            _ => None,
        }
    }

    /// The completion options of an operation.
    pub(crate) fn options_of(&mut self, number: OperationId) -> Option<CompletionOptions> {
        self.get(number)?.options
    }

    /// The operation in flight with this context.
    pub(crate) fn find_context(
        &self,
        context: u64,
        choose: impl Fn(&OperationKind) -> bool,
    ) -> Option<OperationId> {
        self.slots.iter().enumerate().find_map(|(index, slot)| {
            let operation = slot.operation.as_ref()?;
            let is_it = operation.options.is_some_and(|ending| ending.context == context)
                && choose(&operation.kind);
            is_it.then_some(OperationId(u64::from(slot.generation) << 32 | index as u64))
        })
    }

    /// Whether an operation has completed or was removed.
    pub(crate) fn is_complete(&mut self, number: OperationId) -> bool {
        self.get(number).is_none_or(|operation| operation.outcome.is_some())
    }

    /// The outcome of a completed operation, which is removed.
    #[inline]
    pub(crate) fn take_outcome(
        &mut self,
        number: OperationId,
    ) -> Option<Result<MessageStatus, Error>> {
        self.get(number)?.outcome.as_ref()?;
        self.remove(number)?.outcome
    }

    /// Detaches an operation from its handle. Drops `kept` at completion, or after the unlock if the
    /// operation has completed.
    pub(crate) fn detach(&mut self, number: OperationId, kept: Box<dyn Any + Send>) {
        match self.get(number) {
            Some(operation) if operation.outcome.is_none() => {
                // An earlier value is kept as long as this one: its memory may be in use.
                let before = operation.detached.take();
                let (is_new, waker) = (before.is_none(), operation.waker.take());
                operation.detached = Some(match before {
                    None => kept,
                    Some(before) => Box::new((before, kept)),
                });
                self.detached += usize::from(is_new);
                // No future awaits it any more.
                self.deferred
                    .extend(waker.map(|waker| DeferredAction::DropUserData(Box::new(waker))));
            }
            _ => {
                let gone = self.remove(number).map(Box::new);
                self.deferred
                    .extend(gone.map(|operation| DeferredAction::Drop { _operation: operation }));
                self.deferred.push(DeferredAction::DropUserData(kept));
            }
        }
    }

    /// Takes the value that would be dropped at the completion of a detached operation.
    pub(crate) fn take_detached(&mut self, number: OperationId) -> Option<Box<dyn Any + Send>> {
        let detached = self.get(number)?.detached.as_mut()?;
        Some(std::mem::replace(detached, Box::new(())))
    }

    /// Wakes a waker at completion. `false` if the operation has completed.
    pub(crate) fn wake_on_completion(&mut self, number: OperationId, waker: Waker) -> bool {
        match self.get(number) {
            Some(operation) if operation.outcome.is_none() => {
                let before = operation.waker.replace(waker);
                self.deferred
                    .extend(before.map(|waker| DeferredAction::DropUserData(Box::new(waker))));
                true
            }
            _ => {
                self.deferred.push(DeferredAction::DropUserData(Box::new(waker)));
                false
            }
        }
    }

    /// Wakes the waker of an operation that has not completed.
    pub(crate) fn wake_now(&mut self, number: OperationId) {
        let waker = self.get(number).and_then(|operation| operation.waker.take());
        self.deferred.extend(waker.map(DeferredAction::Wake));
    }

    /// Signals a descriptor at completion, or now if the operation has completed.
    pub(crate) fn signal_on_completion(&mut self, number: OperationId, event: &Arc<EventFd>) {
        match self.get(number) {
            Some(operation) if operation.outcome.is_none() => operation.event = Some(event.clone()),
            _ => event.signal(),
        }
    }

    /// Slots of the peers of operations in flight.
    pub(crate) fn peer_indices(&self) -> impl Iterator<Item = usize> {
        let deeds = self.slots.iter().filter_map(|slot| slot.operation.as_ref());
        let places = deeds.filter_map(|operation| match &operation.kind {
            OperationKind::Send(sending) => Some(sending.peer),
            OperationKind::Receive(receiving) => Some(receiving.peer),
            OperationKind::RemoteRma { peer, .. } => Some(*peer),
            OperationKind::Rma(_) | OperationKind::MultiReceive(_) => None,
        });
        // A posted receive has no peer.
        places.filter(|place| *place != usize::MAX)
    }

    /// Numbers of all operations in flight that `choose` picks.
    pub(crate) fn pending_ids(&self, choose: impl Fn(&OperationKind) -> bool) -> Vec<OperationId> {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(index, slot)| {
                let operation = slot.operation.as_ref()?;
                (operation.outcome.is_none() && choose(&operation.kind))
                    .then_some(OperationId(u64::from(slot.generation) << 32 | index as u64))
            })
            .collect()
    }
}
