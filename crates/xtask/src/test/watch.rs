//! Finding tests that take too long, in the output of their program.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// When the test harness reports that a test is still running.
const REPORTED_AFTER: Duration = Duration::from_secs(60);
/// The end of that report, and the beginning of the lines of tests.
const STILL_RUNNING: &str = " has been running for over 60 seconds";
const TEST: &str = "test ";

/// What is known of the running tests of a program.
#[derive(Debug)]
pub(super) struct Watch {
    limit: Duration,
    /// The tests that the harness has reported as running, and when they began.
    slow: HashMap<String, Instant>,
    /// The length of the output, and when it last grew.
    length: usize,
    grown: Instant,
}

impl Watch {
    pub(super) fn new(limit: Duration, now: Instant) -> Self {
        Self { limit, slow: HashMap::new(), length: 0, grown: now }
    }

    /// Looks at the whole output. Returns the name of a test that exceeds the limit.
    ///
    /// With several threads the harness reports a test that runs for a minute. With one thread it
    /// reports none, but names each test before it runs; then the output does not grow.
    pub(super) fn look(&mut self, text: &str, now: Instant) -> Option<String> {
        if text.len() != self.length {
            (self.length, self.grown) = (text.len(), now);
            self.read(text, now);
        }
        let is_over = |began: Instant| now.saturating_duration_since(began) > self.limit;
        if let Some((name, _)) = self.slow.iter().find(|(_, began)| is_over(**began)) {
            return Some(name.clone());
        }
        is_over(self.grown).then(|| unfinished(text).unwrap_or("a test without a name").to_owned())
    }

    fn read(&mut self, text: &str, now: Instant) {
        let mut running = HashMap::new();
        for line in text.lines().filter_map(|line| line.strip_prefix(TEST)) {
            if let Some(name) = line.strip_suffix(STILL_RUNNING) {
                let began = self.slow.get(name).copied();
                let began = began.or_else(|| now.checked_sub(REPORTED_AFTER)).unwrap_or(now);
                running.insert(name.to_owned(), began);
            } else if let Some((name, _)) = line.split_once(" ... ") {
                running.remove(name);
            }
        }
        self.slow = running;
    }
}

/// The test that the last line names without a result.
fn unfinished(text: &str) -> Option<&str> {
    text.lines()
        .rev()
        .find_map(|line| line.strip_prefix(TEST)?.split_once(" ... "))
        .map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(300);

    #[test]
    fn a_test_that_was_reported_and_does_not_end_is_named_at_its_limit() {
        let began = Instant::now();
        let mut watch = Watch::new(LIMIT, began);
        let at = |seconds| began + Duration::from_secs(seconds);
        let report = format!("test a ... ok\ntest b{STILL_RUNNING}\ntest c{STILL_RUNNING}\n");
        assert_eq!(watch.look(&report, at(60)), None);
        let text = report + "test c ... ok\n";
        assert_eq!(watch.look(&text, at(299)), None);
        assert_eq!(watch.look(&text, at(301)), Some("b".into()));
    }

    #[test]
    fn a_program_that_prints_nothing_more_hangs_in_the_test_that_it_named_last() {
        let began = Instant::now();
        let mut watch = Watch::new(LIMIT, began);
        let text = "running 2 tests\ntest a ... ok\ntest b ... ";
        assert_eq!(watch.look(text, began + LIMIT), None);
        assert_eq!(watch.look(text, began + LIMIT * 2), None);
        assert_eq!(watch.look(text, began + LIMIT * 3), Some("b".into()));
    }
}
