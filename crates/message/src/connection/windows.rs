//! What a connection has to do with windows: giving peers what they can map, and the way to theirs.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use memferry_sys::packet_socket::PacketSocket;

use super::Wire;
use crate::quarantine::Writer;
use crate::window::Exposure;
use crate::window::board::Board;
use crate::window::peer_memory::Parts;

impl Wire {
    /// Gives the other side the region that a window lies in, if it lies in one.
    pub(crate) fn share_window(&mut self, exposure: &Exposure) {
        self.region_of(&exposure.piece, exposure.access);
    }

    /// What reaching the other side's windows takes. Takes nothing from the connection: a call that
    /// fails, for want of a descriptor say, can be made again.
    pub(crate) fn window_parts(&self, own_board: &Board) -> io::Result<Parts> {
        let board = match &self.their_board {
            Some(board) => board.clone(),
            // This side's own windows are those of no other peer, whatever is missing: their
            // addresses mean something else there.
            None if self.is_self() => Arc::new(own_board.view()?),
            None => return Err(io::Error::other("a peer without a list of its windows")),
        };
        Ok(Parts {
            board,
            pid: self.peer.id.credentials.pid,
            is_self: self.is_self(),
            reach: self.reach,
            rings: self.memory.clone(),
            socket: self.socket.as_ref().map(PacketSocket::try_clone).transpose()?,
            alive: self.process.as_ref().map(OwnedFd::try_clone).transpose()?,
            imported: self.imported.clone(),
        })
    }

    /// The other side as somebody who may write to memory of this side, though its connection ends.
    /// Without a descriptor left it counts as alive.
    pub(crate) fn writer(&mut self) -> Arc<Writer> {
        if let Some(writer) = &self.writer {
            return writer.clone();
        }
        let process = self.process.as_ref().and_then(|process| process.try_clone().ok());
        // Only where the kernel does not tell of processes.
        let socket = match &process {
            Some(_) => None,
            None => self.socket.as_ref().and_then(|socket| socket.try_clone().ok()),
        };
        let pid = self.peer.id.credentials.pid;
        let writer = Writer::new(self.memory.clone(), pid, process, socket);
        self.writer = Some(writer.clone());
        writer
    }

    /// Whether the other side may have a way to memory of this side: it was given one, or has not
    /// said yet what it can do. A way that it has lost may be in use still.
    pub(crate) fn could_access(&self) -> bool {
        !self.has_told_reach || self.has_had_reach || self.is_self() || self.exported.is_any()
    }

    /// Whether the other side visits a window of this side. One that has hung up may be in the
    /// middle of a copy; one that has ended is not.
    pub(crate) fn is_visiting(&self, window: u32) -> bool {
        self.memory.other_visits().is_at(window) && self.could_access() && !self.has_ended()
    }

    /// The connection ends, though other descriptors of its socket may stay open for a while.
    pub(crate) fn hang_up(&self) {
        if let Some(socket) = &self.socket {
            socket.hang_up();
        }
    }
}
