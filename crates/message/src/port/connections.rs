//! Getting to know peers: connecting, being connected to, and the way to oneself.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Assembling, Connection, Peer, PeerSlot, Port, State};
use crate::connect::hello::Refusal;
use crate::connect::{Acquaintance, Answer, Connecting, Dialed, EndpointId, Listening, parse_name};
use crate::connection::{PeerFacts, Wire};
use crate::error::{ConnectError, Error};
use crate::quarantine;
use crate::window::board::Board;

impl Port {
    /// Connects to a name. A peer that is connected already is simply returned.
    pub(crate) fn connect(&self, name: &str) -> Result<Peer, Error> {
        self.check_fork()?;
        let socket_name = parse_name(name)?;
        let mut state = self.enter();
        if state.closed {
            return Err(Error::Closed);
        }
        let before = state.find_name_ever(name);
        // Somebody else may have the name of one that has ended.
        state.check_peers(true);
        if let Some(peer) = state.find_proven(name) {
            return Ok(peer);
        }
        if name == state.name {
            return Ok(state.peer_to_self()?);
        }
        let (allowed, patience) = (state.settings.allowed.clone(), state.settings.connect_timeout);
        let cross_memory = state.settings.cross_memory;
        drop(state);
        // Without the lock: where many connect at once it takes a while.
        let dialed = Dialed::dial(&socket_name, &allowed, patience);
        let mut state = self.enter();
        if state.closed {
            return Err(Error::Closed);
        }
        let dialed = match dialed {
            Ok(dialed) => dialed,
            // Nobody listens there whom it could be taken from.
            Err(error) => {
                let is_nobody = matches!(error, ConnectError::NobodyListens(_));
                let connected = state.find_name(name).filter(|_| is_nobody);
                let came = || state.came_by_itself(name, None, before);
                return connected.or_else(came).ok_or(error.into());
            }
        };
        if let Some(peer) = state.find_listening(&dialed.listening, name)? {
            return Ok(peer);
        }
        // With the lock since the look above: whoever calls this side from now on is met by this.
        let listening = dialed.listening.clone();
        state.dialing.push(listening.clone());
        let (own_name, identity, board) = (state.name.clone(), state.identity, state.board());
        drop(state);
        let start = |board: Arc<Board>| {
            Connecting::start(dialed, identity, &own_name, board.as_fd(), patience)
        };
        let waiting = board.map_err(ConnectError::system("making shared memory")).and_then(start);
        let outcome = match waiting {
            Ok(waiting) => self.await_answer(waiting, &listening, name, cross_memory),
            Err(error) => Err(error.into()),
        };
        let mut state = self.enter();
        state.stop_dialing(&listening);
        if state.closed {
            return Err(Error::Closed);
        }
        match outcome {
            Ok(Met::Here(met)) => Ok(state.add(*met)?),
            Ok(Met::Already(peer)) => Ok(peer),
            Ok(Met::Crossed(id)) => {
                drop(state);
                self.await_id(id, name)
            }
            // It did not answer, but its own call may have come through meanwhile.
            Err(error) => state.came_by_itself(name, Some(&listening), before).ok_or(error),
        }
    }

    /// Waits for the answer to a hello, and answers those of others meanwhile.
    fn await_answer(
        &self,
        waiting: Connecting,
        listening: &Listening,
        name: &str,
        cross_memory: bool,
    ) -> Result<Met, Error> {
        const NAP: Duration = Duration::from_millis(1);
        let mut waiting = Some(waiting);
        loop {
            let answer = Connecting::look(&mut waiting, cross_memory)?;
            match answer {
                Answer::Here(met) => return Ok(Met::Here(met)),
                Answer::Crossed(id) => return Ok(Met::Crossed(id)),
                Answer::NotYet => {}
            }
            let mut state = self.enter();
            // Whoever is called may have called too. Its call counts then, and it may not look at
            // this one any more: it has what it wanted.
            state.accept_callers();
            if let Some(peer) = state.find_listening(listening, name)? {
                return Ok(Met::Already(peer));
            }
            state.progress();
            drop(state);
            if let Some(waiting) = &waiting {
                waiting.wait_readable(NAP);
            }
        }
    }

    /// The other side's connection counts: it is there already, or on its way.
    fn await_id(&self, id: EndpointId, name: &str) -> Result<Peer, Error> {
        let timeout = self.enter().settings.connect_timeout;
        let began = Instant::now();
        loop {
            let mut state = self.enter();
            state.accept_callers();
            state.progress();
            // It may even have come, said all it had to say, and gone.
            if let Some(peer) = state.find_id_ever(id) {
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
    Crossed(EndpointId),
    /// It has called meanwhile.
    Already(Peer),
}

impl State {
    /// Answers everybody who wants to connect.
    pub(crate) fn accept_callers(&mut self) -> bool {
        let mut any = false;
        while let Some(listener) = &mut self.listener {
            let cross_memory = self.settings.cross_memory;
            let Some(mut caller) = listener.poll(self.identity, cross_memory) else { break };
            let (id, name) = (caller.id(), caller.check_name());
            let is_dialed = self.dialing.iter().any(|dialed| dialed.is(name, id.credentials));
            self.lose_if_ended(id);
            let crossed = self.find_id(id).is_some() || (is_dialed && self.identity < id.identity);
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
    pub(super) fn lose_if_ended(&mut self, id: EndpointId) {
        if let Some(peer) = self.find_id(id)
            && self.peers[peer.index].connection.as_ref().is_some_and(|c| !c.wire.is_alive())
        {
            self.end_peer(peer.index);
        }
    }

    /// Makes a connection out of an acquaintance.
    pub(crate) fn add(&mut self, met: Acquaintance) -> Result<Peer, ConnectError> {
        self.add_wire(Wire::new(met))
    }

    pub(super) fn add_wire(&mut self, mut wire: Wire) -> Result<Peer, ConnectError> {
        let known = self.place_of(&wire.peer.name).or_else(|| self.place_called(&wire.peer));
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
                self.is_watch_partial |= readiness.add(descriptor, false).is_err();
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
            slow: None,
            slow_help: None,
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
        if let Some(peer) = self.find_self() {
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

    /// This endpoint as its own peer, if it is.
    fn find_self(&self) -> Option<Peer> {
        let is_self = |slot: &PeerSlot| slot.connection.as_ref().is_some_and(|c| c.wire.is_self());
        self.peers.iter().position(is_self).map(|index| self.peer(index))
    }

    /// The connected peer that is this endpoint of this process.
    pub(super) fn find_id(&self, id: EndpointId) -> Option<Peer> {
        self.find_peer(|facts| facts.id == id)
    }

    /// The connected peer that the kernel says listens on a name.
    fn find_proven(&self, name: &str) -> Option<Peer> {
        self.find_peer(|facts| facts.is_proven && facts.name == name)
    }

    /// The connected peer that listens where a name has led to, be it this side itself.
    pub(super) fn find_listening(
        &mut self,
        listening: &Listening,
        name: &str,
    ) -> Result<Option<Peer>, ConnectError> {
        if !self.name.is_empty()
            && self.name == listening.name
            && listening.credentials.pid == std::process::id()
        {
            return self.peer_to_self().map(Some);
        }
        let found = self.find_peer(|facts| listening.is(&facts.bound, facts.id.credentials));
        if let Some(peer) = found {
            let connection = self.peers[peer.index].connection.as_mut();
            let facts = &mut connection.expect("it was found by it").wire.peer;
            facts.is_proven |= facts.name == name;
        }
        Ok(found)
    }

    /// This side does not connect to somebody any more.
    pub(super) fn stop_dialing(&mut self, listening: &Listening) {
        if let Some(place) = self.dialing.iter().position(|dialed| dialed == listening) {
            self.dialing.swap_remove(place);
        }
    }

    /// The connected peer of a name: one that was called by it, or says that it listens there.
    pub(crate) fn find_name(&self, name: &str) -> Option<Peer> {
        self.find_peer(|facts| !facts.name.is_empty() && facts.name == name)
    }

    /// The peer of a name, although it may have come and gone.
    pub(crate) fn find_name_ever(&self, name: &str) -> Option<Peer> {
        self.find_name(name).or_else(|| self.find_gone(|_, last| last == name))
    }

    /// The same by who it is.
    fn find_id_ever(&self, id: EndpointId) -> Option<Peer> {
        self.find_id(id).or_else(|| self.find_gone(|last, _| last == id))
    }

    /// The peer of a name that could not be called: its own call has come through since `before`, or
    /// what it sent can still be received though it has gone.
    fn came_by_itself(
        &self,
        name: &str,
        listening: Option<&Listening>,
        before: Option<Peer>,
    ) -> Option<Peer> {
        let is_it = |id: EndpointId, last: &str| {
            listening.is_some_and(|listening| listening.is(last, id.credentials))
        };
        let came = self.find_name_ever(name).or_else(|| self.find_gone(is_it));
        came.filter(|peer| Some(*peer) != before || self.peers[peer.index].kept_count > 0)
    }

    fn find_gone(&self, is_it: impl Fn(EndpointId, &str) -> bool) -> Option<Peer> {
        let matches = |slot: &PeerSlot| {
            let last = slot.last.as_ref().filter(|_| slot.connection.is_none());
            last.is_some_and(|(id, name)| is_it(*id, name))
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
