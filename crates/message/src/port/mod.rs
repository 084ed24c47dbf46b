//! A port: connections, operations and matching of one endpoint or link, and what moves them on.
//!
//! Everything is behind one lock. Calls of the application, and a background thread where one was
//! asked for, take it, do what can be done at once ([`progress`]), and leave. Nobody sleeps with it
//! ([`sleep`]), and nobody copies from or to memory of a peer with it ([`wait`]).

mod background;
mod carried;
mod close;
mod connections;
mod deliver;
mod ends;
mod held;
mod known;
mod operations;
mod posted;
mod progress;
mod receive_now;
mod rendezvous;
mod settings;
mod shown;
mod sleep;
mod submit;
#[cfg(all(test, not(loom)))]
mod tests;
mod wait;
mod watch;
mod windows;

use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use memferry_copy::Ferry;
use memferry_engine::cpu::{Profile as CopyProfile, ProfileSource};
use memferry_sys::copy::stream::Streaming;
use memferry_sys::readiness::Readiness;
use memferry_sys::{WaitWord, fork};

use crate::Source;
use crate::connect::hello::Identity;
use crate::connect::listener::Listener;
use crate::connect::{EndpointId, Listening};
use crate::connection::{Description, Wire};
use crate::envelope::{Envelope, Wanted};
use crate::error::{Error, Gone};
use crate::matching::Matching;
use crate::path::{Copying, Looks, Turn};
use crate::pieces::Piece;
use crate::plan::{self, Closeness, Facts};
use crate::quarantine::Writer;
use crate::window::board::Board;
use crate::window::windows::Windows;
use crate::window::{Exposure, Variable};
use crate::wire::Number;
pub(crate) use background::Background;
use carried::Carried;
use known::Known;
pub(crate) use operations::Operations;
use posted::Asking;
use receive_now::Now;
pub(crate) use settings::Settings;
pub(crate) use submit::Begun;

/// A message that has arrived, or that waits and was found by a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Who sent it. For a send: to whom.
    pub source: Peer,
    /// Its tag.
    pub tag: u64,
    /// Its length in bytes.
    pub length: u64,
}

/// A peer of an endpoint, as [`crate::Endpoint::connect`] and messages name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer {
    pub(crate) index: usize,
    /// Places of peers that are gone are used again.
    pub(crate) generation: u32,
    /// Which port it is a peer of.
    pub(crate) port: u64,
}

/// A message that nobody has asked for yet.
pub(crate) enum Kept {
    /// It came by itself: all of it, or as much as `arrived`.
    Here { bytes: Vec<u8>, arrived: usize },
    /// It waits at the sender.
    There { length: u64, request: Request },
    /// It waits on another host, and the carrier can fetch it.
    Elsewhere { length: u64, ticket: u64 },
    /// It was set aside, and its peer has ended before all of it was here.
    Lost,
}

/// So many pieces of a message that waits at its sender are kept like a message.
const PIECES_OF_ONE: usize = 16;

/// What a sender says of a message that waits in its memory.
#[derive(Debug)]
pub(crate) struct Request {
    sender: Number,
    source: Description,
    core: u16,
    expects: bool,
    absent: bool,
}

impl Kept {
    /// The bytes of it that are kept.
    fn bytes(&self) -> usize {
        match self {
            Self::Here { bytes, .. } => bytes.len(),
            Self::There { .. } | Self::Elsewhere { .. } | Self::Lost => 0,
        }
    }

    /// As how many messages it counts: those in many pieces take more memory.
    fn weight(&self) -> usize {
        match self {
            Self::There { request, .. } => 1 + request.source.as_slice().len() / PIECES_OF_ONE,
            Self::Lost => 0,
            _ => 1,
        }
    }

    /// Whether all of it is here.
    fn is_complete(&self) -> bool {
        matches!(self, Self::Here { bytes, arrived } if *arrived == bytes.len())
    }

    fn length(&self) -> u64 {
        match self {
            Self::Here { bytes, .. } => bytes.len() as u64,
            Self::There { length, .. } | Self::Elsewhere { length, .. } => *length,
            Self::Lost => 0,
        }
    }
}

/// Where the fragments go that come next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Assembling {
    Nothing,
    /// Into the memory of a receive.
    Operation(Number),
    /// Into a kept message.
    Kept(u64),
}

/// A connection with what belongs to it.
#[derive(Debug)]
struct Connection {
    wire: Wire,
    /// Sends that are not yet all in the ring, in order.
    outbox: std::collections::VecDeque<Number>,
    /// Messages of this side that wait for the peer to fetch them.
    announced: usize,
    /// The peer was full, and small messages that were announced for that are still on their way.
    announces_all: bool,
    /// Receives that have everything, and whose sender must be told before they end.
    arrived: usize,
    /// Operations with steps to do: claims to make, fragments to send.
    active: Vec<Number>,
    /// Some of those are new, or the last look at them has moved them, and not all to their end.
    is_stepping: bool,
    assembling: Assembling,
    /// A message was found to be lost: the connection ends before anything can pass it.
    is_ending: bool,
    /// A message of the peer whose memory may never come, being copied by a thread of its own.
    slow: Option<Arc<Copying>>,
    /// A message to the peer that a thread of its own copies, into memory that may never come.
    slow_help: Option<Number>,
}

impl Connection {
    /// Whether payloads may be sent without being asked for. One that is sent so is over at once:
    /// those before it that had to be announced must be over too, or who waits for the last of
    /// many small messages would not have them all.
    #[inline]
    fn takes_payloads(&mut self) -> bool {
        if self.announces_all && self.announced == 0 && self.outbox.is_empty() {
            self.announces_all = false;
        }
        self.announces_all |= !self.wire.takes_payloads();
        !self.announces_all
    }
}

/// A place for a peer.
#[derive(Debug, Default)]
struct PeerSlot {
    generation: u32,
    connection: Option<Box<Connection>>,
    /// How the last one ended, and who it was.
    gone: Option<Gone>,
    last: Option<(EndpointId, String)>,
    /// The first arrival that was lost before the end of the peer was known.
    lost: Option<u64>,
    /// Payload bytes and number of kept messages from it, which may outlive it.
    kept_bytes: usize,
    kept_count: usize,
    /// It was asked for by name, and has the place to itself.
    known: Option<Box<Known>>,
    /// It is on another host: the carrier's number for it, and how often it was asked for by that.
    carried: Option<u64>,
    carried_uses: usize,
    /// Something of a peer on another host is awaited, since the carrier was last told of it.
    is_awaited: bool,
}

/// What the lock guards.
pub(crate) struct State {
    port: u64,
    /// The port around this, for threads that have something to tell.
    me: Weak<Port>,
    settings: Settings,
    facts: Facts,
    /// Cores that this process may run on.
    allowed_cores: usize,
    /// Processes of this conversation share cores.
    is_crowded: bool,
    /// The largest message that is sent at once: if the receiver cannot read it, and if it can.
    eager_limits: [u64; 2],
    identity: Identity,
    name: String,
    peers: Vec<PeerSlot>,
    /// Whom this side is connecting to at this moment.
    dialing: Vec<Listening>,
    /// Known peers that are being called, and those that nobody has called yet.
    calls: usize,
    strangers: usize,
    /// When callers were last looked for.
    listened_at_ns: u64,
    asking: Asking,
    /// Whoever waits for reports is to stop.
    interrupted: bool,
    carried: Carried,
    pub(crate) operations: Operations,
    /// Some message has a copy to make, and nobody has taken it.
    is_copy_due: bool,
    /// The copy that the thread with the lock makes next, as soon as it has let it go, and the peer.
    next_copy: Option<(usize, Arc<Copying>)>,
    /// The peer whose turn it is to have a copy made.
    copy_turn: usize,
    matching: Matching<Number, Kept>,
    /// Which memory is known to be there.
    looks: Looks,
    listener: Option<Listener>,
    /// Watches sockets and processes, for event loops and deep sleep.
    readiness: Option<Arc<Readiness>>,
    /// A connection could not be added to it: nobody may sleep on it without a bound.
    is_watch_partial: bool,
    closed: bool,
    /// How the owner wants to be told while no call of its own looks.
    resting: u32,
    /// Somebody sleeps on the words of the connections.
    has_sleeper: bool,
    /// And does so on `readiness`.
    sleeps_deeply: bool,
    /// A message was kept or a peer is gone, and another thread may look for that.
    has_news: bool,
    /// Threads that look at the rings again and again.
    pollers: u32,
    /// In `readiness`: wakes whoever sleeps on that.
    event: Option<memferry_sys::EventFd>,
    /// What event loops watch.
    watched: Option<watch::Watched>,
    /// Something was left in the rings at the end of a call, and the event says so.
    is_behind: bool,
    moves: u64,
    last_checked_ns: u64,
    /// From whom a message was last taken straight out of the ring, and how many were in a row.
    last_taken_from: usize,
    taken_now: u32,
    /// Dropped regions that peers have been told of.
    drops_told: usize,
    /// The windows of this side, and those that wait for something in them.
    board: Option<Arc<Board>>,
    pub(crate) exposures: Vec<Exposure>,
    pub(crate) variables: Vec<Variable>,
    /// Peers that are gone and were in the middle of an access when they went.
    absent: Vec<Arc<Writer>>,
    /// Receives that are over but for a peer that may still write to their memory.
    held: Vec<Number>,
    /// Windows of peers: the port's.
    windows: Arc<OnceLock<Arc<Windows>>>,
}

/// A port, shared by handles.
pub(crate) struct Port {
    state: Mutex<State>,
    /// Changes when an operation ends or the sleeper leaves, for threads that wait for those.
    local: WaitWord,
    /// Threads that wait on it, and threads that want the lock.
    local_waiters: AtomicU32,
    contenders: AtomicU32,
    fork_generation: u64,
    background: Mutex<Option<Background>>,
    /// What accesses to windows of peers need.
    windows: Arc<OnceLock<Arc<Windows>>>,
}

impl Port {
    /// A port without connections.
    pub(crate) fn new(settings: Settings, name: String, listener: Option<Listener>) -> Arc<Self> {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NEXT: AtomicU64 = AtomicU64::new(1);
        fork::watch();
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let facts = settings.facts();
        let windows = Arc::<OnceLock<Arc<Windows>>>::default();
        let mut state = State {
            port: id,
            me: Weak::new(),
            operations: Operations::new(settings.most_operations),
            settings,
            is_crowded: false,
            allowed_cores: memferry_sys::affinity::allowed_cores().len(),
            eager_limits: [false, true]
                .map(|reachable| plan::eager_limit(&facts, Closeness::SharedCache, reachable)),
            facts,
            identity: Identity::random(),
            name,
            peers: Vec::new(),
            dialing: Vec::new(),
            calls: 0,
            strangers: 0,
            listened_at_ns: 0,
            asking: Asking::default(),
            interrupted: false,
            carried: Carried::default(),
            is_copy_due: false,
            next_copy: None,
            copy_turn: 0,
            matching: Matching::default(),
            looks: Looks::default(),
            listener,
            readiness: None,
            is_watch_partial: false,
            closed: false,
            resting: 0,
            has_sleeper: false,
            sleeps_deeply: false,
            has_news: false,
            pollers: 0,
            event: None,
            watched: None,
            is_behind: false,
            moves: 0,
            last_checked_ns: 0,
            last_taken_from: 0,
            taken_now: 0,
            drops_told: crate::region::drops(),
            board: None,
            exposures: Vec::new(),
            variables: Vec::new(),
            absent: Vec::new(),
            held: Vec::new(),
            windows: windows.clone(),
        };
        Arc::new_cyclic(move |me| {
            state.me = me.clone();
            Self {
                state: Mutex::new(state),
                local: WaitWord::new(0),
                local_waiters: AtomicU32::new(0),
                contenders: AtomicU32::new(0),
                fork_generation: fork::generation(),
                background: Mutex::new(None),
                windows,
            }
        })
    }

    /// Begins a send.
    ///
    /// # Safety
    /// As for [`State::send`].
    pub(crate) unsafe fn begin_send(
        &self,
        to: Peer,
        tag: u64,
        pieces: &[Piece],
    ) -> Result<Begun, Error> {
        self.check_fork()?;
        let mut state = self.enter();
        // SAFETY: passed on.
        let begun = unsafe { state.send(to, Envelope::tagged(tag), pieces, None) };
        // Small messages are sent without a look at anything else.
        if state.operations.has_detached() {
            state.progress();
        }
        begun
    }

    /// Begins a receive.
    ///
    /// # Safety
    /// As for [`State::receive`].
    pub(crate) unsafe fn begin_receive(
        &self,
        from: Source,
        tag: u64,
        mask: u64,
        pieces: &[Piece],
    ) -> Result<Begun, Error> {
        self.check_fork()?;
        let mut state = self.enter();
        // What has come already is met first.
        state.hear();
        // SAFETY: passed on.
        unsafe { state.receive(&Wanted::tagged(from, tag, mask), pieces, None) }
    }

    /// Sends and returns when the memory may be used again.
    ///
    /// # Safety
    /// As for [`State::send`], until this returns.
    pub(crate) unsafe fn send(&self, to: Peer, tag: u64, pieces: &[Piece]) -> Result<(), Error> {
        self.check_fork()?;
        let mut state = self.enter();
        // SAFETY: passed on.
        let begun = unsafe { state.send(to, Envelope::tagged(tag), pieces, None) }?;
        self.finish(state, begun).map(drop)
    }

    /// Receives and returns when the message is there.
    ///
    /// # Safety
    /// As for [`State::receive`], until this returns.
    pub(crate) unsafe fn receive(
        &self,
        from: Source,
        tag: u64,
        mask: u64,
        pieces: &[Piece],
    ) -> Result<Received, Error> {
        self.check_fork()?;
        let mut state = self.enter();
        let wanted = Wanted::tagged(from, tag, mask);
        // SAFETY: passed on, for both.
        let begun = unsafe {
            match state.receive_at_once(&wanted, pieces)? {
                Some(Now::Over(outcome)) => return outcome,
                Some(Now::Fetch(fetch)) => {
                    if let Some(received) = state.fetch_now(&fetch, pieces) {
                        return Ok(received);
                    }
                }
                None => {}
            }
            state.hear();
            state.receive(&wanted, pieces, None)
        }?;
        self.finish(state, begun)
    }

    #[inline]
    fn finish(&self, state: wait::Entered<'_>, begun: Begun) -> Result<Received, Error> {
        match begun {
            Begun::Over(outcome) => outcome,
            Begun::Underway(number) => self
                .block_entered(state, true, None, |state| state.operations.take_outcome(number))
                .expect("without a deadline it ends"),
        }
    }

    /// A forked child has the memory of the port but is not its process: it must keep its hands
    /// off the rings.
    pub(crate) fn check_fork(&self) -> Result<(), Error> {
        if self.fork_generation == fork::generation() { Ok(()) } else { Err(Error::Forked) }
    }
}

static FERRY: OnceLock<Option<Ferry>> = OnceLock::new();

/// The copy core of this process, for messages that engines copy.
pub(crate) fn ferry() -> Option<&'static Ferry> {
    FERRY.get_or_init(|| Ferry::new().ok()).as_ref()
}

/// Lets the engines of this ferry copy large messages into this process, for all its endpoints and
/// links that are made from now on. Without this call, a ferry is made when it is first needed, with
/// the settings of the environment (`MEMFERRY_GPU`, for example).
///
/// # Errors
/// Gives the ferry back if there is one already.
pub fn offload_by(ferry: Ferry) -> Result<(), Ferry> {
    FERRY.set(Some(ferry)).map_err(|ferry| ferry.expect("what was given"))
}

/// The ferry, if a device is among its engines.
pub(crate) fn device_ferry() -> Option<&'static Ferry> {
    FERRY.get().and_then(Option::as_ref).filter(|_| has_device())
}

/// Whether a device is among the engines. One is looked for only where the environment names it.
pub(crate) fn has_device() -> bool {
    let is_wanted = || std::env::var_os("MEMFERRY_GPU").is_some_and(|value| value != "off");
    let ferry = FERRY.get().map_or_else(|| is_wanted().then(ferry).flatten(), Option::as_ref);
    ferry.is_some_and(|f| f.facts().engines.iter().any(|engine| engine.preparation.is_some()))
}

/// The measured profile of the copy core, which knows the best way around the caches.
fn copy_profile() -> &'static CopyProfile {
    static PROFILE: OnceLock<Arc<CopyProfile>> = OnceLock::new();
    PROFILE.get_or_init(|| {
        CopyProfile::load(&ProfileSource::Automatic)
            .unwrap_or_else(|_| Arc::new(CopyProfile::built_in()))
    })
}

/// What a path has for a step in which nothing is copied.
fn turn(number: Number, wire: &mut Wire) -> Turn<'_> {
    Turn { number, wire, streaming: streaming(), may_copy: false, ferry }
}

/// The best way to write around the caches.
pub(crate) fn streaming() -> Streaming {
    copy_profile().streaming
}
