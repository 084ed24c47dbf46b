//! What a connection has to do with windows: giving peers what they can map, and the way to theirs.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use memferry_sys::packet_socket::PacketSocket;
use memferry_sys::peer_process;

use super::Wire;
use crate::ring::layout::Memory;
use crate::window::Exposure;
use crate::window::board::Board;
use crate::window::peer_memory::Parts;

impl Wire {
    /// Gives the other side the region that a window lies in, if it lies in one.
    pub(crate) fn share_window(&mut self, exposure: &Exposure) {
        self.region_of(&exposure.piece, exposure.access);
    }

    /// What reaching the other side's windows takes. Asked for once.
    pub(crate) fn window_parts(&mut self, own_board: &Board) -> io::Result<Parts> {
        let board = match self.their_board.take() {
            Some(board) => board,
            None => own_board.view()?,
        };
        Ok(Parts {
            board,
            pid: self.peer.credentials.pid,
            is_self: self.is_self(),
            reach: self.reach,
            rings: self.memory.clone(),
            socket: self.socket.as_ref().map(PacketSocket::try_clone).transpose()?,
            alive: self.process.as_ref().map(OwnedFd::try_clone).transpose()?,
            imported: self.imported.clone(),
        })
    }

    /// The other side, when its connection ends: it may be in the middle of an access.
    pub(crate) fn absent(&mut self) -> Option<Absent> {
        // Without a descriptor left it counts as alive.
        let socket = self.socket.as_ref()?.try_clone().ok();
        let process = self.process.as_ref().and_then(|process| process.try_clone().ok());
        Some(Absent { memory: self.memory.clone(), socket, process })
    }

    /// Whether the other side has been given any way to memory of this side.
    pub(crate) fn could_access(&self) -> bool {
        let (reads, writes) = self.their_reach;
        reads || writes || self.is_self() || self.exported.is_any()
    }

    /// The connection ends, though other descriptors of its socket may stay open for a while.
    pub(crate) fn hang_up(&self) {
        if let Some(socket) = &self.socket {
            socket.hang_up();
        }
    }
}

/// A peer whose connection has ended. Its process may live on.
#[derive(Debug)]
pub(crate) struct Absent {
    memory: Memory,
    socket: Option<PacketSocket>,
    process: Option<OwnedFd>,
}

impl Absent {
    /// Whether it says that it accesses a window.
    pub(crate) fn is_at(&self, window: u32) -> bool {
        self.memory.other_visits().is_at(window)
    }

    /// Whether it lives and is in the middle of an access. A process without a descriptor is taken
    /// to have ended with its socket.
    pub(crate) fn is_accessing(&self) -> bool {
        self.memory.other_visits().is_anywhere()
            && match (&self.process, &self.socket) {
                (Some(process), _) => !peer_process::has_ended(process.as_fd()),
                (None, Some(socket)) => peer_process::is_alive(None, socket.as_fd()),
                (None, None) => true,
            }
    }
}
