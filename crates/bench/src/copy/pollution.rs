//! `pollution`: the effect of a large copy on the caches of the caller's core (figure 8 of the
//! paper on asynchronous memory operations): column-wise reads of a small buffer, alone, after
//! memcpy, and after copies by Memferry.

use std::hint::{black_box, spin_loop};
use std::time::{Duration, Instant};

use memferry::sys::cpu;
use memferry::sys::pages::Pages;
use memferry::{Ferry, Options, Request};

use crate::Progress;
use crate::harness::{BufferPair, median, memcpy, set};
use crate::results::outcome::{Outcome, Row};
use crate::results::size;
use crate::{Bench, Effort};

pub(crate) struct Pollution;

const COPY_BYTES: usize = 4 << 20;
const LINE: usize = 64;
/// Bytes per row of the matrix in the small buffer, which is read column by column.
const ROW_BYTES: usize = 4096;

/// What happens between loading the small buffer into the caches and reading it.
const IMMEDIATE: usize = 0;
const MEMCPY: usize = 1;
const MEMCPY_PAUSE: usize = 2;
const CALLER_SLEEPS: usize = 3;
const CALLER_SLEEPS_PAUSE: usize = 4;
const CALLER_HELPS: usize = 5;
const SERIES: [&str; 6] = [
    "at once",
    "after memcpy",
    "after a pause as long as memcpy",
    "after memferry, sparing the caller",
    "after a pause as long as that",
    "after memferry, caller helping",
];

impl Bench for Pollution {
    fn name(&self) -> &'static str {
        "pollution"
    }

    fn about(&self) -> &'static str {
        "What a large copy does to the caller's cache"
    }

    fn run(&self, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
        let l2_bytes = cpu::info().l2_bytes;
        let all = (14..).map(|shift| 1usize << shift).take_while(|&bytes| bytes <= l2_bytes / 2);
        let sizes: Vec<usize> = all.collect();
        let rounds = if effort == Effort::Full { 201 } else { 61 };
        progress.start(sizes.len() as u64 + 1, self.name());
        progress.step("preparing buffers");
        let ferry = Ferry::new()?;
        let mut pair = BufferPair::new(COPY_BYTES)?;
        let mut outcome = Outcome::new(self.name());
        let mut slowdowns: [Vec<f64>; 4] = Default::default();
        for bytes in sizes {
            progress.step(&size::format(bytes as u64));
            let times = measure(&ferry, &mut pair, bytes, rounds)?;
            let ratio = |series: usize, base: usize| {
                median(times[series].clone()) / median(times[base].clone())
            };
            slowdowns[0].push(ratio(MEMCPY, MEMCPY_PAUSE));
            slowdowns[1].push(ratio(CALLER_SLEEPS, CALLER_SLEEPS_PAUSE));
            slowdowns[2].push(ratio(CALLER_SLEEPS, IMMEDIATE));
            slowdowns[3].push(ratio(CALLER_HELPS, CALLER_SLEEPS_PAUSE));
            for (series, values) in SERIES.into_iter().zip(&times) {
                outcome.rows.push(Row::of_rounds(
                    "access time",
                    series,
                    bytes as u64,
                    "ns",
                    values,
                ));
            }
        }
        let keys = [
            "memcpy_slowdown",
            "ours_slowdown",
            "ours_slowdown_vs_at_once",
            "ours_helping_slowdown",
        ];
        for (key, values) in keys.into_iter().zip(slowdowns) {
            set(&mut outcome.summary, key, median(values));
        }
        outcome.notes.push(format!(
            "Time to read one byte of every cache line of a small warm buffer, column by column, \
             right after a copy of {}. Keys are medians over the buffer sizes of the time after a \
             copy over the time after a pause of the same length without one: other tenants of a \
             shared core leave their traces in the caches whether there is a copy or not. \
             ours_slowdown_vs_at_once compares with a read without any pause instead. \
             ours_slowdown is for copies with Options::no_caller_assist, where, as with the paper's \
             engine, the caller's core takes no part and polls for the end; ours_helping_slowdown \
             is for an ordinary blocking copy, with which the caller helps.",
            size::format(COPY_BYTES as u64)
        ));
        Ok(outcome)
    }
}

/// Times to read a small buffer of `bytes`, by series and round.
fn measure(
    ferry: &Ferry,
    pair: &mut BufferPair,
    bytes: usize,
    rounds: usize,
) -> anyhow::Result<[Vec<f64>; 6]> {
    let mut small = Pages::new(bytes)?;
    small.as_mut_slice().fill(1);
    let mut times: [Vec<f64>; 6] = Default::default();
    let (mut memcpy_time, mut sparing_time) = (Duration::ZERO, Duration::ZERO);
    for round in 0..rounds {
        for turn in 0..SERIES.len() {
            // The order of the series changes from round to round. A pause is as long as the last
            // copy of its kind.
            let series = (turn + round) % SERIES.len();
            for _ in 0..3 {
                read_columns(small.as_slice());
            }
            let (source, target) = (pair.source.as_slice(), pair.target.as_mut_slice());
            let begin = Instant::now();
            match series {
                MEMCPY => {
                    memcpy(target, source);
                    memcpy_time = begin.elapsed();
                }
                MEMCPY_PAUSE => pause(begin, memcpy_time),
                CALLER_SLEEPS => {
                    copy_offloaded(ferry, source, target)?;
                    sparing_time = begin.elapsed();
                }
                CALLER_SLEEPS_PAUSE => pause(begin, sparing_time),
                CALLER_HELPS => ferry.copy(source, target)?,
                _ => {}
            }
            let start = Instant::now();
            read_columns(small.as_slice());
            times[series].push(start.elapsed().as_nanos() as f64);
        }
    }
    Ok(times)
}

fn pause(begin: Instant, length: Duration) {
    while begin.elapsed() < length {
        spin_loop();
    }
}

fn copy_offloaded(ferry: &Ferry, source: &[u8], target: &mut [u8]) -> anyhow::Result<()> {
    let request = Request::copy(source.as_ptr(), target.as_mut_ptr(), source.len())
        .with(Options::new().no_caller_assist());
    // SAFETY: both slices are borrowed until this function returns, which is after the transfer is
    // complete.
    let transfer = unsafe { ferry.start_raw(request) }?;
    while !transfer.is_done() {
        spin_loop();
    }
    transfer.wait()?;
    Ok(())
}

/// Reads one byte of every cache line, column by column.
fn read_columns(matrix: &[u8]) {
    let mut sum = 0u64;
    for column in (0..ROW_BYTES.min(matrix.len())).step_by(LINE) {
        for row in (column..matrix.len()).step_by(ROW_BYTES) {
            sum += u64::from(matrix[row]);
        }
    }
    black_box(sum);
}
