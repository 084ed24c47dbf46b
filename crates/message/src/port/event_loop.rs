//! The descriptor for event loops: readable while there is work to do or a result to collect.
//!
//! Events of peers make an epoll set of sockets and processes readable ([`super::wakeup`]), on which threads
//! of this port sleep too. Results to collect signal a separate event, because they must not wake threads
//! that sleep for something else.

use std::sync::Arc;

use memferry_sys::epoll::EpollSet;

use super::{Port, PortState};
use crate::error::{ConnectError, DisconnectReason, Error};
use crate::ring::wakeup::FD_ARMED;

/// Maximum number of polls at the end of a call. What arrives after them is left to the next call.
const MAX_REARM_ROUNDS: u32 = 100;

impl Port {
    /// Returns a descriptor that is readable while there is work to do or a result to collect.
    pub(crate) fn ready_fd(&self) -> Result<Arc<EpollSet>, Error> {
        let mut state = self.lock();
        let PortState { wakeup, protocol, .. } = &mut *state;
        let set = wakeup
            .event_loop_set(&mut protocol.peers)
            .map_err(ConnectError::system("making a descriptor for event loops"))?;
        state.wakeup.armed |= FD_ARMED;
        state.arm_all_wakeups();
        Ok(set)
    }

    /// Makes the descriptor of [`Port::ready_fd`] unreadable for ever.
    pub(crate) fn disable_ready_fd(&self) {
        self.lock().wakeup.disable_event_loop_fd();
    }
}

impl PortState {
    /// Drains wakeups from the sockets and arms new ones, at the end of every call.
    #[cold]
    pub(super) fn rearm_event_loop(&mut self) {
        self.wakeup.new_peer_calls = self.wakeup.new_peer_calls.saturating_sub(1);
        // A sleeper drains the event itself.
        if self.wakeup.has_backlog && !self.wakeup.has_sleeper {
            self.wakeup.clear_backlog();
        }
        for _ in 0..MAX_REARM_ROUNDS {
            // The others are armed since they were last polled.
            for at in 0..self.protocol.peers.polled.len() {
                let Some(&peer) = self.protocol.peers.polled.get(at) else { continue };
                let Some(connection) = &mut self.protocol.peers[peer].connection else { continue };
                let flags = connection.wakeup_flags(self.wakeup.armed);
                let wire = &mut connection.wire;
                if wire.is_armed(flags) && !wire.has_stale_packets() {
                    continue;
                }
                // In this order: a packet that is sent after `arm_wakeup` must stay in the socket.
                wire.disarm_wakeup();
                let drained = wire.drop_stale_packets();
                wire.arm_wakeup(flags);
                // Claims that the peer published before that must be polled again.
                connection.has_runnable |= !connection.active.is_empty();
                if let Err(nonsense) = drained {
                    self.disconnect(peer, DisconnectReason::ProtocolViolation(nonsense.0));
                }
            }
            if !self.has_ready_ring() || !self.progress_steps() {
                return;
            }
        }
        // A peer that writes faster than this side reads does not delay the return of the call.
        self.wakeup.set_backlog();
    }

    /// Makes the descriptor readable exactly while there is work, at the end of every call.
    pub(super) fn update_ready_event(&mut self) {
        if self.wakeup.has_event_loop() {
            let is_ready = self.has_pending_work();
            self.wakeup.set_ready(is_ready);
        }
    }

    /// Whether the application should call without an event of a peer: for outcomes, new peers, messages or copies
    /// with steps left, or because the port is closed or its peer disconnected.
    fn has_pending_work(&mut self) -> bool {
        self.wakeup.new_peer_calls > 0
            || self.protocol.operations.has_uncollected()
            || self.protocol.matches.unexpected_len() > 0
            || self.protocol.peers.closed
            || self.protocol.peers.is_peer_disconnected()
            || self.protocol.peers.has_runnable()
            // Engines wake no thread, so they are polled.
            || self.protocol.is_offloading()
    }
}
