//! The results of the reads and writes of one link, by number.
//!
//! A repeated query returns the same, and the stored amount is bounded: the newest operations with
//! their full results, older ones only while they are in flight or if they failed. An older one
//! that is not stored succeeded; its length is no longer known.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use memferry::message::{Error, MessageStatus, Operation};

use super::cookie::{self, LinkCookie};
use crate::code::{ADMA_EIDRM, ADMA_ENOENT, ADMA_ESTALE, CallError};

/// Operations whose full results are stored.
const MAX_RECENT: usize = 4096;
/// Stored errors of older operations.
const MAX_FAILURES: usize = 4096;
/// Number of older operations in flight from which a sweep for complete ones starts.
const SWEEP_THRESHOLD: usize = 1024;

/// An operation in flight, shared by the threads that query it. The thread that waits for its
/// completion holds the lock.
pub(super) type SharedOperation = Arc<Mutex<Operation>>;

/// The status of an operation.
#[derive(Debug)]
pub(super) enum OperationStatus {
    /// Not known to be complete, with the length of its memory.
    InFlight {
        shared: SharedOperation,
        posted: u64,
    },
    Done(OperationResult),
}

/// The result of an operation, with the length of its memory. `None` if it succeeded so long ago
/// that its length is no longer stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OperationResult(Option<(Result<u64, Error>, u64)>);

impl OperationResult {
    /// Success or failure.
    pub(crate) fn outcome(self) -> Result<(), CallError> {
        match self.0 {
            Some((Err(error), _)) => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// The length of the message, if it succeeded.
    pub(crate) fn length(self) -> Result<u64, CallError> {
        let (outcome, _) = self.0.ok_or_else(expired)?;
        Ok(outcome?)
    }

    /// The lengths of the message and of the memory for it, if it succeeded or was truncated.
    pub(crate) fn lengths(self) -> Result<(u64, u64), CallError> {
        match self.0.ok_or_else(expired)? {
            (Ok(length), posted) => Ok((length, posted)),
            (Err(Error::Truncated { message_bytes, buffer_bytes }), _) => {
                Ok((message_bytes, buffer_bytes))
            }
            (Err(error), _) => Err(error.into()),
        }
    }
}

fn expired() -> CallError {
    CallError::new(ADMA_EIDRM, "this read or write ended too long ago: no more is known of it")
}

#[derive(Debug)]
struct OperationRecord {
    posted: u64,
    state: RecordState,
}

#[derive(Debug)]
enum RecordState {
    InFlight(SharedOperation),
    Done { outcome: Result<u64, Error>, queried: bool },
}

/// The operations of a link.
#[derive(Debug)]
pub(super) struct OperationLog {
    slot: usize,
    /// The number of the link's first operation.
    first: u64,
    /// The newest, without gaps; the last one precedes the next number.
    recent: VecDeque<OperationRecord>,
    /// Older ones that were in flight at the last check.
    older: HashMap<u64, (u64, SharedOperation)>,
    /// Older ones that failed.
    failures: BTreeMap<u64, (Error, u64)>,
    /// Errors below this number may have been dropped.
    floor: u64,
    sweep_at: usize,
    /// Recent ones that are complete and were not queried.
    unqueried: usize,
}

impl OperationLog {
    /// The log of a new link in a slot.
    pub(super) fn new(place: usize) -> Self {
        let first = cookie::next(place);
        Self {
            slot: place,
            first,
            recent: VecDeque::new(),
            older: HashMap::new(),
            failures: BTreeMap::new(),
            floor: first,
            sweep_at: SWEEP_THRESHOLD,
            unqueried: 0,
        }
    }

    /// Whether a complete operation was not queried, as far as the log knows: operations that were
    /// complete at once, and those that a sweep has found.
    pub(super) fn has_unqueried(&self) -> bool {
        self.unqueried > 0
    }

    /// Stores a new operation and returns its number. Call `cookie::check_numbers_left` first.
    pub(super) fn insert(&mut self, operation: Operation, posted: u64) -> LinkCookie {
        let state = match operation.outcome() {
            Some(outcome) => {
                self.unqueried += 1;
                RecordState::Done { outcome: length_of(outcome), queried: false }
            }
            None => RecordState::InFlight(Arc::new(Mutex::new(operation))),
        };
        let number = cookie::take_number(self.slot);
        self.recent.push_back(OperationRecord { posted, state });
        if self.recent.len() > MAX_RECENT {
            self.retire_oldest();
        }
        LinkCookie { slot: self.slot, number }
    }

    /// Returns the status of an operation, and marks it as queried if it is complete.
    pub(super) fn find(&mut self, number: u64) -> Result<OperationStatus, CallError> {
        if number < self.first {
            return Err(CallError::new(ADMA_ESTALE, "the link of this cookie was closed"));
        }
        if number >= cookie::next(self.slot) {
            return Err(CallError::new(ADMA_ENOENT, "this cookie was never issued"));
        }
        if let Some(index) = self.index_of(number) {
            let OperationRecord { posted, state } = &mut self.recent[index];
            let posted = *posted;
            return Ok(match state {
                RecordState::InFlight(shared) => {
                    OperationStatus::InFlight { shared: shared.clone(), posted }
                }
                RecordState::Done { outcome, queried: asked } => {
                    self.unqueried -= usize::from(!*asked);
                    *asked = true;
                    OperationStatus::Done(OperationResult(Some((outcome.clone(), posted))))
                }
            });
        }
        if let Some((posted, shared)) = self.older.get(&number) {
            return Ok(OperationStatus::InFlight { shared: shared.clone(), posted: *posted });
        }
        match self.failures.get(&number).cloned() {
            Some((error, posted)) => {
                Ok(OperationStatus::Done(OperationResult(Some((Err(error), posted)))))
            }
            None if number < self.floor => Err(expired()),
            None => Ok(OperationStatus::Done(OperationResult(None))),
        }
    }

    /// Records the result of an operation that was just queried.
    pub(super) fn complete(
        &mut self,
        number: u64,
        posted: u64,
        outcome: Result<MessageStatus, Error>,
    ) -> OperationResult {
        let outcome = length_of(outcome);
        if let Some(index) = self.index_of(number) {
            let state = &mut self.recent[index].state;
            // A sweep may have recorded it already.
            self.unqueried -=
                usize::from(matches!(state, RecordState::Done { queried: false, .. }));
            *state = RecordState::Done { outcome: outcome.clone(), queried: true };
        } else if self.older.remove(&number).is_some() {
            self.record_failure(number, posted, &outcome);
        }
        OperationResult(Some((outcome, posted)))
    }

    /// Finds complete operations, so that the link can drop them.
    pub(super) fn sweep(&mut self) {
        for entry in &mut self.recent {
            if let RecordState::InFlight(shared) = &entry.state
                && let Some(outcome) = try_test(shared)
            {
                entry.state = RecordState::Done { outcome, queried: false };
                self.unqueried += 1;
            }
        }
        let over: Vec<_> = (self.older.iter())
            .filter_map(|(&number, (_, shared))| Some((number, try_test(shared)?)))
            .collect();
        for (number, outcome) in over {
            if let Some((posted, _)) = self.older.remove(&number) {
                self.record_failure(number, posted, &outcome);
            }
        }
        self.sweep_at = SWEEP_THRESHOLD.max(2 * self.older.len());
    }

    fn index_of(&self, number: u64) -> Option<usize> {
        let oldest = cookie::next(self.slot) - self.recent.len() as u64;
        usize::try_from(number.checked_sub(oldest)?).ok()
    }

    /// Moves the oldest of the newest operations out.
    fn retire_oldest(&mut self) {
        let number = cookie::next(self.slot) - self.recent.len() as u64;
        let Some(OperationRecord { posted, state }) = self.recent.pop_front() else { return };
        match state {
            RecordState::Done { outcome, queried: asked } => {
                self.unqueried -= usize::from(!asked);
                self.record_failure(number, posted, &outcome);
            }
            RecordState::InFlight(shared) => match try_test(&shared) {
                Some(outcome) => self.record_failure(number, posted, &outcome),
                None => {
                    self.older.insert(number, (posted, shared));
                    if self.older.len() >= self.sweep_at {
                        self.sweep();
                    }
                }
            },
        }
    }

    /// Of an older operation only an error is stored.
    fn record_failure(&mut self, number: u64, posted: u64, outcome: &Result<u64, Error>) {
        let Err(error) = outcome else { return };
        self.failures.insert(number, (error.clone(), posted));
        if self.failures.len() > MAX_FAILURES
            && let Some((oldest, _)) = self.failures.pop_first()
        {
            self.floor = self.floor.max(oldest + 1);
        }
    }
}

/// The result of an operation, if it is complete and no thread waits for it.
fn try_test(shared: &SharedOperation) -> Option<Result<u64, Error>> {
    try_with(shared, Operation::test)?.map(length_of)
}

/// Runs a closure on an operation, unless another thread holds it to wait for its completion.
pub(super) fn try_with<R>(
    shared: &SharedOperation,
    action: impl FnOnce(&mut Operation) -> R,
) -> Option<R> {
    match shared.try_lock() {
        Ok(mut operation) => Some(action(&mut operation)),
        Err(TryLockError::Poisoned(poisoned)) => Some(action(&mut poisoned.into_inner())),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Waits for the completion of an operation, after other waiting threads.
pub(super) fn wait_for(shared: &SharedOperation) -> Result<MessageStatus, Error> {
    shared.lock().unwrap_or_else(PoisonError::into_inner).wait()
}

fn length_of(outcome: Result<MessageStatus, Error>) -> Result<u64, Error> {
    outcome.map(|received| received.length)
}
