//! Windows of messages one way between two members, as many as keep the sender busy, with one answer
//! at the end: what bandwidth is measured with.

use std::time::Instant;

use anyhow::ensure;

use super::messages::{Buffers, Link, fill_with_pattern, has_pattern};
use super::order::{Timing, warm_up_of};
use super::plain::Memory;

/// How many messages of a size make a window: the same for everybody.
pub(in crate::bench) fn window_of(bytes: u64) -> u64 {
    const WINDOW_BYTES: u64 = 16 << 20;
    (WINDOW_BYTES / bytes.max(1)).clamp(2, 64)
}

/// Windows of messages of `bytes` from the first member to the second. Only the timing of the first
/// counts.
pub(super) fn stream<M: Memory>(
    link: &mut impl Link,
    is_first: bool,
    held: &mut Option<Buffers<M>>,
    bytes: usize,
    iterations: u64,
) -> anyhow::Result<Timing> {
    let buffers = Buffers::hold(held, bytes)?;
    let window = window_of(bytes as u64) as usize;
    if !buffers.checked_window {
        check_window(link, is_first, window, &mut buffers.sent, &mut buffers.received)?;
        buffers.checked_window = true;
    }
    let mut once = || {
        if is_first {
            send_window(link, window, &buffers.sent)
        } else {
            receive_window(link, window, &mut buffers.received, |_| true)
        }
    };
    for _ in 0..warm_up_of(iterations) {
        once()?;
    }
    let begin = Instant::now();
    for _ in 0..iterations {
        once()?;
    }
    Ok(Timing::of_messages(begin.elapsed().as_nanos() as f64))
}

fn send_window(link: &mut impl Link, window: usize, sent: &[u8]) -> anyhow::Result<()> {
    link.send_often(sent, window)?;
    let mut answer = [0];
    link.receive(&mut answer)?;
    ensure!(answer == [RIGHT], "a byte of a window got lost");
    Ok(())
}

/// The answers.
const RIGHT: u8 = 1;
const WRONG: u8 = 2;

fn receive_window(
    link: &mut impl Link,
    window: usize,
    received: &mut [u8],
    mut is_right: impl FnMut(&mut [u8]) -> bool,
) -> anyhow::Result<()> {
    let mut all_right = true;
    for _ in 0..window {
        link.receive(received)?;
        all_right &= is_right(received);
    }
    link.send(&[if all_right { RIGHT } else { WRONG }])
}

/// Every byte of every message of a window arrives: the second looks, the first is told.
fn check_window(
    link: &mut impl Link,
    is_first: bool,
    window: usize,
    sent: &mut [u8],
    received: &mut [u8],
) -> anyhow::Result<()> {
    let seed = sent.len();
    if is_first {
        fill_with_pattern(sent, seed);
        return send_window(link, window, sent);
    }
    received.fill(0);
    receive_window(link, window, received, |message| {
        let right = has_pattern(message, seed);
        message.fill(0);
        right
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::group::fragile;
    use crate::bench::group::plain::Touched;

    fn play(bytes: usize, breaks: Option<usize>) -> anyhow::Result<Timing> {
        let (mut first, mut second) = fragile::ends();
        first.breaks = breaks;
        let other = std::thread::spawn(move || {
            let _ = stream::<Touched<u8>>(&mut second, false, &mut None, bytes, 2);
        });
        let timing = stream::<Touched<u8>>(&mut first, true, &mut None, bytes, 2);
        drop(first);
        other.join().unwrap();
        timing
    }

    #[test]
    fn a_broken_message_of_a_window_is_noticed_before_anything_is_timed() {
        assert!(play(1000, None).is_ok());
        for message in [0, window_of(1000) as usize - 1] {
            let error = play(1000, Some(message)).unwrap_err().to_string();
            assert_eq!(error, "a byte of a window got lost");
        }
    }

    #[test]
    fn a_window_is_many_small_messages_or_a_few_large_ones() {
        assert_eq!(window_of(1 << 10), 64);
        assert_eq!(window_of(4 << 20), 4);
        assert_eq!(window_of(64 << 20), 2);
        assert_eq!(window_of(0), 64);
    }
}
