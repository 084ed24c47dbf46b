//! `pollution`: the effect of a large copy on the caches of the caller's core (figure 8 of the
//! paper on asynchronous memory operations): column-wise reads of a small buffer, alone, after
//! memcpy, and after copies by Memferry.

mod neighbour;

use std::cell::RefCell;
use std::hint::{black_box, spin_loop};
use std::time::{Duration, Instant};

use memferry::sys::cpu;
use memferry::sys::pages::Pages;
use memferry::{Ferry, Options, Request};

use crate::Progress;
use crate::harness::{
    Budget, BufferPair, FnCandidate, Harness, Role, Sample, Samples, median, memcpy, set,
};
use crate::results::outcome::Outcome;
use crate::results::size;
use crate::{Bench, Effort};
use neighbour::{Neighbour, Stores};

pub(crate) static BENCH: Bench =
    Bench::new("pollution", "What a large copy does to the caller's cache", run);

const COPY_BYTES: usize = 4 << 20;
const LINE: usize = 64;
/// Bytes per row of the matrix in the small buffer, which is read column by column.
const ROW_BYTES: usize = 4096;

/// What happens between loading the small buffer into the caches and reading it.
#[derive(Debug, Clone, Copy)]
enum Between {
    Nothing,
    Memcpy,
    /// A pause as long as the last memcpy.
    MemcpyPause,
    /// A copy without the help of the caller.
    Offloaded,
    /// A pause as long as the last such copy.
    OffloadedPause,
    /// A blocking copy, with which the caller helps.
    Helped,
    /// A copy of one line without the help of the caller, then a pause as long as that of the whole copy.
    HandedOver,
    /// A copy by a thread that the caller only waits for.
    Neighbour(Stores),
}

const IMMEDIATE: &str = "at once";
const MEMCPY: &str = "after memcpy";
const MEMCPY_PAUSE: &str = "after a pause as long as memcpy";
const CALLER_SLEEPS: &str = "after memferry, sparing the caller";
const CALLER_SLEEPS_PAUSE: &str = "after a pause as long as that";
const CALLER_HELPS: &str = "after memferry, caller helping";
const HANDED_OVER: &str = "after memferry, one line only, and a pause";
const NEIGHBOUR_STREAMS: &str = "after another thread streamed";
const NEIGHBOUR_MEMCPY: &str = "after another thread's memcpy";
const SERIES: [(&str, Role, Between); 9] = [
    (IMMEDIATE, Role::LowerBound, Between::Nothing),
    (MEMCPY, Role::Peer, Between::Memcpy),
    (MEMCPY_PAUSE, Role::Reference, Between::MemcpyPause),
    (CALLER_SLEEPS, Role::Memferry, Between::Offloaded),
    (CALLER_SLEEPS_PAUSE, Role::Reference, Between::OffloadedPause),
    (CALLER_HELPS, Role::Memferry, Between::Helped),
    (HANDED_OVER, Role::Reference, Between::HandedOver),
    (NEIGHBOUR_STREAMS, Role::Reference, Between::Neighbour(Stores::Streaming)),
    (NEIGHBOUR_MEMCPY, Role::Reference, Between::Neighbour(Stores::Memcpy)),
];

/// Keys, and the two series of which each is the ratio.
const KEYS: [(&str, &str, &str); 7] = [
    ("memcpy_slowdown", MEMCPY, MEMCPY_PAUSE),
    ("ours_slowdown", CALLER_SLEEPS, CALLER_SLEEPS_PAUSE),
    ("ours_slowdown_vs_at_once", CALLER_SLEEPS, IMMEDIATE),
    ("ours_helping_slowdown", CALLER_HELPS, CALLER_SLEEPS_PAUSE),
    ("handover_slowdown", HANDED_OVER, CALLER_SLEEPS_PAUSE),
    ("neighbour_stream_slowdown", NEIGHBOUR_STREAMS, CALLER_SLEEPS_PAUSE),
    ("neighbour_memcpy_slowdown", NEIGHBOUR_MEMCPY, CALLER_SLEEPS_PAUSE),
];

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    let l2_bytes = cpu::info().l2_bytes;
    let all = (14..).map(|shift| 1usize << shift).take_while(|&bytes| bytes <= l2_bytes / 2);
    let sizes: Vec<usize> = all.collect();
    let rounds = if effort == Effort::Full { 201 } else { 61 };
    progress.start(sizes.len() as u64 + 1, &outcome.bench);
    progress.step("preparing buffers");
    let ferry = Ferry::new()?;
    let mut pair = BufferPair::new(COPY_BYTES)?;
    let neighbour = Neighbour::start(COPY_BYTES, ferry.plan_context().profile.streaming)?;
    let mut slowdowns: [Vec<f64>; KEYS.len()] = Default::default();
    for bytes in sizes {
        progress.step(&size::format(bytes as u64));
        let samples = measure(&ferry, neighbour.as_ref(), &mut pair, bytes, rounds)?;
        for ((_, series, base), slowdowns) in KEYS.iter().zip(&mut slowdowns) {
            slowdowns.push(samples.median_ns(series) / samples.median_ns(base));
        }
        outcome.rows.extend(samples.time_rows("access time", bytes as u64));
    }
    for ((key, ..), values) in KEYS.into_iter().zip(slowdowns) {
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
         is for an ordinary blocking copy, with which the caller helps. What leaves the traces: \
         handover_slowdown is for a submission, its wake-up and its completion without a copy worth \
         the name, the neighbour's keys for a copy of the same length by a thread on another core of \
         which the caller reads one word, with streaming stores and by memcpy.",
        size::format(COPY_BYTES as u64)
    ));
    Ok(outcome)
}

/// Measures the time to read a small buffer of `bytes` after each of [`SERIES`].
fn measure(
    ferry: &Ferry,
    neighbour: Option<&Neighbour>,
    pair: &mut BufferPair,
    bytes: usize,
    rounds: usize,
) -> anyhow::Result<Samples> {
    let mut small = Pages::new(bytes)?;
    small.as_mut_slice().fill(1);
    let (memcpy_time, offloaded_time) = (Duration::ZERO, Duration::ZERO);
    let subject =
        RefCell::new(CacheSubject { ferry, neighbour, pair, small, memcpy_time, offloaded_time });
    let present = SERIES
        .into_iter()
        .filter(|(_, _, between)| neighbour.is_some() || !matches!(between, Between::Neighbour(_)));
    let candidates = present.map(|(series, role, between)| {
        let subject = &subject;
        FnCandidate::timed(series, role, move |_| {
            let read_ns = subject.borrow_mut().read_after(between);
            read_ns.map(Sample::of_total).map_err(|error| format!("{error:#}"))
        })
    });
    let mut candidates: Vec<_> = candidates.collect();
    let samples = Harness::new(Budget::fixed(rounds, 1)).interleave(&mut candidates);
    samples.require_all()?;
    Ok(samples)
}

/// The small buffer, the copies that displace it, and how long the last ones took.
struct CacheSubject<'a> {
    ferry: &'a Ferry,
    /// `None` on a machine with one core.
    neighbour: Option<&'a Neighbour>,
    pair: &'a mut BufferPair,
    small: Pages,
    memcpy_time: Duration,
    offloaded_time: Duration,
}

impl CacheSubject<'_> {
    /// Loads the small buffer, does what is asked for, and returns the time to read the buffer.
    fn read_after(&mut self, between: Between) -> anyhow::Result<f64> {
        if let (Between::Neighbour(_), Some(neighbour)) = (between, self.neighbour) {
            neighbour.wake();
        }
        for _ in 0..3 {
            read_columns(self.small.as_slice());
        }
        let (source, target) = (self.pair.source.as_slice(), self.pair.target.as_mut_slice());
        let begin = Instant::now();
        match between {
            Between::Nothing => {}
            Between::Memcpy => {
                memcpy(target, source);
                self.memcpy_time = begin.elapsed();
            }
            Between::MemcpyPause => pause(begin, self.memcpy_time),
            Between::Offloaded => {
                copy_offloaded(self.ferry, source, target)?;
                self.offloaded_time = begin.elapsed();
            }
            Between::OffloadedPause => pause(begin, self.offloaded_time),
            Between::Helped => self.ferry.copy(source, target)?,
            Between::HandedOver => {
                copy_offloaded(self.ferry, &source[..LINE], &mut target[..LINE])?;
                pause(begin, self.offloaded_time);
            }
            Between::Neighbour(stores) => {
                self.neighbour.expect("the series is there with it").copy(stores);
            }
        }
        let start = Instant::now();
        read_columns(self.small.as_slice());
        Ok(start.elapsed().as_nanos() as f64)
    }
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
