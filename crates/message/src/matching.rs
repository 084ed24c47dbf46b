//! Which message meets which receive: pure bookkeeping, in order, with tags and masks.
//!
//! A message goes to the first posted receive that fits; a receive takes the first unexpected
//! message that fits. Since both lists are in order and messages of a pair arrive in order, two
//! messages of a pair that fit the same receives never overtake each other.

use std::collections::VecDeque;

use crate::envelope::{Envelope, Lane};

/// What a receive asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Want {
    /// Which messages.
    pub(crate) lane: Lane,
    /// From whom; `None` for anybody.
    pub(crate) source: Option<usize>,
    /// The tag, in the bits of the mask.
    pub(crate) tag: u64,
    /// Which bits of the tag count.
    pub(crate) mask: u64,
}

impl Want {
    /// Whether a message fits.
    #[inline]
    pub(crate) fn fits(&self, source: usize, envelope: &Envelope) -> bool {
        (envelope.tag ^ self.tag) & self.mask == 0
            && self.lane == envelope.lane
            && self.source.is_none_or(|wanted| wanted == source)
    }
}

/// A message that nobody has asked for yet.
#[derive(Debug)]
pub(crate) struct Unexpected<M> {
    /// Its arrival number.
    pub(crate) id: u64,
    /// From whom.
    pub(crate) source: usize,
    /// What came with it.
    pub(crate) envelope: Envelope,
    /// Set aside for whoever knows this number: no receive finds it.
    pub(crate) claim: Option<u64>,
    /// The rest of it.
    pub(crate) message: M,
}

impl<M> Unexpected<M> {
    #[inline]
    fn is_for(&self, want: &Want) -> bool {
        self.claim.is_none() && want.fits(self.source, &self.envelope)
    }
}

/// A receive that no message has met.
#[derive(Debug)]
struct Posted<R> {
    want: Want,
    receive: R,
    /// It takes one message after the other, until it is taken back.
    stays: bool,
}

/// The two lists.
#[derive(Debug)]
pub(crate) struct Matching<R, M> {
    posted: VecDeque<Posted<R>>,
    unexpected: VecDeque<Unexpected<M>>,
    next_id: u64,
}

impl<R, M> Default for Matching<R, M> {
    fn default() -> Self {
        Self { posted: VecDeque::new(), unexpected: VecDeque::new(), next_id: 0 }
    }
}

impl<R: PartialEq + Copy, M> Matching<R, M> {
    /// A message has arrived: the receive that takes it, if one is posted, and whether it stays.
    #[inline]
    pub(crate) fn arrive(&mut self, source: usize, envelope: &Envelope) -> Option<(R, bool)> {
        let place = self.posted.iter().position(|posted| posted.want.fits(source, envelope))?;
        let Posted { receive, stays, .. } = self.posted[place];
        if !stays {
            self.posted.remove(place);
        }
        Some((receive, stays))
    }

    /// Whether any receive is posted.
    #[inline]
    pub(crate) fn has_posted(&self) -> bool {
        !self.posted.is_empty()
    }

    /// The next arrival number. Messages of one peer have them in order; those that are complete when
    /// they meet their receive need none.
    pub(crate) fn number_arrival(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// Keeps a message that no receive took; returns its number.
    pub(crate) fn keep(&mut self, source: usize, envelope: Envelope, message: M) -> u64 {
        let id = self.number_arrival();
        self.unexpected.push_back(Unexpected { id, source, envelope, claim: None, message });
        id
    }

    /// The first kept message that fits, taken out.
    #[inline]
    pub(crate) fn take(&mut self, want: &Want) -> Option<Unexpected<M>> {
        let place = self.unexpected.iter().position(|kept| kept.is_for(want))?;
        self.unexpected.remove(place)
    }

    /// A message that was set aside, taken out.
    pub(crate) fn take_claimed(&mut self, claim: u64) -> Option<Unexpected<M>> {
        let place = self.unexpected.iter().position(|kept| kept.claim == Some(claim))?;
        self.unexpected.remove(place)
    }

    /// Posts a receive that no kept message fitted. One that `stays` takes more than one message.
    #[inline]
    pub(crate) fn post(&mut self, want: Want, receive: R, stays: bool) {
        self.posted.push_back(Posted { want, receive, stays });
    }

    /// The first kept message that fits, left where it is.
    pub(crate) fn look(&mut self, want: &Want) -> Option<&mut Unexpected<M>> {
        self.unexpected.iter_mut().find(|kept| kept.is_for(want))
    }

    /// A message that was set aside, left where it is.
    pub(crate) fn look_claimed(&mut self, claim: u64) -> Option<&mut Unexpected<M>> {
        self.unexpected.iter_mut().find(|kept| kept.claim == Some(claim))
    }

    /// A kept message by its number.
    pub(crate) fn kept(&mut self, id: u64) -> Option<&mut Unexpected<M>> {
        self.unexpected.iter_mut().rev().find(|kept| kept.id == id)
    }

    /// Takes a posted receive back; `false` if it was matched already.
    pub(crate) fn unpost(&mut self, receive: &R) -> bool {
        let place = self.posted.iter().position(|posted| posted.receive == *receive);
        place.and_then(|place| self.posted.remove(place)).is_some()
    }

    /// Takes out every posted receive that can only come from `source`.
    pub(crate) fn unpost_source(&mut self, source: usize) -> Vec<R> {
        let mut gone = Vec::new();
        self.posted.retain(|posted| {
            let is_gone = posted.want.source == Some(source);
            gone.extend(is_gone.then_some(posted.receive));
            !is_gone
        });
        gone
    }

    /// The sources that posted receives name.
    pub(crate) fn posted_sources(&self) -> impl Iterator<Item = usize> {
        self.posted.iter().filter_map(|posted| posted.want.source)
    }

    /// Drops kept messages that `keep` turns down.
    pub(crate) fn retain(&mut self, keep: impl FnMut(&mut Unexpected<M>) -> bool) {
        self.unexpected.retain_mut(keep);
    }

    /// The kept messages, in order of arrival.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Unexpected<M>> {
        self.unexpected.iter()
    }

    /// How many arrivals were numbered so far.
    pub(crate) fn arrivals(&self) -> u64 {
        self.next_id
    }

    /// How many messages are kept.
    pub(crate) fn kept_count(&self) -> usize {
        self.unexpected.len()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn want(source: Option<usize>, tag: u64, mask: u64) -> Want {
        Want { lane: Lane::Tagged, source, tag, mask }
    }
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Deed {
        Send { source: usize, tag: u64 },
        Receive(Want),
        Cancel(usize),
    }

    /// The plain model: everything in two vectors, searched from the start every time.
    #[derive(Default)]
    struct Model {
        sent: Vec<(usize, u64, usize)>,
        wanted: Vec<(Want, usize)>,
        met: Vec<(usize, usize)>,
    }

    impl Model {
        fn fits(want: &Want, source: usize, tag: u64) -> bool {
            want.source.is_none_or(|s| s == source) && want.tag & want.mask == tag & want.mask
        }

        fn send(&mut self, source: usize, tag: u64, number: usize) {
            for at in 0..self.wanted.len() {
                if Self::fits(&self.wanted[at].0, source, tag) {
                    let (_, receive) = self.wanted.remove(at);
                    return self.met.push((number, receive));
                }
            }
            self.sent.push((source, tag, number));
        }

        fn receive(&mut self, want: Want, number: usize) {
            for at in 0..self.sent.len() {
                let (source, tag, message) = self.sent[at];
                if Self::fits(&want, source, tag) {
                    self.sent.remove(at);
                    return self.met.push((message, number));
                }
            }
            self.wanted.push((want, number));
        }

        fn cancel(&mut self, receive: usize) -> bool {
            let before = self.wanted.len();
            self.wanted.retain(|(_, number)| *number != receive);
            self.wanted.len() != before
        }
    }

    fn deed() -> impl Strategy<Value = Deed> {
        let tag = prop_oneof![0..4u64, any::<u64>()];
        let mask = prop_oneof![Just(u64::MAX), Just(0), Just(1), Just(2), any::<u64>()];
        let source = proptest::option::of(0..3usize);
        prop_oneof![
            4 => (0..3usize, tag.clone()).prop_map(|(source, tag)| Deed::Send { source, tag }),
            4 => (source, tag, mask)
                .prop_map(|(source, tag, mask)| Deed::Receive(want(source, tag, mask))),
            1 => (0..60usize).prop_map(Deed::Cancel),
        ]
    }

    proptest! {
        #[test]
        fn matching_agrees_with_the_plain_model(deeds in prop::collection::vec(deed(), 0..120)) {
            let (mut model, mut matching) = (Model::default(), Matching::default());
            let mut met = Vec::new();
            for (number, deed) in deeds.into_iter().enumerate() {
                match deed {
                    Deed::Send { source, tag } => {
                        model.send(source, tag, number);
                        match matching.arrive(source, &Envelope::tagged(tag)) {
                            Some((receive, _)) => met.push((number, receive)),
                            None => drop(matching.keep(source, Envelope::tagged(tag), number)),
                        }
                    }
                    Deed::Receive(want) => {
                        model.receive(want, number);
                        match matching.take(&want) {
                            Some(unexpected) => met.push((unexpected.message, number)),
                            None => matching.post(want, number, false),
                        }
                    }
                    Deed::Cancel(receive) => {
                        prop_assert_eq!(model.cancel(receive), matching.unpost(&receive));
                    }
                }
                prop_assert_eq!(&model.met, &met);
                prop_assert_eq!(model.sent.len(), matching.kept_count());
            }
        }
    }

    #[test]
    fn receives_from_a_source_can_be_taken_back_together() {
        let mut matching = Matching::<u32, ()>::default();
        for (number, source) in [(1, Some(0)), (2, None), (3, Some(1)), (4, Some(0))] {
            matching.post(want(source, 0, 0), number, false);
        }
        assert_eq!(matching.unpost_source(0), [1, 4]);
        assert!(!matching.unpost(&1) && matching.unpost(&2) && matching.unpost(&3));
        assert!(!matching.has_posted());
    }
}
