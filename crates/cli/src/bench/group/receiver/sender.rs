//! The sender of tasks: a few are always on their way, so that the receiver never waits for it.

use std::collections::VecDeque;

use memferry::message::{Endpoint, Operation, Peer};

use super::TAG;
use super::places::Places;

/// Sends that are under way at a time.
const WINDOW: usize = 8;

/// Sends `times` messages from the next places.
pub(super) fn send(
    endpoint: &Endpoint,
    to: Peer,
    places: &mut Places,
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
        // returns. If something goes wrong before, the caller closes the endpoint before the memory
        // goes.
        let send = unsafe { endpoint.isend_raw(to, TAG, places.address(&place), place.len()) }?;
        under_way.push_back(send);
    }
    for mut send in under_way {
        send.wait()?;
    }
    Ok(())
}
