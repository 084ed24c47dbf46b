//! Waiting for the device: sleeping by what it should take, and learning how late it is.

use std::time::Duration;

use memferry_sys::clock;
use memferry_sys::sync::spin_hint;

use super::channel::{MOST_FLIGHTS, Worker};
use super::flight::Flight;

impl Worker {
    /// Whether the device has certainly not come to a piece yet. Asking it takes longer than looking
    /// at the clock.
    pub(super) fn is_early(&self, flight: &Flight) -> bool {
        const CERTAIN_NS: u64 = 100_000;
        !flight.is_staged() && clock::now_ns() + CERTAIN_NS < flight.expected_ns
    }

    /// Learns from a piece that is over how far the device is behind. Nothing is known of when it
    /// came to one that was done at the first look: then it may be less.
    pub(super) fn learn(&mut self, flight: &Flight) {
        if self.flights.is_empty() {
            (self.lag_ns, self.busy_until_ns) = (0, [0; 2]);
        } else if self.was_late {
            self.lag_ns = clock::now_ns().saturating_sub(flight.expected_ns);
        } else {
            self.lag_ns -= self.lag_ns / 8;
        }
        self.was_late = false;
    }

    /// Sleeps until about half of the pieces that are under way should be done, or most of them if no
    /// more will come; there are enough of them to keep the device busy meanwhile. The end of the last
    /// one is looked for without a pause. New descriptors end the sleep if there is room for them.
    pub(super) fn wait_for_device(&mut self) {
        const SHORT_NS: u64 = 20_000;
        const LATE_NS: u64 = 20_000;
        const LATE_STAGED_NS: u64 = 200_000;
        const NAP_NS: u64 = 20_000;
        const LONGEST_NAP_NS: u64 = 50_000;
        const LONGEST: Duration = Duration::from_millis(2);
        let (Some(first), Some(last)) = (self.flights.front(), self.flights.back()) else { return };
        // With nothing left to begin there is no hurry.
        let is_begun = self.open.back().is_none_or(|open| open.is_begun);
        let last_index = self.flights.len() - 1;
        let awaited = if is_begun { last_index - last_index / 4 } else { last_index / 2 };
        let expected_ns = self.flights[awaited].expected_ns + self.lag_ns;
        // A nap is short beside what the device still has to do.
        let rest_ns = last.expected_ns.saturating_sub(first.expected_ns);
        let nap = Duration::from_nanos((rest_ns / 8).clamp(NAP_NS, LONGEST_NAP_NS));
        // Nor is there time to sleep where this thread is what the device waits for.
        let is_staged = first.is_staged();
        let is_urgent = is_staged || self.flights.len() == 1;
        let late_ns = if is_staged { LATE_STAGED_NS } else { LATE_NS };
        let now = clock::now_ns();
        let ready = || {
            is_begun && self.flights.len() < MOST_FLIGHTS && self.inside.ring.has_next(self.taken)
        };
        let left = expected_ns.saturating_sub(now);
        if left > SHORT_NS && !is_staged {
            let left = Duration::from_nanos(left - SHORT_NS / 2).min(LONGEST);
            self.inside.sleep(Some(left), ready);
        } else if !is_urgent || now > expected_ns + late_ns {
            self.was_late = true;
            self.inside.sleep(Some(nap), ready);
        } else {
            for _ in 0..64 {
                spin_hint();
            }
        }
    }

    /// Waits until there is work (`true`), or the channel is closed and empty.
    pub(super) fn wait_for_work(&self) -> bool {
        let ring = &self.inside.ring;
        let over = || ring.is_closed() && ring.submitted() == self.taken;
        loop {
            if ring.has_next(self.taken) {
                return true;
            }
            if over() {
                return false;
            }
            self.inside.sleep(None, || ring.has_next(self.taken) || over());
        }
    }
}
