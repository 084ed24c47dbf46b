//! The progress thread of a port, which makes progress while the application computes.

use std::io;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memferry_sys::sync::lock;

use super::Port;
use crate::error::{ConnectError, Error};

/// The progress thread of a port.
#[derive(Debug)]
pub(crate) struct ProgressThread(JoinHandle<()>);

impl ProgressThread {
    fn start(port: &Arc<Port>) -> io::Result<Self> {
        let port: Weak<Port> = Arc::downgrade(port);
        let run = move || {
            let Some(port) = port.upgrade() else { return };
            // Does not spin: the cores belong to the application.
            port.block(false, None, |state| state.is_closed().then_some(()));
        };
        memferry_sys::thread::spawn("memferry-message", run).map(Self)
    }

    /// Waits up to one second for the thread to end. Does not wait for the calling thread itself. A thread
    /// that copies from memory of a peer that is not resident ends by itself later.
    pub(crate) fn join(self) {
        const JOIN_TIMEOUT: Duration = Duration::from_secs(1);
        const JOIN_POLL_SLEEP: Duration = Duration::from_micros(50);
        if self.0.thread().id() == std::thread::current().id() {
            return;
        }
        let began = Instant::now();
        while !self.0.is_finished() && began.elapsed() < JOIN_TIMEOUT {
            std::thread::sleep(JOIN_POLL_SLEEP);
        }
        if self.0.is_finished() {
            let _ = self.0.join();
        }
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

    /// Whether the port was closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.protocol.peers.closed
    }
}
