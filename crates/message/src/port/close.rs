//! The end of a port: everything under way ends, peers are told, nothing stays behind.

use memferry_sys::sync::lock;

use super::operations::Deed;
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
        if !state.closed {
            state.progress();
            self.wake_sleeper(&mut state);
            state.close();
        }
        drop(state);
        // The thread may run code of the application's that closes too: not with this lock held.
        let background = lock(&self.background).take();
        if let Some(background) = background {
            background.join();
        }
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
        let began_ns = memferry_sys::clock::now_ns();
        for peer in 0..self.peers.len() {
            let Some(mut connection) = self.peers[peer].connection.take() else { continue };
            connection.wire.memory.end();
            let matched = |deed: &Deed| {
                matches!(deed, Deed::Receive(receiving)
                    if receiving.peer == peer && !matches!(receiving.stage, ReceiveStage::Posted))
            };
            for number in self.operations.numbers(matched) {
                self.let_go(number, &mut connection.wire, began_ns);
            }
            self.lose_windows(peer, &mut connection.wire);
            connection.wire.post(Note::Close);
            connection.wire.announce();
            connection.wire.hang_up();
            self.peers[peer].gone = Some(crate::error::Gone::Closed);
        }
        self.matching = crate::matching::Matching::default();
        // Accesses to windows are ended by whoever carries them out.
        for number in self.operations.numbers(|deed| !matches!(deed, Deed::Access(_))) {
            self.operations.finish(number, Err(Error::Closed));
        }
    }
}
