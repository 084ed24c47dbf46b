//! Matching of messages and receives, by source, tag and mask.
//!
//! An arriving message goes to the first posted receive that matches; a new receive takes the first
//! unexpected message that matches. Both lists are in order and messages of one sender arrive in
//! order, so two messages of one sender that match the same receives never overtake each other.

use std::collections::VecDeque;

use crate::envelope::{Envelope, MatchSpace};

/// The messages that a receive matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MatchKey {
    /// The match space.
    pub(crate) space: MatchSpace,
    /// The sender; `None` for any.
    pub(crate) source: Option<usize>,
    /// The tag; only the bits in the mask are compared.
    pub(crate) tag: u64,
    /// The bits of the tag that are compared.
    pub(crate) mask: u64,
}

impl MatchKey {
    /// Returns whether a message matches.
    #[inline]
    pub(crate) fn matches(&self, source: usize, envelope: &Envelope) -> bool {
        (envelope.tag ^ self.tag) & self.mask == 0
            && self.space == envelope.space
            && self.source.is_none_or(|wanted| wanted == source)
    }
}

/// A message without a receive.
#[derive(Debug)]
pub(crate) struct Unexpected<M> {
    /// The arrival number.
    pub(crate) id: u64,
    /// The sender.
    pub(crate) source: usize,
    /// The envelope of the message.
    pub(crate) envelope: Envelope,
    /// The number of the claim on this message, if one exists. Only the receive that names the
    /// claim gets it.
    pub(crate) claim: Option<u64>,
    /// The state of the message.
    pub(crate) message: M,
}

impl<M> Unexpected<M> {
    #[inline]
    fn is_match(&self, key: &MatchKey) -> bool {
        self.claim.is_none() && key.matches(self.source, &self.envelope)
    }
}

/// A receive without a message.
#[derive(Debug)]
struct PostedReceive<R> {
    key: MatchKey,
    receive: R,
    /// The receive takes message after message, until it is unposted.
    persistent: bool,
}

/// The posted receive queue and the unexpected queue.
#[derive(Debug)]
pub(crate) struct MatchQueues<R, M> {
    posted: VecDeque<PostedReceive<R>>,
    unexpected: VecDeque<Unexpected<M>>,
    next_id: u64,
}

impl<R, M> Default for MatchQueues<R, M> {
    fn default() -> Self {
        Self { posted: VecDeque::new(), unexpected: VecDeque::new(), next_id: 0 }
    }
}

impl<R: PartialEq + Copy, M> MatchQueues<R, M> {
    /// Finds the posted receive for a message that has arrived. Returns the receive and whether it
    /// stays posted.
    #[inline]
    pub(crate) fn match_arrival(
        &mut self,
        source: usize,
        envelope: &Envelope,
    ) -> Option<(R, bool)> {
        let index = self.posted.iter().position(|posted| posted.key.matches(source, envelope))?;
        let PostedReceive { receive, persistent, .. } = self.posted[index];
        if !persistent {
            self.posted.remove(index);
        }
        Some((receive, persistent))
    }

    /// Returns whether any receive is posted.
    #[inline]
    pub(crate) fn has_posted(&self) -> bool {
        !self.posted.is_empty()
    }

    /// Takes the next arrival number. Numbers of one peer's messages are in order. A message that
    /// is complete when it is matched needs none.
    pub(crate) fn next_arrival_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// Adds a message to the unexpected queue, and returns its arrival number.
    pub(crate) fn push_unexpected(&mut self, source: usize, envelope: Envelope, message: M) -> u64 {
        let id = self.next_arrival_id();
        self.unexpected.push_back(Unexpected { id, source, envelope, claim: None, message });
        id
    }

    /// Removes the first unexpected message that matches.
    #[inline]
    pub(crate) fn take_unexpected(&mut self, key: &MatchKey) -> Option<Unexpected<M>> {
        let index = self.unexpected.iter().position(|message| message.is_match(key))?;
        self.unexpected.remove(index)
    }

    /// Removes the message with a claim.
    pub(crate) fn take_claimed(&mut self, claim: u64) -> Option<Unexpected<M>> {
        let index = self.unexpected.iter().position(|message| message.claim == Some(claim))?;
        self.unexpected.remove(index)
    }

    /// Posts a receive that no unexpected message matched. A `persistent` one takes more than one
    /// message.
    #[inline]
    pub(crate) fn post(&mut self, key: MatchKey, receive: R, persistent: bool) {
        self.posted.push_back(PostedReceive { key, receive, persistent });
    }

    /// Returns the first unexpected message that matches, without removing it.
    pub(crate) fn peek_unexpected(&mut self, key: &MatchKey) -> Option<&mut Unexpected<M>> {
        self.unexpected.iter_mut().find(|message| message.is_match(key))
    }

    /// Returns the message with a claim, without removing it.
    pub(crate) fn peek_claimed(&mut self, claim: u64) -> Option<&mut Unexpected<M>> {
        self.unexpected.iter_mut().find(|message| message.claim == Some(claim))
    }

    /// Returns the unexpected message with an arrival number.
    pub(crate) fn unexpected_mut(&mut self, id: u64) -> Option<&mut Unexpected<M>> {
        self.unexpected.iter_mut().rev().find(|message| message.id == id)
    }

    /// Removes a posted receive. Returns `false` if it was matched already.
    pub(crate) fn unpost(&mut self, receive: &R) -> bool {
        let index = self.posted.iter().position(|posted| posted.receive == *receive);
        index.and_then(|index| self.posted.remove(index)).is_some()
    }

    /// Removes every posted receive that names `source` as its only sender.
    pub(crate) fn unpost_source(&mut self, source: usize) -> Vec<R> {
        let mut removed = Vec::new();
        self.posted.retain(|posted| {
            let is_removed = posted.key.source == Some(source);
            removed.extend(is_removed.then_some(posted.receive));
            !is_removed
        });
        removed
    }

    /// The senders that posted receives name.
    pub(crate) fn posted_sources(&self) -> impl Iterator<Item = usize> {
        self.posted.iter().filter_map(|posted| posted.key.source)
    }

    /// Drops the unexpected messages for which `keep` returns `false`.
    pub(crate) fn retain(&mut self, keep: impl FnMut(&mut Unexpected<M>) -> bool) {
        self.unexpected.retain_mut(keep);
    }

    /// The unexpected messages, in order of arrival.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Unexpected<M>> {
        self.unexpected.iter()
    }

    /// The number of arrival numbers taken so far.
    pub(crate) fn arrivals(&self) -> u64 {
        self.next_id
    }

    /// The number of unexpected messages.
    pub(crate) fn unexpected_len(&self) -> usize {
        self.unexpected.len()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn match_key(source: Option<usize>, tag: u64, mask: u64) -> MatchKey {
        MatchKey { space: MatchSpace::Tagged, source, tag, mask }
    }
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum ModelStep {
        Send { source: usize, tag: u64 },
        Receive(MatchKey),
        Cancel(usize),
    }

    /// The reference model: everything in two vectors, searched from the start every time.
    #[derive(Default)]
    struct Model {
        sent: Vec<(usize, u64, usize)>,
        posted: Vec<(MatchKey, usize)>,
        matched: Vec<(usize, usize)>,
    }

    impl Model {
        fn matches(key: &MatchKey, source: usize, tag: u64) -> bool {
            key.source.is_none_or(|s| s == source) && key.tag & key.mask == tag & key.mask
        }

        fn send(&mut self, source: usize, tag: u64, number: usize) {
            for at in 0..self.posted.len() {
                if Self::matches(&self.posted[at].0, source, tag) {
                    let (_, receive) = self.posted.remove(at);
                    return self.matched.push((number, receive));
                }
            }
            self.sent.push((source, tag, number));
        }

        fn receive(&mut self, key: MatchKey, number: usize) {
            for at in 0..self.sent.len() {
                let (source, tag, message) = self.sent[at];
                if Self::matches(&key, source, tag) {
                    self.sent.remove(at);
                    return self.matched.push((message, number));
                }
            }
            self.posted.push((key, number));
        }

        fn cancel(&mut self, receive: usize) -> bool {
            let before = self.posted.len();
            self.posted.retain(|(_, number)| *number != receive);
            self.posted.len() != before
        }
    }

    fn model_step() -> impl Strategy<Value = ModelStep> {
        let tag = prop_oneof![0..4u64, any::<u64>()];
        let mask = prop_oneof![Just(u64::MAX), Just(0), Just(1), Just(2), any::<u64>()];
        let source = proptest::option::of(0..3usize);
        prop_oneof![
            4 => (0..3usize, tag.clone()).prop_map(|(source, tag)| ModelStep::Send { source, tag }),
            4 => (source, tag, mask)
                .prop_map(|(source, tag, mask)| ModelStep::Receive(match_key(source, tag, mask))),
            1 => (0..60usize).prop_map(ModelStep::Cancel),
        ]
    }

    proptest! {
        #[test]
        fn matching_agrees_with_the_plain_model(steps in prop::collection::vec(model_step(), 0..120)) {
            let (mut model, mut matching) = (Model::default(), MatchQueues::default());
            let mut matched = Vec::new();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    ModelStep::Send { source, tag } => {
                        model.send(source, tag, number);
                        match matching.match_arrival(source, &Envelope::tagged(tag)) {
                            Some((receive, _)) => matched.push((number, receive)),
                            None => drop(matching.push_unexpected(source, Envelope::tagged(tag), number)),
                        }
                    }
                    ModelStep::Receive(key) => {
                        model.receive(key, number);
                        match matching.take_unexpected(&key) {
                            Some(unexpected) => matched.push((unexpected.message, number)),
                            None => matching.post(key, number, false),
                        }
                    }
                    ModelStep::Cancel(receive) => {
                        prop_assert_eq!(model.cancel(receive), matching.unpost(&receive));
                    }
                }
                prop_assert_eq!(&model.matched, &matched);
                prop_assert_eq!(model.sent.len(), matching.unexpected_len());
            }
        }
    }

    #[test]
    fn receives_from_a_source_can_be_taken_back_together() {
        let mut matching = MatchQueues::<u32, ()>::default();
        for (number, source) in [(1, Some(0)), (2, None), (3, Some(1)), (4, Some(0))] {
            matching.post(match_key(source, 0, 0), number, false);
        }
        assert_eq!(matching.unpost_source(0), [1, 4]);
        assert!(!matching.unpost(&1) && matching.unpost(&2) && matching.unpost(&3));
        assert!(!matching.has_posted());
    }
}
