//! Whether a caller that waits shares a copy of medium size with channels, or makes it alone.
//!
//! The measured limit, from which on copies are shared, is one for all data. Data in no cache is copied
//! faster by two cores from there on; data in the caller's caches moves to other cores and back, and
//! the caller alone may be faster up to several times that size. So it may be if other programs use the
//! channels' cores. Neither is known before the copy. So both ways are measured for each power of two of
//! the size, and the faster one is taken; now and then a few copies in a row are made the other way.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::learned::LearnedShare;
use crate::plan::ALWAYS_SHARED_BYTES;

const SIZES: usize = ALWAYS_SHARED_BYTES.ilog2() as usize;
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
/// Where a thread begins to count.
const START: u32 = PERIOD - ROW - FIRST;

/// How a copy is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyWay {
    /// By the caller alone.
    Alone,
    /// By the caller and channels.
    Shared,
}

/// A decision, and whether its time is to be reported by [`ShareRates::record`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ShareChoice {
    pub(crate) way: CopyWay,
    is_measured: bool,
    /// Whether it is one of a row of trials.
    is_trial: bool,
}

thread_local! {
    /// The copies of this thread, by size. Rows of trials are of one thread: another one has other data.
    static COPIES: [ThreadCopies; SIZES] = const { [const { ThreadCopies::new() }; SIZES] };
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
        Self { number: Cell::new(START), row: Cell::new(None) }
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
    fn take_row(&self, way: CopyWay) -> Option<u64> {
        let row = self.row.take()?;
        (row.way == way && row.copies == ROW).then_some(row.time)
    }
}

/// The measured times, for each power of two of the size.
#[derive(Debug)]
pub(crate) struct ShareRates([SizeRates; SIZES]);

#[derive(Debug, Default)]
struct SizeRates {
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
        Self(std::array::from_fn(|_| SizeRates::default()))
    }

    /// The sizes of which both ways were measured.
    pub(crate) fn learned(&self) -> Vec<LearnedShare> {
        let rates = self.0.iter().enumerate().filter_map(|(power, size)| {
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

    /// Decides about a copy of less than [`ALWAYS_SHARED_BYTES`].
    pub(crate) fn decide(&self, bytes: u64) -> ShareChoice {
        let size = size_of_copy(bytes);
        COPIES.with(|copies| self.0[size].decide(&copies[size]))
    }

    /// Records the time of a copy of this thread.
    pub(crate) fn record(&self, bytes: u64, choice: ShareChoice, took: Duration) {
        let measured = (took.as_nanos() as u64).saturating_mul(1000) / bytes.max(1);
        let size = size_of_copy(bytes);
        COPIES.with(|copies| self.0[size].record(&copies[size], choice, measured.max(1)));
    }
}

fn size_of_copy(bytes: u64) -> usize {
    (bytes.max(1).ilog2() as usize).min(SIZES - 1)
}

impl SizeRates {
    fn decide(&self, copies: &ThreadCopies) -> ShareChoice {
        let number = copies.next();
        let turn = number % PERIOD;
        if turn == 0 {
            let [_, other] = self.usual_and_other();
            self.choose(copies.take_row(other));
        }
        let [usual, other] = self.usual_and_other();
        match turn.checked_sub(PERIOD - ROW) {
            Some(trial) if (number / PERIOD).is_multiple_of(self.pause()) => {
                if trial == 0 {
                    copies.begin_row(other);
                }
                ShareChoice { way: other, is_measured: trial >= MOVING, is_trial: true }
            }
            // The first copies of a thread have to wake channels and to fetch their data.
            _ => {
                let is_settled = turn >= MOVING && !(START..START + MOVING).contains(&number);
                ShareChoice { way: usual, is_measured: is_settled, is_trial: false }
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
            self.row_pause.store(row_pause(row, usual), Ordering::Relaxed);
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

/// The periods of copies with the usual time in which a row of trials with this time is made once.
fn row_pause(row: u64, usual: u64) -> u32 {
    let excess = row.saturating_sub(usual.saturating_mul(u64::from(ROW)));
    let copies = excess.saturating_mul(100 / MAX_ROW_PERCENT) / usual.max(1);
    u32::try_from(copies.div_ceil(u64::from(PERIOD))).unwrap_or(MAX_PAUSE).clamp(1, MAX_PAUSE)
}

/// Whether one of two times is a third longer than the other.
fn differs(one: u64, other: u64) -> bool {
    10 * one.max(other) > 13 * one.min(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The copies of the only thread.
    struct Copies {
        rates: SizeRates,
        thread: ThreadCopies,
    }

    impl Copies {
        fn new() -> Self {
            Self { rates: SizeRates::default(), thread: ThreadCopies::new() }
        }

        fn copy(&mut self, copies: u32, took: impl Fn(u32, CopyWay) -> u64) -> u32 {
            copy(&self.rates, &self.thread, copies, took)
        }
    }

    /// Makes copies of a thread that take the times that `took` tells for their number and way, and
    /// returns how many were made alone.
    fn copy(
        rates: &SizeRates,
        thread: &ThreadCopies,
        copies: u32,
        took: impl Fn(u32, CopyWay) -> u64,
    ) -> u32 {
        let copy = |number| {
            let choice = rates.decide(thread);
            rates.record(thread, choice, took(number, choice.way));
            u32::from(choice.way == CopyWay::Alone)
        };
        (0..copies).map(copy).sum()
    }

    fn times(alone: u64, shared: u64) -> impl Fn(u32, CopyWay) -> u64 {
        move |_, way| if way == CopyWay::Alone { alone } else { shared }
    }

    #[test]
    fn copies_are_shared_before_anything_is_measured() {
        assert_eq!(Copies::new().copy(FIRST, times(1, 1000)), 0);
    }

    #[test]
    fn the_faster_way_is_taken_and_the_other_is_tried_now_and_then() {
        for (alone, shared, expected) in [(300, 360, PERIOD - ROW), (360, 300, ROW)] {
            let mut copies = Copies::new();
            copies.copy(2 * PERIOD, times(alone, shared));
            assert_eq!(copies.copy(PERIOD, times(alone, shared)), expected);
        }
    }

    #[test]
    fn what_is_much_slower_is_tried_rarely() {
        for (alone, shared, expected) in [(300, 600, RARE * PERIOD - ROW), (600, 300, ROW)] {
            let mut copies = Copies::new();
            copies.copy(2 * PERIOD, times(alone, shared));
            assert_eq!(copies.copy(RARE * PERIOD, times(alone, shared)), expected);
        }
    }

    /// The times of copies of which the first that are shared in a row take long.
    fn slowly_shared(first: u64) -> impl Fn(u32, CopyWay) -> u64 {
        let last = Cell::new((CopyWay::Shared, 0));
        move |_, way| {
            let (before, since) = last.get();
            let since = if before == way { since + 1 } else { 0 };
            last.set((way, since));
            match way {
                CopyWay::Alone => 300,
                CopyWay::Shared if since < MOVING => first,
                CopyWay::Shared => 330,
            }
        }
    }

    #[test]
    fn rows_of_trials_take_a_hundredth_of_the_time_however_long_their_first_copies_take() {
        for (first, periods) in [(330, 1), (900, 4), (3000, 21), (30_000, 64)] {
            let took = slowly_shared(first);
            let mut copies = Copies::new();
            copies.copy(MAX_PAUSE * PERIOD, &took);
            let shared = MAX_PAUSE * PERIOD - copies.copy(MAX_PAUSE * PERIOD, &took);
            assert!(shared >= ROW, "it is tried again");
            assert!(shared <= (MAX_PAUSE / periods + 1) * ROW, "{shared} with {first}");
        }
    }

    #[test]
    fn a_row_of_trials_counts_as_a_whole_although_another_thread_begins_one() {
        let (rates, one, other) = (SizeRates::default(), ThreadCopies::new(), ThreadCopies::new());
        let took = slowly_shared(900);
        // Both ways are known, and the next copies of both threads are a row.
        copy(&rates, &one, FIRST + 2 * PERIOD, &took);
        rates.row_pause.store(1, Ordering::Relaxed);
        other.number.set(one.number.get());
        copy(&rates, &one, ROW - 2, &took);
        copy(&rates, &other, 1, times(300, 330));
        // The last two of the row, and the first one of the next period.
        copy(&rates, &one, 3, &took);
        assert!(rates.row_pause.load(Ordering::Relaxed) > 1, "{rates:?}");
        // The other row ends early for that, and says nothing.
        copy(&rates, &other, ROW, times(300, 330));
        assert!(rates.row_pause.load(Ordering::Relaxed) > 1, "{rates:?}");
    }

    #[test]
    fn an_incomplete_row_of_trials_says_nothing() {
        let thread = ThreadCopies::new();
        let add = |count, way| (0..count).for_each(|_| thread.add_trial(way, 300));
        thread.begin_row(CopyWay::Alone);
        add(ROW - 1, CopyWay::Alone);
        assert_eq!(thread.take_row(CopyWay::Alone), None, "a copy failed");
        thread.begin_row(CopyWay::Alone);
        add(ROW - 1, CopyWay::Alone);
        add(1, CopyWay::Shared);
        assert_eq!(thread.take_row(CopyWay::Alone), None, "the way has changed");
        thread.begin_row(CopyWay::Alone);
        add(ROW, CopyWay::Alone);
        assert_eq!(thread.take_row(CopyWay::Alone), Some(300 * u64::from(ROW)));
        assert_eq!(thread.take_row(CopyWay::Alone), None, "it is judged once");
    }

    #[test]
    fn sharing_must_gain_something() {
        let mut copies = Copies::new();
        copies.copy(2 * PERIOD, times(300, 290));
        assert!(copies.rates.is_alone.load(Ordering::Relaxed));
    }

    #[test]
    fn copies_that_move_the_data_are_not_measured() {
        let last = Cell::new((CopyWay::Shared, 0));
        let took = |_, way| {
            let (before, since) = last.get();
            let since = if before == way { since + 1 } else { 0 };
            last.set((way, since));
            if since < MOVING { 3000 } else { 300 }
        };
        let mut copies = Copies::new();
        copies.copy(4 * PERIOD, took);
        assert_eq!(copies.rates.rates(), [300, 300]);
    }

    #[test]
    fn copies_that_are_often_interrupted_count_by_their_mean() {
        let mut copies = Copies::new();
        let took = |number, way| match way {
            CopyWay::Alone => 400,
            CopyWay::Shared if number % 2 == 0 => 200,
            CopyWay::Shared => 1000,
        };
        copies.copy(20 * PERIOD, took);
        assert!(copies.rates.is_alone.load(Ordering::Relaxed), "{:?}", copies.rates);
    }

    #[test]
    fn one_long_interruption_does_not_change_the_way() {
        let mut copies = Copies::new();
        copies.copy(2 * PERIOD, times(300, 360));
        let long = ShareChoice { way: CopyWay::Alone, is_measured: true, is_trial: false };
        copies.rates.record(&copies.thread, long, 1_000_000);
        copies.copy(PERIOD, times(300, 360));
        assert!(copies.rates.is_alone.load(Ordering::Relaxed));
    }

    #[test]
    fn the_way_follows_where_the_data_is() {
        let (hot, cold) = (times(300, 400), times(3000, 1600));
        let mut copies = Copies::new();
        for _ in 0..3 {
            copies.copy(4 * PERIOD, &hot);
            assert!(copies.rates.is_alone.load(Ordering::Relaxed), "{:?}", copies.rates);
            copies.copy(4 * PERIOD, &cold);
            assert!(!copies.rates.is_alone.load(Ordering::Relaxed), "{:?}", copies.rates);
        }
    }
}
