//! Windows of messages in one direction between two members, large enough to keep the sender busy,
//! with one reply at the end: the measurement of bandwidth.

use std::time::Instant;

use anyhow::ensure;

use super::messages::{Link, MessageBuffers, fill_with_pattern, has_pattern};
use crate::group::plain::Memory;
use crate::harness::{Sample, warm_up_iterations};

/// Number of messages of a size per window, the same for all candidates.
pub(crate) fn window_messages(bytes: u64) -> u64 {
    const WINDOW_BYTES: u64 = 16 << 20;
    (WINDOW_BYTES / bytes.max(1)).clamp(2, 64)
}

/// Sends windows of messages of `bytes` from the first member to the second. Only the times of the
/// first member are used.
pub(crate) fn stream<M: Memory>(
    link: &mut impl Link,
    is_first: bool,
    held: &mut Option<MessageBuffers<M>>,
    bytes: usize,
    iterations: u64,
) -> anyhow::Result<Sample> {
    let buffers = MessageBuffers::ensure_size(held, bytes)?;
    let window = window_messages(bytes as u64) as usize;
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
    for _ in 0..warm_up_iterations(iterations) {
        once()?;
    }
    let begin = Instant::now();
    for _ in 0..iterations {
        once()?;
    }
    Ok(Sample::of_messages(begin.elapsed().as_nanos() as f64))
}

fn send_window(link: &mut impl Link, window: usize, sent: &[u8]) -> anyhow::Result<()> {
    link.send_repeated(sent, window)?;
    let mut answer = [0];
    link.receive(&mut answer)?;
    ensure!(answer == [REPLY_OK], "a byte of a window got lost");
    Ok(())
}

/// Replies of the second member.
const REPLY_OK: u8 = 1;
const REPLY_MISMATCH: u8 = 2;

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
    link.send(&[if all_right { REPLY_OK } else { REPLY_MISMATCH }])
}

/// Verifies every byte of every message of a window: the second member compares and reports the
/// result to the first.
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
        let right = has_pattern(message, 0, seed);
        message.fill(0);
        right
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::faulty_link;
    use crate::group::plain::TouchedPages;

    fn run_pair(bytes: usize, breaks: Option<usize>) -> anyhow::Result<Sample> {
        faulty_link::run_pair(breaks, true, |link, is_first| {
            stream::<TouchedPages<u8>>(link, is_first, &mut None, bytes, 2)
        })
    }

    #[test]
    fn a_broken_message_of_a_window_is_noticed_before_anything_is_timed() {
        assert!(run_pair(1000, None).is_ok());
        for message in [0, window_messages(1000) as usize - 1] {
            let error = run_pair(1000, Some(message)).unwrap_err().to_string();
            assert_eq!(error, "a byte of a window got lost");
        }
    }

    #[test]
    fn a_window_is_many_small_messages_or_a_few_large_ones() {
        assert_eq!(window_messages(1 << 10), 64);
        assert_eq!(window_messages(4 << 20), 4);
        assert_eq!(window_messages(64 << 20), 2);
        assert_eq!(window_messages(0), 64);
    }
}
