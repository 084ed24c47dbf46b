//! Sleeping until a port has work, and being woken.
//!
//! One thread at a time, the sleeper, sleeps on the futex words of the connections; other threads wait until
//! the sleeper or a thread that made progress notifies them. After several sleeps without work the sleeper
//! changes to the epoll set of sockets and processes, which costs nothing while it is idle.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use memferry_sys::epoll::EpollSet;
use memferry_sys::futex::{MAX_WAITV, futex_wait_shared, futex_wake_shared};

use super::peer_table::ConnectedPeer;
use super::wait::PortGuard;
use super::wakeup::FutexWords;
use super::{Port, PortState};
use crate::connect::listener::Listener;
use crate::ring::wakeup::{FD_ARMED, FUTEX_ARMED};

/// Maximum sleep on the futex words. Liveness of peers is checked between sleeps.
const FUTEX_SLEEP: Duration = Duration::from_millis(20);
/// Maximum sleep while an engine copies.
const OFFLOAD_SLEEP: Duration = Duration::from_micros(20);
/// Maximum sleep while a handshake is in flight.
const HANDSHAKE_SLEEP: Duration = Duration::from_micros(500);

/// Maximum sleep with a remote transport, whose peers may end without an event.
const REMOTE_SLEEP: Duration = Duration::from_millis(250);

/// Maximum number of polls of a thread that stops polling while another one sleeps.
const MAX_REARM_ROUNDS: u32 = 8;

/// How long a thread may sleep.
struct SleepBounds {
    /// The sleep ends after this time: by the deadline of the caller, and by `longest`.
    slice: Duration,
    /// The caller has slept often enough without work to change to the epoll set.
    deeply: bool,
    has_deadline: bool,
    /// The longest sleep with what is in flight.
    longest: Duration,
}

impl SleepBounds {
    /// The timeout on the epoll set. Without a deadline a wakeup ends the sleep. Sources that wake no thread
    /// are polled again after `slice`.
    fn epoll_timeout(&self, state: &PortState) -> Option<Duration> {
        let is_unbounded = !self.has_deadline && self.longest == FUTEX_SLEEP;
        if !is_unbounded || state.wakeup.is_epoll_incomplete {
            return Some(self.slice);
        }
        state.protocol.peers.remote.is_set().then_some(REMOTE_SLEEP)
    }
}

/// Sleeps on the futex words of all connections.
fn sleep_on_words(words: &FutexWords, slice: Duration) {
    match (words.iter().next(), words.iter().count()) {
        (None, _) => std::thread::sleep(slice),
        (Some(word), 1) => futex_wait_shared(&[word], slice),
        _ => futex_wait_shared(&words.iter().collect::<Vec<_>>(), slice),
    }
}

impl Port {
    /// Sleeps, with the port unlocked, until there may be work. Returns at once if the epoch is no longer
    /// `seen`, that of the caller's last poll: the caller may wait for the event that changed the epoch, and
    /// no later event would wake it.
    pub(super) fn sleep<'a>(
        &'a self,
        mut state: PortGuard<'a>,
        deadline: Option<Instant>,
        deeply: bool,
        seen: u64,
    ) -> PortGuard<'a> {
        if state.wait_epoch() != seen {
            return state;
        }
        // Neither engines nor handshakes wake a thread: they are polled again soon.
        let longest = if state.protocol.is_offloading() {
            OFFLOAD_SLEEP
        } else if state.needs_timed_poll() {
            HANDSHAKE_SLEEP
        } else {
            FUTEX_SLEEP
        };
        let deeply = deeply && longest == FUTEX_SLEEP;
        let slice = deadline.map_or(longest, |deadline| {
            deadline.saturating_duration_since(Instant::now()).min(longest)
        });
        let bounds = SleepBounds { slice, deeply, has_deadline: deadline.is_some(), longest };
        (state.wakeup.pollers, state.is_polling) = (state.wakeup.pollers - 1, false);
        let mut state = if state.wakeup.has_sleeper {
            self.wait_for_sleeper(state, slice, seen)
        } else {
            self.sleep_for_peers(state, &bounds, seen)
        };
        state.wakeup.pollers += 1;
        state.disarm_wakeups();
        state
    }

    /// Waits until the sleeper, or a thread that makes progress, notifies this thread.
    fn wait_for_sleeper<'a>(
        &'a self,
        mut state: PortGuard<'a>,
        slice: Duration,
        seen: u64,
    ) -> PortGuard<'a> {
        let have_changed = state.windows.take_word_changes();
        if have_changed {
            // The sleeper may wait for this change.
            self.wake_sleeper(&mut state);
        }
        let is_ready = have_changed || (state.wakeup.pollers == 0 && state.rearm());
        if is_ready || state.wait_epoch() != seen {
            return state;
        }
        let told = self.local_futex.word().load(Ordering::Acquire);
        self.local_waiters.fetch_add(1, Ordering::Relaxed);
        drop(state);
        self.local_futex.wait(told, Some(slice));
        self.local_waiters.fetch_sub(1, Ordering::Relaxed);
        self.lock()
    }

    /// Sleeps as the sleeper, on the futex words of the connections or on the epoll set.
    fn sleep_for_peers<'a>(
        &'a self,
        mut state: PortGuard<'a>,
        bounds: &SleepBounds,
        seen: u64,
    ) -> PortGuard<'a> {
        state.wakeup.has_sleeper = true;
        // One word is that of the hints.
        let deeply = bounds.deeply
            || state.protocol.peers.own_futex_count() > MAX_WAITV - 1
            || state.protocol.peers.remote.is_set();
        let readiness = if deeply { state.epoll().ok() } else { None };
        let way = if readiness.is_some() { FD_ARMED } else { FUTEX_ARMED };
        state.wakeup.sleeper_on_epoll = readiness.is_some();
        let before = state.wakeup.armed;
        state.wakeup.armed |= way;
        // A packet wakes a sleeper on the epoll set, which no peer sends for the hints of another.
        if readiness.is_some() {
            state.arm_all_wakeups();
        } else {
            state.arm_wakeups();
        }
        let words = readiness.is_none().then(|| Arc::new(state.futex_words()));
        // Polls once more after the wakeups are armed: control messages, space, and claims
        // of cooperative messages.
        let is_idle = !state.windows.take_word_changes() && !state.has_ready_ring();
        // Makes no copies: other threads treat this one as asleep.
        let is_idle = is_idle && !state.progress_steps() && state.wait_epoch() == seen;
        if is_idle && !(state.wakeup.has_hints() && state.leave_quiet_rings(0)) {
            state.wakeup.sleeper_words.clone_from(&words);
            state.entering_sleep = true;
            let timeout = bounds.epoll_timeout(&state);
            state.counters.sleeps.add(1);
            state.publish_gauges();
            drop(state);
            match (&readiness, &words) {
                (Some(readiness), _) => drop(readiness.wait(timeout)),
                (None, Some(words)) => sleep_on_words(words, bounds.slice),
                (None, None) => {}
            }
            state = self.lock();
        }
        state.wakeup.has_sleeper = false;
        state.wakeup.sleeper_on_epoll = false;
        state.wakeup.sleeper_words = None;
        if readiness.is_some() {
            state.drain_wakeups();
        }
        // Keeps other flags: an event loop may have armed its own during the sleep.
        state.wakeup.armed &= !way | before;
        // A message comes first: the thread checks its peers when it finds nothing, and before it sleeps again.
        if !state.has_ready_ring() {
            state.check_peers(true);
        }
        self.notify_local_waiters();
        state
    }

    /// Wakes the sleeper of this process, on the futex words or on the epoll set. The sleeper may not sleep
    /// yet: its words must not be armed again, or it would miss this wakeup.
    pub(crate) fn wake_sleeper(&self, state: &mut PortState) {
        state.wakeup.armed &= !FUTEX_ARMED;
        // A sleeper that does not sleep yet finds its words changed.
        state.wakeup.disarm_all(&mut state.protocol.peers);
        // Without a sleeper on the epoll set, the event would wake event loops for nothing.
        if state.wakeup.sleeper_on_epoll {
            state.wakeup.signal_epoll();
        } else {
            // The first of its words wakes it.
            let words = state.wakeup.sleeper_words.as_ref();
            let _ =
                words.is_some_and(|words| words.iter().any(|(word, _)| futex_wake_shared(word)));
        }
        self.local_futex.word().fetch_add(1, Ordering::Release);
        self.local_futex.wake_all();
    }
}

impl PortState {
    /// Whether something is in flight that wakes no thread: a handshake, a chunk of an aborted message, or
    /// work of the remote transport.
    pub(crate) fn needs_timed_poll(&mut self) -> bool {
        self.protocol.peers.listener.as_ref().is_some_and(Listener::has_pending)
            || self.protocol.peers.connects_in_flight > 0
            || !self.protocol.operations.quiescing.is_empty()
            || (self.protocol.peers.closed && self.protocol.has_pending_operations())
            || !self.protocol.peers.can_block_on_remote()
    }

    /// Publishes to all peers that a thread of this side polls.
    pub(super) fn disarm_wakeups(&mut self) {
        self.wakeup.disarm(&mut self.protocol.peers);
    }

    /// Publishes to all peers how this side is woken.
    pub(super) fn arm_wakeups(&mut self) {
        self.wakeup.arm(&mut self.protocol.peers);
    }

    /// The futex words to sleep on.
    pub(super) fn futex_words(&self) -> FutexWords {
        self.wakeup.futex_words(&self.protocol.peers)
    }

    /// The epoll set of all descriptors of the port, made at the first call.
    pub(super) fn epoll(&mut self) -> std::io::Result<Arc<EpollSet>> {
        self.wakeup.epoll(&mut self.protocol.peers)
    }

    /// Arms wakeups again when the last polling thread stops while another thread sleeps. Processes what
    /// arrived before peers could see the flags. Returns whether there was anything.
    pub(super) fn rearm(&mut self) -> bool {
        if !self.wakeup.is_futex_armed() {
            return false;
        }
        for round in 0..MAX_REARM_ROUNDS {
            self.arm_wakeups();
            let is_ready = self.has_ready_ring() || self.protocol.peers.has_active();
            if !is_ready || !self.progress_steps() {
                return round > 0;
            }
            // A ring that was polled because of its hint is not armed yet.
        }
        // The sleeper polls what arrives faster than this thread reads.
        self.mark_changed();
        true
    }

    /// Whether a ring has a control message, or space that this side waits for.
    pub(super) fn has_ready_ring(&self) -> bool {
        self.protocol.peers.polled_connections().any(ConnectedPeer::is_ready)
            || self.wakeup.is_hint_set()
            || (self.protocol.peers.closed && !self.protocol.has_pending_operations())
    }

    /// Drains the wakeups that ended a sleep on the epoll set. Those beyond what one call reports end the next
    /// sleep.
    pub(super) fn drain_wakeups(&mut self) {
        for peer in self.wakeup.readable_connections() {
            let Some(connection) = &mut self.protocol.peers[peer].connection else { continue };
            if let Err(nonsense) = connection.wire.drain_socket() {
                self.disconnect(
                    peer,
                    crate::error::DisconnectReason::ProtocolViolation(nonsense.0),
                );
            }
        }
        self.wakeup.clear_backlog();
    }
}
