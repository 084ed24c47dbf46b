//! Moving everything on: notes that came, steps of messages under way, sends that wait for room.

use std::sync::Arc;

use memferry_sys::clock;

use super::deliver::Fate;
use super::operations::{Deed, Leaving};
use super::{Connection, Peer, Received, State, Turn, turn};
use crate::connection::{CopyError, Wire};
use crate::error::{Error, Gone};
use crate::path::{self, Copying, ReceiveStage, SendStage, Step};
use crate::plan::PathKind;
use crate::region;
use crate::ring::cells::Nonsense;
use crate::ring::layout::CELLS;
use crate::wire::{Note, Number};

impl super::PeerSlot {
    /// Whether a look at the peer could move anything.
    #[inline]
    fn has_something_to_do(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| {
            connection.wire.consumer.is_ready()
                || !connection.active.is_empty()
                || !connection.outbox.is_empty()
                || connection.wire.is_holding()
        })
    }
}

/// How much is done at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// What came is taken in, what waits is sent.
    Notes,
    /// Messages under way make their steps too, up to their next copy.
    Steps,
    /// One of them has its next copy made: by the caller, without the lock.
    Copy,
}

/// How often the ends of peers are looked for while nothing moves.
const CHECK_NS: u64 = 10_000_000;

/// The same for calls of peers that are expected to call.
const LISTEN_NS: u64 = 100_000;

impl State {
    /// Does what can be done now with the lock held. Returns whether anything moved, or could be copied by
    /// a caller that lets go of the lock.
    pub(crate) fn step_all(&mut self) -> bool {
        self.is_copy_due = false;
        self.work(Work::Steps) | self.is_copy_due
    }

    /// The same, and takes one copy for the caller to make without the lock.
    #[inline]
    pub(super) fn step_and_take_copy(&mut self) -> (bool, Option<(usize, Arc<Copying>)>) {
        let moved = self.work(Work::Copy);
        (moved, self.next_copy.take())
    }

    pub(super) fn work(&mut self, work: Work) -> bool {
        let mut moved = false;
        if self.drops_told != region::drops() {
            self.tell_drops();
        }
        if !self.held.is_empty() {
            moved |= self.release_held();
        }
        // Peers have their turns to have a copy made: one may have much to copy.
        let (count, first) = (self.peers.len(), self.copy_turn);
        for peer in (first..count).chain(0..first.min(count)) {
            if self.peers[peer].has_something_to_do() {
                moved |= self.progress_peer(peer, work);
            }
        }
        if self.calls > 0 {
            moved |= self.look_at_calls();
        }
        if self.carried.is_due() {
            moved |= self.look_at_carrier();
        }
        self.moves += u64::from(moved);
        moved
    }

    /// A number that is another one whenever something has moved.
    pub(crate) fn moves(&self) -> u64 {
        self.moves
    }

    /// The progress epoch: it changes with everything that a waiting thread may poll for, which is an
    /// operation that ended, a message that was kept, a peer that is gone, or any other move. A thread
    /// that found nothing at one epoch may sleep only while the epoch is still the same.
    pub(super) fn epoch(&self) -> u64 {
        // Each of the three only grows, so the sum is the same only if all of them are.
        self.moves + self.operations.ends() + self.matching.arrivals()
    }

    /// Something has changed that no operation tells of: a thread may wait for just that.
    pub(super) fn tell_change(&mut self) {
        self.moves += 1;
        self.has_news = true;
    }

    /// Tells peers which regions of this process are gone, so that they let go of the memory.
    #[cold]
    fn tell_drops(&mut self) {
        self.drops_told = region::drops();
        for slot in &mut self.peers {
            if let Some(connection) = &mut slot.connection {
                connection.wire.unshare_dropped();
                connection.wire.announce();
            }
        }
    }

    /// The same for one peer. One that breaks the protocol is lost.
    pub(super) fn progress_peer(&mut self, peer: usize, work: Work) -> bool {
        if self.peers[peer].connection.is_none() {
            return false;
        }
        match self.try_progress(peer, work) {
            Ok((moved, closes)) => {
                if let Some(connection) = &mut self.peers[peer].connection {
                    connection.wire.announce();
                }
                if closes {
                    self.lose(peer, Gone::Closed);
                } else if self.peers[peer].connection.as_ref().is_some_and(|c| c.is_ending) {
                    self.end_peer(peer);
                }
                moved || closes
            }
            Err(Nonsense(what)) => {
                self.lose(peer, Gone::Misbehaved(what));
                true
            }
        }
    }

    fn try_progress(&mut self, peer: usize, work: Work) -> Result<(bool, bool), Nonsense> {
        let (mut moved, closes) = self.take_in(peer)?;
        if closes {
            return Ok((true, true));
        }
        let connection = self.connection(peer);
        if connection.wire.is_holding() {
            moved |= connection.wire.flush()?;
        }
        // Before the copies: the peer can begin with what it is told of while this side copies.
        if !self.connection(peer).outbox.is_empty() && self.send_outbox(peer)? {
            self.wire(peer).announce();
            moved = true;
        }
        if work != Work::Notes && !self.connection(peer).active.is_empty() {
            let (stepped, can_copy) = self.step_active(peer, work)?;
            let connection = self.connection(peer);
            connection.is_stepping = (stepped || can_copy) && !connection.active.is_empty();
            moved |= stepped;
        }
        Ok((moved, false))
    }

    /// Takes in what a peer wrote, at most as much as a ring holds. Returns whether that was anything,
    /// and whether the peer closes.
    pub(super) fn take_in(&mut self, peer: usize) -> Result<(bool, bool), Nonsense> {
        let mut moved = false;
        for _ in 0..CELLS {
            let Some(words) = self.connection(peer).wire.consumer.peek() else { break };
            if self.deliver(peer, &words)? == Fate::Closes {
                return Ok((true, true));
            }
            self.connection(peer).wire.pass();
            moved = true;
        }
        Ok((moved, false))
    }

    /// Lets every active operation of a peer do a step. Returns whether any moved, and whether any has a
    /// copy to make.
    fn step_active(&mut self, peer: usize, work: Work) -> Result<(bool, bool), Nonsense> {
        let (mut moved, mut is_due) = (false, false);
        let mut index = 0;
        while let Some(&number) = self.connection(peer).active.get(index) {
            let step = self.step(peer, number, work)?;
            if self.connection(peer).is_ending {
                return Ok((true, false));
            }
            match step {
                Some(Step::Idle) => index += 1,
                // It can be moved on, by whoever makes its copy.
                Some(Step::Copy) if work == Work::Steps => {
                    is_due = true;
                    index += 1;
                }
                Some(Step::Moved | Step::Copy) => {
                    moved = true;
                    index += 1;
                }
                // Over, for this list: ended, or no more to do for this side.
                _ => {
                    moved = true;
                    // In order: who waits for the last of several small messages has them all.
                    self.connection(peer).active.remove(index);
                }
            }
        }
        Ok((moved, is_due))
    }

    /// Whether another thread makes the only copy of a message before this one: who waits for the last of
    /// several small messages has them all.
    fn is_behind_a_copy(&mut self, peer: usize, number: Number) -> bool {
        let Self { operations, peers, .. } = self;
        let Some(connection) = &peers[peer].connection else { return false };
        let before = connection.active.iter().take_while(|active| **active != number);
        before.into_iter().any(|active| {
            operations.receiving(*active).is_some_and(|receiving| receiving.is_in_its_only_copy())
        })
    }

    /// One step of an operation. `None` if it is no longer under way.
    fn step(&mut self, peer: usize, number: Number, work: Work) -> Result<Option<Step>, Nonsense> {
        self.fetch(number)?;
        let Self { operations, peers, next_copy, is_copy_due, .. } = self;
        let Some(operation) = operations.get(number) else { return Ok(None) };
        if operation.outcome.is_some() {
            return Ok(None);
        }
        let wire = &mut peers[peer].connection.as_mut().expect("it is connected").wire;
        if !wire.is_surely_alive() {
            // The number of a process that has ended may be another's by now.
            return Ok(Some(Step::Idle));
        }
        match &mut operation.deed {
            Deed::Send(sending) if sending.helps_slowly() => {
                self.begin_slow_help(peer, number);
                // The thread does all that is to be done.
                Ok(None)
            }
            Deed::Send(sending) => {
                let may_copy = work == Work::Copy && next_copy.is_none();
                let mut turn = Turn { may_copy, ..turn(number, wire) };
                let step = path::of(sending.path).send(sending, &mut turn)?;
                wire.announce();
                if step == Step::Copy {
                    *is_copy_due = true;
                    if may_copy {
                        *next_copy = sending.copying.clone().map(|copying| (peer, copying));
                    }
                }
                Ok(Some(step))
            }
            Deed::Access(_) | Deed::CarriedAccess { .. } | Deed::Several(_) => Ok(None),
            Deed::Receive(receiving) => {
                if let ReceiveStage::Arrived { sender } = receiving.stage {
                    let told = !self.is_behind_a_copy(peer, number)
                        && self.tell_arrived(peer, number, sender)?;
                    return Ok(Some(if told { Step::Done } else { Step::Idle }));
                }
                let ReceiveStage::Fetching(fetch) = &receiving.stage else { return Ok(None) };
                let (kind, sender) = (fetch.plan.path, fetch.sender);
                if fetch.is_slow && fetch.copying.is_none() && fetch.done == 0 {
                    if self.begin_slow(peer, number) {
                        return Ok(Some(Step::Idle));
                    }
                    // Without a thread the sender reads its own memory.
                    return self
                        .fall_back(peer, number, CopyError::Refused(libc::EAGAIN))
                        .map(Some);
                }
                let may_copy = work == Work::Copy && next_copy.is_none();
                let mut turn = Turn { may_copy, ..turn(number, wire) };
                let mut step = path::of(kind).receive(receiving, &mut turn)?;
                if step == Step::Copy {
                    *is_copy_due = true;
                    if may_copy && let ReceiveStage::Fetching(fetch) = &receiving.stage {
                        *next_copy = fetch.copying.clone().map(|copying| (peer, copying));
                    }
                    return Ok(Some(step));
                }
                let is_over = matches!(step, Step::Done | Step::Failed(_));
                if is_over && wire.memory.has_other_ended() && !wire.is_self() {
                    // What was copied may be anything, and what could not be copied may be unmapped by
                    // now. The end of the peer ends the receive, so that no message behind this one is
                    // taken for it.
                    self.connection(peer).is_ending = true;
                    return Ok(Some(Step::Idle));
                }
                if let Step::Refused(error) = step {
                    return self.fall_back(peer, number, error).map(Some);
                }
                if let Step::Failed(error) = &step {
                    wire.post(Note::Finish { sender, error: path::report(error) });
                    self.operations.finish(number, Err(error.clone()));
                } else if step == Step::Done && self.is_behind_a_copy(peer, number) {
                    let Some(receiving) = self.operations.receiving(number) else {
                        return Ok(None);
                    };
                    receiving.stage = ReceiveStage::Arrived { sender };
                    self.connection(peer).arrived += 1;
                    step = Step::Idle;
                } else if step == Step::Done && !self.tell_arrived(peer, number, sender)? {
                    step = Step::Idle;
                }
                Ok(Some(step))
            }
        }
    }

    /// Sends what waits, in order, while there is room.
    fn send_outbox(&mut self, peer: usize) -> Result<bool, Nonsense> {
        let mut moved = false;
        self.wire(peer).forget_refusal();
        while let Some(&number) = self.connection(peer).outbox.front() {
            let Self { operations, peers, looks, .. } = self;
            let connection = peers[peer].connection.as_mut().expect("it is connected");
            let Some(sending) = operations.sending(number) else {
                connection.outbox.pop_front();
                continue;
            };
            if matches!(sending.stage, SendStage::Queued)
                && sending.path != PathKind::Single
                && !connection.takes_payloads()
            {
                sending.path = PathKind::Single;
                sending.absent = looks.may_be_absent(sending.pieces.as_slice());
            }
            match path::of(sending.path).send(sending, &mut turn(number, &mut connection.wire))? {
                Step::Idle => break,
                Step::Moved if matches!(sending.stage, SendStage::Announced) => {
                    connection.announced += 1;
                    connection.outbox.pop_front();
                }
                Step::Moved => {}
                Step::Done => {
                    connection.outbox.pop_front();
                    let (tag, length) = (sending.envelope.tag, sending.length);
                    let received = self.received(peer, tag, length);
                    self.finish_send(number, Ok(received));
                }
                Step::Failed(error) => {
                    connection.outbox.pop_front();
                    operations.finish(number, Err(error));
                }
                Step::Refused(_) | Step::Copy => {
                    unreachable!("what waits to be sent copies nothing")
                }
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Looks whether peers have ended and whether new ones call, if it is time to. Returns whether
    /// any had ended.
    pub(crate) fn check_peers(&mut self, now: bool) -> bool {
        let time = clock::now_ns();
        if !now && time.saturating_sub(self.last_checked_ns) < CHECK_NS {
            return self.listen(time);
        }
        (self.last_checked_ns, self.listened_at_ns) = (time, time);
        self.accept_callers();
        let mut found = self.look_at_carrier();
        for peer in 0..self.peers.len() {
            let Some(connection) = &self.peers[peer].connection else { continue };
            if connection.wire.is_alive() {
                continue;
            }
            self.end_peer(peer);
            found = true;
        }
        self.moves += u64::from(found);
        found
    }

    /// Looks for callers while there are peers that have not called. Returns whether any came.
    fn listen(&mut self, time: u64) -> bool {
        if self.strangers == 0 || time.saturating_sub(self.listened_at_ns) < LISTEN_NS {
            return false;
        }
        self.listened_at_ns = time;
        self.accept_callers()
    }

    /// Ends a connection and everything that needs it.
    pub(super) fn lose(&mut self, peer: usize, gone: Gone) {
        let Some(mut connection) = self.peers[peer].connection.take() else { return };
        connection.wire.memory.end();
        tracing::debug!(peer, ?gone, "lost a peer");
        // Probes and waits for windows end by this, and no operation does that tells them.
        self.tell_change();
        self.peers[peer].gone = Some(gone.clone());
        let facts = &connection.wire.peer;
        self.peers[peer].last = Some((facts.id, facts.name.clone()));
        let error = Error::PeerGone(gone.clone());
        let belongs = |deed: &Deed| match deed {
            Deed::Send(sending) => sending.peer == peer,
            Deed::Access(_) | Deed::CarriedAccess { .. } | Deed::Several(_) => false,
            Deed::Receive(receiving) => {
                receiving.peer == peer && !matches!(receiving.stage, ReceiveStage::Posted)
            }
        };
        let first_lost = self.first_lost(peer);
        self.fail_behind(peer, first_lost, &error);
        for number in self.operations.numbers(belongs) {
            self.abandon(number, &mut connection.wire, &error);
        }
        for number in self.matching.unpost_source(peer) {
            self.operations.finish(number, Err(error.clone()));
        }
        self.cut(peer, first_lost);
        self.lose_windows(peer, &mut connection.wire);
        connection.wire.hang_up();
        self.count_processes();
        // Before the descriptors close: a duplicate would keep them in the set, readable for ever.
        if let Some(readiness) = &self.readiness {
            connection.wire.descriptors().for_each(|fd| readiness.remove(fd));
        }
        let leftover = connection.wire.leftover(&gone).map(Leaving::CleanUp);
        self.operations.leavings.extend(leftover);
    }

    // ---- small helpers for everybody ----

    #[inline]
    pub(super) fn connection(&mut self, peer: usize) -> &mut Connection {
        self.peers[peer].connection.as_mut().expect("the caller knows that it is connected")
    }

    #[inline]
    pub(super) fn wire(&mut self, peer: usize) -> &mut Wire {
        &mut self.connection(peer).wire
    }

    #[inline]
    pub(super) fn received(&self, peer: usize, tag: u64, length: u64) -> Received {
        Received { source: self.peer(peer), tag, length }
    }

    pub(super) fn peer(&self, index: usize) -> Peer {
        Peer { index, generation: self.peers[index].generation, port: self.port }
    }

    /// Processes in this conversation, this one included.
    pub(super) fn processes(&self) -> usize {
        1 + self.peers.iter().filter(|slot| slot.is_neighbour(&self.name)).count()
    }
}
