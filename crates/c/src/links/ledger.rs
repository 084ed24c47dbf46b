//! What is known of the reads and writes of one link, by their numbers.
//!
//! Asking twice gives the same answer, and what is kept is bounded: the newest operations with all
//! that can be asked about them, older ones while they are under way or if they failed. An older one
//! of which nothing is kept ended well; how long its message was is then no longer known.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use memferry::message::{Error, Operation, Received};

use super::cookie::{self, LinkCookie};
use crate::code::{ADMA_EIDRM, ADMA_ENOENT, ADMA_ESTALE, Failure};

/// Operations about which everything is known.
const RECENT: usize = 4096;
/// Failures of older ones that are known.
const FAILURES: usize = 4096;
/// Older ones under way among which those that have ended are looked for.
const SWEEP: usize = 1024;

/// An operation under way, as threads that ask about it share it. Whoever waits for the end holds
/// the lock.
pub(super) type Shared = Arc<Mutex<Operation>>;

/// What is known of an operation.
#[derive(Debug)]
pub(super) enum Known {
    /// Not known to be over, with the length of its memory.
    Underway {
        shared: Shared,
        posted: u64,
    },
    Over(Ended),
}

/// How an operation ended, with the length of its memory. `None` if it ended well so long ago that
/// no length is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ended(Option<(Result<u64, Error>, u64)>);

impl Ended {
    /// Success or failure.
    pub(crate) fn outcome(self) -> Result<(), Failure> {
        match self.0 {
            Some((Err(error), _)) => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// The length of the message, if it ended well.
    pub(crate) fn length(self) -> Result<u64, Failure> {
        let (outcome, _) = self.0.ok_or_else(too_long_ago)?;
        Ok(outcome?)
    }

    /// The lengths of the message and of the memory for it, if it ended well or was cut off.
    pub(crate) fn lengths(self) -> Result<(u64, u64), Failure> {
        match self.0.ok_or_else(too_long_ago)? {
            (Ok(length), posted) => Ok((length, posted)),
            (Err(Error::Truncated { message_bytes, buffer_bytes }), _) => {
                Ok((message_bytes, buffer_bytes))
            }
            (Err(error), _) => Err(error.into()),
        }
    }
}

fn too_long_ago() -> Failure {
    Failure::new(ADMA_EIDRM, "this read or write ended too long ago: no more is known of it")
}

#[derive(Debug)]
struct Entry {
    posted: u64,
    state: State,
}

#[derive(Debug)]
enum State {
    Underway(Shared),
    Over { outcome: Result<u64, Error>, asked: bool },
}

/// The operations of a link.
#[derive(Debug)]
pub(super) struct Ledger {
    place: usize,
    /// The number of the link's first operation.
    first: u64,
    /// The newest, without gaps; the last of them has the number before the next.
    recent: VecDeque<Entry>,
    /// Older ones that were under way when last looked at.
    older: HashMap<u64, (u64, Shared)>,
    /// Older ones that failed.
    failures: BTreeMap<u64, (Error, u64)>,
    /// Failures below this number may have been forgotten.
    floor: u64,
    sweep_at: usize,
    /// Recent ones that are over and that nobody has asked about.
    unasked: usize,
}

impl Ledger {
    /// The operations of a new link in a place.
    pub(super) fn new(place: usize) -> Self {
        let first = cookie::next(place);
        Self {
            place,
            first,
            recent: VecDeque::new(),
            older: HashMap::new(),
            failures: BTreeMap::new(),
            floor: first,
            sweep_at: SWEEP,
            unasked: 0,
        }
    }

    /// Whether something is over that nobody has asked about, as far as this knows: operations that
    /// were over at once, and those that a sweep has found.
    pub(super) fn has_unasked(&self) -> bool {
        self.unasked > 0
    }

    /// Keeps a new operation and gives it its number. Ask for room first: `cookie::check_room`.
    pub(super) fn insert(&mut self, operation: Operation, posted: u64) -> LinkCookie {
        let state = match operation.outcome() {
            Some(outcome) => {
                self.unasked += 1;
                State::Over { outcome: length_of(outcome), asked: false }
            }
            None => State::Underway(Arc::new(Mutex::new(operation))),
        };
        let number = cookie::take_number(self.place);
        self.recent.push_back(Entry { posted, state });
        if self.recent.len() > RECENT {
            self.retire_oldest();
        }
        LinkCookie { place: self.place, number }
    }

    /// What is known of an operation. It counts as asked about if it is over.
    pub(super) fn find(&mut self, number: u64) -> Result<Known, Failure> {
        if number < self.first {
            return Err(Failure::new(ADMA_ESTALE, "the link of this cookie was closed"));
        }
        if number >= cookie::next(self.place) {
            return Err(Failure::new(ADMA_ENOENT, "this cookie was never given out"));
        }
        if let Some(index) = self.index_of(number) {
            let Entry { posted, state } = &mut self.recent[index];
            let posted = *posted;
            return Ok(match state {
                State::Underway(shared) => Known::Underway { shared: shared.clone(), posted },
                State::Over { outcome, asked } => {
                    self.unasked -= usize::from(!*asked);
                    *asked = true;
                    Known::Over(Ended(Some((outcome.clone(), posted))))
                }
            });
        }
        if let Some((posted, shared)) = self.older.get(&number) {
            return Ok(Known::Underway { shared: shared.clone(), posted: *posted });
        }
        match self.failures.get(&number).cloned() {
            Some((error, posted)) => Ok(Known::Over(Ended(Some((Err(error), posted))))),
            None if number < self.floor => Err(too_long_ago()),
            None => Ok(Known::Over(Ended(None))),
        }
    }

    /// An operation has ended, and whoever asked is told now.
    pub(super) fn settle(
        &mut self,
        number: u64,
        posted: u64,
        outcome: Result<Received, Error>,
    ) -> Ended {
        let outcome = length_of(outcome);
        if let Some(index) = self.index_of(number) {
            let state = &mut self.recent[index].state;
            // A sweep may have been faster.
            self.unasked -= usize::from(matches!(state, State::Over { asked: false, .. }));
            *state = State::Over { outcome: outcome.clone(), asked: true };
        } else if self.older.remove(&number).is_some() {
            self.remember(number, posted, &outcome);
        }
        Ended(Some((outcome, posted)))
    }

    /// Looks for operations that have ended, so that the link need not keep them any longer.
    pub(super) fn sweep(&mut self) {
        for entry in &mut self.recent {
            if let State::Underway(shared) = &entry.state
                && let Some(outcome) = test_now(shared)
            {
                entry.state = State::Over { outcome, asked: false };
                self.unasked += 1;
            }
        }
        let over: Vec<_> = (self.older.iter())
            .filter_map(|(&number, (_, shared))| Some((number, test_now(shared)?)))
            .collect();
        for (number, outcome) in over {
            if let Some((posted, _)) = self.older.remove(&number) {
                self.remember(number, posted, &outcome);
            }
        }
        self.sweep_at = SWEEP.max(2 * self.older.len());
    }

    fn index_of(&self, number: u64) -> Option<usize> {
        let oldest = cookie::next(self.place) - self.recent.len() as u64;
        usize::try_from(number.checked_sub(oldest)?).ok()
    }

    /// Makes room among the newest.
    fn retire_oldest(&mut self) {
        let number = cookie::next(self.place) - self.recent.len() as u64;
        let Some(Entry { posted, state }) = self.recent.pop_front() else { return };
        match state {
            State::Over { outcome, asked } => {
                self.unasked -= usize::from(!asked);
                self.remember(number, posted, &outcome);
            }
            State::Underway(shared) => match test_now(&shared) {
                Some(outcome) => self.remember(number, posted, &outcome),
                None => {
                    self.older.insert(number, (posted, shared));
                    if self.older.len() >= self.sweep_at {
                        self.sweep();
                    }
                }
            },
        }
    }

    /// Of an older operation only a failure is kept.
    fn remember(&mut self, number: u64, posted: u64, outcome: &Result<u64, Error>) {
        let Err(error) = outcome else { return };
        self.failures.insert(number, (error.clone(), posted));
        if self.failures.len() > FAILURES
            && let Some((oldest, _)) = self.failures.pop_first()
        {
            self.floor = self.floor.max(oldest + 1);
        }
    }
}

/// How an operation ended, if it is over and nobody waits for it just now.
fn test_now(shared: &Shared) -> Option<Result<u64, Error>> {
    try_hold(shared, Operation::test)?.map(length_of)
}

/// Does something with an operation, unless another thread has it: that one waits for its end.
pub(super) fn try_hold<R>(shared: &Shared, deed: impl FnOnce(&mut Operation) -> R) -> Option<R> {
    match shared.try_lock() {
        Ok(mut operation) => Some(deed(&mut operation)),
        Err(TryLockError::Poisoned(poisoned)) => Some(deed(&mut poisoned.into_inner())),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Waits for the end of an operation, after whoever else does.
pub(super) fn wait_for(shared: &Shared) -> Result<Received, Error> {
    shared.lock().unwrap_or_else(PoisonError::into_inner).wait()
}

fn length_of(outcome: Result<Received, Error>) -> Result<u64, Error> {
    outcome.map(|received| received.length)
}
