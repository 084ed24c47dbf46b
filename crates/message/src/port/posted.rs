//! Posted operations, which end in a completion entry: posting, claiming messages, and returning entries.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use memferry_sys::clock;

use super::operations::{MultiReceive, OperationKind};
use super::poll_backoff::BackoffStep;
use super::posted_buffer::{BufferPoll, BufferReceived, PostedReceive};
use super::protocol::{MatchEvent, Protocol};
use super::submit::{Started, check_segments};
use super::wait::PortGuard;
use super::{Peer, Port, PortState, UnexpectedPayload};
use crate::completion::{CompletionEntry, CompletionKind, CompletionOptions};
use crate::control::OperationId;
use crate::envelope::{Envelope, MatchSpec};
use crate::error::{DisconnectReason, Error, ValidationError};
use crate::ring::cells::ProtocolError;
use crate::segments::Segment;

/// Maximum sleep of a thread that backs off.
const BACKOFF_SLEEP: Duration = Duration::from_millis(1);

/// Maximum size in bytes of a message that is injected without a copy.
const MAX_INJECT_BYTES: u64 = 16 << 10;

/// Empty polls of rings in one poll for completions, over all peers.
pub(super) const MAX_EMPTY_POLLS: usize = 64;
/// Passes with progress in one poll for completions: a long message must not delay the caller.
const MAX_STEPS: usize = 8;
impl Port {
    /// Starts a send that ends in a completion entry. Returns the entry if the send completes at once.
    ///
    /// # Safety
    /// As for [`PortState::send`].
    #[inline]
    pub(crate) unsafe fn post_send(
        &self,
        to: Peer,
        envelope: Envelope,
        pieces: &[Segment],
        ending: CompletionOptions,
    ) -> Result<Option<CompletionEntry>, Error> {
        self.check_fork()?;
        let mut state = self.lock();
        // SAFETY: the caller guarantees it.
        match unsafe { state.send(to, envelope, pieces, Some(ending)) }? {
            Started::Completed(Ok(_)) if ending.silent_on_success => Ok(None),
            Started::Completed(outcome) => Ok(Some(CompletionEntry {
                peer: Some(to),
                envelope,
                length: pieces.iter().map(|piece| piece.length as u64).sum(),
                ..CompletionEntry::new(CompletionKind::Send, ending.context, outcome.map(drop))
            })),
            Started::Pending(_) => Ok(None),
        }
    }

    /// Sends a message, or a copy of it if it cannot be sent at once.
    #[inline]
    pub(crate) fn inject(&self, to: Peer, envelope: Envelope, bytes: &[u8]) -> Result<(), Error> {
        self.check_fork()?;
        let mut state = self.lock();
        let piece = |bytes: &[u8]| Segment::source(bytes.as_ptr(), bytes.len());
        // SAFETY: the bytes are borrowed until this call returns, and nothing reads them after that, for both calls.
        unsafe {
            if state.protocol.send_small(to, &envelope, piece(bytes))
                || state.try_inject(to, &envelope, piece(bytes))?
            {
                return Ok(());
            }
        }
        let copy: Box<[u8]> = bytes.into();
        // SAFETY: the copy is kept with the operation, and dropped when it completes.
        let started = unsafe { state.send(to, envelope, &[piece(&copy)], None) }?;
        if let Started::Pending(number) = started {
            state.protocol.operations.detach(number, Box::new(copy));
        }
        Ok(())
    }

    /// Starts a receive that ends in a completion entry.
    ///
    /// # Safety
    /// As for [`PortState::receive`].
    #[inline]
    pub(crate) unsafe fn post_receive(
        &self,
        wanted: &MatchSpec,
        pieces: &[Segment],
        context: u64,
        several: Option<u64>,
    ) -> Result<(), Error> {
        self.check_fork()?;
        let ending = CompletionOptions { context, ..CompletionOptions::default() };
        let mut state = self.lock();
        // SAFETY: the caller guarantees it.
        state.posting_ahead(|state| unsafe {
            match several {
                None => state.receive(wanted, pieces, Some(ending)).map(drop),
                Some(least) => state.multi_receive(wanted, pieces, ending, least),
            }
        })
    }

    /// As [`Port::post_receive`], for one message. A message that fits into a cell may end in
    /// [`Port::poll_received`] instead of a completion entry.
    ///
    /// # Safety
    /// As for [`PortState::receive`].
    #[inline]
    pub(crate) unsafe fn post_buffer(
        &self,
        wanted: &MatchSpec,
        pieces: &[Segment],
        context: u64,
    ) -> Result<(), Error> {
        self.check_fork()?;
        let mut state = self.lock();
        // SAFETY: the caller guarantees it, for both calls.
        unsafe {
            if state.post_buffer(wanted, pieces, context)? {
                return Ok(());
            }
            let ending = CompletionOptions { context, ..CompletionOptions::default() };
            state.posting_ahead(|state| state.receive(wanted, pieces, Some(ending)).map(drop))
        }
    }

    /// As [`Port::poll_completions`]. Passes messages that were received into posted buffers to `take`, `limit`
    /// at most, with the port locked.
    #[inline]
    pub(crate) fn poll_received(
        &self,
        reports: &mut Vec<CompletionEntry>,
        limit: usize,
        take: impl FnMut(BufferReceived),
    ) -> bool {
        if self.check_fork().is_err() {
            return false;
        }
        let mut state = self.lock();
        if limit > 0 {
            // A pass over everything at intervals: it finds peers that have ended, and rings that are quiet.
            if state.wakeup.poll_backoff.count_poll() {
                state.progress_and_check_peers();
            }
            match state.poll_buffers(limit, take) {
                BufferPoll::Incomplete => {}
                BufferPoll::Quiet => return false,
                BufferPoll::Received => {
                    state.wakeup.poll_backoff.empty_polls = 0;
                    return false;
                }
                // What else has arrived must not wait for the end of the small messages.
                BufferPoll::ReceivedSome => {
                    state.wakeup.poll_backoff.empty_polls = 0;
                    state.progress();
                    return false;
                }
            }
        }
        self.poll_locked(state, reports)
    }

    /// Makes progress and returns completion entries. If processes share cores, a thread that only polls
    /// sleeps for up to 1 ms.
    #[inline]
    pub(crate) fn poll_completions(&self, reports: &mut Vec<CompletionEntry>) -> bool {
        if self.check_fork().is_err() {
            return false;
        }
        self.poll_locked(self.lock(), reports)
    }

    fn poll_locked(&self, mut state: PortGuard<'_>, reports: &mut Vec<CompletionEntry>) -> bool {
        // Several polls: the completion is most likely about to arrive, and another call takes longer than
        // all of these polls.
        state.poll_for_completions();
        // Liveness is not checked in each call, because reading the clock takes longer than a poll. A busy
        // peer must not hide the disconnect of another.
        if state.wakeup.poll_backoff.count_poll() {
            state.check_peers(false);
        }
        if state.drain_completions(reports) {
            state.wakeup.poll_backoff.empty_polls = 0;
            // No other thread waits for these completions.
            if !state.wakeup.has_sleeper && self.local_waiters.load(Ordering::Relaxed) == 0 {
                state.protocol.operations.newly_completed = 0;
            }
            return true;
        }
        if !state.protocol.peers.is_oversubscribed {
            return false;
        }
        let (spin_ns, returned_ns) = (state.spin_ns(), &self.empty_poll_returned_ns);
        let step =
            state.wakeup.poll_backoff.on_empty_poll(spin_ns, returned_ns.load(Ordering::Relaxed));
        let has_any = match step {
            BackoffStep::Continue => false,
            BackoffStep::Yield => {
                drop(state);
                std::thread::yield_now();
                false
            }
            BackoffStep::Sleep => {
                let deadline = Instant::now().checked_add(BACKOFF_SLEEP);
                let look = |state: &mut PortState| state.drain_completions(reports).then_some(());
                self.block_locked(state, false, deadline, look).is_some()
            }
        };
        returned_ns.store(clock::now_ns(), Ordering::Relaxed);
        has_any
    }

    /// Makes progress until there are completion entries, or until [`Port::wake_waiter`] or the deadline.
    pub(crate) fn wait_completions(
        &self,
        reports: &mut Vec<CompletionEntry>,
        deadline: Option<Instant>,
    ) -> bool {
        if self.check_fork().is_err() {
            return false;
        }
        let found = self.block(true, deadline, |state| {
            let has_any = state.drain_completions(reports);
            let is_over =
                has_any || std::mem::take(&mut state.wakeup.waiter_woken) || state.is_closed();
            is_over.then_some(has_any)
        });
        found.unwrap_or(false)
    }

    /// Ends a wait for completions, or the next one if there is none now.
    pub(crate) fn wake_waiter(&self) {
        let mut state = self.lock();
        state.wakeup.waiter_woken = true;
        self.wake_sleeper(&mut state);
    }
}

impl PortGuard<'_> {
    /// Makes progress until there is a completion, up to the limits of empty polls and of passes with
    /// progress.
    #[inline]
    fn poll_for_completions(&mut self) {
        let mut looks = if self.protocol.peers.is_oversubscribed {
            1
        } else {
            MAX_EMPTY_POLLS.div_ceil(self.protocol.peers.polled.len().max(1))
        };
        let mut steps = 0;
        while looks > 0 && steps < MAX_STEPS && self.protocol.operations.completions.is_empty() {
            if self.progress() {
                steps += 1;
            } else {
                looks -= 1;
            }
        }
    }
}

impl PortState {
    /// Returns the completion entries. Returns whether there were any.
    #[inline]
    fn drain_completions(&mut self, reports: &mut Vec<CompletionEntry>) -> bool {
        if self.protocol.operations.completions.is_empty() {
            return false;
        }
        let mut ended = std::mem::take(&mut self.protocol.operations.completions);
        for report in &mut ended {
            report.peer = (report.peer_index != usize::MAX)
                .then(|| self.protocol.peers.peer(report.peer_index));
        }
        if reports.is_empty() {
            // Swaps the vectors: a caller that polls repeatedly reuses the same two allocations.
            std::mem::swap(reports, &mut ended);
        } else {
            reports.append(&mut ended);
        }
        self.protocol.operations.completions = ended;
        true
    }

    /// Sends a message if it completes at once. Returns whether it has.
    ///
    /// # Safety
    /// `piece` must be valid for reads.
    unsafe fn try_inject(
        &mut self,
        to: Peer,
        envelope: &Envelope,
        piece: Segment,
    ) -> Result<bool, Error> {
        let peer = self.protocol.peers.index_of(to)?;
        if self.protocol.peers[peer].connection.is_none() {
            return Ok(false);
        }
        let length = piece.length as u64;
        // SAFETY: the caller guarantees it.
        match unsafe { self.protocol.send_now(peer, envelope, &[piece], length, MAX_INJECT_BYTES) }
        {
            Ok(is_over) => Ok(is_over),
            Err(ProtocolError(what)) => {
                self.disconnect(peer, DisconnectReason::ProtocolViolation(what));
                Err(self.protocol.peers.disconnect_error(peer))
            }
        }
    }

    /// Starts a receive that takes several messages into contiguous memory.
    ///
    /// # Safety
    /// As for [`PortState::receive`].
    unsafe fn multi_receive(
        &mut self,
        wanted: &MatchSpec,
        pieces: &[Segment],
        ending: CompletionOptions,
        least: u64,
    ) -> Result<(), Error> {
        let want = self.protocol.peers.match_key(wanted)?;
        check_segments(pieces)?;
        let [left] = *pieces else {
            return Err(ValidationError::TooManySegments(pieces.len()).into());
        };
        if !self.protocol.operations.has_capacity() {
            return Err(ValidationError::TooManyOperations(self.protocol.operations.count()).into());
        }
        if self.protocol.matches.peek_unexpected(&want).is_none() {
            self.protocol.peers.check_source(&want)?;
        }
        let several =
            MultiReceive { remaining: left, min_free: least.max(1), parts: 0, is_full: false };
        let whole =
            self.protocol.operations.insert(OperationKind::MultiReceive(several), Some(ending));
        while self.protocol.operations.multi_receive(whole).is_some_and(|several| !several.is_full)
        {
            let Some(kept) = self.protocol.matches.take_unexpected(&want) else {
                // The messages above may have led to a disconnect of the peer.
                match self.protocol.peers.check_source(&want) {
                    Ok(()) => {
                        self.protocol.matches.post(want, PostedReceive::Operation(whole), true);
                    }
                    Err(error) => self.protocol.operations.finish(whole, Err(error)),
                }
                self.connect_source(&want);
                break;
            };
            let number = self.protocol.carve_receive(whole, kept.message.length());
            // SAFETY: the part lies in the memory that the caller guarantees.
            let event = unsafe { self.protocol.receive_unexpected(kept, number) };
            self.after_match(event, &want);
        }
        Ok(())
    }

    /// Returns the message that a receive would match. With a claim, the message is reserved for it.
    pub(crate) fn peek(
        &mut self,
        wanted: &MatchSpec,
        claim: Option<u64>,
    ) -> Result<Option<CompletionEntry>, Error> {
        let want = self.protocol.peers.match_key(wanted)?;
        let matches = &mut self.protocol.matches;
        let found = match claim {
            Some(claim) => matches.claim_unexpected(&want, claim),
            None => matches.peek_unexpected(&want),
        };
        let Some(found) = found else {
            return self.protocol.probe_source(&want).map(|()| None);
        };
        let (peer, envelope) = (found.source, found.envelope);
        let length = found.message.length();
        Ok(Some(self.completion_entry(peer, envelope, length)))
    }

    fn completion_entry(&self, peer: usize, envelope: Envelope, length: u64) -> CompletionEntry {
        let report = CompletionEntry::new(CompletionKind::Receive, 0, Ok(()));
        CompletionEntry { peer: Some(self.protocol.peers.peer(peer)), envelope, length, ..report }
    }

    /// Receives a claimed message.
    ///
    /// # Safety
    /// As for [`PortState::receive`].
    pub(crate) unsafe fn receive_claimed(
        &mut self,
        claim: u64,
        pieces: &[Segment],
        context: u64,
    ) -> Result<(), Error> {
        let capacity = check_segments(pieces)?;
        let is_complete =
            self.protocol.matches.peek_claimed(claim).map(|kept| kept.message.is_complete());
        if is_complete == Some(false) && !self.protocol.operations.has_capacity() {
            return Err(ValidationError::TooManyOperations(self.protocol.operations.count()).into());
        }
        let kept =
            self.protocol.matches.take_claimed(claim).ok_or(ValidationError::NoSuchClaim(claim))?;
        let ending = CompletionOptions { context, ..CompletionOptions::default() };
        let number = self.protocol.insert_receive(pieces, capacity, Some(ending), None);
        // SAFETY: the receive has the segments that the caller guarantees.
        let event = unsafe { self.protocol.receive_unexpected(kept, number) };
        self.after_claimed(event);
        Ok(())
    }

    /// Drops the first message that matches. Its sender is notified as if it had been received.
    pub(crate) fn discard(&mut self, wanted: &MatchSpec) -> Result<Option<CompletionEntry>, Error> {
        let want = self.protocol.peers.match_key(wanted)?;
        let Some(kept) = self.protocol.matches.take_unexpected(&want) else {
            return self.protocol.probe_source(&want).map(|()| None);
        };
        let report = self.completion_entry(kept.source, kept.envelope, kept.message.length());
        self.drop_unexpected(kept);
        Ok(Some(report))
    }

    /// Drops a claimed message.
    pub(crate) fn discard_claimed(&mut self, claim: u64) -> Result<(), Error> {
        let kept =
            self.protocol.matches.take_claimed(claim).ok_or(ValidationError::NoSuchClaim(claim))?;
        self.drop_unexpected(kept);
        Ok(())
    }

    /// Receives a message without storing it.
    fn drop_unexpected(&mut self, kept: crate::matching::Unexpected<UnexpectedPayload>) {
        let number = self.protocol.insert_receive(&[], 0, None, None);
        // SAFETY: there are no segments.
        let event = unsafe { self.protocol.receive_unexpected(kept, number) };
        self.after_claimed(event);
        self.protocol.operations.detach(number, Box::new(()));
    }

    /// Cancels the operation that was posted with a context. Returns whether there is one.
    pub(crate) fn cancel_posted(&mut self, context: u64) -> bool {
        if self.protocol.cancel_buffer(context) {
            return true;
        }
        let is_receive = |deed: &OperationKind| matches!(deed, OperationKind::Receive(r) if r.multi_receive.is_none());
        let is_several = |deed: &OperationKind| matches!(deed, OperationKind::MultiReceive(_));
        let operations = &self.protocol.operations;
        let number = operations
            .find_context(context, is_several)
            .or_else(|| operations.find_context(context, is_receive))
            .or_else(|| {
                operations.find_context(context, |deed| matches!(deed, OperationKind::Send(_)))
            });
        let Some(number) = number else { return false };
        match self.protocol.operations.multi_receive(number) {
            // Parts in flight continue; the completion entry of the last one frees the memory.
            Some(several) if several.parts > 0 => {
                several.is_full = true;
                self.protocol.matches.unpost(&PostedReceive::Operation(number));
            }
            _ => self.protocol.cancel(number),
        }
        true
    }

    /// Acts on the event of a receive of a claimed or dropped message.
    fn after_claimed(&mut self, event: MatchEvent) {
        if let MatchEvent::Rendezvous { peer, outcome } = event {
            self.start_rendezvous(peer, outcome);
        }
    }
}

impl Protocol {
    /// Carves a part for one message out of a receive of several messages.
    pub(super) fn carve_receive(&mut self, whole: OperationId, length: u64) -> OperationId {
        let ending = self.operations.options_of(whole);
        let several = self.operations.multi_receive(whole).expect("it stays until it is full");
        let (left, least) = (several.remaining, several.min_free);
        let taken = length.min(left.length as u64) as usize;
        several.remaining = Segment::target(left.address.wrapping_add(taken), left.length - taken);
        several.parts += 1;
        several.is_full = (several.remaining.length as u64) < least;
        if several.is_full {
            self.matches.unpost(&PostedReceive::Operation(whole));
        }
        let part = Segment::target(left.address, taken);
        self.insert_receive(&[part], taken as u64, ending, Some(whole))
    }
}
