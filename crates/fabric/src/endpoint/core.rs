//! The endpoint core: the Memferry endpoint behind an enabled endpoint, with the mapping from
//! address vector numbers to peers, and from completions to queue entries.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use memferry_message::{
    BufferReceived, CompletionEntry, CompletionKind, Endpoint, Error, MatchSpace, Peer, ReadyFd,
    Source,
};

use super::Bindings;
use super::peers::AvPeerTable;
use super::service::ServiceState;
use super::tracked::{TrackedOp, TrackedOps, TrackedRole, is_tracked};
use super::windows::RmaWindows;
use crate::abi::*;
use crate::address::{Address, AddressLocation, AddressVector, LocalId};
use crate::guard::{FiError, Result};
use crate::mr_table::MrTable;
use crate::queue::{CompletionQueue, Counter, QueuedCompletion, space_flag};
use crate::remote::{Directory, Unavailable};
use crate::warn_once::warn_once;

/// The directory of peers on other hosts, or the reason why there is none.
pub(super) type Remotes = std::result::Result<Arc<Directory>, Unavailable>;

/// High limits: programs post any number of operations, and use any number of peers.
const MAX_OPERATIONS: usize = 1 << 22;
const MAX_PEERS: usize = 1 << 16;
/// A valid MPI program may send any number of messages before the one that is received first.
const MAX_UNEXPECTED: usize = 1 << 24;

/// From this number of senders on, disconnected ones are removed.
const SENDER_SWEEP_THRESHOLD: usize = 64;

/// How long a close waits for messages to leave that were reported as sent.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Opens the Memferry endpoint of a core.
pub(super) fn open_messages(name: &str, auto_progress: bool) -> Result<Endpoint> {
    let builder = Endpoint::builder()
        .max_operations(MAX_OPERATIONS)
        .max_peers(MAX_PEERS)
        .max_unexpected_messages(MAX_UNEXPECTED);
    builder.background(auto_progress).open(name).map_err(|error| {
        warn_once(format_args!("cannot open an endpoint: {error:?}"));
        FiError::from(&error)
    })
}

/// The queue and counter of one kind of operation.
#[derive(Debug, Clone, Default)]
pub(super) struct CompletionBinding {
    pub(super) queue: Option<Arc<CompletionQueue>>,
    pub(super) counter: Option<Arc<Counter>>,
    /// The queue gets only operations that request it, and those that fail.
    pub(super) selective: bool,
}

impl CompletionBinding {
    pub(super) fn is_unbound(&self) -> bool {
        self.queue.is_none() && self.counter.is_none()
    }

    /// Returns whether an operation with these flags makes no entry on success.
    #[inline]
    pub(super) fn is_silent(&self, flags: u64) -> bool {
        (self.selective && flags & FI_COMPLETION == 0) || self.queue.is_none()
    }

    /// Pushes an entry to the queue, if there is one.
    pub(super) fn deliver(&self, entry: QueuedCompletion) {
        if let Some(queue) = &self.queue {
            queue.push(entry);
        }
    }

    /// Counts a completed operation, if there is a counter.
    #[inline]
    pub(super) fn count(&self, succeeded: bool) {
        if let Some(counter) = &self.counter {
            counter.count(succeeded);
        }
    }
}

#[derive(Debug)]
pub(crate) struct EndpointCore {
    /// Closed before the other fields are dropped: operations in flight may use them.
    pub(super) messages: Endpoint,
    /// The core is closing: `messages` is closed, or about to be.
    is_closed: AtomicBool,
    pub(super) sends: CompletionBinding,
    pub(super) receives: CompletionBinding,
    pub(super) writes: CompletionBinding,
    pub(super) reads: CompletionBinding,
    /// Exposed memory of this process, and attached memory of peers.
    pub(super) windows: RmaWindows,
    /// Receives may name one peer.
    is_directed: bool,
    /// Both directions use the same queue and no counter; the queue polls the endpoint itself.
    has_single_queue: bool,
    serves_alone: bool,
    remotes: Remotes,
    vector: Arc<AddressVector>,
    peers: AvPeerTable,
    /// Held while the peer of a number is created or removed: there is only one.
    peer_creation: Mutex<()>,
    /// The identifiers of known senders.
    senders: Mutex<HashMap<Peer, LocalId>>,
    pub(super) tracked: TrackedOps,
    /// Requests of peers to this side, and of this side to peers.
    pub(super) service: ServiceState,
    /// Held while completions are collected for several queues, so that their order is kept. Empty
    /// between calls; kept for its allocation.
    completions: Mutex<Vec<CompletionEntry>>,
}

impl EndpointCore {
    pub(super) fn new(
        messages: Endpoint,
        remotes: Remotes,
        vector: Arc<AddressVector>,
        bindings: &Bindings,
        caps: u64,
        mr_table: Arc<MrTable>,
    ) -> Self {
        let Bindings { sends, receives, reads, writes, .. } = bindings;
        let is_counted = [sends, receives, reads, writes].iter().any(|d| d.counter.is_some());
        let has_single_queue = match (&sends.queue, &receives.queue) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other) && !is_counted,
            _ => false,
        };
        Self {
            messages,
            is_closed: AtomicBool::new(false),
            sends: sends.clone(),
            receives: receives.clone(),
            // RMA uses the queue of sends, and counters of its own.
            writes: CompletionBinding { counter: writes.counter.clone(), ..sends.clone() },
            reads: CompletionBinding { counter: reads.counter.clone(), ..sends.clone() },
            windows: RmaWindows::default(),
            is_directed: caps & FI_DIRECTED_RECV != 0,
            has_single_queue,
            serves_alone: false,
            remotes,
            vector,
            peers: AvPeerTable::default(),
            peer_creation: Mutex::default(),
            senders: Mutex::default(),
            tracked: TrackedOps::default(),
            service: ServiceState::new(mr_table),
            completions: Mutex::default(),
        }
    }

    /// The core, for a thread of the provider that makes progress alone, if peers may send requests:
    /// all completions go through one lock, so that their order is kept.
    pub(super) fn serving_alone(mut self, caps: u64) -> Self {
        self.serves_alone = caps & (FI_RMA | FI_ATOMIC) != 0;
        self.has_single_queue &= !self.serves_alone;
        self
    }

    /// Returns whether a thread of the provider makes progress.
    pub(super) fn serves_alone(&self) -> bool {
        self.serves_alone
    }

    fn bindings(&self) -> [&CompletionBinding; 4] {
        [&self.sends, &self.receives, &self.writes, &self.reads]
    }

    /// Adds the endpoint to its queues and counters.
    pub(super) fn attach(self: &Arc<Self>) -> Result {
        self.vector.add(self);
        for direction in self.bindings() {
            direction.queue.iter().try_for_each(|queue| queue.add(self))?;
            direction.counter.iter().try_for_each(|counter| counter.add(self))?;
        }
        Ok(())
    }

    /// Removes the endpoint from its queues and counters.
    pub(super) fn detach(self: &Arc<Self>) {
        for direction in self.bindings() {
            direction.queue.iter().for_each(|queue| queue.remove(self));
            direction.counter.iter().for_each(|counter| counter.remove(self));
        }
    }

    /// Closes the endpoint. Fails with `FI_EBUSY` while a peer accesses memory of this process, or
    /// may still write to that of an operation, as a stopped process does when it continues. Then
    /// nothing new starts, and this must be called again.
    pub(super) fn close(self: &Arc<Self>) -> Result {
        self.withdraw_all()?;
        if !self.is_closed.swap(true, Ordering::AcqRel) {
            self.flush_replies(CLOSE_TIMEOUT);
            // Injected messages were reported as sent.
            if !self.messages.flush(CLOSE_TIMEOUT) {
                tracing::warn!("closing an endpoint before a peer has received all messages");
            }
            self.detach();
            // Other threads may briefly hold references.
            self.messages.clone().close();
        }
        if self.messages.is_busy() {
            warn_once(format_args!(
                "endpoint closed, but a process is stopped while it writes to the memory of a receive: \
                 keep the memory, and close again when that process continues or has ended"
            ));
            return Err(FiError(FI_EBUSY));
        }
        Ok(())
    }

    pub(crate) fn ready_fd(&self) -> Result<ReadyFd> {
        Ok(self.messages.ready_fd()?)
    }

    /// Returns whether nothing in flight must be polled without a wakeup.
    pub(crate) fn can_block(&self) -> bool {
        self.messages.can_block()
    }

    #[inline]
    pub(crate) fn has_single_queue(&self) -> bool {
        self.has_single_queue
    }

    /// Makes progress, and takes the completions. Up to `limit` messages for posted buffers are passed to `take`,
    /// which must not call the endpoint.
    #[inline]
    pub(crate) fn poll_received(
        &self,
        reports: &mut Vec<CompletionEntry>,
        limit: usize,
        take: impl FnMut(BufferReceived),
    ) -> bool {
        self.messages.poll_received(reports, limit, take)
    }

    /// Makes progress, and pushes completions to queues and counters.
    pub(crate) fn progress(&self) {
        let mut reports = self.completions.lock().unwrap();
        self.messages.poll_completions(&mut reports);
        reports.drain(..).for_each(|report| self.deliver(&report));
        self.return_owed_credits();
    }

    /// Pushes a completion to its queue.
    pub(super) fn deliver(&self, report: &CompletionEntry) {
        if let Some((kind, mut entry)) = self.complete(report) {
            entry.source = self.source_of(report);
            self.binding(kind).deliver(entry);
        }
    }

    #[inline]
    fn binding(&self, kind: CompletionKind) -> &CompletionBinding {
        match kind {
            CompletionKind::Send => &self.sends,
            CompletionKind::Receive | CompletionKind::Service => &self.receives,
            CompletionKind::Put => &self.writes,
            CompletionKind::Get => &self.reads,
        }
    }

    /// Counts a completion, and returns the entry for a queue, if any, with the kind of operation
    /// that determines the queue.
    #[inline]
    pub(crate) fn complete(
        &self,
        report: &CompletionEntry,
    ) -> Option<(CompletionKind, QueuedCompletion)> {
        if is_tracked(report.context) {
            return self.complete_tracked(report);
        }
        let entry = entry_of(report);
        self.binding(report.kind).count(entry.code == 0);
        Some((report.kind, entry))
    }

    /// As [`EndpointCore::complete`], for tracked operations and requests of peers.
    fn complete_tracked(
        &self,
        report: &CompletionEntry,
    ) -> Option<(CompletionKind, QueuedCompletion)> {
        if report.kind == CompletionKind::Service {
            self.serve();
            return None;
        }
        let (mut kind, mut entry) = (report.kind, entry_of(report));
        let done = self.tracked.finish(report.context, report.is_last, entry.code)?;
        (entry.context, entry.code) = (done.context, done.code);
        match done.role {
            TrackedRole::Plain => {}
            TrackedRole::NotifiedWrite(notification) => {
                entry.code = self.finish_notified(&notification, done.code);
            }
            TrackedRole::Atomic { kind: atomic, bytes, .. } => {
                (kind, entry) = self.finish_atomic(atomic, bytes, &done, report);
            }
            TrackedRole::Reply { peer, connection } => {
                self.on_reply_sent(peer, connection);
                return None;
            }
            TrackedRole::Abandoned => return None,
        }
        self.binding(kind).count(entry.code == 0);
        (!done.is_silent || entry.code != 0).then_some((kind, entry))
    }

    /// Completes a part of a tracked operation that could not start.
    pub(super) fn finish_part(&self, kind: CompletionKind, mark: u64, code: c_int) {
        if let Some(done) = self.tracked.finish(mark, false, code) {
            if let TrackedRole::NotifiedWrite(notification) = &done.role {
                self.finish_notified(notification, done.code);
            }
            let (direction, code) = (self.binding(kind), done.code);
            direction.count(code == 0);
            let entry = QueuedCompletion::new(done.context, FI_RMA);
            direction.deliver(QueuedCompletion { code, ..entry });
        }
    }

    /// The number of the sender of a message.
    pub(crate) fn source_of(&self, report: &CompletionEntry) -> u64 {
        let number = match (report.kind, report.peer) {
            (CompletionKind::Receive, Some(peer)) if report.envelope.space != MatchSpace::Reply => {
                self.number_of(peer)
            }
            _ => None,
        };
        number.unwrap_or(FI_ADDR_NOTAVAIL)
    }

    pub(super) fn number_of(&self, peer: Peer) -> Option<u64> {
        let mut senders = self.senders.lock().unwrap();
        let known = senders.get(&peer).copied();
        let id = match known {
            Some(id) => id,
            None => self.identifier_of(peer)?,
        };
        if known.is_none() {
            // Indices of disconnected peers are reused, so their entries are removed at intervals.
            if senders.len() >= SENDER_SWEEP_THRESHOLD && senders.len().is_power_of_two() {
                senders.retain(|peer, _| self.identifier_of(*peer).is_some());
            }
            senders.insert(peer, id);
        }
        self.vector.number_of(id)
    }

    /// Returns whether peers on other hosts can be reached.
    pub(super) fn has_remotes(&self) -> bool {
        self.remotes.is_ok()
    }

    pub(super) fn identifier_of(&self, peer: Peer) -> Option<LocalId> {
        if let Some(number) = self.messages.remote_id(peer) {
            let name = self.remotes.as_ref().ok()?.address(number)?;
            return Address::from_bytes(&name).map(|address| address.id);
        }
        LocalId::from_listening_name(&self.messages.name_of(peer).ok()?)
    }

    /// The peer of a number.
    #[inline]
    pub(super) fn peer(&self, number: u64) -> Result<Peer> {
        match self.peers.get(number) {
            Some(peer) => Ok(peer),
            None => self.find_peer(number),
        }
    }

    #[cold]
    fn find_peer(&self, number: u64) -> Result<Peer> {
        let _guard = self.peer_creation.lock().unwrap();
        if let Some(peer) = self.peers.get(number) {
            return Ok(peer);
        }
        let peer = match self.vector.location(number).ok_or(FiError(FI_EINVAL))? {
            AddressLocation::Local(name) => self.messages.add_peer(&name)?,
            AddressLocation::Remote(address) => self.find_remote(address)?,
        };
        self.peers.set(number, peer);
        Ok(peer)
    }

    /// Removes the peer of a number. Operations that wait for a connection to it fail, unless the
    /// peer has another number.
    pub(crate) fn remove_peer(&self, number: u64) {
        let _guard = self.peer_creation.lock().unwrap();
        let Some(peer) = self.peers.remove(number) else { return };
        let remote_id = self.messages.remote_id(peer);
        self.messages.remove_peer(peer);
        if let (Some(remote_id), Ok(directory)) = (remote_id, &self.remotes) {
            directory.release(remote_id);
        }
    }

    /// The peer of an address on another host.
    fn find_remote(&self, address: Address) -> Result<Peer> {
        let number = self.remotes.as_ref().map_err(Unavailable::to_string).and_then(|directory| {
            let number = directory.claim(&address.to_bytes());
            number.ok_or_else(|| "its address has no socket, or there are too many peers".into())
        });
        match number {
            Ok(number) => Ok(self.messages.remote_peer(number).inspect_err(|_| {
                if let Ok(directory) = &self.remotes {
                    directory.release(number);
                }
            })?),
            Err(reason) => {
                warn_once(format_args!("cannot reach a peer on another host: {reason}"));
                Err(FiError(FI_EHOSTUNREACH))
            }
        }
    }

    /// Expects messages of other hosts from now on.
    pub(crate) fn expect_remote(&self) {
        self.messages.expect_remote(true);
    }

    /// The source of a receive.
    #[inline]
    pub(super) fn source(&self, number: u64) -> Result<Source> {
        if self.is_directed && number != FI_ADDR_UNSPEC {
            return Ok(Source::Peer(self.peer(number)?));
        }
        Ok(Source::Any)
    }

    /// Adds a tracked receive, and returns its context.
    pub(super) fn track(&self, context: u64, is_silent: bool, is_multi_recv: bool) -> u64 {
        self.tracked.add(TrackedOp { is_multi_recv, ..TrackedOp::new(context, is_silent) })
    }

    /// Cancels an operation; its completion reports the result.
    pub(super) fn cancel(&self, context: u64) {
        let mark = self.tracked.find(context);
        if !mark.is_some_and(|mark| self.messages.cancel_posted(mark)) && !is_tracked(context) {
            self.messages.cancel_posted(context);
        }
    }
}

/// Converts a completion to a queue entry.
#[inline]
pub(super) fn entry_of(report: &CompletionEntry) -> QueuedCompletion {
    let mut entry = QueuedCompletion::new(report.context, space_flag(report.envelope.space));
    entry.tag = report.envelope.tag;
    if report.kind == CompletionKind::Receive {
        entry.flags |= FI_RECV;
        entry.length = report.length as usize;
        entry.buffer = report.address.cast::<c_void>();
        if let Some(data) = report.envelope.data {
            entry.flags |= FI_REMOTE_CQ_DATA;
            entry.data = data;
        }
        if report.is_last {
            entry.flags |= FI_MULTI_RECV;
        }
    } else {
        entry.flags = match report.kind {
            CompletionKind::Put => FI_RMA | FI_WRITE,
            CompletionKind::Get => FI_RMA | FI_READ,
            _ => entry.flags | FI_SEND,
        };
    }
    if let Err(error) = &report.outcome {
        set_error(&mut entry, error);
    }
    entry
}

#[cold]
fn set_error(entry: &mut QueuedCompletion, error: &Error) {
    entry.code = FiError::from(error).0;
    if let Error::Truncated { message_bytes, buffer_bytes } = error {
        entry.length = *buffer_bytes as usize;
        entry.excess = (message_bytes - buffer_bytes) as usize;
    }
}
