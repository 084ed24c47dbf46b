//! Measuring what messages cost between two cores: with two threads, each bound to one of them,
//! that do what two processes would do. Every figure is a median of medians, so that a core that
//! was taken away for a while does not show; a machine that was busy all the time does, and then
//! nothing of what was measured counts.

mod duet;

use std::time::{Duration, Instant};

use memferry_sys::cross_memory::{self, Stretch};
use memferry_sys::pages::Pages;
use memferry_sys::shared_memory::{Access, Mapping, SealedMemory};
use memferry_sys::{affinity, copy};

use super::costs::Measurement;
use super::{Closeness, fragment_bytes};
use duet::{Duet, median};

/// The time for one try at a pair of cores: several times what it takes undisturbed.
const BUDGET: Duration = Duration::from_millis(35);
/// How often everything is measured in that time, if it suffices.
const PASSES: usize = 5;
/// Tries until the values can be believed.
const TRIES: usize = 2;

/// Two sizes tell the start-up from the time per byte.
const SMALL: usize = 4 << 10;
const LARGE: usize = 256 << 10;
/// The sizes for what is sent at once, where the limit of that will be.
const EAGER_SMALL: usize = 1 << 10;
const EAGER_LARGE: usize = 8 << 10;

/// Measures near cores and far ones, in this order, where there are such: nothing where there are
/// none or where the machine was too busy. `None` if this process may not use two cores.
pub(super) fn measure() -> Option<[Measurement; 2]> {
    let cores = affinity::allowed_cores();
    if cores.len() < 2 {
        return None;
    }
    let began = Instant::now();
    let measured = Closeness::ALL.map(|closeness| {
        let pair = closeness.pair_of(&cores);
        pair.and_then(|pair| measure_pair(pair, closeness)).unwrap_or_default()
    });
    tracing::debug!(?measured, took = ?began.elapsed(), "calibrated messages");
    Some(measured)
}

fn measure_pair(cores: (usize, usize), closeness: Closeness) -> Option<Measurement> {
    let try_once = || {
        let until = Instant::now() + BUDGET;
        let bench = Bench::new(Duet::new(cores, until))?;
        let in_time = (0..PASSES).take_while(|_| Instant::now() < until);
        let passes: Vec<_> = in_time.map_while(|_| bench.pass()).collect();
        let of = |at: usize| median(passes.iter().filter_map(|pass: &[Option<f64>; 6]| pass[at]));
        Measurement::new(std::array::from_fn(of)).plausible(closeness)
    };
    (0..TRIES).find_map(|_| try_once())
}

/// Memory for the two, and the two themselves.
struct Bench {
    duet: Duet,
    /// The sender's, and the receiver's.
    source: Pages,
    target: Pages,
    /// What they share.
    space: Mapping,
}

impl Bench {
    fn new(duet: Duet) -> Option<Self> {
        let space = SealedMemory::new("memferry-calibration", LARGE).ok()?;
        let space = space.map(Access::Write).ok()?;
        let (mut source, mut target) = (Pages::new(LARGE).ok()?, Pages::new(LARGE).ok()?);
        source.as_mut_slice().fill(1);
        target.as_mut_slice().fill(2);
        // SAFETY: the mapping is at least so long, and nobody else knows of it yet.
        unsafe { std::ptr::write_bytes(space.as_ptr(), 3, LARGE) };
        Some(Self { duet, source, target, space })
    }

    /// Measures everything once. `None` when the time is up before the first figure.
    fn pass(&self) -> Option<[Option<f64>; 6]> {
        let handover = self.duet.take_turns(5, 100, || {}, || {})? / 2.0;
        let cross = self.line(|bytes| self.one_copy(bytes, Self::cross_copy));
        let near = self.line(|bytes| self.one_copy(bytes, Self::near_copy));
        Some([
            Some(handover),
            self.eager_ns_per_byte(),
            // The first line has to come over before it can be copied: lines count that already.
            cross.map(|(startup_ns, _)| startup_ns - handover),
            cross.map(|(_, ns_per_byte)| ns_per_byte),
            near.map(|(_, ns_per_byte)| ns_per_byte),
            self.pipeline_ns_per_byte(),
        ])
    }

    /// Start-up and time per byte.
    fn line(&self, mut ns: impl FnMut(usize) -> Option<f64>) -> Option<(f64, f64)> {
        let (small, large) = (ns(SMALL)?, ns(LARGE)?);
        let ns_per_byte = (large - small) / (LARGE - SMALL) as f64;
        Some((small - SMALL as f64 * ns_per_byte, ns_per_byte))
    }

    /// The sender writes its message; the receiver's copy of it is what counts.
    fn one_copy(&self, bytes: usize, copy: fn(&Self, usize) -> bool) -> Option<f64> {
        let rounds = if bytes == SMALL { 31 } else { 9 };
        let mut value = 0;
        let write = || {
            value += 1u8;
            // SAFETY: inside the source, which is the sender's until it hands over.
            unsafe { std::ptr::write_bytes(self.source.as_ptr(), value, bytes) };
        };
        let mut works = true;
        let took = self.duet.time_second(rounds, write, || works &= copy(self, bytes));
        took.filter(|_| works)
    }

    fn cross_copy(&self, bytes: usize) -> bool {
        let stretch = |pages: &Pages| [Stretch { address: pages.as_ptr() as usize, length: bytes }];
        let (remote, local) = (stretch(&self.source), stretch(&self.target));
        // SAFETY: the target is the receiver's alone; the source has been handed over.
        let read = unsafe { cross_memory::read(std::process::id(), &remote, &local) };
        read.is_ok_and(|read| read == bytes)
    }

    fn near_copy(&self, bytes: usize) -> bool {
        // SAFETY: the target is the receiver's alone; the source has been handed over.
        unsafe { copy::cached(self.target.as_ptr(), self.source.as_ptr(), bytes) };
        true
    }

    /// Into the space at an offset, by the sender.
    fn put(&self, offset: usize, bytes: usize) {
        // SAFETY: inside both; that part of the space is the sender's now.
        unsafe {
            let (target, source) = (self.space.as_ptr().add(offset), self.source.as_ptr());
            copy::cached(target, source.add(offset), bytes);
        }
    }

    /// Out of the space, by the receiver.
    fn take(&self, offset: usize, bytes: usize) {
        // SAFETY: inside both; that part of the space is the receiver's now.
        unsafe {
            let (target, source) = (self.target.as_ptr(), self.space.as_ptr().add(offset));
            copy::cached(target.add(offset), source, bytes);
        }
    }

    fn eager_ns_per_byte(&self) -> Option<f64> {
        let ns = |bytes| self.duet.take_turns(5, 20, || self.put(0, bytes), || self.take(0, bytes));
        Some((ns(EAGER_LARGE)? - ns(EAGER_SMALL)?) / (EAGER_LARGE - EAGER_SMALL) as f64)
    }

    fn pipeline_ns_per_byte(&self) -> Option<f64> {
        let fragment = fragment_bytes(LARGE as u64) as usize;
        let offset = |number: usize| number * fragment;
        let took = self.duet.overlap(
            9,
            LARGE / fragment,
            |number| self.put(offset(number), fragment),
            |number| self.take(offset(number), fragment),
        )?;
        Some(took / LARGE as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_measured_can_be_believed_or_is_left_out() {
        let Some(measured) = measure() else { return };
        for (closeness, measured) in Closeness::ALL.into_iter().zip(measured) {
            assert!(measured.is_empty() || measured.plausible(closeness).is_some());
        }
    }

    #[test]
    fn a_process_bound_to_one_core_measures_nothing() {
        std::thread::spawn(|| {
            affinity::bind_to_core(affinity::allowed_cores()[0]).unwrap();
            assert_eq!(measure(), None);
        })
        .join()
        .unwrap();
    }
}
