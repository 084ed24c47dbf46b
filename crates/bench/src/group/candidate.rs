//! A group and a task: together a candidate of the harness.

use std::cell::RefCell;
use std::rc::Rc;

use super::command::{GroupTask, WorkerCommand};
use crate::harness::{Calibration, Candidate, Role, Sample};

/// Something that executes tasks on command and measures their times.
pub(crate) trait TaskRunner {
    /// Executes a command, and returns the times of all its iterations. It is not called again
    /// after an error, unless two candidates share it: then it answers with an error again.
    fn run(&mut self, command: WorkerCommand) -> Result<Sample, String>;

    /// Estimates how many iterations of a task fit into a time slice. `None`: it is to be tried.
    fn estimate(&self, task: GroupTask, slice_ns: f64) -> Option<Calibration> {
        let _ = (task, slice_ns);
        None
    }
}

/// A group of two candidates.
impl<T: TaskRunner> TaskRunner for Rc<RefCell<T>> {
    fn run(&mut self, command: WorkerCommand) -> Result<Sample, String> {
        self.borrow_mut().run(command)
    }
}

/// A group whose members do not prefault.
pub(super) struct WithoutPrefault<T>(pub(super) T);

impl<T: TaskRunner> TaskRunner for WithoutPrefault<T> {
    fn run(&mut self, command: WorkerCommand) -> Result<Sample, String> {
        let task = match command.task {
            GroupTask::FirstTouch { bytes, fresh, .. } => {
                GroupTask::FirstTouch { bytes, fresh, plain: true }
            }
            other => other,
        };
        self.0.run(WorkerCommand { task, ..command })
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
