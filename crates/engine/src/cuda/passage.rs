//! Memory of the device that copies between ordinary memory pass through: a ring of bytes, given out
//! in pieces of any length and given back in about the same order.

use std::collections::VecDeque;
use std::sync::Arc;

use memferry_sys::clock;
use memferry_sys::cuda::Driver;

use super::allocate;
use super::slots::Wish;

/// After a refusal, memory is asked for again when so much time has passed.
const ASK_AGAIN_NS: u64 = 1_000_000_000;

/// The ring. Its memory is taken with the first use, and given back at the end.
#[derive(Debug)]
pub(super) struct Passage {
    driver: Arc<dyn Driver>,
    bytes: u64,
    base: Option<u64>,
    /// What is given out, as offsets, the oldest first. It is given back from the front, or from the
    /// back if it was not used.
    given: VecDeque<(u64, u64)>,
    /// When there was no memory to be had the last time.
    refused_ns: Option<u64>,
}

impl Passage {
    pub(super) fn new(driver: Arc<dyn Driver>, bytes: u64) -> Self {
        Self { driver, bytes, base: None, given: VecDeque::new(), refused_ns: None }
    }

    /// Takes a piece of this length.
    pub(super) fn take(&mut self, length: u64) -> Wish {
        let now = clock::now_ns();
        let is_refused = self.refused_ns.is_some_and(|at| now < at + ASK_AGAIN_NS);
        if self.base.is_none() && !is_refused {
            match allocate(&*self.driver, self.bytes as usize) {
                Ok(base) => self.base = Some(base),
                Err(error) => {
                    tracing::warn!(%error, "no memory of the device to copy through");
                    self.refused_ns = Some(now);
                }
            }
        }
        let Some(base) = self.base else { return Wish::Refused };
        let Some(offset) = self.place(length) else { return Wish::Busy };
        self.given.push_back((offset, length));
        Wish::Slot(base + offset)
    }

    /// Where there is room behind what was given out last, or at the beginning.
    fn place(&self, length: u64) -> Option<u64> {
        let (Some(&(first, _)), Some(&(last, last_length))) =
            (self.given.front(), self.given.back())
        else {
            return (length <= self.bytes).then_some(0);
        };
        let end = last + last_length;
        if last < first {
            return (end + length <= first).then_some(end);
        }
        if end + length <= self.bytes {
            return Some(end);
        }
        (length <= first).then_some(0)
    }

    /// Gives a piece back.
    pub(super) fn give_back(&mut self, address: u64) {
        let offset = address - self.base.unwrap_or_default();
        // What is given back out of turn keeps its place until its turn comes.
        if let Some(piece) = self.given.iter_mut().find(|(at, length)| *at == offset && *length > 0)
        {
            piece.1 = 0;
        }
        while self.given.front().is_some_and(|(_, length)| *length == 0) {
            self.given.pop_front();
        }
        while self.given.back().is_some_and(|(_, length)| *length == 0) {
            self.given.pop_back();
        }
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        if let Some(base) = self.base {
            // SAFETY: it is from `allocate`, and whoever used it waited for the device.
            unsafe { self.driver.free(base) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::ModelDevice;
    use super::*;

    fn passage(bytes: u64) -> (Passage, u64) {
        let mut passage = Passage::new(ModelDevice::new(), bytes);
        let Wish::Slot(base) = passage.take(1) else { panic!("an empty passage has room") };
        passage.give_back(base);
        (passage, base)
    }

    #[test]
    fn pieces_are_given_out_one_behind_the_other_and_around_the_end() {
        let (mut passage, base) = passage(100);
        assert_eq!(passage.take(40), Wish::Slot(base));
        assert_eq!(passage.take(40), Wish::Slot(base + 40));
        assert_eq!(passage.take(40), Wish::Busy);
        passage.give_back(base);
        assert_eq!(passage.take(41), Wish::Busy, "it would overlap the second");
        assert_eq!(passage.take(40), Wish::Slot(base));
        assert_eq!(passage.take(1), Wish::Busy);
        passage.give_back(base + 40);
        assert_eq!(passage.take(60), Wish::Slot(base + 40));
    }

    #[test]
    fn pieces_never_overlap_in_whatever_order_they_come_back() {
        let (mut passage, base) = passage(1000);
        let (mut live, mut seed) = (Vec::<(u64, u64)>::new(), 1u64);
        for _ in 0..10_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let length = 1 + (seed >> 33) % 400;
            if seed >> 63 == 0
                && let Wish::Slot(at) = passage.take(length)
            {
                assert!(at >= base && at + length <= base + 1000);
                assert!(live.iter().all(|(other, n)| at + length <= *other || other + n <= at));
                live.push((at, length));
            } else if !live.is_empty() {
                let (at, _) = live.remove((seed >> 40) as usize % live.len());
                passage.give_back(at);
            }
        }
        live.drain(..).for_each(|(at, _)| passage.give_back(at));
        assert_eq!(passage.take(1000), Wish::Slot(base));
    }

    #[test]
    fn more_than_there_is_is_never_given() {
        let (mut passage, _) = passage(100);
        assert_eq!(passage.take(101), Wish::Busy);
    }
}
