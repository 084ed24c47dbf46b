//! A channel that is dropped when its code has panicked, by the last running call.

use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use memferry_engine::Channel;
use memferry_engine::runtime::as_engine_thread;
use memferry_sys::sync::UnsafeCell;
use memferry_sys::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// No call begins any more.
const FAILED: u64 = 1;
/// One running call.
const CALL: u64 = 2;

/// The channel, and the number of running calls in it. Dropping it runs the engine's code; a panic of
/// that is contained. The owner drops it explicitly.
pub(super) struct GuardedChannel {
    channel: UnsafeCell<ManuallyDrop<Arc<dyn Channel>>>,
    /// The running calls in units of `CALL`, and `FAILED`.
    calls: AtomicU64,
    /// Whether a thread drops the channel, or has.
    is_dropping: AtomicBool,
}

impl std::fmt::Debug for GuardedChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let calls = self.calls.load(Ordering::Relaxed);
        f.debug_struct("GuardedChannel").field("calls", &calls).finish_non_exhaustive()
    }
}

// SAFETY: all threads may use the channel itself. The cell is written once, by the thread that drops
// the channel: the owner, or after `FAILED` was set the last call, and `calls` orders that after all
// other calls.
unsafe impl Sync for GuardedChannel {}
// SAFETY: as above.
unsafe impl Send for GuardedChannel {}

impl GuardedChannel {
    pub(super) fn new(channel: Arc<dyn Channel>) -> Self {
        Self {
            channel: UnsafeCell::new(ManuallyDrop::new(channel)),
            calls: AtomicU64::new(0),
            is_dropping: AtomicBool::new(false),
        }
    }

    /// Begins a call, which ends with [`GuardedChannel::end`]; `None` if the channel failed. Calls `dropped`
    /// if this thread was the last inside of a failed channel, and has dropped it.
    #[inline]
    pub(super) fn begin(&self, dropped: impl FnOnce()) -> Option<&dyn Channel> {
        if self.calls.load(Ordering::Relaxed) & FAILED != 0 {
            return None;
        }
        if self.calls.fetch_add(CALL, Ordering::AcqRel) & FAILED != 0 {
            if self.end() {
                dropped();
            }
            return None;
        }
        // SAFETY: the channel exists until the last call has ended.
        Some(self.channel.with(|channel| unsafe { &***channel }))
    }

    /// Ends a call. The last one of a failed channel drops the channel, and returns true.
    #[inline]
    pub(super) fn end(&self) -> bool {
        self.calls.fetch_sub(CALL, Ordering::AcqRel) == CALL | FAILED && self.drop_now()
    }

    /// Lets no call begin any more, after `first` if this is the first failure; returns whether it is.
    /// The caller is in a call.
    pub(super) fn fail(&self, first: impl FnOnce()) -> bool {
        let is_first = self.calls.load(Ordering::Acquire) & FAILED == 0;
        if is_first {
            first();
        }
        self.calls.fetch_or(FAILED, Ordering::AcqRel) & FAILED == 0
    }

    /// Drops the channel if that has not happened yet. For its owner, when nobody else is left.
    pub(super) fn drop_channel(&mut self) {
        self.drop_now();
    }

    /// Drops the channel once. No call may be running.
    fn drop_now(&self) -> bool {
        if self.is_dropping.swap(true, Ordering::AcqRel) {
            return false;
        }
        let drop_channel = || {
            self.channel.with_mut(|channel| {
                // SAFETY: this is the only drop, and no call uses the channel any more.
                as_engine_thread(|| unsafe { ManuallyDrop::drop(&mut *channel) });
            });
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(drop_channel)) {
            std::mem::forget(panic);
        }
        true
    }
}
