//! Closing a port: operations complete, peers are notified, and memory is released.

use std::time::{Duration, Instant};

use memferry_sys::sync::lock;

use super::operations::OperationKind;
use super::protocol::Protocol;
use super::wait::PortGuard;
use super::{Port, PortState};
use crate::error::{DisconnectReason, Error};

impl Port {
    /// Closes the port. Messages in the rings are still delivered; other operations fail with `Closed`.
    pub(crate) fn close(&self) {
        if self.check_fork().is_err() {
            return;
        }
        // Before all else, and without the lock: the threads that execute accesses lock the port to complete
        // them.
        if let Some(windows) = self.rma_engine.get() {
            windows.close(self);
        }
        let mut state = self.lock();
        if state.protocol.peers.closed {
            drop(state);
        } else {
            // Without copies: a close does not wait for memory of a peer.
            state.progress_steps();
            self.wake_sleeper(&mut state);
            state.close();
            self.wait_quiesced(state);
        }
        crate::quarantine::sweep();
        // Without the locks of the handles: the threads may run code of the application that closes the port
        // too.
        let accepting = lock(&self.accept_thread).take();
        if let Some(accepting) = accepting {
            accepting.join();
        }
        let background = lock(&self.progress_thread).take();
        if let Some(background) = background {
            background.join();
        }
    }
}

impl Port {
    /// Waits up to one second for live peers to finish the chunks that they copy. A stopped peer does not
    /// delay the close further: its operations complete later.
    fn wait_quiesced<'a>(&'a self, mut state: PortGuard<'a>) {
        const QUIESCE_TIMEOUT: Duration = Duration::from_secs(1);
        const QUIESCE_POLL_SLEEP: Duration = Duration::from_micros(100);
        let began = Instant::now();
        while !state.protocol.operations.quiescing.is_empty() && began.elapsed() < QUIESCE_TIMEOUT {
            if !state.protocol.finish_quiesced() {
                drop(state);
                std::thread::sleep(QUIESCE_POLL_SLEEP);
                state = self.lock();
            }
        }
    }

    /// Whether memory of operations is in use although the port is closed: by a peer that is stopped while it
    /// writes there, or by an access in flight.
    pub(crate) fn is_busy(&self) -> bool {
        if self.check_fork().is_err() {
            return false;
        }
        let mut state = self.lock();
        state.protocol.finish_quiesced();
        state.protocol.has_pending_operations()
    }
}

impl PortState {
    fn close(&mut self) {
        self.protocol.peers.closed = true;
        // The transport must not access the memory of operations that complete here.
        self.protocol.peers.remote.drop_transport();
        self.protocol.peers.connects_in_flight = 0;
        self.windows.close();
        self.protocol.peers.listener = None;
        for peer in 0..self.protocol.peers.len() {
            if self.protocol.peers[peer].connection.is_some() {
                self.disconnect(peer, DisconnectReason::Closed);
            }
        }
        self.protocol.close_buffers();
        self.protocol.matches = crate::matching::MatchQueues::default();
        // The threads that execute accesses to windows complete them.
        let is_over = |deed: &OperationKind| {
            !matches!(deed, OperationKind::Rma(_)) && !Protocol::is_kind_quiescing(deed)
        };
        for number in self.protocol.operations.pending_ids(is_over) {
            self.protocol.operations.finish(number, Err(Error::Closed));
        }
    }
}
