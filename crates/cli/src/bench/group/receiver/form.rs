//! The ways to write the loop of a receiver.

use std::collections::VecDeque;
use std::ops::Range;

use anyhow::ensure;
use memferry::message::{Endpoint, Operation, Peer, TAG_ALL};

use super::TAG;
use super::places::{HOT_PLACES, Places};

/// One of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::bench::group) enum Form {
    /// Receive, compute.
    Naive,
    /// Begin to receive the next, wait for this one, compute.
    TwoPhase,
    /// Begin to receive the one after the next, move messages on, wait for this one, compute.
    ThreePhase,
    /// As in two phases, while a thread moves messages.
    Background,
}

impl Form {
    #[cfg(test)]
    pub(super) const ALL: [Self; 4] =
        [Self::Naive, Self::TwoPhase, Self::ThreePhase, Self::Background];

    /// How many receives are under way behind the one that is waited for.
    fn ahead(self) -> usize {
        match self {
            Self::Naive => 0,
            Self::TwoPhase | Self::Background => 1,
            Self::ThreePhase => 2,
        }
    }

    /// Receives `times` messages in the next places, and does the task of each. The task is told
    /// where its message begins.
    pub(super) fn receive(
        self,
        endpoint: &Endpoint,
        from: Peer,
        places: &mut Places,
        times: u64,
        task: impl FnMut(&mut [u8], usize),
    ) -> anyhow::Result<()> {
        match self {
            Self::Naive => receive_each(endpoint, from, places, times, task),
            _ => self.receive_ahead(endpoint, from, places, times, task),
        }
    }

    fn receive_ahead(
        self,
        endpoint: &Endpoint,
        from: Peer,
        places: &mut Places,
        times: u64,
        mut task: impl FnMut(&mut [u8], usize),
    ) -> anyhow::Result<()> {
        let mut under_way: VecDeque<(Operation, Range<usize>)> =
            VecDeque::with_capacity(HOT_PLACES);
        let mut begun = 0;
        for _ in 0..times {
            while under_way.len() <= self.ahead() && begun < times {
                let place = places.next();
                let (address, length) = (places.address(&place), place.len());
                // SAFETY: a place comes again after `HOT_PLACES` at the earliest, and no more are
                // under way, so this one is free until the wait below has ended. If something goes
                // wrong before, the caller closes the endpoint before the memory goes.
                let receive = unsafe { endpoint.irecv_raw(from, TAG, TAG_ALL, address, length) }?;
                under_way.push_back((receive, place));
                begun += 1;
            }
            if self == Self::ThreePhase {
                endpoint.progress();
            }
            let (mut receive, place) = under_way.pop_front().expect("as many begun as waited for");
            let length = receive.wait()?.length;
            ensure!(length == place.len() as u64, "a message of {length} bytes arrived");
            // SAFETY: the receive into this place is over, and the others are into other places.
            task(unsafe { places.at(&place) }, place.start);
        }
        Ok(())
    }
}

fn receive_each(
    endpoint: &Endpoint,
    from: Peer,
    places: &mut Places,
    times: u64,
    mut task: impl FnMut(&mut [u8], usize),
) -> anyhow::Result<()> {
    for _ in 0..times {
        let place = places.next();
        // SAFETY: every receive ends before the next begins, so nothing is in flight.
        let message = unsafe { places.at(&place) };
        let length = endpoint.recv(from, TAG, TAG_ALL, &mut *message)?.length;
        ensure!(length == message.len() as u64, "a message of {length} bytes arrived");
        task(message, place.start);
    }
    Ok(())
}
