//! Tasks that only send messages, for members made of this program: a message between two members
//! and back, and a message from each to each. The C candidate does the same steps.

use std::time::Instant;

use anyhow::ensure;

use crate::group::exchange::{Exchange, all_agree, exchange_blocks};
use crate::group::plain::Memory;
use crate::harness::{Sample, warm_up_iterations};

/// Connection to one other member.
pub(crate) trait Link {
    /// Sends a message.
    fn send(&mut self, message: &[u8]) -> anyhow::Result<()>;

    /// Waits for a message of exactly this length, and receives it into this memory.
    fn receive(&mut self, message: &mut [u8]) -> anyhow::Result<()>;

    /// Sends the same message several times. A transport that can start a message before the
    /// previous one is complete does so.
    fn send_repeated(&mut self, message: &[u8], times: usize) -> anyhow::Result<()> {
        (0..times).try_for_each(|_| self.send(message))
    }
}

/// Buffers for messages of one size. They are allocated, and their messages are verified, once per
/// size.
#[derive(Debug)]
pub(crate) struct MessageBuffers<M> {
    pub(crate) sent: M,
    pub(crate) received: M,
    /// Whether a message back and forth, or one from each to each, was verified.
    checked: bool,
    /// Whether a window of messages was verified.
    pub(crate) checked_window: bool,
}

impl<M: Memory> MessageBuffers<M> {
    /// Returns buffers of this size, and reuses existing ones of the same size.
    pub(crate) fn ensure_size(held: &mut Option<Self>, bytes: usize) -> anyhow::Result<&mut Self> {
        let fits = held.as_ref().is_some_and(|buffers| buffers.sent.len() == bytes);
        if !fits {
            // The old buffers are dropped first: there may not be enough memory for both.
            *held = None;
            let (sent, received) = (M::touched(bytes)?, M::touched(bytes)?);
            let (checked, checked_window) = (false, false);
            return Ok(held.insert(Self { sent, received, checked, checked_window }));
        }
        Ok(held.as_mut().expect("they fit"))
    }
}

/// Sends messages of `bytes` back and forth; the first member starts. Only its times are used.
pub(crate) fn pingpong<M: Memory>(
    link: &mut impl Link,
    is_first: bool,
    held: &mut Option<MessageBuffers<M>>,
    bytes: usize,
    iterations: u64,
) -> anyhow::Result<Sample> {
    let buffers = MessageBuffers::ensure_size(held, bytes)?;
    if !buffers.checked {
        check_bounce(link, is_first, &mut buffers.sent, &mut buffers.received)?;
        buffers.checked = true;
    }
    for _ in 0..warm_up_iterations(iterations) {
        run_pingpong(link, is_first, &buffers.sent, &mut buffers.received)?;
    }
    let begin = Instant::now();
    for _ in 0..iterations {
        run_pingpong(link, is_first, &buffers.sent, &mut buffers.received)?;
    }
    Ok(Sample::of_messages(begin.elapsed().as_nanos() as f64))
}

#[inline(always)]
fn run_pingpong(
    link: &mut impl Link,
    is_first: bool,
    sent: &[u8],
    received: &mut [u8],
) -> anyhow::Result<()> {
    if is_first {
        link.send(sent)?;
        link.receive(received)
    } else {
        link.receive(received)?;
        link.send(sent)
    }
}

/// Verifies that every byte arrives in both directions: the second member returns what it received,
/// the first compares.
fn check_bounce(
    link: &mut impl Link,
    is_first: bool,
    sent: &mut [u8],
    received: &mut [u8],
) -> anyhow::Result<()> {
    received.fill(0);
    if is_first {
        let seed = sent.len();
        fill_with_pattern(sent, seed);
        run_pingpong(link, true, sent, received)?;
        ensure!(sent == received, "a byte got lost on its way there and back");
    } else {
        link.receive(received)?;
        sent.copy_from_slice(received);
        link.send(sent)?;
    }
    Ok(())
}

/// Sends messages of `bytes` from each member to each member.
pub(crate) fn alltoall<M: Memory>(
    members: &mut impl Exchange,
    held: &mut Option<MessageBuffers<M>>,
    bytes: usize,
    iterations: u64,
) -> anyhow::Result<Sample> {
    let buffers = MessageBuffers::ensure_size(held, bytes * members.size())?;
    if !buffers.checked {
        check_exchange(members, &mut buffers.sent, &mut buffers.received)?;
        buffers.checked = true;
    }
    for _ in 0..warm_up_iterations(iterations) {
        exchange_blocks(members, &buffers.sent, &mut buffers.received)?;
    }
    // Barrier, so that all members start together.
    all_agree(members, true)?;
    let begin = Instant::now();
    for _ in 0..iterations {
        exchange_blocks(members, &buffers.sent, &mut buffers.received)?;
    }
    Ok(Sample::of_messages(begin.elapsed().as_nanos() as f64))
}

fn check_exchange(
    members: &mut impl Exchange,
    sent: &mut [u8],
    received: &mut [u8],
) -> anyhow::Result<()> {
    let (own, block) = (members.rank(), sent.len() / members.size());
    let seed = |from: usize, to: usize| from * 16 + to * 5 + 1;
    received.fill(0);
    for (to, part) in sent.chunks_exact_mut(block).enumerate() {
        fill_with_pattern(part, seed(own, to));
    }
    exchange_blocks(members, sent, received)?;
    let from_right = |(from, part): (usize, &[u8])| has_pattern(part, 0, seed(from, own));
    let right = received.chunks_exact(block).enumerate().all(from_right);
    ensure!(all_agree(members, right)?, "a byte of another member did not arrive in its place");
    Ok(())
}

/// A block of the pattern is cut from this table: all bytes, in an order without runs, twice.
const TABLE: [u8; 2 * BLOCK] = {
    let mut table = [0; 2 * BLOCK];
    let mut place = 0;
    while place < table.len() {
        table[place] = (place * 31) as u8;
        place += 1;
    }
    table
};
const BLOCK: usize = 256;

/// A block of the pattern of a seed. It differs from its neighbours.
fn block(index: usize, seed: usize) -> &'static [u8] {
    &TABLE[(index * 7 + (index >> 8) * 3 + seed) % BLOCK..][..BLOCK]
}

/// Fills memory with bytes that depend on position and seed.
pub(crate) fn fill_with_pattern(bytes: &mut [u8], seed: usize) {
    for (index, part) in bytes.chunks_mut(BLOCK).enumerate() {
        part.copy_from_slice(&block(index, seed)[..part.len()]);
    }
}

/// Returns whether memory contains what [`fill_with_pattern`] wrote from `start` on.
pub(crate) fn has_pattern(bytes: &[u8], start: usize, seed: usize) -> bool {
    let (index, within) = (start / BLOCK, start % BLOCK);
    let (head, rest) = bytes.split_at(bytes.len().min(BLOCK - within));
    block(index, seed)[within..].starts_with(head)
        && rest
            .chunks(BLOCK)
            .zip(index + 1..)
            .all(|(part, index)| block(index, seed).starts_with(part))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::exchange::threads::run_members;
    use crate::group::faulty_link;
    use crate::group::plain::TouchedPages;

    fn run_pair(bytes: usize, breaks: Option<usize>) -> anyhow::Result<Sample> {
        faulty_link::run_pair(breaks, false, |link, is_first| {
            pingpong::<TouchedPages<u8>>(link, is_first, &mut None, bytes, 5)
        })
    }

    #[test]
    fn a_broken_byte_is_noticed_before_anything_is_timed() {
        for bytes in [0, 1, 100_000] {
            assert!(run_pair(bytes, None).is_ok(), "{bytes}");
        }
        assert!(run_pair(100, Some(0)).is_err());
    }

    #[test]
    fn everybody_hears_from_everybody() {
        run_members(3, |mut member| {
            let mut held: Option<MessageBuffers<TouchedPages<u8>>> = None;
            for bytes in [1, 1000] {
                alltoall(&mut member, &mut held, bytes, 3).unwrap();
            }
        });
    }
}
