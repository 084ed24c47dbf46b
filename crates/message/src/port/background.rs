//! The thread that moves messages on while the application computes.

use std::io;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memferry_sys::sync::lock;

use super::Port;
use crate::error::{ConnectError, Error};

/// The thread of a port.
#[derive(Debug)]
pub(crate) struct Background(JoinHandle<()>);

impl Background {
    fn start(port: &Arc<Port>) -> io::Result<Self> {
        let port: Weak<Port> = Arc::downgrade(port);
        let run = move || {
            let Some(port) = port.upgrade() else { return };
            // Never looks longer than it takes to find nothing: the cores are the application's.
            port.block(false, None, |state| state.is_closed().then_some(()));
        };
        memferry_sys::thread::spawn("memferry-message", run).map(Self)
    }

    /// Waits for the thread to end, unless it is this one, or waits for memory of a peer: then it ends by
    /// itself when that comes.
    pub(crate) fn join(self) {
        const MOMENT: Duration = Duration::from_secs(1);
        const NAP: Duration = Duration::from_micros(50);
        if self.0.thread().id() == std::thread::current().id() {
            return;
        }
        let began = Instant::now();
        while !self.0.is_finished() && began.elapsed() < MOMENT {
            std::thread::sleep(NAP);
        }
        if self.0.is_finished() {
            let _ = self.0.join();
        }
    }
}

impl Port {
    /// Starts the thread if there is none.
    pub(crate) fn run_in_background(self: &Arc<Self>) -> Result<(), Error> {
        let mut background = lock(&self.background);
        if background.is_none() {
            let started = Background::start(self)
                .map_err(ConnectError::system("starting a thread for progress"))?;
            *background = Some(started);
        }
        Ok(())
    }
}

impl super::State {
    /// Whether a thread was asked for.
    pub(crate) fn wants_background(&self) -> bool {
        self.settings.background
    }

    /// Which endpoint or link this is.
    pub(crate) fn own_identity(&self) -> crate::connect::hello::Identity {
        self.identity
    }

    /// Whether the port was closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }
}
