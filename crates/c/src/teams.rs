//! The teams of this process: the jobs that it has joined, by number.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};

use memferry::message::{ElementType, Job, ReduceOp, Reduction};
use memferry_sys::sync::lock;

use crate::code::{ADMA_EBADF, ADMA_EINVAL, ADMA_EMFILE, CallError};
use crate::memory;

/// The teams of a process. The numbers of teams that were left are used again.
#[derive(Debug, Default)]
pub(crate) struct Teams {
    jobs: Mutex<Vec<Option<Arc<Job>>>>,
}

impl Teams {
    /// Joins a team, and returns its number.
    pub(crate) fn join(&self, name: &str, rank: usize, size: usize) -> Result<c_int, CallError> {
        let job = Arc::new(Job::join(name, rank, size)?);
        let mut jobs = lock(&self.jobs);
        let place = jobs.iter().position(Option::is_none).unwrap_or(jobs.len());
        let number = c_int::try_from(place)
            .map_err(|_| CallError::new(ADMA_EMFILE, "too many teams are open"))?;
        if place == jobs.len() {
            jobs.push(None);
        }
        jobs[place] = Some(job);
        Ok(number)
    }

    /// The job of a team.
    pub(crate) fn get(&self, team: c_int) -> Result<Arc<Job>, CallError> {
        let jobs = lock(&self.jobs);
        let job = usize::try_from(team).ok().and_then(|place| jobs.get(place)?.clone());
        job.ok_or_else(no_team)
    }

    /// Leaves a team.
    pub(crate) fn leave(&self, team: c_int) -> Result<(), CallError> {
        let mut jobs = lock(&self.jobs);
        let place = usize::try_from(team).ok().and_then(|place| jobs.get_mut(place));
        let job = place.and_then(Option::take).ok_or_else(no_team)?;
        drop(jobs);
        // Without the lock: closing may wait for peers.
        drop(job);
        Ok(())
    }

    /// Leaves all teams.
    pub(crate) fn leave_all(&self) {
        let jobs = std::mem::take(&mut *lock(&self.jobs));
        drop(jobs);
    }
}

fn no_team() -> CallError {
    CallError::new(ADMA_EBADF, "this is no team that the process has joined")
}

/// The reduction of two numbers of the header, and the length of an element.
pub(crate) fn reduction(
    element: c_int,
    operation: c_int,
) -> Result<(Reduction<'static>, usize), CallError> {
    let invalid = || CallError::new(ADMA_EINVAL, "no such type or operation of elements");
    let element = usize::try_from(element).ok().and_then(|at| ElementType::ALL.get(at));
    let operation = usize::try_from(operation).ok().and_then(|at| ReduceOp::ALL.get(at));
    let (element, operation) = element.zip(operation).ok_or_else(invalid)?;
    Ok((Reduction::Numbers(*element, *operation), element.bytes()))
}

/// Checks memory of `count` elements or blocks of `bytes` each.
pub(crate) fn check(address: *const c_void, bytes: usize, count: usize) -> Result<(), CallError> {
    memory::check(address.cast(), bytes.saturating_mul(count))
}
