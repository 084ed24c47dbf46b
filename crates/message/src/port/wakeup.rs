//! Wakeups of a port: armed wakeup flags, the epoll set, the sleeper, and events. [`super::sleep`] and
//! [`super::event_loop`] sequence them with progress.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use memferry_sys::EventFd;
use memferry_sys::epoll::{EpollSet, Readiness};

use super::peer_table::PeerTable;
use super::poll_backoff::PollBackoff;
use super::poll_set::HintState;
use crate::connection::Connection;
use crate::ring::hint_memory::HintMemory;
use crate::ring::layout::ConnectionMemory;
use crate::ring::wakeup::FUTEX_ARMED;

/// Number of connections from which on the kernel is asked which peers have ended, and peers set hints. With
/// fewer, each of them is asked, which takes no descriptor.
const MANY_CONNECTIONS: usize = 8;

/// Key of descriptors in `epoll` that belong to no connection. Connections have the numbers of their slots.
const NO_CONNECTION: u64 = u64::MAX;

/// The descriptor that event loops of the application poll.
#[derive(Debug)]
struct EventLoopFd {
    epoll: Arc<EpollSet>,
    event: EventFd,
    is_signalled: bool,
}

/// The futex words that a thread sleeps on.
#[derive(Debug)]
pub(super) struct FutexWords {
    armed: u32,
    /// One word for all peers that set hints.
    hints: Option<Arc<HintMemory>>,
    /// One word each for the others.
    connections: Vec<ConnectionMemory>,
}

impl FutexWords {
    /// The words, and their values while no peer has woken this side.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&AtomicU32, u32)> {
        let hints = self.hints.iter();
        let hints = hints.map(|hints| (hints.words().wakeup().word(), self.armed & FUTEX_ARMED));
        let private = self.connections.iter();
        hints.chain(private.map(|memory| (memory.own_wakeup().word(), self.armed)))
    }
}

/// The wakeup state of a port.
#[derive(Debug, Default)]
pub(super) struct Wakeup {
    /// Sockets and processes of peers, for event loops and for a sleeper without a deadline.
    epoll: Option<Arc<EpollSet>>,
    /// A connection could not be added to `epoll`: no thread may sleep on the set without a timeout.
    pub(super) is_epoll_incomplete: bool,
    /// Sockets and processes of peers, of which only the end is reported, once there are many peers.
    ends: Option<EpollSet>,
    /// The hints of peers, once there are many.
    pub(super) hints: Option<Arc<HintMemory>>,
    pub(super) last_sweep_ns: u64,
    /// Event in `epoll` that wakes the thread that sleeps on the set.
    wake_event: Option<EventFd>,
    event_loop_fd: Option<EventLoopFd>,
    /// Flags that are published to peers while no thread of this port polls.
    pub(super) armed: u32,
    /// A thread sleeps on the futex words of the connections, or on `epoll`.
    pub(super) has_sleeper: bool,
    /// The sleeper sleeps on `epoll`.
    pub(super) sleeper_on_epoll: bool,
    /// The words that the sleeper sleeps on otherwise.
    pub(super) sleeper_words: Option<Arc<FutexWords>>,
    /// Threads that poll the rings.
    pub(super) pollers: u32,
    /// The last call left control messages in the rings, and signalled `wake_event` for them.
    pub(super) has_backlog: bool,
    /// The descriptor for event loops reports a new peer until this many calls have ended: that of the
    /// accept thread, and the next one.
    pub(super) new_peer_calls: u8,
    /// The thread that waits for completions must return.
    pub(super) waiter_woken: bool,
    pub(super) poll_backoff: PollBackoff,
    /// Number of passes that made progress.
    pub(super) progress_count: u64,
}

impl Wakeup {
    /// The epoll set of all descriptors of the port, made at the first call.
    pub(super) fn epoll(&mut self, peers: &mut PeerTable) -> io::Result<Arc<EpollSet>> {
        if let Some(epoll) = &self.epoll {
            return Ok(epoll.clone());
        }
        let epoll = Arc::new(EpollSet::new()?);
        let event = EventFd::new()?;
        let add_other = |descriptor: BorrowedFd<'_>| {
            epoll.add_keyed(descriptor, NO_CONNECTION, Readiness::Readable)
        };
        add_other(event.as_fd())?;
        if let Some(listener) = &mut peers.listener {
            add_other(listener.watch()?.as_fd())?;
        }
        for (index, slot) in peers.iter().enumerate() {
            for descriptor in slot.descriptors() {
                epoll.add_keyed(descriptor, index as u64, Readiness::Readable)?;
            }
        }
        for descriptor in peers.connect_sockets().chain(peers.remote.descriptor()) {
            add_other(descriptor)?;
        }
        self.wake_event = Some(event);
        self.epoll = Some(epoll.clone());
        Ok(epoll)
    }

    /// Adds a descriptor whose events are also polled for: a failure to add it only delays them.
    pub(super) fn watch(&self, descriptor: BorrowedFd<'_>) {
        if let Some(epoll) = &self.epoll {
            let _ = epoll.add_keyed(descriptor, NO_CONNECTION, Readiness::Readable);
        }
    }

    /// Removes a descriptor of [`Wakeup::watch`], which the caller closes after this call.
    pub(super) fn unwatch(&self, descriptor: BorrowedFd<'_>) {
        self.epoll.iter().for_each(|epoll| epoll.remove(descriptor));
    }

    /// Adds the descriptors of a new connection in a slot, and publishes to the peer how this side is woken.
    pub(super) fn watch_connection(&mut self, index: usize, peers: &mut PeerTable) {
        if let Some(epoll) = &self.epoll {
            for descriptor in peers[index].descriptors() {
                // The socket of a connect that was watched while it was pending has another key.
                epoll.remove(descriptor);
                let added = epoll.add_keyed(descriptor, index as u64, Readiness::Readable);
                self.is_epoll_incomplete |= added.is_err();
            }
        }
        self.watch_end(index, peers);
        self.share_hints(index, peers);
        let armed = if self.pollers == 0 { self.armed } else { 0 };
        peers.wire(index).arm_wakeup(armed);
    }

    /// Sends the hints of this port to a new peer. The first peer of many makes them, for all.
    fn share_hints(&mut self, index: usize, peers: &mut PeerTable) {
        let (hints, slots) = match &self.hints {
            Some(hints) => (hints.clone(), index..index + 1),
            None if peers.connected < MANY_CONNECTIONS => return,
            None => match HintMemory::new() {
                Ok(hints) => (self.hints.insert(Arc::new(hints)).clone(), 0..peers.len()),
                // Without hints, every ring is polled.
                Err(_) => return,
            },
        };
        let own = rustix::process::geteuid().as_raw();
        for slot in slots {
            let Some(connection) = &mut peers[slot].connection else { continue };
            // Another user could hold back the messages of others for a while.
            let is_own = connection.wire.peer.id.credentials.uid == own;
            if is_own && !connection.wire.is_self() {
                connection.hint_state = HintState::Shared;
                connection.wire.share_hints(&hints, slot);
                connection.wire.ring_doorbell();
            }
        }
    }

    /// Whether peers set hints.
    #[inline]
    pub(super) fn has_hints(&self) -> bool {
        self.hints.is_some()
    }

    /// Whether a peer has set its hint.
    #[inline]
    pub(super) fn is_hint_set(&self) -> bool {
        self.hints.as_ref().is_some_and(|hints| hints.words().has_any())
    }

    /// Lets the kernel report the end of a new peer. If it cannot, each peer is asked.
    fn watch_end(&mut self, index: usize, peers: &PeerTable) {
        let add = |set: &EpollSet, index: usize| {
            peers[index].watch_end(|descriptor, readiness| {
                set.add_keyed(descriptor, index as u64, readiness)
            })
        };
        let watched = match self.ends.take() {
            Some(set) => add(&set, index).map(|()| Some(set)),
            None if peers.connected < MANY_CONNECTIONS => return,
            None => EpollSet::new().and_then(|set| {
                (0..peers.len()).try_for_each(|index| add(&set, index))?;
                Ok(Some(set))
            }),
        };
        self.ends = watched.unwrap_or_default();
    }

    /// The slots of connections whose peers may have ended.
    pub(super) fn possibly_ended(&self, peers: &PeerTable) -> Vec<usize> {
        match &self.ends {
            // A key may be that of an earlier connection, so the caller checks.
            Some(set) => set.ready_keys().map(|key| key as usize).collect(),
            None => (0..peers.len()).collect(),
        }
    }

    /// Removes the descriptors of a connection, besides which `left` others are left. The caller closes them
    /// after this call: a duplicate of a closed descriptor would stay in the set and be readable for ever.
    pub(super) fn unwatch_connection(&mut self, wire: &Connection, left: usize) {
        for set in self.epoll.as_deref().into_iter().chain(&self.ends) {
            wire.descriptors().for_each(|fd| set.remove(fd));
        }
        if left < MANY_CONNECTIONS / 2 {
            self.ends = None;
        }
        // A peer may still set its hint otherwise.
        if left == 0 {
            self.hints = None;
        }
    }

    /// The epoll set that event loops poll: that of the port, and an event for what has arrived already.
    pub(super) fn event_loop_set(&mut self, peers: &mut PeerTable) -> io::Result<Arc<EpollSet>> {
        if let Some(fd) = &self.event_loop_fd {
            return Ok(fd.epoll.clone());
        }
        let (set, event) = (Arc::new(EpollSet::new()?), EventFd::new()?);
        set.add(self.epoll(peers)?.as_fd(), false)?;
        set.add(event.as_fd(), false)?;
        self.event_loop_fd = Some(EventLoopFd { epoll: set.clone(), event, is_signalled: false });
        Ok(set)
    }

    /// Makes the descriptor for event loops unreadable for ever.
    pub(super) fn disable_event_loop_fd(&self) {
        if let Some(fd) = &self.event_loop_fd {
            fd.epoll.remove(fd.event.as_fd());
            self.epoll.iter().for_each(|epoll| fd.epoll.remove(epoll.as_fd()));
        }
    }

    /// Whether event loops poll this port.
    pub(super) fn has_event_loop(&self) -> bool {
        self.event_loop_fd.is_some()
    }

    /// Makes the descriptor for event loops readable or unreadable.
    pub(super) fn set_ready(&mut self, is_ready: bool) {
        if let Some(fd) = &mut self.event_loop_fd
            && is_ready != fd.is_signalled
        {
            fd.is_signalled = is_ready;
            if is_ready {
                fd.event.signal();
            } else {
                fd.event.drain();
            }
        }
    }

    /// Publishes to the peers whose rings are polled how this side is woken. The others wake it by their hints.
    pub(super) fn arm(&self, peers: &mut PeerTable) {
        if let Some(hints) = &self.hints {
            hints.words().wakeup().arm(self.armed & FUTEX_ARMED);
        }
        peers.for_polled(|connection| {
            connection.wire.arm_wakeup(connection.wakeup_flags(self.armed));
        });
    }

    /// The futex words to sleep on, and their values while no peer has woken this side.
    pub(super) fn futex_words(&self, peers: &PeerTable) -> FutexWords {
        let private = peers.polled_connections().filter(|peer| peer.needs_own_futex());
        FutexWords {
            armed: self.armed,
            hints: self.hints.clone(),
            connections: private.map(|connection| connection.wire.memory.clone()).collect(),
        }
    }

    /// The slots of connections whose sockets have packets, or whose peers have ended.
    pub(super) fn readable_connections(&self) -> impl Iterator<Item = usize> + use<> {
        let keys = self.epoll.as_ref().map(|epoll| epoll.ready_keys());
        keys.into_iter().flatten().filter(|&key| key != NO_CONNECTION).map(|key| key as usize)
    }

    /// Publishes to peers that a thread of this side polls.
    pub(super) fn disarm(&self, peers: &mut PeerTable) {
        if self.armed != 0 {
            self.disarm_all(peers);
        }
    }

    /// Disarms the wakeups of rings that are polled, and of the hints.
    pub(super) fn disarm_all(&self, peers: &mut PeerTable) {
        let slept_on = self.sleeper_words.iter().filter_map(|words| words.hints.as_ref());
        self.hints.iter().chain(slept_on).for_each(|hints| {
            hints.words().wakeup().disarm();
        });
        peers.for_polled(|connection| connection.wire.disarm_wakeup());
    }

    /// Adds a polling thread: peers need not wake this side meanwhile.
    pub(super) fn begin_polling(&mut self, peers: &mut PeerTable) {
        self.pollers += 1;
        self.disarm(peers);
    }

    /// Whether peers have to wake a thread that sleeps on the futex words.
    pub(super) fn is_futex_armed(&self) -> bool {
        self.armed & FUTEX_ARMED != 0
    }

    /// Whether a caller that unlocks the port has to arm wakeups or update the event of event loops.
    #[inline]
    pub(super) fn is_armed_without_poller(&self) -> bool {
        self.pollers == 0 && self.armed != 0
    }

    /// Leaves further control messages to the next call, and signals `wake_event`.
    pub(super) fn set_backlog(&mut self) {
        self.has_backlog = true;
        self.signal_epoll();
    }

    /// Clears the backlog: a thread now polls what the last call left in the rings.
    pub(super) fn clear_backlog(&mut self) {
        self.has_backlog = false;
        if let Some(event) = &self.wake_event {
            event.drain();
        }
    }

    /// Makes `epoll` readable.
    pub(super) fn signal_epoll(&self) {
        if let Some(event) = &self.wake_event {
            event.signal();
        }
    }
}
