//! Messages and nothing else, as members made of this program do them: one to and fro between two
//! of them, and one from each to each. The same steps as in the C contestant.

use std::time::Instant;

use anyhow::ensure;

use super::exchange::{Exchange, all_agree, exchange_blocks};
use super::order::{Timing, warm_up_of};
use super::plain::Memory;

/// A way to one other member.
pub(super) trait Link {
    /// Sends a message.
    fn send(&mut self, message: &[u8]) -> anyhow::Result<()>;

    /// Waits for a message of exactly this length, and has it in this memory.
    fn receive(&mut self, message: &mut [u8]) -> anyhow::Result<()>;

    /// Sends the same message several times. Whoever can begin one before the last is over does.
    fn send_often(&mut self, message: &[u8], times: usize) -> anyhow::Result<()> {
        (0..times).try_for_each(|_| self.send(message))
    }
}

/// Memory for messages of one size. It is made, and what it carries is checked, once per size.
#[derive(Debug)]
pub(super) struct Buffers<M> {
    pub(super) sent: M,
    pub(super) received: M,
    /// One message to and fro, or one from each to each, has been looked at.
    checked: bool,
    /// A window of messages has been looked at.
    pub(super) checked_window: bool,
}

impl<M: Memory> Buffers<M> {
    /// The buffers of this size, kept if they were made before.
    pub(super) fn hold(held: &mut Option<Self>, bytes: usize) -> anyhow::Result<&mut Self> {
        let fits = held.as_ref().is_some_and(|buffers| buffers.sent.len() == bytes);
        if !fits {
            // The old ones first: there may not be room for both.
            *held = None;
            let (sent, received) = (M::touched(bytes)?, M::touched(bytes)?);
            let (checked, checked_window) = (false, false);
            return Ok(held.insert(Self { sent, received, checked, checked_window }));
        }
        Ok(held.as_mut().expect("they fit"))
    }
}

/// Messages of `bytes` to and fro, the first member first. Only its timing counts.
pub(super) fn pingpong<M: Memory>(
    link: &mut impl Link,
    is_first: bool,
    held: &mut Option<Buffers<M>>,
    bytes: usize,
    iterations: u64,
) -> anyhow::Result<Timing> {
    let buffers = Buffers::hold(held, bytes)?;
    if !buffers.checked {
        check_bounce(link, is_first, &mut buffers.sent, &mut buffers.received)?;
        buffers.checked = true;
    }
    for _ in 0..warm_up_of(iterations) {
        bounce(link, is_first, &buffers.sent, &mut buffers.received)?;
    }
    let begin = Instant::now();
    for _ in 0..iterations {
        bounce(link, is_first, &buffers.sent, &mut buffers.received)?;
    }
    Ok(Timing::of_messages(begin.elapsed().as_nanos() as f64))
}

#[inline(always)]
fn bounce(
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

/// Every byte gets there and back: the second returns what it got, the first compares.
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
        bounce(link, true, sent, received)?;
        ensure!(sent == received, "a byte got lost on its way there and back");
    } else {
        link.receive(received)?;
        sent.copy_from_slice(received);
        link.send(sent)?;
    }
    Ok(())
}

/// Messages of `bytes` from each to each.
pub(super) fn alltoall<M: Memory>(
    members: &mut impl Exchange,
    held: &mut Option<Buffers<M>>,
    bytes: usize,
    iterations: u64,
) -> anyhow::Result<Timing> {
    let buffers = Buffers::hold(held, bytes * members.size())?;
    if !buffers.checked {
        check_exchange(members, &mut buffers.sent, &mut buffers.received)?;
        buffers.checked = true;
    }
    for _ in 0..warm_up_of(iterations) {
        exchange_blocks(members, &buffers.sent, &mut buffers.received)?;
    }
    // All begin together.
    all_agree(members, true)?;
    let begin = Instant::now();
    for _ in 0..iterations {
        exchange_blocks(members, &buffers.sent, &mut buffers.received)?;
    }
    Ok(Timing::of_messages(begin.elapsed().as_nanos() as f64))
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
    let from_right = |(from, part): (usize, &[u8])| has_pattern(part, seed(from, own));
    let right = received.chunks_exact(block).enumerate().all(from_right);
    ensure!(all_agree(members, right)?, "a byte of another member did not arrive in its place");
    Ok(())
}

/// The byte at a place.
pub(super) fn pattern(place: usize, seed: usize) -> u8 {
    (place * 31 + (place >> 8) * 7 + (place >> 16) * 3 + seed) as u8
}

/// Fills memory with bytes that differ from place to place and from seed to seed.
pub(super) fn fill_with_pattern(bytes: &mut [u8], seed: usize) {
    for (place, byte) in bytes.iter_mut().enumerate() {
        *byte = pattern(place, seed);
    }
}

/// Whether memory holds what [`fill_with_pattern`] wrote.
pub(super) fn has_pattern(bytes: &[u8], seed: usize) -> bool {
    bytes.iter().enumerate().all(|(place, &byte)| byte == pattern(place, seed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::group::exchange::threads::together;
    use crate::bench::group::fragile;
    use crate::bench::group::plain::Touched;

    fn play(bytes: usize, breaks: Option<usize>) -> anyhow::Result<Timing> {
        let (mut first, mut second) = fragile::ends();
        second.breaks = breaks;
        let other = std::thread::spawn(move || {
            let _ = pingpong::<Touched<u8>>(&mut second, false, &mut None, bytes, 5);
        });
        let timing = pingpong::<Touched<u8>>(&mut first, true, &mut None, bytes, 5);
        drop(first);
        other.join().unwrap();
        timing
    }

    #[test]
    fn a_broken_byte_is_noticed_before_anything_is_timed() {
        for bytes in [0, 1, 100_000] {
            assert!(play(bytes, None).is_ok(), "{bytes}");
        }
        assert!(play(100, Some(0)).is_err());
    }

    #[test]
    fn everybody_hears_from_everybody() {
        together(3, |mut member| {
            let mut held: Option<Buffers<Touched<u8>>> = None;
            for bytes in [1, 1000] {
                alltoall(&mut member, &mut held, bytes, 3).unwrap();
            }
        });
    }
}
