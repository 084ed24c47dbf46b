//! Windows in a port: what it exposes, who is in it, and how the memory of peers is reached.

use std::sync::Arc;

use memferry_memory::handle::ProcessHandle;

use super::operations::{Deed, Leaving};
use super::{Peer, Port, State};
use crate::connect::hello::Identity;
use crate::error::{ConnectError, Error, Gone, ValidationError};
use crate::quarantine::{Claim, Claimed};
use crate::report::{Ending, ReportKind};
use crate::window::Exposure;
use crate::window::board::{Board, Name};
use crate::window::peer_memory::PeerMemory;
use crate::window::windows::Windows;
use crate::wire::Number;

impl Port {
    /// What accesses to windows of peers need, made when first asked for.
    pub(crate) fn windows(&self) -> Result<Arc<Windows>, Error> {
        if let Some(windows) = self.windows.get() {
            return Ok(windows.clone());
        }
        let state = self.enter();
        let (settings, stream_bytes) = (state.settings.lookup, state.facts.stream_bytes);
        let made = Windows::new(settings, super::streaming(), stream_bytes)
            .map_err(ConnectError::system("making the lookup of windows"))?;
        // With the lock: made once, and closed with the port.
        Ok(self.windows.get_or_init(|| Arc::new(made)).clone())
    }

    /// What the lookup of windows has counted.
    pub(crate) fn lookup_counters(&self) -> Option<memferry_memory::lookup::Counters> {
        self.windows.get().map(|windows| windows.counters())
    }

    /// The memory that the lookup of windows takes.
    pub(crate) fn lookup_memory(&self) -> Option<memferry_memory::lookup::MemoryUse> {
        self.windows.get().map(|windows| windows.memory())
    }

    /// Carries out accesses that wait, for a thread that is about to wait for one of them.
    #[inline]
    pub(crate) fn help_accesses(&self, number: Number) {
        if let Some(windows) = self.windows.get() {
            windows.help(self, number);
        }
    }
}

/// Forgets how memory of a peer is reached, which waits for accesses under way. One that waits for the
/// peer's memory may never end: then a thread waits for it, and nobody else.
fn forget(memory: &PeerMemory, forget: impl FnOnce() + Send + 'static) {
    if !memory.lane.is_running() {
        return forget();
    }
    if memferry_sys::thread::spawn("memferry-forget", forget).is_err() {
        tracing::warn!("no thread for forgetting a peer: its translations stay");
    }
}

/// The number by which handles name an endpoint: a part of what tells endpoints apart.
fn public_number(identity: Identity) -> ProcessHandle {
    let generation = ((identity.0 >> 16) as u32).max(1);
    ProcessHandle::new(identity.0 as u16, generation).expect("it is not 0")
}

impl State {
    /// The list of this side's windows, made when first asked for.
    pub(crate) fn board(&mut self) -> std::io::Result<Arc<Board>> {
        if let Some(board) = &self.board {
            return Ok(board.clone());
        }
        let board = Arc::new(Board::new()?);
        self.board = Some(board.clone());
        Ok(board)
    }

    /// The number by which handles of this side's windows name it.
    pub(crate) fn own_public_number(&self) -> ProcessHandle {
        public_number(self.identity)
    }

    /// The number by which handles of a peer's windows name it.
    pub(crate) fn public_number(&self, peer: Peer) -> Result<ProcessHandle, Error> {
        Ok(public_number(self.facts_of(peer)?.peer.id.identity))
    }

    /// A new window: those peers that can map it get it.
    pub(crate) fn show_to_peers(&mut self, exposure: Exposure) {
        for connection in self.peers.iter_mut().filter_map(|slot| slot.connection.as_mut()) {
            connection.wire.share_window(&exposure);
            connection.wire.announce();
        }
        self.exposures.push(exposure);
    }

    /// Somebody who is in the middle of an access to a window: a peer, or one that was.
    pub(crate) fn visitor(&mut self, window: Name) -> Option<Option<Peer>> {
        self.absent.retain(|writer| writer.is_visiting());
        if self.absent.iter().any(|writer| writer.is_at(window.number)) {
            return Some(None);
        }
        let visits = |index: &usize| {
            let connection = self.peers[*index].connection.as_ref();
            connection.is_some_and(|connection| connection.wire.is_visiting(window.number))
        };
        (0..self.peers.len()).find(visits).map(|index| Some(self.peer(index)))
    }

    /// Everybody who is in the middle of an access to a window.
    pub(crate) fn visits(&mut self, window: Name) -> Vec<Claim> {
        let number = window.number;
        let connections = self.peers.iter_mut().filter_map(|slot| slot.connection.as_mut());
        let present = connections.filter(|connection| connection.wire.is_visiting(number));
        let absent = self.absent.iter().filter(|writer| writer.is_at(number)).cloned();
        let writers = present.map(|connection| connection.wire.writer()).chain(absent);
        writers.map(|writer| Claim::new(writer, Claimed::Window(number))).collect()
    }

    /// Whether others can connect to this side.
    pub(crate) fn takes_callers(&self) -> bool {
        self.listener.is_some()
    }

    /// How the last peer went, if no other process is connected.
    pub(crate) fn last_gone(&self) -> Option<Gone> {
        let is_other = |slot: &super::PeerSlot| {
            slot.connection.as_ref().is_some_and(|connection| !connection.wire.is_self())
        };
        if self.peers.iter().any(is_other) {
            return None;
        }
        let gone = self.peers.iter().find_map(|slot| slot.gone.clone());
        Some(gone.unwrap_or(Gone::Ended))
    }

    /// How the memory of a peer is reached.
    pub(crate) fn peer_memory(
        &mut self,
        peer: Peer,
        windows: &Windows,
    ) -> Result<Arc<PeerMemory>, Error> {
        let index = self.find(peer)?;
        windows.set_spare_cores(self.spare_cores() > 0);
        let own_board = self.board().map_err(ConnectError::system("making shared memory"))?;
        let Some(connection) = self.peers[index].connection.as_mut() else {
            return Err(self.gone(index));
        };
        if let Some(memory) = &connection.wire.window_peer {
            return Ok(memory.clone());
        }
        let parts = connection
            .wire
            .window_parts(&own_board)
            .map_err(ConnectError::system("reaching the windows of a peer"))?;
        let memory = windows.add_peer(parts)?;
        connection.wire.window_peer = Some(memory.clone());
        Ok(memory)
    }

    /// A connection has ended: its windows are gone, and whoever is still in one of ours is
    /// remembered.
    pub(super) fn lose_windows(&mut self, peer: usize, wire: &mut crate::connection::Wire) {
        let gone = self.peers[peer].gone.clone().unwrap_or(Gone::Ended);
        if let (Some(memory), Some(windows)) = (wire.window_peer.take(), self.windows.get()) {
            memory.retire(gone);
            let windows = windows.clone();
            let forget = move || forget(&memory.clone(), move || windows.remove_peer(&memory));
            self.operations.leavings.push(Leaving::Forget(Box::new(forget)));
        }
        self.absent.retain(|writer| writer.is_visiting());
        // After the end was told: whoever begins a visit from now on finds that out first.
        if !self.exposures.is_empty() && wire.memory.other_visits().is_anywhere() {
            self.absent.extend(Some(wire.writer()).filter(|writer| writer.is_visiting()));
        }
    }

    /// A place for an access that is not over at once.
    pub(crate) fn begin_access(
        &mut self,
        kind: ReportKind,
        ending: Option<Ending>,
    ) -> Result<Number, Error> {
        if self.closed {
            return Err(Error::Closed);
        }
        if !self.operations.has_room() {
            return Err(ValidationError::TooManyOperations(self.operations.count()).into());
        }
        Ok(self.operations.insert(Deed::Access(kind), ending))
    }

    /// A region of a peer is mapped from now on, or is gone.
    pub(super) fn region_changed(&mut self, peer: usize, region: u32) {
        let Some(connection) = &self.peers[peer].connection else { return };
        if let (Some(memory), Some(windows)) = (&connection.wire.window_peer, self.windows.get()) {
            // Translations of before are right until then: a region that is gone has no open window,
            // and one that is new is reached in another way.
            let (windows, memory) = (windows.clone(), memory.clone());
            let forget =
                move || forget(&memory.clone(), move || windows.forget_region(&memory, region));
            self.operations.leavings.push(Leaving::Forget(Box::new(forget)));
        }
    }
}
