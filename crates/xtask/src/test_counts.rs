//! Counting the results of test programs, with a check that their lines and their totals agree.

use memferry_vm::{ProgramExit, ProgramOutcome};

/// The numbers of tests by result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TestCounts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) ignored: u64,
}

impl TestCounts {
    /// The sum of two counts.
    pub(crate) fn plus(mut self, other: Self) -> Self {
        self.add(other);
        self
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }
}

/// The counts of a program, and its error, if it has one. The counts come from the lines of single
/// tests, and the program's own totals must agree with them. If the arguments of the program change
/// these lines, the totals alone count.
pub(crate) fn judge(
    outcome: &ProgramOutcome,
    has_plain_lines: bool,
) -> (TestCounts, Option<String>) {
    let lines = count_lines(&outcome.lines);
    let results: Vec<TestCounts> =
        outcome.lines.iter().filter_map(|line| result_in(line)).collect();
    let tally = match results.as_slice() {
        [result] if !has_plain_lines => *result,
        _ => lines,
    };
    let wrong = match (&outcome.exit, results.as_slice()) {
        (ProgramExit::Exited(0), [result]) if *result != tally => Some(format!(
            "told of {} passed and {} failed tests, but its result is {} and {}",
            tally.passed, tally.failed, result.passed, result.failed
        )),
        (ProgramExit::Exited(0), [_]) if tally.failed > 0 => {
            Some("succeeded with failed tests".into())
        }
        (ProgramExit::Exited(0), [_]) => None,
        (ProgramExit::Exited(0), results) => Some(format!("gave {} results", results.len())),
        (ProgramExit::Exited(_), [_]) if tally.failed > 0 => {
            Some(format!("{} tests failed", tally.failed))
        }
        (end, _) => Some(end.to_string()),
    };
    (tally, wrong)
}

/// Counts the lines `test NAME ... ok`.
fn count_lines(lines: &[String]) -> TestCounts {
    let mut tally = TestCounts::default();
    for line in lines {
        let verdict = line.strip_prefix("test ").and_then(|line| line.rsplit_once(" ... "));
        match verdict.map(|(_, verdict)| verdict) {
            Some("ok") => tally.passed += 1,
            Some("FAILED") => tally.failed += 1,
            Some(verdict) if verdict.starts_with("ignored") => tally.ignored += 1,
            _ => {}
        }
    }
    tally
}

/// The names in the lines `test NAME ... FAILED`.
pub(crate) fn failed_in(text: &str) -> Vec<String> {
    let failed =
        |line: &str| line.strip_prefix("test ")?.strip_suffix(" ... FAILED").map(str::to_owned);
    text.lines().filter_map(failed).collect()
}

/// Reads `test result: ok. 3 passed; 0 failed; 1 ignored; …`.
pub(crate) fn result_in(line: &str) -> Option<TestCounts> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let count = |name: &str| {
        let count = counts.split("; ").find_map(|count| count.strip_suffix(name));
        count.and_then(|count| count.trim().parse().ok())
    };
    Some(TestCounts {
        passed: count("passed")?,
        failed: count("failed")?,
        ignored: count("ignored")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESULT: &str = "test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 4 filtered out; finished in 0s";

    fn outcome(end: ProgramExit, lines: &[&str]) -> ProgramOutcome {
        let lines = lines.iter().map(|&line| line.into()).collect();
        ProgramOutcome { exit: end, lines }
    }

    fn good() -> Vec<&'static str> {
        vec![
            "running 3 tests",
            "test a ... ok",
            "test b::c - should panic ... ok",
            "test d ... ignored, too slow",
            "",
            RESULT,
        ]
    }

    #[test]
    fn tests_are_counted() {
        let (tally, wrong) = judge(&outcome(ProgramExit::Exited(0), &good()), true);
        assert_eq!(tally, TestCounts { passed: 2, failed: 0, ignored: 1 });
        assert_eq!(wrong, None);
    }

    #[test]
    fn a_failed_test_is_told() {
        let result = "test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured";
        let lines = ["test a ... ok", "test b ... FAILED", result];
        let (tally, wrong) = judge(&outcome(ProgramExit::Exited(101), &lines), true);
        assert_eq!((tally.passed, tally.failed), (1, 1));
        assert_eq!(wrong.unwrap(), "1 tests failed");
        assert!(judge(&outcome(ProgramExit::Exited(0), &lines), true).1.is_some());
    }

    #[test]
    fn a_program_that_does_not_end_well_is_wrong_whatever_it_told() {
        for end in [
            ProgramExit::Signalled(11),
            ProgramExit::TimedOut,
            ProgramExit::Lost,
            ProgramExit::NotReached,
            ProgramExit::Exited(3),
        ] {
            let (_, wrong) = judge(&outcome(end.clone(), &good()), true);
            assert_eq!(wrong, Some(end.to_string()));
        }
    }

    #[test]
    fn a_result_that_is_missing_or_told_twice_or_does_not_fit_is_wrong() {
        let without = &good()[..4];
        assert!(judge(&outcome(ProgramExit::Exited(0), without), true).1.is_some());
        let twice = [good(), vec![RESULT]].concat();
        assert!(judge(&outcome(ProgramExit::Exited(0), &twice), true).1.is_some());
        let fewer = [&good()[..1], &good()[2..]].concat();
        assert!(judge(&outcome(ProgramExit::Exited(0), &fewer), true).1.is_some());
    }

    #[test]
    fn where_lines_are_written_differently_the_result_counts() {
        let lines = ["test a ... text of the test", "ok", RESULT];
        let (tally, wrong) = judge(&outcome(ProgramExit::Exited(0), &lines), false);
        assert_eq!((tally.passed, wrong), (2, None));
    }
}
