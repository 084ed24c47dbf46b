//! `overlap`: the share of a copy that is hidden behind computation (figure 6 of the paper on
//! asynchronous memory operations), by the paper's definition: (T_copy + T_compute − T_total) /
//! T_copy.

use std::time::Instant;

use memferry::{Ferry, Request};

use super::overhead::clock_ns;
use crate::Progress;
use crate::harness::{BufferPair, ColdCursor, compute, median, memcpy, set};
use crate::results::outcome::{Outcome, Row};
use crate::results::size;
use crate::{Bench, Effort};

pub(crate) static BENCH: Bench =
    Bench::new("overlap", "How much of a copy hides behind computation on the caller's core", run);

const COLD_BYTES: usize = 256 << 20;
/// Ratio of computation to copy. The paper requires a computation longer than the copy. T_copy is
/// measured with a caller that assists while it waits, if there are chunks that it can copy; a channel
/// alone may need twice as long and must also fit.
const COMPUTE_PER_COPY: f64 = 3.0;

const MEMFERRY: &str = "memferry";
/// Series, copy method, and ratio of computation to copy.
const CANDIDATES: [(&str, OverlapMethod, f64); 3] = [
    (MEMFERRY, OverlapMethod::Ferry, COMPUTE_PER_COPY),
    ("memferry, computing 1.1 T_copy", OverlapMethod::Ferry, 1.1),
    ("memcpy", OverlapMethod::Memcpy, COMPUTE_PER_COPY),
];

#[derive(Clone, Copy)]
enum OverlapMethod {
    Ferry,
    Memcpy,
}

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    let sizes: Vec<usize> = match effort {
        Effort::Brief => vec![64 << 10, 1 << 20, 4 << 20],
        Effort::Quick => vec![16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20],
        Effort::Full => (12..=26).map(|shift| 1 << shift).collect(),
    };
    progress.start(2 * sizes.len() as u64 + 1, &outcome.bench);
    progress.step("preparing buffers");
    let ferry = Ferry::new()?;
    let mut pair = BufferPair::new(COLD_BYTES)?;
    let steps_per_ns = calibrate_compute();
    for (figure, walk_bytes) in [("hot", None), ("cold", Some(COLD_BYTES))] {
        for &bytes in &sizes {
            progress.step(&format!("{figure} {}", size::format(bytes as u64)));
            for (series, way, factor) in CANDIDATES {
                let walk = walk_bytes.map(ColdCursor::over);
                let pair = &mut pair;
                let mut subject =
                    OverlapSubject { ferry: &ferry, pair, bytes, cursor: walk, method: way };
                let rounds = subject.rounds(effort, factor, steps_per_ns)?;
                let row = Row::of_rounds(figure, series, bytes as u64, "overlap", &rounds);
                let key = match (series, figure, bytes) {
                    (MEMFERRY, "hot", 0x1_0000) => Some("hot_64k"),
                    (MEMFERRY, "hot", 0x10_0000) => Some("hot_1m"),
                    (MEMFERRY, "hot", 0x40_0000) => Some("hot_4m"),
                    (MEMFERRY, "cold", 0x40_0000) => Some("cold_4m"),
                    _ => None,
                };
                if let Some(key) = key {
                    set(&mut outcome.summary, key, row.value.clamp(0.0, 1.0));
                }
                outcome.rows.push(row);
            }
        }
    }
    outcome.notes.push(format!(
        "Overlap = (T_copy + T_compute - T_total) / T_copy, each the median of interleaved \
         measurements. T_copy is a started and awaited copy. Beyond 64 KiB it has chunks, and a \
         waiting caller works along; a channel by itself needs up to twice as long, so the \
         computation is {COMPUTE_PER_COPY} times T_copy, in the caller's core. With one hardly \
         longer than T_copy, the wait at its end does the rest of such a copy, as the series for \
         1.1 shows. Up to 64 KiB the channel makes the whole copy, also if the caller waits. The \
         time of the clock is not counted. \
         Copies small enough to be carried out at once by the caller do not overlap: what \
         their rows and those of memcpy show is what the processor reorders by itself."
    ));
    Ok(outcome)
}

/// Returns the number of steps of computation per nanosecond.
pub(crate) fn calibrate_compute() -> f64 {
    const STEPS: u64 = 2_000_000;
    let once = || {
        let start = Instant::now();
        compute(STEPS);
        STEPS as f64 / start.elapsed().as_nanos() as f64
    };
    median((0..5).map(|_| once()).collect())
}

/// Number of rounds, and measurements in each round.
pub(crate) struct OverlapBudget {
    pub(crate) rounds: usize,
    pub(crate) repeat: usize,
}

/// Returns the overlap of every round, each from the medians of a few interleaved measurements.
/// `timed` starts a copy, computes a number of steps, waits, and returns the time of all three; the
/// computation takes `factor` times as long as the copy.
pub(crate) fn overlap_rounds(
    pace: OverlapBudget,
    factor: f64,
    steps_per_ns: f64,
    mut timed: impl FnMut(u64) -> anyhow::Result<f64>,
) -> anyhow::Result<Vec<f64>> {
    let OverlapBudget { rounds, repeat } = pace;
    let clock = clock_ns();
    let alone = (0..repeat).map(|_| timed(0)).collect::<anyhow::Result<_>>()?;
    let steps = (median(alone) * factor * steps_per_ns) as u64;
    let mut round = || {
        let (mut copy, mut work, mut total) = (vec![], vec![], vec![]);
        for _ in 0..repeat {
            copy.push(timed(0)?);
            let start = Instant::now();
            compute(steps);
            work.push(start.elapsed().as_nanos() as f64);
            total.push(timed(steps)?);
        }
        let [copy, work, total] = [copy, work, total].map(|times| (median(times) - clock).max(1.0));
        Ok((copy + work - total) / copy)
    };
    (0..rounds).map(|_| round()).collect()
}

struct OverlapSubject<'a> {
    ferry: &'a Ferry,
    pair: &'a mut BufferPair,
    bytes: usize,
    cursor: Option<ColdCursor>,
    method: OverlapMethod,
}

impl OverlapSubject<'_> {
    fn rounds(
        &mut self,
        effort: Effort,
        factor: f64,
        steps_per_ns: f64,
    ) -> anyhow::Result<Vec<f64>> {
        let (rounds, repeat) = match effort {
            Effort::Brief => (7, 15),
            Effort::Quick => (9, 21),
            Effort::Full => (11, 21),
        };
        let repeat = if self.bytes < 1 << 20 { 4 * repeat } else { repeat };
        let pace = OverlapBudget { rounds, repeat };
        overlap_rounds(pace, factor, steps_per_ns, |steps| Ok(self.timed(steps)))
    }

    /// Starts a copy, computes, waits, and returns the time of all three.
    fn timed(&mut self, steps: u64) -> f64 {
        let offset = self.cursor.as_mut().map_or(0, |walk| walk.next(self.bytes).start);
        let range = offset..offset + self.bytes;
        let source = &self.pair.source.as_slice()[range.clone()];
        let target = &mut self.pair.target.as_mut_slice()[range];
        let start = Instant::now();
        match self.method {
            OverlapMethod::Memcpy => {
                memcpy(target, source);
                compute(steps);
            }
            OverlapMethod::Ferry => {
                let request = Request::copy(source.as_ptr(), target.as_mut_ptr(), self.bytes);
                // SAFETY: both slices are borrowed, and not accessed, until the wait returns.
                let transfer =
                    unsafe { self.ferry.start_raw(request) }.expect("the ranges are valid");
                compute(steps);
                transfer.wait().expect("memory of this process is good");
            }
        }
        start.elapsed().as_nanos() as f64
    }
}
