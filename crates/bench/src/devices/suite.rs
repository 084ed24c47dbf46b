//! The conformance suite over an engine, case by case: a failed case is reported with its reason,
//! and the other cases still run.

use std::borrow::Borrow;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Mutex, MutexGuard, PoisonError};

use memferry::engine::testing::conformance::{Case, EngineUnderTest, Verdict, cases};
use serde::{Deserialize, Serialize};

use crate::results::outcome::Row;

/// Cases that an engine which only copies and fills, in no order, does not support.
pub(super) const COPIER_SKIPS: [&str; 15] = [
    "comparisons_find_the_first_difference",
    "overlapping_moves_have_the_result_of_memmove",
    "crcs_of_every_size_are_those_of_the_standard",
    "copies_with_a_crc_move_every_byte_and_return_it",
    "crcs_of_chunks_make_the_crc_of_the_whole",
    "a_cancelled_copy_with_a_crc_has_no_crc_or_the_right_one",
    "dualcasts_of_every_size_write_both_targets_and_nothing_else",
    "dualcasts_cut_into_chunks_arrive_whole_at_both_targets",
    "a_cancelled_dualcast_counts_the_chunks_that_both_targets_have",
    "whoever_waits_for_a_number_is_told",
    "nobody_can_help_a_transfer_before_its_turn",
    "a_chain_that_is_submitted_at_once_is_executed_in_order",
    "an_ordered_descriptor_waits_for_all_before_it_and_for_none_behind_it",
    "what_is_ordered_after_a_failed_descriptor_is_not_begun",
    "what_a_full_or_closed_channel_does_not_accept_keeps_its_order",
];

/// Results of the suite over one engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SuiteResult {
    /// Name of the engine and of the device.
    pub(super) name: String,
    /// Number of cases in the suite.
    pub(super) cases: u64,
    /// Number of cases that the engine passed.
    pub(super) passed: u64,
    /// Cases that the engine does not support.
    pub(super) skipped: Vec<CaseException>,
    /// Cases that the engine failed.
    pub(super) failed: Vec<CaseException>,
    /// Other faults, for example that the device did none of the work.
    pub(super) wrong: Vec<String>,
}

/// A case that an engine did not pass.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CaseException {
    pub(super) case: String,
    /// Reason of the skip, or the message of the panic.
    pub(super) reason: String,
}

impl SuiteResult {
    /// Returns whether every case was run, some passed, none failed, and there is no other fault.
    pub(super) fn is_good(&self) -> bool {
        let is_clean = self.failed.is_empty() && self.wrong.is_empty();
        self.passed > 0 && is_clean && self.completed() == self.cases
    }

    /// Records a fault unless `holds` is true.
    pub(super) fn require(&mut self, holds: bool, else_wrong: impl FnOnce() -> String) {
        if !holds {
            self.wrong.push(else_wrong());
        }
    }

    /// Requires that exactly these cases were skipped and that the suite is complete.
    pub(super) fn require_skips(&mut self, expected: &[&str]) {
        let mut skipped: Vec<_> = self.skipped.iter().map(|skip| skip.case.clone()).collect();
        skipped.sort_unstable();
        let mut expected = expected.to_vec();
        expected.sort_unstable();
        self.require(skipped == expected, || {
            format!("skipped {}, and not {}", join_names(&skipped), join_names(&expected))
        });
        let (cases, all) = (self.cases, count());
        self.require(cases == all, || format!("the suite has {all} cases, and not {cases}"));
    }

    /// Number of cases that were run or skipped for a reason.
    pub(super) fn completed(&self) -> u64 {
        self.passed + (self.skipped.len() + self.failed.len()) as u64
    }

    /// Rows with the counts.
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

fn join_names<S: Borrow<str>>(names: &[S]) -> String {
    if names.is_empty() { "nothing".into() } else { names.join(", ") }
}

/// Number of cases.
pub(super) fn count() -> u64 {
    cases().len() as u64
}

/// Runs every case over an engine, and reports the name of each before it starts.
pub(super) fn run(name: &str, subject: &EngineUnderTest, on_case: impl FnMut(&str)) -> SuiteResult {
    run_cases(name, cases(), subject, on_case)
}

fn run_cases(
    name: &str,
    cases: &[Case],
    subject: &EngineUnderTest,
    mut on_case: impl FnMut(&str),
) -> SuiteResult {
    let mut tally = SuiteResult {
        name: name.into(),
        cases: cases.len() as u64,
        passed: 0,
        skipped: Vec::new(),
        failed: Vec::new(),
        wrong: Vec::new(),
    };
    let exception = |case: &Case, reason| CaseException { case: case.name.into(), reason };
    let heard = PanicCapture::install();
    for case in cases {
        on_case(case.name);
        heard.clear();
        // A subject creates a new engine for each case, or has one that survives panics, as in
        // `cargo test`.
        match panic::catch_unwind(AssertUnwindSafe(|| (case.run)(subject))) {
            Ok(Verdict::Passed) => tally.passed += 1,
            Ok(Verdict::Skipped(reason)) => tally.skipped.push(exception(case, reason)),
            Err(_) => tally.failed.push(exception(case, heard.reason())),
        }
    }
    tally
}

/// Messages of the panics of all threads since the current case started.
static PANIC_MESSAGES: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn panic_messages() -> MutexGuard<'static, Vec<String>> {
    PANIC_MESSAGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Captures panic messages instead of printing them: some cases panic on purpose.
struct PanicCapture;

impl PanicCapture {
    fn install() -> Self {
        panic::set_hook(Box::new(|panic| {
            panic_messages().push(panic.to_string().replace('\n', " "));
        }));
        Self
    }

    fn clear(&self) {
        panic_messages().clear();
    }

    /// Joins the first message, which is usually the cause, and the last one, which is that of the
    /// case.
    fn reason(&self) -> String {
        let said = panic_messages();
        match said.as_slice() {
            [] => "it panicked without a word".into(),
            [only] => only.clone(),
            [first, .., last] => format!("{first}; at last: {last}"),
        }
    }
}

impl Drop for PanicCapture {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = panic::take_hook();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use memferry::engine::testing::polled::PolledEngine;

    use super::*;

    const FAKE_CASES: [Case; 3] = [
        Case { name: "good", run: |_| Verdict::Passed },
        Case { name: "bad", run: |_| panic!("one and one\nis three") },
        Case { name: "unknown", run: |_| Verdict::Skipped("no fills".into()) },
    ];

    #[test]
    fn a_case_that_fails_is_told_and_the_others_have_their_turn() {
        let subject = EngineUnderTest::new(|| Arc::new(PolledEngine::new()));
        let mut names = Vec::new();
        let tally =
            run_cases("invented", &FAKE_CASES, &subject, |name| names.push(name.to_owned()));
        assert_eq!(names, ["good", "bad", "unknown"]);
        assert_eq!((tally.cases, tally.passed, tally.completed()), (3, 1, 3));
        let unknown = CaseException { case: "unknown".into(), reason: "no fills".into() };
        assert_eq!(tally.skipped, [unknown]);
        assert_eq!(tally.failed[0].case, "bad");
        assert!(tally.failed[0].reason.ends_with("one and one is three"), "{tally:?}");
        assert!(!tally.is_good());
        assert_eq!(tally.rows().map(|row| row.value), [1.0; 3]);
    }

    #[test]
    fn a_suite_without_a_case_that_passed_is_not_good() {
        let tally = |passed, skipped| {
            let exception = CaseException { case: "a_case".into(), reason: "no fills".into() };
            let skipped = vec![exception; skipped];
            let (name, failed, wrong) = (String::new(), Vec::new(), Vec::new());
            SuiteResult { name, cases: 3, passed, skipped, failed, wrong }
        };
        assert!(tally(2, 1).is_good());
        assert!(!tally(0, 3).is_good());
        assert!(!tally(1, 1).is_good());
    }

    #[test]
    fn a_suite_is_not_good_if_other_cases_were_skipped_than_expected() {
        let skip = |case: &str| CaseException { case: case.into(), reason: "no fills".into() };
        let good = SuiteResult {
            name: "nic".into(),
            cases: count(),
            passed: count() - 2,
            skipped: vec![skip("b"), skip("a")],
            failed: Vec::new(),
            wrong: Vec::new(),
        };
        let after = |mut tally: SuiteResult, expected: &[&str]| {
            tally.require_skips(expected);
            tally
        };
        assert!(after(good.clone(), &["a", "b"]).is_good());
        let wrong = after(good.clone(), &["a"]);
        assert!(!wrong.is_good());
        assert_eq!(wrong.wrong, ["skipped a, b, and not a"]);
        let short = SuiteResult { cases: 2, passed: 0, ..good };
        assert!(!after(short, &["a", "b"]).is_good());
    }
}
