//! Tests with copies whose times are given.

use super::*;

/// The copies of the only thread.
struct Copies {
    rates: SizeRates,
    thread: ThreadCopies,
}

impl Copies {
    fn new() -> Self {
        Self { rates: SizeRates::new(Rhythm::OF_CALLER), thread: ThreadCopies::new() }
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
    let (rates, one, other) =
        (SizeRates::new(Rhythm::OF_CALLER), ThreadCopies::new(), ThreadCopies::new());
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
    assert_eq!(thread.take_row(CopyWay::Alone, ROW), None, "a copy failed");
    thread.begin_row(CopyWay::Alone);
    add(ROW - 1, CopyWay::Alone);
    add(1, CopyWay::Shared);
    assert_eq!(thread.take_row(CopyWay::Alone, ROW), None, "the way has changed");
    thread.begin_row(CopyWay::Alone);
    add(ROW, CopyWay::Alone);
    assert_eq!(thread.take_row(CopyWay::Alone, ROW), Some(300 * u64::from(ROW)));
    assert_eq!(thread.take_row(CopyWay::Alone, ROW), None, "it is judged once");
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
    let alone = ShareChoice::of(CopyWay::Alone, SharedWith::Caller);
    let long = ShareChoice { is_measured: true, ..alone };
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

#[test]
fn a_large_copy_is_left_to_the_engine_that_is_faster_without_processors_after_few_copies() {
    const TRIED: u32 = HYBRID_FIRST + HYBRID_ROW;
    for (alone, shared, expected) in [(250, 380, 2 * HYBRID_ROW), (380, 250, HYBRID_ROW)] {
        let mut copies =
            Copies { rates: SizeRates::new(Rhythm::OF_HYBRID), thread: ThreadCopies::new() };
        let by_engine = copies.copy(TRIED + HYBRID_ROW, times(alone, shared));
        assert_eq!(by_engine, expected, "{:?}", copies.rates);
    }
}

#[test]
fn copies_with_an_engine_are_told_apart_from_those_with_the_caller() {
    const BYTES: u64 = 2 << 20;
    let rates = ShareRates::new();
    for _ in 0..HYBRID_PERIOD {
        let choice = rates.decide(BYTES, SharedWith::Engine);
        let took = if choice.way == CopyWay::Alone { 100 } else { 300 };
        rates.record(BYTES, choice, Duration::from_micros(took));
    }
    assert_eq!(rates.decide(BYTES, SharedWith::Engine).way, CopyWay::Alone);
    assert_eq!(rates.decide(BYTES, SharedWith::Caller).way, CopyWay::Shared);
}

#[test]
fn copies_of_every_size_are_made_alone_while_channels_have_no_core_of_their_own() {
    let rates = ShareRates::new();
    let way = |bytes, with| rates.decide(bytes, with).way;
    let sizes = [128 << 10, ALWAYS_SHARED_BYTES, 1 << 40];
    assert!(sizes.iter().all(|&bytes| way(bytes, SharedWith::Caller) == CopyWay::Shared));
    let chunks = SharedChunks { all: 8, own: 1, on_caller_core: 7 };
    // The pause is too long for this test to see its end.
    let whole = Duration::from_secs(3600);
    rates.record_shared(chunks, SharedTimes { claimed: whole, whole });
    for with in [SharedWith::Caller, SharedWith::UnmeasuredCaller] {
        assert!(sizes.iter().all(|&bytes| way(bytes, with) == CopyWay::Alone), "{with:?}");
    }
    assert_eq!(way(1 << 30, SharedWith::Engine), CopyWay::Shared);
}
