//! A station: the Memferry endpoint behind an enabled endpoint, with the way from the program's numbers
//! to peers, and from reports back to what the program reads.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use memferry_message::{Endpoint, Error, Lane, Peer, Report, ReportKind, Source, Watch};

use super::Bindings;
use super::marked::{Marked, Marks, is_mark};
use super::peers::Peers;
use super::windows::Windows;
use crate::abi::*;
use crate::address::{Address, AddressVector, LocalId, Place};
use crate::complaint::complain;
use crate::guard::{Code, Result};
use crate::queue::{CompletionQueue, Counter, Entry};
use crate::remote::{Directory, Unavailable};

/// The numbers of peers on other hosts, or why there are none.
pub(super) type Remotes = std::result::Result<Arc<Directory>, Unavailable>;

/// Programs post as many operations as they like, and name as many peers.
const MOST_OPERATIONS: usize = 1 << 22;
const MOST_PEERS: usize = 1 << 16;
/// A legal MPI program may send any number of messages before the one that is received first.
const MOST_KEPT: usize = 1 << 24;

/// From so many senders on, those that are gone are forgotten.
const FORGETTING: usize = 64;

/// How long an endpoint that is closed lets messages leave that were told as sent.
const PATIENCE: Duration = Duration::from_secs(5);

/// Opens the Memferry endpoint of a station.
pub(super) fn open_messages(name: &str, moves_by_itself: bool) -> Result<Endpoint> {
    let builder = Endpoint::builder()
        .most_operations(MOST_OPERATIONS)
        .most_peers(MOST_PEERS)
        .most_kept_messages(MOST_KEPT);
    builder.background(moves_by_itself).open(name).map_err(|error| {
        complain(format_args!("an endpoint cannot be opened: {error}"));
        Code::from(&error)
    })
}

/// Where the ends of sends are told, or those of receives.
#[derive(Debug, Clone, Default)]
pub(super) struct Direction {
    pub(super) queue: Option<Arc<CompletionQueue>>,
    pub(super) counter: Option<Arc<Counter>>,
    /// The queue hears only of operations that ask for it, and of those that fail.
    pub(super) is_selective: bool,
}

impl Direction {
    pub(super) fn is_unbound(&self) -> bool {
        self.queue.is_none() && self.counter.is_none()
    }

    /// Whether an operation with these flags says nothing if it goes well.
    #[inline]
    pub(super) fn is_quiet(&self, flags: u64) -> bool {
        (self.is_selective && flags & FI_COMPLETION == 0) || self.queue.is_none()
    }

    /// Tells the queue, if there is one.
    pub(super) fn tell(&self, entry: Entry) {
        if let Some(queue) = &self.queue {
            queue.push(entry);
        }
    }

    /// Counts the end of an operation, if somebody counts.
    #[inline]
    pub(super) fn count(&self, is_well: bool) {
        if let Some(counter) = &self.counter {
            counter.count(is_well);
        }
    }
}

#[derive(Debug)]
pub(crate) struct Station {
    /// Closed before anything else here goes: what is under way may use it.
    pub(super) messages: Endpoint,
    /// It ends: `messages` is closed, or about to be.
    is_closed: AtomicBool,
    pub(super) sends: Direction,
    pub(super) receives: Direction,
    pub(super) writes: Direction,
    pub(super) reads: Direction,
    /// Memory of this process that others access, and of others.
    pub(super) windows: Windows,
    /// Receives may ask for one peer.
    is_directed: bool,
    /// Both directions are told to the same queue and to nothing else, which collects by itself.
    reports_to_one_queue: bool,
    remotes: Remotes,
    vector: Arc<AddressVector>,
    peers: Peers,
    /// Held while the peer of a number is looked for or removed: there is only one.
    finding: Mutex<()>,
    /// The identifiers of those whose messages came.
    senders: Mutex<HashMap<Peer, LocalId>>,
    pub(super) marks: Marks,
    /// Held while reports are collected for several queues, so that their order stays. Empty between
    /// calls; kept for its memory.
    reports: Mutex<Vec<Report>>,
}

impl Station {
    pub(super) fn new(
        messages: Endpoint,
        remotes: Remotes,
        vector: Arc<AddressVector>,
        bindings: &Bindings,
        is_directed: bool,
    ) -> Self {
        let Bindings { sends, receives, reads, writes, .. } = bindings;
        let is_counted = [sends, receives, reads, writes].iter().any(|d| d.counter.is_some());
        let reports_to_one_queue = match (&sends.queue, &receives.queue) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other) && !is_counted,
            _ => false,
        };
        Self {
            messages,
            is_closed: AtomicBool::new(false),
            sends: sends.clone(),
            receives: receives.clone(),
            // Accesses are told where sends are, and counted apart.
            writes: Direction { counter: writes.counter.clone(), ..sends.clone() },
            reads: Direction { counter: reads.counter.clone(), ..sends.clone() },
            windows: Windows::default(),
            is_directed,
            reports_to_one_queue,
            remotes,
            vector,
            peers: Peers::default(),
            finding: Mutex::default(),
            senders: Mutex::default(),
            marks: Marks::default(),
            reports: Mutex::default(),
        }
    }

    fn directions(&self) -> [&Direction; 4] {
        [&self.sends, &self.receives, &self.writes, &self.reads]
    }

    /// Lets its queues and counters collect from it.
    pub(super) fn attach(self: &Arc<Self>) -> Result {
        self.vector.add(self);
        for direction in self.directions() {
            direction.queue.iter().try_for_each(|queue| queue.add(self))?;
            direction.counter.iter().try_for_each(|counter| counter.add(self))?;
        }
        Ok(())
    }

    /// The opposite, before it goes.
    pub(super) fn detach(self: &Arc<Self>) {
        for direction in self.directions() {
            direction.queue.iter().for_each(|queue| queue.remove(self));
            direction.counter.iter().for_each(|counter| counter.remove(self));
        }
    }

    /// Ends it. Says that it is busy while a peer is in the middle of an access to memory of this process,
    /// or may still write to that of an operation: a stopped process does when it goes on. Then nothing
    /// new begins, and this must be called again.
    pub(super) fn end(self: &Arc<Self>) -> Result {
        self.withdraw_all()?;
        if !self.is_closed.swap(true, Ordering::AcqRel) {
            // Injected messages were told as sent.
            if !self.messages.flush(PATIENCE) {
                tracing::warn!("an endpoint closes, and a peer has not taken what was sent to it");
            }
            self.detach();
            // Others may have counts of it for a moment.
            self.messages.clone().close();
        }
        if self.messages.is_busy() {
            complain(format_args!(
                "an endpoint is closed, but a process is stopped while it writes to memory of a receive: \
                 keep the memory, and close again when that process goes on or has ended"
            ));
            return Err(Code(FI_EBUSY));
        }
        Ok(())
    }

    pub(crate) fn watch(&self) -> Result<Watch> {
        Ok(self.messages.watch()?)
    }

    /// Whether nothing is under way that must be looked at again without being told.
    pub(crate) fn rings(&self) -> bool {
        self.messages.rings()
    }

    #[inline]
    pub(crate) fn reports_to_one_queue(&self) -> bool {
        self.reports_to_one_queue
    }

    /// Moves messages on, and hands over what has ended.
    #[inline]
    pub(crate) fn collect(&self, reports: &mut Vec<Report>) -> bool {
        self.messages.collect(reports)
    }

    /// Moves messages on, and tells queues and counters what has ended.
    pub(crate) fn progress(&self) {
        let mut reports = self.reports.lock().unwrap();
        self.messages.collect(&mut reports);
        reports.drain(..).for_each(|report| self.tell(&report));
    }

    /// Tells what has ended.
    pub(super) fn tell(&self, report: &Report) {
        if let Some(mut entry) = self.settle(report) {
            entry.source = self.source_of(report);
            self.direction(report.kind).tell(entry);
        }
    }

    #[inline]
    fn direction(&self, kind: ReportKind) -> &Direction {
        match kind {
            ReportKind::Send => &self.sends,
            ReportKind::Receive => &self.receives,
            ReportKind::Put => &self.writes,
            ReportKind::Get => &self.reads,
        }
    }

    /// Counts the end of an operation, and gives what its queue is told, if anything.
    #[inline]
    pub(crate) fn settle(&self, report: &Report) -> Option<Entry> {
        let mut entry = entry_of(report);
        let mut is_quiet = false;
        if is_mark(report.context) {
            (entry.context, is_quiet, entry.code) =
                self.marks.end(report.context, report.is_last, entry.code)?;
        }
        self.direction(report.kind).count(entry.code == 0);
        (!is_quiet || entry.code != 0).then_some(entry)
    }

    /// A part of a marked operation could not begin.
    pub(super) fn end_part(&self, kind: ReportKind, mark: u64, code: c_int) {
        if let Some((context, _, code)) = self.marks.end(mark, false, code) {
            let direction = self.direction(kind);
            direction.count(code == 0);
            direction.tell(Entry { code, ..Entry::new(context, FI_RMA) });
        }
    }

    /// The number of whoever sent a message.
    pub(crate) fn source_of(&self, report: &Report) -> u64 {
        let number = match (report.kind, report.peer) {
            (ReportKind::Receive, Some(peer)) => self.number_of(peer),
            _ => None,
        };
        number.unwrap_or(FI_ADDR_NOTAVAIL)
    }

    fn number_of(&self, peer: Peer) -> Option<u64> {
        let mut senders = self.senders.lock().unwrap();
        let known = senders.get(&peer).copied();
        let id = match known {
            Some(id) => id,
            None => self.identifier_of(peer)?,
        };
        if known.is_none() {
            // Places of peers that are gone become others': now and then they are forgotten here too.
            if senders.len() >= FORGETTING && senders.len().is_power_of_two() {
                senders.retain(|peer, _| self.identifier_of(*peer).is_some());
            }
            senders.insert(peer, id);
        }
        self.vector.number_of(id)
    }

    fn identifier_of(&self, peer: Peer) -> Option<LocalId> {
        if let Some(number) = self.messages.carried_number(peer) {
            let name = self.remotes.as_ref().ok()?.name(number)?;
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
        let _finding = self.finding.lock().unwrap();
        if let Some(peer) = self.peers.get(number) {
            return Ok(peer);
        }
        let peer = match self.vector.place(number).ok_or(Code(FI_EINVAL))? {
            Place::Local(name) => self.messages.know(&name)?,
            Place::Remote(address) => self.find_remote(address)?,
        };
        self.peers.set(number, peer);
        Ok(peer)
    }

    /// The program has removed a number. What waits for a connection to its peer ends with an error,
    /// unless the peer has another number.
    pub(crate) fn forget(&self, number: u64) {
        let _finding = self.finding.lock().unwrap();
        let Some(peer) = self.peers.remove(number) else { return };
        let carried = self.messages.carried_number(peer);
        self.messages.forget(peer);
        if let (Some(carried), Ok(directory)) = (carried, &self.remotes) {
            directory.release(carried);
        }
    }

    /// A peer on another host.
    fn find_remote(&self, address: Address) -> Result<Peer> {
        let number = self.remotes.as_ref().map_err(Unavailable::to_string).and_then(|directory| {
            let number = directory.claim(&address.to_bytes());
            number.ok_or_else(|| "its address names no socket, or there are too many peers".into())
        });
        match number {
            Ok(number) => Ok(self.messages.know_carried(number).inspect_err(|_| {
                if let Ok(directory) = &self.remotes {
                    directory.release(number);
                }
            })?),
            Err(reason) => {
                complain(format_args!("a peer on another host cannot be reached: {reason}"));
                Err(Code(FI_EHOSTUNREACH))
            }
        }
    }

    /// From whom a receive takes messages.
    #[inline]
    pub(super) fn source(&self, number: u64) -> Result<Source> {
        if self.is_directed && number != FI_ADDR_UNSPEC {
            return Ok(Source::Peer(self.peer(number)?));
        }
        Ok(Source::Any)
    }

    /// A context for a receive of which more must be known at its end.
    pub(super) fn mark(&self, context: u64, is_quiet: bool, takes_several: bool) -> u64 {
        self.marks.add(Marked { takes_several, ..Marked::new(context, is_quiet) })
    }

    /// Asks for an early end of an operation, which its report tells.
    pub(super) fn cancel(&self, context: u64) {
        let mark = self.marks.find(context);
        if !mark.is_some_and(|mark| self.messages.cancel_posted(mark)) && !is_mark(context) {
            self.messages.cancel_posted(context);
        }
    }
}

/// What a report says, in libfabric's words.
#[inline]
pub(super) fn entry_of(report: &Report) -> Entry {
    let mut entry = Entry::new(report.context, lane_flag(report.envelope.lane));
    entry.tag = report.envelope.tag;
    if report.kind == ReportKind::Receive {
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
            ReportKind::Put => FI_RMA | FI_WRITE,
            ReportKind::Get => FI_RMA | FI_READ,
            _ => entry.flags | FI_SEND,
        };
    }
    if let Err(error) = &report.outcome {
        describe(&mut entry, error);
    }
    entry
}

#[cold]
fn describe(entry: &mut Entry, error: &Error) {
    entry.code = Code::from(error).0;
    if let Error::Truncated { message_bytes, buffer_bytes } = error {
        entry.length = *buffer_bytes as usize;
        entry.excess = (message_bytes - buffer_bytes) as usize;
    }
}

/// The flag of messages of one kind.
#[inline]
pub(super) fn lane_flag(lane: Lane) -> u64 {
    match lane {
        Lane::Tagged => FI_TAGGED,
        Lane::Plain => FI_MSG,
    }
}
