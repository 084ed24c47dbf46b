//! What the inner endpoint works on, by the contexts that it tells when it has finished.

use super::fetches::Fetch;

/// An operation of the inner endpoint, with the memory of this side that it uses.
#[derive(Debug)]
pub(super) enum Flight {
    /// A packet on its way to a peer.
    Packet { peer: usize, is_answer: bool, _bytes: Vec<u8> },
    /// The bytes of an announced message on their way to a peer.
    Departure { peer: usize, ticket: u64, _gathered: Option<Vec<u8>> },
    /// Memory of a receive that a peer's bytes come into.
    Landing { peer: usize, fetch: Fetch },
    /// Room for the next packet.
    Room { bytes: Vec<u8> },
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Flights {
    all: Vec<Option<Flight>>,
    free: Vec<usize>,
}

impl Flights {
    /// The context that the next one gets.
    pub(super) fn next(&self) -> u64 {
        // Null contexts mean nothing to some providers.
        1 + self.free.last().copied().unwrap_or(self.all.len()) as u64
    }

    /// Keeps one, under the context that `next` has told.
    pub(super) fn insert(&mut self, flight: Flight) {
        match self.free.pop() {
            Some(index) => self.all[index] = Some(flight),
            None => self.all.push(Some(flight)),
        }
    }

    /// Takes out one that has finished.
    pub(super) fn take(&mut self, context: u64) -> Option<Flight> {
        let index = usize::try_from(context.checked_sub(1)?).ok()?;
        let flight = self.all.get_mut(index)?.take()?;
        self.free.push(index);
        Some(flight)
    }

    /// Takes out all.
    pub(super) fn take_all(&mut self) -> Vec<Flight> {
        self.free.clear();
        std::mem::take(&mut self.all).into_iter().flatten().collect()
    }

    /// All that there are, with their contexts.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &Flight)> {
        let contexts = 1..;
        contexts.zip(&self.all).filter_map(|(context, flight)| Some((context, flight.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_are_used_again_and_found_once() {
        let mut flights = Flights::default();
        let room = || Flight::Room { bytes: Vec::new() };
        let (first, _) = (flights.next(), flights.insert(room()));
        let (second, _) = (flights.next(), flights.insert(room()));
        assert!(first != second && first != 0);
        assert!(flights.take(first).is_some() && flights.take(first).is_none());
        assert_eq!(flights.next(), first);
        assert_eq!(flights.iter().count(), 1);
        assert!(flights.take(0).is_none() && flights.take(99).is_none());
    }
}
