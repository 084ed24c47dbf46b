//! How long blocking copies are not shared after a channel has held one up.
//!
//! If other programs use the cores, sharing costs more than it gains, in one of two ways. The thread of a
//! channel may have no core but the caller's, which then waits while the channel copies and polls. Or that
//! thread loses its core in the middle of a chunk: the caller waits until it has one again, for
//! milliseconds, and cannot take the chunk back, because the thread would write to the target later.
//! The caller sees the first by the chunks that were executed on its core, and the second by the time:
//! from the chunks that it has copied it knows its own speed, and so what the copy would have taken
//! without channels. What it has lost, it loses no second time for [`PAUSE_FACTOR`] times as long, so all
//! losses together are a small part of the time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The times of what was lost for which copies are not shared.
pub(crate) const PAUSE_FACTOR: u64 = 64;
/// Less than this, in percent of the caller's time alone, is no loss: the caller's speed is not the same
/// in every chunk.
pub(crate) const MIN_LOSS_PERCENT: u64 = 25;

/// Who executed the chunks of a shared copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedChunks {
    pub(crate) all: u64,
    /// Those that the caller has executed.
    pub(crate) own: u64,
    /// Those that channels have executed on the caller's core.
    pub(crate) on_caller_core: u64,
}

/// The times of a shared copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedTimes {
    /// Until no chunk was left to claim.
    pub(crate) claimed: Duration,
    pub(crate) whole: Duration,
}

/// The nanoseconds that a shared copy took longer than by the caller alone; 0 if it took less, or if the
/// caller's speed is unknown. A copy that no other core took part in has lost all its time.
fn lost_ns(chunks: SharedChunks, times: SharedTimes) -> u64 {
    let [claimed, whole] = [times.claimed, times.whole].map(|time| time.as_nanos() as u64);
    if chunks.on_caller_core > 0 && chunks.own + chunks.on_caller_core >= chunks.all {
        return whole;
    }
    let Some(alone) = claimed.saturating_mul(chunks.all).checked_div(chunks.own) else { return 0 };
    let lost = whole.saturating_sub(alone);
    if lost < alone.saturating_mul(MIN_LOSS_PERCENT) / 100 { 0 } else { lost }
}

/// The pause of sharing. Written by callers that have lost something.
#[derive(Debug, Default)]
pub(crate) struct SharePause {
    /// The end by [`memferry_sys::clock::now_ns`]; 0 if there is none.
    until_ns: AtomicU64,
}

impl SharePause {
    /// Whether copies are not shared. `now_ns` is called during a pause only.
    pub(crate) fn is_on(&self, now_ns: impl FnOnce() -> u64) -> bool {
        let until_ns = self.until_ns.load(Ordering::Relaxed);
        if until_ns == 0 {
            return false;
        }
        let is_on = now_ns() < until_ns;
        if !is_on {
            // A pause that begins at the same time may be lost: its cause comes again.
            self.until_ns.store(0, Ordering::Relaxed);
        }
        is_on
    }

    /// Records a shared copy that ended at `now_ns`.
    pub(crate) fn record(&self, chunks: SharedChunks, times: SharedTimes, now_ns: u64) {
        let pause_ns = lost_ns(chunks, times).saturating_mul(PAUSE_FACTOR);
        if pause_ns > 0 {
            self.until_ns.fetch_max(now_ns.saturating_add(pause_ns), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records a copy of eight chunks of 10 µs each.
    fn record(pause: &SharePause, own: u64, waited_us: u64, now_ns: u64) {
        let claimed = Duration::from_micros(10 * own);
        let whole = claimed + Duration::from_micros(waited_us);
        let chunks = SharedChunks { all: 8, own, on_caller_core: 0 };
        pause.record(chunks, SharedTimes { claimed, whole }, now_ns);
    }

    #[test]
    fn a_copy_that_had_no_core_but_the_callers_pauses_sharing() {
        let whole = Duration::from_micros(80);
        for (own, on_caller_core, is_paused) in
            [(1, 7, true), (0, 8, true), (1, 6, false), (8, 0, false)]
        {
            let (pause, chunks) =
                (SharePause::default(), SharedChunks { all: 8, own, on_caller_core });
            pause.record(chunks, SharedTimes { claimed: whole, whole }, 5_000);
            let end = 5_000 + PAUSE_FACTOR * 80_000;
            assert_eq!(pause.is_on(|| end - 1), is_paused, "{chunks:?}");
        }
    }

    #[test]
    fn a_copy_that_a_channel_holds_up_pauses_sharing_in_proportion_to_the_loss() {
        for (own, waited_us, lost_us) in [(7, 3010, 3000), (4, 3040, 3000), (1, 170, 100)] {
            let (pause, begin) = (SharePause::default(), 5_000);
            record(&pause, own, waited_us, begin);
            let end = begin + PAUSE_FACTOR * 1000 * lost_us;
            assert!(pause.is_on(|| begin) && pause.is_on(|| end - 1), "{own} chunks");
            assert!(!pause.is_on(|| end), "{own} chunks");
            assert!(!pause.is_on(|| unreachable!("no pause is left")));
        }
    }

    #[test]
    fn a_copy_that_gained_by_sharing_pauses_nothing_however_long_the_caller_waited() {
        // Alone, it would have taken 80 µs.
        for (own, waited_us) in [(1, 70), (4, 10), (4, 40), (7, 10), (7, 29)] {
            let pause = SharePause::default();
            record(&pause, own, waited_us, 5_000);
            assert!(!pause.is_on(|| 0), "{own} chunks, {waited_us} µs");
        }
    }

    #[test]
    fn a_copy_of_which_the_caller_made_nothing_says_nothing() {
        let pause = SharePause::default();
        record(&pause, 0, 10_000, 5_000);
        assert!(!pause.is_on(|| 0));
    }

    #[test]
    fn a_short_pause_does_not_end_a_longer_one() {
        let pause = SharePause::default();
        record(&pause, 7, 3010, 0);
        record(&pause, 7, 110, 1000);
        assert!(pause.is_on(|| PAUSE_FACTOR * 3_000_000 - 1));
    }
}
