//! The sender of tasks. Several sends are always in flight, so that the receiver does not wait for
//! the sender.

use std::collections::VecDeque;

use memferry::message::{Endpoint, Operation, Peer};

use super::TAG;
use super::slots::MessageSlots;

/// Maximum number of sends in flight.
const WINDOW: usize = 8;

/// Sends `times` messages from the next slots.
pub(super) fn send(
    endpoint: &Endpoint,
    to: Peer,
    places: &mut MessageSlots,
    times: u64,
) -> anyhow::Result<()> {
    let mut under_way: VecDeque<Operation> = VecDeque::with_capacity(WINDOW);
    for _ in 0..times {
        if under_way.len() == WINDOW
            && let Some(mut oldest) = under_way.pop_front()
        {
            oldest.wait()?;
        }
        let place = places.next();
        // SAFETY: the sender's memory never changes, and all sends are waited for before this
        // function returns. On an earlier error, the caller closes the endpoint before it frees the
        // memory.
        let send = unsafe { endpoint.isend_raw(to, TAG, places.address(&place), place.len()) }?;
        under_way.push_back(send);
    }
    for mut send in under_way {
        send.wait()?;
    }
    Ok(())
}
