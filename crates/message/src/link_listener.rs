//! Listeners: names that other processes connect links to.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use memferry_sys::EventFd;
use memferry_sys::epoll::EpollSet;
use memferry_sys::fork::OwnerProcess;
use memferry_sys::sync::lock;

use crate::builder::EndpointBuilder;
use crate::connect::accept_thread::{AcceptState, AcceptThread};
use crate::connect::handshake::{EndpointUuid, RejectReason};
use crate::connect::{listener, parse_name};
use crate::endpoint::ReadyFd;
use crate::error::{ConnectError, Error};
use crate::link::Link;
use crate::port::{Port, PortConfig};
use crate::quarantine;

/// The maximum number of links that are connected and not taken by [`Listener::accept`]. Further
/// processes wait in their connect.
const MAX_ACCEPTED: usize = 64;

/// A name that other processes connect links to.
///
/// A thread of the listener completes connects while the owner computes: a process connects and
/// writes before [`Listener::accept`] is called. The thread ends with the listener. At most 64 links
/// wait for their `accept`. A forked child cannot use the listener ([`Error::Forked`]).
///
/// ```
/// use memferry::message::{Link, Listener};
///
/// let listener = Listener::bind("doc-listener")?;
/// Link::connect("doc-listener")?.write(b"hello")?;
/// let mut buffer = [0; 5];
/// assert_eq!(listener.accept()?.read(&mut buffer)?, 5);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct Listener {
    /// Shared with the thread, which does not keep it alive.
    incoming: Arc<Mutex<IncomingLinks>>,
    thread: Option<AcceptThread>,
    owner: OwnerProcess,
}

/// The socket, and the links that were accepted on it.
struct IncomingLinks {
    listener: listener::Listener,
    config: PortConfig,
    /// Links that the thread has accepted, in order.
    accepted: VecDeque<Link>,
    /// Readable while `accepted` is not empty. `None` without a thread.
    has_accepted: Option<EventFd>,
    /// The descriptor for event loops, made at the first call.
    ready: Option<Arc<EpollSet>>,
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Listener").finish_non_exhaustive()
    }
}

impl EndpointBuilder {
    /// Listens on a name for links. A name with a slash is a path in the file system; any other name is
    /// removed with the process.
    pub fn listen(&self, name: &str) -> Result<Listener, Error> {
        let config = self.config()?;
        let listener = listener::Listener::bind(&parse_name(name)?, config.allowed.clone())?;
        let (accepted, has_accepted, ready) = (VecDeque::new(), None, None);
        let incoming = IncomingLinks { listener, config, accepted, has_accepted, ready };
        let incoming = Arc::new(Mutex::new(incoming));
        let thread = start_thread(&incoming);
        if let Err(error) = &thread {
            tracing::warn!(%error, "links are accepted only by calls of the owner");
        }
        Ok(Listener { incoming, thread: thread.ok(), owner: OwnerProcess::current() })
    }
}

fn start_thread(incoming: &Arc<Mutex<IncomingLinks>>) -> io::Result<AcceptThread> {
    let event = EventFd::new()?;
    let mut state = lock(incoming);
    let readiness = state.listener.watch()?;
    let weak = Arc::downgrade(incoming);
    let thread = AcceptThread::start(readiness, move || accept_all(&weak))?;
    state.has_accepted = Some(event);
    Ok(thread)
}

/// Accepts all processes that have connected, on the thread.
fn accept_all(incoming: &Weak<Mutex<IncomingLinks>>) -> AcceptState {
    let Some(incoming) = incoming.upgrade() else { return AcceptState::Closed };
    // A link that is dropped closes, which may take time: without the lock.
    let abandoned = lock(&incoming).take_abandoned();
    drop(abandoned);
    let mut incoming = lock(&incoming);
    while incoming.accepted.len() < MAX_ACCEPTED {
        match incoming.accept_next() {
            Ok(Some(link)) => incoming.push_accepted(link),
            Ok(None) => return incoming.listener.accept_state(),
            Err(error) => tracing::warn!(%error, "a link could not be accepted"),
        }
    }
    AcceptState::Stalled
}

impl IncomingLinks {
    /// Accepts the next process whose connect request has arrived.
    fn accept_next(&mut self) -> Result<Option<Link>, Error> {
        let port = Port::new(self.config.clone(), String::new(), None);
        let identity: EndpointUuid = port.lock().own_identity();
        loop {
            let Some(caller) = self.listener.poll(identity, self.config.cross_memory) else {
                return Ok(None);
            };
            if quarantine::has_many_ended(caller.pid()) {
                caller.reject(identity, RejectReason::Full);
                continue;
            }
            let table = port.lock().windows.table();
            let table = match table {
                Ok(table) => table,
                Err(error) => {
                    caller.reject(identity, RejectReason::for_memory(&error));
                    return Err(ConnectError::system("making shared memory")(error).into());
                }
            };
            if let Some(parts) = caller.accept(identity, table.as_fd()) {
                let peer = port.lock().add_parts(parts)?;
                return Link::from_port(port, peer).map(Some);
            }
        }
    }

    /// Removes the links whose peers have left without a message, so that they hold nothing.
    fn take_abandoned(&mut self) -> Vec<Link> {
        let (abandoned, kept): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.accepted).into_iter().partition(Link::is_abandoned);
        self.accepted = kept.into();
        self.update_event();
        abandoned
    }

    fn push_accepted(&mut self, link: Link) {
        self.accepted.push_back(link);
        self.has_accepted.iter().for_each(EventFd::signal);
    }

    fn take_accepted(&mut self) -> Option<Link> {
        let link = self.accepted.pop_front();
        self.update_event();
        link
    }

    /// Makes the event unreadable once no link waits.
    fn update_event(&self) {
        if self.accepted.is_empty() {
            self.has_accepted.as_ref().map(EventFd::drain);
        }
    }

    fn ready_set(&mut self) -> io::Result<Arc<EpollSet>> {
        if let Some(ready) = &self.ready {
            return Ok(ready.clone());
        }
        let ready = Arc::new(EpollSet::new()?);
        ready.add(self.listener.watch()?.as_fd(), false)?;
        if let Some(event) = &self.has_accepted {
            ready.add(event.as_fd(), false)?;
        }
        self.ready = Some(ready.clone());
        Ok(ready)
    }
}

impl Listener {
    /// Listens on a name with the default settings.
    pub fn bind(name: &str) -> Result<Self, Error> {
        EndpointBuilder::new().listen(name)
    }

    /// Returns a link to the next process that connects, and waits for it.
    pub fn accept(&self) -> Result<Link, Error> {
        let watch = self.ready_fd()?;
        loop {
            if let Some(link) = self.poll_accept()? {
                return Ok(link);
            }
            watch.0.wait(Some(Duration::from_millis(100)));
        }
    }

    /// Returns a link to the next process that has connected, if there is one. A process that has left
    /// without a message is skipped.
    pub fn poll_accept(&self) -> Result<Option<Link>, Error> {
        self.check_fork()?;
        loop {
            let mut incoming = lock(&self.incoming);
            let Some(link) = incoming.take_accepted() else { return incoming.accept_next() };
            // A link that is dropped here closes, which may take time.
            drop(incoming);
            if !link.is_abandoned() {
                return Ok(Some(link));
            }
        }
    }

    /// A descriptor for event loops. It is readable when a process may have connected.
    pub fn ready_fd(&self) -> Result<ReadyFd, Error> {
        self.check_fork()?;
        let ready = lock(&self.incoming).ready_set();
        Ok(ready.map(ReadyFd).map_err(ConnectError::system("watching a listener"))?)
    }

    /// Makes the descriptor of [`Listener::ready_fd`], and all copies of it, unreadable for ever.
    pub fn disable_ready_fd(&self) {
        if self.check_fork().is_err() {
            return;
        }
        let mut incoming = lock(&self.incoming);
        let Some(ready) = incoming.ready.take() else { return };
        if let Ok(watch) = incoming.listener.watch() {
            ready.remove(watch.as_fd());
        }
        incoming.has_accepted.iter().for_each(|event| ready.remove(event.as_fd()));
    }

    fn check_fork(&self) -> Result<(), Error> {
        if self.owner.is_current() { Ok(()) } else { Err(Error::Forked) }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join();
        }
    }
}
