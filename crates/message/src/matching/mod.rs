//! Matching of messages and receives, by source, tag and mask.
//!
//! An arriving message goes to the first posted receive that matches; a new receive takes the first
//! unexpected message that matches. Both lists are in order and messages of one sender arrive in
//! order, so two messages of one sender that match the same receives never overtake each other.
//!
//! Short queues are searched from the front. A long queue has an index for each class of receives
//! ([`class_index`]): the cost of a match does not depend on the length of the queue.

mod class_index;
mod ordered_list;
#[cfg(all(test, not(loom)))]
mod tests;

use class_index::{ClassIndex, MatchClass};
use ordered_list::OrderedList;

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
pub(crate) struct Unexpected<M> {
    /// The arrival number.
    pub(crate) arrival: u64,
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

/// An unexpected message, as long as it is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UnexpectedRef {
    arrival: u64,
    slot: u32,
}

/// A receive without a message.
struct PostedReceive<R> {
    key: MatchKey,
    receive: R,
    /// The receive takes message after message, until it is unposted.
    persistent: bool,
}

/// Length of a queue up to which it is searched from the front.
const SEARCHED_LENGTH: usize = 32;
/// Number of classes of receives that are indexed. Programs use two or three masks.
const MAX_CLASSES: usize = 8;

/// The posted receive queue and the unexpected queue.
pub(crate) struct MatchQueues<R, M> {
    posted: OrderedList<PostedReceive<R>>,
    /// The posted receives by class, while the queue is or was long and has not been empty since.
    posted_classes: Option<PostedClasses>,
    unexpected: OrderedList<Unexpected<M>>,
    /// The unexpected messages by each class that a receive asked for, under the same condition.
    unexpected_classes: Option<Vec<ClassIndex>>,
    /// The claims, and the slots of their messages, which are in no index.
    claims: Vec<(u64, u32)>,
    next_arrival: u64,
}

/// Shows the lengths of the queues.
impl<R, M> std::fmt::Debug for MatchQueues<R, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("MatchQueues");
        shown.field("posted", &self.posted.len()).field("unexpected", &self.unexpected.len());
        shown.finish_non_exhaustive()
    }
}

/// The posted receives, each in the index of its class.
#[derive(Default)]
struct PostedClasses {
    classes: Vec<ClassIndex>,
    /// Number of posted receives whose class has no index. While there are any, the queue is
    /// searched from the front.
    without_index: usize,
}

impl PostedClasses {
    fn class_mut(&mut self, class: MatchClass) -> Option<&mut ClassIndex> {
        let known = self.classes.iter().position(|index| index.class == class);
        let place = known.or_else(|| {
            let has_room = self.classes.len() < MAX_CLASSES;
            has_room.then(|| self.classes.push(ClassIndex::new(class)));
            has_room.then(|| self.classes.len() - 1)
        })?;
        Some(&mut self.classes[place])
    }

    fn push(&mut self, key: &MatchKey, slot: u32) {
        let class = MatchClass::of(key);
        match self.class_mut(class) {
            Some(index) => index.push(class.bucket_of(key), slot),
            None => self.without_index += 1,
        }
    }

    fn remove(&mut self, key: &MatchKey, slot: u32) {
        let class = MatchClass::of(key);
        // A class never loses its index while receives are posted, and gets one only when it is
        // first asked for: a receive is in the index of its class, or this class has none.
        match self.classes.iter_mut().find(|index| index.class == class) {
            Some(index) => index.remove(class.bucket_of(key), slot),
            None => self.without_index -= 1,
        }
    }

    /// The first slots that match, at most one of each class.
    #[inline]
    fn candidates(&self, source: usize, envelope: &Envelope) -> impl Iterator<Item = u32> {
        self.classes.iter().filter_map(move |index| {
            index.class.bucket(source, envelope).and_then(|bucket| index.first(bucket))
        })
    }
}

impl<R, M> Default for MatchQueues<R, M> {
    fn default() -> Self {
        Self {
            posted: OrderedList::default(),
            posted_classes: None,
            unexpected: OrderedList::default(),
            unexpected_classes: None,
            claims: Vec::new(),
            next_arrival: 0,
        }
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
        let slot = self.find_slot(source, envelope)?;
        let &PostedReceive { receive, persistent, .. } = self.posted.get(slot)?;
        if !persistent {
            self.remove_posted(slot);
        }
        Some((receive, persistent))
    }

    /// Finds the posted receive for a message, and leaves it posted. Returns its slot and the receive.
    #[inline]
    pub(crate) fn find_posted(&self, source: usize, envelope: &Envelope) -> Option<(u32, R)> {
        let slot = self.find_slot(source, envelope)?;
        Some((slot, self.posted.get(slot)?.receive))
    }

    /// The slot of the first posted receive that matches a message.
    #[inline]
    fn find_slot(&self, source: usize, envelope: &Envelope) -> Option<u32> {
        let posted = &self.posted;
        match &self.posted_classes {
            Some(classes) if classes.without_index == 0 => {
                classes.candidates(source, envelope).min_by_key(|&slot| posted.sequence(slot))
            }
            _ => Some(posted.iter().find(|(_, posted)| posted.key.matches(source, envelope))?.0),
        }
    }

    /// Removes the posted receive of a slot that [`MatchQueues::find_posted`] has returned.
    #[inline]
    pub(crate) fn remove_posted(&mut self, slot: u32) -> R {
        let removed = self.posted.remove(slot);
        if self.posted.is_empty() {
            self.posted_classes = None;
        } else if let Some(classes) = &mut self.posted_classes {
            classes.remove(&removed.key, slot);
        }
        removed.receive
    }

    /// Returns whether any receive is posted.
    #[inline]
    pub(crate) fn has_posted(&self) -> bool {
        !self.posted.is_empty()
    }

    /// Takes the next arrival number. Numbers of one peer's messages are in order. A message that
    /// is complete when it is matched needs none.
    pub(crate) fn next_arrival(&mut self) -> u64 {
        self.next_arrival += 1;
        self.next_arrival - 1
    }

    /// Adds a message to the unexpected queue.
    pub(crate) fn push_unexpected(
        &mut self,
        source: usize,
        envelope: Envelope,
        message: M,
    ) -> UnexpectedRef {
        let arrival = self.next_arrival();
        let slot =
            self.unexpected.push(Unexpected { arrival, source, envelope, claim: None, message });
        match &mut self.unexpected_classes {
            Some(classes) => push_to_all(classes, source, &envelope, slot),
            None if self.unexpected.len() > SEARCHED_LENGTH => {
                self.unexpected_classes = Some(Vec::new());
            }
            None => {}
        }
        UnexpectedRef { arrival, slot }
    }

    /// The slot of the first unexpected message that matches.
    #[inline]
    fn find_unexpected(&mut self, key: &MatchKey) -> Option<u32> {
        if self.unexpected.is_empty() {
            return None;
        }
        let class = MatchClass::of(key);
        if let Some(classes) = &mut self.unexpected_classes {
            let known = classes.iter().position(|index| index.class == class);
            if known.is_none() && classes.len() < MAX_CLASSES {
                classes.push(index_of(class, &self.unexpected));
            }
            let place = known.unwrap_or(classes.len() - 1);
            if classes[place].class == class {
                return classes[place].first(class.bucket_of(key));
            }
        }
        self.unexpected.iter().find(|(_, message)| message.is_match(key)).map(|(slot, _)| slot)
    }

    fn remove_unexpected(&mut self, slot: u32) -> Unexpected<M> {
        let removed = self.unexpected.remove(slot);
        match removed.claim {
            Some(_) => self.claims.retain(|(_, claimed)| *claimed != slot),
            None => self.unindex(removed.source, &removed.envelope, slot),
        }
        if self.unexpected.is_empty() {
            self.unexpected_classes = None;
        }
        removed
    }

    /// Takes a slot out of all indexes of unexpected messages.
    fn unindex(&mut self, source: usize, envelope: &Envelope, slot: u32) {
        for index in self.unexpected_classes.iter_mut().flatten() {
            if let Some(bucket) = index.class.bucket(source, envelope) {
                index.remove(bucket, slot);
            }
        }
    }

    /// Removes the first unexpected message that matches.
    #[inline]
    pub(crate) fn take_unexpected(&mut self, key: &MatchKey) -> Option<Unexpected<M>> {
        let slot = self.find_unexpected(key)?;
        Some(self.remove_unexpected(slot))
    }

    /// Removes the first unexpected message that matches, if `is_wanted` accepts its state.
    #[inline]
    pub(crate) fn take_unexpected_if(
        &mut self,
        key: &MatchKey,
        is_wanted: impl FnOnce(&M) -> bool,
    ) -> Option<Unexpected<M>> {
        let slot = self.find_unexpected(key)?;
        let is_wanted = self.unexpected.get(slot).is_some_and(|found| is_wanted(&found.message));
        is_wanted.then(|| self.remove_unexpected(slot))
    }

    /// Removes the message with a claim.
    pub(crate) fn take_claimed(&mut self, claim: u64) -> Option<Unexpected<M>> {
        let &(_, slot) = self.claims.iter().find(|(known, _)| *known == claim)?;
        Some(self.remove_unexpected(slot))
    }

    /// Posts a receive that no unexpected message matched. A `persistent` one takes more than one
    /// message.
    #[inline]
    pub(crate) fn post(&mut self, key: MatchKey, receive: R, persistent: bool) {
        let slot = self.posted.push(PostedReceive { key, receive, persistent });
        match &mut self.posted_classes {
            Some(classes) => classes.push(&key, slot),
            None if self.posted.len() > SEARCHED_LENGTH => {
                let classes = self.posted_classes.insert(PostedClasses::default());
                self.posted.iter().for_each(|(slot, posted)| classes.push(&posted.key, slot));
            }
            None => {}
        }
    }

    /// Returns the first unexpected message that matches, without removing it.
    #[inline]
    pub(crate) fn peek_unexpected(&mut self, key: &MatchKey) -> Option<&Unexpected<M>> {
        let slot = self.find_unexpected(key)?;
        self.unexpected.get(slot)
    }

    /// Reserves the first unexpected message that matches for the receive that names the claim.
    pub(crate) fn claim_unexpected(
        &mut self,
        key: &MatchKey,
        claim: u64,
    ) -> Option<&Unexpected<M>> {
        let slot = self.find_unexpected(key)?;
        let message = self.unexpected.get_mut(slot)?;
        message.claim = Some(claim);
        let (source, envelope) = (message.source, message.envelope);
        self.unindex(source, &envelope, slot);
        self.claims.push((claim, slot));
        self.unexpected.get(slot)
    }

    /// Returns the message with a claim, without removing it.
    pub(crate) fn peek_claimed(&self, claim: u64) -> Option<&Unexpected<M>> {
        let &(_, slot) = self.claims.iter().find(|(known, _)| *known == claim)?;
        self.unexpected.get(slot)
    }

    /// Returns an unexpected message that is still one.
    pub(crate) fn unexpected_mut(&mut self, id: UnexpectedRef) -> Option<&mut Unexpected<M>> {
        self.unexpected.get_mut(id.slot).filter(|message| message.arrival == id.arrival)
    }

    /// What a posted receive matches, if it is still posted.
    pub(crate) fn key_of(&self, receive: &R) -> Option<&MatchKey> {
        self.search_posted(|posted| posted == receive).map(|(_, posted)| &posted.key)
    }

    /// Removes a posted receive. Returns `false` if it was matched already.
    pub(crate) fn unpost(&mut self, receive: &R) -> bool {
        self.unpost_if(|posted| posted == receive).is_some()
    }

    /// Removes a posted receive that `is_it` accepts.
    pub(crate) fn unpost_if(&mut self, is_it: impl Fn(&R) -> bool) -> Option<R> {
        let (slot, _) = self.search_posted(is_it)?;
        Some(self.remove_posted(slot))
    }

    fn search_posted(&self, is_it: impl Fn(&R) -> bool) -> Option<(u32, &PostedReceive<R>)> {
        // Programs cancel in the order of posting, or in the reverse one.
        let mut slots = self.posted.iter();
        while let Some(first) = slots.next() {
            if is_it(&first.1.receive) {
                return Some(first);
            }
            if let Some(last) = slots.next_back()
                && is_it(&last.1.receive)
            {
                return Some(last);
            }
        }
        None
    }

    /// Removes every posted receive that names `source` as its only sender.
    pub(crate) fn unpost_source(&mut self, source: usize) -> Vec<R> {
        self.unpost_where(|posted| posted.key.source == Some(source))
    }

    /// Removes every posted receive that `is_it` accepts.
    pub(crate) fn unpost_all(&mut self, is_it: impl Fn(&R) -> bool) -> Vec<R> {
        self.unpost_where(|posted| is_it(&posted.receive))
    }

    fn unpost_where(&mut self, is_it: impl Fn(&PostedReceive<R>) -> bool) -> Vec<R> {
        let chosen = self.posted.iter().filter(|(_, posted)| is_it(posted));
        let slots: Vec<_> = chosen.map(|(slot, _)| slot).collect();
        slots.into_iter().map(|slot| self.remove_posted(slot)).collect()
    }

    /// The senders that posted receives name.
    pub(crate) fn posted_sources(&self) -> impl Iterator<Item = usize> {
        self.posted.iter().filter_map(|(_, posted)| posted.key.source)
    }

    /// Returns whether a receive in a space is posted that names a sender.
    pub(crate) fn has_posted_in(&self, space: MatchSpace, source: usize) -> bool {
        let is_it = |key: &MatchKey| key.space == space && key.source == Some(source);
        self.posted.iter().any(|(_, posted)| is_it(&posted.key))
    }

    /// Drops the unexpected messages for which `keep` returns `false`.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(UnexpectedEntry<'_, M>) -> bool) {
        let slots: Vec<_> = self.unexpected.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            let Some(entry) = self.unexpected.get_mut(slot) else { continue };
            let entry = UnexpectedEntry {
                arrival: entry.arrival,
                source: entry.source,
                is_claimed: entry.claim.is_some(),
                message: &mut entry.message,
            };
            if !keep(entry) {
                self.remove_unexpected(slot);
            }
        }
    }

    /// The unexpected messages, in order of arrival.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Unexpected<M>> {
        self.unexpected.iter().map(|(_, message)| message)
    }

    /// The number of arrival numbers taken so far.
    pub(crate) fn arrivals(&self) -> u64 {
        self.next_arrival
    }

    /// The number of unexpected messages.
    #[inline]
    pub(crate) fn unexpected_len(&self) -> usize {
        self.unexpected.len()
    }
}

/// An unexpected message whose state may change, but not what it matches.
pub(crate) struct UnexpectedEntry<'a, M> {
    pub(crate) arrival: u64,
    pub(crate) source: usize,
    pub(crate) is_claimed: bool,
    pub(crate) message: &'a mut M,
}

/// Appends a message to the index of every class that it can be matched in.
fn push_to_all(classes: &mut [ClassIndex], source: usize, envelope: &Envelope, slot: u32) {
    for index in classes {
        if let Some(bucket) = index.class.bucket(source, envelope) {
            index.push(bucket, slot);
        }
    }
}

/// The index of one class over all messages without a claim.
fn index_of<M>(class: MatchClass, unexpected: &OrderedList<Unexpected<M>>) -> ClassIndex {
    let mut index = ClassIndex::new(class);
    for (slot, message) in unexpected.iter().filter(|(_, message)| message.claim.is_none()) {
        push_to_all(std::slice::from_mut(&mut index), message.source, &message.envelope, slot);
    }
    index
}
