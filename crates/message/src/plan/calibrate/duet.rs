//! Two threads on two cores that hand over to each other, and the time that it takes them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use memferry_sys::affinity;
use memferry_sys::contention::Meter;

/// A pair of cores, when to stop measuring on them, and how much of the time others had them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Duet<'a> {
    cores: (usize, usize),
    until: Instant,
    meter: &'a Meter,
}

/// A rising number in a cache line of its own: who writes it has got so far.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Count(AtomicU64);

/// What the two threads share.
#[derive(Debug)]
struct Stage {
    /// By the first.
    given: Count,
    /// By the second.
    taken: Count,
    /// Somebody has stopped: the other would wait for ever.
    over: AtomicBool,
    until: Instant,
}

impl Stage {
    fn reach(count: &Count, number: u64) {
        count.0.store(number, Ordering::Release);
    }

    /// Waits for the other. `None` when the time is up.
    fn wait(&self, count: &Count, number: u64) -> Option<()> {
        const LOOKS: u32 = 1 << 10;
        loop {
            for look in 0..LOOKS {
                if count.0.load(Ordering::Acquire) >= number {
                    return Some(());
                }
                // As endpoints wait: a pause takes longer than a look.
                if look % 8 == 7 {
                    std::hint::spin_loop();
                }
            }
            if self.over.load(Ordering::Relaxed) || Instant::now() >= self.until {
                return None;
            }
        }
    }
}

impl<'a> Duet<'a> {
    pub(super) fn new(cores: (usize, usize), until: Instant, meter: &'a Meter) -> Self {
        Self { cores, until, meter }
    }

    /// The two take turns; the time of a turn of both with the way there and back. A median of
    /// rounds, of so many turns each.
    pub(super) fn take_turns(
        &self,
        rounds: usize,
        turns: u64,
        mut first: impl FnMut() + Send,
        mut second: impl FnMut() + Send,
    ) -> Option<f64> {
        // The first round warms up.
        let all = turns * (rounds as u64 + 1);
        self.play(
            |stage| {
                let mut times = Vec::with_capacity(rounds + 1);
                let mut turn = 0;
                while turn < all {
                    let began = Instant::now();
                    for _ in 0..turns {
                        turn += 1;
                        first();
                        Stage::reach(&stage.given, turn);
                        stage.wait(&stage.taken, turn)?;
                    }
                    times.push(began.elapsed().as_nanos() as f64 / turns as f64);
                }
                median(times.into_iter().skip(1))
            },
            |stage| {
                for turn in 1..=all {
                    stage.wait(&stage.given, turn)?;
                    second();
                    Stage::reach(&stage.taken, turn);
                }
                Some(())
            },
        )
        .map(|(took, ())| took)
    }

    /// The two take turns; the time of the second's part alone, as a median.
    pub(super) fn time_second(
        &self,
        rounds: u64,
        mut first: impl FnMut() + Send,
        mut second: impl FnMut() + Send,
    ) -> Option<f64> {
        self.play(
            |stage| {
                for round in 1..=rounds {
                    first();
                    Stage::reach(&stage.given, round);
                    stage.wait(&stage.taken, round)?;
                }
                Some(())
            },
            |stage| {
                let mut times = Vec::with_capacity(rounds as usize);
                for round in 1..=rounds {
                    stage.wait(&stage.given, round)?;
                    let began = Instant::now();
                    second();
                    times.push(began.elapsed().as_nanos() as f64);
                    Stage::reach(&stage.taken, round);
                }
                median(times.into_iter().skip(1))
            },
        )
        .map(|((), took)| took)
    }

    /// The first goes through its parts without waiting, the second follows close behind; the time
    /// for all parts by both, as a median of rounds.
    pub(super) fn overlap(
        &self,
        rounds: usize,
        parts: usize,
        mut first: impl FnMut(usize) + Send,
        mut second: impl FnMut(usize) + Send,
    ) -> Option<f64> {
        let number = |round: usize, part: usize| (round * parts + part + 1) as u64;
        self.play(
            |stage| {
                let mut times = Vec::with_capacity(rounds);
                for round in 0..rounds {
                    let began = Instant::now();
                    for part in 0..parts {
                        first(part);
                        Stage::reach(&stage.given, number(round, part));
                    }
                    stage.wait(&stage.taken, number(round, parts - 1))?;
                    times.push(began.elapsed().as_nanos() as f64);
                }
                median(times.into_iter().skip(1))
            },
            |stage| {
                for round in 0..rounds {
                    for part in 0..parts {
                        stage.wait(&stage.given, number(round, part))?;
                        second(part);
                        Stage::reach(&stage.taken, number(round, part));
                    }
                }
                Some(())
            },
        )
        .map(|(took, ())| took)
    }

    /// Runs both, each in a fresh thread on its core. `None` if one of them could not do its part.
    fn play<A: Send, B: Send>(
        &self,
        first: impl FnOnce(&Stage) -> Option<A> + Send,
        second: impl FnOnce(&Stage) -> Option<B> + Send,
    ) -> Option<(A, B)> {
        let (given, taken) = (Count::default(), Count::default());
        let stage = &Stage { given, taken, over: AtomicBool::new(false), until: self.until };
        thread::scope(|scope| {
            let there = thread::Builder::new()
                .spawn_scoped(scope, || self.perform(stage, self.cores.1, second))
                .ok()?;
            let here = thread::Builder::new()
                .spawn_scoped(scope, || self.perform(stage, self.cores.0, first));
            if here.is_err() {
                stage.over.store(true, Ordering::Relaxed);
            }
            let there = there.join().ok().flatten();
            Some((here.ok()?.join().ok().flatten()?, there?))
        })
    }

    /// One thread's part, on its core. Whoever cannot go on says so.
    fn perform<T>(
        &self,
        stage: &Stage,
        core: usize,
        act: impl FnOnce(&Stage) -> Option<T>,
    ) -> Option<T> {
        let act = || self.meter.during(|| act(stage));
        let done = affinity::bind_to_core(core).ok().and_then(|()| act());
        if done.is_none() {
            stage.over.store(true, Ordering::Relaxed);
        }
        done
    }
}

/// The one in the middle. `None` of nothing.
fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;
    use std::time::Duration;

    use super::*;

    static METER: LazyLock<Meter> = LazyLock::new(Meter::default);

    fn duet(time: Duration) -> Option<Duet<'static>> {
        match affinity::allowed_cores()[..] {
            [one, other, ..] => Some(Duet::new((one, other), Instant::now() + time, &METER)),
            _ => {
                memferry_testing::skip(
                    memferry_testing::Requirement::Cores,
                    "there is only one core",
                );
                None
            }
        }
    }

    #[test]
    fn the_parts_of_the_two_never_overlap_when_they_take_turns() {
        let Some(duet) = duet(Duration::from_secs(60)) else { return };
        let turn = AtomicU64::new(0);
        let expect = |parity| move |turn: u64| assert_eq!(turn % 2, parity);
        let (even, odd) = (expect(0), expect(1));
        let took = duet.take_turns(
            3,
            10,
            || even(turn.fetch_add(1, Ordering::Relaxed)),
            || odd(turn.fetch_add(1, Ordering::Relaxed)),
        );
        assert!(took.is_some_and(|ns| ns > 0.0));
        assert_eq!(turn.into_inner(), 80);
    }

    #[test]
    fn every_part_is_done_by_the_first_before_it_is_done_by_the_second() {
        let Some(duet) = duet(Duration::from_secs(60)) else { return };
        let done: Vec<_> = (0..4).map(|_| AtomicU64::new(0)).collect();
        let first = |part: usize| _ = done[part].fetch_add(10, Ordering::Relaxed);
        let second = |part: usize| assert!(done[part].fetch_add(1, Ordering::Relaxed) >= 10);
        assert!(duet.overlap(2, 4, first, second).is_some());
        assert!(done.iter().all(|done| done.load(Ordering::Relaxed) == 22));
    }

    #[test]
    fn nobody_waits_for_one_that_cannot_play() {
        let Some(Duet { cores: (one, _), until, .. }) = duet(Duration::from_secs(60)) else {
            return;
        };
        let no_such_core = usize::MAX;
        for cores in [(one, no_such_core), (no_such_core, one)] {
            assert_eq!(Duet::new(cores, until, &METER).time_second(3, || {}, || {}), None);
        }
        assert!(Instant::now() < until);
    }

    #[test]
    fn the_time_ends_what_takes_too_long() {
        let Some(duet) = duet(Duration::from_millis(5)) else { return };
        let nap = || thread::sleep(Duration::from_millis(1));
        assert_eq!(duet.take_turns(1000, 1, nap, || {}), None);
    }

    #[test]
    fn the_median_stands_in_the_middle() {
        assert_eq!(median([3.0, 1.0, 900.0].into_iter()), Some(3.0));
        assert_eq!(median(std::iter::empty()), None);
    }
}
