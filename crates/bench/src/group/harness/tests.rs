//! Comparisons of fake candidates with known times.

use std::cell::RefCell;
use std::rc::Rc;

use super::*;
use crate::group::Calibration;

/// A candidate that takes `once_ns` per iteration and fails after `runs_left` runs.
struct FakeCandidate {
    name: &'static str,
    once_ns: f64,
    runs_left: usize,
    log: Rc<RefCell<Vec<&'static str>>>,
}

impl Candidate for FakeCandidate {
    fn run(&mut self, order: WorkerCommand) -> Result<Sample, String> {
        self.runs_left = self.runs_left.checked_sub(1).ok_or("out of luck")?;
        self.log.borrow_mut().push(self.name);
        Ok(Sample::of_messages(self.once_ns * order.iterations as f64))
    }

    fn calibrate(&mut self, _task: GroupTask, slice_ns: f64) -> Result<Calibration, String> {
        Ok(Calibration::for_slice(slice_ns, self.once_ns))
    }
}

type RunLog = Rc<RefCell<Vec<&'static str>>>;

fn candidates(diary: &RunLog, of: &[(&'static str, Role, f64, usize)]) -> Vec<NamedCandidate> {
    let entry = |&(name, role, once_ns, orders_left): &(&'static str, Role, f64, usize)| {
        let diary = Rc::clone(diary);
        let contender =
            Box::new(FakeCandidate { name, once_ns, runs_left: orders_left, log: diary });
        NamedCandidate { series: name.to_owned(), role, candidate: contender }
    };
    of.iter().map(entry).collect()
}

const TASK: GroupTask = GroupTask::Pingpong { bytes: 8 };
const BUDGET: GroupBudget = GroupBudget { rounds: 6, slice_ns: 1000.0, total_ns: 1e9 };

#[test]
fn every_contestant_gets_one_turn_in_every_round() {
    let diary = RunLog::default();
    let of =
        [("a", Role::Memferry, 10.0, 99), ("b", Role::Peer, 20.0, 99), ("c", Role::Peer, 5.0, 99)];
    let (mut entries, mut missing) = (candidates(&diary, &of), Vec::new());
    let rounds = interleave(&mut entries, &mut missing, |_| true, TASK, BUDGET);
    let diary = diary.borrow();
    assert_eq!(diary.len(), 18);
    for round in diary.chunks(3) {
        let mut names = round.to_vec();
        names.sort_unstable();
        assert_eq!(names, ["a", "b", "c"]);
    }
    assert_eq!(diary[..6], ["a", "b", "c", "c", "b", "a"]);
    assert!(missing.is_empty());
    assert_eq!(rounds.ratio_to_best_peer("a"), 0.5);
    assert_eq!(rounds.slowdown("a", "c"), 2.0);
    assert_eq!(rounds.median_ns("b"), 20.0);
    assert_eq!(rounds.values("b", |timing| timing.total_ns / 2.0), [10.0; 6]);
    assert!(rounds.values("d", |timing| timing.total_ns).is_empty());
}

#[test]
fn one_that_fails_is_named_and_the_others_go_on() {
    let diary = RunLog::default();
    let of =
        [("a", Role::Memferry, 10.0, 99), ("b", Role::Peer, 20.0, 3), ("c", Role::Peer, 30.0, 99)];
    let (mut entries, mut missing) = (candidates(&diary, &of), Vec::new());
    let rounds = interleave(&mut entries, &mut missing, |_| true, TASK, BUDGET);
    assert_eq!(missing, ["b (at pingpong 8: out of luck)"]);
    assert_eq!(entries.len(), 2);
    assert_eq!(rounds.ratio_to_best_peer("a"), 3.0);
    let series: Vec<_> =
        rounds.rows("f", 8, "ns", |t| t.total_ns).into_iter().map(|row| row.series).collect();
    assert_eq!(series, ["a", "c"]);
}

#[test]
fn who_does_not_take_part_keeps_its_place_for_the_next_contest() {
    let diary = RunLog::default();
    let of = [("a", Role::Memferry, 10.0, 99), ("floor", Role::LowerBound, 1.0, 99)];
    let (mut entries, mut missing) = (candidates(&diary, &of), Vec::new());
    let rounds = interleave(&mut entries, &mut missing, |series| series != "floor", TASK, BUDGET);
    assert!(rounds.median_ns("floor").is_nan());
    assert_eq!(entries.len(), 2);
    let rounds = interleave(&mut entries, &mut missing, |_| true, TASK, BUDGET);
    assert_eq!(rounds.slowdown("a", "floor"), 10.0);
    assert!(rounds.ratio_to_best_peer("a").is_nan(), "the floor is no peer");
}

#[test]
fn slow_contestants_get_fewer_rounds_but_never_too_few() {
    assert_eq!(BUDGET.rounds_of(1.0), 6);
    assert_eq!(BUDGET.rounds_of(1e9), 5);
    let long = GroupBudget { rounds: 15, slice_ns: 1e7, total_ns: 8e9 };
    assert_eq!(long.rounds_of(1e9), 8);
}

#[test]
fn iterations_grow_until_they_fill_a_slice() {
    struct SteadyCandidate(f64, Vec<u64>);
    impl Candidate for SteadyCandidate {
        fn run(&mut self, order: WorkerCommand) -> Result<Sample, String> {
            self.1.push(order.iterations);
            Ok(Sample::of_messages(self.0 * order.iterations as f64))
        }
    }
    let mut quick = SteadyCandidate(1000.0, Vec::new());
    assert_eq!(quick.calibrate(TASK, 10e6).unwrap().iterations, 10_000);
    assert!(quick.1.len() <= 4, "{:?}", quick.1);
    let mut slow = SteadyCandidate(50e6, Vec::new());
    let fit = slow.calibrate(TASK, 10e6).unwrap();
    assert_eq!(fit, Calibration { iterations: 1, once_ns: 50e6 });
    assert_eq!(fit.run_ns(), 100e6);
    assert_eq!(slow.1, [1]);
}

#[test]
fn who_stands_aside_is_never_the_best_peer() {
    let diary = RunLog::default();
    let of = [
        ("a", Role::Memferry, 10.0, 99),
        ("b", Role::Peer, 20.0, 99),
        ("b over a", Role::Reference, 5.0, 99),
    ];
    let rounds = interleave(&mut candidates(&diary, &of), &mut Vec::new(), |_| true, TASK, BUDGET);
    assert_eq!(rounds.ratio_to_best_peer("a"), 2.0);
    assert_eq!(rounds.slowdown("b", "b over a"), 4.0);
}
