//! Messages into memory that was never touched, or has been used before: what `pinning` measures.

use std::io;
use std::ops::{Deref, DerefMut};
use std::time::Instant;

use anyhow::ensure;
use memferry::message::ShareableBuffer;
use memferry::sys::pages::Pages;

use super::messages::{Link, fill_with_pattern, has_pattern};
use super::order::{Timing, warm_up_of};
use super::plain::{Memory, Touched};

/// Memory that nobody has touched.
pub(super) trait Untouched: Memory {
    /// What it is when nobody has touched it.
    type Fresh: DerefMut<Target = [u8]>;

    /// Such memory, of a length.
    fn untouched(bytes: usize) -> io::Result<Self::Fresh>;
}

/// Ordinary pages.
pub(super) struct FreshPages(Pages);

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

impl Untouched for Touched<u8> {
    type Fresh = FreshPages;

    fn untouched(bytes: usize) -> io::Result<FreshPages> {
        Pages::new(bytes).map(FreshPages)
    }
}

impl Untouched for ShareableBuffer {
    type Fresh = Self;

    fn untouched(bytes: usize) -> io::Result<Self> {
        Self::new(bytes)
    }
}

/// Messages of `bytes` from the first member to the second, one at a time. The second makes its
/// buffer ready and says so; from then on until its answer the first takes the time. `checked` is
/// the size whose bytes were last looked at.
pub(super) fn land<M: Untouched>(
    link: &mut impl Link,
    is_first: bool,
    checked: &mut usize,
    (bytes, fresh): (usize, bool),
    iterations: u64,
) -> anyhow::Result<Timing> {
    // Made anew for every order: which page frames memory gets makes a difference, and that one has
    // better ones than another shall not last.
    let mut memory = M::touched(bytes)?;
    if *checked != bytes {
        if is_first {
            fill_with_pattern(&mut memory, bytes);
            send(link, &memory)?;
        } else {
            memory.fill(0);
            receive(link, &mut memory, |message| has_pattern(message, bytes))?;
        }
        *checked = bytes;
    }
    let (mut total_ns, warm_up) = (0.0, warm_up_of(iterations));
    for iteration in 0..warm_up + iterations {
        let once_ns = match (is_first, fresh) {
            (true, _) => send(link, &memory)?,
            (false, false) => receive(link, &mut memory, |_| true)?,
            (false, true) => receive(link, &mut M::untouched(bytes)?, |_| true)?,
        };
        total_ns += if iteration < warm_up { 0.0 } else { once_ns };
    }
    Ok(Timing::of_messages(total_ns))
}

/// The answers.
const RIGHT: u8 = 1;
const WRONG: u8 = 2;

/// The time from the other side's word to its answer.
fn send(link: &mut impl Link, message: &[u8]) -> anyhow::Result<f64> {
    let mut answer = [0];
    link.receive(&mut answer)?;
    let start = Instant::now();
    link.send(message)?;
    link.receive(&mut answer)?;
    let took_ns = start.elapsed().as_nanos() as f64;
    ensure!(answer == [RIGHT], "a byte did not arrive");
    Ok(took_ns)
}

/// Says that it is ready, receives, answers. Only the other side's time counts.
fn receive(
    link: &mut impl Link,
    message: &mut [u8],
    is_right: impl Fn(&[u8]) -> bool,
) -> anyhow::Result<f64> {
    link.send(&[RIGHT])?;
    link.receive(message)?;
    link.send(&[if is_right(message) { RIGHT } else { WRONG }])?;
    Ok(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::group::fragile;

    fn play(fresh: bool, breaks: Option<usize>) -> anyhow::Result<Timing> {
        let (mut first, mut second) = fragile::ends();
        first.breaks = breaks;
        let other = std::thread::spawn(move || {
            let _ = land::<Touched<u8>>(&mut second, false, &mut 0, (5000, fresh), 3);
        });
        let timing = land::<Touched<u8>>(&mut first, true, &mut 0, (5000, fresh), 3);
        drop(first);
        other.join().unwrap();
        timing
    }

    #[test]
    fn a_broken_byte_is_noticed_before_anything_is_timed() {
        for fresh in [false, true] {
            assert!(play(fresh, None).is_ok());
            assert_eq!(play(fresh, Some(0)).unwrap_err().to_string(), "a byte did not arrive");
        }
    }
}
