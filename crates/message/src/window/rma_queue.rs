//! The accesses to one peer, in order. Any thread can execute the first one.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

use memferry_sys::sync::lock;

use super::direct::DirectWindows;
use super::rma::RmaRequest;
use crate::control::OperationId;

/// The queue of accesses to one peer.
#[derive(Debug, Default)]
pub(crate) struct RmaQueue {
    state: Mutex<RmaQueueState>,
    /// Signalled when a thread stops executing.
    idle: Condvar,
    /// For the thread that executes an access; for others with the lock of a queue in which no
    /// thread does.
    direct: UnsafeCell<DirectWindows>,
}

// SAFETY: at any time one thread may use `direct`: the one whose guard set `is_running`, or the one
// that holds the lock while it is not set. Both pass it on through the lock.
unsafe impl Sync for RmaQueue {}

#[derive(Debug, Default)]
struct RmaQueueState {
    requests: VecDeque<RmaRequest>,
    /// A thread executes an access, and no other thread may start one.
    is_running: bool,
    /// Threads that wait in [`RmaQueue::stop`].
    stop_waiters: usize,
    /// What the executing thread forgets when it has finished.
    changed_regions: Vec<u32>,
    is_disconnected: bool,
}

impl RmaQueueState {
    #[inline]
    fn has_notes(&self) -> bool {
        self.is_disconnected || !self.changed_regions.is_empty()
    }

    /// Forgets what was noted since the last call.
    #[cold]
    fn forget_noted(&mut self, direct: &mut DirectWindows) {
        if self.is_disconnected {
            *direct = DirectWindows::default();
        }
        for region in std::mem::take(&mut self.changed_regions) {
            direct.forget_region(region);
        }
    }
}

/// The right to execute accesses of a queue.
#[derive(Debug)]
pub(crate) struct RmaQueueGuard<'a>(&'a RmaQueue);

impl RmaQueue {
    fn state(&self) -> MutexGuard<'_, RmaQueueState> {
        lock(&self.state)
    }

    /// Starts a new access, if no other is before it.
    #[inline]
    pub(crate) fn try_begin(&self) -> Option<RmaQueueGuard<'_>> {
        let mut queue = self.state();
        if queue.is_running || !queue.requests.is_empty() {
            return None;
        }
        queue.is_running = true;
        Some(RmaQueueGuard(self))
    }

    /// Appends an access.
    pub(crate) fn push(&self, request: RmaRequest) {
        self.state().requests.push_back(request);
    }

    /// Takes the first pending access, if no thread executes one.
    pub(crate) fn try_pop(&self) -> Option<(RmaQueueGuard<'_>, RmaRequest)> {
        let mut queue = self.state();
        if queue.is_running {
            return None;
        }
        let request = queue.requests.pop_front()?;
        queue.is_running = true;
        Some((RmaQueueGuard(self), request))
    }

    /// Returns whether the access of an operation is pending here.
    pub(crate) fn contains(&self, number: OperationId) -> bool {
        self.state().requests.iter().any(|request| request.operation == Some(number))
    }

    /// Forgets the windows of a region that its owner has shared or unmapped: now, or when the access
    /// that runs has ended.
    pub(crate) fn forget_region(&self, region: u32) {
        self.forget(|queue| queue.changed_regions.push(region));
    }

    /// Forgets all windows of a peer that is disconnected, as [`RmaQueue::forget_region`] does.
    pub(crate) fn forget_all(&self) {
        self.forget(|queue| queue.is_disconnected = true);
    }

    fn forget(&self, note: impl FnOnce(&mut RmaQueueState)) {
        let mut queue = self.state();
        note(&mut queue);
        if !queue.is_running {
            // SAFETY: the lock is held, and no thread executes an access.
            queue.forget_noted(unsafe { &mut *self.direct.get() });
        }
    }

    /// Returns whether a thread executes an access.
    pub(crate) fn is_running(&self) -> bool {
        self.state().is_running
    }

    /// Returns whether an access is pending and no thread executes one.
    pub(crate) fn has_pending(&self) -> bool {
        let queue = self.state();
        !queue.requests.is_empty() && !queue.is_running
    }

    /// Returns whether no access is pending and no thread may requeue one.
    pub(crate) fn is_idle(&self) -> bool {
        let queue = self.state();
        queue.requests.is_empty() && !queue.is_running
    }

    /// Waits until no thread executes an access, and takes the pending ones. Stops waiting at the
    /// deadline: a thread may block on a peer's memory, and completes its access later.
    pub(crate) fn stop(&self, deadline: Instant) -> VecDeque<RmaRequest> {
        let mut queue = self.state();
        queue.stop_waiters += 1;
        while queue.is_running {
            let time_left = deadline.saturating_duration_since(Instant::now());
            if time_left.is_zero() {
                break;
            }
            let woken = self.idle.wait_timeout(queue, time_left);
            queue = woken.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        queue.stop_waiters -= 1;
        std::mem::take(&mut queue.requests)
    }
}

impl RmaQueueGuard<'_> {
    /// The windows that are accessed directly.
    #[inline]
    pub(crate) fn direct(&mut self) -> &mut DirectWindows {
        // SAFETY: this guard has set `is_running`, so no other thread uses it.
        unsafe { &mut *self.0.direct.get() }
    }

    /// Puts an access that could not be completed back at the front.
    pub(crate) fn requeue(self, request: RmaRequest) {
        self.0.state().requests.push_front(request);
    }
}

impl Drop for RmaQueueGuard<'_> {
    fn drop(&mut self) {
        let mut queue = self.0.state();
        if queue.has_notes() {
            queue.forget_noted(self.direct());
        }
        queue.is_running = false;
        let is_awaited = queue.stop_waiters > 0;
        drop(queue);
        if is_awaited {
            self.0.idle.notify_all();
        }
    }
}
