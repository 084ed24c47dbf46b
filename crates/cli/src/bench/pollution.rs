//! `pollution`: what a large copy does to the cache of the core that asked for it (figure 8 of the
//! paper on asynchronous memory operations): column-wise access to a small buffer, alone, after
//! memcpy, and after ours.

use std::hint::{black_box, spin_loop};
use std::time::{Duration, Instant};

use memferry::sys::cpu;
use memferry::sys::pages::Pages;
use memferry::{Ferry, Options, Request};

use super::measure::{Pair, median, memcpy, set};
use super::{Bench, Effort};
use crate::outcome::{Outcome, Row};
use crate::show::Progress;
use crate::size;

pub(super) struct Pollution;

const COPY_BYTES: usize = 4 << 20;
const LINE: usize = 64;
/// The small buffer is a matrix with rows of this many bytes, read column by column.
const ROW_BYTES: usize = 4096;

/// What happens between warming the small buffer and reading it.
const PAUSE: &str = "after the same time without a copy";
const MEMCPY: &str = "after memcpy";
const SPARING: &str = "after memferry, sparing the caller";
const HELPING: &str = "after memferry, caller helping";
const AT_ONCE: &str = "at once";

impl Bench for Pollution {
    fn name(&self) -> &'static str {
        "pollution"
    }

    fn about(&self) -> &'static str {
        "What a large copy does to the caller's cache"
    }

    fn run(&self, effort: Effort, progress: &Progress) -> anyhow::Result<Outcome> {
        let l2_bytes = cpu::facts().l2_bytes;
        let all = (14..).map(|shift| 1usize << shift).take_while(|&bytes| bytes <= l2_bytes / 2);
        let mut sizes: Vec<usize> = all.collect();
        if effort == Effort::Brief {
            sizes.retain(|&bytes| bytes >= 128 << 10);
        }
        let rounds = if effort == Effort::Full { 201 } else { 61 };
        progress.start(sizes.len() as u64 + 1, self.name());
        progress.step("preparing buffers");
        let ferry = Ferry::new()?;
        let mut pair = Pair::new(COPY_BYTES)?;
        let mut outcome = Outcome::new(self.name());
        let (mut memcpy_slowdowns, mut our_slowdowns) = (vec![], vec![]);
        for bytes in sizes {
            progress.step(&size::format(bytes as u64));
            let times = measure(&ferry, &mut pair, bytes, rounds)?;
            memcpy_slowdowns.extend(ratios(&times[1], &times[0]));
            our_slowdowns.extend(ratios(&times[2], &times[0]));
            for (series, values) in times {
                outcome.rows.push(Row::of_rounds(
                    "access time",
                    series,
                    bytes as u64,
                    "ns",
                    &values,
                ));
            }
        }
        set(&mut outcome.summary, "memcpy_slowdown", median(memcpy_slowdowns));
        set(&mut outcome.summary, "ours_slowdown", median(our_slowdowns));
        outcome.notes.push(format!(
            "Time to read one byte of every cache line of a small warm buffer, column by column, \
             right after a copy of {}. Keys are medians over all sizes and rounds of the time after \
             a copy over the time after a pause of the same length without one: other tenants of \
             the core and its caches leave their traces whether there is a copy or not, as the row \
             \"{AT_ONCE}\" shows. ours_slowdown is for copies with Options::spare_caller, where, as \
             with the paper's engine, the caller's core takes no part and polls for the end; the \
             row for a caller that helps is beside it.",
            size::format(COPY_BYTES as u64)
        ));
        Ok(outcome)
    }
}

type Series = (&'static str, Vec<f64>);

/// Round by round, one series over another.
fn ratios(series: &Series, base: &Series) -> Vec<f64> {
    series.1.iter().zip(&base.1).map(|(time, base)| time / base).collect()
}

fn measure(
    ferry: &Ferry,
    pair: &mut Pair,
    bytes: usize,
    rounds: usize,
) -> anyhow::Result<[Series; 5]> {
    let mut small = Pages::new(bytes)?;
    small.as_mut_slice().fill(1);
    let mut times: [Series; 5] =
        [PAUSE, MEMCPY, SPARING, HELPING, AT_ONCE].map(|series| (series, vec![]));
    let mut copy_time = Duration::ZERO;
    // The pause is as long as the copy before it, so the copy comes first.
    for index in std::iter::once([2, 0, 1, 3, 4]).cycle().take(rounds).flatten() {
        for _ in 0..3 {
            walk_columns(small.as_slice());
        }
        let (source, target) = (pair.source.as_slice(), pair.target.as_mut_slice());
        let begin = Instant::now();
        match times[index].0 {
            PAUSE => {
                while begin.elapsed() < copy_time {
                    spin_loop();
                }
            }
            MEMCPY => memcpy(target, source),
            SPARING => {
                copy_sparing(ferry, source, target)?;
                copy_time = begin.elapsed();
            }
            HELPING => ferry.copy(source, target)?,
            _ => {}
        }
        let start = Instant::now();
        walk_columns(small.as_slice());
        times[index].1.push(start.elapsed().as_nanos() as f64);
    }
    Ok(times)
}

fn copy_sparing(ferry: &Ferry, source: &[u8], target: &mut [u8]) -> anyhow::Result<()> {
    let request = Request::copy(source.as_ptr(), target.as_mut_ptr(), source.len())
        .with(Options::new().spare_caller());
    // SAFETY: both slices are borrowed until this returns, which is after the end.
    let transfer = unsafe { ferry.start(request) }?;
    while !transfer.is_done() {
        spin_loop();
    }
    transfer.wait()?;
    Ok(())
}

/// Reads one byte of every line, column by column.
fn walk_columns(matrix: &[u8]) {
    let mut sum = 0u64;
    for column in (0..ROW_BYTES.min(matrix.len())).step_by(LINE) {
        for row in (column..matrix.len()).step_by(ROW_BYTES) {
            sum += u64::from(matrix[row]);
        }
    }
    black_box(sum);
}
