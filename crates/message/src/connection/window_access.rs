//! Windows on a connection: sharing the memory of own windows, and access to the peer's.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use memferry_sys::seqpacket::SeqPacketSocket;

use super::Connection;
use crate::quarantine::Writer;
use crate::window::ExposedRange;
use crate::window::peer_memory::PeerMemoryParts;
use crate::window::window_table::WindowTable;

impl Connection {
    /// Shares the region that a window lies in with the peer, if there is one.
    pub(crate) fn share_window(&mut self, exposure: &ExposedRange) {
        self.shared_region_id(&exposure.segment, exposure.access);
    }

    /// Collects what is needed to access the peer's windows. Takes nothing from the connection: a
    /// call that fails, for example for lack of a descriptor, can be repeated.
    pub(crate) fn peer_memory_parts(&self, own_table: &WindowTable) -> io::Result<PeerMemoryParts> {
        let table = match &self.peer_windows {
            Some(table) => table.view(),
            // Only a connection to itself uses this side's table: its addresses have no meaning on
            // another peer.
            None if self.is_self() => own_table.view()?,
            None => return Err(io::Error::other("the peer has no window table")),
        };
        Ok(PeerMemoryParts {
            windows: Arc::new(table),
            pid: self.peer.id.credentials.pid,
            name: self.peer.label(),
            is_self: self.is_self(),
            access: self.access,
            connection_memory: self.memory.clone(),
            socket: self.socket.as_ref().map(SeqPacketSocket::try_clone).transpose()?,
            process_fd: self.process.as_ref().map(OwnedFd::try_clone).transpose()?,
            imported: self.imported.clone(),
        })
    }

    /// The peer as a writer to memory of this side, which may outlive the connection. Without a
    /// descriptor the peer counts as alive.
    pub(crate) fn writer(&mut self) -> Arc<Writer> {
        if let Some(writer) = &self.writer {
            return writer.clone();
        }
        let process = self.process.as_ref().and_then(|process| process.try_clone().ok());
        // Only on kernels without pidfds.
        let socket = match &process {
            Some(_) => None,
            None => self.socket.as_ref().and_then(|socket| socket.try_clone().ok()),
        };
        let pid = self.peer.id.credentials.pid;
        let writer = Writer::new(self.memory.clone(), pid, process, socket);
        self.writer = Some(writer.clone());
        writer
    }

    /// Returns whether the peer may be able to access memory of this side: it has reported access,
    /// has not reported yet, or was given a region. An access that it no longer has may still be in
    /// use.
    pub(crate) fn could_access(&self) -> bool {
        !self.access_caps_sent || self.had_access_to_us || self.is_self() || self.exported.has_any()
    }

    /// Returns whether the peer accesses a window of this side. A peer whose socket is closed may
    /// still be copying; one that has exited is not.
    pub(crate) fn is_accessing(&self, window: u32) -> bool {
        self.memory.peer_access().is_accessing(window) && self.could_access() && !self.has_exited()
    }

    /// Shuts the socket down. Other descriptors of the socket may stay open.
    pub(crate) fn shutdown(&self) {
        if let Some(socket) = &self.socket {
            socket.shutdown();
        }
    }
}
