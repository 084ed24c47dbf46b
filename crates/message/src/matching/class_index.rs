//! An index of a match queue for one class of receives.
//!
//! Receives that compare the same bits of the tag, and all of which name a sender or none of which
//! does, are a class. Within a class, matching is equality: of the compared bits and of the sender.
//! So a hash table finds the list of entries that match, in order.

use std::collections::HashMap;
use std::collections::hash_map::{Entry, RandomState};
use std::hash::{BuildHasher, Hasher};

use super::MatchKey;
use super::ordered_list::NONE;
use crate::envelope::{Envelope, MatchSpace};

/// What receives of a class compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MatchClass {
    space: MatchSpace,
    has_source: bool,
    mask: u64,
}

/// The compared values. Entries with equal ones are in one bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct BucketKey {
    /// `usize::MAX` if senders are not compared.
    source: usize,
    tag: u64,
}

impl MatchClass {
    pub(super) fn of(key: &MatchKey) -> Self {
        Self { space: key.space, has_source: key.source.is_some(), mask: key.mask }
    }

    /// The bucket of a message, if it is of the match space of the class.
    #[inline]
    pub(super) fn bucket(&self, source: usize, envelope: &Envelope) -> Option<BucketKey> {
        (self.space == envelope.space).then_some(BucketKey {
            source: if self.has_source { source } else { usize::MAX },
            tag: envelope.tag & self.mask,
        })
    }

    /// The bucket of the messages that a receive of this class matches.
    #[inline]
    pub(super) fn bucket_of(&self, key: &MatchKey) -> BucketKey {
        BucketKey { source: key.source.unwrap_or(usize::MAX), tag: key.tag & self.mask }
    }
}

/// The neighbours of a slot in its bucket.
#[derive(Clone, Copy)]
struct Links {
    previous: u32,
    next: u32,
}

/// The first and the last slot of a bucket.
#[derive(Clone, Copy)]
struct Ends {
    first: u32,
    last: u32,
}

/// The slots of a list that are of one class, by bucket and in order.
pub(super) struct ClassIndex {
    pub(super) class: MatchClass,
    buckets: HashMap<BucketKey, Ends, SeededState>,
    /// By slot. Only those of slots in the index mean anything.
    links: Vec<Links>,
}

impl ClassIndex {
    pub(super) fn new(class: MatchClass) -> Self {
        Self { class, buckets: HashMap::with_hasher(SeededState::new()), links: Vec::new() }
    }

    /// Appends a slot to a bucket.
    #[inline]
    pub(super) fn push(&mut self, bucket: BucketKey, slot: u32) {
        if self.links.len() <= slot as usize {
            self.links.resize(slot as usize + 1, Links { previous: NONE, next: NONE });
        }
        let previous = match self.buckets.entry(bucket) {
            Entry::Occupied(mut ends) => std::mem::replace(&mut ends.get_mut().last, slot),
            Entry::Vacant(place) => {
                place.insert(Ends { first: slot, last: slot });
                NONE
            }
        };
        self.links[slot as usize] = Links { previous, next: NONE };
        if previous != NONE {
            self.links[previous as usize].next = slot;
        }
    }

    /// Removes a slot from its bucket.
    ///
    /// # Panics
    /// If the slot is not in the bucket.
    #[inline]
    pub(super) fn remove(&mut self, bucket: BucketKey, slot: u32) {
        let Links { previous, next } = self.links[slot as usize];
        if previous != NONE {
            self.links[previous as usize].next = next;
        }
        if next != NONE {
            self.links[next as usize].previous = previous;
        }
        if previous != NONE && next != NONE {
            return;
        }
        let Entry::Occupied(mut ends) = self.buckets.entry(bucket) else {
            panic!("the bucket of a slot in the index");
        };
        match (previous, next) {
            (NONE, NONE) => drop(ends.remove()),
            (NONE, next) => ends.get_mut().first = next,
            (previous, _) => ends.get_mut().last = previous,
        }
    }

    /// The first slot of a bucket.
    #[inline]
    pub(super) fn first(&self, bucket: BucketKey) -> Option<u32> {
        self.buckets.get(&bucket).map(|ends| ends.first)
    }
}

/// Makes hashers with a seed of this process: a peer that chooses tags cannot aim at one bucket.
#[derive(Clone)]
struct SeededState([u64; 2]);

impl SeededState {
    fn new() -> Self {
        let random = RandomState::new();
        Self([random.hash_one(1), random.hash_one(2)])
    }
}

impl BuildHasher for SeededState {
    type Hasher = FoldedMultiply;

    #[inline]
    fn build_hasher(&self) -> FoldedMultiply {
        FoldedMultiply { state: self.0[0], seed: self.0[1] }
    }
}

/// Multiplies each word with the seeded state and folds the halves of the product.
struct FoldedMultiply {
    state: u64,
    seed: u64,
}

impl Hasher for FoldedMultiply {
    #[inline]
    fn write_u64(&mut self, word: u64) {
        let product = u128::from(self.state ^ word) * u128::from(self.seed | 1);
        self.state = (product as u64) ^ ((product >> 64) as u64);
    }

    #[inline]
    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.state
    }
}
