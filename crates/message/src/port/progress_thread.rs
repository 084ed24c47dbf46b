//! The progress thread of a port, which makes progress while the application computes.

use std::io;
use std::sync::{Arc, Weak};

use memferry_sys::sync::lock;

use super::Port;
use crate::error::{ConnectError, Error};
use crate::thread::OwnedThread;

/// The progress thread of a port.
#[derive(Debug)]
pub(crate) struct ProgressThread(OwnedThread);

impl ProgressThread {
    fn start(port: &Arc<Port>) -> io::Result<Self> {
        let port: Weak<Port> = Arc::downgrade(port);
        let run = move || {
            let Some(port) = port.upgrade() else { return };
            // Does not spin: the cores belong to the application.
            port.block(false, None, |state| state.is_closed().then_some(()));
        };
        OwnedThread::start("memferry-message", run).map(Self)
    }

    /// Waits for the thread to end, as [`OwnedThread::join`] does.
    pub(crate) fn join(self) {
        self.0.join();
    }
}

impl Port {
    /// Starts the progress thread if there is none.
    pub(crate) fn start_progress_thread(self: &Arc<Self>) -> Result<(), Error> {
        let mut background = lock(&self.progress_thread);
        if background.is_none() {
            let started = ProgressThread::start(self)
                .map_err(ConnectError::system("starting a thread for progress"))?;
            *background = Some(started);
        }
        Ok(())
    }
}

impl super::PortState {
    /// Whether the configuration requests a progress thread.
    pub(crate) fn uses_progress_thread(&self) -> bool {
        self.config.background
    }

    /// The identity of this endpoint or link.
    pub(crate) fn own_identity(&self) -> crate::connect::handshake::EndpointUuid {
        self.protocol.peers.identity
    }

    /// Whether the peer of a link has disconnected and left no message.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.protocol.peers.is_peer_disconnected() && self.protocol.matches.unexpected_len() == 0
    }

    /// Whether the port was closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.protocol.peers.closed
    }
}
