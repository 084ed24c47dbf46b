//! The queue of misses: bounded, with one event for each line.
//!
//! An event stays in the table while it is handled, so that later misses of the same line join it.
//! Its result goes to all waiters. An error without waiters is stored for the next request of the
//! line.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, OnceLock};

use super::backend::AttachError;
use super::error::LookupError;
use super::line::LineKey;

/// The result of a miss. Without an error, each waiter already has a use of the line in the table.
pub(crate) type MissResult = Arc<OnceLock<Result<(), LookupError>>>;

/// The queued misses, and those in progress.
#[derive(Debug)]
pub(crate) struct MissQueue {
    queued: VecDeque<LineKey>,
    pending: HashMap<LineKey, PendingMiss>,
    errors: VecDeque<(LineKey, AttachError)>,
    length: usize,
}

/// A miss that is queued or in progress.
#[derive(Debug)]
pub(crate) struct PendingMiss {
    pub(crate) posted_ns: u64,
    /// Whether the event was counted as a miss. A prefetch is not counted until the line is needed,
    /// and only then fills the cache.
    pub(crate) is_counted: bool,
    pub(crate) waiters: u32,
    pub(crate) result: MissResult,
}

impl MissQueue {
    pub(crate) fn new(length: usize) -> Self {
        let length = length.max(1);
        let (queued, errors) = (VecDeque::new(), VecDeque::new());
        Self { queued, pending: HashMap::new(), errors, length }
    }

    /// The pending event of a line.
    #[inline]
    pub(crate) fn pending(&mut self, name: LineKey) -> Option<&mut PendingMiss> {
        // Mostly there is none, and then no hash is computed.
        if self.pending.is_empty() { None } else { self.pending.get_mut(&name) }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.queued.len() >= self.length
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queued.is_empty()
    }

    /// Queues an event. The queue must have space, and the line no pending event.
    pub(crate) fn post(&mut self, name: LineKey, is_counted: bool, posted_ns: u64) {
        assert!(!self.is_full(), "the miss queue is full");
        let event =
            PendingMiss { posted_ns, is_counted, waiters: 0, result: MissResult::default() };
        assert!(self.pending.insert(name, event).is_none(), "{name:?} has a pending miss already");
        self.queued.push_back(name);
    }

    /// Joins the pending event of a line: its completion adds a use of the line for the caller.
    pub(crate) fn join(&mut self, name: LineKey) -> Option<MissResult> {
        let event = self.pending.get_mut(&name)?;
        event.waiters += 1;
        Some(event.result.clone())
    }

    /// Takes the first event from the queue. Returns its line and when it was posted, in
    /// nanoseconds.
    pub(crate) fn begin(&mut self) -> Option<(LineKey, u64)> {
        let name = self.queued.pop_front()?;
        self.pending.get(&name).map(|event| (name, event.posted_ns))
    }

    /// Removes the event of a line.
    pub(crate) fn end(&mut self, name: LineKey) -> Option<PendingMiss> {
        self.pending.remove(&name)
    }

    /// Stores an error for the next request of the line.
    pub(crate) fn store_error(&mut self, name: LineKey, error: AttachError) {
        while self.errors.len() >= self.length {
            self.errors.pop_front();
        }
        self.errors.push_back((name, error));
    }

    /// Takes the stored error of a line.
    pub(crate) fn take_error(&mut self, name: LineKey) -> Option<AttachError> {
        let index = self.errors.iter().position(|&(other, _)| other == name)?;
        self.errors.remove(index).map(|(_, error)| error)
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        let event = size_of::<LineKey>() + size_of::<(LineKey, PendingMiss)>();
        self.length * (event + size_of::<(LineKey, AttachError)>())
    }
}
