//! Forms of the receive loop.

use std::collections::VecDeque;
use std::ops::Range;

use anyhow::ensure;
use memferry::message::{Endpoint, Operation, Peer, TAG_ALL};

use super::TAG;
use super::slots::{HOT_SLOTS, MessageSlots};

/// A form of the receive loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReceiveLoop {
    /// Receive, compute.
    Naive,
    /// Post the next receive, wait for this message, compute.
    TwoPhase,
    /// Post the receive after the next, make progress, wait for this message, compute.
    ThreePhase,
    /// As `TwoPhase`, with a progress thread.
    Background,
}

impl ReceiveLoop {
    #[cfg(test)]
    pub(super) const ALL: [Self; 4] =
        [Self::Naive, Self::TwoPhase, Self::ThreePhase, Self::Background];

    /// Number of posted receives after the one that is waited for.
    fn posted_ahead(self) -> usize {
        match self {
            Self::Naive => 0,
            Self::TwoPhase | Self::Background => 1,
            Self::ThreePhase => 2,
        }
    }

    /// Receives `times` messages in the next slots, and runs `task` on each message and its start
    /// offset.
    pub(super) fn receive(
        self,
        endpoint: &Endpoint,
        from: Peer,
        places: &mut MessageSlots,
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
        places: &mut MessageSlots,
        times: u64,
        mut task: impl FnMut(&mut [u8], usize),
    ) -> anyhow::Result<()> {
        let mut under_way: VecDeque<(Operation, Range<usize>)> = VecDeque::with_capacity(HOT_SLOTS);
        let mut begun = 0;
        for _ in 0..times {
            while under_way.len() <= self.posted_ahead() && begun < times {
                let place = places.next();
                let (address, length) = (places.address(&place), place.len());
                // SAFETY: a slot is reused after `HOT_SLOTS` messages at the earliest, and no more
                // are in flight, so this slot is free until the wait below returns. On an earlier
                // error, the caller closes the endpoint before it frees the memory.
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
            // SAFETY: the receive into this slot is complete, and the other receives are into other
            // slots.
            task(unsafe { places.slot_mut(&place) }, place.start);
        }
        Ok(())
    }
}

fn receive_each(
    endpoint: &Endpoint,
    from: Peer,
    places: &mut MessageSlots,
    times: u64,
    mut task: impl FnMut(&mut [u8], usize),
) -> anyhow::Result<()> {
    for _ in 0..times {
        let place = places.next();
        // SAFETY: every receive is complete before the next is posted, so nothing is in flight.
        let message = unsafe { places.slot_mut(&place) };
        let length = endpoint.recv(from, TAG, TAG_ALL, &mut *message)?.length;
        ensure!(length == message.len() as u64, "a message of {length} bytes arrived");
        task(message, place.start);
    }
    Ok(())
}
