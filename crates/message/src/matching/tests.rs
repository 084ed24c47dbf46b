//! Tests of matching, against a model that searches two vectors from the start every time.

use proptest::prelude::*;

use super::*;

fn match_key(source: Option<usize>, tag: u64, mask: u64) -> MatchKey {
    MatchKey { space: MatchSpace::Tagged, source, tag, mask }
}

#[derive(Debug, Clone)]
enum ModelStep {
    Send { source: usize, envelope: Envelope },
    Receive { key: MatchKey, persistent: bool },
    Cancel(usize),
    Claim(MatchKey),
    TakeClaimed(usize),
    DropFrom(usize),
    UnpostSource(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ModelMessage {
    source: usize,
    envelope: Envelope,
    number: usize,
    claim: Option<u64>,
}

#[derive(Default)]
struct Model {
    sent: Vec<ModelMessage>,
    posted: Vec<(MatchKey, usize, bool)>,
}

impl Model {
    fn send(&mut self, message: ModelMessage) -> Option<(usize, bool)> {
        let is_match = |(key, ..): &(MatchKey, usize, bool)| {
            key.space == message.envelope.space
                && key.source.is_none_or(|s| s == message.source)
                && key.tag & key.mask == message.envelope.tag & key.mask
        };
        let Some(place) = self.posted.iter().position(is_match) else {
            self.sent.push(message);
            return None;
        };
        let (_, receive, persistent) = self.posted[place];
        if !persistent {
            self.posted.remove(place);
        }
        Some((receive, persistent))
    }

    fn find(&self, key: &MatchKey) -> Option<usize> {
        self.sent.iter().position(|message| {
            message.claim.is_none()
                && key.space == message.envelope.space
                && key.source.is_none_or(|s| s == message.source)
                && key.tag & key.mask == message.envelope.tag & key.mask
        })
    }
}

fn envelope() -> impl Strategy<Value = Envelope> {
    prop_oneof![
        6 => (0..6u64).prop_map(Envelope::tagged),
        2 => any::<u64>().prop_map(Envelope::tagged),
        1 => Just(Envelope::untagged()),
    ]
}

fn key() -> impl Strategy<Value = MatchKey> {
    let tag = prop_oneof![0..6u64, any::<u64>()];
    // More masks than there are indexes.
    let mask = prop_oneof![6 => Just(u64::MAX), 3 => Just(0), 4 => 0..12u64, 1 => any::<u64>()];
    let source = proptest::option::of(0..3usize);
    prop_oneof![
        8 => (source.clone(), tag, mask).prop_map(|(s, tag, mask)| match_key(s, tag, mask)),
        1 => source.prop_map(|source| MatchKey {
            space: MatchSpace::Untagged,
            source,
            tag: 0,
            mask: 0
        }),
    ]
}

/// Steps of a test in which sends or receives are `weight` times as frequent, so that one of the
/// queues gets long.
fn model_step(sends: u32, receives: u32) -> impl Strategy<Value = ModelStep> {
    prop_oneof![
        sends => (0..3usize, envelope())
            .prop_map(|(source, envelope)| ModelStep::Send { source, envelope }),
        receives => (key(), prop::bool::weighted(0.02))
            .prop_map(|(key, persistent)| ModelStep::Receive { key, persistent }),
        2 => (0..400usize).prop_map(ModelStep::Cancel),
        1 => key().prop_map(ModelStep::Claim),
        1 => (0..400usize).prop_map(ModelStep::TakeClaimed),
        1 => Just(ModelStep::DropFrom(400)),
        1 => (0..3usize).prop_map(ModelStep::UnpostSource),
    ]
}

fn run(steps: Vec<ModelStep>) -> Result<(), TestCaseError> {
    let (mut model, mut matching) = (Model::default(), MatchQueues::default());
    for (number, step) in steps.into_iter().enumerate() {
        match step {
            ModelStep::Send { source, envelope } => {
                let expected = model.send(ModelMessage { source, envelope, number, claim: None });
                let matched = matching.match_arrival(source, &envelope);
                prop_assert_eq!(matched, expected);
                if matched.is_none() {
                    let kept = matching.push_unexpected(source, envelope, number);
                    prop_assert_eq!(matching.unexpected_mut(kept).map(|m| m.message), Some(number));
                }
            }
            ModelStep::Receive { key, persistent } => {
                let expected = model.find(&key).map(|place| model.sent.remove(place));
                let peeked = matching.peek_unexpected(&key).map(|found| found.message);
                prop_assert_eq!(peeked, expected.map(|message| message.number));
                let taken = matching.take_unexpected(&key);
                prop_assert_eq!(taken.map(|found| found.message), peeked);
                if peeked.is_none() {
                    model.posted.push((key, number, persistent));
                    matching.post(key, number, persistent);
                }
            }
            ModelStep::Cancel(receive) => {
                let before = model.posted.len();
                model.posted.retain(|(_, posted, _)| *posted != receive);
                prop_assert_eq!(matching.unpost(&receive), model.posted.len() != before);
            }
            ModelStep::Claim(key) => {
                let place = model.find(&key);
                let expected = place.map(|place| {
                    model.sent[place].claim = Some(number as u64);
                    model.sent[place].number
                });
                let claimed = matching.claim_unexpected(&key, number as u64);
                prop_assert_eq!(claimed.map(|found| found.message), expected);
            }
            ModelStep::TakeClaimed(claim) => {
                let claim = claim as u64;
                let place = model.sent.iter().position(|message| message.claim == Some(claim));
                let expected = place.map(|place| model.sent.remove(place).number);
                prop_assert_eq!(matching.peek_claimed(claim).map(|found| found.message), expected);
                prop_assert_eq!(matching.take_claimed(claim).map(|found| found.message), expected);
            }
            ModelStep::DropFrom(last) => {
                // Every third message, and none of the claimed ones.
                let keeps = |number: usize, is_claimed: bool| {
                    is_claimed || !number.is_multiple_of(3) || number > last
                };
                model.sent.retain(|message| keeps(message.number, message.claim.is_some()));
                matching.retain(|entry| keeps(*entry.message, entry.is_claimed));
            }
            ModelStep::UnpostSource(source) => {
                let named = model.posted.iter().filter(|(key, ..)| key.source == Some(source));
                let expected: Vec<_> = named.map(|(_, receive, _)| *receive).collect();
                model.posted.retain(|(key, ..)| key.source != Some(source));
                prop_assert_eq!(matching.unpost_source(source), expected);
            }
        }
        prop_assert_eq!(matching.unexpected_len(), model.sent.len());
        prop_assert_eq!(matching.has_posted(), !model.posted.is_empty());
        prop_assert!(matching.iter().map(|m| m.message).eq(model.sent.iter().map(|m| m.number)));
    }
    Ok(())
}

proptest! {
    #[test]
    fn matching_agrees_with_the_plain_model(
        steps in prop::collection::vec(model_step(30, 30), 0..200)
    ) {
        run(steps)?;
    }

    #[test]
    fn many_unexpected_messages_match_as_in_the_plain_model(
        steps in prop::collection::vec(model_step(60, 20), 0..400)
    ) {
        run(steps)?;
    }

    #[test]
    fn many_posted_receives_match_as_in_the_plain_model(
        steps in prop::collection::vec(model_step(20, 60), 0..400)
    ) {
        run(steps)?;
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

#[test]
fn a_hundred_thousand_messages_in_reverse_order_of_tags_are_matched() {
    const MESSAGES: u64 = 100_000;
    let mut matching = MatchQueues::<u64, u64>::default();
    for tag in 0..MESSAGES {
        matching.push_unexpected(0, Envelope::tagged(tag), tag);
    }
    for tag in (0..MESSAGES).rev() {
        let key = match_key((tag % 2 == 0).then_some(0), tag, u64::MAX);
        assert_eq!(matching.take_unexpected(&key).map(|found| found.message), Some(tag));
    }
    for tag in 0..MESSAGES {
        matching.post(match_key((tag % 2 == 0).then_some(0), tag, u64::MAX), tag, false);
    }
    for tag in (0..MESSAGES).rev() {
        assert_eq!(matching.match_arrival(0, &Envelope::tagged(tag)), Some((tag, false)));
    }
    assert!(!matching.has_posted() && matching.unexpected_len() == 0);
}

#[test]
fn a_message_that_is_gone_is_not_mistaken_for_its_successor_in_the_slot() {
    let mut matching = MatchQueues::<u32, u8>::default();
    let gone = matching.push_unexpected(0, Envelope::tagged(1), 1);
    matching.take_unexpected(&match_key(None, 1, u64::MAX)).unwrap();
    let here = matching.push_unexpected(0, Envelope::tagged(1), 2);
    assert!(matching.unexpected_mut(gone).is_none());
    assert_eq!(matching.unexpected_mut(here).unwrap().message, 2);
}
