//! Transfers that a channel without a thread executes: whoever waits for one polls that channel.
//!
//! A device needs a few microseconds for a short copy, less than a sleeping thread needs to wake up. So
//! a waiter polls while the rest is short. If it is long, the waiter sleeps until the interrupt of the
//! device; without one it sleeps for most of the estimated time. If the device is slower than its
//! estimate, it sleeps for longer and longer times between two polls. Whoever polls finishes the transfers of all waiters, and wakes those that sleep.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_sys::sync::atomic::Ordering;

use super::{Completion, LISTENER, SLEEPER};
use crate::contract::{Channel, InterruptSleep};

/// A waiter polls through an estimate of this time, and sleeps through a longer one.
pub(crate) const MAX_POLLED_NS: u64 = 50_000;
/// The first and the longest sleep of a waiter whose device is late.
const FIRST_SLEEP: Duration = Duration::from_micros(20);
const MAX_SLEEP: Duration = Duration::from_millis(1);
/// The longest wait for interrupts without a poll by a timeout.
const MAX_INTERRUPT_WAIT: Duration = Duration::from_millis(100);
/// The maximum time of one sleep: the transfer may end without an interrupt, by a thread that helps.
const MAX_INTERRUPT_SLEEP: Duration = Duration::from_millis(4);

#[inline]
fn poll(channel: &dyn Channel, is_brief: bool) -> bool {
    if is_brief { channel.poll_briefly() } else { channel.poll() }
}

/// Polls a channel for a caller that must not wait: if a device must be recovered, its poll thread does
/// that, where there is one.
#[inline]
pub(super) fn poll_for_caller(channel: &dyn Channel) -> bool {
    poll(channel, channel.has_poll_thread())
}

impl Completion {
    /// Names the channel without a thread that executes the transfer, which waiters poll. The first
    /// name counts. A dispatch does it for its own completion.
    pub fn set_polled(&self, channel: &Arc<dyn Channel>) {
        let _ = self.polled.set(Arc::downgrade(channel));
    }

    /// The channel that waiters poll, if it still exists. A forked child leaves it alone.
    pub(super) fn polled_channel(&self) -> Option<Arc<dyn Channel>> {
        if self.is_done() || self.is_forked() {
            return None;
        }
        self.polled.get()?.upgrade()
    }

    /// Polls the channel of the transfer once, if it has no thread; returns whether the transfer is
    /// complete. Does not wait for the recovery of a device.
    #[inline]
    pub fn poll_channel(&self) -> bool {
        self.is_done()
            || self.polled_channel().is_some_and(|channel| {
                poll_for_caller(&*channel);
                self.is_done()
            })
    }

    /// Whether somebody learns of the end without polling: a sleeper, a listener, or a reader of a
    /// notification variable.
    pub(crate) fn is_awaited(&self) -> bool {
        self.notification.is_some()
            || self.state.word().load(Ordering::Relaxed) & (SLEEPER | LISTENER) != 0
    }

    /// Tells the channel without a thread that somebody awaits the transfer who does not poll.
    pub(super) fn request_polls(&self) {
        if let Some(channel) = self.polled_channel() {
            channel.wake();
        }
    }

    /// Polls the channel, and sleeps between polls where that is shorter than waking up; until
    /// completion or the deadline.
    pub(super) fn wait_polling(
        &self,
        channel: &dyn Channel,
        spin_ns: u64,
        deadline: Option<Instant>,
    ) -> bool {
        // Whoever waits with a deadline cannot wait for the recovery of a device.
        let is_brief = deadline.is_some() && channel.has_poll_thread();
        let estimate_ns = channel.estimate_ns();
        let is_long = estimate_ns > MAX_POLLED_NS.max(spin_ns);
        if is_long && !self.sleep_by_interrupts(channel, is_brief, estimate_ns, deadline) {
            // The rest is polled for: a sleep ends late.
            let early = Duration::from_nanos(estimate_ns - estimate_ns / 4);
            if self.sleep_before(early.min(MAX_SLEEP), deadline) {
                return true;
            }
        }
        let start = Instant::now();
        let polled =
            Duration::from_nanos((2 * estimate_ns.min(MAX_POLLED_NS)).saturating_add(spin_ns));
        let mut pause = FIRST_SLEEP;
        loop {
            if self.poll_some(channel, is_brief) {
                return true;
            }
            let now = Instant::now();
            if deadline.is_some_and(|at| now >= at) {
                return self.is_done();
            }
            if now - start >= polled {
                if self.sleep_before(pause, deadline) {
                    return true;
                }
                pause = (2 * pause).min(MAX_SLEEP);
            }
        }
    }

    /// Sleeps until interrupts of the device, as long as the rest is long: twice the estimate at most, in
    /// case that one is lost. While no interrupt will come, sleeps for times that double, until the transfer
    /// ends. Returns whether the device has interrupts.
    fn sleep_by_interrupts(
        &self,
        channel: &dyn Channel,
        is_brief: bool,
        estimate_ns: u64,
        deadline: Option<Instant>,
    ) -> bool {
        let limit = Duration::from_nanos(estimate_ns.saturating_mul(2)).min(MAX_INTERRUPT_WAIT);
        let end = Instant::now() + limit;
        let end = deadline.map_or(end, |deadline| deadline.min(end));
        let (mut has_interrupts, mut pause) = (false, FIRST_SLEEP);
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || has_interrupts && channel.estimate_ns() <= MAX_POLLED_NS {
                return has_interrupts;
            }
            let timeout = left.min(MAX_INTERRUPT_SLEEP);
            let slept = channel.sleep_until_interrupt(timeout, &|| self.is_done());
            if slept == InterruptSleep::Unavailable {
                return has_interrupts;
            }
            // The interrupt may be early, lost, or that of another transfer.
            if self.poll_some(channel, is_brief) {
                return true;
            }
            has_interrupts = true;
            if slept != InterruptSleep::NotArmed {
                pause = FIRST_SLEEP;
            } else if channel.estimate_ns() > MAX_POLLED_NS {
                // Another thread may have been inside for a moment only.
                let rest = Duration::from_nanos(channel.estimate_ns() / 4 * 3);
                if self.sleep_before(pause.min(rest).max(FIRST_SLEEP), Some(end)) {
                    return true;
                }
                pause = (2 * pause).min(MAX_SLEEP);
            }
        }
    }

    /// Polls the channel a few times; returns whether the transfer is complete.
    fn poll_some(&self, channel: &dyn Channel, is_brief: bool) -> bool {
        const POLLS_PER_CLOCK: u32 = 32;
        for _ in 0..POLLS_PER_CLOCK {
            let has_moved = poll(channel, is_brief);
            if self.is_done() {
                return true;
            }
            if !has_moved {
                channel.pause();
            }
        }
        false
    }

    /// Sleeps for at most `pause`, and not beyond the deadline; returns whether the transfer is complete.
    fn sleep_before(&self, pause: Duration, deadline: Option<Instant>) -> bool {
        // A model has no time: the thread continues with its polls.
        if cfg!(loom) {
            return self.is_done();
        }
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        self.sleep(Some(left.map_or(pause, |left| left.min(pause))))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::contract::{
        ChannelStatistics, Descriptor, ExecutionError, Sequence, SubmitError, Submitted,
    };

    /// A channel that makes no progress, and whose interrupt does not come.
    #[derive(Debug, Default)]
    struct StoppedChannel {
        sleeps: AtomicU32,
    }

    // SAFETY: it accepts nothing.
    unsafe impl Channel for StoppedChannel {
        fn submit(&self, _: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
            Err(SubmitError::Closed)
        }

        fn completed(&self) -> Sequence {
            0
        }

        fn error_of(&self, _: Sequence) -> Option<ExecutionError> {
            None
        }

        fn sleep_until_interrupt(&self, _: Duration, _: &dyn Fn() -> bool) -> InterruptSleep {
            self.sleeps.fetch_add(1, Ordering::Relaxed);
            InterruptSleep::NotArmed
        }

        fn estimate_ns(&self) -> u64 {
            u64::from(u32::MAX)
        }

        fn close(&self) {}

        fn outstanding_bytes(&self) -> u64 {
            u64::MAX
        }

        fn statistics(&self) -> ChannelStatistics {
            ChannelStatistics::default()
        }
    }

    #[test]
    fn a_waiter_of_a_channel_that_is_being_recovered_sleeps_between_its_polls() {
        let (channel, completion) = (StoppedChannel::default(), Completion::whole());
        let has_interrupts =
            completion.sleep_by_interrupts(&channel, true, channel.estimate_ns(), None);
        assert!(has_interrupts && !completion.is_done());
        // At most the doubling sleeps, and those of a millisecond in the longest wait; twice as many,
        // because a signal may end a sleep.
        let longest = MAX_INTERRUPT_WAIT.as_millis() + 8;
        assert!(u128::from(channel.sleeps.load(Ordering::Relaxed)) <= 2 * longest);
    }
}
