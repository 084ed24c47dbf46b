//! `copy-latency`: the time of a blocking copy, from small to large sizes, hot and cold (figure 4
//! of the paper on asynchronous memory operations).

use std::cell::RefCell;

use memferry::Ferry;
use memferry::sys::affinity;

use super::beside_load::{self, BusyLoops};
use crate::Progress;
use crate::harness::{
    Budget, BufferPair, ColdCursor, FnCandidate, Harness, Role, Samples, memcpy, min_or_nan, set,
};
use crate::results::outcome::Outcome;
use crate::results::size;
use crate::{Bench, Effort};

pub(crate) static BENCH: Bench = Bench::new(
    "copy-latency",
    "Blocking copies, small to large, hot and cold, against libc memcpy",
    run,
);

const MEMCPY: &str = "memcpy";
/// Bytes of the buffers for cold copies: together larger than the last-level cache.
const COLD_BYTES: usize = 256 << 20;
const SMALL: u64 = 1 << 20;
/// Sizes at which the overhead of the call dominates.
const TINY: [u64; 3] = [8, 64, 256];

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    let (hot, cold) = sizes(effort);
    let beside_load = beside_load::sizes(effort);
    let steps = hot.len() + cold.len() + beside_load::LOOPS.len() * beside_load.len() + 1;
    progress.start(steps as u64, &outcome.bench);
    progress.step("preparing buffers");
    let ferries = ferries(effort)?;
    let default = series(&ferries.last().expect("there is at least one").0);
    let mut worst_small = f64::INFINITY;
    let mut pair = BufferPair::new(COLD_BYTES)?;

    for bytes in TINY {
        let budget = budget(bytes as usize, effort);
        let times = interleave_hot(&ferries, &mut pair, bytes as usize, budget);
        outcome.rows.extend(times.time_rows("cost of a tiny copy", bytes));
        worst_small = worst_small.min(times.ratio(&default, MEMCPY));
    }
    for &bytes in &hot {
        progress.step(&format!("hot {}", size::format(bytes)));
        let budget = budget(bytes as usize, effort);
        let times = interleave_hot(&ferries, &mut pair, bytes as usize, budget);
        outcome.rows.extend(times.bandwidth_rows("hot", bytes, bytes));
        let ratio = times.ratio(&default, MEMCPY);
        if bytes <= SMALL {
            worst_small = worst_small.min(ratio);
        }
        let key = match bytes {
            0x1000 => "hot_4k_vs_memcpy",
            0x1_0000 => "hot_64k_vs_memcpy",
            0x10_0000 => "hot_1m_vs_memcpy",
            0x40_0000 => "hot_4m_vs_memcpy",
            0x400_0000 => "hot_64m_vs_memcpy",
            0x1000_0000 => "hot_256m_vs_memcpy",
            _ => continue,
        };
        set(&mut outcome.summary, key, ratio);
    }
    for &bytes in &cold {
        progress.step(&format!("cold {}", size::format(bytes)));
        let times = interleave_cold(&ferries, &mut pair, bytes as usize, effort);
        outcome.rows.extend(times.bandwidth_rows("cold", bytes, bytes));
        let ratio = times.ratio(&default, MEMCPY);
        if bytes <= SMALL {
            worst_small = worst_small.min(ratio);
        }
        if bytes == 4 << 20 {
            set(&mut outcome.summary, "cold_4m_vs_memcpy", ratio);
        }
    }
    set(&mut outcome.summary, "worst_small_vs_memcpy", worst_small);
    let only_default = &ferries[ferries.len() - 1..];
    let mut ratios = Vec::new();
    for count in beside_load::LOOPS {
        let _loops = BusyLoops::start(count)?;
        for &bytes in &beside_load {
            progress.step(&format!("beside load {count}, {}", size::format(bytes)));
            let budget = beside_load::budget(effort);
            let times = interleave_hot(only_default, &mut pair, bytes as usize, budget);
            let figure = format!("hot, beside load ({count} busy)");
            outcome.rows.extend(times.bandwidth_rows(&figure, bytes, bytes));
            ratios.push(times.ratio(&default, MEMCPY));
        }
    }
    set(&mut outcome.summary, "beside_load_worst_vs_memcpy", min_or_nan(ratios));
    outcome.notes.push(format!(
        "Ratios are for {default}, the default number of channels. worst_small_vs_memcpy is \
         the smallest ratio over all hot and cold sizes up to 1 MiB, the tiny ones included, \
         where a tenth of a nanosecond shows. Channels are awake, as they are between copies \
         that follow each other."
    ));
    outcome.notes.push(
        "Beside load: one or two programs that compute without end run at the same time, bound to no \
         core. beside_load_worst_vs_memcpy is the smallest ratio of these rows."
            .into(),
    );
    outcome.notes.push(
        "memcpy is libc's, on one core; large copies of ours use the channels' cores too and \
         write around the caches, where libc does so only from a size that it derives from the \
         last-level cache. Both have ordinary pages. Cold means two 256 MiB buffers walked \
         from end to end."
            .into(),
    );
    Ok(outcome)
}

fn sizes(effort: Effort) -> (Vec<u64>, Vec<u64>) {
    let powers = |from: u32, to: u32, step: usize| {
        (from..=to).step_by(step).map(|shift| 1u64 << shift).collect::<Vec<_>>()
    };
    match effort {
        Effort::Brief => (
            vec![1 << 10, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 64 << 20, 256 << 20],
            vec![4 << 10, 64 << 10, 1 << 20, 4 << 20],
        ),
        Effort::Quick => (powers(10, 28, 2), powers(10, 26, 2)),
        Effort::Full => (powers(10, 28, 1), powers(10, 26, 1)),
    }
}

/// Ferries with 1, 2, 4, … channels, then one with the default number of channels.
fn ferries(effort: Effort) -> anyhow::Result<Vec<(usize, Ferry)>> {
    let default = Ferry::new()?;
    let most = default.plan_context().engines[0].channels;
    let spare = affinity::allowed_cores().len().saturating_sub(1).max(1);
    let mut ferries = Vec::new();
    if effort != Effort::Brief {
        let mut channels = 1;
        while channels < most.min(spare) {
            ferries.push((channels, Ferry::builder().channels(channels).build()?));
            channels *= 2;
        }
    }
    ferries.push((most, default));
    Ok(ferries)
}

fn series(channels: &usize) -> String {
    match channels {
        1 => "memferry, 1 channel".into(),
        many => format!("memferry, {many} channels"),
    }
}

fn budget(bytes: usize, effort: Effort) -> Budget {
    let usual = Budget::of_calls(effort);
    let rounds = match bytes {
        // Ratios near 1 need more rounds to differ from noise, and these copies are short.
        0..=0x10_0000 => 2 * usual.rounds + 1,
        // The longest copies need no more than 9 rounds.
        0x400_0000.. => usual.rounds.min(9),
        _ => usual.rounds,
    };
    Budget { rounds, ..usual }
}

/// A copy function. Candidates differ only in this function, so the comparison is between the calls
/// and not between the loops around them.
type CopyFn = fn(&Ferry, &[u8], &mut [u8]);

#[inline(never)]
fn by_memcpy(_: &Ferry, source: &[u8], target: &mut [u8]) {
    memcpy(target, source);
}

#[inline(never)]
fn by_ferry(ferry: &Ferry, source: &[u8], target: &mut [u8]) {
    if ferry.copy(source, target).is_err() {
        unreachable!("the slices are of equal length");
    }
}

/// Checks that every candidate copies every byte. Not timed.
fn check(ferries: &[(usize, Ferry)], pair: &mut BufferPair, bytes: usize) {
    let source = &pair.source.as_slice()[..bytes];
    for (series, _, ferry, copy) in candidates(ferries) {
        let target = &mut pair.target.as_mut_slice()[..bytes];
        target.fill(0);
        copy(ferry, source, target);
        assert!(source == target, "{series} got a byte wrong");
    }
}

/// memcpy and every ferry, each with its series.
fn candidates(ferries: &[(usize, Ferry)]) -> impl Iterator<Item = (String, Role, &Ferry, CopyFn)> {
    let peer = (MEMCPY.to_owned(), Role::Peer, &ferries[0].1, by_memcpy as CopyFn);
    let ours = ferries
        .iter()
        .map(|(channels, ferry)| (series(channels), Role::Memferry, ferry, by_ferry as CopyFn));
    std::iter::once(peer).chain(ours)
}

/// Candidates that copy between the same two buffers again and again.
fn interleave_hot(
    ferries: &[(usize, Ferry)],
    pair: &mut BufferPair,
    bytes: usize,
    budget: Budget,
) -> Samples {
    check(ferries, pair, bytes);
    let source = &pair.source.as_slice()[..bytes];
    let target = RefCell::new(&mut pair.target.as_mut_slice()[..bytes]);
    let target = &target;
    let candidates = candidates(ferries).map(|(series, role, ferry, copy)| {
        FnCandidate::new(series, role, move || copy(ferry, source, &mut target.borrow_mut()))
    });
    Harness::new(budget).interleave(&mut candidates.collect::<Vec<_>>())
}

/// Candidates that copy at another position of two large buffers each time.
fn interleave_cold(
    ferries: &[(usize, Ferry)],
    pair: &mut BufferPair,
    bytes: usize,
    effort: Effort,
) -> Samples {
    let source = pair.source.as_slice();
    let place = RefCell::new((ColdCursor::over(COLD_BYTES), pair.target.as_mut_slice()));
    let place = &place;
    let candidates = candidates(ferries).map(|(series, role, ferry, copy)| {
        FnCandidate::new(series, role, move || {
            let (walk, target) = &mut *place.borrow_mut();
            let range = walk.next(bytes);
            copy(ferry, &source[range.clone()], &mut target[range]);
        })
    });
    Harness::new(budget(bytes, effort)).interleave(&mut candidates.collect::<Vec<_>>())
}
