//! Two threads on two cores that signal each other, and the time that it takes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use memferry_sys::affinity;
use memferry_sys::contention::ContentionMeter;

/// A pair of cores, the deadline of the measurement, and the meter of contention on them.
#[derive(Debug, Clone, Copy)]
pub(super) struct CorePairRunner<'a> {
    cores: (usize, usize),
    deadline: Instant,
    meter: &'a ContentionMeter,
}

/// A rising counter in a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct PaddedCounter(AtomicU64);

/// The state that the two threads share.
#[derive(Debug)]
struct PairSync {
    /// Written by the first thread.
    first_count: PaddedCounter,
    /// Written by the second thread.
    second_count: PaddedCounter,
    /// One thread has stopped, so the other must not wait.
    stopped: AtomicBool,
    deadline: Instant,
}

impl PairSync {
    fn advance(count: &PaddedCounter, number: u64) {
        count.0.store(number, Ordering::Release);
    }

    /// Waits for the other thread's counter. Returns `None` at the deadline.
    fn wait(&self, count: &PaddedCounter, number: u64) -> Option<()> {
        const POLLS: u32 = 1 << 10;
        loop {
            for poll in 0..POLLS {
                if count.0.load(Ordering::Acquire) >= number {
                    return Some(());
                }
                // As endpoints poll: a pause takes longer than a load.
                if poll % 8 == 7 {
                    std::hint::spin_loop();
                }
            }
            if self.stopped.load(Ordering::Relaxed) || Instant::now() >= self.deadline {
                return None;
            }
        }
    }
}

impl<'a> CorePairRunner<'a> {
    pub(super) fn new(
        cores: (usize, usize),
        deadline: Instant,
        meter: &'a ContentionMeter,
    ) -> Self {
        Self { cores, deadline, meter }
    }

    /// The threads alternate. Returns the time of one step of each thread, with both handovers: the
    /// median of `rounds` rounds of `steps` steps each.
    pub(super) fn ping_pong(
        &self,
        rounds: usize,
        steps: u64,
        mut first: impl FnMut() + Send,
        mut second: impl FnMut() + Send,
    ) -> Option<f64> {
        // The first round is a warm-up.
        let all = steps * (rounds as u64 + 1);
        self.run_pair(
            |sync| {
                let mut times = Vec::with_capacity(rounds + 1);
                let mut step = 0;
                while step < all {
                    let started = Instant::now();
                    for _ in 0..steps {
                        step += 1;
                        first();
                        PairSync::advance(&sync.first_count, step);
                        sync.wait(&sync.second_count, step)?;
                    }
                    times.push(started.elapsed().as_nanos() as f64 / steps as f64);
                }
                median(times.into_iter().skip(1))
            },
            |sync| {
                for step in 1..=all {
                    sync.wait(&sync.first_count, step)?;
                    second();
                    PairSync::advance(&sync.second_count, step);
                }
                Some(())
            },
        )
        .map(|(took, ())| took)
    }

    /// The threads alternate. Returns the time of the second thread's step alone, as a median.
    pub(super) fn time_second(
        &self,
        rounds: u64,
        mut first: impl FnMut() + Send,
        mut second: impl FnMut() + Send,
    ) -> Option<f64> {
        self.run_pair(
            |sync| {
                for round in 1..=rounds {
                    first();
                    PairSync::advance(&sync.first_count, round);
                    sync.wait(&sync.second_count, round)?;
                }
                Some(())
            },
            |sync| {
                let mut times = Vec::with_capacity(rounds as usize);
                for round in 1..=rounds {
                    sync.wait(&sync.first_count, round)?;
                    let started = Instant::now();
                    second();
                    times.push(started.elapsed().as_nanos() as f64);
                    PairSync::advance(&sync.second_count, round);
                }
                median(times.into_iter().skip(1))
            },
        )
        .map(|((), took)| took)
    }

    /// The first thread does its parts without waiting, the second follows. Returns the time for
    /// all parts by both, as a median of rounds.
    pub(super) fn overlap(
        &self,
        rounds: usize,
        parts: usize,
        mut first: impl FnMut(usize) + Send,
        mut second: impl FnMut(usize) + Send,
    ) -> Option<f64> {
        let number = |round: usize, part: usize| (round * parts + part + 1) as u64;
        self.run_pair(
            |sync| {
                let mut times = Vec::with_capacity(rounds);
                for round in 0..rounds {
                    let started = Instant::now();
                    for part in 0..parts {
                        first(part);
                        PairSync::advance(&sync.first_count, number(round, part));
                    }
                    sync.wait(&sync.second_count, number(round, parts - 1))?;
                    times.push(started.elapsed().as_nanos() as f64);
                }
                median(times.into_iter().skip(1))
            },
            |sync| {
                for round in 0..rounds {
                    for part in 0..parts {
                        sync.wait(&sync.first_count, number(round, part))?;
                        second(part);
                        PairSync::advance(&sync.second_count, number(round, part));
                    }
                }
                Some(())
            },
        )
        .map(|(took, ())| took)
    }

    /// Runs both closures, each on a new thread bound to its core. Returns `None` if one of them
    /// fails.
    fn run_pair<A: Send, B: Send>(
        &self,
        first: impl FnOnce(&PairSync) -> Option<A> + Send,
        second: impl FnOnce(&PairSync) -> Option<B> + Send,
    ) -> Option<(A, B)> {
        let (first_count, second_count) = (PaddedCounter::default(), PaddedCounter::default());
        let sync = &PairSync {
            first_count,
            second_count,
            stopped: AtomicBool::new(false),
            deadline: self.deadline,
        };
        thread::scope(|scope| {
            let second_thread = thread::Builder::new()
                .spawn_scoped(scope, || self.run_on_core(sync, self.cores.1, second))
                .ok()?;
            let first_thread = thread::Builder::new()
                .spawn_scoped(scope, || self.run_on_core(sync, self.cores.0, first));
            if first_thread.is_err() {
                sync.stopped.store(true, Ordering::Relaxed);
            }
            let second_thread = second_thread.join().ok().flatten();
            Some((first_thread.ok()?.join().ok().flatten()?, second_thread?))
        })
    }

    /// Runs one closure on its core. A thread that fails sets `stopped`.
    fn run_on_core<T>(
        &self,
        sync: &PairSync,
        core: usize,
        act: impl FnOnce(&PairSync) -> Option<T>,
    ) -> Option<T> {
        let act = || self.meter.measure(|| act(sync));
        let done = affinity::bind_to_core(core).ok().and_then(|()| act());
        if done.is_none() {
            sync.stopped.store(true, Ordering::Relaxed);
        }
        done
    }
}

/// The median; `None` without values.
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

    static METER: LazyLock<ContentionMeter> = LazyLock::new(ContentionMeter::default);

    fn runner(time: Duration) -> Option<CorePairRunner<'static>> {
        match affinity::allowed_cores()[..] {
            [one, other, ..] => {
                Some(CorePairRunner::new((one, other), Instant::now() + time, &METER))
            }
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
        let Some(runner) = runner(Duration::from_secs(60)) else { return };
        let turn = AtomicU64::new(0);
        let expect = |parity| move |turn: u64| assert_eq!(turn % 2, parity);
        let (even, odd) = (expect(0), expect(1));
        let took = runner.ping_pong(
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
        let Some(runner) = runner(Duration::from_secs(60)) else { return };
        let done: Vec<_> = (0..4).map(|_| AtomicU64::new(0)).collect();
        let first = |part: usize| _ = done[part].fetch_add(10, Ordering::Relaxed);
        let second = |part: usize| assert!(done[part].fetch_add(1, Ordering::Relaxed) >= 10);
        assert!(runner.overlap(2, 4, first, second).is_some());
        assert!(done.iter().all(|done| done.load(Ordering::Relaxed) == 22));
    }

    #[test]
    fn nobody_waits_for_one_that_cannot_play() {
        let Some(CorePairRunner { cores: (one, _), deadline, .. }) =
            runner(Duration::from_secs(60))
        else {
            return;
        };
        let no_such_core = usize::MAX;
        for cores in [(one, no_such_core), (no_such_core, one)] {
            assert_eq!(
                CorePairRunner::new(cores, deadline, &METER).time_second(3, || {}, || {}),
                None
            );
        }
        assert!(Instant::now() < deadline);
    }

    #[test]
    fn the_time_ends_what_takes_too_long() {
        let Some(runner) = runner(Duration::from_millis(5)) else { return };
        let sleep = || thread::sleep(Duration::from_millis(1));
        assert_eq!(runner.ping_pong(1000, 1, sleep, || {}), None);
    }

    #[test]
    fn the_median_stands_in_the_middle() {
        assert_eq!(median([3.0, 1.0, 900.0].into_iter()), Some(3.0));
        assert_eq!(median(std::iter::empty()), None);
    }
}
