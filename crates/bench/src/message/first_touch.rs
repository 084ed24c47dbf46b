//! Messages into memory that was never touched, or has been used before: the message half of
//! `pinning`.

use std::io;
use std::ops::{Deref, DerefMut};
use std::time::Instant;

use anyhow::ensure;
use memferry::message::ShareableBuffer;
use memferry::sys::pages::Pages;

use super::messages::{Link, fill_with_pattern, has_pattern};
use crate::group::plain::{Memory, TouchedPages};
use crate::harness::{Sample, warm_up_iterations};

/// Memory that can be allocated without being touched.
pub(crate) trait FreshMemory: Memory {
    /// Type of the untouched memory.
    type Fresh: DerefMut<Target = [u8]>;

    /// Allocates untouched memory of a length.
    fn fresh(bytes: usize) -> io::Result<Self::Fresh>;
}

/// Ordinary pages.
pub(crate) struct FreshPages(Pages);

impl Deref for FreshPages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

impl DerefMut for FreshPages {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.as_mut_slice()
    }
}

impl FreshMemory for TouchedPages<u8> {
    type Fresh = FreshPages;

    fn fresh(bytes: usize) -> io::Result<FreshPages> {
        Pages::new(bytes).map(FreshPages)
    }
}

impl FreshMemory for ShareableBuffer {
    type Fresh = Self;

    fn fresh(bytes: usize) -> io::Result<Self> {
        Self::new(bytes)
    }
}

/// Whether memory that is not resident is prefaulted for a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Prefaulting {
    /// As configured.
    Usual,
    /// Never.
    Off,
}

/// What a member keeps from one command to the next.
#[derive(Debug, Default)]
pub(crate) struct FreshMessages {
    /// The size whose bytes were last verified.
    checked: usize,
    /// The number of commands.
    commands: u64,
}

impl FreshMessages {
    /// The policies of an iteration in the order of their messages. Neither is always behind the other,
    /// also where a command has only one iteration that counts.
    fn order(&self, iteration: u64) -> [Prefaulting; 2] {
        let mut policies = [Prefaulting::Usual, Prefaulting::Off];
        policies.rotate_left(((self.commands + iteration) % 2) as usize);
        policies
    }
}

/// Sends messages of `bytes` from the first member to the second, one at a time, in turn with each
/// policy. The second member prepares its buffer and reports that it is ready; the first member measures
/// from then until the reply. The sample has the time with [`Prefaulting::Usual`] as its total, and that
/// with [`Prefaulting::Off`] as that of messages.
pub(crate) fn receive_fresh<M: FreshMemory>(
    link: &mut impl Link,
    is_first: bool,
    set_policy: impl Fn(Prefaulting) -> anyhow::Result<()>,
    state: &mut FreshMessages,
    (bytes, fresh): (usize, bool),
    iterations: u64,
) -> anyhow::Result<Sample> {
    // Allocated for every command: the time depends on the page frames, and no candidate should
    // keep better frames for the whole bench.
    let mut memory = M::touched(bytes)?;
    if state.checked != bytes {
        if is_first {
            fill_with_pattern(&mut memory, bytes);
            send(link, &memory)?;
        } else {
            memory.fill(0);
            receive(link, &mut memory, |message| has_pattern(message, 0, bytes))?;
        }
        state.checked = bytes;
    }
    state.commands += 1;
    let (mut usual_ns, mut off_ns, warm_up) = (0.0, 0.0, warm_up_iterations(iterations));
    for iteration in 0..warm_up + iterations {
        for policy in state.order(iteration) {
            set_policy(policy)?;
            let once_ns = match (is_first, fresh) {
                (true, _) => send(link, &memory)?,
                (false, false) => receive(link, &mut memory, |_| true)?,
                (false, true) => receive(link, &mut M::fresh(bytes)?, |_| true)?,
            };
            let sum_ns = if policy == Prefaulting::Usual { &mut usual_ns } else { &mut off_ns };
            *sum_ns += if iteration < warm_up { 0.0 } else { once_ns };
        }
    }
    Ok(Sample::of_parts(usual_ns, off_ns))
}

/// Replies of the second member.
const REPLY_OK: u8 = 1;
const REPLY_MISMATCH: u8 = 2;

/// Sends a message. Returns the time from the peer's ready message to its reply.
fn send(link: &mut impl Link, message: &[u8]) -> anyhow::Result<f64> {
    let mut answer = [0];
    link.receive(&mut answer)?;
    let start = Instant::now();
    link.send(message)?;
    link.receive(&mut answer)?;
    let took_ns = start.elapsed().as_nanos() as f64;
    ensure!(answer == [REPLY_OK], "a byte did not arrive");
    Ok(took_ns)
}

/// Reports that it is ready, receives and replies. Returns 0, because only the sender measures.
fn receive(
    link: &mut impl Link,
    message: &mut [u8],
    is_right: impl Fn(&[u8]) -> bool,
) -> anyhow::Result<f64> {
    link.send(&[REPLY_OK])?;
    link.receive(message)?;
    link.send(&[if is_right(message) { REPLY_OK } else { REPLY_MISMATCH }])?;
    Ok(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::faulty_link;

    fn run_pair(fresh: bool, breaks: Option<usize>) -> anyhow::Result<Sample> {
        faulty_link::run_pair(breaks, true, |link, is_first| {
            let set_policy = |_| Ok(());
            let state = &mut FreshMessages::default();
            receive_fresh::<TouchedPages<u8>>(link, is_first, set_policy, state, (5000, fresh), 3)
        })
    }

    #[test]
    fn each_policy_is_as_often_the_first_though_a_command_has_one_iteration() {
        let mut state = FreshMessages::default();
        let mut counted = || {
            state.commands += 1;
            state.order(warm_up_iterations(1))[0]
        };
        let firsts: Vec<_> = (0..6).map(|_| counted()).collect();
        assert_eq!(firsts.iter().filter(|&&first| first == Prefaulting::Off).count(), 3);
    }

    #[test]
    fn a_broken_byte_is_noticed_before_anything_is_timed() {
        for fresh in [false, true] {
            assert!(run_pair(fresh, None).is_ok());
            assert_eq!(run_pair(fresh, Some(0)).unwrap_err().to_string(), "a byte did not arrive");
        }
    }
}
