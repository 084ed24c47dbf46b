//! Beginning operations: sends, receives, probes, and taking them back.

use super::operations::Deed;
use super::progress::Work;
use super::{Assembling, Kept, Peer, Received, State, turn};
use crate::error::Gone;
use crate::error::{Error, ValidationError};
use crate::matching::Want;
use crate::path::{self, ReceiveStage, Receiving, SendStage, Sending, Step};
use crate::pieces::{MOST_PIECES, Piece, Pieces, scatter, total};
use crate::plan::{self, PathKind};
use crate::ring::cells::Nonsense;
use crate::wire::{INLINE_BYTES, Note, Number};

const INLINE_LIMIT: u64 = INLINE_BYTES as u64;
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

    /// Begins a send.
    ///
    /// # Safety
    /// The pieces must stay valid for reads, unchanged, until the operation is over.
    #[inline]
    pub(crate) unsafe fn send(
        &mut self,
        to: Peer,
        tag: u64,
        pieces: &[Piece],
    ) -> Result<Begun, Error> {
        let peer = self.find(to)?;
        let length = check_pieces(pieces)?;
        if self.peers[peer].connection.is_none() {
            return Err(self.gone(peer));
        }
        // SAFETY: passed on.
        match unsafe { self.try_send(peer, tag, pieces, length) } {
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
        tag: u64,
        pieces: &[Piece],
        length: u64,
    ) -> Result<Result<Begun, Error>, Nonsense> {
        let connection = self.connection(peer);
        let first = connection.outbox.is_empty();
        // A receiver that is full gets the payload when it asks for it.
        let takes_payloads = connection.takes_payloads();
        let wire = &mut connection.wire;
        if first && takes_payloads && length <= INLINE_LIMIT {
            // SAFETY: the caller vouches for the pieces.
            if unsafe { path::put_inline(wire, tag, pieces, length as usize) }? {
                wire.announce();
                return Ok(Ok(Begun::Over(Ok(self.received(peer, tag, length)))));
            }
        }
        let reachable = wire.their_reach.0 || wire.is_self();
        let eager_limit = self.eager_limits[usize::from(reachable)];
        let wire = self.wire(peer);
        if first && takes_payloads && length <= ONE_FRAGMENT.min(eager_limit) && length > 0 {
            // SAFETY: the caller vouches for the pieces.
            if unsafe { path::put_eager(wire, tag, pieces, length as usize) }? {
                wire.announce();
                wire.warm_up(length as usize);
                return Ok(Ok(Begun::Over(Ok(self.received(peer, tag, length)))));
            }
        }
        let path = match length {
            _ if !takes_payloads => PathKind::Single,
            0..=INLINE_LIMIT => PathKind::Inline,
            _ if length <= eager_limit => PathKind::Eager,
            _ => PathKind::Single,
        };
        let mut sending = Sending {
            peer,
            tag,
            pieces: Pieces::new(pieces),
            length,
            path,
            chunk_bytes: plan::fragment_bytes(length),
            expects: self.matching.has_posted(),
            stage: SendStage::Queued,
        };
        if first && path == PathKind::Eager && self.send_at_once(peer, &mut sending)? {
            return Ok(Ok(Begun::Over(Ok(self.received(peer, tag, length)))));
        }
        if !self.operations.has_room() && matches!(sending.stage, SendStage::Queued) {
            let count = self.operations.count();
            return Ok(Err(ValidationError::TooManyOperations(count).into()));
        }
        let number = self.operations.insert(Deed::Send(sending));
        self.connection(peer).outbox.push_back(number);
        if first {
            self.progress_peer(peer, Work::Notes);
        }
        Ok(Ok(Begun::Underway(number)))
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

    /// Begins a receive.
    ///
    /// # Safety
    /// The pieces must stay valid for writes until the operation is over, and nobody else may
    /// access them.
    pub(crate) unsafe fn receive(
        &mut self,
        from: Option<Peer>,
        tag: u64,
        mask: u64,
        pieces: &[Piece],
    ) -> Result<Begun, Error> {
        let source = from.map(|peer| self.find(peer)).transpose()?;
        if self.closed {
            return Err(Error::Closed);
        }
        let capacity = check_pieces(pieces)?;
        let want = Want { source, tag, mask };
        if !self.operations.has_room()
            && self.matching.look(&want).is_some_and(|found| !found.message.is_complete())
        {
            return Err(ValidationError::TooManyOperations(self.operations.count()).into());
        }
        if let Some(unexpected) = self.matching.take(&want) {
            let (peer, tag, id) = (unexpected.source, unexpected.tag, unexpected.id);
            self.let_go_of_kept(peer, 1, unexpected.message.bytes());
            return Ok(match unexpected.message {
                Kept::Here { bytes, arrived } => {
                    // SAFETY: passed on.
                    unsafe { self.receive_kept(peer, tag, id, &bytes, arrived, pieces, capacity) }
                }
                Kept::There { length, request } => {
                    let number = self.insert_receive(pieces, capacity);
                    if let Err(Nonsense(what)) = self.meet(number, peer, tag, length, request) {
                        self.lose(peer, Gone::Misbehaved(what));
                    }
                    self.progress_peer(peer, Work::Notes);
                    Begun::Underway(number)
                }
            });
        }
        if let Some(peer) = source
            && self.peers[peer].connection.is_none()
        {
            return Err(self.gone(peer));
        }
        if !self.operations.has_room() {
            return Err(ValidationError::TooManyOperations(self.operations.count()).into());
        }
        let number = self.insert_receive(pieces, capacity);
        self.matching.post(want, number);
        Ok(Begun::Underway(number))
    }

    /// Receives a small message without making an operation, if it comes at once.
    ///
    /// # Safety
    /// The pieces must be valid for writes, and nobody else may access them.
    #[inline]
    pub(crate) unsafe fn receive_at_once(
        &mut self,
        from: Option<Peer>,
        tag: u64,
        mask: u64,
        pieces: &[Piece],
    ) -> Result<Option<Result<Received, Error>>, Error> {
        let source = from.map(|peer| self.find(peer)).transpose()?;
        let capacity = check_pieces(pieces)?;
        // SAFETY: passed on.
        Ok(unsafe { self.receive_now(source, tag, mask, pieces, capacity) })
    }

    fn insert_receive(&mut self, pieces: &[Piece], capacity: u64) -> Number {
        let (pieces, stage) = (Pieces::new(pieces), ReceiveStage::Posted);
        let (peer, tag, length) = (usize::MAX, 0, 0);
        let receiving = Receiving { pieces, capacity, peer, tag, length, stage };
        self.operations.insert(Deed::Receive(receiving))
    }

    /// A kept message has found its receive. What has not arrived yet goes to the receive itself.
    #[allow(clippy::too_many_arguments)]
    unsafe fn receive_kept(
        &mut self,
        peer: usize,
        tag: u64,
        id: u64,
        bytes: &[u8],
        arrived: usize,
        pieces: &[Piece],
        capacity: u64,
    ) -> Begun {
        let length = bytes.len() as u64;
        let fits = (arrived as u64).min(capacity) as usize;
        // SAFETY: the caller vouches for the pieces, and no more is written than they hold.
        unsafe { scatter(pieces, 0, bytes.as_ptr(), fits) };
        if arrived == bytes.len() {
            return Begun::Over(if length > capacity {
                Err(Error::Truncated { message_bytes: length, buffer_bytes: capacity })
            } else {
                Ok(self.received(peer, tag, length))
            });
        }
        let number = self.insert_receive(pieces, capacity);
        let receiving = self.operations.receiving(number).expect("it was just inserted");
        receiving.meet(peer, tag, length);
        let arrived = arrived as u64;
        receiving.stage = ReceiveStage::Arriving { arrived, requested: None };
        let connection = self.connection(peer);
        debug_assert_eq!(connection.assembling, Assembling::Kept(id));
        connection.assembling = Assembling::Operation(number);
        Begun::Underway(number)
    }

    /// The first message that a receive would take, if one has arrived or waits.
    pub(crate) fn probe(
        &self,
        from: Option<Peer>,
        tag: u64,
        mask: u64,
    ) -> Result<Option<Received>, Error> {
        let source = from.map(|peer| self.find(peer)).transpose()?;
        if self.closed {
            return Err(Error::Closed);
        }
        if let Some(found) = self.matching.look(&Want { source, tag, mask }) {
            return Ok(Some(self.received(found.source, found.tag, found.message.length())));
        }
        match source {
            Some(peer) if self.peers[peer].connection.is_none() => Err(self.gone(peer)),
            _ => Ok(None),
        }
    }

    /// Tries to take an operation back. It ends as cancelled if no message has met it; a send that
    /// waits at this side for its receiver is asked back and ends one way or the other soon.
    pub(crate) fn cancel(&mut self, number: Number) {
        if self.matching.unpost(&number) {
            return self.operations.finish(number, Err(Error::Cancelled));
        }
        let Self { operations, peers, .. } = self;
        let Some(sending) = operations.sending(number) else { return };
        let Some(connection) = peers[sending.peer].connection.as_mut() else { return };
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
fn check_pieces(pieces: &[Piece]) -> Result<u64, Error> {
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
