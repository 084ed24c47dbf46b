//! A port: the peers, operations and windows of one endpoint or link, and their progress.
//!
//! One lock guards everything. Calls of the application, and a progress thread where one was requested, take
//! the lock, do what can be done at once ([`progress`]), and unlock. No thread sleeps with the lock held
//! ([`sleep`]), or copies from or to memory of a peer ([`wait`]). The state behind the lock consists of parts
//! with an owner for each field: [`protocol`], [`wakeup`] and [`windows`] (`docs/design/ports.md`).

mod close;
mod config;
mod connections;
mod counting;
mod debug;
mod deliver;
mod disconnect;
mod event_loop;
mod fast_receive;
mod named_peers;
mod naming;
mod operations;
mod peer_search;
mod peer_table;
mod planner;
mod poll_backoff;
mod poll_set;
mod posted;
mod posted_buffer;
mod progress;
mod progress_thread;
mod protocol;
mod quiesce;
mod remote;
mod rendezvous;
mod sender_help;
mod service;
mod sleep;
mod small;
mod step;
mod streaming;
mod submit;
#[cfg(all(test, not(loom)))]
mod tests;
mod wait;
mod wakeup;
mod windows;

use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};

use memferry_copy::Ferry;
use memferry_engine::cpu::{CpuProfile as CopyProfile, ProfileSource};
use memferry_sys::Futex;
use memferry_sys::biased_mutex::BiasedMutex;
use memferry_sys::fork::{ForkSafe, OwnerProcess};
use memferry_sys::settings;
use memferry_sys::stats::Block;
use memferry_sys::stats::kinds::{EndpointCounters, LookupBlock};

use crate::Source;
use crate::connect::accept_thread::AcceptThread;
use crate::connect::listener::Listener;
use crate::connection::{Connection, RemoteSegments};
use crate::control::OperationId;
use crate::envelope::{Envelope, MatchSpec};
use crate::error::Error;
use crate::path::StepContext;
use crate::segments::Segment;
pub(crate) use config::PortConfig;
pub(crate) use operations::OperationTable;
use peer_table::PeerTable;
use planner::Planner;
pub use posted_buffer::BufferReceived;
pub(crate) use progress_thread::ProgressThread;
use protocol::Protocol;
pub use service::{PendingOps, ServiceMessage};
pub(crate) use streaming::{STREAMING_VARIABLE, streaming, streaming_from_setting};
pub(crate) use submit::Started;
use wakeup::Wakeup;
use windows::{RmaEngineCell, WindowState};

/// A message that has been received, or that a probe has found.
///
/// ```
/// use memferry::message::{Endpoint, MessageStatus, Source, TAG_ANY};
///
/// let endpoint = Endpoint::open("status-doc")?;
/// let own = endpoint.self_peer()?;
/// endpoint.send(own, 7, b"hello")?;
/// let mut buffer = [0; 16];
/// let status: MessageStatus = endpoint.recv(Source::Any, 0, TAG_ANY, &mut buffer)?;
/// assert_eq!((status.source, status.tag, status.length), (own, 7, 5));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageStatus {
    /// The sender. For a send: the receiver.
    pub source: Peer,
    /// Its tag.
    pub tag: u64,
    /// Its length in bytes.
    pub length: u64,
}

/// A peer of an endpoint, as [`crate::Endpoint::connect`] and messages name it.
///
/// ```
/// use memferry::message::{Endpoint, Peer};
///
/// let (here, there) = (Endpoint::open("peer-doc-a")?, Endpoint::open("peer-doc-b")?);
/// let accept = std::thread::spawn(move || while there.peers().is_empty() { there.progress(); });
/// let peer: Peer = here.connect("peer-doc-b")?;
/// assert_eq!(here.name_of(peer)?, "peer-doc-b");
/// accept.join().unwrap();
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer {
    pub(crate) index: usize,
    /// Use of the slot: slots of disconnected peers are reused.
    pub(crate) generation: u32,
    /// The port that the peer belongs to.
    pub(crate) port_id: u64,
}

/// A message that no receive has matched yet, or a claimed one.
pub(crate) enum UnexpectedPayload {
    /// An eager message: the bytes that have arrived, and how many it has.
    Buffered { bytes: Vec<u8>, length: usize },
    /// A message in the memory of its sender.
    AtSender { length: u64, request: RtsInfo },
    /// A message on another host, which the remote transport can fetch.
    AtRemoteHost { length: u64, ticket: u64 },
    /// A claimed message whose peer disconnected before all of it arrived.
    Lost,
}

/// Number of segments of a message at its sender that count as one more buffered message.
const SEGMENTS_PER_WEIGHT: usize = 16;

/// Announcement (RTS) of a message in the memory of its sender.
#[derive(Debug)]
pub(crate) struct RtsInfo {
    sender: OperationId,
    source: RemoteSegments,
    core: u16,
    has_receives: bool,
    nonresident: bool,
}

impl UnexpectedPayload {
    /// Number of buffered payload bytes.
    fn bytes(&self) -> usize {
        match self {
            Self::Buffered { length, .. } => *length,
            Self::AtSender { .. } | Self::AtRemoteHost { .. } | Self::Lost => 0,
        }
    }

    /// Number of messages that this one counts as: a message with many segments takes more memory.
    fn weight(&self) -> usize {
        match self {
            Self::AtSender { request, .. } => {
                1 + request.source.as_slice().len() / SEGMENTS_PER_WEIGHT
            }
            Self::Lost => 0,
            _ => 1,
        }
    }

    /// Whether the whole message is buffered.
    fn is_complete(&self) -> bool {
        matches!(self, Self::Buffered { bytes, length } if bytes.len() == *length)
    }

    fn length(&self) -> u64 {
        match self {
            Self::Buffered { length, .. } => *length as u64,
            Self::AtSender { length, .. } | Self::AtRemoteHost { length, .. } => *length,
            Self::Lost => 0,
        }
    }
}

/// The state behind the lock of a port. It sequences the parts.
pub(crate) struct PortState {
    config: PortConfig,
    pub(crate) protocol: Protocol,
    wakeup: Wakeup,
    pub(crate) windows: WindowState,
    counters: Block<EndpointCounters>,
    lookup_counters: Option<Block<LookupBlock>>,
}

/// A port, shared by handles.
pub(crate) struct Port {
    state: BiasedMutex<PortState>,
    /// Changes when an operation completes or the sleeper returns. Threads that wait for that sleep on it.
    local_futex: Futex,
    /// Numbers of threads that wait on the futex, and that wait for the lock.
    local_waiters: AtomicU32,
    lock_waiters: AtomicU32,
    /// When the last poll for completions without result returned.
    empty_poll_returned_ns: AtomicU64,
    owner: OwnerProcess,
    progress_thread: Mutex<Option<ProgressThread>>,
    accept_thread: Mutex<Option<AcceptThread>>,
    /// The engine for accesses to windows of peers.
    rma_engine: RmaEngineCell,
}

impl Port {
    /// Creates a port without connections.
    pub(crate) fn new(settings: PortConfig, name: String, listener: Option<Listener>) -> Arc<Self> {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let windows = RmaEngineCell::default();
        let counters = Block::open(id, &name);
        let peers = PeerTable::new(id, &settings, name, listener);
        let operations = OperationTable::new(settings.max_operations);
        let mut state = PortState {
            protocol: Protocol::new(peers, operations, Planner::new(&settings)),
            wakeup: Wakeup::default(),
            windows: WindowState::new(windows.clone()),
            config: settings,
            counters,
            lookup_counters: None,
        };
        Arc::new_cyclic(move |me| {
            state.protocol.operations.weak_port = me.clone();
            Self {
                state: BiasedMutex::new(state),
                local_futex: Futex::new(0),
                local_waiters: AtomicU32::new(0),
                lock_waiters: AtomicU32::new(0),
                empty_poll_returned_ns: AtomicU64::new(0),
                owner: OwnerProcess::current(),
                progress_thread: Mutex::new(None),
                accept_thread: Mutex::new(None),
                rma_engine: windows,
            }
        })
    }

    /// Starts a send.
    ///
    /// # Safety
    /// As for [`PortState::send`].
    pub(crate) unsafe fn start_send(
        &self,
        to: Peer,
        tag: u64,
        pieces: &[Segment],
    ) -> Result<Started, Error> {
        self.check_fork()?;
        let mut state = self.lock();
        // SAFETY: the caller guarantees it.
        let begun = unsafe { state.send(to, Envelope::tagged(tag), pieces, None) };
        // Detached operations make progress in every call. A call without any sends a small message without
        // polling.
        if state.protocol.operations.has_detached() {
            state.progress();
        }
        begun
    }

    /// Starts a receive.
    ///
    /// # Safety
    /// As for [`PortState::receive`].
    pub(crate) unsafe fn start_receive(
        &self,
        from: Source,
        tag: u64,
        mask: u64,
        pieces: &[Segment],
    ) -> Result<Started, Error> {
        self.check_fork()?;
        let mut state = self.lock();
        let begun = state.posting_ahead(|state| {
            // SAFETY: the caller guarantees it.
            let begun = unsafe { state.post_receive(&MatchSpec::tagged(from, tag, mask), pieces) };
            // Afterwards: a message that has arrived then needs no buffer. A receive that took a buffered
            // message leaves the next one in the ring, for the same reason.
            let is_pending = matches!(begun, Ok(Started::Pending(_)));
            if is_pending || begun.is_ok() && !state.protocol.planner.allows_fast_receive() {
                state.progress_posted();
            }
            begun
        })?;
        Ok(match begun {
            Started::Pending(number) => match state.protocol.operations.take_outcome(number) {
                Some(outcome) => Started::Completed(outcome),
                None => begun,
            },
            completed => completed,
        })
    }

    /// Sends, and returns when the memory may be used again.
    ///
    /// # Safety
    /// As for [`PortState::send`], until this function returns.
    pub(crate) unsafe fn send(&self, to: Peer, tag: u64, pieces: &[Segment]) -> Result<(), Error> {
        self.check_fork()?;
        let mut state = self.lock();
        // SAFETY: the caller guarantees it, for both calls.
        let begun = unsafe {
            if let [segment] = pieces
                && state.protocol.send_small(to, &Envelope::tagged(tag), *segment)
            {
                return Ok(());
            }
            state.send(to, Envelope::tagged(tag), pieces, None)
        }?;
        self.finish(state, begun).map(drop)
    }

    /// Receives, and returns when the message has arrived.
    ///
    /// # Safety
    /// As for [`PortState::receive`], until this function returns.
    pub(crate) unsafe fn receive(
        &self,
        from: Source,
        tag: u64,
        mask: u64,
        pieces: &[Segment],
    ) -> Result<MessageStatus, Error> {
        self.check_fork()?;
        let mut state = self.lock();
        let wanted = MatchSpec::tagged(from, tag, mask);
        let want = state.protocol.peers.match_key(&wanted)?;
        let capacity = submit::check_segments(pieces)?;
        // SAFETY: the caller guarantees it, for all calls.
        let begun = unsafe {
            if let Some(peer) = state.find_fast_peer(&want) {
                if let [segment] = pieces
                    && let Some(received) = state.protocol.take_small(peer, &want, *segment)
                {
                    return Ok(received);
                }
                if let Some(outcome) = state.fast_receive(peer, &want, pieces, capacity) {
                    return outcome;
                }
            }
            state.post_receive(&wanted, pieces)
        }?;
        self.finish(state, begun)
    }

    #[inline]
    fn finish(&self, state: wait::PortGuard<'_>, begun: Started) -> Result<MessageStatus, Error> {
        match begun {
            Started::Completed(outcome) => outcome,
            Started::Pending(number) => self
                .block_locked(state, true, None, |state| {
                    state.protocol.operations.take_outcome(number)
                })
                .expect("without a deadline it ends"),
        }
    }

    /// Returns an error in a forked child, which has the memory of the port but must not access the rings.
    #[inline(always)]
    pub(crate) fn check_fork(&self) -> Result<(), Error> {
        if self.owner.is_current() { Ok(()) } else { Err(Error::Forked) }
    }
}

static FERRY: ForkSafe<Option<Ferry>> = ForkSafe::new();

/// The copy core of this process, for messages that engines copy.
pub(crate) fn ferry() -> Option<&'static Ferry> {
    FERRY.get_or_init(|| Ferry::new().ok()).as_ref()
}

/// Sets the ferry whose engines copy large messages into this process, for all endpoints and links that are
/// opened after this call. Without this call, a ferry is created when it is first needed, with the settings
/// of the environment (`MEMFERRY_GPU`, for example).
///
/// # Errors
/// Returns the ferry if the process has one already.
pub fn set_offload_ferry(ferry: Ferry) -> Result<(), Ferry> {
    FERRY.set(Some(ferry)).map_err(|ferry| ferry.expect("what was given"))
}

/// The ferry, if a device is among its engines.
pub(crate) fn device_ferry() -> Option<&'static Ferry> {
    FERRY.get().and_then(Option::as_ref).filter(|_| has_device())
}

/// Whether a device is among the engines. Without a ferry, one is created only if the environment names a
/// device.
pub(crate) fn has_device() -> bool {
    let is_wanted = || settings::value_of("MEMFERRY_GPU").is_some_and(|value| value != "off");
    let ferry = FERRY.get().map_or_else(|| is_wanted().then(ferry).flatten(), Option::as_ref);
    ferry.is_some_and(|f| {
        f.plan_context().engines.iter().any(|engine| engine.registration_costs.is_some())
    })
}

/// The measured profile of the copy core, with the best method of non-temporal stores.
fn copy_profile() -> &'static CopyProfile {
    static PROFILE: ForkSafe<Arc<CopyProfile>> = ForkSafe::new();
    PROFILE.get_or_init(|| {
        CopyProfile::load(&ProfileSource::Automatic)
            .unwrap_or_else(|_| Arc::new(CopyProfile::built_in()))
    })
}

/// The context of a path's step that copies nothing.
fn step_context(number: OperationId, wire: &mut Connection) -> StepContext<'_> {
    StepContext {
        operation: number,
        connection: wire,
        streaming: streaming(),
        may_copy: false,
        ferry,
    }
}
