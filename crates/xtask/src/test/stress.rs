//! `cargo xtask test --stress ROUNDS`: all test programs many times, in random order, under conditions
//! that change from round to round.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Instant;

use anyhow::bail;

use super::conditions::Condition;
use super::job::{JobOutcome, TestJob};
use super::run_all;
use crate::print_line;

/// How much longer a test may take under load.
const PATIENCE: u32 = 4;

/// The settings of a stress run.
#[derive(Debug)]
pub(super) struct Stress {
    pub(super) rounds: u32,
    pub(super) seed: u64,
    pub(super) conditions: Vec<Condition>,
    pub(super) jobs: Option<usize>,
}

/// A failure of a test: the round, and the command that repeats the program.
struct Failure {
    round: String,
    repeat: String,
}

impl Stress {
    pub(super) fn run(&self, programs: &[TestJob]) -> anyhow::Result<()> {
        let (began, mut random) = (Instant::now(), Random(self.seed));
        let mut failures: BTreeMap<String, Vec<Failure>> = BTreeMap::new();
        let (mut passed, mut failed) = (0, 0);
        for number in 0..self.rounds {
            let condition = self.conditions[number as usize % self.conditions.len()];
            let (chosen, seed) = (1 + random.below(8) as usize, random.below(1 << 30));
            let at_once = self.jobs.unwrap_or(chosen);
            let round = format!(
                "round {} of {}: {condition:?}, {at_once} programs at once, seed {seed}",
                number + 1,
                self.rounds
            );
            print_line(&format!("== {round}"));
            let mut jobs: Vec<TestJob> =
                programs.iter().map(|job| under(job, condition, seed)).collect();
            random.shuffle(&mut jobs);
            let load = condition.begin()?;
            run_all(&jobs, at_once, |job, outcome, line| {
                passed += outcome.counts.passed;
                failed += outcome.counts.failed;
                if outcome.is_good {
                    return;
                }
                print_line(line);
                let repeat = job.repeat_command();
                for test in names(job, outcome) {
                    let failure = Failure { round: round.clone(), repeat: repeat.clone() };
                    failures.entry(test).or_default().push(failure);
                }
                print_line(&format!("{}\nrepeat: {repeat}", outcome.text));
            });
            drop(load);
        }
        print_line(&self.report(&failures));
        let seconds = began.elapsed().as_secs();
        print_line(&format!("{passed} tests passed, {failed} failed, in {seconds} s."));
        if !failures.is_empty() {
            bail!("{} tests did not pass every time, see above", failures.len());
        }
        Ok(())
    }

    /// Each test that failed, with its rate, its rounds and the command that repeats it.
    fn report(&self, failures: &BTreeMap<String, Vec<Failure>>) -> String {
        let mut text = format!("\n{} rounds with seed {}: ", self.rounds, self.seed);
        match failures.len() {
            0 => text += "every test passed every time.",
            count => _ = write!(text, "{count} tests did not pass every time:"),
        }
        for (test, failures) in failures {
            let _ =
                write!(text, "\n{test}: failed in {} of {} rounds", failures.len(), self.rounds);
            for Failure { round, repeat } in failures {
                let _ = write!(text, "\n    {round}\n        {repeat}");
            }
        }
        text
    }
}

/// The failed tests of a program, or the program itself if it named none.
fn names(job: &TestJob, outcome: &JobOutcome) -> Vec<String> {
    match outcome.failed.as_slice() {
        [] => vec![job.name.clone()],
        tests => tests.iter().map(|test| format!("{} {test}", job.name)).collect(),
    }
}

/// A program under a condition, with its tests in an order that depends on the seed.
fn under(job: &TestJob, condition: Condition, seed: u64) -> TestJob {
    let mut job = job.clone();
    let order = ["-Zunstable-options".into(), format!("--shuffle-seed={seed}")];
    // The test harness of a stable compiler takes these options with this variable.
    job.environment.push(("RUSTC_BOOTSTRAP", "1".into()));
    job.words.extend(order.map(Into::into));
    job.words.splice(0..0, condition.wrapper());
    job.test_limit *= PATIENCE;
    job
}

/// A small generator of random numbers, so that a run can be repeated by its seed.
struct Random(u64);

impl Random {
    /// A number below `bound`.
    fn below(&mut self, bound: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % bound
    }

    fn shuffle<T>(&mut self, list: &mut [T]) {
        for last in (1..list.len()).rev() {
            let other = self.below(last as u64 + 1) as usize;
            list.swap(last, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn program(name: &str, script: &str) -> TestJob {
        TestJob {
            name: name.into(),
            words: ["sh", "-c", script].map(Into::into).to_vec(),
            folder: None,
            environment: Vec::new(),
            test_limit: Duration::from_secs(300),
        }
    }

    fn stress(conditions: &[Condition]) -> Stress {
        Stress { rounds: 4, seed: 1, conditions: conditions.to_vec(), jobs: None }
    }

    #[test]
    fn a_test_that_fails_once_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("mark");
        let script = format!(
            "echo 'test result: ok. 1 passed; 0 failed; 0 ignored'; [ -e {0} ] || {{ touch {0}; exit 1; }}",
            mark.display()
        );
        let good = "echo 'test result: ok. 3 passed; 0 failed; 0 ignored'";
        let programs = [program("good", good), program("flaky", &script)];
        let error = stress(&[Condition::Idle]).run(&programs).unwrap_err();
        assert_eq!(error.to_string(), "1 tests did not pass every time, see above");
        stress(&[Condition::Idle, Condition::OneCore]).run(&programs).unwrap();
    }

    #[test]
    fn a_seed_gives_an_order_and_loses_nothing() {
        let shuffled = |seed| {
            let mut list: Vec<u32> = (0..20).collect();
            Random(seed).shuffle(&mut list);
            list
        };
        assert_eq!(shuffled(3), shuffled(3));
        assert_ne!(shuffled(3), shuffled(4));
        let mut sorted = shuffled(5);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..20).collect::<Vec<_>>());
    }

    #[test]
    fn a_round_runs_the_tests_of_a_program_in_an_order_of_its_own() {
        let job = under(&program("p", "x"), Condition::BesideCompiler, 7);
        assert!(
            job.repeat_command().ends_with(
                "RUSTC_BOOTSTRAP=1 nice -n 19 sh -c x -Zunstable-options --shuffle-seed=7"
            )
        );
    }
}
