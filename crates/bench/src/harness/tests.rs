//! Comparisons of fake candidates with known times.

use std::cell::RefCell;
use std::time::Duration;

use super::*;

/// A candidate that takes `once_ns` per iteration, fails after `runs_left` runs, and logs its calls.
struct FakeCandidate<'a> {
    name: &'static str,
    role: Role,
    once_ns: f64,
    runs_left: usize,
    is_right: bool,
    log: &'a RefCell<Vec<String>>,
}

impl<'a> FakeCandidate<'a> {
    fn new(name: &'static str, once_ns: f64, log: &'a RefCell<Vec<String>>) -> Self {
        Self { name, role: Role::Peer, once_ns, runs_left: usize::MAX, is_right: true, log }
    }

    fn log(&self, call: &str) {
        self.log.borrow_mut().push(format!("{call} {}", self.name));
    }
}

impl Candidate for FakeCandidate<'_> {
    fn series(&self) -> &str {
        self.name
    }

    fn role(&self) -> Role {
        self.role
    }

    fn prepare(&mut self) -> Result<(), String> {
        self.log("prepare");
        if self.runs_left == 0 { Err("not installed".to_owned()) } else { Ok(()) }
    }

    fn run(&mut self, iterations: u64) -> Result<Sample, String> {
        self.runs_left = self.runs_left.checked_sub(1).ok_or("out of luck")?;
        self.log(&format!("run {iterations}"));
        Ok(Sample::of_total(self.once_ns))
    }

    fn verify(&mut self) -> Result<(), String> {
        self.log("verify");
        if self.is_right { Ok(()) } else { Err("lost a byte".to_owned()) }
    }

    fn calibrate(&mut self, slice_ns: f64) -> Result<Calibration, String> {
        Ok(Calibration::for_slice(slice_ns, self.once_ns))
    }
}

fn fixed(rounds: usize) -> Harness {
    Harness::new(Budget::fixed(rounds, 1))
}

#[test]
fn every_candidate_gets_one_turn_in_every_round_in_changing_order() {
    let log = RefCell::default();
    let mut candidates = ["a", "b", "c"].map(|name| FakeCandidate::new(name, 10.0, &log));
    let samples = fixed(6).interleave(&mut candidates);
    assert_eq!(samples.values("b", |sample| sample.total_ns), [10.0; 6]);
    let log = log.into_inner();
    let runs: Vec<_> = log.iter().filter_map(|call| call.strip_prefix("run 1 ")).collect();
    assert_eq!(runs[..9], ["a", "b", "c", "c", "b", "a", "b", "c", "a"]);
    for round in runs.chunks(3) {
        let mut names = round.to_vec();
        names.sort_unstable();
        assert_eq!(names, ["a", "b", "c"]);
    }
}

#[test]
fn all_are_prepared_before_the_first_round_and_verified_after_the_last() {
    let log = RefCell::default();
    let mut candidates = ["a", "b"].map(|name| FakeCandidate::new(name, 10.0, &log));
    fixed(2).interleave(&mut candidates);
    let log = log.into_inner();
    assert_eq!(log[..2], ["prepare a", "prepare b"]);
    assert_eq!(log[2..6], ["run 1 a", "run 1 b", "run 1 b", "run 1 a"]);
    assert_eq!(log[6..], ["verify a", "verify b"]);
}

#[test]
fn one_that_fails_is_reported_and_the_others_continue() {
    let log = RefCell::default();
    let mut candidates = ["a", "b", "c"].map(|name| FakeCandidate::new(name, 10.0, &log));
    candidates[0].role = Role::Memferry;
    candidates[1].runs_left = 3;
    candidates[2].once_ns = 30.0;
    let samples = fixed(6).interleave(&mut candidates);
    let failure = Failure { series: "b".into(), stage: Stage::Run, reason: "out of luck".into() };
    assert_eq!(samples.failures(), [failure]);
    assert!(samples.has("a") && !samples.has("b"));
    assert_eq!(samples.ratio_to_best_peer("a"), 3.0);
    assert!(samples.ratio("a", "b").is_nan());
    let rows = samples.time_rows("f", 8);
    let rows: Vec<_> = rows.iter().map(|row| (row.series.as_str(), row.rounds)).collect();
    assert_eq!(rows, [("a", 6), ("c", 6)]);
    assert!(!log.into_inner().contains(&"verify b".to_owned()));
}

#[test]
fn a_missing_peer_is_reported_with_the_reason_and_never_run() {
    let log = RefCell::default();
    let mut candidates = ["a", "b"].map(|name| FakeCandidate::new(name, 10.0, &log));
    candidates[1].runs_left = 0;
    let samples = fixed(2).interleave(&mut candidates);
    assert_eq!(samples.failures()[0].reason, "not installed");
    assert_eq!(samples.values("a", |sample| sample.total_ns).len(), 2);
    assert!(log.into_inner().iter().all(|call| call == "prepare b" || !call.ends_with('b')));
}

#[test]
fn a_wrong_result_takes_the_samples_with_it() {
    let log = RefCell::default();
    let mut candidates = ["a", "b"].map(|name| FakeCandidate::new(name, 10.0, &log));
    candidates[0].is_right = false;
    let samples = fixed(2).interleave(&mut candidates);
    assert_eq!(samples.failures()[0].stage, Stage::Verify);
    assert!(!samples.has("a") && samples.has("b"));
    assert_eq!(samples.require_verified().unwrap_err().to_string(), "`a`: lost a byte");
}

#[test]
fn iterations_are_those_of_the_slowest_or_those_of_each() {
    let runs = |iterations| {
        let log = RefCell::default();
        let mut candidates =
            [FakeCandidate::new("slow", 100.0, &log), FakeCandidate::new("quick", 10.0, &log)];
        let budget = Budget { rounds: 1, iterations, total: Duration::MAX };
        Harness::new(budget).interleave(&mut candidates);
        log.into_inner().into_iter().filter(|call| call.starts_with("run")).collect::<Vec<_>>()
    };
    let slice = Duration::from_nanos(1000);
    assert_eq!(runs(Iterations::Equal(slice)), ["run 10 slow", "run 10 quick"]);
    assert_eq!(runs(Iterations::Each(slice)), ["run 10 slow", "run 100 quick"]);
    assert_eq!(runs(Iterations::Fixed(7)), ["run 7 slow", "run 7 quick"]);
}

#[test]
fn closures_are_candidates_and_run_equally_often() {
    use std::cell::Cell;
    let (first, second) = (Cell::new(0), Cell::new(0));
    let mut candidates = [
        FnCandidate::new("first", Role::Peer, || first.set(first.get() + 1)),
        FnCandidate::timed("second", Role::Memferry, |iterations| {
            second.set(second.get() + iterations);
            Ok(Sample::of_total(5.0))
        }),
    ];
    let samples = Harness::new(Budget::fixed(3, 4)).interleave(&mut candidates);
    // A plain closure has one call before the clock starts.
    assert_eq!((first.get(), second.get()), (3 * 5, 3 * 4));
    assert_eq!(samples.median_ns("second"), 5.0);
}

#[test]
fn nothing_to_compare_is_no_failure() {
    let samples = fixed(3).interleave::<FnCandidate<'_>>(&mut []);
    assert!(samples.failures().is_empty() && samples.rows("f", 8, "ns", |_| 1.0).is_empty());
}

#[test]
fn a_candidate_that_missed_a_start_has_no_median_of_all() {
    let log = RefCell::default();
    let run = |left| {
        let mut both =
            [FakeCandidate::new("steady", 2.0, &log), FakeCandidate::new("late", 3.0, &log)];
        both[1].runs_left = left;
        fixed(2).interleave(&mut both)
    };
    let mut all = run(usize::MAX);
    all.append(run(usize::MAX));
    assert_eq!(all.median_of_all("late", 4), 3.0);
    all.append(run(0));
    assert_eq!(all.median_of_all("steady", 6), 2.0);
    assert!(all.median_of_all("late", 6).is_nan() && all.median_of_all("unknown", 6).is_nan());
    assert_eq!(all.failures().len(), 1);
}

#[test]
fn the_largest_of_values_is_none_if_one_is_none() {
    assert_eq!(max_or_nan([1.0, 3.0, 2.0]), 3.0);
    assert!(max_or_nan([1.0, f64::NAN, 2.0]).is_nan());
    assert!(max_or_nan([f64::NAN, 2.0]).is_nan());
    assert!(max_or_nan([]).is_nan());
    assert_eq!(min_or_nan([2.0, 1.0, f64::INFINITY]), 1.0);
    assert!(min_or_nan([1.0, f64::NAN]).is_nan());
    assert!(min_or_nan([]).is_nan());
}
