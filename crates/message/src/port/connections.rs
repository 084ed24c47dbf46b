//! Getting to know peers: connecting, being connected to, and the way to oneself.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Assembling, Connection, Peer, PeerSlot, Port, State};
use crate::connect::hello::{Identity, Refusal};
use crate::connect::reach::is_switched_off;
use crate::connect::{Acquaintance, Answer, Connecting, parse_name};
use crate::connection::{PeerFacts, Wire};
use crate::error::{ConnectError, Error};
use crate::quarantine;
use crate::window::board::Board;

impl Port {
    /// Connects to a name. A peer that is connected already is simply returned.
    pub(crate) fn connect(&self, name: &str) -> Result<Peer, Error> {
        self.check_fork()?;
        let socket_name = parse_name(name)?;
        let (mut waiting, before) = {
            let mut state = self.enter();
            if state.closed {
                return Err(Error::Closed);
            }
            let before = state.find_name_ever(name);
            // Somebody else may have the name of one that has ended.
            state.check_peers(true);
            if let Some(peer) = state.find_name(name) {
                return Ok(peer);
            }
            if name == state.name {
                return Ok(state.peer_to_self()?);
            }
            state.dialing.push(name.to_owned());
            let (own_name, identity) = (state.name.clone(), state.identity);
            let (allowed, patience) =
                (state.settings.allowed.clone(), state.settings.connect_timeout);
            let board = state.board();
            drop(state);
            // Without the lock: where many connect at once it takes a while.
            let start = |board: Arc<Board>| {
                let board = board.as_fd();
                Connecting::start(&socket_name, identity, &own_name, board, &allowed, patience)
            };
            (board.map_err(ConnectError::system("making shared memory")).and_then(start), before)
        };
        let outcome = match &mut waiting {
            Ok(_) => {
                let mut waiting = waiting.ok();
                self.await_answer(&mut waiting)
            }
            Err(error) => Err(error.clone().into()),
        };
        let mut state = self.enter();
        state.dialing.retain(|dialed| dialed != name);
        if state.closed {
            return Err(Error::Closed);
        }
        match outcome {
            Ok(Met::Here(met)) => Ok(state.add(*met)?),
            Ok(Met::Crossed(identity)) => {
                drop(state);
                self.await_identity(identity, name)
            }
            // It did not answer, but its own call may have come through meanwhile.
            Err(error) => {
                let came = state.find_name_ever(name);
                // Of one that has gone, what it sent can still be received.
                let is_useful =
                    |peer: &Peer| Some(*peer) != before || state.peers[peer.index].kept_count > 0;
                came.filter(is_useful).ok_or(error)
            }
        }
    }

    /// Waits for the answer to a hello, and answers those of others meanwhile.
    fn await_answer(&self, waiting: &mut Option<Connecting>) -> Result<Met, Error> {
        const NAP: Duration = Duration::from_millis(1);
        loop {
            let answer = Connecting::look(waiting)?;
            match answer {
                Answer::Here(met) => return Ok(Met::Here(met)),
                Answer::Crossed(identity) => return Ok(Met::Crossed(identity)),
                Answer::NotYet => {}
            }
            let mut state = self.enter();
            state.accept_callers();
            state.progress();
            drop(state);
            if let Some(waiting) = waiting {
                waiting.wait_readable(NAP);
            }
        }
    }

    /// Both sides connected at once: the other's attempt counts, and is on its way.
    fn await_identity(&self, identity: Identity, name: &str) -> Result<Peer, Error> {
        let timeout = self.enter().settings.connect_timeout;
        let began = Instant::now();
        loop {
            let mut state = self.enter();
            state.accept_callers();
            state.progress();
            // It may even have come, said all it had to say, and gone.
            if let Some(peer) = state.find_identity_ever(identity) {
                return Ok(peer);
            }
            let seconds = state.settings.connect_timeout.as_secs();
            drop(state);
            if began.elapsed() >= timeout {
                return Err(ConnectError::NoAnswer { name: name.to_owned(), seconds }.into());
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

enum Met {
    Here(Box<Acquaintance>),
    Crossed(Identity),
}

impl State {
    /// Answers everybody who wants to connect.
    pub(crate) fn accept_callers(&mut self) -> bool {
        let mut any = false;
        while let Some(listener) = &mut self.listener {
            let Some(caller) = listener.poll(self.identity) else { break };
            let (theirs, name) = (caller.identity(), caller.name().to_owned());
            self.lose_if_ended(theirs);
            let crossed = self.find_identity(theirs).is_some()
                || (self.dialing.contains(&name) && self.identity < theirs);
            if crossed {
                caller.refuse(self.identity, Refusal::Crossed);
            } else if self.free_slot().is_none() || quarantine::has_many_ended(caller.pid()) {
                caller.refuse(self.identity, Refusal::Full);
            } else if let Ok(board) = self.board()
                && let Some(met) = caller.welcome(self.identity, board.as_fd())
            {
                any |= self.add(met).is_ok();
            }
        }
        any
    }

    /// A peer that connects anew has lost its old connection, though this side may not know yet.
    pub(super) fn lose_if_ended(&mut self, identity: Identity) {
        if let Some(peer) = self.find_identity(identity)
            && self.peers[peer.index].connection.as_ref().is_some_and(|c| !c.wire.is_alive())
        {
            self.end_peer(peer.index);
        }
    }

    /// Makes a connection out of an acquaintance.
    pub(crate) fn add(&mut self, met: Acquaintance) -> Result<Peer, ConnectError> {
        let switched_off = !self.settings.cross_memory || is_switched_off();
        self.add_wire(Wire::new(met, switched_off))
    }

    pub(super) fn add_wire(&mut self, mut wire: Wire) -> Result<Peer, ConnectError> {
        let known = Some(&wire.peer.name).filter(|name| !name.is_empty());
        let known = known.and_then(|name| self.place_of(name));
        let known = known.filter(|index| self.peers[*index].connection.is_none());
        let index = match known {
            Some(index) => index,
            None => self.make_place()?,
        };
        for exposure in &self.exposures {
            wire.share_window(exposure);
        }
        wire.announce();
        if let Some(readiness) = &self.readiness {
            for descriptor in wire.descriptors() {
                let _ = readiness.add(descriptor, false);
            }
        }
        wire.rest(if self.pollers == 0 { self.resting } else { 0 });
        let slot = &mut self.peers[index];
        slot.gone = None;
        slot.connection = Some(Box::new(Connection {
            wire,
            outbox: VecDeque::new(),
            announced: 0,
            active: Vec::new(),
            is_stepping: false,
            announces_all: false,
            arrived: 0,
            assembling: Assembling::Nothing,
            is_ending: false,
        }));
        self.count_processes();
        if known.is_some() {
            self.begin_known(index);
        }
        Ok(self.peer(index))
    }

    /// A place for one more peer: one that nobody speaks of any more, or a new one.
    pub(super) fn free_slot(&self) -> Option<usize> {
        let is_free = |slot: &PeerSlot| {
            let is_expected = slot.known.is_some() || slot.carried.is_some();
            slot.connection.is_none() && slot.kept_count == 0 && !is_expected
        };
        // Reports tell of places.
        let is_told_of = |index| self.operations.reports.iter().any(|report| report.place == index);
        let mut places = self.peers.iter().enumerate();
        let used = places.find(|(index, slot)| is_free(slot) && !is_told_of(*index));
        let used = used.map(|(index, _)| index);
        used.or_else(|| (self.peers.len() < self.settings.most_peers).then_some(self.peers.len()))
    }

    /// The endpoint as its own peer.
    pub(crate) fn peer_to_self(&mut self) -> Result<Peer, ConnectError> {
        if let Some(peer) = self.find_identity(self.identity) {
            return Ok(peer);
        }
        let wire = Wire::to_self(self.identity, self.name.clone())
            .map_err(ConnectError::system("making shared memory"))?;
        self.add_wire(wire)
    }

    fn find_peer(&self, is_it: impl Fn(&PeerFacts) -> bool) -> Option<Peer> {
        let index = self.peers.iter().position(|slot| {
            slot.connection.as_ref().is_some_and(|connection| is_it(&connection.wire.peer))
        })?;
        Some(self.peer(index))
    }

    fn find_identity(&self, identity: Identity) -> Option<Peer> {
        self.find_peer(|facts| facts.identity == identity)
    }

    /// The connected peer of a name.
    pub(crate) fn find_name(&self, name: &str) -> Option<Peer> {
        self.find_peer(|facts| !facts.name.is_empty() && facts.name == name)
    }

    /// The peer of a name, although it may have come and gone.
    pub(crate) fn find_name_ever(&self, name: &str) -> Option<Peer> {
        self.find_name(name).or_else(|| self.find_gone(|_, last| last == name))
    }

    /// The same by identity.
    fn find_identity_ever(&self, identity: Identity) -> Option<Peer> {
        self.find_identity(identity).or_else(|| self.find_gone(|last, _| last == identity))
    }

    fn find_gone(&self, is_it: impl Fn(Identity, &str) -> bool) -> Option<Peer> {
        let matches = |slot: &PeerSlot| {
            let last = slot.last.as_ref().filter(|_| slot.connection.is_none());
            last.is_some_and(|(identity, name)| is_it(*identity, name))
        };
        self.peers.iter().position(matches).map(|index| self.peer(index))
    }

    /// Who a peer is.
    pub(crate) fn facts_of(&self, peer: Peer) -> Result<&Wire, Error> {
        let index = self.find(peer)?;
        let connection = self.peers[index].connection.as_ref();
        connection.map(|connection| &connection.wire).ok_or_else(|| self.gone(index))
    }

    /// The name of a peer, although it may be gone.
    pub(crate) fn name_of(&self, peer: Peer) -> Result<String, Error> {
        let index = self.find(peer)?;
        let slot = &self.peers[index];
        let now = slot.connection.as_ref().map(|connection| &connection.wire.peer.name);
        let ever = slot.known_name().or(slot.last.as_ref().map(|(_, name)| name));
        now.or(ever).cloned().ok_or_else(|| self.gone(index))
    }

    /// All connected peers.
    pub(crate) fn all_peers(&self) -> Vec<Peer> {
        let connected = |index: &usize| self.peers[*index].connection.is_some();
        (0..self.peers.len()).filter(connected).map(|index| self.peer(index)).collect()
    }
}
