//! The peers of a station by their numbers in its address vector. Reading takes no lock: every message
//! begins with it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use memferry_message::Peer;

/// The numbers of the first segment. Each further one doubles the table.
const FIRST: usize = 64;
const SEGMENTS: usize = 26;

#[derive(Debug)]
pub(super) struct Peers {
    segments: [OnceLock<Box<[Number]>>; SEGMENTS],
}

/// What a number stands for, which is only ever one peer, and none once it was removed.
#[derive(Debug, Default)]
struct Number {
    peer: OnceLock<Peer>,
    is_removed: AtomicBool,
}

impl Default for Peers {
    fn default() -> Self {
        Self { segments: [const { OnceLock::new() }; SEGMENTS] }
    }
}

/// The segment of a number, and its place there.
#[inline]
fn place(number: u64) -> Option<(usize, usize)> {
    let number = usize::try_from(number).ok()?;
    let segment = (number / FIRST + 1).ilog2() as usize;
    (segment < SEGMENTS).then(|| (segment, number - FIRST * ((1 << segment) - 1)))
}

impl Peers {
    #[inline]
    pub(super) fn get(&self, number: u64) -> Option<Peer> {
        let (segment, place) = place(number)?;
        let number = &self.segments[segment].get()?[place];
        number.peer.get().filter(|_| !number.is_removed.load(Ordering::Relaxed)).copied()
    }

    /// The peer of a number, which has none from now on.
    pub(super) fn remove(&self, number: u64) -> Option<Peer> {
        let (segment, place) = place(number)?;
        let number = &self.segments[segment].get()?[place];
        let peer = number.peer.get().copied()?;
        (!number.is_removed.swap(true, Ordering::Relaxed)).then_some(peer)
    }

    /// Remembers the peer of a number, of which there is only ever one.
    pub(super) fn set(&self, number: u64, peer: Peer) {
        let Some((segment, place)) = place(number) else { return };
        let empty = || (0..FIRST << segment).map(|_| Number::default()).collect();
        let _ = self.segments[segment].get_or_init(empty)[place].peer.set(peer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_a_place_of_its_own() {
        let places: Vec<_> = (0..1000).map(|number| place(number).unwrap()).collect();
        assert_eq!((places[0], places[63], places[64]), ((0, 0), (0, 63), (1, 0)));
        assert_eq!((places[191], places[192]), ((1, 127), (2, 0)));
        assert!(places.windows(2).all(|two| two[0] < two[1]));
        assert!(place(u64::MAX).is_none() && place(1 << 50).is_none());
    }
}
