//! `overhead`: the parts of the time of an asynchronous copy (figure 7 of the paper on asynchronous
//! memory operations): submission, dispatch, copy, detection of the completion. It also compares
//! the round trip of the smallest copy with the lower bound, two cache lines that go from core to
//! core.

use std::cell::RefCell;
use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::thread::Thread;
use std::time::Instant;

use memferry::sys::affinity;
use memferry::{BatchItem, Ferry, Options, Request, Transfer};

use crate::Progress;
use crate::harness::{Budget, BufferPair, FnCandidate, Harness, Role, Sample, set};
use crate::results::outcome::{Outcome, Row};
use crate::results::size;
use crate::{Bench, Effort};

pub(crate) static BENCH: Bench = Bench::new(
    "overhead",
    "Where the time of an asynchronous copy goes, and the floor of a round trip",
    run,
);

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    let sizes: Vec<usize> = match effort {
        Effort::Brief => vec![8, 64 << 10, 4 << 20],
        Effort::Quick => vec![8, 4 << 10, 64 << 10, 1 << 20, 4 << 20],
        Effort::Full => (3..=24).map(|shift| 1 << shift).collect(),
    };
    let rounds = if effort == Effort::Full { 31 } else { 15 };
    progress.start(sizes.len() as u64 + 2, &outcome.bench);
    progress.step("round trips");
    // With an inline limit of 0, every copy goes through the channel, which is what this bench
    // measures.
    let ferry = Ferry::builder().inline_bytes(0).build()?;
    let mut pair = BufferPair::new(1 << 24)?;
    small_costs(&ferry, &mut pair, rounds, &mut outcome);
    large_submit(&mut pair, rounds, &mut outcome)?;
    for bytes in sizes {
        progress.step(&size::format(bytes as u64));
        outcome.rows.extend(split(&ferry, &mut pair, bytes, rounds));
    }
    outcome.notes.push(
        "Measured with inline_bytes = 0, so that even 8 bytes take the way through a channel \
         that is awake. By default such a copy is done at once by the caller. Source and \
         target are not touched by the caller between round trips."
            .into(),
    );
    if affinity::allowed_cores().len() < 2 {
        outcome.notes.push("With one core there is no floor to compare with.".into());
    }
    Ok(outcome)
}

/// Number of copies of a batch.
const BATCH: usize = 64;

const SUBMIT: &str = "submit";
const SUBMIT_MANY: &str = "submit, each of a batch of 64";
const CHECK: &str = "check";
const ROUND_TRIP: &str = "round trip of 8 bytes";
const FLOOR: &str = "floor: two hand-overs";

/// Measures submission, check, round trip and lower bound in every round.
fn small_costs(ferry: &Ferry, pair: &mut BufferPair, rounds: usize, outcome: &mut Outcome) {
    const REPEAT: u64 = 4000;
    let (floor, pair) = (HandoffBaseline::default(), RefCell::new(pair));
    let total = |ns: f64| Ok(Sample::of_total(ns));
    let samples = std::thread::scope(|scope| {
        let two_cores = affinity::allowed_cores().len() > 1;
        let other = std::thread::Builder::new();
        // Without a second thread there is no lower bound, and its keys are omitted.
        let answering =
            two_cores.then(|| other.spawn_scoped(scope, || floor.serve()).ok()).flatten();
        let mut candidates = vec![
            FnCandidate::timed(SUBMIT, Role::Memferry, |times| {
                total(submit_ns(ferry, &mut pair.borrow_mut(), 8, times))
            }),
            FnCandidate::timed(SUBMIT_MANY, Role::Memferry, |times| {
                total(submit_many_ns(ferry, &mut pair.borrow_mut(), times / BATCH as u64))
            }),
            FnCandidate::timed(CHECK, Role::Memferry, |_| {
                total(check_ns(ferry, &mut pair.borrow_mut()))
            }),
            FnCandidate::timed(ROUND_TRIP, Role::Memferry, |times| {
                total(roundtrip_ns(ferry, &mut pair.borrow_mut(), times))
            }),
        ];
        candidates.extend(answering.iter().map(|other| {
            FnCandidate::timed(FLOOR, Role::LowerBound, |times| {
                total(floor.roundtrip_ns(other.thread(), times))
            })
        }));
        let samples = Harness::new(Budget::fixed(rounds, REPEAT)).interleave(&mut candidates);
        if let Some(other) = &answering {
            floor.stop(other.thread());
        }
        samples
    });
    let keys = [
        (SUBMIT, "submit_ns"),
        (SUBMIT_MANY, "submit_many_ns"),
        (CHECK, "check_ns"),
        (ROUND_TRIP, "roundtrip_8b_ns"),
        (FLOOR, "floor_roundtrip_ns"),
    ];
    for (series, key) in keys {
        let values = samples.values(series, |sample| sample.total_ns);
        outcome.rows.push(Row::of_rounds("small costs", series, 0, "ns", &values));
        set(&mut outcome.summary, key, samples.median_ns(series));
    }
    set(&mut outcome.summary, "roundtrip_vs_floor", samples.ratio(FLOOR, ROUND_TRIP));
}

/// Measures the submission of 64 KiB to a ferry with the default settings.
fn large_submit(pair: &mut BufferPair, rounds: usize, outcome: &mut Outcome) -> anyhow::Result<()> {
    const SERIES: &str = "submit 64 KiB";
    let ferry = Ferry::new()?;
    let submit = |times| Ok(Sample::of_total(submit_ns(&ferry, pair, 64 << 10, times)));
    let mut candidates = [FnCandidate::timed(SERIES, Role::Memferry, submit)];
    let samples = Harness::new(Budget::fixed(rounds, 100)).interleave(&mut candidates);
    outcome.rows.extend(samples.time_rows("small costs", 0));
    set(&mut outcome.summary, "submit_64k_ns", samples.median_ns(SERIES));
    Ok(())
}

fn start(ferry: &Ferry, pair: &mut BufferPair, bytes: usize) -> Transfer {
    let (source, target) = (pair.source.as_ptr(), pair.target.as_ptr());
    let request = Request::copy(source, target, bytes).with(Options::new());
    // SAFETY: both buffers are borrowed here and live until after the wait of every caller below.
    unsafe { ferry.start_raw(request) }.expect("the ranges are valid")
}

/// Time inside the submitting call, with a channel that keeps up.
fn submit_ns(ferry: &Ferry, pair: &mut BufferPair, bytes: usize, repeat: u64) -> f64 {
    let mut inside = 0;
    let clock = clock_ns();
    for _ in 0..repeat {
        let begin = Instant::now();
        let transfer = start(ferry, pair, bytes);
        inside += begin.elapsed().as_nanos();
        transfer.wait().expect("memory of this process is good");
    }
    (inside as f64 / repeat as f64 - clock).max(0.0)
}

/// Time inside the call that submits a batch of copies of 8 bytes, for each of them, with a channel
/// that keeps up. Source and target of each have a cache line of their own.
fn submit_many_ns(ferry: &Ferry, pair: &mut BufferPair, repeat: u64) -> f64 {
    const LINE: usize = 64;
    let (source, target) = (pair.source.as_mut_slice(), pair.target.as_mut_slice());
    let (source, target) = (source.as_ptr(), target.as_mut_ptr());
    let item = |index: usize| {
        BatchItem::copy(source.wrapping_add(index * LINE), target.wrapping_add(index * LINE), 8)
    };
    let items: Vec<_> = (0..BATCH).map(item).collect();
    let mut inside = 0;
    let clock = clock_ns();
    for _ in 0..repeat {
        let begin = Instant::now();
        // SAFETY: both buffers are borrowed here and live until after the wait.
        let transfer = unsafe { ferry.start_many_raw(&items, Options::new()) };
        inside += begin.elapsed().as_nanos();
        let outcome = transfer.and_then(|transfer| transfer.wait());
        outcome.expect("the ranges are valid, and memory of this process is good");
    }
    (inside as f64 / repeat as f64 - clock).max(0.0) / BATCH as f64
}

/// Time that two reads of the clock add to a measurement.
pub(crate) fn clock_ns() -> f64 {
    const REPEAT: u32 = 2000;
    let total: u128 = (0..REPEAT).map(|_| Instant::now().elapsed().as_nanos()).sum();
    total as f64 / f64::from(REPEAT)
}

/// Time of a check for completion of a transfer in flight.
fn check_ns(ferry: &Ferry, pair: &mut BufferPair) -> f64 {
    let transfer = start(ferry, pair, 1 << 24);
    let (mut asked, begin) = (0u32, Instant::now());
    while !black_box(&transfer).is_done() {
        asked += 1;
    }
    let took = begin.elapsed().as_nanos() as f64;
    transfer.wait().expect("memory of this process is good");
    took / f64::from(asked.max(1))
}

fn roundtrip_ns(ferry: &Ferry, pair: &mut BufferPair, repeat: u64) -> f64 {
    let begin = Instant::now();
    for _ in 0..repeat {
        start(ferry, pair, 8).wait().expect("memory of this process is good");
    }
    begin.elapsed().as_nanos() as f64 / repeat as f64
}

/// Two words on cache lines of their own, exchanged by two threads that do nothing else.
#[derive(Default)]
struct HandoffBaseline {
    request: PaddedWord,
    reply: PaddedWord,
}

#[derive(Default)]
#[repr(align(128))]
struct PaddedWord(AtomicU64);

/// Values that make the replying thread sleep until the next measurement, or exit.
const SLEEP: u64 = 1 << 62;
const STOP: u64 = 1 << 63;

impl HandoffBaseline {
    fn roundtrip_ns(&self, other: &Thread, repeat: u64) -> f64 {
        const WARM_UP: u64 = 100;
        let mut first = (self.reply.0.load(Ordering::Acquire) & !SLEEP) + 1;
        // A few round trips wake the other thread before the measured ones. The word changes before
        // the unpark, else the thread would sleep again.
        self.request.0.store(first, Ordering::Release);
        other.unpark();
        for _ in 0..WARM_UP {
            self.send(first);
            first += 1;
        }
        first -= 1;
        let begin = Instant::now();
        for turn in 0..repeat {
            self.send(first + 1 + turn);
        }
        let took = begin.elapsed().as_nanos() as f64;
        self.request.0.store((first + repeat) | SLEEP, Ordering::Release);
        took / repeat as f64
    }

    fn send(&self, value: u64) {
        self.request.0.store(value, Ordering::Release);
        while self.reply.0.load(Ordering::Acquire) != value {
            spin_loop();
        }
    }

    fn serve(&self) {
        let mut last = 0;
        loop {
            let value = self.request.0.load(Ordering::Acquire);
            if value & STOP != 0 {
                return;
            }
            if value & SLEEP != 0 {
                // The thread releases its core to the channel under test.
                std::thread::park();
            } else if value != last {
                last = value;
                self.reply.0.store(value, Ordering::Release);
            } else {
                spin_loop();
            }
        }
    }

    fn stop(&self, other: &Thread) {
        self.request.0.store(STOP, Ordering::Release);
        other.unpark();
    }
}

/// Splits the time of one copy at four points: submitted, first byte visible, last byte visible,
/// completion detected.
fn split(ferry: &Ferry, pair: &mut BufferPair, bytes: usize, rounds: usize) -> Vec<Row> {
    let series = ["submit", "hand-over until the first byte", "copy", "end seen"];
    let mut times: [Vec<f64>; 4] = Default::default();
    let repeat = rounds.max((1 << 16) / bytes.max(64)).min(400);
    for turn in 0..repeat {
        let mark = (turn % 255) as u8 + 1;
        pair.source.as_mut_slice()[..bytes].fill(mark);
        let target = pair.target.as_ptr();
        let seen = |offset: usize| {
            // SAFETY: the byte lies inside the target; a volatile read of a byte that an engine is
            // writing returns the old or the new value.
            while unsafe { target.add(offset).read_volatile() } != mark {
                spin_loop();
            }
            Instant::now()
        };
        // The fence completes the caller's stores to the source before the clock starts.
        fence(Ordering::SeqCst);
        let begin = Instant::now();
        let transfer = start(ferry, pair, bytes);
        let submitted = Instant::now();
        let first = seen(0);
        let last = seen(bytes - 1);
        while !transfer.is_done() {
            spin_loop();
        }
        let over = Instant::now();
        let points = [begin, submitted, first, last, over];
        for (index, time) in times.iter_mut().enumerate() {
            time.push((points[index + 1] - points[index]).as_nanos() as f64);
        }
    }
    (series.into_iter().zip(&times))
        .map(|(series, times)| Row::of_rounds("split", series, bytes as u64, "ns", times))
        .collect()
}
