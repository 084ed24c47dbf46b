//! The peers of an endpoint by their numbers in its address vector. Reads take no lock: every
//! message begins with one.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use memferry_message::Peer;

/// The size of the first segment. Each further segment doubles the table.
const FIRST_SEGMENT: usize = 64;
const SEGMENTS: usize = 26;

#[derive(Debug)]
pub(super) struct AvPeerTable {
    segments: [OnceLock<Box<[AvPeerSlot]>>; SEGMENTS],
}

/// The peer of a number, which never changes, until the number is removed.
#[derive(Debug, Default)]
struct AvPeerSlot {
    peer: OnceLock<Peer>,
    is_removed: AtomicBool,
}

impl Default for AvPeerTable {
    fn default() -> Self {
        Self { segments: [const { OnceLock::new() }; SEGMENTS] }
    }
}

/// The segment of a number, and the index in it.
#[inline]
fn position(number: u64) -> Option<(usize, usize)> {
    let number = usize::try_from(number).ok()?;
    let segment = (number / FIRST_SEGMENT + 1).ilog2() as usize;
    (segment < SEGMENTS).then(|| (segment, number - FIRST_SEGMENT * ((1 << segment) - 1)))
}

impl AvPeerTable {
    #[inline]
    pub(super) fn get(&self, number: u64) -> Option<Peer> {
        let (segment, index) = position(number)?;
        let number = &self.segments[segment].get()?[index];
        number.peer.get().filter(|_| !number.is_removed.load(Ordering::Relaxed)).copied()
    }

    /// Removes and returns the peer of a number.
    pub(super) fn remove(&self, number: u64) -> Option<Peer> {
        let (segment, index) = position(number)?;
        let number = &self.segments[segment].get()?[index];
        let peer = number.peer.get().copied()?;
        (!number.is_removed.swap(true, Ordering::Relaxed)).then_some(peer)
    }

    /// Sets the peer of a number.
    pub(super) fn set(&self, number: u64, peer: Peer) {
        let Some((segment, index)) = position(number) else { return };
        let empty = || (0..FIRST_SEGMENT << segment).map(|_| AvPeerSlot::default()).collect();
        let _ = self.segments[segment].get_or_init(empty)[index].peer.set(peer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_a_place_of_its_own() {
        let positions: Vec<_> = (0..1000).map(|number| position(number).unwrap()).collect();
        assert_eq!((positions[0], positions[63], positions[64]), ((0, 0), (0, 63), (1, 0)));
        assert_eq!((positions[191], positions[192]), ((1, 127), (2, 0)));
        assert!(positions.windows(2).all(|two| two[0] < two[1]));
        assert!(position(u64::MAX).is_none() && position(1 << 50).is_none());
    }
}
