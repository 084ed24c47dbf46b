//! `pollution`: what a large copy does to the cache of the core that asked for it (figure 8 of the
//! paper on asynchronous memory operations): column-wise access to a small buffer, alone, after
//! memcpy, and after ours.

use std::hint::black_box;
use std::time::Instant;

use memferry::sys::cpu;
use memferry::sys::pages::Pages;
use memferry::{Ferry, Options};

use super::measure::{Pair, median, memcpy, set};
use super::{Bench, Effort};
use crate::outcome::{Outcome, Row};
use crate::show::Progress;
use crate::size;

pub(super) struct Pollution;

const COPY_BYTES: usize = 16 << 20;
const LINE: usize = 64;
/// The small buffer is a matrix with rows of this many bytes, read column by column.
const ROW_BYTES: usize = 4096;

const SPARING: &str = "after memferry, sparing the caller";
const HELPING: &str = "after memferry, caller helping";

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
        let rounds = if effort == Effort::Full { 61 } else { 25 };
        progress.start(sizes.len() as u64 + 1, self.name());
        progress.step("preparing buffers");
        let ferry = Ferry::new()?;
        let mut pair = Pair::new(COPY_BYTES)?;
        let mut outcome = Outcome::new(self.name());
        let (mut memcpy_slowdown, mut our_slowdown) = (vec![], vec![]);
        for bytes in sizes {
            progress.step(&size::format(bytes as u64));
            let times = measure(&ferry, &mut pair, bytes, rounds)?;
            let alone = median(times[0].1.clone());
            memcpy_slowdown.push(median(times[1].1.clone()) / alone);
            our_slowdown.push(median(times[2].1.clone()) / alone);
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
        set(&mut outcome.summary, "memcpy_slowdown", median(memcpy_slowdown));
        set(&mut outcome.summary, "ours_slowdown", median(our_slowdown));
        outcome.notes.push(format!(
            "Time to read one byte of every cache line of a buffer, column by column, right after \
             a copy of {}. Keys are medians over the buffer sizes. ours_slowdown is for copies \
             with Options::spare_caller, where, as with the paper's engine, the caller's core takes \
             no part; the row for a caller that helps is beside it.",
            size::format(COPY_BYTES as u64)
        ));
        Ok(outcome)
    }
}

type Series = (&'static str, Vec<f64>);

fn measure(
    ferry: &Ferry,
    pair: &mut Pair,
    bytes: usize,
    rounds: usize,
) -> anyhow::Result<[Series; 4]> {
    let mut small = Pages::new(bytes)?;
    small.as_mut_slice().fill(1);
    let mut times: [Series; 4] =
        ["alone", "after memcpy", SPARING, HELPING].map(|series| (series, vec![]));
    for _ in 0..rounds {
        for (index, (_, values)) in times.iter_mut().enumerate() {
            let (source, target) = (pair.source.as_slice(), pair.target.as_mut_slice());
            for _ in 0..3 {
                walk_columns(small.as_slice());
            }
            match index {
                0 => {}
                1 => memcpy(target, source),
                2 => ferry.copy_with(source, target, Options::new().spare_caller())?,
                _ => ferry.copy(source, target)?,
            }
            let start = Instant::now();
            walk_columns(small.as_slice());
            values.push(start.elapsed().as_nanos() as f64);
        }
    }
    Ok(times)
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
