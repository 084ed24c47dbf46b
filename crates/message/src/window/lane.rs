//! The accesses to one peer, in order: whoever has time carries out the first.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};

use memferry_sys::sync::lock;

use super::carry::Job;

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

    /// Whether nothing waits, and nobody may put anything back.
    pub(crate) fn is_idle(&self) -> bool {
        let queue = self.queue();
        queue.jobs.is_empty() && !queue.is_running
    }

    /// Waits until nobody carries anything out, and takes what waits.
    pub(crate) fn stop(&self) -> VecDeque<Job> {
        let mut queue = self.queue();
        queue.stopping += 1;
        while queue.is_running {
            queue = self.quiet.wait(queue).unwrap_or_else(std::sync::PoisonError::into_inner);
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
