//! Peers that were asked for by name before anybody spoke. They are connected when the first message
//! to them needs it, and nobody waits for that: what is sent meanwhile is kept in order.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use memferry_sys::clock;

use super::operations::Deed;
use super::submit::Begun;
use super::{Peer, PeerSlot, State};
use crate::connect::{Answer, Connecting, Dialed, Listening, parse_name};
use crate::connection::{PeerFacts, Wire};
use crate::envelope::Envelope;
use crate::error::{ConnectError, Error, Gone, ValidationError};
use crate::matching::Want;
use crate::pieces::Piece;
use crate::plan::PathKind;
use crate::report::Ending;
use crate::wire::{Number, inline_limit};

/// How long it takes until a call that could not be made is tried again.
const MOMENT_NS: u64 = 1_000_000;
/// How long the other's call may take after both have called at once.
const CROSSED_NS: u64 = 1_000_000_000;

/// A peer that is known by its name.
#[derive(Debug)]
pub(super) struct Known {
    name: String,
    /// How often it was asked for.
    uses: usize,
    call: Call,
    /// Who listened there when it was last called.
    listening: Option<Listening>,
    /// Sends that wait for the connection, in order.
    waiting: VecDeque<Number>,
    /// Since when calls fail, other than for want of a place in the peer's queue.
    troubled_since_ns: Option<u64>,
}

/// How far the connection is that this side asked for.
#[derive(Debug)]
enum Call {
    /// Nobody needs it yet.
    NotNeeded,
    /// It could not be called: to be tried again, after a moment.
    Delayed { since_ns: u64 },
    /// The hello is sent.
    Calling(Connecting),
    /// Both have called at once, and the other's call counts.
    Crossed { since_ns: u64 },
}

impl Call {
    fn is_under_way(&self) -> bool {
        !matches!(self, Self::NotNeeded)
    }
}

impl PeerSlot {
    pub(super) fn known_name(&self) -> Option<&String> {
        self.known.as_ref().map(|known| &known.name)
    }

    /// Takes a send back that waits for the connection. Returns whether it did.
    pub(super) fn stop_waiting(&mut self, number: Number) -> bool {
        let Some(known) = &mut self.known else { return false };
        let before = known.waiting.len();
        known.waiting.retain(|waiting| *waiting != number);
        known.waiting.len() != before
    }

    /// Whether it is known and not yet connected, but may be.
    pub(super) fn is_stranger(&self) -> bool {
        self.known.is_some() && self.connection.is_none() && self.gone.is_none()
    }

    /// Whether a process of this host, other than the one of the name `own`, may be there.
    pub(super) fn is_neighbour(&self, own: &str) -> bool {
        match (&self.connection, &self.known) {
            (Some(connection), _) => !connection.wire.is_self(),
            (None, Some(known)) => self.gone.is_none() && known.name != own,
            (None, None) => false,
        }
    }
}

impl State {
    /// A peer by its name, in a place of its own.
    pub(crate) fn know(&mut self, name: &str) -> Result<Peer, Error> {
        if self.closed {
            return Err(Error::Closed);
        }
        parse_name(name)?;
        if let Some(index) = self.place_of(name) {
            self.peers[index].known.as_mut().expect("it is known").uses += 1;
            return Ok(self.peer(index));
        }
        let index = match self.find_name_ever(name) {
            Some(peer) => peer.index,
            None => self.make_place()?,
        };
        let (name, uses) = (name.to_owned(), 1);
        let (call, waiting) = (Call::NotNeeded, VecDeque::new());
        let (listening, troubled_since_ns) = (None, None);
        let known = Known { name, uses, call, listening, waiting, troubled_since_ns };
        self.peers[index].known = Some(Box::new(known));
        self.count_processes();
        Ok(self.peer(index))
    }

    /// A place for a peer that has no connection yet.
    pub(super) fn make_place(&mut self) -> Result<usize, ConnectError> {
        let mut index = self.free_slot();
        if index.is_none_or(|index| index == self.peers.len()) && self.free_carried() {
            index = self.free_slot();
        }
        let index = index.ok_or(ConnectError::TooManyPeers(self.peers.len()))?;
        if index == self.peers.len() {
            self.peers.push(PeerSlot::default());
        }
        let slot = &mut self.peers[index];
        slot.generation = slot.generation.wrapping_add(1);
        (slot.gone, slot.last, slot.lost) = (None, None, None);
        Ok(index)
    }

    /// The place of a known name.
    pub(super) fn place_of(&self, name: &str) -> Option<usize> {
        let has_name = |slot: &PeerSlot| slot.known.as_ref().is_some_and(|k| k.name == name);
        self.peers.iter().position(has_name)
    }

    /// The place of a known peer that is being called, and calls itself by another name of its
    /// socket.
    pub(super) fn place_called(&self, caller: &PeerFacts) -> Option<usize> {
        let is_called = |slot: &PeerSlot| {
            let known = slot.known.as_ref().filter(|known| known.call.is_under_way());
            let listening = known.and_then(|known| known.listening.as_ref());
            listening.is_some_and(|dialed| dialed.is(&caller.bound, caller.id.credentials))
        };
        self.peers.iter().position(is_called)
    }

    /// Nobody needs a known peer any more, as often as it was asked for. A connection stays; without
    /// one, what waits for it ends.
    pub(crate) fn forget(&mut self, peer: Peer) {
        let Ok(index) = self.find(peer) else { return };
        let Some(known) = &mut self.peers[index].known else { return self.forget_carried(index) };
        known.uses -= 1;
        if known.uses == 0 {
            let error = Error::PeerGone(Gone::Closed);
            self.give_up(index, &error);
            self.peers[index].known = None;
            // The place may become another's.
            if self.peers[index].connection.is_none() {
                for number in self.matching.unpost_source(index) {
                    self.operations.finish(number, Err(error.clone()));
                }
            }
            self.count_processes();
        }
    }

    /// Whether something can still be sent to a peer, or come from it.
    pub(super) fn is_reachable(&self, peer: usize) -> bool {
        let slot = &self.peers[peer];
        let is_expected = slot.known.is_some() || slot.carried.is_some();
        slot.connection.is_some() || (is_expected && slot.gone.is_none())
    }

    /// A send to a peer that has no connection: it goes with the carrier, or waits until there is one.
    #[cold]
    pub(super) fn send_unconnected(
        &mut self,
        peer: usize,
        envelope: Envelope,
        pieces: &[Piece],
        length: u64,
        ending: Option<Ending>,
    ) -> Result<Begun, Error> {
        if !self.is_reachable(peer) {
            return Err(self.gone(peer));
        }
        if !self.operations.has_room() {
            return Err(ValidationError::TooManyOperations(self.operations.count()).into());
        }
        if let Some(number) = self.peers[peer].carried {
            return Ok(self.send_carried(peer, number, envelope, pieces, length, ending));
        }
        let path = match length {
            _ if ending.is_some_and(|ending| ending.delivered) => PathKind::Single,
            _ if length <= inline_limit(&envelope) as u64 => PathKind::Inline,
            _ if length <= self.eager_limits[0] => PathKind::Eager,
            _ => PathKind::Single,
        };
        let sending = self.sending(peer, envelope, pieces, length, path);
        let number = self.operations.insert(Deed::Send(sending), ending);
        self.peers[peer].known.as_mut().expect("it is known").waiting.push_back(number);
        self.call(peer);
        Ok(Begun::Underway(number))
    }

    /// A receive waits for a known peer: it is called, so that its end is noticed.
    pub(super) fn await_source(&mut self, want: &Want) {
        if let Some(peer) = want.source
            && self.peers[peer].is_stranger()
        {
            self.call(peer);
        }
    }

    /// Whether a peer is connected; calls it if it is not.
    pub(crate) fn reach_out(&mut self, peer: Peer) -> Result<bool, Error> {
        let index = self.find(peer)?;
        if self.peers[index].connection.is_some() {
            return Ok(true);
        }
        if !self.is_reachable(index) || self.peers[index].carried.is_some() {
            return Err(self.gone(index));
        }
        self.call(index);
        Ok(self.peers[index].connection.is_some())
    }

    /// Calls a known peer if nobody does.
    fn call(&mut self, peer: usize) {
        let known = self.peers[peer].known.as_ref().expect("the caller knows it");
        if known.call.is_under_way() {
            return;
        }
        let name = known.name.clone();
        if name == self.name {
            match Wire::to_self(self.identity, name) {
                Ok(wire) => drop(self.add_wire(wire)),
                Err(error) => {
                    let error = ConnectError::system("making shared memory")(error);
                    self.give_up(peer, &error.into());
                }
            }
            return;
        }
        self.calls += 1;
        self.peers[peer].known.as_mut().expect("it is known").call = Call::Delayed { since_ns: 0 };
        self.dial(peer);
    }

    fn dial(&mut self, peer: usize) {
        self.hang_up_on(peer);
        let started = self.start_call(peer);
        let known = self.peers[peer].known.as_mut().expect("it was there above");
        match started {
            Ok(connecting) => {
                if let Some(readiness) = &self.readiness {
                    let _ = readiness.add(connecting.as_fd(), false);
                }
                known.call = Call::Calling(connecting.with_endless_patience());
            }
            Err(error) => self.call_again(peer, &error),
        }
    }

    fn start_call(&mut self, peer: usize) -> Result<Connecting, Error> {
        let known = self.peers[peer].known.as_ref().expect("the caller knows it");
        let (name, socket_name) = (known.name.clone(), parse_name(&known.name)?);
        let dialed = Dialed::dial(&socket_name, &self.settings.allowed, Duration::ZERO)?;
        if self.find_listening(&dialed.listening, &name)?.is_some() {
            return Err(ConnectError::OtherName(name).into());
        }
        // Whoever calls this side from now on is met by this.
        self.dialing.push(dialed.listening.clone());
        let known = self.peers[peer].known.as_mut().expect("it was there above");
        known.listening = Some(dialed.listening.clone());
        let board = self.board().map_err(ConnectError::system("making shared memory"))?;
        let (own, identity) = (&self.name, self.identity);
        Ok(Connecting::start(dialed, identity, own, board.as_fd(), Duration::ZERO)?)
    }

    /// Forgets whom the last call of a known peer led to.
    fn hang_up_on(&mut self, peer: usize) {
        let known = self.peers[peer].known.as_mut();
        if let Some(listening) = known.and_then(|known| known.listening.take()) {
            self.stop_dialing(&listening);
        }
    }

    /// A call could not be made, or came to nothing: it is made again later, unless nobody is there
    /// or nothing will change.
    fn call_again(&mut self, peer: usize, error: &Error) {
        use ConnectError::{NoAnswer, Refused, System};
        let known = self.peers[peer].known.as_mut().expect("it was called");
        let now = clock::now_ns();
        let is_troubled = matches!(error, Error::Connect(Refused(..) | System { .. }));
        let since = *known.troubled_since_ns.get_or_insert(now);
        let patience = self.settings.connect_timeout.as_nanos() as u64;
        if matches!(error, Error::Connect(NoAnswer { .. })) {
            known.troubled_since_ns = None;
        } else if !is_troubled || now - since > patience {
            return self.call_failed(peer, error);
        }
        known.call = Call::Delayed { since_ns: now };
    }

    /// Looks how far the calls are. Returns whether any came to an end.
    #[cold]
    pub(super) fn look_at_calls(&mut self) -> bool {
        let before = self.calls;
        for peer in 0..self.peers.len() {
            let Some(known) = &mut self.peers[peer].known else { continue };
            match std::mem::replace(&mut known.call, Call::Delayed { since_ns: 0 }) {
                Call::NotNeeded => known.call = Call::NotNeeded,
                Call::Delayed { since_ns } if clock::now_ns() - since_ns < MOMENT_NS => {
                    known.call = Call::Delayed { since_ns };
                }
                Call::Delayed { .. } => self.dial(peer),
                Call::Crossed { since_ns } if clock::now_ns() - since_ns < CROSSED_NS => {
                    known.call = Call::Crossed { since_ns };
                }
                // Its call has not come: it may have ended meanwhile, and calling again tells.
                Call::Crossed { .. } => self.dial(peer),
                Call::Calling(connecting) => {
                    let mut waiting = Some(connecting);
                    match Connecting::look(&mut waiting, self.settings.cross_memory) {
                        Ok(Answer::Here(met)) => drop(self.add(*met)),
                        // Its own call comes to this place, unless it has come to another before.
                        Ok(Answer::Crossed(id)) if self.find_id(id).is_none() => {
                            let known = self.peers[peer].known.as_mut().expect("it was called");
                            known.call = Call::Crossed { since_ns: clock::now_ns() };
                        }
                        Ok(Answer::Crossed(_)) => {
                            let name = self.peers[peer].known_name().cloned().unwrap_or_default();
                            self.call_failed(peer, &ConnectError::OtherName(name).into());
                        }
                        Ok(Answer::NotYet) => {
                            let known = self.peers[peer].known.as_mut().expect("it was called");
                            known.call = Call::Calling(waiting.expect("it waits"));
                        }
                        Err(error) => self.call_again(peer, &error.into()),
                    }
                }
            }
        }
        self.calls != before
    }

    /// Nobody answers there, and nobody will.
    fn call_failed(&mut self, peer: usize, error: &Error) {
        tracing::debug!(peer, %error, "a peer cannot be reached");
        let error = match error {
            Error::Connect(ConnectError::NobodyListens(_)) => Error::PeerGone(Gone::Ended),
            error => error.clone(),
        };
        self.end_call(peer);
        self.peers[peer].gone = Some(Gone::Ended);
        self.tell_change();
        self.give_up(peer, &error);
        for number in self.matching.unpost_source(peer) {
            self.operations.finish(number, Err(error.clone()));
        }
        self.count_processes();
    }

    /// Ends all sends that wait for a connection.
    fn give_up(&mut self, peer: usize, error: &Error) {
        self.end_call(peer);
        let Some(known) = &mut self.peers[peer].known else { return };
        for number in std::mem::take(&mut known.waiting) {
            self.operations.finish(number, Err(error.clone()));
        }
    }

    /// A call is over, one way or the other.
    fn end_call(&mut self, peer: usize) {
        let Some(known) = &mut self.peers[peer].known else { return };
        if std::mem::replace(&mut known.call, Call::NotNeeded).is_under_way() {
            self.calls -= 1;
            self.hang_up_on(peer);
        }
    }

    /// A known peer is connected: what waits can go.
    pub(super) fn begin_known(&mut self, peer: usize) {
        self.end_call(peer);
        let Some(known) = &mut self.peers[peer].known else { return };
        let waiting = std::mem::take(&mut known.waiting);
        if !waiting.is_empty() {
            self.connection(peer).outbox = waiting;
            self.progress_peer(peer, super::progress::Work::Notes);
        }
    }

    /// The sockets of calls, to be watched.
    pub(super) fn call_sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let known = self.peers.iter().filter_map(|slot| slot.known.as_ref());
        known.filter_map(|known| match &known.call {
            Call::Calling(connecting) => Some(connecting.as_fd()),
            _ => None,
        })
    }

    /// Known peers that nobody has called yet.
    pub(super) fn count_strangers(&self) -> usize {
        self.peers.iter().filter(|slot| slot.is_stranger()).count()
    }
}
