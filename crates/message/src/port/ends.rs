//! The end of a peer: what it sent is delivered in order, up to the first message that is not complete.
//!
//! All messages of a peer form one stream, in order of arrival, whatever their tags. The first one that
//! is not complete when the peer ends cuts the stream: it is lost, and so is everything behind it that
//! has not been received. `docs/design/message-ends.md` has the contract.

use super::operations::Deed;
use super::{Kept, State};
use crate::error::{Error, Gone};
use crate::path::{ReceiveStage, Receiving};
use crate::ring::cells::Nonsense;

/// The arrival number of a stream that is not cut.
const NOTHING_LOST: u64 = u64::MAX;

impl State {
    /// A peer has ended, or gives its messages up: takes in what it wrote before that, then ends the
    /// connection. All of it is in the ring already, and one pass takes as much as a ring holds.
    #[cold]
    pub(super) fn end_peer(&mut self, peer: usize) {
        if self.peers[peer].connection.is_none() {
            return;
        }
        let gone = match self.take_in(peer) {
            Ok((_, true)) => Gone::Closed,
            Ok((_, false)) if self.wire(peer).memory.has_other_ended() => Gone::Closed,
            Ok((_, false)) => Gone::Ended,
            Err(Nonsense(what)) => Gone::Misbehaved(what),
        };
        self.lose(peer, gone);
    }

    /// A message of a peer is lost although the connection goes on for now: nothing passes it.
    pub(super) fn note_lost(&mut self, peer: usize, arrival: u64) {
        let lost = &mut self.peers[peer].lost;
        *lost = Some(lost.map_or(arrival, |before| before.min(arrival)));
    }

    /// The arrival number at which the stream of a peer is cut if it ends now.
    pub(super) fn first_lost(&mut self, peer: usize) -> u64 {
        let is_incomplete = |deed: &Deed| matches!(deed, Deed::Receive(receiving) if receiving.peer == peer && receiving.lacks_bytes());
        let receives = self.operations.numbers(is_incomplete);
        let receives = receives.into_iter().filter_map(|number| {
            self.operations.receiving(number).map(|receiving| receiving.arrival)
        });
        let first = receives.min().unwrap_or(NOTHING_LOST);
        // A mark of a lost message is from an earlier peer in this place.
        let is_cut = |kept: &Kept| !kept.is_complete() && !matches!(kept, Kept::Lost);
        let mut kept = self.matching.iter().filter(|kept| kept.source == peer);
        let kept = kept.find(|kept| is_cut(&kept.message)).map_or(NOTHING_LOST, |kept| kept.id);
        let noted = self.peers[peer].lost.unwrap_or(NOTHING_LOST);
        first.min(kept).min(noted)
    }

    /// Ends receives that have all their bytes, but whose message lies behind a lost one. Receives that
    /// lack bytes are left to the caller.
    pub(super) fn fail_behind(&mut self, peer: usize, first_lost: u64, error: &Error) {
        let is_behind = |deed: &Deed| {
            matches!(deed, Deed::Receive(receiving) if receiving.peer == peer
                && receiving.arrival > first_lost
                && matches!(receiving.stage, ReceiveStage::Arrived { .. }))
        };
        for number in self.operations.numbers(is_behind) {
            self.operations.finish(number, Err(error.clone()));
        }
    }

    /// Drops the kept messages of a lost peer from the cut on. Those before it are complete and can
    /// still be received. Of one that was set aside the mark stays: its receive fails.
    pub(super) fn cut(&mut self, peer: usize, first_lost: u64) {
        let slot = &mut self.peers[peer];
        slot.lost = None;
        self.matching.retain(|unexpected| {
            if unexpected.source != peer || unexpected.id < first_lost {
                return true;
            }
            slot.kept_count -= unexpected.message.weight();
            slot.kept_bytes -= unexpected.message.bytes();
            unexpected.message = Kept::Lost;
            unexpected.claim.is_some()
        });
    }
}

impl Receiving {
    /// Whether it is matched and bytes of its message are still to come.
    fn lacks_bytes(&self) -> bool {
        use ReceiveStage::{Arrived, Held, Posted};
        !matches!(self.stage, Posted | Arrived { .. } | Held(_))
    }
}
