//! Waiting for the device: sleeping for the expected time, and learning the delay of the device.

use std::time::Duration;

use memferry_sys::clock;
use memferry_sys::sync::spin_hint;

use super::channel::{CudaWorker, MAX_IN_FLIGHT};
use super::in_flight::InFlightCopy;

impl CudaWorker {
    /// Whether the device certainly has not finished a copy. Reading the clock is faster than
    /// querying the driver.
    pub(super) fn is_too_early(&self, copy: &InFlightCopy) -> bool {
        const CERTAIN_NS: u64 = 100_000;
        !copy.is_staged() && clock::now_ns() + CERTAIN_NS < copy.expected_ns
    }

    /// Updates the delay of the device from a finished copy. If the copy was complete at the first
    /// poll, its end is unknown, and the delay may be smaller: it decays by 1/8.
    pub(super) fn update_lag(&mut self, copy: &InFlightCopy) {
        if self.in_flight.is_empty() {
            (self.lag_ns, self.busy_until_ns) = (0, [0; 2]);
        } else if self.was_late {
            self.lag_ns = clock::now_ns().saturating_sub(copy.expected_ns);
        } else {
            self.lag_ns -= self.lag_ns / 8;
        }
        self.was_late = false;
    }

    /// Sleeps until about half of the copies in flight should be done, or three quarters of them if
    /// no more will be issued; the others keep the device busy. The last one is polled without a
    /// pause. A new descriptor ends the sleep if there is space for it.
    pub(super) fn wait_for_device(&mut self) {
        const SHORT_NS: u64 = 20_000;
        const LATE_NS: u64 = 20_000;
        const LATE_STAGED_NS: u64 = 200_000;
        const MIN_SLEEP_NS: u64 = 20_000;
        const MAX_SLEEP_NS: u64 = 50_000;
        const MAX_WAIT: Duration = Duration::from_millis(2);
        let (Some(first), Some(last)) = (self.in_flight.front(), self.in_flight.back()) else {
            return;
        };
        // With nothing left to issue, a late wakeup costs nothing.
        let is_all_issued = self.active.back().is_none_or(|open| open.is_exhausted);
        let last_index = self.in_flight.len() - 1;
        let awaited = if is_all_issued { last_index - last_index / 4 } else { last_index / 2 };
        let expected_ns = self.in_flight[awaited].expected_ns + self.lag_ns;
        // The sleep is short against the remaining work of the device.
        let remaining_ns = last.expected_ns.saturating_sub(first.expected_ns);
        let sleep = Duration::from_nanos((remaining_ns / 8).clamp(MIN_SLEEP_NS, MAX_SLEEP_NS));
        // No time to sleep either if the device waits for this thread.
        let is_staged = first.is_staged();
        let is_urgent = is_staged || self.in_flight.len() == 1;
        let late_ns = if is_staged { LATE_STAGED_NS } else { LATE_NS };
        let now = clock::now_ns();
        let ready = || {
            is_all_issued
                && self.in_flight.len() < MAX_IN_FLIGHT
                && self.shared.ring.has_next(self.taken)
        };
        let left = expected_ns.saturating_sub(now);
        if left > SHORT_NS && !is_staged {
            let left = Duration::from_nanos(left - SHORT_NS / 2).min(MAX_WAIT);
            self.shared.sleep(Some(left), ready);
        } else if !is_urgent || now > expected_ns + late_ns {
            self.was_late = true;
            self.shared.sleep(Some(sleep), ready);
        } else {
            for _ in 0..64 {
                spin_hint();
            }
        }
    }

    /// Waits until there is work (`true`), or the channel is closed and empty.
    pub(super) fn wait_for_work(&self) -> bool {
        let ring = &self.shared.ring;
        let is_drained = || ring.is_closed() && ring.submitted() == self.taken;
        loop {
            if ring.has_next(self.taken) {
                return true;
            }
            if is_drained() {
                return false;
            }
            self.shared.sleep(None, || ring.has_next(self.taken) || is_drained());
        }
    }
}
