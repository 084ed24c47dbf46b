//! Windows of a port: the ranges it exposes, the peers that access them, and access to memory of peers.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, OnceLock};

use memferry_memory::handle::ProcessHandle;

use super::operations::{DeferredAction, OperationKind};
use super::peer_table::PeerTable;
use super::{Peer, Port, PortState};
use crate::completion::{CompletionKind, CompletionOptions};
use crate::connect::handshake::EndpointUuid;
use crate::connection::Connection;
use crate::control::OperationId;
use crate::error::{ConnectError, DisconnectReason, Error, ValidationError};
use crate::quarantine::{Claim, ClaimKind, Writer};
use crate::region;
use crate::window::peer_memory::PeerMemory;
use crate::window::rma_engine::RmaEngine;
use crate::window::window_table::{WindowId, WindowTable};
use crate::window::{ExposedRange, WatchedWord};

/// The engine for accesses to windows of peers, made at the first access. Shared by a port and its state.
pub(super) type RmaEngineCell = Arc<OnceLock<Arc<RmaEngine>>>;

/// The windows of a port. It reads and writes connections that are passed to it, and no operations: what has
/// to be done without the lock is returned as a [`DeferredAction`].
#[derive(Debug)]
pub(crate) struct WindowState {
    /// The table that peers map, made at the first use.
    table: Option<Arc<WindowTable>>,
    /// Ranges that are exposed at present, by the number of the window.
    pub(crate) exposed_ranges: BTreeMap<u32, ExposedRange>,
    /// Words in windows of this side that threads wait for.
    pub(crate) watched_words: Vec<WatchedWord>,
    /// Disconnected peers that were accessing a window when they disconnected.
    disconnected_accessors: Vec<Arc<Writer>>,
    /// Released regions that peers were notified of.
    announced_releases: usize,
    rma_engine: RmaEngineCell,
}

impl WindowState {
    /// Counters of the window lookup, if there is one.
    pub(super) fn lookup_counters(&self) -> Option<memferry_memory::lookup::LookupCounters> {
        self.rma_engine.get().map(|engine| engine.counters())
    }
}

impl Port {
    /// The engine for accesses to windows of peers, made at the first call.
    pub(crate) fn rma_engine(&self) -> Result<Arc<RmaEngine>, Error> {
        if let Some(engine) = self.rma_engine.get() {
            return Ok(engine.clone());
        }
        let state = self.lock();
        let (lookup, stream_bytes) =
            (state.config.lookup, state.protocol.planner.context.stream_bytes);
        let engine = RmaEngine::new(lookup, super::streaming(), stream_bytes)
            .map_err(ConnectError::system("making the lookup of windows"))?;
        // With the lock held: the engine is made once, and closed with the port.
        Ok(self.rma_engine.get_or_init(|| Arc::new(engine)).clone())
    }

    /// Counters of the window lookup.
    pub(crate) fn lookup_counters(&self) -> Option<memferry_memory::lookup::LookupCounters> {
        self.rma_engine.get().map(|engine| engine.counters())
    }

    /// Memory use of the window lookup.
    pub(crate) fn lookup_memory(&self) -> Option<memferry_memory::lookup::LookupFootprint> {
        self.rma_engine.get().map(|engine| engine.footprint())
    }

    /// Executes queued accesses, for a thread that is about to wait for one of them.
    #[inline]
    pub(crate) fn help_rma(&self, number: OperationId) {
        if let Some(engine) = self.rma_engine.get() {
            engine.help_progress(self, number);
        }
    }
}

/// Invalidates translations of a peer, which waits for accesses in flight. An access to memory that never
/// becomes resident may never end: then a thread of its own waits for it.
fn invalidate_peer(memory: &PeerMemory, invalidate: impl FnOnce() + Send + 'static) {
    if !memory.queue.is_running() {
        return invalidate();
    }
    if memferry_sys::thread::spawn("memferry-forget", invalidate).is_err() {
        tracing::warn!("no thread for forgetting a peer: its translations stay");
    }
}

/// The number by which window handles name an endpoint: a part of its identity.
fn process_handle_of(identity: EndpointUuid) -> ProcessHandle {
    let generation = ((identity.0 >> 16) as u32).max(1);
    ProcessHandle::new(identity.0 as u16, generation).expect("it is not 0")
}

impl WindowState {
    pub(super) fn new(rma_engine: RmaEngineCell) -> Self {
        Self {
            table: None,
            exposed_ranges: BTreeMap::new(),
            watched_words: Vec::new(),
            disconnected_accessors: Vec::new(),
            announced_releases: region::released_epoch(),
            rma_engine,
        }
    }

    /// The table of this side's windows, made at the first call.
    pub(crate) fn table(&mut self) -> io::Result<Arc<WindowTable>> {
        if let Some(table) = &self.table {
            return Ok(table.clone());
        }
        let table = Arc::new(WindowTable::new()?);
        self.table = Some(table.clone());
        Ok(table)
    }

    /// Closes all windows of this side.
    pub(super) fn close(&self) {
        if let Some(table) = &self.table {
            table.close_all();
        }
    }

    /// Adds a window, and shares it with peers that can map it.
    fn expose(&mut self, peers: &mut PeerTable, range: ExposedRange) {
        for connection in peers.connections_mut() {
            connection.wire.share_window(&range);
            connection.wire.ring_doorbell();
        }
        self.exposed_ranges.insert(range.id.index, range);
    }

    /// Shares all windows with a new peer.
    pub(super) fn share_all(&self, wire: &mut Connection) {
        for range in self.exposed_ranges.values() {
            wire.share_window(range);
        }
    }

    /// A peer that is accessing a window. `Some(None)` means that the peer is disconnected.
    fn active_accessor(&mut self, peers: &PeerTable, window: WindowId) -> Option<Option<Peer>> {
        self.disconnected_accessors.retain(|writer| writer.is_accessing_any());
        if self.disconnected_accessors.iter().any(|writer| writer.is_accessing(window.index)) {
            return Some(None);
        }
        let accesses = |index: &usize| {
            let connection = peers[*index].connection.as_ref();
            connection.is_some_and(|connection| connection.wire.is_accessing(window.index))
        };
        (0..peers.len()).find(accesses).map(|index| Some(peers.peer(index)))
    }

    /// Claims of all peers that are accessing a window.
    fn active_accesses(&self, peers: &mut PeerTable, window: WindowId) -> Vec<Claim> {
        let number = window.index;
        let connected = peers.connections_mut();
        let connected = connected.filter(|connection| connection.wire.is_accessing(number));
        let disconnected = self.disconnected_accessors.iter();
        let disconnected = disconnected.filter(|writer| writer.is_accessing(number)).cloned();
        let writers = connected.map(|connection| connection.wire.writer()).chain(disconnected);
        writers.map(|writer| Claim::new(writer, ClaimKind::Window(number))).collect()
    }

    /// Detaches a connection that ends: its windows become unreachable, and an access in flight of the peer
    /// to a window of this side is recorded. Returns the invalidation of its translations.
    pub(super) fn detach(
        &mut self,
        wire: &mut Connection,
        reason: DisconnectReason,
    ) -> Option<DeferredAction> {
        let memory = wire.peer_memory.take();
        let invalidation = memory.zip(self.rma_engine.get().cloned()).map(|(memory, engine)| {
            memory.mark_disconnected(reason);
            let invalidate =
                move || invalidate_peer(&memory.clone(), move || engine.remove_peer(&memory));
            DeferredAction::Invalidate(Box::new(invalidate))
        });
        self.disconnected_accessors.retain(|writer| writer.is_accessing_any());
        // This follows the mark of the connection as closed: a peer that begins an access from now on reads
        // the mark first.
        if !self.exposed_ranges.is_empty() && wire.memory.peer_access().is_active() {
            let writer = Some(wire.writer()).filter(|writer| writer.is_accessing_any());
            self.disconnected_accessors.extend(writer);
        }
        invalidation
    }

    /// The invalidation of a peer's region that was mapped or unmapped. Earlier translations are valid until
    /// it runs: an unmapped region has no open window, and a new one was accessed by another method.
    pub(super) fn region_changed(&self, wire: &Connection, region: u32) -> Option<DeferredAction> {
        let (memory, engine) = (wire.peer_memory.clone()?, self.rma_engine.get()?.clone());
        let invalidate = move || {
            invalidate_peer(&memory.clone(), move || engine.invalidate_region(&memory, region));
        };
        Some(DeferredAction::Invalidate(Box::new(invalidate)))
    }

    /// Whether peers are still to be notified of a released region of this process.
    #[inline]
    pub(super) fn has_unannounced_releases(&self) -> bool {
        self.announced_releases != region::released_epoch()
    }

    /// Notifies peers of released regions of this process, so that they unmap the memory.
    #[cold]
    pub(super) fn announce_released(&mut self, peers: &mut PeerTable) {
        self.announced_releases = region::released_epoch();
        for connection in peers.connections_mut() {
            connection.wire.unshare_released();
            connection.wire.ring_doorbell();
        }
    }

    /// Whether a watched word has changed since the last call. In that case the caller wakes the threads that
    /// wait, and does not sleep.
    pub(super) fn take_word_changes(&mut self) -> bool {
        // Checks all words, because each change is reported once.
        self.watched_words.iter_mut().fold(false, |any, word| word.take_change() | any)
    }
}

impl PortState {
    /// The number by which handles of this side's windows name it.
    pub(crate) fn own_process_handle(&self) -> ProcessHandle {
        process_handle_of(self.protocol.peers.identity)
    }

    /// The number by which handles of a peer's windows name it.
    pub(crate) fn process_handle(&self, peer: Peer) -> Result<ProcessHandle, Error> {
        Ok(process_handle_of(self.protocol.peers.connection_of(peer)?.peer.id.identity))
    }

    /// Adds a window, and shares it with peers that can map it.
    pub(crate) fn expose_range(&mut self, range: ExposedRange) {
        self.windows.expose(&mut self.protocol.peers, range);
    }

    /// A peer that is accessing a window. `Some(None)` means that the peer is disconnected.
    pub(crate) fn active_accessor(&mut self, window: WindowId) -> Option<Option<Peer>> {
        self.windows.active_accessor(&self.protocol.peers, window)
    }

    /// Claims of all peers that are accessing a window.
    pub(crate) fn active_accesses(&mut self, window: WindowId) -> Vec<Claim> {
        self.windows.active_accesses(&mut self.protocol.peers, window)
    }

    /// Access to the memory of a peer.
    pub(crate) fn peer_memory(
        &mut self,
        peer: Peer,
        engine: &RmaEngine,
    ) -> Result<Arc<PeerMemory>, Error> {
        let index = self.protocol.peers.index_of(peer)?;
        engine.set_spare_cores(self.protocol.peers.spare_cores() > 0);
        let table = self.windows.table().map_err(ConnectError::system("making shared memory"))?;
        let Some(connection) = self.protocol.peers[index].connection.as_mut() else {
            return Err(self.protocol.peers.disconnect_error(index));
        };
        if let Some(memory) = &connection.wire.peer_memory {
            return Ok(memory.clone());
        }
        let parts = connection
            .wire
            .peer_memory_parts(&table)
            .map_err(ConnectError::system("reaching the windows of a peer"))?;
        let memory = engine.add_peer(parts)?;
        connection.wire.peer_memory = Some(memory.clone());
        Ok(memory)
    }

    /// Inserts an access that does not complete at once.
    pub(crate) fn start_rma(
        &mut self,
        kind: CompletionKind,
        options: Option<CompletionOptions>,
    ) -> Result<OperationId, Error> {
        if self.protocol.peers.closed {
            return Err(Error::Closed);
        }
        if !self.protocol.operations.has_capacity() {
            return Err(ValidationError::TooManyOperations(self.protocol.operations.count()).into());
        }
        Ok(self.protocol.operations.insert(OperationKind::Rma(kind), options))
    }
}
