//! One connection: the rings to and from a peer, and the access to its memory. It writes control
//! messages and copies bytes; the port decides what control messages mean for operations.

mod counting;
mod doorbell;
mod peer_buffer;
mod remote_buffer;
mod window_access;

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use memferry_sys::open_files::DescriptorHolder;
use memferry_sys::peer_process::{self, Credentials};
use memferry_sys::seqpacket::SeqPacketSocket;
use memferry_sys::stats::Block;
use memferry_sys::stats::kinds::PeerCounters;

use crate::connect::access_probe::{OwnProbe, PeerAccess};
use crate::connect::handshake::EndpointUuid;
use crate::connect::{ConnectionParts, EndpointId};
use crate::control::ControlMessage;
use crate::error::{DisconnectReason, PeerName};
use crate::quarantine::Writer;
use crate::region::exported::ExportedRegions;
use crate::region::imported::ImportedRegions;
use crate::ring::backpressure::{CLOSED, NO_EAGER, NO_RTS};
use crate::ring::bounce::{BounceRing, BounceSpan};
use crate::ring::cells::{CellWords, Consumer, Producer, ProtocolError};
use crate::ring::layout::{BOUNCE_BYTES, CLAIM_SLOTS, ConnectionEnd, ConnectionMemory};
use crate::window::peer_memory::PeerMemory;
use crate::window::window_table::PeerWindowTable;
pub(crate) use doorbell::ring_doorbell;
pub(crate) use peer_buffer::{CopyError, PeerBuffer, RemoteSegments};

/// Maximum number of control messages that wait for a cell: more than all operations of both sides
/// can cause.
const MAX_PENDING_CONTROL: usize = 1 << 18;

/// How long a call waits for a process whose socket is closed to exit, and for the lock of the
/// directory of its socket file. On a busy machine both may take longer: a thread waits then.
const EXIT_TIMEOUT: Duration = Duration::from_millis(20);
const LOCK_TIMEOUT: Duration = Duration::from_millis(5);

/// How long that thread waits for each of the two.
const THREAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Upper bound on how much of the next bounce-buffer span is prefetched for writing.
const MAX_PREFETCH_BYTES: usize = 8 << 10;

/// The identity of a peer.
#[derive(Debug, Clone)]
pub(crate) struct PeerInfo {
    pub(crate) id: EndpointId,
    /// The name on which the peer listens, empty if it does not listen.
    pub(crate) name: String,
    /// The kernel has confirmed that the peer listens on that name.
    pub(crate) is_name_verified: bool,
    /// The name that the peer's socket is bound to, which is the one in its own connect requests.
    pub(crate) bound_name: String,
}

impl PeerInfo {
    /// The peer, as errors name it.
    pub(crate) fn label(&self) -> PeerName {
        PeerName::of_process(&self.name, self.id.credentials.pid)
    }
}

/// A connection to a peer, or of an endpoint to itself.
#[derive(Debug)]
pub(crate) struct Connection {
    // Producer and consumer point into the memory, so they come first: fields are dropped in order.
    producer: Producer,
    pub(crate) consumer: Consumer,
    pub(crate) memory: ConnectionMemory,
    bounce: BounceRing,
    /// Written with the lock of the port held.
    pub(crate) counters: Block<PeerCounters>,
    /// The cells read, and the payload bytes of cells read, when this side last rang because of
    /// credits.
    credited_cells: u64,
    uncredited_bytes: usize,
    /// Control messages that wait for a cell, in order.
    pending_control: VecDeque<CellWords>,
    /// The time of the last successful liveness check.
    alive_at_ns: u64,
    /// The consumer's position when this side last sent.
    consumed_at_send: u64,
    /// Cells were written since the last doorbell.
    doorbell_pending: bool,
    /// The backpressure flags that this side has published.
    backpressure: u32,
    /// The peer's backpressure flag that blocked a send, or 0.
    blocked_on: u32,
    /// Free claim slots for messages to this side: number and next generation.
    free_claim_slots: Vec<(u16, u16)>,
    socket: Option<SeqPacketSocket>,
    process: Option<OwnedFd>,
    /// This side's access to the peer's memory.
    pub(crate) access: PeerAccess,
    /// What the peer probes; `None` on a connection to itself.
    own_probe: Option<OwnProbe>,
    /// The peer's access to this side's memory (read, write); none until the peer reports it.
    pub(crate) peer_access_to_us: (bool, bool),
    pub(crate) access_caps_sent: bool,
    /// The peer has reported any access at some time.
    pub(crate) had_access_to_us: bool,
    /// The peer as a writer to memory of this side, once it is needed.
    writer: Option<Arc<Writer>>,
    pub(crate) peer: PeerInfo,
    imported: Arc<ImportedRegions>,
    exported: ExportedRegions,
    /// Descriptors that have arrived before their control messages.
    early_descriptors: Vec<(u32, OwnedFd)>,
    /// The packet wakeup is armed; and the number of wake packets that the peer has sent or will
    /// send, as far as this side knows.
    packet_wakeup_armed: bool,
    wake_packets_in_flight: i32,
    /// The peer's window table (`None` on a connection to itself), and the access to its windows,
    /// once one is attached.
    peer_windows: Option<PeerWindowTable>,
    _descriptors: DescriptorHolder,
    pub(crate) peer_memory: Option<Arc<PeerMemory>>,
}

impl Connection {
    /// Creates a connection from the parts of a handshake, and reports to the peer what access this
    /// side has.
    pub(crate) fn new(parts: ConnectionParts) -> Self {
        let access = parts.access;
        let peer = PeerInfo {
            id: EndpointId { identity: parts.identity, credentials: parts.credentials },
            is_name_verified: parts.listener.is_some(),
            bound_name: parts
                .listener
                .map_or_else(|| parts.name.clone(), |listening| listening.name),
            name: parts.name,
        };
        let mut connection = Self::with_memory(parts.memory, access, peer);
        connection.socket = Some(parts.socket);
        connection.process = parts.process;
        connection.own_probe = Some(parts.own_probe);
        connection.peer_windows = Some(parts.window_table);
        connection
            .send_control(ControlMessage::AccessCaps { read: access.read, write: access.write });
        connection
    }

    /// Creates the connection of an endpoint to itself.
    pub(crate) fn to_self(identity: EndpointUuid, name: String) -> std::io::Result<Self> {
        let (memory, _) = ConnectionMemory::create(ConnectionEnd::Loopback)?;
        let credentials = Credentials {
            pid: std::process::id(),
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        };
        let access = PeerAccess { read: true, write: true, denied: None };
        let (id, bound) = (EndpointId { identity, credentials }, name.clone());
        let peer = PeerInfo { id, name, is_name_verified: true, bound_name: bound };
        let mut connection = Self::with_memory(memory, access, peer);
        connection.peer_access_to_us = (true, true);
        Ok(connection)
    }

    fn with_memory(memory: ConnectionMemory, access: PeerAccess, peer: PeerInfo) -> Self {
        Self {
            producer: memory.producer(),
            consumer: memory.consumer(),
            memory,
            bounce: BounceRing::new(BOUNCE_BYTES),
            counters: Block::open(peer.id.credentials.pid.into(), &peer.name),
            credited_cells: 0,
            uncredited_bytes: 0,
            pending_control: VecDeque::new(),
            doorbell_pending: false,
            backpressure: 0,
            blocked_on: 0,
            alive_at_ns: 0,
            consumed_at_send: 0,
            free_claim_slots: (0..CLAIM_SLOTS as u16).map(|number| (number, 1)).collect(),
            socket: None,
            process: None,
            access,
            own_probe: None,
            peer_access_to_us: (false, false),
            access_caps_sent: false,
            had_access_to_us: false,
            writer: None,
            peer,
            imported: Arc::default(),
            peer_windows: None,
            _descriptors: DescriptorHolder::new(),
            peer_memory: None,
            exported: ExportedRegions::default(),
            early_descriptors: Vec::new(),
            packet_wakeup_armed: false,
            wake_packets_in_flight: 0,
        }
    }

    /// Returns whether both ends are in this process, which needs no help to access the memory.
    pub(crate) fn is_self(&self) -> bool {
        self.socket.is_none()
    }

    /// Returns whether the peer's process is alive and its socket open.
    pub(crate) fn is_alive(&self) -> bool {
        let Some(socket) = &self.socket else { return true };
        peer_process::is_alive(self.process.as_ref().map(AsFd::as_fd), socket.as_fd())
    }

    /// Returns whether the peer's process has exited. Its socket may have been closed long before.
    pub(crate) fn has_exited(&self) -> bool {
        match &self.process {
            Some(process) => peer_process::has_exited(process.as_fd()),
            None => !self.is_alive(),
        }
    }

    /// Returns whether the peer is closed, or its process has exited at least one recheck interval
    /// ago.
    pub(crate) fn has_peer_disconnected(&mut self) -> bool {
        !self.is_self() && (self.memory.is_peer_closed() || !self.is_recently_alive())
    }

    /// Liveness check of a send. A message that was received since the last send proves that the
    /// peer is alive and costs nothing: replies do not read the clock. Any other send made 20 ms
    /// after the exit fails.
    #[inline]
    pub(crate) fn may_send(&mut self) -> bool {
        let taken = self.consumer.position();
        if taken != self.consumed_at_send {
            self.consumed_at_send = taken;
            return true;
        }
        self.is_recently_alive()
    }

    /// Returns whether the peer's process was alive at the last check, at most 10 ms ago: too short
    /// a time for its pid to be reused. Reads the coarse clock, which takes a few nanoseconds, and
    /// makes a system call at most every 10 ms.
    #[inline]
    pub(crate) fn is_recently_alive(&mut self) -> bool {
        const ALIVE_RECHECK_NS: u64 = 10_000_000;
        let now = memferry_sys::clock::coarse_ns();
        if now.saturating_sub(self.alive_at_ns) < ALIVE_RECHECK_NS {
            return true;
        }
        self.is_alive_at(now)
    }

    #[cold]
    fn is_alive_at(&mut self, now: u64) -> bool {
        let alive = self.is_alive();
        if alive {
            self.alive_at_ns = now;
        }
        alive
    }

    /// The socket and the pidfd, for epoll.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = std::os::fd::BorrowedFd<'_>> {
        let socket = self.socket.as_ref().map(AsFd::as_fd);
        socket.into_iter().chain(self.process.as_ref().map(AsFd::as_fd))
    }

    // ---- writing ----

    /// Returns whether a cell is free and no earlier control message waits for one.
    #[inline]
    pub(crate) fn has_credit(&mut self) -> Result<bool, ProtocolError> {
        Ok(self.pending_control.is_empty() && self.producer.has_credit()?)
    }

    /// Returns whether the peer has freed cells or cleared its backpressure since this side was
    /// blocked.
    pub(crate) fn has_new_credit(&self) -> bool {
        let is_unblocked =
            self.blocked_on != 0 && !self.memory.peer_backpressure().includes(self.blocked_on);
        is_unblocked || self.producer.has_new_credits()
    }

    /// Returns whether the peer accepts payloads of messages that may be unexpected.
    #[inline]
    pub(crate) fn accepts_eager(&self) -> bool {
        !self.memory.peer_backpressure().includes(NO_EAGER | NO_RTS | CLOSED)
    }

    /// Returns whether the peer accepts announcements.
    pub(crate) fn accepts_rts(&mut self) -> bool {
        let accepts = !self.memory.peer_backpressure().includes(NO_RTS);
        self.blocked_on = if accepts { 0 } else { NO_RTS };
        accepts
    }

    /// Clears the blocked flag: no send waits for the peer's backpressure.
    pub(crate) fn clear_blocked(&mut self) {
        self.blocked_on = 0;
    }

    /// The backpressure that this side has published.
    pub(crate) fn backpressure(&self) -> u32 {
        self.backpressure
    }

    /// Publishes this side's backpressure.
    pub(crate) fn set_backpressure(&mut self, flags: u32) {
        let has_space = self.backpressure & !flags != 0;
        self.backpressure = flags;
        self.memory.own_backpressure().set(flags);
        if has_space {
            self.doorbell_pending = true;
            self.ring_doorbell();
        }
    }

    /// Writes a cell, after [`Connection::has_credit`].
    #[inline]
    pub(crate) fn write(&mut self, words: &CellWords) {
        self.producer.write(words);
        self.doorbell_pending = true;
    }

    /// Writes a control message now, or as soon as a cell is free. For replies, of which there are
    /// never more than operations.
    pub(crate) fn send_control(&mut self, message: ControlMessage) {
        let words = message.encode();
        // A protocol error of the peer is detected at the next poll of the ring.
        if self.has_credit().unwrap_or(false) {
            self.write(&words);
        } else {
            self.pending_control.push_back(words);
        }
    }

    /// Writes pending control messages while cells are free. Returns whether any was written.
    pub(crate) fn flush(&mut self) -> Result<bool, ProtocolError> {
        let mut wrote = false;
        if self.pending_control.len() > MAX_PENDING_CONTROL {
            return Err(ProtocolError("control replies not drained"));
        }
        while !self.pending_control.is_empty() && self.producer.has_credit()? {
            let words = self.pending_control.pop_front().expect("not empty");
            self.write(&words);
            wrote = true;
        }
        Ok(wrote)
    }

    /// Returns whether control messages wait for a cell.
    pub(crate) fn has_pending_control(&self) -> bool {
        !self.pending_control.is_empty()
    }

    /// Allocates a span of the bounce ring for the payload of the next cell, if one is free.
    pub(crate) fn alloc_bounce(
        &mut self,
        length: usize,
    ) -> Result<Option<BounceSpan>, ProtocolError> {
        let position = self.producer.position();
        if !self.bounce.should_reclaim()
            && let Some(span) = self.bounce.allocate(position, length)
        {
            return Ok(Some(span));
        }
        self.bounce.reclaim(self.producer.refresh_credits()?);
        Ok(self.bounce.allocate(position, length))
    }

    /// Prefetches the lines that the next message of this size will be written to: the peer has
    /// read them last.
    #[inline]
    pub(crate) fn prefetch_bounce(&mut self, length: usize) {
        let at =
            self.memory.span(false, BounceSpan { offset: self.bounce.next_offset(), length: 0 });
        for line in (0..length.min(MAX_PREFETCH_BYTES)).step_by(64) {
            memferry_sys::copy::prefetch_for_write(at.wrapping_add(line));
        }
    }

    /// The maximum payload of a cell, in bytes.
    pub(crate) fn max_span(&self) -> usize {
        self.bounce.max_span()
    }

    /// The address of a span that this side writes.
    pub(crate) fn outgoing(&self, span: BounceSpan) -> *mut u8 {
        self.memory.span(false, span)
    }

    /// The address of a span that this side reads.
    pub(crate) fn incoming(&self, span: BounceSpan) -> *const u8 {
        self.memory.span(true, span)
    }

    // ---- reading ----

    /// Records that the payload of the current cell was read.
    pub(crate) fn release_bounce(&mut self, span: BounceSpan) {
        self.uncredited_bytes += span.length as usize;
    }

    /// Moves to the next cell. Payloads are freed at once, so that the peer can reuse the same
    /// memory; the doorbell rings once a quarter of the cells or of the bounce ring is freed,
    /// because the peer may wait for it.
    #[inline]
    pub(crate) fn advance(&mut self) {
        self.consumer.advance();
        let uncredited_cells = self.consumer.position() - self.credited_cells;
        if uncredited_cells >= self.consumer.count() / 4
            || self.uncredited_bytes >= BOUNCE_BYTES / 4
        {
            self.consumer.publish();
            (self.credited_cells, self.uncredited_bytes) = (self.consumer.position(), 0);
            self.doorbell_pending = true;
        } else if self.uncredited_bytes > 0 {
            self.consumer.publish();
        }
    }

    /// Allocates a claim slot for a cooperative message to this side: number and generation.
    pub(crate) fn alloc_claim_slot(&mut self) -> Option<(u16, u16)> {
        self.free_claim_slots.pop()
    }

    /// Returns whether a claim slot is free.
    pub(crate) fn has_claim_slot(&self) -> bool {
        !self.free_claim_slots.is_empty()
    }

    /// Returns whether a short message may take a claim slot: some are left for long ones, of which both
    /// sides copy a part.
    pub(crate) fn has_claim_slots_to_spare(&self) -> bool {
        const FOR_LONG: usize = CLAIM_SLOTS / 4;
        self.free_claim_slots.len() > FOR_LONG
    }

    /// Frees a claim slot.
    pub(crate) fn free_claim_slot(&mut self, number: u16, generation: u16) {
        self.free_claim_slots.push((number, generation.wrapping_add(1).max(1)));
    }

    /// The socket file that an exited process may have left behind. Files of other users are not
    /// removed.
    pub(crate) fn stale_socket(&mut self, reason: &DisconnectReason) -> Option<StaleSocketFile> {
        let own = rustix::process::geteuid().as_raw();
        let is_own = self.peer.id.credentials.uid == own && self.peer.name.contains('/');
        (is_own && *reason == DisconnectReason::Exited).then(|| StaleSocketFile {
            path: self.peer.name.clone().into(),
            process: self.process.take(),
        })
    }
}

/// The socket file of a process that has exited.
#[derive(Debug)]
pub(crate) struct StaleSocketFile {
    path: std::path::PathBuf,
    process: Option<OwnedFd>,
}

impl StaleSocketFile {
    /// Removes the file if no process listens on it. A call waits only briefly; what takes longer
    /// is left to a thread.
    pub(crate) fn remove(self) {
        if self.try_remove(EXIT_TIMEOUT, LOCK_TIMEOUT) {
            return;
        }
        let remove_later = move || self.try_remove(THREAD_TIMEOUT, THREAD_TIMEOUT);
        if let Err(error) = memferry_sys::thread::spawn("memferry-remove", remove_later) {
            tracing::debug!(%error, "the socket file of a process that has exited stays");
        }
    }

    /// Returns `false` if that has to be tried again.
    fn try_remove(&self, exit_timeout: Duration, lock_timeout: Duration) -> bool {
        // An exiting process closes its sockets one after the other.
        let has_exited = self
            .process
            .as_ref()
            .is_none_or(|process| peer_process::wait_for_exit(process.as_fd(), exit_timeout));
        let own = rustix::process::geteuid().as_raw();
        memferry_sys::seqpacket::remove_stale(&self.path, own, lock_timeout) && has_exited
    }
}
