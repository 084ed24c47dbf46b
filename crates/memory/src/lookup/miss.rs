//! The queue of miss events: bounded, and with one event for each line.
//!
//! An event stays known while it is handled, so that whoever misses the same line meanwhile joins
//! it. Its answer goes to all who wait for it. A refusal that nobody waited for is kept for a while
//! for the one who asks again.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, OnceLock};

use super::counters::Class;
use super::error::LookupError;
use super::line::LineName;
use super::source::Refused;

/// What comes of an event: the entries of the line, which each waiter then uses, or why not.
pub(crate) type Answer = Arc<OnceLock<Result<Arc<[u64]>, LookupError>>>;

/// The events that wait, and those being handled.
#[derive(Debug)]
pub(crate) struct MissQueue {
    waiting: VecDeque<LineName>,
    events: HashMap<LineName, Event>,
    refused: VecDeque<(LineName, Refused)>,
    length: usize,
}

/// One miss.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) posted_ns: u64,
    pub(crate) class: Class,
    /// Whether somebody needed the line, and was counted as a miss. What is only asked for ahead is
    /// none until it is needed.
    pub(crate) is_counted: bool,
    pub(crate) waiters: u32,
    pub(crate) answer: Answer,
}

impl MissQueue {
    pub(crate) fn new(length: usize) -> Self {
        let length = length.max(1);
        let (waiting, refused) = (VecDeque::new(), VecDeque::new());
        Self { waiting, events: HashMap::new(), refused, length }
    }

    /// The event of a line, if one is on its way.
    pub(crate) fn event(&mut self, name: LineName) -> Option<&mut Event> {
        self.events.get_mut(&name)
    }

    pub(crate) fn is_full(&self) -> bool {
        self.waiting.len() >= self.length
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Puts an event at the end. There must be room, and none for this line.
    pub(crate) fn post(&mut self, name: LineName, class: Class, is_counted: bool, posted_ns: u64) {
        assert!(!self.is_full(), "the queue of misses is full");
        let event = Event { posted_ns, class, is_counted, waiters: 0, answer: Answer::default() };
        assert!(self.events.insert(name, event).is_none(), "{name:?} is on its way already");
        self.waiting.push_back(name);
    }

    /// Waits for the event of a line: it will be answered with a use of the line for the caller.
    pub(crate) fn join(&mut self, name: LineName) -> Option<Answer> {
        let event = self.events.get_mut(&name)?;
        event.waiters += 1;
        Some(event.answer.clone())
    }

    /// Takes the first event to handle it. Returns its line and when it was posted.
    pub(crate) fn begin(&mut self) -> Option<(LineName, u64)> {
        let name = self.waiting.pop_front()?;
        self.events.get(&name).map(|event| (name, event.posted_ns))
    }

    /// Ends the event of a line.
    pub(crate) fn end(&mut self, name: LineName) -> Option<Event> {
        self.events.remove(&name)
    }

    /// Keeps a refusal for whoever asks next.
    pub(crate) fn keep_refusal(&mut self, name: LineName, refused: Refused) {
        while self.refused.len() >= self.length {
            self.refused.pop_front();
        }
        self.refused.push_back((name, refused));
    }

    /// Takes the refusal of a line.
    pub(crate) fn take_refusal(&mut self, name: LineName) -> Option<Refused> {
        let place = self.refused.iter().position(|&(other, _)| other == name)?;
        self.refused.remove(place).map(|(_, refused)| refused)
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        let event = size_of::<LineName>() + size_of::<(LineName, Event)>();
        self.length * (event + size_of::<(LineName, Refused)>())
    }
}
