//! The end of a port: everything under way ends, peers are told, nothing stays behind.

use std::time::{Duration, Instant};

use memferry_sys::sync::lock;

use super::operations::Deed;
use super::wait::Entered;
use super::{Port, State};
use crate::error::Error;
use crate::path::ReceiveStage;
use crate::wire::Note;

impl Port {
    /// Closes the port. What is in the rings still arrives; operations under way end as closed.
    pub(crate) fn close(&self) {
        if self.check_fork().is_err() {
            return;
        }
        // First, and without the lock: who carries out accesses needs it to end them.
        if let Some(windows) = self.windows.get() {
            windows.close(self);
        }
        let mut state = self.enter();
        if state.closed {
            drop(state);
        } else {
            // Without copies: whoever closes does not wait for memory of a peer.
            state.step_all();
            self.wake_sleeper(&mut state);
            state.close();
            self.await_held(state);
        }
        crate::quarantine::sweep();
        // The thread may run code of the application's that closes too: not with this lock held.
        let background = lock(&self.background).take();
        if let Some(background) = background {
            background.join();
        }
    }
}

impl Port {
    /// Gives live peers a moment to finish the chunks that they copy. One that is stopped keeps
    /// nobody from closing: what it holds ends later.
    fn await_held<'a>(&'a self, mut state: Entered<'a>) {
        const MOMENT: Duration = Duration::from_secs(1);
        const NAP: Duration = Duration::from_micros(100);
        let began = Instant::now();
        while !state.held.is_empty() && began.elapsed() < MOMENT {
            if !state.release_held() {
                drop(state);
                std::thread::sleep(NAP);
                state = self.enter();
            }
        }
    }

    /// Whether memory of operations is in use although the port is closed: by a peer that is
    /// stopped while it writes there, or by an access that has not come back.
    pub(crate) fn is_busy(&self) -> bool {
        if self.check_fork().is_err() {
            return false;
        }
        let mut state = self.enter();
        state.release_held();
        state.is_any_underway()
    }
}

impl State {
    fn close(&mut self) {
        self.closed = true;
        // It must not touch the memory of operations that end here.
        self.carried.drop_carrier();
        self.calls = 0;
        if let Some(board) = &self.board {
            board.close_all();
        }
        self.listener = None;
        for peer in 0..self.peers.len() {
            let Some(mut connection) = self.peers[peer].connection.take() else { continue };
            connection.wire.memory.end();
            // Those whose memory may be in use.
            let begun = |deed: &Deed| match deed {
                Deed::Receive(receiving) => {
                    receiving.peer == peer && !matches!(receiving.stage, ReceiveStage::Posted)
                }
                Deed::Send(sending) => sending.peer == peer && sending.copying.is_some(),
                _ => false,
            };
            for number in self.operations.numbers(begun) {
                self.abandon(number, &mut connection.wire, &Error::Closed);
            }
            self.lose_windows(peer, &mut connection.wire);
            connection.wire.post(Note::Close);
            connection.wire.announce();
            connection.wire.hang_up();
            self.peers[peer].gone = Some(crate::error::Gone::Closed);
        }
        self.matching = crate::matching::Matching::default();
        // Accesses to windows are ended by whoever carries them out.
        let is_over = |deed: &Deed| !matches!(deed, Deed::Access(_)) && !Self::is_held(deed);
        for number in self.operations.numbers(is_over) {
            self.operations.finish(number, Err(Error::Closed));
        }
    }
}
