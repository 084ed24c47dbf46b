//! Whether a caller that waits shares a copy of medium size with channels, or makes it alone, and whether
//! processors share a large copy of a faster engine.
//!
//! The measured limit, from which on copies are shared, is one for all data. Data in no cache is copied
//! faster by two cores from there on; data in the caller's caches moves to other cores and back, and
//! the caller alone may be faster up to several times that size. So it may be if other programs use the
//! channels' cores. Neither is known before the copy. So both ways are measured for each power of two of
//! the size, and the faster one is taken; now and then a few copies in a row are made the other way.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use memferry_sys::clock;

use super::share_pause::{SharePause, SharedChunks, SharedTimes};
use crate::learned::LearnedShare;
use crate::plan::ALWAYS_SHARED_BYTES;

/// The powers of two that are told apart; the last one stands for all larger ones.
const SIZES: usize = 32;
/// The copies of a thread and a size from one row of trials to the next.
pub(crate) const PERIOD: u32 = 512;
/// The periods from one row of trials to the next, if the other way is much slower.
pub(crate) const RARE: u32 = 8;
/// The most of them, however long a row takes.
pub(crate) const MAX_PAUSE: u32 = 64;
/// The copies of a row of trials.
pub(crate) const ROW: u32 = 16;
/// The copies after a change of the way that are not measured: the data of a program's buffers moves
/// between cores.
pub(crate) const MOVING: u32 = 12;
/// The copies before the first row of trials.
pub(crate) const FIRST: u32 = 32;
/// What sharing must gain, in percent of the time alone.
pub(crate) const MIN_GAIN_PERCENT: u64 = 5;
/// What it must gain to be chosen again.
pub(crate) const MIN_GAIN_AGAIN_PERCENT: u64 = 10;
/// What a row may take beyond as many copies of the usual way, in percent of the time until the next one:
/// its first copies wake channels, and move the data to other cores.
pub(crate) const MAX_ROW_PERCENT: u64 = 1;
/// The same numbers for copies that processors share with a faster engine: few, and long.
pub(crate) const HYBRID_PERIOD: u32 = 64;
pub(crate) const HYBRID_ROW: u32 = 4;
pub(crate) const HYBRID_MOVING: u32 = 1;
pub(crate) const HYBRID_FIRST: u32 = 4;

/// When the other way is tried.
#[derive(Debug, Clone, Copy)]
struct Rhythm {
    period: u32,
    row: u32,
    moving: u32,
    first: u32,
}

impl Rhythm {
    const OF_CALLER: Self = Self { period: PERIOD, row: ROW, moving: MOVING, first: FIRST };
    const OF_HYBRID: Self =
        Self { period: HYBRID_PERIOD, row: HYBRID_ROW, moving: HYBRID_MOVING, first: HYBRID_FIRST };

    /// Where a thread begins to count.
    fn start(self) -> u32 {
        self.period - self.row - self.first
    }

    /// The periods of copies with the usual time in which a row of trials with this time is made once.
    fn row_pause(self, row: u64, usual: u64) -> u32 {
        let excess = row.saturating_sub(usual.saturating_mul(u64::from(self.row)));
        let copies = excess.saturating_mul(100 / MAX_ROW_PERCENT) / usual.max(1);
        let periods = copies.div_ceil(u64::from(self.period));
        u32::try_from(periods).unwrap_or(MAX_PAUSE).clamp(1, MAX_PAUSE)
    }
}

/// Who copies with processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SharedWith {
    /// A caller that can make the copy alone.
    Caller,
    /// A caller that can make the copy alone, but whose times are not measured.
    UnmeasuredCaller,
    /// A faster engine, to which the copy can be left.
    Engine,
}

/// How a copy is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyWay {
    /// By the caller or the faster engine alone.
    Alone,
    /// Together with channels of processors.
    Shared,
}

/// A decision, and whether its time is to be reported by [`ShareRates::record`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ShareChoice {
    pub(crate) way: CopyWay,
    with: SharedWith,
    is_measured: bool,
    /// Whether it is one of a row of trials.
    is_trial: bool,
}

impl ShareChoice {
    /// A choice that was not measured, and whose time is not.
    const fn of(way: CopyWay, with: SharedWith) -> Self {
        Self { way, with, is_measured: false, is_trial: false }
    }
}

thread_local! {
    /// The copies of this thread, by size. Rows of trials are of one thread: another one has other data.
    static COPIES: [[ThreadCopies; SIZES]; 2] =
        const { [const { [const { ThreadCopies::new() }; SIZES] }; 2] };
}

/// What a thread counts for a size.
#[derive(Debug)]
struct ThreadCopies {
    /// The number of its copies.
    number: Cell<u32>,
    /// Its last row of trials, until that is judged.
    row: Cell<Option<Row>>,
}

/// A row of trials: all copies, those that are not measured included.
#[derive(Debug, Clone, Copy)]
struct Row {
    way: CopyWay,
    copies: u32,
    /// The sum of their times.
    time: u64,
}

impl ThreadCopies {
    const fn new() -> Self {
        Self { number: Cell::new(0), row: Cell::new(None) }
    }

    /// Counts a copy, and returns how many there were before.
    fn next(&self) -> u32 {
        self.number.replace(self.number.get().wrapping_add(1))
    }

    fn begin_row(&self, way: CopyWay) {
        self.row.set(Some(Row { way, copies: 0, time: 0 }));
    }

    /// Adds a copy to the row, unless another thread has changed the way since it began.
    fn add_trial(&self, way: CopyWay, time: u64) {
        let row = self.row.get().filter(|row| row.way == way);
        self.row.set(row.map(|row| Row {
            copies: row.copies + 1,
            time: row.time.saturating_add(time),
            ..row
        }));
    }

    /// The time of the row that has ended, if it is complete: of all its copies, made in this way.
    fn take_row(&self, way: CopyWay, copies: u32) -> Option<u64> {
        let row = self.row.take()?;
        (row.way == way && row.copies == copies).then_some(row.time)
    }
}

/// The measured times, for each power of two of the size.
#[derive(Debug)]
pub(crate) struct ShareRates {
    of_caller: [SizeRates; SIZES],
    of_hybrid: [SizeRates; SIZES],
    /// Set while channels hold copies up.
    pause: SharePause,
}

#[derive(Debug)]
struct SizeRates {
    rhythm: Rhythm,
    /// The times in picoseconds per byte; 0 before one was measured.
    alone: AtomicU64,
    shared: AtomicU64,
    /// Whether the caller copies alone. It changes at the end of a row of trials only.
    is_alone: AtomicBool,
    /// The time of that way when it was chosen.
    chosen_at: AtomicU64,
    /// The periods after which the last complete row of a thread has taken no more than
    /// [`MAX_ROW_PERCENT`] of the time.
    row_pause: AtomicU32,
}

impl ShareRates {
    pub(crate) fn new() -> Self {
        let rates = |rhythm| std::array::from_fn(|_| SizeRates::new(rhythm));
        Self {
            of_caller: rates(Rhythm::OF_CALLER),
            of_hybrid: rates(Rhythm::OF_HYBRID),
            pause: SharePause::default(),
        }
    }

    /// The sizes of which both ways were measured of copies by a caller.
    pub(crate) fn learned(&self) -> Vec<LearnedShare> {
        let rates = self.of_caller.iter().enumerate().filter_map(|(power, size)| {
            let [alone, shared] = size.rates();
            (alone > 0 && shared > 0).then(|| LearnedShare {
                min_bytes: 1 << power,
                alone_ns_per_byte: alone as f64 / 1000.0,
                shared_ns_per_byte: shared as f64 / 1000.0,
                is_alone: size.is_alone.load(Ordering::Relaxed),
            })
        });
        rates.collect()
    }

    /// Decides about a copy. Callers share those from [`ALWAYS_SHARED_BYTES`] on unless there is a pause.
    pub(crate) fn decide(&self, bytes: u64, with: SharedWith) -> ShareChoice {
        if with != SharedWith::Engine && self.pause.is_on(clock::now_ns) {
            return ShareChoice::of(CopyWay::Alone, with);
        }
        match with {
            SharedWith::Caller if bytes < ALWAYS_SHARED_BYTES => {}
            SharedWith::Engine => {}
            _ => return ShareChoice::of(CopyWay::Shared, with),
        }
        self.with_rates(bytes, with, |rates, copies| ShareChoice { with, ..rates.decide(copies) })
    }

    /// Records the time of a copy of this thread.
    pub(crate) fn record(&self, bytes: u64, choice: ShareChoice, took: Duration) {
        if choice.is_measured || choice.is_trial {
            let measured = (took.as_nanos() as u64).saturating_mul(1000) / bytes.max(1);
            self.with_rates(bytes, choice.with, |rates, copies| {
                rates.record(copies, choice, measured.max(1));
            });
        }
    }

    fn with_rates<R>(
        &self,
        bytes: u64,
        with: SharedWith,
        act: impl FnOnce(&SizeRates, &ThreadCopies) -> R,
    ) -> R {
        let (size, is_hybrid) = (size_of_copy(bytes), with == SharedWith::Engine);
        let rates = if is_hybrid { &self.of_hybrid } else { &self.of_caller };
        COPIES.with(|copies| act(&rates[size], &copies[usize::from(is_hybrid)][size]))
    }

    /// Records a shared copy.
    pub(crate) fn record_shared(&self, chunks: SharedChunks, times: SharedTimes) {
        self.pause.record(chunks, times, clock::now_ns());
    }
}

fn size_of_copy(bytes: u64) -> usize {
    (bytes.max(1).ilog2() as usize).min(SIZES - 1)
}

impl SizeRates {
    fn new(rhythm: Rhythm) -> Self {
        let [alone, shared, chosen_at] = Default::default();
        let (is_alone, row_pause) = Default::default();
        Self { rhythm, alone, shared, is_alone, chosen_at, row_pause }
    }

    fn decide(&self, copies: &ThreadCopies) -> ShareChoice {
        let Rhythm { period, row, moving, .. } = self.rhythm;
        let start = self.rhythm.start();
        let number = copies.next().wrapping_add(start);
        let turn = number % period;
        if turn == 0 {
            let [_, other] = self.usual_and_other();
            self.choose(copies.take_row(other, row));
        }
        let [usual, other] = self.usual_and_other();
        match turn.checked_sub(period - row) {
            Some(trial) if (number / period).is_multiple_of(self.pause()) => {
                if trial == 0 {
                    copies.begin_row(other);
                }
                let is_measured = trial >= moving;
                ShareChoice {
                    is_measured,
                    is_trial: true,
                    ..ShareChoice::of(other, SharedWith::Caller)
                }
            }
            // The first copies of a thread have to wake channels and to fetch their data.
            _ => {
                let is_measured = turn >= moving && !(start..start + moving).contains(&number);
                ShareChoice { is_measured, ..ShareChoice::of(usual, SharedWith::Caller) }
            }
        }
    }

    /// The way that is taken, and the one that is tried.
    fn usual_and_other(&self) -> [CopyWay; 2] {
        match self.is_alone.load(Ordering::Relaxed) {
            true => [CopyWay::Alone, CopyWay::Shared],
            false => [CopyWay::Shared, CopyWay::Alone],
        }
    }

    /// The times of both ways.
    fn rates(&self) -> [u64; 2] {
        [&self.alone, &self.shared].map(|rate| rate.load(Ordering::Relaxed))
    }

    /// The periods from one row of trials to the next. The way that is not taken is tried rarely if it is
    /// much slower, or if trying it is.
    fn pause(&self) -> u32 {
        let [alone, shared] = self.rates();
        if alone.min(shared) == 0 {
            return 1;
        }
        let usual = if differs(alone, shared) { RARE } else { 1 };
        usual.max(self.row_pause.load(Ordering::Relaxed))
    }

    /// Chooses the faster way, as far as it is known. Sharing takes the time of another core, so it must
    /// gain something, and more to be chosen again. `row` is the time of the row of trials of the other way
    /// that has ended, if it is complete.
    fn choose(&self, row: Option<u64>) {
        let [alone, shared] = self.rates();
        let is_alone = self.is_alone.load(Ordering::Relaxed);
        let usual = if is_alone { alone } else { shared };
        if alone == 0 || shared == 0 {
            return self.chosen_at.store(usual, Ordering::Relaxed);
        }
        let gain = if is_alone { MIN_GAIN_AGAIN_PERCENT } else { MIN_GAIN_PERCENT };
        let now_alone = 100 * alone < (100 + gain) * shared;
        if now_alone != is_alone {
            self.row_pause.store(1, Ordering::Relaxed);
        } else if let Some(row) = row {
            self.row_pause.store(self.rhythm.row_pause(row, usual), Ordering::Relaxed);
        }
        let chosen_at = self.chosen_at.load(Ordering::Relaxed);
        if now_alone == is_alone && chosen_at > 0 && differs(usual, chosen_at) {
            // The data is somewhere else now, and the other time was measured there.
            let other = if is_alone { &self.shared } else { &self.alone };
            other.store(0, Ordering::Relaxed);
        }
        self.is_alone.store(now_alone, Ordering::Relaxed);
        self.chosen_at.store(if now_alone { alone } else { shared }, Ordering::Relaxed);
    }

    fn record(&self, copies: &ThreadCopies, choice: ShareChoice, measured: u64) {
        if choice.is_trial {
            copies.add_trial(choice.way, measured);
        }
        if !choice.is_measured {
            return;
        }
        let rate = match choice.way {
            CopyWay::Alone => &self.alone,
            CopyWay::Shared => &self.shared,
        };
        let after = match rate.load(Ordering::Relaxed) {
            0 => measured,
            // A copy that was interrupted for long changes little.
            before => (3 * before + measured.clamp(before / 2, 2 * before)).div_ceil(4),
        };
        rate.store(after, Ordering::Relaxed);
    }
}

/// Whether one of two times is a third longer than the other.
fn differs(one: u64, other: u64) -> bool {
    10 * one.max(other) > 13 * one.min(other)
}

#[cfg(test)]
mod tests;
