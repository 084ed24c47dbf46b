//! Timing of candidates. Candidates run interleaved, round by round, so that a disturbance of the
//! machine affects all of them. Ratios are taken within a round; the result is the median over
//! rounds.

use std::hint::black_box;
use std::time::{Duration, Instant};

use memferry::sys::pages::Pages;

use super::Effort;
use crate::results::outcome::{Row, Summary};

/// A candidate that is a closure.
pub(crate) struct FnCandidate<'a> {
    /// Series in tables and plots.
    pub(crate) series: String,
    /// Runs the candidate once.
    pub(crate) run: Box<dyn FnMut() + 'a>,
}

impl<'a> FnCandidate<'a> {
    pub(crate) fn new(series: impl Into<String>, run: impl FnMut() + 'a) -> Self {
        Self { series: series.into(), run: Box::new(run) }
    }
}

/// Times of all candidates, in nanoseconds per run, round by round.
pub(crate) struct Samples {
    series: Vec<String>,
    rounds: Vec<Vec<f64>>,
}

/// Duration of the measurement of one candidate in one round, and the number of rounds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    pub(crate) rounds: usize,
    pub(crate) slice: Duration,
}

impl Budget {
    pub(crate) fn of(effort: Effort) -> Self {
        match effort {
            Effort::Brief => Self { rounds: 7, slice: Duration::from_millis(4) },
            Effort::Quick => Self { rounds: 11, slice: Duration::from_millis(4) },
            Effort::Full => Self { rounds: 21, slice: Duration::from_millis(10) },
        }
    }
}

/// Runs the candidates interleaved.
pub(crate) fn interleave(mut contestants: Vec<FnCandidate<'_>>, patience: Budget) -> Samples {
    let mut repeats = Vec::new();
    for contestant in &mut contestants {
        (contestant.run)();
        let once = time_ns(&mut contestant.run, 1).max(1.0);
        let fit = patience.slice.as_nanos() as f64 / once;
        repeats.push((fit as u32).clamp(1, 1_000_000));
    }
    // All candidates do the same number of runs, so that the caches are in the same state.
    let repeat = repeats.into_iter().min().unwrap_or(1);
    let mut rounds = vec![Vec::new(); contestants.len()];
    for round in 0..patience.rounds {
        for turn in 0..contestants.len() {
            // The first candidate and the direction change from round to round, so that no
            // candidate has an advantage from its position or its predecessor.
            let place = (turn + round / 2) % contestants.len();
            let index = if round % 2 == 0 { place } else { contestants.len() - 1 - place };
            // One untimed run wakes sleeping channels and trains the branch predictor.
            (contestants[index].run)();
            rounds[index].push(time_ns(&mut contestants[index].run, repeat));
        }
    }
    Samples { series: contestants.into_iter().map(|c| c.series).collect(), rounds }
}

fn time_ns(run: &mut dyn FnMut(), repeat: u32) -> f64 {
    let start = Instant::now();
    for _ in 0..repeat {
        run();
    }
    start.elapsed().as_nanos() as f64 / f64::from(repeat)
}

impl Samples {
    /// Returns the median over rounds of the speedup of `series` over the first candidate.
    pub(crate) fn speedup(&self, series: &str) -> f64 {
        self.speedup_against(series, &self.series[0])
    }

    /// Returns the median over rounds of the speedup of `series` over `peer`.
    pub(crate) fn speedup_against(&self, series: &str, peer: &str) -> f64 {
        let (ours, theirs) = (self.samples_of(series), self.samples_of(peer));
        median(ours.iter().zip(theirs).map(|(ours, theirs)| theirs / ours).collect())
    }

    fn samples_of(&self, series: &str) -> &[f64] {
        let index = self.series.iter().position(|name| name == series);
        &self.rounds[index.expect("the series took part")]
    }

    /// Rows of bandwidth, for runs that move `moved` bytes each.
    pub(crate) fn bandwidth_rows(&self, figure: &str, size: u64, moved: u64) -> Vec<Row> {
        self.rows(figure, size, "GB/s", |ns| moved as f64 / ns)
    }

    /// Rows of the time of one run.
    pub(crate) fn time_rows(&self, figure: &str, size: u64) -> Vec<Row> {
        self.rows(figure, size, "ns", |ns| ns)
    }

    fn rows(&self, figure: &str, size: u64, unit: &str, of_ns: impl Fn(f64) -> f64) -> Vec<Row> {
        let row = |(series, rounds): (&String, &Vec<f64>)| {
            let values: Vec<_> = rounds.iter().map(|&ns| of_ns(ns)).collect();
            Row::of_rounds(figure, series, size, unit, &values)
        };
        self.series.iter().zip(&self.rounds).map(row).collect()
    }
}

/// Median.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[count / 2],
        count => (values[count / 2 - 1] + values[count / 2]) / 2.0,
    }
}

/// A source and a target in ordinary memory, resident, with different contents.
pub(crate) struct BufferPair {
    pub(crate) source: Pages,
    pub(crate) target: Pages,
}

impl BufferPair {
    pub(crate) fn new(bytes: usize) -> anyhow::Result<Self> {
        let mut pair = Self { source: Pages::new(bytes)?, target: Pages::new(bytes)? };
        pair.source.as_mut_slice().fill(0x5A);
        pair.target.as_mut_slice().fill(0xA5);
        Ok(pair)
    }
}

/// The peer: libc's memcpy, called as from C.
pub(crate) fn memcpy(target: &mut [u8], source: &[u8]) {
    assert_eq!(source.len(), target.len());
    // SAFETY: the slices are distinct and of equal length.
    unsafe { libc::memcpy(target.as_mut_ptr().cast(), source.as_ptr().cast(), source.len()) };
}

/// A position that moves through large buffers, so that every copy uses memory that is not in a
/// cache.
pub(crate) struct ColdCursor {
    length: usize,
    position: usize,
}

impl ColdCursor {
    pub(crate) fn over(length: usize) -> Self {
        Self { length, position: 0 }
    }

    /// Returns the next `bytes`; wraps to the start at the end of the buffers.
    pub(crate) fn next(&mut self, bytes: usize) -> std::ops::Range<usize> {
        if self.position + bytes > self.length {
            self.position = 0;
        }
        let start = self.position;
        self.position += bytes;
        start..start + bytes
    }
}

/// Computation in registers: `steps` dependent multiplications.
pub(crate) fn compute(steps: u64) -> u64 {
    let mut value = black_box(0x9E37_79B9_7F4A_7C15u64);
    for _ in 0..steps {
        value = black_box(value.wrapping_mul(0xBF58_476D_1CE4_E5B9) ^ (value >> 29));
    }
    value
}

/// Sets a summary key if the value is finite.
pub(crate) fn set(summary: &mut Summary, key: &str, value: f64) {
    if value.is_finite() {
        summary.set(key, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_count_lies_between() {
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(vec![9.0]), 9.0);
        assert!(median(vec![]).is_nan());
    }

    #[test]
    fn a_walk_wraps_before_it_would_run_over() {
        let mut walk = ColdCursor::over(10);
        let steps: Vec<_> = (0..4).map(|_| walk.next(4)).collect();
        assert_eq!(steps, [0..4, 4..8, 0..4, 4..8]);
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        let times = Samples {
            series: vec!["peer".into(), "ours".into()],
            rounds: vec![vec![10.0, 100.0, 10.0], vec![5.0, 50.0, 10.0]],
        };
        assert_eq!(times.speedup("ours"), 2.0);
    }

    #[test]
    fn contestants_run_equally_often() {
        use std::cell::Cell;
        let (first, second) = (Cell::new(0), Cell::new(0));
        let contestants = vec![
            FnCandidate::new("first", || first.set(first.get() + 1)),
            FnCandidate::new("second", || second.set(second.get() + 1)),
        ];
        let patience = Budget { rounds: 3, slice: Duration::from_micros(1) };
        interleave(contestants, patience);
        assert_eq!(first.get(), second.get());
    }
}
