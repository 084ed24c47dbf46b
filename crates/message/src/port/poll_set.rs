//! The connections whose rings a port polls.
//!
//! A port with few connections polls all of them. A port with many has hints
//! ([`crate::ring::hints`]): it stops polling a ring that was quiet for a while, and the peer sets a
//! hint with its next message. So a pass costs by the number of peers with messages, and a sleep by
//! the number of peers that had any since the last one.

use super::PortState;
use super::peer_table::{ConnectedPeer, PeerSlot, PeerTable};
use crate::control::OperationId;
use crate::ring::cells::ProtocolError;
use crate::ring::hints::HintWords;
use crate::ring::wakeup::{FD_ARMED, HINT_ARMED};

/// Passes without work after which a ring is no longer polled.
const QUIET_POLLS: u32 = 32;

/// Interval of sweeps over all rings. Nothing depends on it while all peers set their hints.
const SWEEP_NS: u64 = 10_000_000;

/// Whether the peer of a connection sets hints.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum HintState {
    /// It has none: its ring is always polled.
    #[default]
    None,
    /// This side has sent its hints.
    Shared,
    /// The peer has mapped them, and sets them.
    Mapped,
}

impl ConnectedPeer {
    /// The flags that wake this side for the connection, if those of the port are `armed`. A peer
    /// that sets hints wakes a futex of all peers.
    pub(super) fn wakeup_flags(&self, armed: u32) -> u32 {
        match self.hint_state {
            HintState::Mapped => HINT_ARMED | (armed & FD_ARMED),
            HintState::None | HintState::Shared => armed,
        }
    }

    /// Whether a sleep for this connection needs its own futex word.
    pub(super) fn needs_own_futex(&self) -> bool {
        self.hint_state != HintState::Mapped
    }

    /// Whether steps are left to do without an event of the peer, or space is awaited.
    #[inline]
    pub(super) fn has_queued_work(&self) -> bool {
        !self.active.is_empty() || !self.send_queue.is_empty() || self.wire.has_pending_control()
    }

    /// Whether polling the connection could make progress.
    #[inline]
    fn has_work(&self) -> bool {
        self.wire.consumer.is_ready() || self.has_queued_work()
    }
}

impl PeerSlot {
    /// Whether polling the peer could make progress.
    #[inline]
    pub(super) fn has_work(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.has_work())
    }

    /// Counts a pass without work. Returns whether the ring need not be polled any longer.
    #[inline]
    pub(super) fn count_quiet_poll(&mut self) -> bool {
        self.connection.as_mut().is_some_and(|connection| {
            connection.quiet_polls = connection.quiet_polls.saturating_add(1);
            connection.hint_state == HintState::Mapped && connection.quiet_polls >= QUIET_POLLS
        })
    }
}

impl PeerTable {
    /// Polls the ring of a peer from now on.
    #[inline]
    pub(super) fn activate(&mut self, peer: usize) {
        if let Some(connection) = &mut self.slots[peer].connection {
            connection.quiet_polls = 0;
            if !connection.is_polled {
                connection.is_polled = true;
                self.insert_polled(peer);
            }
        }
    }

    #[cold]
    fn insert_polled(&mut self, peer: usize) {
        let at = self.polled.partition_point(|polled| *polled < peer);
        self.polled.insert(at, peer);
    }

    /// Forgets the connection of a peer, which is no longer there.
    pub(super) fn remove_polled(&mut self, peer: usize) {
        self.polled.retain(|polled| *polled != peer);
    }

    /// The number of futex words that a sleep needs besides that of the hints.
    pub(super) fn own_futex_count(&self) -> usize {
        self.polled_connections().filter(|connection| connection.needs_own_futex()).count()
    }

    /// The connections whose rings are polled.
    pub(super) fn polled_connections(&self) -> impl Iterator<Item = &ConnectedPeer> {
        self.polled.iter().filter_map(|peer| self.slots[*peer].connection.as_deref())
    }

    /// Calls `f` with each connection whose ring is polled.
    pub(super) fn for_polled(&mut self, mut f: impl FnMut(&mut ConnectedPeer)) {
        for peer in &self.polled {
            if let Some(connection) = &mut self.slots[*peer].connection {
                f(connection);
            }
        }
    }

    /// Adds an operation with steps to do.
    pub(super) fn push_active(&mut self, peer: usize, number: OperationId) {
        self.activate(peer);
        self.connection(peer).active.push_back(number);
    }

    /// The peer sets hints from now on.
    pub(super) fn on_hints_mapped(&mut self, peer: usize) -> Result<(), ProtocolError> {
        let connection = self.connection(peer);
        if connection.hint_state != HintState::Shared {
            return Err(ProtocolError("hints that were not shared"));
        }
        connection.hint_state = HintState::Mapped;
        Ok(())
    }

    /// Activates the peers with a message, steps to do or packets to drop among those that are not polled.
    fn sweep(&mut self) {
        for peer in 0..self.slots.len() {
            let is_missed = |connection: &ConnectedPeer| {
                !connection.is_polled
                    && (connection.is_ready()
                        || connection.has_work()
                        || connection.wire.has_stale_packets())
            };
            if self.slots[peer].connection.as_deref().is_some_and(is_missed) {
                self.activate(peer);
            }
        }
    }
}

impl PortState {
    /// Polls the peers that have set their hints. Returns whether there was any.
    #[cold]
    pub(super) fn take_hints(&mut self) -> bool {
        let Some(hints) = self.wakeup.hints.clone() else { return false };
        let peers = &mut self.protocol.peers;
        let mut any = false;
        hints.words().take(|bit| {
            any = true;
            (bit..peers.len()).step_by(HintWords::SLOTS).for_each(|peer| peers.activate(peer));
        });
        any
    }

    /// Stops polling rings that were quiet for `passes`. Each of them is armed first, and polled once more. Returns
    /// whether one of them has something to read.
    #[cold]
    pub(super) fn leave_quiet_rings(&mut self, passes: u32) -> bool {
        let (armed, mut is_any_ready) = (self.wakeup.armed, false);
        let PeerTable { slots, polled, .. } = &mut self.protocol.peers;
        polled.retain(|peer| {
            let Some(connection) = &mut slots[*peer].connection else { return false };
            if connection.hint_state != HintState::Mapped || connection.quiet_polls < passes {
                return true;
            }
            let flags = connection.wakeup_flags(armed);
            if !connection.wire.is_armed(flags) {
                connection.wire.arm_wakeup(flags);
            }
            // After the flags are armed: a message that is not seen here sets the hint.
            let is_ready = connection.is_ready();
            is_any_ready |= is_ready;
            // A packet that woke this side for nothing makes the descriptor of event loops readable until the
            // end of a call, which takes it from the rings that are polled.
            let has_packets = armed & FD_ARMED != 0 && connection.wire.has_stale_packets();
            connection.is_polled = is_ready || has_packets || connection.has_work();
            connection.is_polled
        });
        is_any_ready
    }

    /// Stops polling rings that were quiet for many passes.
    #[inline]
    pub(super) fn leave_rings_after_polls(&mut self) {
        self.leave_quiet_rings(QUIET_POLLS);
    }

    /// Arms the wakeups of all connections, also of those whose rings are not polled. Each of these
    /// is polled once more.
    pub(super) fn arm_all_wakeups(&mut self) {
        self.arm_wakeups();
        let (peers, armed) = (&mut self.protocol.peers, self.wakeup.armed);
        if peers.polled.len() == peers.connected {
            return;
        }
        for connection in peers.connections_mut().filter(|connection| !connection.is_polled) {
            let flags = connection.wakeup_flags(armed);
            if !connection.wire.is_armed(flags) {
                connection.wire.arm_wakeup(flags);
            }
        }
        peers.sweep();
    }

    /// Polls all rings, if that was not done for a while: a peer may have cleared the hints of others.
    pub(super) fn sweep_if_due(&mut self, now_ns: u64) {
        if self.wakeup.hints.is_some()
            && now_ns.saturating_sub(self.wakeup.last_sweep_ns) >= SWEEP_NS
        {
            self.wakeup.last_sweep_ns = now_ns;
            self.protocol.peers.sweep();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::{Duration, Instant};

    use crate::{Endpoint, Peer, Source};

    const PEERS: usize = 40;

    /// An endpoint with many peers, all in this process.
    struct Hub {
        endpoint: Endpoint,
        peers: Vec<(Endpoint, Peer)>,
    }

    impl Hub {
        fn new(name: &str) -> Self {
            let name = |side: usize| format!("{name}-{side}-{}", std::process::id());
            let endpoint = Endpoint::open(&name(PEERS)).unwrap();
            let connect = |side: usize| {
                let peer = Endpoint::open(&name(side)).unwrap();
                let hub = peer.connect(endpoint.name()).unwrap();
                (peer, hub)
            };
            let peers = (0..PEERS).map(connect).collect();
            Self { endpoint, peers }
        }

        /// Makes progress until only connections that cannot have hints are polled.
        fn settle(&self) {
            let deadline = Instant::now() + Duration::from_secs(60);
            while self.polled() > 0 {
                assert!(Instant::now() < deadline, "{} rings are still polled", self.polled());
                for (peer, _) in &self.peers {
                    peer.progress();
                }
                self.endpoint.progress();
            }
        }

        fn polled(&self) -> usize {
            self.endpoint.port().lock().protocol.peers.polled.len()
        }

        fn send(&self, from: usize) {
            let (peer, hub) = &self.peers[from];
            peer.send(*hub, from as u64, &[from as u8]).unwrap();
        }

        fn receive(&self) -> u8 {
            let received = self.endpoint.irecv(Source::Any, 0, 0, vec![0u8]).unwrap();
            let received = received.wait_timeout(Duration::from_secs(60)).expect("a lost message");
            received.unwrap().1[0]
        }
    }

    #[test]
    fn quiet_rings_are_not_polled_and_their_next_message_is_received() {
        let hub = Hub::new("quiet-rings");
        hub.settle();
        assert!(hub.endpoint.port().lock().wakeup.has_hints());
        for from in [3, 3, 39, 0, 17] {
            hub.send(from);
            assert_eq!(hub.receive(), from as u8);
            assert!(hub.polled() <= 4, "only those that have sent");
        }
        hub.settle();
    }

    #[test]
    fn messages_of_all_peers_at_once_are_received_by_a_sleeper() {
        let hub = Hub::new("all-at-once");
        hub.settle();
        for round in 0..5 {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    // Longer than the thread below sleeps on its futex: it changes to the epoll set.
                    std::thread::sleep(Duration::from_millis(40 * round));
                    (0..PEERS).for_each(|from| hub.send(from));
                });
                let mut seen: Vec<u8> = (0..PEERS).map(|_| hub.receive()).collect();
                seen.sort_unstable();
                assert!(seen.into_iter().eq(0..PEERS as u8));
            });
        }
    }

    #[test]
    fn a_peer_that_clears_the_hints_of_others_only_delays_their_messages() {
        let hub = Hub::new("cleared-hints");
        hub.settle();
        hub.send(5);
        let state = hub.endpoint.port().lock();
        let hints = state.wakeup.hints.clone().unwrap();
        drop(state);
        hints.words().take(|_| {});
        assert_eq!(hub.receive(), 5);
        // The one that wakes no sleeper takes the flags before others do.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for from in 0..PEERS {
                    hints.words().wakeup().disarm();
                    hub.send(from);
                    hints.words().take(|_| {});
                }
            });
            for _ in 0..PEERS {
                hub.receive();
            }
        });
    }

    #[test]
    fn an_event_loop_is_woken_by_a_peer_whose_ring_is_not_polled() {
        let hub = Hub::new("loop-of-many");
        hub.settle();
        let ready = hub.endpoint.port().ready_fd().unwrap();
        for from in [1, 30] {
            // What is left of connecting may make it readable for a while.
            hub.settle();
            hub.send(from);
            assert!(ready.wait(Some(Duration::from_secs(60))), "not woken");
            assert_eq!(hub.receive(), from as u8);
            hub.settle();
        }
        // A packet that came after its message is dropped by the next call.
        let deadline = Instant::now() + Duration::from_secs(60);
        while ready.wait(Some(Duration::ZERO)) {
            assert!(Instant::now() < deadline, "readable without a reason");
            hub.endpoint.progress();
        }
    }

    #[test]
    fn an_answer_to_hints_that_nobody_shared_ends_the_connection() {
        let (here, there) = ("hintless-here", "hintless-there");
        let name = |side: &str| format!("{side}-{}", std::process::id());
        let (here, there) =
            (Endpoint::open(&name(here)).unwrap(), Endpoint::open(&name(there)).unwrap());
        let peer = there.connect(here.name()).unwrap();
        let mut state = there.port().lock();
        let wire = state.protocol.peers.wire(peer.index);
        wire.send_control(crate::control::ControlMessage::HintsMapped);
        drop(state);
        let deadline = Instant::now() + Duration::from_secs(60);
        while !here.peers().is_empty() {
            assert!(Instant::now() < deadline, "the liar is still connected");
            here.progress();
        }
    }
}
