//! The accesses to one peer, in order: whoever has time carries out the first.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

use memferry_sys::sync::lock;

use super::carry::Job;
use crate::wire::Number;

/// Accesses to one peer.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    queue: Mutex<Queue>,
    /// Somebody has stopped carrying.
    quiet: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// A thread carries out what was first, and nobody else may begin.
    is_running: bool,
    /// Threads that wait until nobody does.
    stopping: usize,
}

/// The right to carry out accesses of a lane.
#[derive(Debug)]
pub(crate) struct Turn<'a>(&'a Lane);

impl Lane {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// The turn of a new access, if nothing is before it.
    #[inline]
    pub(crate) fn take_turn(&self) -> Option<Turn<'_>> {
        let mut queue = self.queue();
        if queue.is_running || !queue.jobs.is_empty() {
            return None;
        }
        queue.is_running = true;
        Some(Turn(self))
    }

    /// Puts an access behind all others.
    pub(crate) fn push(&self, job: Job) {
        self.queue().jobs.push_back(job);
    }

    /// The turn of the first access that waits, if nobody carries one out.
    pub(crate) fn take_first(&self) -> Option<(Turn<'_>, Job)> {
        let mut queue = self.queue();
        if queue.is_running {
            return None;
        }
        let job = queue.jobs.pop_front()?;
        queue.is_running = true;
        Some((Turn(self), job))
    }

    /// Whether the access of an operation waits here.
    pub(crate) fn has(&self, number: Number) -> bool {
        self.queue().jobs.iter().any(|job| job.number == Some(number))
    }

    /// Whether somebody carries out an access.
    pub(crate) fn is_running(&self) -> bool {
        self.queue().is_running
    }

    /// Whether an access waits that nobody carries out.
    pub(crate) fn is_waiting(&self) -> bool {
        let queue = self.queue();
        !queue.jobs.is_empty() && !queue.is_running
    }

    /// Whether nothing waits, and nobody may put anything back.
    pub(crate) fn is_idle(&self) -> bool {
        let queue = self.queue();
        queue.jobs.is_empty() && !queue.is_running
    }

    /// Waits until nobody carries anything out, and takes what waits. Gives up at the deadline: memory of
    /// a peer may never come, and whoever waits for it ends its access later.
    pub(crate) fn stop(&self, deadline: Instant) -> VecDeque<Job> {
        let mut queue = self.queue();
        queue.stopping += 1;
        while queue.is_running {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let woken = self.quiet.wait_timeout(queue, left);
            queue = woken.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        queue.stopping -= 1;
        std::mem::take(&mut queue.jobs)
    }
}

impl Turn<'_> {
    /// Puts an access back that could not be finished: it stays the first.
    pub(crate) fn put_back(self, job: Job) {
        self.0.queue().jobs.push_front(job);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut queue = self.0.queue();
        queue.is_running = false;
        let is_awaited = queue.stopping > 0;
        drop(queue);
        if is_awaited {
            self.0.quiet.notify_all();
        }
    }
}
