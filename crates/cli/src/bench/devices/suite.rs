//! The conformance suite over an engine, case by case: a case that fails is told with its reason, and
//! the others still have their turn.

use std::borrow::Borrow;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Mutex, MutexGuard, PoisonError};

use memferry::engine::conformance::{Case, Subject, Verdict, cases};
use serde::{Deserialize, Serialize};

use crate::outcome::Row;

/// What became of the suite over one engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tally {
    /// The engine and what is behind it.
    pub(super) name: String,
    /// How many cases the suite has.
    pub(super) cases: u64,
    /// How many the engine passed.
    pub(super) passed: u64,
    /// Those that are about what it does not claim to do.
    pub(super) skipped: Vec<Exception>,
    /// Those that it failed.
    pub(super) failed: Vec<Exception>,
    /// What else is wrong, such as that the device did none of the work.
    pub(super) wrong: Vec<String>,
}

/// A case that an engine did not pass.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Exception {
    pub(super) case: String,
    /// Why it was skipped, or what was said when it panicked.
    pub(super) reason: String,
}

impl Tally {
    /// Whether every case had its turn, some passed, none failed, and nothing else is wrong.
    pub(super) fn is_good(&self) -> bool {
        let is_clean = self.failed.is_empty() && self.wrong.is_empty();
        self.passed > 0 && is_clean && self.had_their_turn() == self.cases
    }

    /// Notes what is wrong unless something holds.
    pub(super) fn require(&mut self, holds: bool, else_wrong: impl FnOnce() -> String) {
        if !holds {
            self.wrong.push(else_wrong());
        }
    }

    /// Exactly these cases may have been skipped, and the suite must be the whole one.
    pub(super) fn require_skips(&mut self, expected: &[&str]) {
        let mut skipped: Vec<_> = self.skipped.iter().map(|skip| skip.case.clone()).collect();
        skipped.sort_unstable();
        let mut expected = expected.to_vec();
        expected.sort_unstable();
        self.require(skipped == expected, || {
            format!("skipped {}, and not {}", listed(&skipped), listed(&expected))
        });
        let (cases, all) = (self.cases, count());
        self.require(cases == all, || format!("the suite has {all} cases, and not {cases}"));
    }

    /// How many cases were run to an end, or skipped for a reason.
    pub(super) fn had_their_turn(&self) -> u64 {
        self.passed + (self.skipped.len() + self.failed.len()) as u64
    }

    /// The counts, for a table.
    pub(super) fn rows(&self) -> [Row; 3] {
        let row = |figure: &str, count: u64| {
            let series = format!("memferry {}", self.name);
            Row::of_rounds(figure, &series, 0, "cases", &[count as f64])
        };
        [
            row("conformance, passed", self.passed),
            row("conformance, skipped because it is not claimed", self.skipped.len() as u64),
            row("conformance, failed", self.failed.len() as u64),
        ]
    }
}

fn listed<S: Borrow<str>>(names: &[S]) -> String {
    if names.is_empty() { "nothing".into() } else { names.join(", ") }
}

/// How many cases there are.
pub(super) fn count() -> u64 {
    cases().len() as u64
}

/// Runs every case over an engine, and says the name of each before it does.
pub(super) fn run(name: &str, subject: &Subject, on_case: impl FnMut(&str)) -> Tally {
    run_cases(name, cases(), subject, on_case)
}

fn run_cases(
    name: &str,
    cases: &[Case],
    subject: &Subject,
    mut on_case: impl FnMut(&str),
) -> Tally {
    let mut tally = Tally {
        name: name.into(),
        cases: cases.len() as u64,
        passed: 0,
        skipped: Vec::new(),
        failed: Vec::new(),
        wrong: Vec::new(),
    };
    let exception = |case: &Case, reason| Exception { case: case.name.into(), reason };
    let heard = Heard::listen();
    for case in cases {
        on_case(case.name);
        heard.forget();
        // A subject makes its engine anew or has one that outlives panics, as in `cargo test`.
        match panic::catch_unwind(AssertUnwindSafe(|| (case.run)(subject))) {
            Ok(Verdict::Passed) => tally.passed += 1,
            Ok(Verdict::Skipped(reason)) => tally.skipped.push(exception(case, reason)),
            Err(_) => tally.failed.push(exception(case, heard.reason())),
        }
    }
    tally
}

/// What panics of all threads said since the last case began.
static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn said() -> MutexGuard<'static, Vec<String>> {
    SAID.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Listens to panics instead of letting them write: some cases panic on purpose.
struct Heard;

impl Heard {
    fn listen() -> Self {
        panic::set_hook(Box::new(|panic| said().push(panic.to_string().replace('\n', " "))));
        Self
    }

    fn forget(&self) {
        said().clear();
    }

    /// The first is mostly the cause of the others, and the last what the case made of it.
    fn reason(&self) -> String {
        let said = said();
        match said.as_slice() {
            [] => "it panicked without a word".into(),
            [only] => only.clone(),
            [first, .., last] => format!("{first}; at last: {last}"),
        }
    }
}

impl Drop for Heard {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = panic::take_hook();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use memferry::engine::polled::PolledEngine;

    use super::*;

    const INVENTED: [Case; 3] = [
        Case { name: "good", run: |_| Verdict::Passed },
        Case { name: "bad", run: |_| panic!("one and one\nis three") },
        Case { name: "unknown", run: |_| Verdict::Skipped("no fills".into()) },
    ];

    #[test]
    fn a_case_that_fails_is_told_and_the_others_have_their_turn() {
        let subject = Subject::new(|| Arc::new(PolledEngine::new()));
        let mut names = Vec::new();
        let tally = run_cases("invented", &INVENTED, &subject, |name| names.push(name.to_owned()));
        assert_eq!(names, ["good", "bad", "unknown"]);
        assert_eq!((tally.cases, tally.passed, tally.had_their_turn()), (3, 1, 3));
        let unknown = Exception { case: "unknown".into(), reason: "no fills".into() };
        assert_eq!(tally.skipped, [unknown]);
        assert_eq!(tally.failed[0].case, "bad");
        assert!(tally.failed[0].reason.ends_with("one and one is three"), "{tally:?}");
        assert!(!tally.is_good());
        assert_eq!(tally.rows().map(|row| row.value), [1.0; 3]);
    }

    #[test]
    fn a_suite_without_a_case_that_passed_is_not_good() {
        let tally = |passed, skipped| {
            let exception = Exception { case: "a_case".into(), reason: "no fills".into() };
            let skipped = vec![exception; skipped];
            let (name, failed, wrong) = (String::new(), Vec::new(), Vec::new());
            Tally { name, cases: 3, passed, skipped, failed, wrong }
        };
        assert!(tally(2, 1).is_good());
        assert!(!tally(0, 3).is_good());
        assert!(!tally(1, 1).is_good());
    }

    #[test]
    fn a_suite_is_not_good_if_other_cases_were_skipped_than_expected() {
        let skip = |case: &str| Exception { case: case.into(), reason: "no fills".into() };
        let good = Tally {
            name: "nic".into(),
            cases: count(),
            passed: count() - 2,
            skipped: vec![skip("b"), skip("a")],
            failed: Vec::new(),
            wrong: Vec::new(),
        };
        let after = |mut tally: Tally, expected: &[&str]| {
            tally.require_skips(expected);
            tally
        };
        assert!(after(good.clone(), &["a", "b"]).is_good());
        let wrong = after(good.clone(), &["a"]);
        assert!(!wrong.is_good());
        assert_eq!(wrong.wrong, ["skipped a, b, and not a"]);
        let short = Tally { cases: 2, passed: 0, ..good };
        assert!(!after(short, &["a", "b"]).is_good());
    }
}
