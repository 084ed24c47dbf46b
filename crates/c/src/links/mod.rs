//! The links and listeners of this process, by descriptor and cookie.
//!
//! A call takes what it needs out of the table and releases its lock before it does anything that
//! may block. A forked child starts with an empty table and refuses the entries of its parent's.

mod cookie;
mod link;
mod listener;
mod op_log;
mod user_fd;

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use memferry::message::{Error, Link};
use memferry_sys::sync::lock;

use crate::code::{ADMA_EBADF, ADMA_EBUSY, ADMA_EMFILE, ADMA_ESTALE, CallError};
use crate::windows::WindowRegistry;
pub(crate) use cookie::{FIRST as FIRST_LINK_COOKIE, LinkCookie};
pub(crate) use link::OpenLink;
use listener::OpenListener;

/// All links and listeners.
#[derive(Debug)]
pub(crate) struct Links {
    table: RwLock<LinkTable>,
    /// Held by the thread that closes all of them.
    closing: Mutex<()>,
    /// The windows of links, which are withdrawn with them.
    windows: WindowRegistry,
    /// The count of each slot when this process was forked.
    inherited: Box<[u64]>,
}

#[derive(Debug, Default)]
struct LinkTable {
    by_descriptor: HashMap<c_int, LinkEntry>,
    slots: Vec<Option<Arc<OpenLink>>>,
    /// Closed links whose memory the peer may still write. They keep their slots, so that their
    /// cookies report when that has ended.
    busy: Vec<Arc<OpenLink>>,
}

#[derive(Debug, Clone)]
enum LinkEntry {
    Link(Arc<OpenLink>),
    Listener(Arc<OpenListener>),
}

impl Links {
    /// An empty table, in a process that may have been forked.
    pub(crate) fn new(is_child: bool) -> Self {
        let inherited = if is_child { cookie::all_counts() } else { Box::default() };
        Self {
            table: RwLock::default(),
            closing: Mutex::default(),
            windows: WindowRegistry::new(),
            inherited,
        }
    }

    /// Listens on a name and returns the descriptor.
    pub(crate) fn listen(&self, name: &str) -> Result<c_int, CallError> {
        self.release();
        let entry = LinkEntry::Listener(Arc::new(OpenListener::bind(name)?));
        Ok(self.insert(self.write(), entry))
    }

    /// The windows of all links.
    #[inline]
    pub(crate) fn windows(&self) -> &WindowRegistry {
        &self.windows
    }

    /// Waits for a connection and returns the descriptor of the link.
    pub(crate) fn accept(&self, descriptor: c_int) -> Result<c_int, CallError> {
        match self.entry(descriptor)? {
            LinkEntry::Listener(listener) => self.add(listener.accept(|| self.release())?),
            LinkEntry::Link(_) => Err(not_open(descriptor, "a listener: it is a link")),
        }
    }

    /// Connects to a name and returns the descriptor of the link.
    pub(crate) fn connect(&self, name: &str) -> Result<c_int, CallError> {
        self.release();
        self.add(Link::connect(name)?)
    }

    /// The open link of a descriptor.
    pub(crate) fn link(&self, descriptor: c_int) -> Result<Arc<OpenLink>, CallError> {
        match self.entry(descriptor)? {
            LinkEntry::Link(link) => Ok(link),
            LinkEntry::Listener(_) => Err(not_open(descriptor, "a link: it is a listener")),
        }
    }

    /// The open link of a cookie, and the number of the operation there.
    pub(crate) fn of_cookie(&self, raw: i64) -> Result<(Arc<OpenLink>, u64), CallError> {
        let cookie = LinkCookie::from_raw(raw)?;
        if self.inherited.get(cookie.slot).is_some_and(|count| cookie.number < *count) {
            return Err(Error::Forked.into());
        }
        let found = self.read().slots.get(cookie.slot).cloned().flatten();
        match found {
            // Of a closed link, only operations whose memory is still in use are stored.
            Some(link) if !link.is_closed() || link.is_in_flight(cookie.number) => {
                Ok((link, cookie.number))
            }
            _ if cookie.was_issued() => {
                Err(CallError::new(ADMA_ESTALE, format!("the link of cookie {raw} was closed")))
            }
            _ => Err(CallError::new(ADMA_ESTALE, format!("{raw} never was a cookie"))),
        }
    }

    /// Closes a link or listener. `ADMA_EBUSY`: it is closed, but the peer is in the middle of a
    /// write to the memory of a read, or of an access to a window.
    pub(crate) fn close(&self, descriptor: c_int) -> Result<(), CallError> {
        self.release();
        let entry = self.entry(descriptor)?;
        // Of two threads that close it, the second finds nothing.
        if !self.remove(&entry) {
            return Err(not_open(descriptor, "open any more"));
        }
        self.end(&entry)
    }

    /// Closes all of them. An error as for [`Links::close`], also for those that were closed before.
    pub(crate) fn close_all(&self) -> Result<(), CallError> {
        // Another thread may have taken them already, and may still be closing them.
        let _closing = lock(&self.closing);
        let open = std::mem::take(&mut self.write().by_descriptor);
        let outcome = open.values().map(|entry| self.end(entry)).fold(Ok(()), Result::and);
        self.release();
        if self.read().busy.is_empty() { Ok(()) } else { outcome.and_then(|()| Err(still_busy())) }
    }

    /// Drops closed links whose memory the peer no longer writes: it has continued, or its process
    /// has exited.
    fn release(&self) {
        if self.read().busy.is_empty() {
            return;
        }
        let busy = self.read().busy.clone();
        for link in busy.iter().filter(|link| self.windows.release(link) && !link.is_busy()) {
            let mut table = self.write();
            let before = table.busy.len();
            table.busy.retain(|known| !Arc::ptr_eq(known, link));
            // Of two threads that release it, only one finds it.
            if table.busy.len() < before {
                table.slots[link.slot] = None;
            }
        }
    }

    /// Whether a descriptor of a forked child is one of these, which are its parent's. Another
    /// thread may have held the lock when the process was forked; then the answer is unknown.
    pub(crate) fn is_from_before_fork(&self, descriptor: c_int) -> bool {
        let table = match self.table.try_read() {
            Ok(table) => table,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) => return false,
        };
        table.by_descriptor.get(&descriptor).is_some_and(LinkEntry::is_held)
    }

    /// The entry of a descriptor. If the program has closed it with `close(2)`, that is detected
    /// here, and the link or listener is closed.
    fn entry(&self, descriptor: c_int) -> Result<LinkEntry, CallError> {
        let found = self.read().by_descriptor.get(&descriptor).cloned();
        let Some(entry) = found else {
            if crate::global::is_from_before_fork(descriptor) {
                return Err(Error::Forked.into());
            }
            return Err(not_open(descriptor, "of an open link or listener"));
        };
        if entry.is_held() {
            return Ok(entry);
        }
        if self.remove(&entry) {
            // A window that is still accessed reports it when it is withdrawn.
            let _ = self.end(&entry);
        }
        Err(not_open(descriptor, "open any more: it was closed outside of this library"))
    }

    /// Finds a slot for a link.
    fn add(&self, link: Link) -> Result<c_int, CallError> {
        let mut table = self.write();
        let place = table.free_slot()?;
        let link = Arc::new(OpenLink::new(link, place)?);
        table.slots[place] = Some(link.clone());
        Ok(self.insert(table, LinkEntry::Link(link)))
    }

    /// Stores an entry and returns its number.
    fn insert(&self, mut table: RwLockWriteGuard<'_, LinkTable>, entry: LinkEntry) -> c_int {
        let number = entry.number();
        let lost = table.by_descriptor.insert(number, entry);
        // The number is new, so an older entry with it was closed with `close(2)`.
        if let Some(lost) = lost {
            drop(table);
            // As above.
            let _ = self.end(&lost);
        }
        number
    }

    /// Closes an entry, which can no longer be found by its descriptor.
    fn end(&self, entry: &LinkEntry) -> Result<(), CallError> {
        match entry {
            LinkEntry::Link(link) => {
                link.close();
                let outcome = self.windows.close_windows_of(link);
                let outcome = if link.is_busy() { outcome.and(Err(still_busy())) } else { outcome };
                let mut table = self.write();
                match outcome {
                    Ok(()) => table.slots[link.slot] = None,
                    Err(_) => table.busy.push(link.clone()),
                }
                drop(table);
                link.close_descriptor();
                outcome
            }
            LinkEntry::Listener(listener) => {
                listener.close();
                Ok(())
            }
        }
    }

    /// Takes an entry out of the table. Returns `false` if another thread has done so.
    fn remove(&self, entry: &LinkEntry) -> bool {
        let mut table = self.write();
        let is_there = table.by_descriptor.get(&entry.number()).is_some_and(|it| it.is(entry));
        if is_there {
            table.by_descriptor.remove(&entry.number());
        }
        is_there
    }

    fn read(&self) -> RwLockReadGuard<'_, LinkTable> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, LinkTable> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LinkTable {
    fn free_slot(&mut self) -> Result<usize, CallError> {
        let place = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        if place == cookie::SLOTS {
            return Err(CallError::new(ADMA_EMFILE, format!("{place} links are open: close some")));
        }
        if place == self.slots.len() {
            self.slots.push(None);
        }
        cookie::mark_slot_used(place);
        Ok(place)
    }
}

impl LinkEntry {
    fn number(&self) -> c_int {
        match self {
            Self::Link(link) => link.number(),
            Self::Listener(listener) => listener.number(),
        }
    }

    fn is_held(&self) -> bool {
        match self {
            Self::Link(link) => link.is_held(),
            Self::Listener(listener) => listener.is_held(),
        }
    }

    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Link(a), Self::Link(b)) => Arc::ptr_eq(a, b),
            (Self::Listener(a), Self::Listener(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

fn still_busy() -> CallError {
    let text = "the other process is stopped while it writes to memory of a link that was closed: \
                keep the memory valid, let that process go on or end it, and call again";
    CallError::new(ADMA_EBUSY, text)
}

fn not_open(descriptor: c_int, what: &str) -> CallError {
    CallError::new(ADMA_EBADF, format!("descriptor {descriptor} is not {what}"))
}
