//! A group and a task: together a candidate of the harness.

use std::cell::{Cell, RefCell};
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

    /// Forgets an answer that was kept for another candidate.
    fn forget_answers(&mut self) {}
}

/// One of two candidates whose times a group measures by one command, in turn: its own are the total of
/// the answer, or the part of messages.
pub(super) struct HalfOfGroup<T> {
    group: Rc<RefCell<T>>,
    unread: Rc<Cell<Option<UnreadAnswer>>>,
    /// Whether its times are the part of messages.
    is_part: bool,
}

/// The answer to a command that one half has not taken yet.
#[derive(Clone, Copy)]
struct UnreadAnswer {
    command: WorkerCommand,
    is_for_part: bool,
    sample: Sample,
}

impl<T: TaskRunner> HalfOfGroup<T> {
    /// Returns the half of the total, and that of the part.
    pub(super) fn both(group: T) -> [Self; 2] {
        let (group, unread) = (Rc::new(RefCell::new(group)), Rc::default());
        [false, true].map(|is_part| Self {
            group: Rc::clone(&group),
            unread: Rc::clone(&unread),
            is_part,
        })
    }

    /// The answer to the command that the other half has given, if it is there.
    fn take_answer(&self, command: WorkerCommand) -> Option<Sample> {
        let is_own =
            |answer: &UnreadAnswer| answer.command == command && answer.is_for_part == self.is_part;
        self.unread.take().filter(is_own).map(|answer| answer.sample)
    }
}

impl<T: TaskRunner> TaskRunner for HalfOfGroup<T> {
    fn run(&mut self, command: WorkerCommand) -> Result<Sample, String> {
        let sample = match self.take_answer(command) {
            Some(sample) => sample,
            None => {
                let sample = self.group.borrow_mut().run(command)?;
                let is_for_part = !self.is_part;
                self.unread.set(Some(UnreadAnswer { command, is_for_part, sample }));
                sample
            }
        };
        let own_ns = if self.is_part { sample.messages_ns } else { sample.total_ns };
        Ok(Sample::of_messages(own_ns))
    }

    fn forget_answers(&mut self) {
        self.unread.set(None);
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
        let calibration = match self.group.runner.estimate(self.task, slice_ns) {
            Some(estimate) => Ok(estimate),
            None => Calibration::by_trial(slice_ns, |iterations| self.run(iterations)),
        };
        // What was measured by trial is not a round.
        self.group.runner.forget_answers();
        calibration
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers with the number of the command, and ten times that.
    struct CountingGroup(u32);

    impl TaskRunner for CountingGroup {
        fn run(&mut self, _: WorkerCommand) -> Result<Sample, String> {
            self.0 += 1;
            Ok(Sample::of_parts(f64::from(self.0), f64::from(10 * self.0)))
        }
    }

    #[test]
    fn both_halves_take_their_times_from_one_answer() {
        let [mut whole, mut part] = HalfOfGroup::both(CountingGroup(0));
        let total = |half: &mut HalfOfGroup<_>, iterations| {
            let command = WorkerCommand { task: GroupTask::Pingpong { bytes: 8 }, iterations };
            half.run(command).unwrap().total_ns
        };
        assert_eq!((total(&mut whole, 5), total(&mut part, 5)), (1.0, 10.0));
        assert_eq!((total(&mut part, 5), total(&mut whole, 5)), (20.0, 2.0));
        assert_eq!(
            (total(&mut whole, 5), total(&mut whole, 5)),
            (3.0, 4.0),
            "one is for the other"
        );
        assert_eq!(total(&mut part, 6), 50.0, "the answer to another command is not taken");
        part.forget_answers();
        assert_eq!(total(&mut whole, 6), 6.0, "a forgotten answer is not taken");
    }
}
