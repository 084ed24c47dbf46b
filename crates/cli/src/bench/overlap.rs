//! `overlap`: how much of a copy hides behind computation (figure 6 of the paper on asynchronous
//! memory operations), by its definition: (T_copy + T_compute − T_total) / T_copy.

use std::time::Instant;

use memferry::{Ferry, Request};

use super::measure::{Pair, Walk, compute, median, memcpy, set};
use super::{Bench, Effort};
use crate::outcome::{Outcome, Row};
use crate::show::Progress;
use crate::size;

pub(super) struct Overlap;

const COLD_BYTES: usize = 256 << 20;
/// The paper asks for a computation longer than the copy. A waiting caller works along, so T_copy
/// is the time of two; a channel by itself may need twice that, and must fit as well.
const COMPUTE_PER_COPY: f64 = 3.0;

const OURS: &str = "memferry";
/// Series, how it copies, and how long it computes meanwhile.
const FIELD: [(&str, Way, f64); 3] = [
    (OURS, Way::Ferry, COMPUTE_PER_COPY),
    ("memferry, computing 1.1 T_copy", Way::Ferry, 1.1),
    ("memcpy", Way::Memcpy, COMPUTE_PER_COPY),
];

#[derive(Clone, Copy)]
enum Way {
    Ferry,
    Memcpy,
}

impl Bench for Overlap {
    fn name(&self) -> &'static str {
        "overlap"
    }

    fn about(&self) -> &'static str {
        "How much of a copy hides behind computation on the caller's core"
    }

    fn run(&self, effort: Effort, progress: &Progress) -> anyhow::Result<Outcome> {
        let sizes: Vec<usize> = match effort {
            Effort::Brief => vec![64 << 10, 1 << 20, 4 << 20],
            Effort::Quick => vec![16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20],
            Effort::Full => (12..=26).map(|shift| 1 << shift).collect(),
        };
        progress.start(2 * sizes.len() as u64 + 1, self.name());
        progress.step("preparing buffers");
        let ferry = Ferry::new()?;
        let mut pair = Pair::new(COLD_BYTES)?;
        let steps_per_ns = calibrate_compute();
        let mut outcome = Outcome::new(self.name());
        for (figure, walk_bytes) in [("hot", None), ("cold", Some(COLD_BYTES))] {
            for &bytes in &sizes {
                progress.step(&format!("{figure} {}", size::format(bytes as u64)));
                for (series, way, factor) in FIELD {
                    let walk = walk_bytes.map(Walk::over);
                    let pair = &mut pair;
                    let mut subject = Subject { ferry: &ferry, pair, bytes, walk, way };
                    let rounds = subject.rounds(effort, factor, steps_per_ns)?;
                    let row = Row::of_rounds(figure, series, bytes as u64, "overlap", &rounds);
                    let key = match (series, figure, bytes) {
                        (OURS, "hot", 0x1_0000) => Some("hot_64k"),
                        (OURS, "hot", 0x10_0000) => Some("hot_1m"),
                        (OURS, "hot", 0x40_0000) => Some("hot_4m"),
                        (OURS, "cold", 0x40_0000) => Some("cold_4m"),
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
             measurements. T_copy is a started and awaited copy, in which a waiting caller works \
             along; a channel by itself needs up to twice as long, so the computation is \
             {COMPUTE_PER_COPY} times T_copy, in the caller's core. With one hardly longer than \
             T_copy, the wait at its end does the rest of the copy, as the series for 1.1 shows. \
             Copies small enough to be carried out at once by the caller do not overlap: what \
             their rows and those of memcpy show is what the processor reorders by itself."
        ));
        Ok(outcome)
    }
}

/// How many steps of computation one nanosecond takes.
pub(super) fn calibrate_compute() -> f64 {
    const STEPS: u64 = 2_000_000;
    let once = || {
        let start = Instant::now();
        compute(STEPS);
        STEPS as f64 / start.elapsed().as_nanos() as f64
    };
    median((0..5).map(|_| once()).collect())
}

/// How many rounds there are, and how many measurements in each.
pub(super) struct Pace {
    pub(super) rounds: usize,
    pub(super) repeat: usize,
}

/// The overlap, round by round, each from the medians of a few interleaved measurements. `timed`
/// starts a copy, computes so many steps and waits, and says how long all three took; the
/// computation takes `factor` times as long as the copy.
pub(super) fn overlap_rounds(
    pace: Pace,
    factor: f64,
    steps_per_ns: f64,
    mut timed: impl FnMut(u64) -> anyhow::Result<f64>,
) -> anyhow::Result<Vec<f64>> {
    let Pace { rounds, repeat } = pace;
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
        let (copy, work, total) = (median(copy), median(work), median(total));
        Ok((copy + work - total) / copy)
    };
    (0..rounds).map(|_| round()).collect()
}

struct Subject<'a> {
    ferry: &'a Ferry,
    pair: &'a mut Pair,
    bytes: usize,
    walk: Option<Walk>,
    way: Way,
}

impl Subject<'_> {
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
        let pace = Pace { rounds, repeat };
        overlap_rounds(pace, factor, steps_per_ns, |steps| Ok(self.timed(steps)))
    }

    /// Starts a copy, computes, waits; the time of all three.
    fn timed(&mut self, steps: u64) -> f64 {
        let offset = self.walk.as_mut().map_or(0, |walk| walk.next(self.bytes).start);
        let range = offset..offset + self.bytes;
        let source = &self.pair.source.as_slice()[range.clone()];
        let target = &mut self.pair.target.as_mut_slice()[range];
        let start = Instant::now();
        match self.way {
            Way::Memcpy => {
                memcpy(target, source);
                compute(steps);
            }
            Way::Ferry => {
                let request = Request::copy(source.as_ptr(), target.as_mut_ptr(), self.bytes);
                // SAFETY: both slices are borrowed, and not touched, until the wait is over.
                let transfer = unsafe { self.ferry.start(request) }.expect("the ranges are valid");
                compute(steps);
                transfer.wait().expect("memory of this process is good");
            }
        }
        start.elapsed().as_nanos() as f64
    }
}
