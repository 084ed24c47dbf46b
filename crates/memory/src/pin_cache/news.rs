//! What the reader of events hands to the cache: a bounded list, filled without allocating.
//!
//! The reader holds the list's lock from before it reads until what it read is in the list, and sets
//! `some` before that. A thread that knows that an event was read therefore finds `some` set, and
//! finds the event once it has the lock. Nobody allocates, frees or waits with the lock.

use std::time::Duration;

use memferry_sys::sync::atomic::{AtomicBool, Ordering};
use memferry_sys::sync::{Condvar, Mutex, lock, wait_while, wait_while_for};
use memferry_sys::userfault::{Event, Userfault};

/// How many events wait to be taken in. If there are more, the cache forgets everything.
pub(super) const MOST_EVENTS: usize = 256;

/// Events that were read and not yet taken in.
#[derive(Debug)]
pub(super) struct News {
    /// Whether a look at the list is worth while. Written with the lock held.
    some: AtomicBool,
    /// The reader is gone: nothing is heard any more. Written with the lock held.
    deaf: AtomicBool,
    list: Mutex<List>,
    /// Signalled when `call` of the list changes.
    called: Condvar,
    /// The reader is to panic at the next event.
    #[cfg(test)]
    pub(super) panics: AtomicBool,
}

#[derive(Debug)]
struct List {
    events: Vec<Event>,
    lost: bool,
    call: Call,
    /// How many sweeps were asked for, and up to which of them everything is swept.
    sweeps_asked: u64,
    swept: u64,
}

impl List {
    fn push(&mut self, event: Event) {
        if self.events.len() < MOST_EVENTS {
            self.events.push(event);
        } else {
            self.lost = true;
        }
    }
}

/// What the reader and the reaper say to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    /// The reader is not ready yet.
    NotStarted,
    /// There is nothing to reap.
    Nothing,
    /// Events have waited for a while.
    Reap,
    /// Somebody waits until his memory is unpinned.
    Sweep,
    /// The cache is going.
    End,
}

/// What the reaper has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Chore {
    /// Take in what was heard.
    Reap,
    /// Unpin what is gone, of which nothing was heard yet, and say that this sweep is done.
    Sweep(u64),
}

impl News {
    /// An empty list.
    pub(super) fn new() -> Self {
        let events = empty_list();
        let list = List { events, lost: false, call: Call::NotStarted, sweeps_asked: 0, swept: 0 };
        Self {
            some: AtomicBool::new(false),
            deaf: AtomicBool::new(false),
            list: Mutex::new(list),
            called: Condvar::new(),
            #[cfg(test)]
            panics: AtomicBool::new(false),
        }
    }

    /// Reads events into the list. For the reader alone.
    pub(super) fn read_from(&self, userfault: &Userfault) {
        let mut list = lock(&self.list);
        self.some.store(true, Ordering::SeqCst);
        userfault.read(|event| list.push(event));
        if list.events.is_empty() && !list.lost {
            self.some.store(false, Ordering::SeqCst);
        }
    }

    /// Puts an event into the list that no kernel told.
    #[cfg(test)]
    pub(super) fn tell(&self, event: Event) {
        lock(&self.list).push(event);
        self.some.store(true, Ordering::SeqCst);
    }

    /// Whether there is something to take in.
    pub(super) fn is_some(&self) -> bool {
        self.some.load(Ordering::SeqCst)
    }

    /// Exchanges the list for an empty one that holds [`MOST_EVENTS`]. True: events were, or may have
    /// been, lost.
    pub(super) fn take(&self, empty: &mut Vec<Event>) -> bool {
        let mut list = lock(&self.list);
        std::mem::swap(&mut list.events, empty);
        let is_deaf = self.is_deaf();
        self.some.store(is_deaf, Ordering::SeqCst);
        std::mem::take(&mut list.lost) || is_deaf
    }

    /// Says that nothing is heard any more: whatever changes from now on is lost. Called before events
    /// stop, so that no change is neither heard nor lost.
    pub(super) fn become_deaf(&self) {
        let list = lock(&self.list);
        self.deaf.store(true, Ordering::SeqCst);
        self.some.store(true, Ordering::SeqCst);
        drop(list);
    }

    /// Whether nothing is heard any more.
    pub(super) fn is_deaf(&self) -> bool {
        self.deaf.load(Ordering::SeqCst)
    }

    /// Says that the reader is ready.
    pub(super) fn start(&self) {
        self.say(Call::Nothing);
    }

    /// Waits until the reader is ready.
    pub(super) fn wait_for_start(&self) {
        self.wait_while(Call::NotStarted);
    }

    /// Asks the reaper to take in what waits.
    pub(super) fn ask_to_reap(&self) {
        self.say(Call::Reap);
    }

    /// Asks the reaper to unpin what is gone, and waits until that is done, but no longer than a
    /// while: whoever unmapped the memory may hold a lock that the reaper needs.
    pub(super) fn sweep(&self) {
        const AT_MOST: Duration = Duration::from_millis(50);
        let number = {
            let mut list = lock(&self.list);
            list.sweeps_asked += 1;
            list.sweeps_asked
        };
        self.say(Call::Sweep);
        let waits = |list: &mut List| list.swept < number && list.call != Call::End;
        drop(wait_while_for(&self.called, lock(&self.list), AT_MOST, waits));
    }

    /// Says that what was gone when a sweep was asked for is unpinned.
    pub(super) fn swept(&self, number: u64) {
        let mut list = lock(&self.list);
        list.swept = list.swept.max(number);
        self.called.notify_all();
    }

    /// Tells the reaper to end.
    pub(super) fn end(&self) {
        self.say(Call::End);
    }

    /// Waits until something is to be reaped, or swept; `None`: the reaper shall end.
    pub(super) fn wait_for_call(&self) -> Option<Chore> {
        match self.wait_while(Call::Nothing) {
            Call::End => None,
            Call::Sweep => Some(Chore::Sweep(lock(&self.list).sweeps_asked)),
            _ => Some(Chore::Reap),
        }
    }

    fn say(&self, call: Call) {
        let mut list = lock(&self.list);
        // A request to reap is part of one to sweep.
        if list.call != Call::End && (list.call, call) != (Call::Sweep, Call::Reap) {
            list.call = call;
        }
        self.called.notify_all();
    }

    fn wait_while(&self, call: Call) -> Call {
        let waits = |list: &mut List| list.call == call;
        let mut list = wait_while(&self.called, lock(&self.list), waits);
        let said = list.call;
        if matches!(said, Call::Reap | Call::Sweep) {
            list.call = Call::Nothing;
        }
        said
    }
}

/// A list that takes [`MOST_EVENTS`] without growing.
pub(super) fn empty_list() -> Vec<Event> {
    Vec::with_capacity(MOST_EVENTS)
}
