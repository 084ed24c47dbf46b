//! Beginning operations: sends, receives, probes, and taking them back.

use super::operations::Deed;
use super::progress::Work;
use super::receive_now::Now;
use super::{Assembling, Kept, Peer, Received, State, turn};
use crate::envelope::{Envelope, Wanted};
use crate::error::{Error, Gone, ValidationError};
use crate::matching::{Unexpected, Want};
use crate::path::{self, ReceiveStage, Receiving, SendStage, Sending, Step};
use crate::pieces::{MOST_PIECES, Piece, Pieces, scatter, total};
use crate::plan::{self, PathKind};
use crate::report::Ending;
use crate::ring::cells::Nonsense;
use crate::wire::{Note, Number, inline_limit};

/// Messages up to this size are one fragment.
const ONE_FRAGMENT: u64 = 8 << 10;

/// What became of a new operation.
#[derive(Debug)]
pub(crate) enum Begun {
    /// It is over already.
    Over(Result<Received, Error>),
    /// It is under way.
    Underway(Number),
}

impl State {
    /// Checks a peer's name and that it is connected.
    #[inline]
    pub(crate) fn find(&self, peer: Peer) -> Result<usize, Error> {
        if self.closed {
            return Err(Error::Closed);
        }
        let slot = self.peers.get(peer.index).filter(|_| peer.port == self.port);
        let slot = slot.ok_or(ValidationError::UnknownPeer)?;
        if slot.generation != peer.generation {
            return Err(Error::PeerGone(Gone::Ended));
        }
        Ok(peer.index)
    }

    /// Begins a send. With an ending it is told in a report when it is not over at once.
    ///
    /// # Safety
    /// The pieces must stay valid for reads, unchanged, until the operation is over.
    #[inline]
    pub(crate) unsafe fn send(
        &mut self,
        to: Peer,
        envelope: Envelope,
        pieces: &[Piece],
        ending: Option<Ending>,
    ) -> Result<Begun, Error> {
        let peer = self.find(to)?;
        let length = check_pieces(pieces)?;
        if self.peers[peer].connection.is_none() {
            return self.send_unconnected(peer, envelope, pieces, length, ending);
        }
        // SAFETY: passed on.
        match unsafe { self.try_send(peer, envelope, pieces, length, ending) } {
            Ok(begun) => begun,
            Err(Nonsense(what)) => {
                self.lose(peer, Gone::Misbehaved(what));
                Err(self.gone(peer))
            }
        }
    }

    #[inline]
    unsafe fn try_send(
        &mut self,
        peer: usize,
        envelope: Envelope,
        pieces: &[Piece],
        length: u64,
        ending: Option<Ending>,
    ) -> Result<Result<Begun, Error>, Nonsense> {
        // Of a message that was announced the receiver tells when it has it.
        let is_asked_for = ending.is_some_and(|ending| ending.delivered);
        let eager_limit = self.eager_limit(peer);
        let at_once = eager_limit.min(ONE_FRAGMENT);
        // SAFETY: passed on.
        if !is_asked_for && unsafe { self.send_now(peer, &envelope, pieces, length, at_once) }? {
            return Ok(Ok(Begun::Over(Ok(self.received(peer, envelope.tag, length)))));
        }
        if self.connection(peer).wire.has_peer_ended() {
            self.end_peer(peer);
            return Ok(Err(self.gone(peer)));
        }
        let connection = self.connection(peer);
        let first = connection.outbox.is_empty();
        let path = match length {
            // A receiver that is full gets the payload when it asks for it.
            _ if is_asked_for || !connection.takes_payloads() => PathKind::Single,
            _ if length <= inline_limit(&envelope) as u64 => PathKind::Inline,
            _ if length <= eager_limit => PathKind::Eager,
            _ => PathKind::Single,
        };
        let mut sending = self.sending(peer, envelope, pieces, length, path);
        if first && path == PathKind::Eager && self.send_at_once(peer, &mut sending)? {
            return Ok(Ok(Begun::Over(Ok(self.received(peer, envelope.tag, length)))));
        }
        if !self.operations.has_room() && matches!(sending.stage, SendStage::Queued) {
            let count = self.operations.count();
            return Ok(Err(ValidationError::TooManyOperations(count).into()));
        }
        let number = self.operations.insert(Deed::Send(sending), ending);
        self.connection(peer).outbox.push_back(number);
        if first {
            self.progress_peer(peer, Work::Notes);
        }
        Ok(Ok(Begun::Underway(number)))
    }

    /// The largest message that is sent to a peer without being asked for.
    #[inline]
    fn eager_limit(&mut self, peer: usize) -> u64 {
        let wire = self.wire(peer);
        let reachable = wire.their_reach.0 || wire.is_self();
        self.eager_limits[usize::from(reachable)]
    }

    /// Sends a message that is no longer than the limit, if nothing waits before it and there is room
    /// for all of it: then it is over.
    ///
    /// # Safety
    /// The pieces must be valid for reads of `length` bytes.
    #[inline]
    pub(super) unsafe fn send_now(
        &mut self,
        peer: usize,
        envelope: &Envelope,
        pieces: &[Piece],
        length: u64,
        limit: u64,
    ) -> Result<bool, Nonsense> {
        let connection = self.connection(peer);
        if !connection.outbox.is_empty()
            || !connection.takes_payloads()
            || !connection.wire.may_send()
        {
            return Ok(false);
        }
        let wire = &mut connection.wire;
        // SAFETY: the caller vouches for the pieces, for both.
        unsafe {
            if length <= inline_limit(envelope) as u64 {
                if path::put_inline(wire, envelope, pieces, length as usize)? {
                    wire.announce();
                    return Ok(true);
                }
            } else if length <= limit && path::put_eager(wire, envelope, pieces, length as usize)? {
                wire.announce();
                wire.warm_up(length as usize);
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// A message of which nothing is sent.
    pub(super) fn sending(
        &mut self,
        peer: usize,
        envelope: Envelope,
        pieces: &[Piece],
        length: u64,
        path: PathKind,
    ) -> Sending {
        // Only what waits here is read by others.
        let absent = path == PathKind::Single && self.looks.may_be_absent(pieces);
        Sending {
            peer,
            envelope,
            absent,
            copying: None,
            pieces: Pieces::new(pieces),
            length,
            path,
            chunk_bytes: plan::fragment_bytes(length),
            expects: self.matching.has_posted(),
            stage: SendStage::Queued,
        }
    }

    /// Sends an eager message as far as there is room. Returns whether all of it is sent.
    fn send_at_once(&mut self, peer: usize, sending: &mut Sending) -> Result<bool, Nonsense> {
        let wire = self.wire(peer);
        loop {
            match path::of(sending.path).send(sending, &mut turn(Number::default(), wire))? {
                Step::Done => {
                    wire.announce();
                    return Ok(true);
                }
                Step::Moved => {}
                _ => return Ok(false),
            }
        }
    }

    /// What a receive asks for, with the place of the peer.
    #[inline]
    pub(super) fn want(&self, wanted: &Wanted) -> Result<Want, Error> {
        let source = wanted.from.peer().map(|peer| self.find(peer)).transpose()?;
        if self.closed {
            return Err(Error::Closed);
        }
        Ok(Want { lane: wanted.lane, source, tag: wanted.tag, mask: wanted.mask })
    }

    /// Begins a receive. With an ending it is told in a report, even if it is over at once.
    ///
    /// # Safety
    /// The pieces must stay valid for writes until the operation is over, and nobody else may
    /// access them.
    pub(crate) unsafe fn receive(
        &mut self,
        wanted: &Wanted,
        pieces: &[Piece],
        ending: Option<Ending>,
    ) -> Result<Begun, Error> {
        let want = self.want(wanted)?;
        let capacity = check_pieces(pieces)?;
        let kept = self.matching.look(&want).map(|found| found.message.is_complete());
        // A message that is all here makes room for itself.
        if kept != Some(true) && !self.operations.has_room() {
            return Err(ValidationError::TooManyOperations(self.operations.count()).into());
        }
        if kept.is_none() {
            self.check_source(&want)?;
        }
        let number = self.insert_receive(pieces, capacity, ending, None);
        match self.matching.take(&want) {
            // SAFETY: the receive has the pieces that the caller vouches for.
            Some(unexpected) => unsafe { self.take_kept(unexpected, number) },
            None => {
                self.matching.post(want, number, false);
                self.await_source(&want);
            }
        }
        Ok(match self.operations.take_outcome(number) {
            Some(outcome) => Begun::Over(outcome),
            None => Begun::Underway(number),
        })
    }

    /// Whether anything can still come from whom a receive asks for.
    pub(super) fn check_source(&self, want: &Want) -> Result<(), Error> {
        match want.source {
            Some(peer) if !self.is_reachable(peer) => Err(self.gone(peer)),
            _ => Ok(()),
        }
    }

    /// Receives a small message without making an operation, if it comes at once.
    ///
    /// # Safety
    /// The pieces must be valid for writes, and nobody else may access them.
    #[inline]
    pub(super) unsafe fn receive_at_once(
        &mut self,
        wanted: &Wanted,
        pieces: &[Piece],
    ) -> Result<Option<Now>, Error> {
        let want = self.want(wanted)?;
        let capacity = check_pieces(pieces)?;
        // SAFETY: passed on.
        Ok(unsafe { self.receive_now(&want, pieces, capacity) })
    }

    #[inline(always)]
    pub(super) fn insert_receive(
        &mut self,
        pieces: &[Piece],
        capacity: u64,
        ending: Option<Ending>,
        part_of: Option<Number>,
    ) -> Number {
        let (pieces, stage) = (Pieces::new(pieces), ReceiveStage::Posted);
        let (peer, arrival, envelope, length) = (usize::MAX, 0, Envelope::default(), 0);
        let receiving =
            Receiving { pieces, capacity, peer, arrival, envelope, length, part_of, stage };
        self.operations.insert(Deed::Receive(receiving), ending)
    }

    /// A kept message has found its receive.
    ///
    /// # Safety
    /// The pieces of the receive must be valid for writes.
    pub(super) unsafe fn take_kept(&mut self, kept: Unexpected<Kept>, number: Number) {
        let Unexpected { id, source: peer, envelope, message, .. } = kept;
        self.let_go_of_kept(peer, message.weight(), message.bytes());
        match message {
            Kept::Here { bytes, arrived } => {
                let length = bytes.len() as u64;
                let Some(receiving) = self.operations.receiving(number) else { return };
                receiving.meet(peer, envelope, length);
                let fits = receiving.accepted().min(arrived as u64) as usize;
                // SAFETY: the caller vouches for the pieces; no more is written than they hold.
                unsafe { scatter(receiving.pieces.as_slice(), 0, bytes.as_ptr(), fits) };
                if arrived == bytes.len() {
                    self.tell_carrier(peer, length);
                    return self.complete_receive(number);
                }
                // What has not arrived yet goes to the receive itself.
                let arrived = arrived as u64;
                receiving.arrival = id;
                receiving.stage = ReceiveStage::Arriving { arrived, requested: None };
                let connection = self.connection(peer);
                debug_assert_eq!(connection.assembling, Assembling::Kept(id));
                connection.assembling = Assembling::Operation(number);
            }
            Kept::There { length, request } => {
                let met = self.meet(number, (peer, id), envelope, length, request);
                if let Err(Nonsense(what)) = met {
                    self.lose(peer, Gone::Misbehaved(what));
                }
                self.progress_peer(peer, Work::Notes);
            }
            Kept::Elsewhere { length, ticket } => {
                self.meet_carried(number, (peer, id), envelope, length, ticket);
            }
            Kept::Lost => {
                let error = self.gone(peer);
                self.operations.finish(number, Err(error));
            }
        }
    }

    /// The first message that a receive would take, if one has arrived or waits.
    pub(crate) fn probe(&mut self, wanted: &Wanted) -> Result<Option<Received>, Error> {
        let want = self.want(wanted)?;
        if let Some(found) = self.matching.look(&want) {
            let (source, tag) = (found.source, found.envelope.tag);
            let length = found.message.length();
            return Ok(Some(self.received(source, tag, length)));
        }
        self.probe_source(&want)?;
        Ok(None)
    }

    /// Tries to take an operation back. It ends as cancelled if no message has met it; a send that
    /// waits at this side for its receiver is asked back and ends one way or the other soon.
    pub(crate) fn cancel(&mut self, number: Number) {
        if self.matching.unpost(&number) {
            return self.operations.finish(number, Err(Error::Cancelled));
        }
        let Self { operations, peers, .. } = self;
        let Some(sending) = operations.sending(number) else { return };
        let Some(connection) = peers[sending.peer].connection.as_mut() else {
            if peers[sending.peer].stop_waiting(number) {
                operations.finish(number, Err(Error::Cancelled));
            }
            return;
        };
        match sending.stage {
            // It waits for its turn, or is the next and waits for room.
            SendStage::Queued | SendStage::Streaming { sent: 0, receiver: None, .. } => {
                connection.outbox.retain(|waiting| *waiting != number);
                connection.wire.forget_refusal();
                operations.finish(number, Err(Error::Cancelled));
            }
            SendStage::Announced => {
                sending.stage = SendStage::Withdrawing;
                connection.wire.post(Note::Withdraw { sender: number });
                connection.wire.announce();
            }
            _ => {}
        }
    }
}

#[inline]
pub(super) fn check_pieces(pieces: &[Piece]) -> Result<u64, Error> {
    if let [piece] = pieces
        && !piece.address.is_null()
        && piece.length <= isize::MAX as usize
    {
        return Ok(piece.length as u64);
    }
    if pieces.len() > MOST_PIECES {
        return Err(ValidationError::TooManyPieces(pieces.len()).into());
    }
    if let Some(piece) = pieces.iter().find(|p| p.address.is_null() && p.length > 0) {
        return Err(ValidationError::NullPointer(piece.length).into());
    }
    match total(pieces) {
        Some(total) if total <= isize::MAX as u64 => Ok(total),
        _ => Err(ValidationError::TooLong.into()),
    }
}
