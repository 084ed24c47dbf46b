//! Operations that end in a report: posting them, setting messages aside, and handing reports over.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use memferry_sys::clock;
use rustix::time::{ClockId, clock_gettime};

use super::operations::{Deed, Several};
use super::submit::{Begun, check_pieces};
use super::wait::Entered;
use super::{Kept, Peer, Port, State};
use crate::envelope::{Envelope, Wanted};
use crate::error::{Error, Gone, ValidationError};
use crate::pieces::Piece;
use crate::report::{Ending, Report, ReportKind};
use crate::ring::cells::Nonsense;
use crate::wire::Number;

/// A thread that asks again within this time of its own has done nothing else meanwhile.
const BUSY_ASKING_NS: u64 = 20_000;
/// Such questions in a row before others get the core, where processes share cores.
const ASKED_IN_VAIN: u32 = 4;
/// How long it sleeps then, if nothing comes.
const NAP: Duration = Duration::from_millis(1);

/// Longer messages are never injected without a copy.
const INJECTED_BYTES: u64 = 16 << 10;

/// Looks at rings in vain for one question.
const LOOKS: usize = 32;
/// Steps of messages under way for one question: a long message must not keep the caller for long.
const STEPS: usize = 8;
/// Questions between two looks after the peers.
const QUESTIONS: u32 = 16;

/// How reports were asked for lately.
#[derive(Debug, Default)]
pub(super) struct Asking {
    questions: u32,
    in_vain: u32,
    /// The thread's own time at the last question, and the time at the first that was in vain.
    own_ns: u64,
    since_ns: u64,
}

/// What a thread should do that asks in vain, where processes share cores.
#[derive(Debug, PartialEq, Eq)]
enum Advice {
    /// Go on: it has other things to do.
    GoOn,
    /// Let others have the core.
    Yield,
    /// Sleep until something comes.
    Sleep,
}

impl Asking {
    #[inline]
    fn is_time_to_look_after_peers(&mut self) -> bool {
        self.questions = (self.questions + 1) % QUESTIONS;
        self.questions == 0
    }

    /// A question was in vain.
    fn advise(&mut self, spin_ns: u64) -> Advice {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        let own_ns = time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64;
        let is_busy_asking = own_ns.wrapping_sub(self.own_ns) < BUSY_ASKING_NS;
        self.own_ns = own_ns;
        let now = clock::now_ns();
        if !is_busy_asking || self.in_vain == 0 {
            (self.in_vain, self.since_ns) = (1, now);
            return Advice::GoOn;
        }
        self.in_vain = self.in_vain.saturating_add(1);
        match self.in_vain {
            _ if now - self.since_ns > spin_ns => Advice::Sleep,
            ..ASKED_IN_VAIN => Advice::GoOn,
            _ => Advice::Yield,
        }
    }
}

impl Port {
    /// Begins a send that ends in a report, unless it is over at once: then this is the report.
    ///
    /// # Safety
    /// As for [`State::send`].
    #[inline]
    pub(crate) unsafe fn post_send(
        &self,
        to: Peer,
        envelope: Envelope,
        pieces: &[Piece],
        ending: Ending,
    ) -> Result<Option<Report>, Error> {
        self.check_fork()?;
        let mut state = self.enter();
        // SAFETY: passed on.
        match unsafe { state.send(to, envelope, pieces, Some(ending)) }? {
            Begun::Over(Ok(_)) if ending.quiet => Ok(None),
            Begun::Over(outcome) => Ok(Some(Report {
                peer: Some(to),
                envelope,
                length: pieces.iter().map(|piece| piece.length as u64).sum(),
                ..Report::new(ReportKind::Send, ending.context, outcome.map(drop))
            })),
            Begun::Underway(_) => Ok(None),
        }
    }

    /// Sends a copy of what cannot be sent at once.
    #[inline]
    pub(crate) fn inject(&self, to: Peer, envelope: Envelope, bytes: &[u8]) -> Result<(), Error> {
        self.check_fork()?;
        let mut state = self.enter();
        let piece = |bytes: &[u8]| Piece::source(bytes.as_ptr(), bytes.len());
        // SAFETY: the bytes are borrowed for longer than this call, after which nobody reads them.
        if unsafe { state.inject_now(to, &envelope, piece(bytes)) }? {
            return Ok(());
        }
        let copy: Box<[u8]> = bytes.into();
        // SAFETY: the copy stays until the operation is over, with which it is kept.
        if let Begun::Underway(number) = unsafe { state.send(to, envelope, &[piece(&copy)], None) }?
        {
            state.operations.detach(number, Box::new(copy));
        }
        Ok(())
    }

    /// Begins a receive that ends in a report.
    ///
    /// # Safety
    /// As for [`State::receive`].
    #[inline]
    pub(crate) unsafe fn post_receive(
        &self,
        wanted: &Wanted,
        pieces: &[Piece],
        context: u64,
        several: Option<u64>,
    ) -> Result<(), Error> {
        self.check_fork()?;
        let ending = Ending { context, ..Ending::default() };
        let mut state = self.enter();
        // SAFETY: passed on.
        unsafe {
            match several {
                None => state.receive(wanted, pieces, Some(ending)).map(drop),
                Some(least) => state.receive_several(wanted, pieces, ending, least),
            }
        }
    }

    /// Moves everything on and hands over what has ended. Where processes share cores, a thread that
    /// does nothing but ask sleeps for a moment.
    #[inline]
    pub(crate) fn collect(&self, reports: &mut Vec<Report>) -> bool {
        if self.check_fork().is_err() {
            return false;
        }
        let mut state = self.enter();
        // Several looks: what is asked for most likely comes at any moment, and to come here again
        // takes longer than all of them.
        state.look_for_reports();
        // Peers are looked after now and then: asking for the time takes longer than a look.
        // A busy peer must not hide the end of another.
        if state.asking.is_time_to_look_after_peers() {
            state.check_peers(false);
        }
        if state.hand_over(reports) {
            state.asking.in_vain = 0;
            // Nobody else need be told of what this thread was told.
            if !state.has_sleeper && self.local_waiters.load(Ordering::Relaxed) == 0 {
                state.operations.ended = 0;
            }
            return true;
        }
        if !state.is_crowded {
            return false;
        }
        let spin_ns = state.spin_ns();
        match state.asking.advise(spin_ns) {
            Advice::GoOn => false,
            Advice::Yield => {
                drop(state);
                std::thread::yield_now();
                false
            }
            Advice::Sleep => {
                let deadline = Instant::now().checked_add(NAP);
                let look = |state: &mut State| state.hand_over(reports).then_some(());
                self.block_entered(state, false, deadline, look).is_some()
            }
        }
    }

    /// The same, but waits for something to end, or until it is interrupted.
    pub(crate) fn collect_until(
        &self,
        reports: &mut Vec<Report>,
        deadline: Option<Instant>,
    ) -> bool {
        if self.check_fork().is_err() {
            return false;
        }
        let found = self.block(true, deadline, |state| {
            let has_any = state.hand_over(reports);
            let is_over = has_any || std::mem::take(&mut state.interrupted) || state.is_closed();
            is_over.then_some(has_any)
        });
        found.unwrap_or(false)
    }

    /// Ends a wait for reports, the next one if there is none now.
    pub(crate) fn interrupt(&self) {
        let mut state = self.enter();
        state.interrupted = true;
        self.wake_sleeper(&mut state);
    }
}

impl Entered<'_> {
    /// Moves everything on, for a while or until something has ended.
    #[inline]
    fn look_for_reports(&mut self) {
        let mut looks = if self.is_crowded { 1 } else { LOOKS.div_ceil(self.peers.len().max(1)) };
        let mut steps = 0;
        while looks > 0 && steps < STEPS && self.operations.reports.is_empty() {
            if self.progress() {
                steps += 1;
            } else {
                looks -= 1;
            }
        }
    }
}

impl State {
    /// Hands over what has ended. Returns whether there was anything.
    #[inline]
    fn hand_over(&mut self, reports: &mut Vec<Report>) -> bool {
        if self.operations.reports.is_empty() {
            return false;
        }
        let mut ended = std::mem::take(&mut self.operations.reports);
        for report in &mut ended {
            report.peer = (report.place != usize::MAX).then(|| self.peer(report.place));
        }
        if reports.is_empty() {
            // Not even moved: whoever asks again and again hands the same memory to and fro.
            std::mem::swap(reports, &mut ended);
        } else {
            reports.append(&mut ended);
        }
        self.operations.reports = ended;
        true
    }

    /// Sends a message if it can be over at once. Returns whether it is.
    ///
    /// # Safety
    /// The piece must be valid for reads.
    unsafe fn inject_now(
        &mut self,
        to: Peer,
        envelope: &Envelope,
        piece: Piece,
    ) -> Result<bool, Error> {
        let peer = self.find(to)?;
        if self.peers[peer].connection.is_none() {
            return Ok(false);
        }
        let length = piece.length as u64;
        // SAFETY: passed on.
        match unsafe { self.send_now(peer, envelope, &[piece], length, INJECTED_BYTES) } {
            Ok(is_over) => Ok(is_over),
            Err(Nonsense(what)) => {
                self.lose(peer, Gone::Misbehaved(what));
                Err(self.gone(peer))
            }
        }
    }

    /// A receive that takes several messages, one behind the other.
    ///
    /// # Safety
    /// As for [`State::receive`].
    unsafe fn receive_several(
        &mut self,
        wanted: &Wanted,
        pieces: &[Piece],
        ending: Ending,
        least: u64,
    ) -> Result<(), Error> {
        let want = self.want(wanted)?;
        check_pieces(pieces)?;
        let [left] = *pieces else {
            return Err(ValidationError::TooManyPieces(pieces.len()).into());
        };
        if !self.operations.has_room() {
            return Err(ValidationError::TooManyOperations(self.operations.count()).into());
        }
        if self.matching.look(&want).is_none() {
            self.check_source(&want)?;
        }
        let several = Several { left, least: least.max(1), parts: 0, is_full: false };
        let whole = self.operations.insert(Deed::Several(several), Some(ending));
        while self.operations.several(whole).is_some_and(|several| !several.is_full) {
            let Some(kept) = self.matching.take(&want) else {
                // The peer may have been lost over what it has sent.
                match self.check_source(&want) {
                    Ok(()) => self.matching.post(want, whole, true),
                    Err(error) => self.operations.finish(whole, Err(error)),
                }
                self.await_source(&want);
                break;
            };
            let number = self.set_apart(whole, kept.message.length());
            // SAFETY: the part lies in the memory that the caller vouches for.
            unsafe { self.take_kept(kept, number) };
        }
        Ok(())
    }

    /// Sets a part of a receive of several messages apart for one of them.
    pub(super) fn set_apart(&mut self, whole: Number, length: u64) -> Number {
        let ending = self.operations.ending_of(whole);
        let several = self.operations.several(whole).expect("it stays until it is full");
        let (left, least) = (several.left, several.least);
        let taken = length.min(left.length as u64) as usize;
        several.left = Piece::target(left.address.wrapping_add(taken), left.length - taken);
        several.parts += 1;
        several.is_full = (several.left.length as u64) < least;
        if several.is_full {
            self.matching.unpost(&whole);
        }
        let part = Piece::target(left.address, taken);
        self.insert_receive(&[part], taken as u64, ending, Some(whole))
    }

    /// The message that a receive would take, which is set aside if there is a claim.
    pub(crate) fn peek(
        &mut self,
        wanted: &Wanted,
        claim: Option<u64>,
    ) -> Result<Option<Report>, Error> {
        let want = self.want(wanted)?;
        let Some(found) = self.matching.look(&want) else {
            return self.probe_source(&want).map(|()| None);
        };
        found.claim = claim;
        let (peer, envelope) = (found.source, found.envelope);
        let length = found.message.length();
        Ok(Some(self.report_of(peer, envelope, length)))
    }

    fn report_of(&self, peer: usize, envelope: Envelope, length: u64) -> Report {
        let report = Report::new(ReportKind::Receive, 0, Ok(()));
        Report { peer: Some(self.peer(peer)), envelope, length, ..report }
    }

    /// Receives a message that was set aside.
    ///
    /// # Safety
    /// As for [`State::receive`].
    pub(crate) unsafe fn receive_claimed(
        &mut self,
        claim: u64,
        pieces: &[Piece],
        context: u64,
    ) -> Result<(), Error> {
        let capacity = check_pieces(pieces)?;
        let is_complete = self.matching.look_claimed(claim).map(|kept| kept.message.is_complete());
        if is_complete == Some(false) && !self.operations.has_room() {
            return Err(ValidationError::TooManyOperations(self.operations.count()).into());
        }
        let kept = self.matching.take_claimed(claim).ok_or(ValidationError::NoSuchClaim)?;
        let ending = Ending { context, ..Ending::default() };
        let number = self.insert_receive(pieces, capacity, Some(ending), None);
        // SAFETY: the receive has the pieces that the caller vouches for.
        unsafe { self.take_kept(kept, number) };
        Ok(())
    }

    /// Drops the first message that fits; its sender is told that it has arrived.
    pub(crate) fn discard(&mut self, wanted: &Wanted) -> Result<Option<Report>, Error> {
        let want = self.want(wanted)?;
        let Some(kept) = self.matching.take(&want) else {
            return self.probe_source(&want).map(|()| None);
        };
        let report = self.report_of(kept.source, kept.envelope, kept.message.length());
        self.drop_kept(kept);
        Ok(Some(report))
    }

    /// The same for a message that was set aside.
    pub(crate) fn discard_claimed(&mut self, claim: u64) -> Result<(), Error> {
        let kept = self.matching.take_claimed(claim).ok_or(ValidationError::NoSuchClaim)?;
        self.drop_kept(kept);
        Ok(())
    }

    /// Receives a message into nothing.
    fn drop_kept(&mut self, kept: crate::matching::Unexpected<Kept>) {
        let number = self.insert_receive(&[], 0, None, None);
        // SAFETY: there are no pieces.
        unsafe { self.take_kept(kept, number) };
        self.operations.detach(number, Box::new(()));
    }

    /// Asks for an early end of the operation that was posted with a context.
    pub(crate) fn cancel_posted(&mut self, context: u64) -> bool {
        let is_receive = |deed: &Deed| matches!(deed, Deed::Receive(r) if r.part_of.is_none());
        let is_several = |deed: &Deed| matches!(deed, Deed::Several(_));
        let operations = &self.operations;
        let number = operations
            .find_context(context, is_several)
            .or_else(|| operations.find_context(context, is_receive))
            .or_else(|| operations.find_context(context, |deed| matches!(deed, Deed::Send(_))));
        let Some(number) = number else { return false };
        match self.operations.several(number) {
            // Those that have begun go on; the last of them says that the memory is free.
            Some(several) if several.parts > 0 => {
                several.is_full = true;
                self.matching.unpost(&number);
            }
            _ => self.cancel(number),
        }
        true
    }
}
