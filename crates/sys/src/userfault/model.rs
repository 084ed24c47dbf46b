//! The kernel's part in watching memory, for the model checker: what is watched, which changes are
//! under way, and who waits until its event is read. There is one userfaultfd, and no time.

use std::collections::VecDeque;
use std::io;

use loom::sync::{Condvar, Mutex};

use super::{Denied, EVENTS_PER_READ, Event, Unwatchable, Wake};
use crate::sync::{lock, wait_while};

loom::lazy_static! {
    static ref KERNEL: Kernel = Kernel::default();
}

#[derive(Debug, Default)]
struct Kernel {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Ranges: the first address, and the one after the last.
    watched: Vec<(usize, usize)>,
    /// How many threads are between a change and the return from it.
    changing: usize,
    events: VecDeque<Event>,
    /// How many events there were, and how many of them were read.
    told: usize,
    read: usize,
    is_stopped: bool,
    is_retired: bool,
    panics: bool,
    time_passes: bool,
}

/// What applications do to their memory.
pub mod changing {
    use super::{Event, KERNEL, lock, wait_while};

    /// Maps other memory over a range. `happens` is the change: it comes at once, before anybody
    /// hears of it. Returns when the event was read.
    pub fn replace(start: usize, end: usize, happens: impl FnOnce()) {
        let mut state = lock(&KERNEL.state);
        let is_watched = state.is_watched(start, end);
        state.watched.retain(|&(from, to)| to <= start || end <= from);
        state.changing += usize::from(is_watched);
        happens();
        drop(state);
        if is_watched {
            tell(Event::Unmapped { start, end });
        }
    }

    /// Throws the contents of a range away. `happens` is the change: it comes when the event was read.
    pub fn discard(start: usize, end: usize, happens: impl FnOnce()) {
        let mut state = lock(&KERNEL.state);
        let is_watched = state.is_watched(start, end);
        state.changing += usize::from(is_watched);
        drop(state);
        if is_watched {
            tell(Event::Discarded { start, end });
        }
        let _state = lock(&KERNEL.state);
        happens();
    }

    /// The reader panics when there is something to read.
    pub fn let_reader_panic() {
        lock(&KERNEL.state).panics = true;
    }

    /// Bounded waits of the reader end when there is nothing to read. Otherwise they never do.
    pub fn let_time_pass() {
        lock(&KERNEL.state).time_passes = true;
    }

    /// Puts an event in the queue, and waits until it is read.
    fn tell(event: Event) {
        let mut state = lock(&KERNEL.state);
        if !state.is_retired {
            state.events.push_back(event);
            state.told += 1;
            let number = state.told;
            KERNEL.changed.notify_all();
            state = wait_while(&KERNEL.changed, state, |state| {
                state.read < number && !state.is_retired
            });
        }
        state.changing -= 1;
    }
}

impl State {
    fn is_watched(&self, start: usize, end: usize) -> bool {
        !self.is_retired && self.watched.iter().any(|&(from, to)| from < end && start < to)
    }
}

/// What ends the wait of a reader.
#[derive(Debug)]
pub struct Stop(());

impl Stop {
    /// Not signalled.
    pub fn new() -> io::Result<Self> {
        Ok(Self(()))
    }

    /// Lets the reader return, now and from now on.
    pub fn signal(&self) {
        lock(&KERNEL.state).is_stopped = true;
        KERNEL.changed.notify_all();
    }
}

/// The userfaultfd.
#[derive(Debug)]
pub struct Userfault(());

impl Userfault {
    /// Opens it.
    pub fn open() -> Result<Self, Denied> {
        Ok(Self(()))
    }

    /// Watches a range of whole pages.
    pub fn watch(&self, start: usize, length: usize) -> Result<(), Unwatchable> {
        let mut state = lock(&KERNEL.state);
        if state.is_retired {
            return Err(Unwatchable::Kind);
        }
        state.watched.push((start, start + length));
        Ok(())
    }

    /// Stops watching a range.
    pub fn unwatch(&self, start: usize, length: usize) {
        let end = start + length;
        lock(&KERNEL.state).watched.retain(|&(from, to)| to <= start || end <= from);
    }

    /// Ends all watching for good: whoever waits until an event is read goes on.
    pub fn retire(&self, _stop: &Stop) {
        lock(&KERNEL.state).is_retired = true;
        KERNEL.changed.notify_all();
    }

    /// Whether some thread is between changing the mapping of watched memory and having its event
    /// read.
    pub fn is_changing(&self) -> bool {
        let state = lock(&KERNEL.state);
        state.changing > 0 && !state.is_retired
    }

    /// Sleeps until there are events to read or `stop` is signalled, and says which it was.
    pub fn wait(&self, _stop: &Stop, timeout_ns: Option<u32>) -> Wake {
        let state = lock(&KERNEL.state);
        if timeout_ns.is_some() && state.time_passes && state.events.is_empty() {
            if state.is_stopped {
                return Wake::Stopped;
            }
            drop(state);
            loom::thread::yield_now();
            return Wake::TimeOut;
        }
        let state = wait_while(&KERNEL.changed, state, |state| {
            state.events.is_empty() && !state.is_stopped
        });
        if state.is_stopped {
            return Wake::Stopped;
        }
        if state.panics {
            // Without a lock: the model checker cannot take one behind a panic.
            drop(state);
            std::panic::resume_unwind(Box::new("a reader that panics, on purpose"));
        }
        Wake::Events
    }

    /// Reads events without waiting, hands each to `each`, and returns how many there were. Whoever
    /// waits for that goes on before `each` is called.
    pub fn read(&self, each: impl FnMut(Event)) -> usize {
        let mut state = lock(&KERNEL.state);
        let count = state.events.len().min(EVENTS_PER_READ);
        let events: Vec<_> = state.events.drain(..count).collect();
        state.read += count;
        drop(state);
        KERNEL.changed.notify_all();
        events.into_iter().for_each(each);
        count
    }
}

/// Closing it ends all watching.
impl Drop for Userfault {
    fn drop(&mut self) {
        self.retire(&Stop(()));
    }
}

/// There are no signals.
pub fn keep_signals_away() {}
