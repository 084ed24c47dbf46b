//! A group and a task: together a candidate of the harness.

use super::command::{GroupTask, WorkerCommand};
use crate::harness::{Calibration, Candidate, Role, Sample};

/// Something that executes tasks on command and measures their times.
pub(crate) trait TaskRunner {
    /// Executes a command, and returns the times of all its iterations. It is not called again
    /// after an error.
    fn run(&mut self, command: WorkerCommand) -> Result<Sample, String>;

    /// Estimates how many iterations of a task fit into a time slice. `None`: it is to be tried.
    fn estimate(&self, task: GroupTask, slice_ns: f64) -> Option<Calibration> {
        let _ = (task, slice_ns);
        None
    }
}

/// A started group with its series and role. It executes several tasks, one after the other.
pub(super) struct NamedGroup {
    pub(super) series: String,
    pub(super) role: Role,
    pub(super) runner: Box<dyn TaskRunner>,
}

/// A group that executes one task.
pub(super) struct GroupCandidate<'a> {
    pub(super) group: &'a mut NamedGroup,
    pub(super) task: GroupTask,
}

impl Candidate for GroupCandidate<'_> {
    fn series(&self) -> &str {
        &self.group.series
    }

    fn role(&self) -> Role {
        self.group.role
    }

    fn run(&mut self, iterations: u64) -> Result<Sample, String> {
        let times = self.group.runner.run(WorkerCommand { task: self.task, iterations })?;
        Ok(times.per_iteration(iterations))
    }

    fn calibrate(&mut self, slice_ns: f64) -> Result<Calibration, String> {
        match self.group.runner.estimate(self.task, slice_ns) {
            Some(estimate) => Ok(estimate),
            None => Calibration::by_trial(slice_ns, |iterations| self.run(iterations)),
        }
    }
}
