//! One connection: the rings to and from a peer, and the ways to its memory. It writes notes and
//! copies bytes; what notes mean for operations is the port's business.

mod doorbell;
mod places;
mod view;
mod windows;

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use memferry_sys::packet_socket::PacketSocket;
use memferry_sys::peer_process::{self, Credentials};

use crate::connect::hello::Identity;
use crate::connect::reach::Reach;
use crate::connect::{Acquaintance, EndpointId};
use crate::error::Gone;
use crate::quarantine::Writer;
use crate::region::exported::Exported;
use crate::region::imported::Imported;
use crate::ring::cells::{Consumer, Nonsense, Producer, Words};
use crate::ring::fullness::{ENDED, NO_MESSAGES, NO_PAYLOADS};
use crate::ring::layout::{CELLS, End, Memory, RECORDS, SPACE_BYTES};
use crate::ring::space::{Space, Span};
use crate::window::board::BoardView;
use crate::window::peer_memory::PeerMemory;
use crate::wire::Note;
pub(crate) use doorbell::ring_doorbell;
pub(crate) use view::{CopyError, Description, View};

/// Notes that may wait for room: more than all operations of both sides together can cause.
const MOST_HELD: usize = 1 << 18;

/// How long a process that has hung up may take to end.
const LAST_MOMENTS: std::time::Duration = std::time::Duration::from_millis(20);

/// More lines than this are not got ahead.
const WARM_BYTES: usize = 8 << 10;

/// Who and where the peer is.
#[derive(Debug, Clone)]
pub(crate) struct PeerFacts {
    pub(crate) id: EndpointId,
    /// The name under which it listens, empty if it does not.
    pub(crate) name: String,
    /// The kernel has said that it listens under that name.
    pub(crate) is_proven: bool,
    /// The name that its socket was bound to, which its own hellos tell.
    pub(crate) bound: String,
}

/// A connection to a peer, or of an endpoint to itself.
#[derive(Debug)]
pub(crate) struct Wire {
    // The ring's ends point into the memory, so they come first: they are dropped first.
    producer: Producer,
    pub(crate) consumer: Consumer,
    pub(crate) memory: Memory,
    space: Space,
    /// Passed cells, and payload bytes of passed cells, when the other side was last told that
    /// there is room.
    told_cells: u64,
    untold_bytes: usize,
    /// Notes that found no room in the ring, in order.
    held: VecDeque<Words>,
    /// When the other process was last seen alive.
    alive_at_ns: u64,
    /// Cells that had been taken from the other side when this side last sent.
    taken_at_send: u64,
    /// Something was written since the other side was last told.
    unannounced: bool,
    /// What this side last said it has no room for.
    fullness: u32,
    /// What the other side had no room for when something could not be sent for that.
    refused_for: u32,
    /// Free records for messages to this side: number and next generation.
    free_records: Vec<(u16, u16)>,
    socket: Option<PacketSocket>,
    process: Option<OwnedFd>,
    /// What this side can do with the other's memory.
    pub(crate) reach: Reach,
    /// What the other side can do with ours; nothing until it says so.
    pub(crate) their_reach: (bool, bool),
    pub(crate) has_told_reach: bool,
    /// It has ever said that it can do something.
    pub(crate) has_had_reach: bool,
    /// The other side as a writer to memory of this side, once somebody has asked.
    writer: Option<Arc<Writer>>,
    pub(crate) peer: PeerFacts,
    imported: Arc<Imported>,
    exported: Exported,
    /// Descriptors that came before their note.
    early: Vec<(u32, OwnedFd)>,
    /// The other side was asked to send a packet when something comes, and packets that it has sent
    /// or is about to send, as far as this side knows.
    asked_for_packet: bool,
    packets_owed: i32,
    /// The other side's windows; `None` if the other side is this one. Then how they are reached,
    /// once somebody has asked for one of them.
    their_board: Option<Arc<BoardView>>,
    pub(crate) window_peer: Option<Arc<PeerMemory>>,
}

impl Wire {
    /// A connection to a new acquaintance. Tells it what this side can do with its memory.
    pub(crate) fn new(met: Acquaintance) -> Self {
        let reach = met.reach;
        let peer = PeerFacts {
            id: EndpointId { identity: met.identity, credentials: met.credentials },
            is_proven: met.listening.is_some(),
            bound: met.listening.map_or_else(|| met.name.clone(), |listening| listening.name),
            name: met.name,
        };
        let mut wire = Self::over(met.memory, reach, peer);
        wire.socket = Some(met.socket);
        wire.process = met.process;
        wire.their_board = Some(Arc::new(met.board));
        wire.post(Note::Reach { read: reach.read, write: reach.write });
        wire
    }

    /// The connection of an endpoint to itself.
    pub(crate) fn to_self(identity: Identity, name: String) -> std::io::Result<Self> {
        let (memory, _) = Memory::create(End::Both)?;
        let credentials = Credentials {
            pid: std::process::id(),
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        };
        let reach = Reach { read: true, write: true, denied: None };
        let (id, bound) = (EndpointId { identity, credentials }, name.clone());
        let peer = PeerFacts { id, name, is_proven: true, bound };
        let mut wire = Self::over(memory, reach, peer);
        wire.their_reach = (true, true);
        Ok(wire)
    }

    fn over(memory: Memory, reach: Reach, peer: PeerFacts) -> Self {
        Self {
            producer: memory.producer(),
            consumer: memory.consumer(),
            memory,
            space: Space::new(SPACE_BYTES),
            told_cells: 0,
            untold_bytes: 0,
            held: VecDeque::new(),
            unannounced: false,
            fullness: 0,
            refused_for: 0,
            alive_at_ns: 0,
            taken_at_send: 0,
            free_records: (0..RECORDS as u16).map(|number| (number, 1)).collect(),
            socket: None,
            process: None,
            reach,
            their_reach: (false, false),
            has_told_reach: false,
            has_had_reach: false,
            writer: None,
            peer,
            imported: Arc::default(),
            their_board: None,
            window_peer: None,
            exported: Exported::default(),
            early: Vec::new(),
            asked_for_packet: false,
            packets_owed: 0,
        }
    }

    /// Whether both ends are in this process, which then needs no help to reach the memory.
    pub(crate) fn is_self(&self) -> bool {
        self.socket.is_none()
    }

    /// Whether the other process still lives and has not hung up.
    pub(crate) fn is_alive(&self) -> bool {
        let Some(socket) = &self.socket else { return true };
        peer_process::is_alive(self.process.as_ref().map(AsFd::as_fd), socket.as_fd())
    }

    /// Whether the other process has ended: it may have hung up long before.
    pub(crate) fn has_ended(&self) -> bool {
        match &self.process {
            Some(process) => peer_process::has_ended(process.as_fd()),
            None => !self.is_alive(),
        }
    }

    /// Whether the other side has ended: it said so, or its process did a moment ago.
    pub(crate) fn has_peer_ended(&mut self) -> bool {
        !self.is_self() && (self.memory.has_other_ended() || !self.is_surely_alive())
    }

    /// Liveness check of a send. A message taken since the last send is a sign of life and costs
    /// nothing: replies do not read the clock. Any other send made 20 ms after the end fails.
    #[inline]
    pub(crate) fn may_send(&mut self) -> bool {
        let taken = self.consumer.passed();
        if taken != self.taken_at_send {
            self.taken_at_send = taken;
            return true;
        }
        self.is_surely_alive()
    }

    /// Whether the other process lived a moment ago: too short a time for all other numbers to be
    /// given out, and its own to another. Reads the coarse clock, which takes some nanoseconds, and
    /// asks the kernel at most every 10 ms.
    #[inline]
    pub(crate) fn is_surely_alive(&mut self) -> bool {
        const MOMENT_NS: u64 = 10_000_000;
        let now = memferry_sys::clock::coarse_ns();
        if now.saturating_sub(self.alive_at_ns) < MOMENT_NS {
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

    /// The socket and the process, to be watched.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = std::os::fd::BorrowedFd<'_>> {
        let socket = self.socket.as_ref().map(AsFd::as_fd);
        socket.into_iter().chain(self.process.as_ref().map(AsFd::as_fd))
    }

    // ---- writing ----

    /// Whether a cell is free for something new, with no held note before it.
    #[inline]
    pub(crate) fn has_room(&mut self) -> Result<bool, Nonsense> {
        Ok(self.held.is_empty() && self.producer.has_room()?)
    }

    /// Whether the other side has given back room since this side last looked for some.
    pub(crate) fn has_news_of_room(&self) -> bool {
        let is_let =
            self.refused_for != 0 && !self.memory.other_fullness().includes(self.refused_for);
        is_let || self.producer.has_news()
    }

    /// Whether the other side takes payloads of messages that it may not have asked for.
    #[inline]
    pub(crate) fn takes_payloads(&self) -> bool {
        !self.memory.other_fullness().includes(NO_PAYLOADS | NO_MESSAGES | ENDED)
    }

    /// Whether the other side takes the announcement of a message.
    pub(crate) fn takes_announcement(&mut self) -> bool {
        let takes = !self.memory.other_fullness().includes(NO_MESSAGES);
        self.refused_for = if takes { 0 } else { NO_MESSAGES };
        takes
    }

    /// Nothing that was refused waits any more.
    pub(crate) fn forget_refusal(&mut self) {
        self.refused_for = 0;
    }

    /// What this side has no room for, as far as it said so.
    pub(crate) fn fullness(&self) -> u32 {
        self.fullness
    }

    /// Says what this side has no room for.
    pub(crate) fn set_fullness(&mut self, fullness: u32) {
        let has_room_again = self.fullness & !fullness != 0;
        self.fullness = fullness;
        self.memory.own_fullness().set(fullness);
        if has_room_again {
            self.unannounced = true;
            self.announce();
        }
    }

    /// Writes a cell for which room was found.
    #[inline]
    pub(crate) fn write(&mut self, words: &Words) {
        self.producer.write(words);
        self.unannounced = true;
    }

    /// Writes a note now, or as soon as there is room. For notes that answer something, of which
    /// there are never more than operations.
    pub(crate) fn post(&mut self, note: Note) {
        let words = note.encode();
        // Nonsense from the other side shows up when the ring is looked at next.
        if self.has_room().unwrap_or(false) {
            self.write(&words);
        } else {
            self.held.push_back(words);
        }
    }

    /// Writes held notes while there is room. Returns whether any was written.
    pub(crate) fn flush(&mut self) -> Result<bool, Nonsense> {
        let mut moved = false;
        if self.held.len() > MOST_HELD {
            return Err(Nonsense("a peer that asks and never reads the answers"));
        }
        while !self.held.is_empty() && self.producer.has_room()? {
            let words = self.held.pop_front().expect("not empty");
            self.write(&words);
            moved = true;
        }
        Ok(moved)
    }

    /// Whether notes wait for room.
    pub(crate) fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }

    /// A span of the space for the payload of the next cell, if one is free.
    pub(crate) fn give_out(&mut self, length: usize) -> Result<Option<Span>, Nonsense> {
        let position = self.producer.position();
        if !self.space.is_far_from_front()
            && let Some(span) = self.space.give_out(position, length)
        {
            return Ok(Some(span));
        }
        self.space.take_back(self.producer.look()?);
        Ok(self.space.give_out(position, length))
    }

    /// Gets the lines that the next message of this size will be written to, while there is time:
    /// the other side has read them last.
    #[inline]
    pub(crate) fn warm_up(&mut self, length: usize) {
        let at = self.memory.span(false, Span { offset: self.space.next_offset(), length: 0 });
        for line in (0..length.min(WARM_BYTES)).step_by(64) {
            memferry_sys::copy::prefetch_for_write(at.wrapping_add(line));
        }
    }

    /// The longest payload of a cell.
    pub(crate) fn longest_span(&self) -> usize {
        self.space.longest()
    }

    /// The memory of a span that this side writes.
    pub(crate) fn outgoing(&self, span: Span) -> *mut u8 {
        self.memory.span(false, span)
    }

    /// The memory of a span that this side reads.
    pub(crate) fn incoming(&self, span: Span) -> *const u8 {
        self.memory.span(true, span)
    }

    // ---- reading ----

    /// The payload of the cell that is passed next was used.
    pub(crate) fn used(&mut self, span: Span) {
        self.untold_bytes += span.length as usize;
    }

    /// Goes on to the next cell. Payloads are given back at once, so that the other side can use
    /// the same memory again; it is told when so much has gathered that it may have waited for it.
    #[inline]
    pub(crate) fn pass(&mut self) {
        self.consumer.pass();
        let untold_cells = self.consumer.passed() - self.told_cells;
        if untold_cells >= CELLS as u64 / 4 || self.untold_bytes >= SPACE_BYTES / 4 {
            self.consumer.publish();
            (self.told_cells, self.untold_bytes) = (self.consumer.passed(), 0);
            self.unannounced = true;
        } else if self.untold_bytes > 0 {
            self.consumer.publish();
        }
    }

    /// A record for a message to this side that both will copy: number and generation.
    pub(crate) fn take_record(&mut self) -> Option<(u16, u16)> {
        self.free_records.pop()
    }

    /// Whether a record is free.
    pub(crate) fn has_record(&self) -> bool {
        !self.free_records.is_empty()
    }

    /// Gives a record back.
    pub(crate) fn return_record(&mut self, number: u16, generation: u16) {
        self.free_records.push((number, generation.wrapping_add(1).max(1)));
    }

    /// What a process that has ended may have left behind: the file of its socket. Other users'
    /// files are not this side's to remove.
    pub(crate) fn leftover(&mut self, gone: &Gone) -> Option<Leftover> {
        let own = rustix::process::geteuid().as_raw();
        let is_own = self.peer.id.credentials.uid == own && self.peer.name.contains('/');
        (is_own && *gone == Gone::Ended)
            .then(|| Leftover { path: self.peer.name.clone().into(), process: self.process.take() })
    }
}

/// The file of the socket of a process that has ended.
#[derive(Debug)]
pub(crate) struct Leftover {
    path: std::path::PathBuf,
    process: Option<OwnedFd>,
}

impl Leftover {
    /// Removes it if nobody listens there any more. Takes a moment.
    pub(crate) fn remove(self) {
        // A process that ends closes its sockets one after the other.
        if let Some(process) = &self.process {
            peer_process::wait_for_end(process.as_fd(), LAST_MOMENTS);
        }
        let own = rustix::process::geteuid().as_raw();
        memferry_sys::packet_socket::remove_stale(&self.path, own);
    }
}
